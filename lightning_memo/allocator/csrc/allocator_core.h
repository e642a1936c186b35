// The core of the planned allocator, which serves, records and counts requests without depending on torch.
//
// A back end requests an address with `serve`, and delegates to PyTorch's own allocator if it gets none. A request that
// has no place in the plan, or whose place is in use, gets free bytes as far up in the arena as possible, where fewest
// places are. A wrong plan costs speed, never correctness, because a block is served only if all of its bytes are free.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "live_places.h"
#include "plan_table.h"
#include "recorder.h"
#include "spin_lock.h"

namespace lightning_memo {

enum class Mode : int { idle, record, serve };

// Whether a thread runs the planned computation (`inside`) or has left it. Threads that never marked a phase, such as
// data loading threads, are foreign.
enum class Lane : int { foreign, inside, left };

inline Lane& this_lane() {
  thread_local Lane lane = Lane::foreign;
  return lane;
}

// Counters for Python; AllocatorStats in lightning_memo/allocator/planned_allocator.py has the same fields.
struct Stats {
  int64_t hits = 0;
  int64_t fitted = 0;
  int64_t miss_size = 0;
  int64_t miss_end = 0;
  int64_t miss_overlap = 0;
  int64_t unplanned = 0;
  int64_t served_bytes = 0;
  int64_t missed_bytes = 0;
  int64_t out_of_order = 0;
  int64_t foreign = 0;
  int64_t outside = 0;
  int64_t live_bytes = 0;
  int64_t peak_live_bytes = 0;
  int64_t live_blocks = 0;
  int64_t arena_bytes = 0;
  int64_t bad_frees = 0;
};

// Device memory from which blocks are served. `give_back` is called once, by the thread that frees the last block.
struct Arena {
  char* base = nullptr;
  uint64_t bytes = 0;
  std::function<void()> give_back;
};

class Core {
 public:
  Mode mode() const { return mode_.load(std::memory_order_relaxed); }

  void idle() { mode_.store(Mode::idle, std::memory_order_relaxed); }

  // Starts a recording. Events of an earlier recording that were not taken are dropped.
  void record(uint64_t min_bytes) {
    const std::lock_guard guard(lock_);
    recorder_.clear();
    min_bytes_.store(min_bytes, std::memory_order_relaxed);
    mode_.store(Mode::record, std::memory_order_relaxed);
  }

  // Loads a plan and starts to serve from the arena, which must exist. Throws std::invalid_argument if the plan can't
  // be served.
  void serve_plan(const PlanView& view, uint64_t min_bytes, uint64_t alignment) {
    const std::lock_guard guard(lock_);
    plan_.load(view, arena_bytes_.load(std::memory_order_relaxed), min_bytes, alignment);
    places_ = plan_.places(places_);
    plan_.start(phase_);
    alignment_ = alignment;
    min_bytes_.store(min_bytes, std::memory_order_relaxed);
    mode_.store(Mode::serve, std::memory_order_relaxed);
  }

  // Begins phase `index`, or begins it again. The calling thread enters the planned computation.
  void phase(int32_t index) {
    this_lane() = Lane::inside;
    const std::lock_guard guard(lock_);
    phase_ = index;
    sequence_ = 0;
    plan_.start(index);
  }

  // Ends the phase for all threads. The calling thread leaves the planned computation.
  void leave() {
    this_lane() = Lane::left;
    const std::lock_guard guard(lock_);
    phase_ = no_phase;
    plan_.start(no_phase);
  }

  bool eligible(uint64_t size) const { return size > 0 && size >= min_bytes_.load(std::memory_order_relaxed); }

