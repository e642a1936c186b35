// A mutex for critical sections of a few nanoseconds. Unlike std::mutex, it can be unlocked in a forked child, and it
// takes one atomic operation less.
#pragma once
#include <atomic>
#include <thread>

namespace lightning_memo {

class SpinLock {
 public:
  void lock() noexcept {
    while (locked_.exchange(true, std::memory_order_acquire)) wait();
  }
  void unlock() noexcept { locked_.store(false, std::memory_order_release); }

 private:
  void wait() const noexcept {
    constexpr int spins_before_yield = 64;
    for (int spins = 0; locked_.load(std::memory_order_relaxed); ++spins) {
      if (spins >= spins_before_yield) std::this_thread::yield();
    }
  }
  std::atomic<bool> locked_{false};
};

}  // namespace lightning_memo
