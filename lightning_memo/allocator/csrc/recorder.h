// Records the requests of a step as a list of events.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace lightning_memo {

enum class EventKind : int32_t { malloc = 0, free = 1 };

// Python reads it as a numpy record; lightning_memo/allocator/planned_allocator.py has the same fields.
struct Event {
  int32_t kind;
  int32_t phase;     // -1 outside of all phases
  int32_t sequence;  // malloc: number within the phase, -1 if not plannable; free: number of plannable mallocs before
  int32_t thread;
  int64_t id;
  int64_t size;
  int64_t stream;
  int64_t ns;
};
static_assert(sizeof(Event) == 48);

inline int32_t thread_number() {
  static std::atomic<int32_t> next{0};
  thread_local const int32_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

class Recorder {
 public:
  void clear() {
    events_.clear();
    alive_.clear();
  }
  void malloc(const void* address, int64_t size, int64_t stream, int32_t phase, int32_t sequence) {
    const int64_t id = next_id_++;
    alive_[address] = {id, size};
    push(EventKind::malloc, phase, sequence, {id, size}, stream);
  }
  // Frees of blocks that were allocated before the recording are not recorded, because their malloc is unknown.
  void free(const void* address, int32_t phase, int32_t sequence) {
    const auto found = alive_.find(address);
    if (found == alive_.end()) return;
    push(EventKind::free, phase, sequence, found->second, 0);
    alive_.erase(found);
  }
  int64_t count() const { return static_cast<int64_t>(events_.size()); }
  // Moves the oldest events to `out` and returns their number.
  int64_t take(Event* out, int64_t capacity) {
    const int64_t taken = std::min(capacity, count());
    std::copy_n(events_.begin(), taken, out);
    events_.erase(events_.begin(), events_.begin() + taken);
    return taken;
  }

 private:
  struct Block {
    int64_t id;
    int64_t size;
  };
  void push(EventKind kind, int32_t phase, int32_t sequence, Block block, int64_t stream) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    events_.push_back(
        {static_cast<int32_t>(kind), phase, sequence, thread_number(), block.id, block.size, stream, ns});
  }
  std::vector<Event> events_;
  std::unordered_map<const void*, Block> alive_;
  int64_t next_id_ = 0;
};

}  // namespace lightning_memo