  // Returns an address for an eligible request in serve mode, or nullptr if the back end has to delegate it.
  void* serve(uint64_t size) {
    if (this_lane() != Lane::inside) {
      count_stranger();
      return nullptr;
    }
    const std::lock_guard guard(lock_);
    if (phase_ == no_phase || release_pending_) {
      ++stats_.outside;
      return nullptr;
    }
    bool known = false;
    const PlannedRequest* request = plan_.take(size, known, stats_.out_of_order);
    if (request != nullptr && !request->planned) {
      ++stats_.unplanned;
      return missed(size);
    }
    if (request != nullptr && !places_.occupied(request->offset, request->offset + size, request->end_rank)) {
      places_.insert(request->place, request->offset + size);
      return served(request->offset, size, stats_.hits);
    }
    ++(request != nullptr ? stats_.miss_overlap : known ? stats_.miss_end : stats_.miss_size);
    const uint64_t offset = places_.highest_gap(size, arena_bytes_.load(std::memory_order_relaxed), alignment_);
    if (offset == LivePlaces::no_gap) return missed(size);
    places_.insert_elsewhere(offset, offset + size);
    return served(offset, size, stats_.fitted);
  }

  // Counts a request that the back end can't serve because it is on another stream or in a private pool.
  void count_outside() {
    const std::lock_guard guard(lock_);
    ++stats_.outside;
  }

  // Whether an address may belong to a planned block. While another thread changes the arena, this may be true for a
  // delegated block; it is never false for a planned block.
  bool maybe_planned(const void* address) const {
    return offset_of(address) < arena_bytes_.load(std::memory_order_relaxed);
  }

  char* arena_base() const { return base_.load(std::memory_order_relaxed); }

  // Returns the size of the planned block at this address; 0 if there is none.
  uint64_t planned_size(const void* address) {
    if (!maybe_planned(address)) return 0;
    const std::lock_guard guard(lock_);
    return in_arena(address) ? places_.size_at(offset_of(address)) : 0;
  }

  // Frees a planned block. Returns false if the address is not in the arena and the back end has to free it.
  bool free_planned(const void* address) {
    if (!maybe_planned(address)) return false;
    std::function<void()> give_back;
    {
      const std::lock_guard guard(lock_);
      if (!in_arena(address)) return false;
      const uint64_t size = places_.erase(offset_of(address));
      stats_.bad_frees += size == 0;
      stats_.live_bytes -= static_cast<int64_t>(size);
      if (release_pending_ && places_.count() == 0) give_back = drop_arena();
    }
    if (give_back) give_back();
    return true;
  }

  // Returns whether the existing arena is large enough. One that is too small is freed. Throws std::runtime_error if
  // blocks in it are in use.
  bool keep_arena(uint64_t bytes) {
    std::function<void()> give_back;
    {
      const std::lock_guard guard(lock_);
      if (arena_base() == nullptr) return false;
      if (bytes <= arena_bytes_.load(std::memory_order_relaxed)) {
        release_pending_ = false;
        return true;
      }
      if (places_.count() != 0) throw std::runtime_error(too_small(bytes));
      idle();
      give_back = drop_arena();
    }
    give_back();
    return false;
  }

  void set_arena(Arena arena) {
    const std::lock_guard guard(lock_);
    if (arena_base() != nullptr) throw std::logic_error("the arena exists already");
    release_pending_ = false;
    base_.store(arena.base, std::memory_order_relaxed);
    arena_bytes_.store(arena.bytes, std::memory_order_relaxed);
    give_back_ = std::move(arena.give_back);
  }

  // Stops serving. The arena is freed now, or when the last block in it is freed. Returns whether it has been freed.
  bool release() {
    std::function<void()> give_back;
    {
      const std::lock_guard guard(lock_);
      if (mode() == Mode::serve) idle();
      if (arena_base() == nullptr) return true;
      release_pending_ = places_.count() != 0;
      if (release_pending_) return false;
      give_back = drop_arena();
    }
    give_back();
    return true;
  }

