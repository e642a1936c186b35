// Kernels on streams, their errors, and random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "below.h"
#include "operators.h"

namespace emulated {
namespace {

std::mutex mutex;
std::string failure;

struct Kernel {
  const std::string& name;
  std::function<void()> work;
};

void run(void* argument) {
  std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
  try {
    Below below;
    kernel->work();
  } catch (const c10::Error& error) {
    report(kernel->name, error.what_without_backtrace());
  } catch (const std::exception& error) {
    report(kernel->name, error.what());
  }
}

}  // namespace

void report(const std::string& name, const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex);
  std::fprintf(stderr, "emulated CUDA: %s failed: %.600s\n", name.c_str(), what.c_str());
  if (failure.empty()) failure = name + ": " + what;
}

void check_kernels() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    text.swap(failure);
  }
  TORCH_CHECK(text.empty(), "emulated CUDA: a kernel failed: ", text);
}

void enqueue(const std::string& name, const Cost& cost, std::function<void()> work, const std::vector<at::Tensor>& results) {
  static std::set<std::string>* names = new std::set<std::string>;
  std::unique_lock<std::mutex> lock(mutex);
  const std::string& kept = *names->insert(name).first;
  lock.unlock();
  if (emulated_cuda_simulates()) {
    std::vector<std::pair<void*, size_t>> seen;
    for (const at::Tensor& t : results)
      if (t.defined() && t.is_contiguous() && is_small(t)) seen.emplace_back(t.data_ptr(), t.nbytes());
    // Indices that a large copy brought have no values: what they select is left out, too.
    work = [work = cost.is_small ? std::move(work) : std::function<void()>(), seen = std::move(seen)] {
      try {
        if (work) return work();
      } catch (const c10::IndexError&) {
      }
      for (const auto& [data, bytes] : seen) std::memset(data, 0, bytes);
    };
  }
  void* stream = c10::cuda::getCurrentCUDAStream().stream();
  emulated_cuda_launch(stream, run, new Kernel{kept, std::move(work)}, kept.c_str(), cost);
}

at::Tensor host_view(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU);
  void* address = t.numel() == 0 ? nullptr : t.data_ptr();
  at::Tensor view = at::for_blob(address, t.sizes()).strides(t.strides()).options(options).make_tensor();
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}
at::Tensor host_view(const std::optional<at::Tensor>& t) { return t.has_value() ? host_view(*t) : at::Tensor(); }

Draw draw(const std::optional<at::Generator>& generator, int64_t elements) {
  auto* cuda = at::get_generator_or_default<at::CUDAGeneratorImpl>(generator, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(cuda->mutex_);
  // As ATen's calc_execution_policy does on 132 multiprocessors of 2048 threads.
  elements = std::max<int64_t>(elements, 1);
  const int64_t threads = std::min<int64_t>((elements + 255) / 256, 132 * 8) * 256;
  const at::PhiloxCudaState state = cuda->philox_cuda_state(static_cast<uint64_t>((elements - 1) / (threads * 4) + 1) * 4);
  return {state.seed_.val, state.offset_.val};
}

at::Generator generator_of(Draw draw) {
  uint64_t x = draw.first * 0x9E3779B97F4A7C15ull + (draw.second + 1) * 0xBF58476D1CE4E5B9ull;  // as splitmix64
  x ^= x >> 31;
  x *= 0x94D049BB133111EBull;
  x ^= x >> 29;
  return at::detail::createCPUGenerator(x & 0xffffffffu);
}

}  // namespace emulated
