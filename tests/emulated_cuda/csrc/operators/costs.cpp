#include "costs.h"

#include <ATen/Context.h>

#include <algorithm>
#include <set>

namespace emulated {
namespace {

EmulatedKind product_kind(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf: case at::kBFloat16: return emulated_gemm_half;
    case at::kDouble: return emulated_gemm_fp64;
    case at::kFloat: return at::globalContext().allowTF32CuBLAS() ? emulated_gemm_tf32 : emulated_gemm_fp32;
    default: return emulated_gemm_fp8;
  }
}

/// [.., m, k] by [.., k, n]. With experts, `a` is [m, k] and each of its rows meets one matrix of `b`.
void add_product(Cost& cost, const at::Tensor& a, const at::Tensor& b) {
  cost.kind = product_kind(a);
  cost.flops = 2 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
  cost.is_small = cost.is_small && cost.flops <= small_flops;
}

double total(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  for (const at::Tensor& t : tensors) bytes += bytes_of(t);
  return bytes;
}

bool is_one_of(const std::string& name, const std::set<std::string>& names) { return names.count(name) != 0; }

/// Bytes that are read and written, where these are not simply those of the arguments and the results.
double bytes_moved(const std::string& name, const Values& arguments, const std::vector<at::Tensor>& given, double written) {
  if (is_one_of(name, {"aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_"}))
    return written;
  if (is_one_of(name, {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})) return 2 * written;
  if (name == "aten::embedding_dense_backward") return bytes_of(given.front()) + 2 * written;
  if (is_one_of(name, {"aten::index_put_", "aten::_index_put_impl_", "aten::index_add_", "aten::scatter_", "aten::scatter_add_"}))
    return 3 * bytes_of(given.back());
  if (name.rfind("aten::_fused_adam", 0) == 0) return 1.75 * total(given);  // of 4 tensors 3 are written
  if (name.rfind("aten::_foreach", 0) == 0 && name.back() == '_') return total(given) + total(tensors_of({arguments[0]}));
  return total(given) + written;
}

}  // namespace

double bytes_of(const at::Tensor& t) {
  if (!t.defined() || t.numel() == 0) return 0;
  auto bytes = static_cast<double>(t.element_size());
  for (int64_t n = 0; n < t.dim(); ++n)
    if (t.stride(n) != 0) bytes *= static_cast<double>(t.size(n));
  return bytes;
}

bool is_small(const at::Tensor& t) {
  constexpr size_t largest_data = size_t{256} << 10, largest_indices = size_t{32} << 20;  // bytes are data of any type
  const bool indices = t.defined() && isIntegralType(t.scalar_type(), /*includeBool=*/true) && t.scalar_type() != at::kByte;
  return !t.defined() || t.nbytes() <= (indices ? largest_indices : largest_data);
}

Cost traffic(std::initializer_list<at::Tensor> tensors) {
  Cost cost;
  for (const at::Tensor& t : tensors) {
    cost.bytes += bytes_of(t);
    cost.is_small = cost.is_small && is_small(t);
  }
  return cost;
}

Cost cost_of(const c10::OperatorHandle& op, const Values& arguments, const std::vector<at::Tensor>& results) {
  std::vector<at::Tensor> given = tensors_of(arguments);
  for (size_t n = 0; n < op.schema().arguments().size(); ++n)  // written, and not read
    if (op.schema().arguments()[n].is_out() && arguments[n].isTensor())
      given.erase(std::find_if(given.begin(), given.end(), [&](const at::Tensor& t) { return t.is_same(arguments[n].toTensor()); }));
  for (const c10::IValue& value : arguments)
    if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorVector())
        if (t.has_value()) given.push_back(*t);
  Cost cost;
  const auto small = [](const std::vector<at::Tensor>& tensors) { return std::all_of(tensors.begin(), tensors.end(), is_small); };
  cost.is_small = small(given) && small(results);
  const std::string& name = op.operator_name().name;
  cost.bytes = given.empty() ? total(results) : bytes_moved(name, arguments, given, total(results));
  if (is_one_of(name, {"aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm"}))
    add_product(cost, arguments[0].toTensor(), arguments[1].toTensor());
  else if (is_one_of(name, {"aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::_addmm_activation"}))
    add_product(cost, arguments[1].toTensor(), arguments[2].toTensor());
  return cost;
}

}  // namespace emulated
