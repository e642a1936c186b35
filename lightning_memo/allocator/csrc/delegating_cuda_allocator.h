// A CUDA allocator that delegates every call to another one.
//
// The list of virtual functions differs between versions of torch. A function that is missing here would silently get
// the base class's default. Each version is therefore reviewed before it is allowed, and
// tests/allocator/test_allocator_cuda.py compares the virtual tables.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/headeronly/version.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define MEMO_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if MEMO_TORCH < 211 || MEMO_TORCH > 215
#error "lightning_memo's planned allocator supports torch 2.11 to 2.15: install one of these, or set plan_memory=False"
#endif

namespace lightning_memo {

namespace torch_cuda = c10::cuda::CUDACachingAllocator;

class DelegatingCudaAllocator : public torch_cuda::CUDAAllocator {
 public:
  using Device = c10::DeviceIndex;
  using Pool = c10::MempoolId_t;
  using CudaAllocator = torch_cuda::CUDAAllocator;

  explicit DelegatingCudaAllocator(CudaAllocator* native) : native_(native) {}

  // c10::Allocator
  c10::DataPtr allocate(size_t size) override { return native_->allocate(size); }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override { return native_->is_simple_data_ptr(block); }
  c10::DeleterFnPtr raw_deleter() const override { return native_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override { native_->copy_data(to, from, size); }

  // c10::DeviceAllocator
  bool initialized() override { return native_->initialized(); }
  void emptyCache(Pool pool) override { native_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& block, c10::Stream stream) override {
    recordStream(block, c10::cuda::CUDAStream(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Device device) override {
    return native_->getDeviceStats(device);
  }
  void resetAccumulatedStats(Device device) override { native_->resetAccumulatedStats(device); }
  void resetPeakStats(Device device) override { native_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(Device device) override { return native_->getMemoryInfo(device); }

  // CUDAAllocator: memory
  void* raw_alloc(size_t size) override { return native_->raw_alloc(size); }
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return native_->raw_alloc_with_stream(size, stream);
  }
  void raw_delete(void* address) override { native_->raw_delete(address); }
  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    native_->recordStream(block, stream);
  }
  void* getBaseAllocation(void* address, size_t* size) override { return native_->getBaseAllocation(address, size); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t size, cudaStream_t stream,
                          bool peer_to_peer) override {
    return native_->memcpyAsync(to, to_device, from, from_device, size, stream, peer_to_peer);
  }
  void enablePeerAccess(Device device, Device other) override { native_->enablePeerAccess(device, other); }
  torch_cuda::ShareableHandle shareIpcHandle(void* address) override { return native_->shareIpcHandle(address); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return native_->getIpcDevPtr(std::move(handle)); }
#if MEMO_TORCH >= 213
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return native_->allocateWithAddress(size, address);
  }
#endif

  // CUDAAllocator: settings and statistics
  std::string name() override { return native_->name(); }  // "native", which some of torch's code expects
  void init(int devices) override { native_->init(devices); }
  void enable(bool value) override { native_->enable(value); }
  bool isEnabled() const override { return native_->isEnabled(); }
  double getMemoryFraction(Device device) override { return native_->getMemoryFraction(device); }
  void setMemoryFraction(double fraction, Device device) override { native_->setMemoryFraction(fraction, device); }
  void cacheInfo(Device device, size_t* largest) override { native_->cacheInfo(device, largest); }
  std::vector<torch_cuda::StreamSegmentSize> getExpandableSegmentSizes(Device device) override {
    return native_->getExpandableSegmentSizes(device);
  }

  // CUDAAllocator: memory pools and graphs
  void beginAllocateToPool(Device device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    native_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(Device device, Pool pool) override { native_->endAllocateToPool(device, pool); }
  void releasePool(Device device, Pool pool) override { native_->releasePool(device, pool); }
  int getPoolUseCount(Device device, Pool pool) override { return native_->getPoolUseCount(device, pool); }
  void createOrIncrefPool(Device device, Pool pool, std::shared_ptr<CudaAllocator> allocator) override {
    native_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(Device device, Pool pool, bool use) override { native_->setUseOnOOM(device, pool, use); }
  void setNoSplit(Device device, Pool pool) override { native_->setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(Device device, Pool pool, const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<torch_cuda::AllocatorState> getCheckpointState(Device device, Pool pool) override {
    return native_->getCheckpointState(device, pool);
  }
  torch_cuda::CheckpointDelta setCheckpointPoolState(Device device,
                                                     std::shared_ptr<torch_cuda::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }
#if MEMO_TORCH >= 213
  void markCaptureBegin(Device device) override { native_->markCaptureBegin(device); }
  void markCaptureEnd(Device device) override { native_->markCaptureEnd(device); }
#endif

  // CUDAAllocator: history and observers
  torch_cuda::SnapshotInfo snapshot(Pool pool, bool traces) override { return native_->snapshot(pool, traces); }
  bool isHistoryEnabled() override { return native_->isHistoryEnabled(); }
  void recordHistory(bool enabled, torch_cuda::CreateContextFn context, size_t entries, torch_cuda::RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    native_->recordHistory(enabled, context, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& data) override {
    native_->recordAnnotation(data);
  }
  void pushCompileContext(std::string& data) override { native_->pushCompileContext(data); }
  void popCompileContext() override { native_->popCompileContext(); }
  void setUserMetadata(const std::string& data) override { native_->setUserMetadata(data); }
  std::string getUserMetadata() override { return native_->getUserMetadata(); }
  void attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(torch_cuda::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }
#if MEMO_TORCH >= 212
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* address) override {
    return native_->getContextForPointer(address);
  }
  void attachOomRejectionObserver(torch_cuda::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if MEMO_TORCH >= 214
  bool supportsUserMetadata() override { return native_->supportsUserMetadata(); }
  void annotateMemory(const void* address, const std::string& data) override { native_->annotateMemory(address, data); }
#endif

 protected:
  CudaAllocator* native_;
};

}  // namespace lightning_memo
