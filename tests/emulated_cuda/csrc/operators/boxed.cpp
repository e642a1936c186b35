// ATen's CUDA operators, computed by ATen's CPU kernels on the emulated device's memory, in the order of its streams.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "below.h"
#include "operators.h"
#include "results.h"

namespace emulated {
namespace {

std::mutex mutex;
std::map<std::string, long> inline_operators;  // those that made the host wait although a GPU would not

at::Tensor for_kernel(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (t.is_cuda()) return host_view(t);
  if (t.is_meta()) return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  at::Tensor made = t.clone();  // numbers of the host travel with the launch
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

/// Whether CUDA keeps the statistics of half-precision inputs in FP32, and the CPU does not.
bool has_fp32_statistics(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {"aten::native_layer_norm", "aten::native_layer_norm_backward",
                                              "aten::native_group_norm", "aten::native_group_norm_backward"};
  return names.count(op.operator_name().name) != 0;
}

/// Calls the operator on CPU tensors: in FP32, if the CPU has no such kernel for the data type.
void call_on_cpu(const c10::OperatorHandle& op, Values& values) {
  const Values before = values;
  if (!has_fp32_statistics(op)) {
    try {
      op.callBoxed(values);
      return;
    } catch (const c10::Error& error) {
      if (std::strstr(error.what(), "not implemented for") == nullptr) throw;
    }
    values = before;
  }
  const bool counts = op.operator_name().name == "aten::histc";  // of integers, too
  for (c10::IValue& value : values)
    value = mapped(value, [=](const at::Tensor& t) {
      return is_half(t) || (counts && t.defined() && !t.is_floating_point()) ? t.to(at::kFloat) : t;
    });
  op.callBoxed(values);
  for (size_t n = 0; n < before.size(); ++n) {  // what was changed in place is a copy
    const auto* info = op.schema().arguments()[n].alias_info();
    if (info == nullptr || !info->isWrite() || !before[n].isTensor() || !is_half(before[n].toTensor())) continue;
    TORCH_CHECK(values.size() == 1 && values[0].isTensor(), "half precision in place");
    before[n].toTensor().copy_(values[0].toTensor());
  }
}

/// The arguments of the CPU kernel. `drawn` gets the position of the random numbers, and `generator` the argument for it.
Values cpu_arguments(const c10::OperatorHandle& op, const Values& arguments, int64_t elements, Draw* drawn, int* generator) {
  Below below;
  Values made;
  for (size_t n = 0; n < arguments.size(); ++n) {
    made.push_back(mapped(arguments[n], for_kernel));
    if (arguments[n].isDevice()) made[n] = c10::IValue(c10::Device(at::kCPU));
    if (!is_generator(op.schema().arguments()[n])) continue;
    *drawn = draw(arguments[n].isNone() ? std::nullopt : std::optional<at::Generator>(arguments[n].toGenerator()), elements);
    *generator = static_cast<int>(n);
  }
  TORCH_CHECK(*generator >= 0 || !op.hasTag(at::Tag::nondeterministic_seeded), "emulated CUDA: ", op.operator_name(),
              " draws random numbers and is not emulated");
  return made;
}

/// In simulated time, large tensors have no values.
bool has_values(const Values& arguments) {
  const auto given = tensors_of(arguments);
  return std::all_of(given.begin(), given.end(), [](const at::Tensor& t) { return !t.defined() || t.nbytes() <= size_t{64} << 20; });
}
Values without_values(const c10::OperatorHandle& op, const Values& arguments) {
  TORCH_CHECK(op.operator_name().name == "aten::equal", "simulated time: ", op.operator_name(), " needs the values of large tensors");
  enqueue("aten::equal", cost_of(op, arguments, {}), [] {});
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream());
  return {true};
}

/// Waits for the stream, computes on the host, and puts the results where a kernel would.
Values run_now(const c10::OperatorHandle& op, const Values& arguments) {
  if (emulated_cuda_simulates() && !has_values(arguments)) return without_values(op, arguments);
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  emulated_cuda_wait(stream);
  check_kernels();
  const auto given = tensors_of(arguments);
  Draw drawn;
  int generator = -1;
  Values called = cpu_arguments(op, arguments, given.empty() ? 1 : given[0].numel(), &drawn, &generator);
  if (generator >= 0) called[static_cast<size_t>(generator)] = generator_of(drawn);
  {
    Below below;
    call_on_cpu(op, called);
  }
  Values results;
  for (size_t n = 0; n < called.size(); ++n) {
    const int argument = argument_of(op.schema(), n);
    if (argument >= 0) {  // which may have been resized
      const c10::IValue& value = arguments[static_cast<size_t>(argument)];
      if (value.isTensor()) {
        at::Tensor target = value.toTensor(), result = called[n].toTensor();
        if (target.sizes() != result.sizes()) target.resize_(result.sizes());
        emulated_cuda_wait(stream);
        if (result.numel() != 0 && target.data_ptr() != result.data_ptr()) host_view(target).copy_(result);
      }
      results.push_back(value);
      continue;
    }
    results.push_back(mapped(called[n], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      at::Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCUDA, c10::cuda::current_device()));
      emulated_cuda_wait(stream);  // the memory is looked at when it is allocated
      Below below;
      if (made.numel() != 0) host_view(made).copy_(t);
      return made;
    }));
  }
  return results;
}

