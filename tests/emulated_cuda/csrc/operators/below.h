// A kernel sees no autograd, no autocast and no Python modes of the thread.
#pragma once
#include <ATen/ATen.h>
#include <ATen/record_function.h>

namespace emulated {

struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard modes{c10::autocast_dispatch_keyset | c10::python_ks};
  at::DisableRecordFunctionGuard record;
};

}  // namespace emulated
