// Freed device memory is filled with 0xFF, which is NaN, and must still be so when it is allocated again: a kernel or copy
// that runs too late reads NaN, or is found to have written.
//
// Only an allocation on the stream of a freed block can use its memory again, after what that stream then waits for. So
// it is filled at the next allocation on that stream. Until then other streams may use it: FSDP2 relies on that.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

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

using Entry = c10::CachingDeviceAllocator::TraceEntry;

/// Freed blocks that are not filled yet, by device and stream.
struct Freed {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, void*>, std::vector<Block>> blocks;
};
Freed& freed() {
  static Freed* f = new Freed;
  return *f;
}

void launch(const Entry& entry, void (*run)(void*), const Block& block) {
  emulated_cuda_launch(entry.stream_, run, new Block(block), "", {});
}

void allocate(const Entry& entry, const Block& block) {
  const c10::DeviceIndex before = c10::cuda::current_device();
  if (before != entry.device_) c10::cuda::set_device(entry.device_);  // the default stream is the current device's
  auto& waiting = freed().blocks[{entry.device_, entry.stream_}];
  for (const Block& each : waiting) launch(entry, fill, each);
  waiting.clear();
  launch(entry, check, block);
  if (before != entry.device_) c10::cuda::set_device(before);
}

/// Forgets memory that goes back to the device. Expandable segments give back pages, also from the middle of a block.
void forget(const Block& segment) {
  char* const end = segment.address + segment.size;
  for (auto& [stream, blocks] : freed().blocks) {
    std::vector<Block> kept;
    for (const Block& each : blocks) {
      char* const each_end = each.address + each.size;
      if (char* const before = std::min(each_end, segment.address); before > each.address)
        kept.push_back({each.address, static_cast<size_t>(before - each.address)});
      if (char* const after = std::max(each.address, end); after < each_end)
        kept.push_back({after, static_cast<size_t>(each_end - after)});
    }
    blocks = std::move(kept);
  }
}

void watch(const Entry& entry) {
  const Block block{reinterpret_cast<char*>(entry.addr_), entry.size_};
  std::lock_guard<std::mutex> lock(freed().mutex);
  switch (entry.action_) {
    case Entry::ALLOC: return allocate(entry, block);
    case Entry::FREE_COMPLETED: return freed().blocks[{entry.device_, entry.stream_}].push_back(block);
    case Entry::SEGMENT_FREE:
    case Entry::SEGMENT_UNMAP: return forget(block);
    default: return;
  }
}

}  // namespace

void watch_allocations() {
  c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(watch);
}

}  // namespace emulated