  // Recording. Only plannable requests are numbered within the phase.
  void log_malloc(const void* address, uint64_t size, int64_t stream, bool plannable) {
    if (this_lane() != Lane::inside) return;
    const std::lock_guard guard(lock_);
    if (phase_ == no_phase) return;
    recorder_.malloc(address, static_cast<int64_t>(size), stream, phase_, plannable ? sequence_++ : -1);
  }
  void log_free(const void* address) {
    const std::lock_guard guard(lock_);
    recorder_.free(address, phase_, phase_ == no_phase ? -1 : sequence_);
  }
  int64_t event_count() {
    const std::lock_guard guard(lock_);
    return recorder_.count();
  }
  int64_t take_events(Event* out, int64_t capacity) {
    const std::lock_guard guard(lock_);
    return recorder_.take(out, capacity);
  }

  Stats stats() {
    const std::lock_guard guard(lock_);
    Stats now = stats_;
    now.foreign = foreign_.load(std::memory_order_relaxed);
    now.outside += left_.load(std::memory_order_relaxed);
    now.live_blocks = static_cast<int64_t>(places_.count());
    now.arena_bytes = static_cast<int64_t>(arena_bytes_.load(std::memory_order_relaxed));
    return now;
  }
  // Resets the counters to 0, except that of bytes in use, which also becomes the new peak.
  void reset_stats() {
    const std::lock_guard guard(lock_);
    const int64_t live_bytes = stats_.live_bytes;
    stats_ = Stats{};
    stats_.live_bytes = stats_.peak_live_bytes = live_bytes;
    foreign_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
  }

  // Handlers for pthread_atfork. A child process, such as a data loader's worker, is not part of the plan.
  void before_fork() { lock_.lock(); }
  void after_fork_in_parent() { lock_.unlock(); }
  void after_fork_in_child() {
    idle();
    phase_ = no_phase;
    lock_.unlock();
  }

 private:
  static constexpr int32_t no_phase = -1;

  void* served(uint64_t offset, uint64_t size, int64_t& counter) {
    ++counter;
    stats_.served_bytes += static_cast<int64_t>(size);
    stats_.live_bytes += static_cast<int64_t>(size);
    stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
    return arena_base() + offset;
  }
  void* missed(uint64_t size) {
    stats_.missed_bytes += static_cast<int64_t>(size);
    return nullptr;
  }
  void count_stranger() {
    (this_lane() == Lane::left ? left_ : foreign_).fetch_add(1, std::memory_order_relaxed);
  }
  std::string too_small(uint64_t bytes) const {
    return "the arena has " + std::to_string(arena_bytes_.load(std::memory_order_relaxed)) + " bytes, the plan needs " +
           std::to_string(bytes) + ", and " + std::to_string(places_.count()) +
           " planned blocks are alive: free them before you load a larger plan";
  }
  // Called with the lock held, where maybe_planned is exact.
  bool in_arena(const void* address) const { return maybe_planned(address); }
  // The offset of an address in the arena; it wraps around to a huge number for addresses below the arena.
  uint64_t offset_of(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(arena_base());
  }
  std::function<void()> drop_arena() {
    base_.store(nullptr, std::memory_order_relaxed);
    arena_bytes_.store(0, std::memory_order_relaxed);
    release_pending_ = false;
    plan_ = PlanTable{};
    places_ = LivePlaces{};
    return std::exchange(give_back_, nullptr);
  }

  // These are read without the lock on every request and free.
  std::atomic<Mode> mode_{Mode::idle};
  std::atomic<uint64_t> min_bytes_{0};
  std::atomic<char*> base_{nullptr};
  std::atomic<uint64_t> arena_bytes_{0};
  std::atomic<int64_t> foreign_{0};
  std::atomic<int64_t> left_{0};

  SpinLock lock_;  // guards all members below, and writes to the base and the size of the arena
  int32_t phase_ = no_phase;
  int32_t sequence_ = 0;
  PlanTable plan_;
  LivePlaces places_;
  uint64_t alignment_ = 1;
  bool release_pending_ = false;
  std::function<void()> give_back_;
  Stats stats_;
  Recorder recorder_;
};

}  // namespace lightning_memo
