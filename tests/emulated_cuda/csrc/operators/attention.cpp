// The attention operators that only CUDA has, with the layouts, limits and results of their kernels.
#include <torch/version.h>

#include <cmath>
#include <tuple>

#include "attention_math.h"

namespace emulated {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<c10::SymInt>;

double scale_of(const Tensor& q, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(-1))));
}
Tensor heads_first(const Tensor& t) { return t.defined() ? t.transpose(1, 2) : t; }
Tensor heads_first_view(const Tensor& t) { return heads_first(host_view(t)); }

/// Random numbers for the weights, if there is dropout.
Draw weights_drawn(double dropout, int64_t elements) {
  return dropout > 0 ? draw(std::nullopt, elements) : Draw{0, 0};
}

// ---- flash: [batch, tokens, heads, head_dim]; masks are aligned at the last query and the last key

/// As mha_fwd, mha_varlen_fwd and set_params_fprop of FlashAttention 2 do.
Window flash_window(int64_t queries, int64_t keys, bool causal, const OptionalInt& left, const OptionalInt& right) {
  const auto number = [](const OptionalInt& n) { return n.has_value() ? n->expect_int() : int64_t{-1}; };
  Window w{number(left), number(right), keys - queries};
  if (causal && queries > 1) w.right = 0;
  if (w.left >= keys) w.left = -1;
  if (w.right >= keys) w.right = -1;
  if (w.left < 0 && w.right >= 0) w.left = keys;
  if (w.left >= 0 && w.right < 0) w.right = keys;
  return w;
}

void check_flash(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(is_half(q), "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "query and key must have the same dtype");
  TORCH_CHECK(q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1, "Input tensor must have contiguous last dimension");
  TORCH_CHECK(q.size(-1) % 8 == 0 && q.size(-1) <= 256, "head_size should be a multiple of 8 and at most 256");
  TORCH_CHECK(q.size(-2) % k.size(-2) == 0, "Number of heads in key/value must divide number of heads in query");
}

Attention flash_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, const OptionalInt& left,
                          const OptionalInt& right, std::optional<double> scale, double dropout) {
  check_flash(q, k, v);
  return {heads_first_view(q), heads_first_view(k), heads_first_view(v), Tensor(),
          flash_window(q.size(1), k.size(1), causal, left, right), scale_of(q, scale), dropout};
}

// ---- flash of variable lengths: [tokens, heads, head_dim], and the documents follow each other

/// The queries and the keys of a document in the tensors of all.
struct Document {
  int64_t query, queries, key, keys;
  Tensor queries_of(const Tensor& t) const { return t.narrow(2, query, queries); }
  Tensor keys_of(const Tensor& t) const { return t.narrow(2, key, keys); }
};

struct Documents {
  Attention all;  // of batch 1
  Tensor starts_q, starts_k;
  Window longest;

