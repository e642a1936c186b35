// The back end for CUDA, which installs the planned allocator in front of PyTorch's caching CUDA allocator.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "allocator_api.h"
#include "delegating_cuda_allocator.h"
#include "side_streams.h"

namespace lightning_memo {

Core& core() {
  static Core* const instance = make_core();
  return *instance;
}

namespace {

// They remain set after uninstalling, because blocks with our deleter may still exist.
torch_cuda::CUDAAllocator* native = nullptr;
c10::DeleterFnPtr native_free = nullptr;

// Only one stream of one device is planned. Requests in private pools and graphs are always delegated to torch.
std::atomic<int> lane_device{-1};
std::atomic<cudaStream_t> lane_stream{nullptr};
std::atomic<int> open_pools{0};

// Torch's allocator ignores `recordStream` of blocks with another deleter than its own. While such blocks exist, the planned
// allocator therefore remains in front of it after uninstalling, and only delegates.
std::atomic<bool> in_use{false};
std::atomic<int64_t> wrapped_blocks{0};

SideStreams& side_streams() {
  static SideStreams* const instance = new SideStreams();
  return *instance;
}

bool in_arena(const void* address) { return core().maybe_planned(address); }

bool free_planned(void* address) {
  if (!in_arena(address)) return false;
  // The events are recorded first, because another thread may use the bytes once the block is free.
  if (const uint64_t size = core().planned_size(address)) side_streams().freed(static_cast<char*>(address), size);
  return core().free_planned(address);
}

// The deleter of all blocks, planned or not, because PyTorch requires one deleter per allocator.
void free_block(void* address) {
  if (address == nullptr) return;
  if (core().mode() == Mode::record) core().log_free(address);
  if (free_planned(address)) return;
  --wrapped_blocks;
  native_free(address);
}

void wrap(c10::DataPtr& block) {
  if (block.get() != nullptr && block.compare_exchange_deleter(native_free, &free_block)) ++wrapped_blocks;
}
c10::DataPtr wrapped(c10::DataPtr block) {
  wrap(block);
  return block;
}

bool lane_is_current() {
  c10::DeviceIndex device = -1;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return open_pools == 0 && device == lane_device &&
         c10::cuda::getCurrentCUDAStream(device).stream() == lane_stream.load();
}

class PlannedCuda final : public DelegatingCudaAllocator {
 public:
  using DelegatingCudaAllocator::DelegatingCudaAllocator;

  c10::DataPtr allocate(size_t size) override {
    const Mode mode = core().mode();
    if (mode == Mode::idle || !core().eligible(size)) return wrapped(native_->allocate(size));
    const bool here = this_lane() == Lane::inside && lane_is_current();
    if (mode == Mode::serve) {
      if (void* address = here ? serve(size) : decline(size)) {
        return {address, address, &free_block, c10::Device(c10::DeviceType::CUDA, static_cast<Device>(lane_device))};
      }
    }
    c10::DataPtr block = wrapped(native_->allocate(size));
    if (mode == Mode::record && open_pools == 0) {
      const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(block.device().index()).stream();
      core().log_malloc(block.get(), size, reinterpret_cast<int64_t>(stream), here);
    }
    return block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return block.get() == block.get_context(); }
  void raw_delete(void* address) override {
    if (core().mode() == Mode::record) core().log_free(address);
    if (!free_planned(address)) native_->raw_delete(address);
  }
  using DelegatingCudaAllocator::recordStream;
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (core().planned_size(block.get()) != 0) {
      if (stream.stream() != lane_stream.load()) side_streams().record(block.get(), stream);
    } else if (block.get_deleter() == &free_block) {
      c10::DataPtr native_block(block.get(), block.get(), native_free, block.device());
      native_->recordStream(native_block, stream);
      native_block.release_context();
    } else {
      native_->recordStream(block, stream);
    }
  }
  void* getBaseAllocation(void* address, size_t* size) override {
    return native_->getBaseAllocation(in_arena(address) ? core().arena_base() : address, size);
  }
  torch_cuda::ShareableHandle shareIpcHandle(void* address) override {
    if (!in_arena(address)) return native_->shareIpcHandle(address);
    torch_cuda::ShareableHandle handle = native_->shareIpcHandle(core().arena_base());
    handle.offset += static_cast<char*>(address) - core().arena_base();
    return handle;
  }
  torch_cuda::CheckpointDelta setCheckpointPoolState(Device device,
                                                     std::shared_ptr<torch_cuda::AllocatorState> state) override {
    torch_cuda::CheckpointDelta delta = native_->setCheckpointPoolState(device, std::move(state));
    for (c10::DataPtr& block : delta.dataptrs_allocd) wrap(block);
    return delta;
  }
  void beginAllocateToPool(Device device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    ++open_pools;
    native_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override {
    native_->endAllocateToPool(device, pool);
    --open_pools;
  }
#if MEMO_TORCH >= 212
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) override {
    return native_->getContextForPointer(in_arena(address) ? core().arena_base() : address);
  }
#endif
#if MEMO_TORCH >= 213
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return wrapped(native_->allocateWithAddress(size, address));
  }
#endif

