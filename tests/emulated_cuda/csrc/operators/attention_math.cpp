#include "attention_math.h"

#include <algorithm>
#include <limits>

namespace emulated {
namespace {

using at::Tensor;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr int64_t rows_at_once = 256;

/// Some queries, and the keys that any of them sees.
struct Rows {
  int64_t first, last, low, high;
  Rows(const Attention& a, int64_t begin) : first(begin), last(std::min(begin + rows_at_once, a.q.size(2))), low(0), high(a.k.size(2)) {
    const Window& w = a.window;
    if (w.left >= 0) low = std::clamp<int64_t>(first + w.shift - w.left, 0, high);
    if (w.right >= 0) high = std::clamp<int64_t>(last + w.shift + w.right, low, high);
  }
  bool empty() const { return low >= high; }
  Tensor queries_of(const Tensor& t) const { return t.slice(2, first, last); }
  Tensor keys_of(const Tensor& t) const { return t.slice(2, low, high); }
};

at::ScalarType type_of(const Attention& a) { return a.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

/// Keys or values of each query head.
Tensor repeated(const Tensor& t, const Attention& a) {
  Tensor converted = t.to(type_of(a));
  return a.groups() == 1 ? converted : converted.repeat_interleave(a.groups(), 1);
}

/// Scores [batch, heads, rows, keys], minus infinity where nothing is seen.
Tensor scores(const Attention& a, const Rows& r, const Tensor& q, const Tensor& k) {
  Tensor s = at::matmul(q, k.transpose(-1, -2)).mul_(a.scale);
  if (a.bias.defined()) s.add_(r.queries_of(a.bias).slice(3, r.low, r.high).to(s.scalar_type()));
  const Window& w = a.window;
  if (w.left < 0 && w.right < 0) return s;
  Tensor i = at::arange(r.first, r.last).unsqueeze(1).add(w.shift), j = at::arange(r.low, r.high).unsqueeze(0);
  Tensor hidden = at::zeros({r.last - r.first, r.high - r.low}, at::kBool);
  if (w.left >= 0) hidden.logical_or_(j < i - w.left);
  if (w.right >= 0) hidden.logical_or_(j > i + w.right);
  return s.masked_fill_(hidden, -infinity);
}

Tensor dropout_mask(const Attention& a, const Tensor& like, at::Generator& generator) {
  return at::empty_like(like).bernoulli_(1 - a.dropout, generator).div_(1 - a.dropout);
}

}  // namespace

double Attention::pairs() const {
  const int64_t queries = q.size(2), keys = k.size(2);
  double seen = 0;
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t first = window.left < 0 ? 0 : std::max<int64_t>(0, i + window.shift - window.left);
    const int64_t last = window.right < 0 ? keys - 1 : std::min<int64_t>(keys - 1, i + window.shift + window.right);
    seen += static_cast<double>(std::max<int64_t>(0, last - first + 1));
  }
  return seen;
}

Cost cost_of(const Attention& a, EmulatedKind kind) {
  const bool forward = kind == emulated_flash_forward || kind == emulated_cudnn_forward || kind == emulated_efficient_forward;
  const double heads = static_cast<double>(a.q.size(0) * a.q.size(1)), width = static_cast<double>(a.q.size(3) + a.v.size(3)) / 2;
  Cost cost = traffic({a.q, a.k, a.v, a.q});
  cost.kind = kind;
  cost.flops = (forward ? 4 : 10) * a.pairs() * heads * width;
  cost.is_small = cost.is_small && cost.flops <= small_flops;
  return cost;
}

void attention_forward(const Attention& a, Tensor out, Tensor lse) {
  at::Generator generator = generator_of(a.drawn);
  const Tensor k = repeated(a.k, a), v = repeated(a.v, a);
  for (int64_t begin = 0; begin < a.q.size(2); begin += rows_at_once) {
    const Rows r(a, begin);
    Tensor to = r.queries_of(out), to_lse = lse.defined() && lse.numel() != 0 ? r.queries_of(lse) : Tensor();
    if (r.empty()) {
      to.zero_();
      if (to_lse.defined()) to_lse.fill_(infinity);
      continue;
    }
    const Tensor s = scores(a, r, r.queries_of(a.q).to(type_of(a)), r.keys_of(k)), sums = at::logsumexp(s, {-1});
    Tensor weights = at::exp(s - sums.unsqueeze(-1)).nan_to_num_(0.0);
    if (a.dropout > 0) weights.mul_(dropout_mask(a, weights, generator));
    to.copy_(at::matmul(weights, r.keys_of(v)));
    if (to_lse.defined()) to_lse.copy_(sums.masked_fill(sums == -infinity, infinity));
  }
}

void attention_backward(const Attention& a, const Tensor& dout, const Tensor& out, const Tensor& lse, Tensor dq, Tensor dk,
                        Tensor dv, Tensor dbias) {
  at::Generator generator = generator_of(a.drawn);
  const auto type = type_of(a);
  const Tensor k = repeated(a.k, a), v = repeated(a.v, a);
  Tensor sum_k = at::zeros_like(k), sum_v = at::zeros_like(v);
  if (dbias.defined()) dbias.zero_();
  for (int64_t begin = 0; begin < a.q.size(2); begin += rows_at_once) {
    const Rows r(a, begin);
    if (r.empty()) {
      r.queries_of(dq).zero_();
      continue;
    }
    const Tensor q = r.queries_of(a.q).to(type), g = r.queries_of(dout).to(type), keys = r.keys_of(k);
    const Tensor weights = at::exp(scores(a, r, q, keys) - r.queries_of(lse).to(type).unsqueeze(-1));
    Tensor dweights = at::matmul(g, r.keys_of(v).transpose(-1, -2)), dropped = weights;
    if (a.dropout > 0) {
      const Tensor mask = dropout_mask(a, weights, generator);
      dweights.mul_(mask);
      dropped = weights * mask;
    }
    const Tensor ds = weights * (dweights - (g * r.queries_of(out).to(type)).sum(-1, true));
    if (dbias.defined()) r.queries_of(dbias).slice(3, r.low, r.high).copy_(ds);
    r.queries_of(dq).copy_(at::matmul(ds, keys).mul_(a.scale));
    r.keys_of(sum_k).add_(at::matmul(ds.transpose(-1, -2), q).mul_(a.scale));
    r.keys_of(sum_v).add_(at::matmul(dropped.transpose(-1, -2), g));
  }
  const auto summed = [&](const Tensor& t) {  // over the query heads of each head
    return a.groups() == 1 ? t : t.reshape({t.size(0), -1, a.groups(), t.size(2), t.size(3)}).sum(2);
  };
  dk.copy_(summed(sum_k));
  dv.copy_(summed(sum_v));
}

}  // namespace emulated
