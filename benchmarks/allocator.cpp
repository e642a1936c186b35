// Times requests to the CPU allocator that is in use, without Python in between.
#include <c10/core/CPUAllocator.h>

#include <chrono>
#include <cstdint>
#include <vector>

// Frees the oldest of `live` blocks and allocates a new one, `phases` times `slots` times. Returns nanoseconds for one
// such pair. `mark` is called at the begin of each phase unless it is null.
extern "C" __attribute__((visibility("default"))) double time_requests(int64_t phases, int64_t slots, int64_t live,
                                                                       int64_t size_bytes, void (*mark)(int32_t)) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  std::vector<c10::DataPtr> blocks(static_cast<size_t>(live));
  const auto start = std::chrono::steady_clock::now();
  for (int64_t phase = 0; phase < phases; ++phase) {
    if (mark != nullptr) mark(0);
    for (int64_t slot = 0; slot < slots; ++slot) {
      c10::DataPtr& block = blocks[static_cast<size_t>(slot % live)];
      block.clear();
      block = allocator.allocate(static_cast<size_t>(size_bytes));
    }
  }
  const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(phases * slots);
}
