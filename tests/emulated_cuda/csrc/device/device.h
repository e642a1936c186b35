// Shared by the parts of the emulated runtime: settings, counters, devices, memory, streams.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../emulated_cuda.h"

namespace emulated {

// ---- settings and counters

struct Settings {
  int devices;
  std::atomic<size_t> memory_bytes;  // of each device
  std::atomic<long> copy_delay, kernel_delay;  // longest, in microseconds
  long seed;
  bool blocking;  // the host waits for each kernel and copy
  bool simulated;  // time, see simulation.h
  bool poison;
};
Settings& settings();

struct Counters {
  std::atomic<long> launched{0}, copies{0}, host_waits{0}, unknown_kernels{0}, contexts{0};
};
Counters& counters();

__attribute__((format(printf, 1, 2))) void say(const char* format, ...);

/// Remembers an error for `cudaGetLastError`, with a message if there is one to add.
cudaError_t fail(cudaError_t error, std::string message = {});

// ---- devices

/// The current device of this thread.
int current_device();
/// The same, which now has a context of this process.
int use_device();

// ---- memory

constexpr size_t page_bytes = size_t{2} << 20;

size_t rounded(size_t size, size_t to);

enum class Where { device, pinned, pageable };

/// Memory of all devices and locked memory of the host, by address.
class Memory {
 public:
  std::recursive_mutex mutex;
  std::map<uintptr_t, size_t> pinned;
  std::set<uintptr_t> own_pinned;  // allocated here, not registered

  /// Counts memory of the host as locked; false if there is not so much.
  bool pin(uintptr_t begin, size_t size);
  void unpin(uintptr_t begin);
  size_t pinned_bytes = 0, pinned_peak = 0;

  bool fits(int device, size_t size) const;
  size_t used_bytes(int device) const;
  /// Counts memory of a device as used (or free: a negative number).
  void use(int device, long long size);
  /// Reserves addresses that nothing may touch yet. No address is ever reserved twice, so that what touches freed memory faults.
  char* reserve(size_t size);
  bool open(void* address, size_t size, int device);
  void close(void* address, size_t size);
  /// The device of an address and the size of the allocation that begins there.
  struct Allocation {
    size_t size;
    int device;
  };
  const Allocation* allocation_at(const void* address) const;
  Where where(const void* address, int* device = nullptr) const;
  /// Whether a range begins in memory that was locked as a whole, and ends behind it.
  bool crosses_lock(const void* address, size_t size) const;

 private:
  std::map<uintptr_t, Allocation> open_;
  std::vector<long long> used_;
  char* next_ = nullptr;
  size_t left_ = 0;
};
Memory& memory();
using MemoryLock = std::lock_guard<std::recursive_mutex>;

// ---- streams and events

/// The point of a stream at which an event was recorded.
struct Moment {
  std::atomic<int> done{0};
  std::chrono::steady_clock::time_point time;
  double simulated_time = 0;
  int stream = -1;
  void end();
  void wait() { done.wait(0); }
};

struct Event {
  unsigned flags = 0;
  std::mutex mutex;
  std::shared_ptr<Moment> moment;
  std::shared_ptr<Moment> get();
};

enum class Work { kernel, copy, other };

/// A stream in simulated time.
struct Timeline {
  double end = 0;    // of its last operation
  double ready = 0;  // when the next one may begin: after the last one, and after what the stream waits for
  int waits_for = -1;
  std::deque<double> queued;  // ends of the last operations
};

/// A queue of work with a thread of its own. In simulated time, tasks run when they are added.
class Stream {
 public:
  Stream(int number, int device, int priority) : number(number), device(device), priority(priority) {}
  const int number, device, priority;

  void add(Work work, std::function<void()> task);
  bool idle();
  void wait();

  Timeline timeline;

 private:
  struct Task {
    Work work;
    std::function<void()> run;
  };
  void run();
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Task> tasks_;
  uint64_t given_ = 0, done_ = 0;
  bool started_ = false;
};

Stream* make_stream(int device, int priority);
/// The stream of a handle; null is the current device's default stream.
Stream* stream_of(cudaStream_t handle);
/// Waits for all streams of all devices.
void wait_for_streams();

/// Counts a call during which the host waits, and records it while calls are recorded.
class HostWait {
 public:
  explicit HostWait(uint32_t callback_id);
  ~HostWait();

 private:
  uint32_t callback_id_;
  uint64_t start_ = 0;
};

}  // namespace emulated
