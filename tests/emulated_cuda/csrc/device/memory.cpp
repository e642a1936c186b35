// Device memory, which is the host's, and locked memory of the host.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "simulation.h"

namespace emulated {

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

size_t Memory::used_bytes(int device) const {
  return static_cast<size_t>(device) < used_.size() ? static_cast<size_t>(used_[static_cast<size_t>(device)]) : 0;
}
bool Memory::fits(int device, size_t size) const {
  const size_t total = settings().memory_bytes, used = used_bytes(device);
  return used <= total && size <= total - used;
}
void Memory::use(int device, long long size) {
  used_.resize(static_cast<size_t>(settings().devices));
  used_[static_cast<size_t>(device)] += size;
}

bool Memory::pin(uintptr_t begin, size_t size) {
  if (settings().simulated) {
    Inside inside;
    if (machine().ranks * static_cast<double>(pinned_bytes + size) > machine().host_bytes) return false;
    spend_host_time(static_cast<double>(size) / machine().lock);
  }
  pinned[begin] = size;
  pinned_bytes += size;
  pinned_peak = std::max(pinned_peak, pinned_bytes);
  return true;
}
void Memory::unpin(uintptr_t begin) {
  pinned_bytes -= pinned[begin];
  pinned.erase(begin);
}

char* Memory::reserve(size_t size) {
  if (next_ == nullptr) {
    left_ = size_t{32} << 40;
    void* base = mmap(nullptr, left_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    next_ = reinterpret_cast<char*>(rounded(reinterpret_cast<uintptr_t>(base), page_bytes));
    left_ -= page_bytes;
  }
  const size_t taken = rounded(size, page_bytes) + page_bytes;  // with a page behind it that faults
  if (taken > left_) return nullptr;
  char* address = next_;
  next_ += taken;
  left_ -= taken;
  return address;
}

bool Memory::open(void* address, size_t size, int device) {
  if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0) return false;
  if (settings().poison) std::memset(address, 0xFF, size);
  open_[reinterpret_cast<uintptr_t>(address)] = {size, device};
  return true;
}
void Memory::close(void* address, size_t size) {
  mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  open_.erase(open_.lower_bound(begin), open_.lower_bound(begin + size));
}

const Memory::Allocation* Memory::allocation_at(const void* address) const {
  const auto found = open_.find(reinterpret_cast<uintptr_t>(address));
  return found == open_.end() ? nullptr : &found->second;
}

bool Memory::crosses_lock(const void* address, size_t size) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto after = pinned.upper_bound(begin);
  if (after == pinned.begin()) return false;
  const auto [start, locked] = *std::prev(after);
  return begin < start + locked && begin + size > start + locked;
}

Where Memory::where(const void* address, int* device) const {
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (auto after = open_.upper_bound(number); after != open_.begin()) {
    --after;
    if (number < after->first + after->second.size) {
      if (device != nullptr) *device = after->second.device;
      return Where::device;
    }
  }
  if (auto after = pinned.upper_bound(number); after != pinned.begin()) {
    --after;
    if (number < after->first + after->second) return Where::pinned;
  }
  return Where::pageable;
}

}  // namespace emulated

using namespace emulated;

extern "C" {

long emulated_cuda_pinned_bytes() { return static_cast<long>(memory().pinned_bytes); }
long emulated_cuda_pinned_peak() { return static_cast<long>(memory().pinned_peak); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  MemoryLock lock(memory().mutex);
  const size_t used = memory().used_bytes(use_device());
  *total = settings().memory_bytes;
  *free = used < *total ? *total - used : 0;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t size) {
  MemoryLock lock(memory().mutex);
  *address = nullptr;
  if (size == 0) return cudaSuccess;
  const int device = use_device();
  const size_t taken = rounded(size, page_bytes);
  if (!memory().fits(device, taken)) return fail(cudaErrorMemoryAllocation);
  if (settings().simulated) {
    Inside inside;
    spend_host_time(machine().allocate);
  }
  char* begin = memory().reserve(taken);
  if (begin == nullptr || !memory().open(begin, taken, device)) return fail(cudaErrorMemoryAllocation);
  memory().use(device, static_cast<long long>(taken));
  *address = begin;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  ++counters().host_waits;
  wait_for_streams();
  MemoryLock lock(memory().mutex);
  const Memory::Allocation* found = memory().allocation_at(address);
  if (found == nullptr) return fail(cudaErrorInvalidValue);
  memory().use(found->device, -static_cast<long long>(found->size));
  memory().close(address, found->size);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  use_device();
  MemoryLock lock(memory().mutex);
  size = rounded(std::max<size_t>(size, 1), 4096);
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (!memory().pin(reinterpret_cast<uintptr_t>(pages), size)) return munmap(pages, size), fail(cudaErrorMemoryAllocation);
  memory().own_pinned.insert(reinterpret_cast<uintptr_t>(pages));
  *address = pages;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) return cudaSuccess;
  wait_for_streams();
  MemoryLock lock(memory().mutex);
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (memory().own_pinned.erase(number) == 0) return fail(cudaErrorInvalidValue);
  munmap(address, memory().pinned[number]);
  memory().unpin(number);
  return cudaSuccess;
}
namespace {
cudaError_t lock_pages(void* address, size_t size) {
  MemoryLock lock(memory().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (size == 0 || address == nullptr) return fail(cudaErrorInvalidValue);
  const auto after = memory().pinned.lower_bound(begin);
  const bool overlaps = after != memory().pinned.end() && after->first < begin + size;
  if (overlaps || memory().where(address) == Where::pinned) return fail(cudaErrorHostMemoryAlreadyRegistered);
  return memory().pin(begin, size) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
}  // namespace
cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  use_device();
  const cudaError_t error = lock_pages(address, size);
  if (settings().simulated) keep_pace();
  return error;
}
cudaError_t cudaHostUnregister(void* address) {
  wait_for_streams();
  MemoryLock lock(memory().mutex);
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (memory().own_pinned.count(number) != 0 || memory().pinned.count(number) == 0)
    return fail(cudaErrorHostMemoryNotRegistered);
  return memory().unpin(number), cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  MemoryLock lock(memory().mutex);
  std::memset(attributes, 0, sizeof *attributes);
  void* const pointer = const_cast<void*>(address);
  switch (memory().where(address, &attributes->device)) {
    case Where::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = pointer;
      break;
    case Where::pinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = pointer;
      break;
    case Where::pageable:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = -2;
      attributes->hostPointer = pointer;
      break;
  }
  return cudaSuccess;
}

// Memory pools exist, but nothing is allocated from them.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  return *pool = reinterpret_cast<cudaMemPool_t>(8), cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
}