  Documents(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& begin_q, const Tensor& begin_k, int64_t max_q,
            int64_t max_k, bool causal, const OptionalInt& left, const OptionalInt& right, std::optional<double> scale, double dropout)
      : all{row(q), row(k), row(v), Tensor(), {}, scale_of(q, scale), dropout},
        starts_q(host_view(begin_q)), starts_k(host_view(begin_k)), longest(flash_window(max_q, max_k, causal, left, right)) {
    check_flash(q, k, v);
    TORCH_CHECK(q.dim() == 3, "flash attention of variable lengths takes [tokens, heads, head_dim]");
    for (const Tensor& t : {begin_q, begin_k}) {
      TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.scalar_type() == at::kInt, "cu_seqlens must be contiguous int32 on CUDA");
    }
    TORCH_CHECK(dropout == 0, "emulated CUDA: dropout of variable lengths is not emulated");
  }
  static Tensor row(const Tensor& t) { return heads_first(host_view(t).unsqueeze(0)); }

  /// Calls a function with the attention of each document. The starts must have been computed.
  template <class F>
  void each(const F& f) const {
    const auto *q = starts_q.data_ptr<int>(), *k = starts_k.data_ptr<int>();
    for (int64_t n = 0; n + 1 < starts_q.numel(); ++n) {
      const Document d{q[n], q[n + 1] - q[n], k[n], k[n + 1] - k[n]};
      Attention a = all;
      a.q = d.queries_of(all.q), a.k = d.keys_of(all.k), a.v = d.keys_of(all.v), a.window = longest;
      a.window.shift = d.keys - d.queries;
      f(a, d);
    }
  }

  /// In simulated time, small copies are done when they are called.
  Cost cost(EmulatedKind kind) const {
    Cost cost = traffic({all.q, all.k, all.v, all.q});
    cost.kind = kind;
    if (emulated_cuda_simulates()) each([&](const Attention& a, const Document&) { cost.flops += cost_of(a, kind).flops; });
    cost.is_small = cost.is_small && cost.flops <= small_flops;
    return cost;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> documents_forward(const Tensor& q, const Documents& documents) {
  Tensor out = at::empty_like(q), lse = at::empty({q.size(1), q.size(0)}, q.options().dtype(at::kFloat));
  enqueue("aten::_flash_attention_forward", documents.cost(emulated_flash_forward), [=, to = Documents::row(out), sums = host_view(lse).unsqueeze(0)] {
    documents.each([&](const Attention& a, const Document& d) { attention_forward(a, d.queries_of(to), d.queries_of(sums)); });
  });
  const auto state = q.options().dtype(at::kUInt64);
  return {out, lse, at::empty({2}, state), at::empty({}, state), at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> documents_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                      const Tensor& out, const Tensor& lse, const Documents& documents) {
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  enqueue("aten::_flash_attention_backward", documents.cost(emulated_flash_backward),
          [=, to_q = Documents::row(dq), to_k = Documents::row(dk), to_v = Documents::row(dv), g = Documents::row(dout),
           o = Documents::row(out), sums = host_view(lse).unsqueeze(0)] {
            documents.each([&](const Attention& a, const Document& d) {
              attention_backward(a, d.queries_of(g), d.queries_of(o), d.queries_of(sums), d.queries_of(to_q), d.keys_of(to_k),
                                 d.keys_of(to_v), Tensor());
            });
          });
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts_q, const OptionalTensor& starts_k,
    c10::SymInt max_q, c10::SymInt max_k, double dropout, bool causal, bool, std::optional<double> scale, OptionalInt left,
    OptionalInt right, const OptionalTensor& used, const OptionalTensor& alibi
#if TORCH_VERSION_MINOR >= 12
    , const OptionalTensor& table, std::optional<int64_t>
#endif
) {
  const InOperator in_operator;
  TORCH_CHECK(!used.has_value() && !alibi.has_value(), "emulated CUDA: flash attention with ALiBi is not emulated");
#if TORCH_VERSION_MINOR >= 12
  TORCH_CHECK(!table.has_value(), "emulated CUDA: flash attention with pages is not emulated");
#endif
  if (starts_q.has_value()) {
    return documents_forward(q, {q, k, v, *starts_q, *starts_k, max_q.expect_int(), max_k.expect_int(), causal, left, right, scale, dropout});
  }
  Attention a = flash_attention(q, k, v, causal, left, right, scale, dropout);
  Tensor out = at::empty_like(q), lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat));
  Tensor state = at::empty({2}, q.options().dtype(at::kUInt64)), unused = at::empty({}, q.options().dtype(at::kUInt64));
  a.drawn = weights_drawn(dropout, q.size(0) * q.size(2) * 32);
  enqueue("aten::_flash_attention_forward", cost_of(a, emulated_flash_forward), [=, to = heads_first_view(out), sums = host_view(lse), kept = host_view(state)] {
    static_cast<uint64_t*>(kept.data_ptr())[0] = a.drawn.first;
    static_cast<uint64_t*>(kept.data_ptr())[1] = a.drawn.second;
    attention_forward(a, to, sums);
  });
  return {out, lse, state, unused, at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor& starts_q, const Tensor& starts_k, c10::SymInt max_q, c10::SymInt max_k, double dropout, bool causal,
    const Tensor& state, const Tensor&, std::optional<double> scale, OptionalInt left, OptionalInt right) {
  const InOperator in_operator;
  TORCH_CHECK(out.stride(-1) == 1, "out tensor must have contiguous last dimension");
  TORCH_CHECK(lse.is_contiguous() && lse.scalar_type() == at::kFloat, "softmax_lse must be contiguous and fp32");
  if (starts_q.defined()) {
    return documents_backward(dout, q, k, v, out, lse,
                              {q, k, v, starts_q, starts_k, max_q.expect_int(), max_k.expect_int(), causal, left, right, scale, dropout});
  }
  TORCH_CHECK(dropout == 0 || state.numel() == 2, "emulated CUDA: the random state of flash attention has 2 elements");
  Attention a = flash_attention(q, k, v, causal, left, right, scale, dropout);
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  enqueue("aten::_flash_attention_backward", cost_of(a, emulated_flash_backward),
          [=, to_q = heads_first_view(dq), to_k = heads_first_view(dk), to_v = heads_first_view(dv), g = heads_first_view(dout),
           o = heads_first_view(out), sums = host_view(lse), kept = host_view(state)]() mutable {
            if (a.dropout > 0) a.drawn = {static_cast<uint64_t*>(kept.data_ptr())[0], static_cast<uint64_t*>(kept.data_ptr())[1]};
            attention_backward(a, g, o, sums, to_q, to_k, to_v, Tensor());
          });
  return {dq, dk, dv};
}

// ---- memory-efficient: [batch, tokens, heads, head_dim]; masks: 0 none, 1 causal from the first query and key on, 2 causal up
// to the last ones

Attention efficient_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, int64_t mask,
                              std::optional<double> scale, double dropout) {
  Window w;
  if (mask != 0) w = {-1, 0, mask == 2 ? k.size(1) - q.size(1) : 0};
  return {heads_first_view(q), heads_first_view(k), heads_first_view(v), host_view(bias), w, scale_of(q, scale), dropout};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, const OptionalTensor& starts_q,
    const OptionalTensor&, OptionalInt, OptionalInt, double dropout, int64_t mask, bool with_lse, std::optional<double> scale,
    const OptionalTensor& lengths, std::optional<int64_t> window) {
  const InOperator in_operator;
  TORCH_CHECK(!starts_q.has_value() && !lengths.has_value() && !window.has_value(),
              "emulated CUDA: memory-efficient attention of variable lengths or with windows is not emulated");
  Attention a = efficient_attention(q, k, v, bias, mask, scale, dropout);
  Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const int64_t padded = with_lse ? (q.size(1) + 31) / 32 * 32 : 0;
  Tensor lse = at::empty({q.size(0), q.size(2), padded}, q.options().dtype(at::kFloat));
  a.drawn = weights_drawn(dropout, q.size(0) * q.size(2) * q.size(1) * k.size(1));
  enqueue("aten::_efficient_attention_forward", cost_of(a, emulated_efficient_forward), [=, to = heads_first_view(out), sums = host_view(lse)] {
    if (sums.numel() != 0) sums.fill_(std::numeric_limits<double>::infinity());
    attention_forward(a, to, sums);
  });
  const auto scalar = [](uint64_t n) { return at::scalar_tensor(static_cast<int64_t>(n), at::dtype(at::kLong)); };
  return {out, lse, scalar(a.drawn.first), scalar(a.drawn.second), q.size(1), k.size(1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, const Tensor& out,
    const OptionalTensor& starts_q, const OptionalTensor&, c10::SymInt, c10::SymInt, const Tensor& lse, double dropout,
    const Tensor& seed, const Tensor& offset, int64_t mask, bool with_bias, std::optional<double> scale, std::optional<int64_t>,
    std::optional<int64_t> window, bool) {
  const InOperator in_operator;
  TORCH_CHECK(!starts_q.has_value() && !window.has_value(),
              "emulated CUDA: memory-efficient attention of variable lengths or with windows is not emulated");
  Attention a = efficient_attention(q, k, v, bias, mask, scale, dropout);
  if (dropout > 0) a.drawn = {seed.item<int64_t>(), offset.item<int64_t>()};
  Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options()), dv = at::empty(v.sizes(), v.options()), dbias;
  if (with_bias && bias.has_value()) dbias = at::empty({q.size(0), q.size(2), q.size(1), k.size(1)}, bias->options());
  enqueue("aten::_efficient_attention_backward", cost_of(a, emulated_efficient_backward),
          [=, to_q = heads_first_view(dq), to_k = heads_first_view(dk), to_v = heads_first_view(dv), to_bias = host_view(dbias),
           g = heads_first_view(dout), o = heads_first_view(out),
           sums = host_view(lse)] { attention_backward(a, g, o, sums, to_q, to_k, to_v, to_bias); });
  return {dq, dk, dv, dbias};
}

// ---- cuDNN: [batch, heads, tokens, head_dim]; causal from the first query and key on

Attention cudnn_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, bool causal,
                          std::optional<double> scale, double dropout) {
  return {host_view(q), host_view(k), host_view(v), host_view(bias), causal ? Window{-1, 0, 0} : Window{}, scale_of(q, scale), dropout};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias, const OptionalTensor& starts_q,
    const OptionalTensor&, c10::SymInt, c10::SymInt, bool, double dropout, bool causal, bool, std::optional<double> scale
#if TORCH_VERSION_MINOR >= 14
    , const OptionalTensor&, const OptionalTensor&
#endif
) {
  const InOperator in_operator;
  TORCH_CHECK(!starts_q.has_value(), "emulated CUDA: cuDNN attention of variable lengths is not emulated");
  Attention a = cudnn_attention(q, k, v, bias, causal, scale, dropout);
  Tensor out = q.transpose(1, 2).is_contiguous()
                   ? at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2)
                   : at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  Tensor lse = at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
  Tensor seed = at::empty({}, q.options().dtype(at::kLong)), offset = at::empty({}, q.options().dtype(at::kLong));
  a.drawn = weights_drawn(dropout, q.size(0) * q.size(1) * q.size(2) * k.size(2));
  enqueue("aten::_cudnn_attention_forward", cost_of(a, emulated_cudnn_forward),
          [=, to = host_view(out), sums = host_view(lse), kept_seed = host_view(seed), kept_offset = host_view(offset)] {
            *kept_seed.data_ptr<int64_t>() = static_cast<int64_t>(a.drawn.first);
            *kept_offset.data_ptr<int64_t>() = static_cast<int64_t>(a.drawn.second);
            attention_forward(a, to, sums.squeeze(-1));
          });
  return {out, lse, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor& seed,
    const Tensor& offset, const Tensor& bias, const Tensor& starts_q, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool causal, std::optional<double> scale) {
  const InOperator in_operator;
  TORCH_CHECK(!starts_q.defined(), "emulated CUDA: cuDNN attention of variable lengths is not emulated");
  TORCH_CHECK(lse.dim() == 4, "emulated CUDA: the log-sum-exp of cuDNN is [batch, heads, queries, 1]");
  Attention a = cudnn_attention(q, k, v, bias, causal, scale, dropout);
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  enqueue("aten::_cudnn_attention_backward", cost_of(a, emulated_cudnn_backward),
          [=, to_q = host_view(dq), to_k = host_view(dk), to_v = host_view(dv), g = host_view(dout), o = host_view(out),
           sums = host_view(lse), s = host_view(seed), f = host_view(offset)]() mutable {
            if (a.dropout > 0) a.drawn = {*s.data_ptr<int64_t>(), *f.data_ptr<int64_t>()};
            attention_backward(a, g, o, sums.squeeze(-1), to_q, to_k, to_v, Tensor());
          });
  return {dq, dk, dv};
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_flash_attention_forward", flash_forward);
  library.impl("_flash_attention_backward", flash_backward);
  library.impl("_efficient_attention_forward", efficient_forward);
  library.impl("_efficient_attention_backward", efficient_backward);
  library.impl("_cudnn_attention_forward", cudnn_forward);
  library.impl("_cudnn_attention_backward", cudnn_backward);
}

}  // namespace emulated
