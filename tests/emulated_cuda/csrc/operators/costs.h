// What operators cost in simulated time, and which are small enough to be computed there: ids, positions, lengths, masks and
// all that the host decides by.
#pragma once
#include <initializer_list>

#include "../emulated_cuda.h"
#include "values.h"

namespace emulated {

constexpr double small_flops = 5e7;

struct Cost : EmulatedCost {
  bool is_small = true;
};

bool is_small(const at::Tensor& t);
/// Bytes of the elements that differ: not those of an expanded dimension.
double bytes_of(const at::Tensor& t);
/// Of an operator that is bound by memory, and reads or writes each tensor once.
Cost traffic(std::initializer_list<at::Tensor> tensors);
Cost cost_of(const c10::OperatorHandle& op, const Values& arguments, const std::vector<at::Tensor>& results);

}  // namespace emulated
