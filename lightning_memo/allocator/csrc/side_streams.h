// Planned blocks that are used by other streams than the arena's.
//
// Such a block may be freed while a side stream still works on it. Its bytes can be reused immediately if the arena's
// stream waits, on the device, until that work has ended.
#pragma once
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace lightning_memo {

class SideStreams {
 public:
  // Notes that a side stream uses a block.
  void record(const void* block, c10::cuda::CUDAStream stream) {
    const std::lock_guard guard(mutex_);
    auto& streams = used_[block];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
    any_ = true;
  }
  // Notes that a block is about to be freed. It is called by deleters, which must not throw.
  void freed(const char* block, uint64_t size) noexcept {
    if (!any_) return;
    const std::lock_guard guard(mutex_);
    const auto found = used_.find(block);
    if (found == used_.end()) return;
    drop_finished();
    for (const auto& stream : found->second) pending_.push_back({block, block + size, mark(stream)});
    used_.erase(found);
    update_any();
  }
  // Makes `stream`, the arena's, wait for work that still uses these bytes, before they are used again.
  void reused(const char* block, uint64_t size, cudaStream_t stream) {
    if (!any_) return;
    const std::lock_guard guard(mutex_);
    for (size_t i = 0; i < pending_.size();) {
      const Pending pending = pending_[i];
      if (pending.end <= block || block + size <= pending.begin) {
        ++i;
        continue;
      }
      C10_CUDA_CHECK(cudaStreamWaitEvent(stream, pending.event, 0));
      // All later work of the arena's stream comes after this, so the event is not needed any more.
      remove(i);
    }
    update_any();
  }

 private:
  struct Pending {
    const char* begin;
    const char* end;
    cudaEvent_t event;
  };
  static cudaEvent_t mark(c10::cuda::CUDAStream stream) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK_WARN(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    C10_CUDA_CHECK_WARN(cudaEventRecord(event, stream.stream()));
    return event;
  }
  void drop_finished() {
    for (size_t i = 0; i < pending_.size();) {
      const cudaError_t state = cudaEventQuery(pending_[i].event);
      if (state == cudaErrorNotReady) {
        (void)cudaGetLastError();  // "not ready" is no error, so a later check must not find it
        ++i;
      } else {
        remove(i);
      }
    }
  }
  void remove(size_t i) {
    C10_CUDA_CHECK_WARN(cudaEventDestroy(pending_[i].event));
    pending_[i] = pending_.back();
    pending_.pop_back();
  }
  void update_any() { any_ = !used_.empty() || !pending_.empty(); }

  std::atomic<bool> any_{false};  // avoids the lock if no side stream uses a block
  std::mutex mutex_;
  std::unordered_map<const void*, std::vector<c10::cuda::CUDAStream>> used_;
  std::vector<Pending> pending_;
};

}  // namespace lightning_memo