/// Whether a GPU, too, has to wait for values before the sizes of the results are known.
bool needs_values(const c10::OperatorHandle& op, const Values& arguments) {
  const std::string& name = op.operator_name().name;
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    for (const auto& t : arguments[1].toOptionalTensorVector())
      if (t.has_value() && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
        return name == "aten::index";
    return false;
  }
  if (name == "aten::_grouped_mm") return arguments[0].toTensor().scalar_type() != at::kBFloat16;
  if (name == "aten::repeat_interleave") return arguments.size() < 2 || arguments[1].isNone();
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

void copy_results(const Values& found, const std::vector<at::Tensor>& targets, const std::string& name) {
  const auto results = tensors_of(found);
  TORCH_CHECK(results.size() == targets.size(), name, ": ", results.size(), " results for ", targets.size());
  for (size_t n = 0; n < results.size(); ++n) {
    if (!targets[n].defined() || !results[n].defined()) continue;
    TORCH_CHECK(targets[n].numel() == results[n].numel(), name, ": result ", n, " of the CPU has sizes ", results[n].sizes(),
                " and not ", targets[n].sizes());
    targets[n].copy_(results[n].reshape(targets[n].sizes()));
  }
}

/// Operators that take tensors of the host beside those of the device: indices, lengths, and what is copied.
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                              "aten::_pack_padded_sequence", "aten::_foreach_copy_"};
  return names.count(name) != 0;
}

/// Refuses tensors of different devices, as PyTorch's operators do; numbers of the host are no such tensors.
void check_devices(const c10::OperatorHandle& op, const Values& arguments) {
  if (takes_host_tensors(op.operator_name().name)) return;
  std::optional<c10::Device> common;
  for (const at::Tensor& t : tensors_of(arguments))
    if (t.defined() && t.is_cuda() && !common.has_value()) common = t.device();
  if (!common.has_value()) return;
  for (size_t n = 0; n < arguments.size(); ++n)
    for (const at::Tensor& t : tensors_of({arguments[n]}))
      TORCH_CHECK(!t.defined() || t.device() == *common || t.is_meta() || (t.is_cpu() && t.dim() == 0),
                  "Expected all tensors to be on the same device, but got ", op.schema().arguments()[n].name(), " is on ",
                  t.device(), ", different from other tensors on ", *common, " (", op.operator_name(), ")");
}

void boxed(const c10::OperatorHandle& op, Values* stack) {
  const InOperator in_operator;
  const auto first = stack->end() - static_cast<long>(op.schema().arguments().size());
  const Values arguments(first, stack->end());
  stack->erase(first, stack->end());
  const auto give = [stack](const Values& values) { stack->insert(stack->end(), values.begin(), values.end()); };

  check_devices(op, arguments);
  if (needs_values(op, arguments)) {
    c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream());  // counted as a wait, as on a GPU
    return give(run_now(op, arguments));
  }
  const std::string name = c10::toString(op.operator_name());
  std::string error;
  std::optional<Results> results = results_ahead(op, arguments, &error);
  if (!results.has_value()) {
    // Either the arguments are refused, which the CPU's kernel says as well, or nobody knows the sizes ahead.
    const Values values = run_now(op, arguments);
    std::lock_guard<std::mutex> lock(mutex);
    if (inline_operators[name]++ == 0)
      std::fprintf(stderr, "emulated CUDA: %s makes the host wait: %.200s\n", name.c_str(), error.c_str());
    return give(values);
  }
  give(results->values);
  const auto made = tensors_of(results->values);
  Cost cost;
  if (emulated_cuda_simulates()) cost = cost_of(op, arguments, made);
  Draw drawn;
  int generator = -1;
  Values called = cpu_arguments(op, arguments, made.empty() ? 1 : made[0].numel(), &drawn, &generator);
  const auto& targets = results->targets;
  enqueue(name, cost, [op, name, called = std::move(called), targets, drawn, generator]() mutable {
    if (generator >= 0) called[static_cast<size_t>(generator)] = generator_of(drawn);
    call_on_cpu(op, called);
    if (!targets.empty()) copy_results(called, targets, name);
  }, targets);
}

/// Operators that only allocate, make views, or call other operators; and those that have an implementation of their own.
bool is_left(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {
      "aten::empty", "aten::empty_strided", "aten::as_strided", "aten::view", "aten::view_as_real", "aten::view_as_complex",
      "aten::_reshape_alias", "aten::unfold", "aten::resize_", "aten::set_", "aten::record_stream", "aten::_local_scalar_dense",
      "aten::_efficientzerotensor", "aten::is_set_to", "aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention",
      "aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_efficient_attention",
      "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention",
      "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_nested_view_from_buffer", "aten::_pin_memory",
      "aten::is_pinned", "aten::_to_sparse",
      "aten::copy_", "aten::native_dropout", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward",
      "aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::_efficient_attention_forward",
      "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward",
  };
  if (op.operator_name().name.rfind("aten::", 0) != 0 || names.count(op.operator_name().name) != 0) return true;
  for (const auto& result : op.schema().returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

torch::Library* library = nullptr;

/// Replacing operators is what this library is for; PyTorch warns of it.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void register_boxed(torch::Library& library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    if (op.has_value() && !is_left(*op))
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
  // Whose parts on CUDA, kernels of ATen and cuDNN, have no operators of the same name on a CPU.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

}  // namespace emulated

extern "C" {

/// Replaces the CUDA operators of this process.
void emulated_cuda_install() {
  using namespace emulated;
  if (library != nullptr) return;
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  register_boxed(*library);
  register_own(*library);
  register_attention(*library);
  if (emulated_cuda_poisons()) watch_allocations();
}

/// Operators that made the host wait although a GPU would not, one per line.
const char* emulated_cuda_inline_operators() {
  static std::string text;
  std::lock_guard<std::mutex> lock(emulated::mutex);
  text.clear();
  for (const auto& [name, count] : emulated::inline_operators) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
}
