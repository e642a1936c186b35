// Operators for which the CPU has no kernel of the same name, and copies on the device.
#include <ATen/ops/copy_native.h>

#include "costs.h"
#include "operators.h"

namespace emulated {
namespace {

using at::Tensor;

struct CopiesValues {
  explicit CopiesValues(bool always) { emulated_cuda_copy_values(always); }
  ~CopiesValues() { emulated_cuda_copy_values(false); }
};

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const InOperator in_operator;
  if (!self.is_cuda() || !source.is_cuda()) {
    const CopiesValues copies_values(is_small(self) && is_small(source));
    return at::native::copy_(self, source, non_blocking);
  }
  if (self.is_same(source) || self.numel() == 0) return self;
  TORCH_CHECK(self.device() == source.device(), "emulated CUDA: copies between devices of one process are not emulated");
  enqueue("aten::copy_", traffic({self, source}),
          [to = host_view(self), from = host_view(source)]() mutable { to.copy_(from); }, {self});
  return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const InOperator in_operator;
  const auto bools = input.options().dtype(at::kBool);
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, bools)};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, bools)};
  Tensor out = at::empty_like(input), mask = at::empty_like(input, bools);
  enqueue("aten::native_dropout", traffic({input, out, mask}),
          [p, drawn = draw(std::nullopt, input.numel()), from = host_view(input), to = host_view(out),
           kept = host_view(mask)]() mutable {
    kept.bernoulli_(1 - p, generator_of(drawn));
    to.copy_(from * kept / (1 - p));
  }, {out, mask});
  return {out, mask};
}

/// The last `count` dimensions, and the ones before them.
std::pair<std::vector<int64_t>, std::vector<int64_t>> split_dimensions(const Tensor& t, size_t count) {
  std::vector<int64_t> inner, outer;
  for (int64_t n = 0; n < t.dim(); ++n) (n < t.dim() - static_cast<int64_t>(count) ? outer : inner).push_back(n);
  return {inner, outer};
}

std::tuple<Tensor, Tensor> fused_rms_norm(const Tensor& input, at::IntArrayRef shape, const std::optional<Tensor>& weight,
                                          std::optional<double> eps) {
  const InOperator in_operator;
  const auto inner = split_dimensions(input, shape.size()).first;
  std::vector<int64_t> sizes = input.sizes().vec();
  for (int64_t n : inner) sizes[static_cast<size_t>(n)] = 1;
  const auto type = is_half(input) ? at::kFloat : input.scalar_type();
  const double epsilon = eps.value_or(type == at::kDouble ? 2.220446049250313e-16 : 1.1920928955078125e-07);
  Tensor out = at::empty(input.sizes(), input.options()), rstd = at::empty(sizes, input.options().dtype(type));
  const Cost cost = traffic({input, out});
  enqueue("aten::_fused_rms_norm", cost,
          [=, from = host_view(input), to = host_view(out), r = host_view(rstd), w = host_view(weight)]() mutable {
    Tensor x = from.to(type);
    r.copy_(at::rsqrt(x.pow(2).mean(inner, true) + epsilon));
    to.copy_(w.defined() ? x * r * w.to(type) : x * r);
  }, {rstd});
  return {out, rstd};
}

std::tuple<Tensor, Tensor> fused_rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                                                   const Tensor& rstd, const std::optional<Tensor>& weight,
                                                   std::array<bool, 2> wanted) {
  const InOperator in_operator;
  const auto [inner, outer] = split_dimensions(input, shape.size());
  const bool weighted = weight.has_value() && weight->defined();
  Tensor dx, dw;
  if (wanted[0]) dx = at::empty(input.sizes(), input.options());
  if (wanted[1] && weighted) dw = at::empty(weight->sizes(), weight->options());
  // The gradient of the weight is a kernel of its own, which reads both again.
  const Cost cost = dw.defined() ? traffic({grad, input, dx, grad, input}) : traffic({grad, input, dx});
  enqueue("aten::_fused_rms_norm_backward", cost,
          [inner = inner, outer = outer, g = host_view(grad), from = host_view(input), r = host_view(rstd),
           w = host_view(weight), to = host_view(dx), to_weight = host_view(dw)]() mutable {
    const auto type = r.scalar_type();
    Tensor x = from.to(type) * r, dy = g.to(type);
    if (to_weight.defined()) to_weight.copy_(outer.empty() ? x * dy : (x * dy).sum(outer));
    if (!to.defined()) return;
    if (w.defined()) dy = dy * w.to(type);
    to.copy_((dy - x * (dy * x).mean(inner, true)) * r);
  }, {dw});
  return {dx, dw};
}

}  // namespace

void register_own(torch::Library& library) {
  library.impl("copy_", copy_);
  library.impl("native_dropout", native_dropout);
  library.impl("_fused_rms_norm", fused_rms_norm);
  library.impl("_fused_rms_norm_backward", fused_rms_norm_backward);
}

}  // namespace emulated