 private:
  static void* serve(size_t size) {
    auto* const address = static_cast<char*>(core().serve(size));
    if (address == nullptr) return nullptr;
    try {
      side_streams().reused(address, size, lane_stream);
    } catch (...) {
      core().free_planned(address);
      throw;
    }
    return address;
  }
  // A request of a foreign thread, or on another stream.
  static void* decline(size_t size) {
    if (this_lane() != Lane::inside) return core().serve(size);
    core().count_outside();
    return nullptr;
  }
};

// Removes the C++ stack trace from torch's error messages, which does not help users here.
template <class Function>
auto without_trace(Function function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

void find_native() {
  if (native != nullptr) return;
  torch_cuda::CUDAAllocator* const current = torch_cuda::get();
  if (current->raw_deleter() == nullptr) throw std::runtime_error("the CUDA allocator in use can't be wrapped");
  native_free = current->raw_deleter();
  native = current;
}

PlannedCuda& wrapper() {
  static PlannedCuda* const instance = new PlannedCuda(native);
  return *instance;
}

// Torch reads the allocator from two variables: one for its CUDA code, and one for code of any accelerator. The second
// one has a priority, which is not 0 for torch's own allocator.
void put(torch_cuda::CUDAAllocator* allocator) {
  constexpr uint8_t priority = 100;
  torch_cuda::allocator.store(allocator);
  c10::SetAllocator(c10::DeviceType::CUDA, allocator, priority);
}

}  // namespace

namespace backend {

const uint64_t alignment = 512;  // that of torch's own blocks

bool installed() { return in_use && torch_cuda::get() == &wrapper(); }

void install() {
  find_native();
  if (torch_cuda::get() == native) put(&wrapper());
  if (torch_cuda::get() != &wrapper()) throw std::runtime_error("the CUDA allocator has changed since the first install");
  in_use = true;
}

void uninstall() {
  if (native == nullptr) return;
  core().idle();
  in_use = false;
  if (torch_cuda::get() == &wrapper() && wrapped_blocks == 0) put(native);
}

void use_device(int device) {
  const cudaStream_t stream =
      without_trace([=] { return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream(); });
  const bool same = device == lane_device && stream == lane_stream.load();
  // The bytes of a freed block are reused without waiting, which is correct on a single stream only.
  if (!same && !core().release()) {
    throw std::runtime_error("planned blocks of another device or stream are alive: free them first");
  }
  lane_device = device;
  lane_stream = stream;
}

Arena take_arena(uint64_t bytes) {
  find_native();
  const int device = lane_device;
  const cudaStream_t stream = lane_stream;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  auto* const base = static_cast<char*>(without_trace([=] { return native->raw_alloc_with_stream(bytes, stream); }));
  return {base, bytes, [=] {
            side_streams().reused(base, bytes, stream);
            native->raw_delete(base);
          }};
}

}  // namespace backend
}  // namespace lightning_memo
