// The back end for CPUs, which installs the planned allocator in front of PyTorch's CPU allocator.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <sys/mman.h>

#include <system_error>

#include "allocator_api.h"

namespace lightning_memo {

Core& core() {
  static Core* const instance = make_core();
  return *instance;
}

namespace {

// They remain set after uninstalling, because blocks with our deleter may still exist.
c10::Allocator* native = nullptr;
c10::DeleterFnPtr native_free = nullptr;

// The deleter of all blocks, planned or not, because PyTorch requires one deleter per allocator.
void free_block(void* address) {
  if (address == nullptr) return;
  Core& planned = core();
  if (planned.mode() == Mode::record) planned.log_free(address);
  // The profiler gets the report before the bytes are free, so that a report of the next block can't come first.
  if (planned.maybe_planned(address) && c10::memoryProfilingEnabled() && planned.planned_size(address) != 0) {
    c10::profiledCPUMemoryReporter().Delete(address);
  }
  if (!planned.free_planned(address)) native_free(address);
}

class PlannedCpu final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    Core& planned = core();
    const Mode mode = planned.mode();
    if (mode == Mode::serve && planned.eligible(size)) {
      if (void* address = planned.serve(size)) {
        if (c10::memoryProfilingEnabled()) c10::profiledCPUMemoryReporter().New(address, size);
        return {address, address, &free_block, c10::Device(c10::DeviceType::CPU)};
      }
    }
    c10::DataPtr block = native->allocate(size);
    (void)block.compare_exchange_deleter(native_free, &free_block);
    if (mode == Mode::record && planned.eligible(size)) planned.log_malloc(block.get(), size, 0, true);
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return block.get() == block.get_context(); }
  void copy_data(void* to, const void* from, size_t size) const override { native->copy_data(to, from, size); }
};

PlannedCpu& wrapper() {
  static PlannedCpu* const instance = new PlannedCpu();
  return *instance;
}

constexpr size_t huge_page_bytes = size_t{2} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

namespace backend {

const uint64_t alignment = 64;  // that of c10, for vector instructions

bool installed() { return c10::GetCPUAllocator() == &wrapper(); }

void install() {
  if (installed()) return;
  c10::Allocator* const current = c10::GetCPUAllocator();
  const c10::DeleterFnPtr deleter = current->raw_deleter();
  if (deleter == nullptr) throw std::runtime_error("the CPU allocator in use can't be wrapped");
  if (native_free != nullptr && deleter != native_free) {
    throw std::runtime_error("the CPU allocator has changed since the first install");
  }
  native = current;
  native_free = deleter;
  c10::SetCPUAllocator(&wrapper());
  if (!installed()) throw std::runtime_error("a CPU allocator of higher priority is in use");
}

void uninstall() {
  if (native == nullptr) return;
  core().idle();
  if (!installed()) return;
  c10::SetCPUAllocator(native);
}

void use_device(int) {}

Arena take_arena(uint64_t bytes) {
#ifdef __GLIBC__
  malloc_trim(0);  // what unplanned steps have freed would stay in the process in addition to the arena
#endif
  // The arena begins at a huge page, so that the kernel can use huge pages for all of it.
  const size_t mapped = round_up(bytes, huge_page_bytes) + huge_page_bytes;
  void* const mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "no memory for an arena of " + std::to_string(bytes) + " bytes");
  }
  madvise(mapping, mapped, MADV_HUGEPAGE);  // an error is ignored: without huge pages the arena is only slower
  auto* const base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(mapping), huge_page_bytes));
  return {base, bytes, [=] { munmap(mapping, mapped); }};
}

}  // namespace backend
}  // namespace lightning_memo
