// Sums and other reductions of the ranks' contributions, in the order of the ranks.
#pragma once
#include <cstddef>
#include <vector>

namespace emulated {

/// `sum` to `average` have NCCL's numbers.
enum Reduction { sum, product, maximum, minimum, average };

/// The size of a value of NCCL's data type.
size_t value_bytes(int type);
bool is_integer(int type);

/// Writes the reduction of the contributions to `out`, each of `count` values, multiplied by `factor` first.
/// Returns whether the data type can be reduced.
bool reduce(const std::vector<const char*>& contributions, char* out, size_t count, int type, int reduction, double factor);

}  // namespace emulated
