// The memory of the stub device. Addresses increase and are never reused. Pages that are never written take no host
// memory, so a replay can allocate many times the memory of the host.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace device_memory {

constexpr size_t page_bytes = size_t{2} << 20;
constexpr size_t address_bytes = size_t{64} << 40;

inline size_t total_bytes = size_t{1} << 30;
inline size_t used_bytes = 0;

inline bool fits(size_t size) { return size <= total_bytes - used_bytes; }

inline void* take_addresses(size_t size) {
  static char* next = [] {
    void* const base = mmap(nullptr, address_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return static_cast<char*>(nullptr);
    return static_cast<char*>(base) + (page_bytes - reinterpret_cast<uintptr_t>(base) % page_bytes);
  }();
  static size_t left = address_bytes - page_bytes;
  size = (size + page_bytes - 1) / page_bytes * page_bytes;
  if (next == nullptr || size > left) return nullptr;
  left -= size;
  next += size;
  return next - size;
}

inline void forget(void* address, size_t size) { madvise(address, size, MADV_DONTNEED); }

// Returns a function of the driver by its name, or null if the stub does not have it.
void* driver_function(const char* name);

}  // namespace device_memory
