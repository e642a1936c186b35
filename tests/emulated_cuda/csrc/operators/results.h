// The results of an operator before it has run, as they are needed on a device that runs later than the host.
#pragma once
#include <optional>

#include "values.h"

namespace emulated {

struct Results {
  Values values;
  /// Where the kernel writes, as CPU tensors; undefined for arguments, which the kernel changes in place.
  std::vector<at::Tensor> targets;
};

/// Allocates the results of a call. `nothing` if their sizes are only known from values; `error` says why.
std::optional<Results> results_ahead(const c10::OperatorHandle& op, const Values& arguments, std::string* error);

}  // namespace emulated
