// Functions over the tensors in the arguments and results of boxed operators.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace emulated {

using Values = std::vector<c10::IValue>;

/// Applies a function to the tensors of a value.
template <class F>
c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      made.push_back(t.has_value() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return made;
  }
  return value;
}

/// The tensors of values, in order.
inline std::vector<at::Tensor> tensors_of(const Values& values) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) found.push_back(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) found.push_back(t);
  }
  return found;
}

inline bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

/// The index of the argument that a result is, or -1 for a new tensor.
inline int argument_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* info = schema.returns()[result].alias_info();
  if (info == nullptr || !info->isWrite()) return -1;
  for (size_t n = 0; n < schema.arguments().size(); ++n) {
    const auto* of_argument = schema.arguments()[n].alias_info();
    if (of_argument != nullptr && of_argument->beforeSet() == info->beforeSet()) return static_cast<int>(n);
  }
  return -1;
}

}  // namespace emulated
