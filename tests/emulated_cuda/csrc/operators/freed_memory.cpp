// Freed device memory is filled with 0xFF, which is NaN, in the order of its stream, and must still be so when it is
// allocated again: a kernel or copy that runs too late reads NaN, or is found to have written.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "operators.h"

namespace emulated {
namespace {

struct Block {
  char* address;
  size_t size;
};

void fill(void* argument) {
  std::unique_ptr<Block> block(static_cast<Block*>(argument));
  std::memset(block->address, 0xFF, block->size);
}

void check(void* argument) {
  std::unique_ptr<Block> block(static_cast<Block*>(argument));
  const auto* bytes = reinterpret_cast<const unsigned char*>(block->address);
  if (block->size == 0 || (bytes[0] == 0xFF && std::memcmp(bytes, bytes + 1, block->size - 1) == 0)) return;
  const auto* changed = std::find_if(bytes, bytes + block->size, [](unsigned char b) { return b != 0xFF; });
  report("allocation", "byte " + std::to_string(changed - bytes) + " of " + std::to_string(block->size) +
                           " was written after its memory had been freed");
}

void watch(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  if (entry.action_ != Entry::ALLOC && entry.action_ != Entry::FREE_COMPLETED) return;
  auto* block = new Block{reinterpret_cast<char*>(entry.addr_), entry.size_};
  const c10::DeviceIndex before = c10::cuda::current_device();
  if (before != entry.device_) c10::cuda::set_device(entry.device_);  // the default stream is the current device's
  emulated_cuda_launch(entry.stream_, entry.action_ == Entry::ALLOC ? check : fill, block, "", {});
  if (before != entry.device_) c10::cuda::set_device(before);
}

}  // namespace

void watch_allocations() {
  c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(watch);
}

}  // namespace emulated
