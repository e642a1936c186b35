// Shared by the emulated operators.
#pragma once
#include <ATen/ATen.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "costs.h"

namespace emulated {

/// A CPU tensor at the address of a device tensor. Like a kernel's argument, it keeps nothing alive.
at::Tensor host_view(const at::Tensor& t);
at::Tensor host_view(const std::optional<at::Tensor>& t);

/// Runs `work` on the current stream, below autograd. In simulated time, work that is not small is left out, as is work
/// whose indices are out of range: it makes those `results` zero at which the host may look.
void enqueue(const std::string& name, const Cost& cost, std::function<void()> work, const std::vector<at::Tensor>& results = {});

/// Raises what a kernel raised.
void check_kernels();
/// What every operator begins with.
struct InOperator {
  InOperator() {
    check_kernels();
    emulated_cuda_enter();
  }
  ~InOperator() { emulated_cuda_leave(); }
  InOperator(const InOperator&) = delete;
};
/// Makes the next operator raise.
void report(const std::string& name, const std::string& what);

/// A position in the sequence of random numbers of a CUDA generator (none: the default one).
using Draw = std::pair<uint64_t, uint64_t>;
/// Returns the generator's position, and advances it as for `elements` random numbers.
Draw draw(const std::optional<at::Generator>& generator, int64_t elements);
/// A CPU generator for a draw.
at::Generator generator_of(Draw draw);

inline bool is_half(const at::Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16);
}

void register_boxed(torch::Library& library);
void register_own(torch::Library& library);
void register_attention(torch::Library& library);
void watch_allocations();

}  // namespace emulated
