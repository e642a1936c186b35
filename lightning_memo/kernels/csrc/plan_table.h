// Where each request of each phase goes, and which request is next.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "live_places.h"

namespace lightning_memo {

struct Slot {
  uint64_t size;
  uint64_t offset;
  uint32_t place;
  uint32_t end_rank;
  bool planned;
};

// The plan as it is handed over: the slots of all phases one after the other.
struct PlanView {
  int64_t phases;
  const int64_t* counts;   // slots of each phase
  const int64_t* sizes;    // bytes
  const int64_t* offsets;  // bytes from the arena's begin; negative: not planned
};

class PlanTable {
 public:
  // Throws std::invalid_argument, and changes nothing then.
  void load(const PlanView& view, uint64_t arena_bytes, uint64_t min_bytes, uint64_t alignment) {
    std::vector<Slot> slots;
    std::vector<size_t> begins{0};
    for (int64_t phase = 0; phase < view.phases; ++phase) {
      for (int64_t i = 0; i < view.counts[phase]; ++i) {
        const size_t k = slots.size();
        const std::string fault = fault_of(view.sizes[k], view.offsets[k], arena_bytes, min_bytes, alignment);
        if (!fault.empty()) throw std::invalid_argument(where(phase, i) + fault);
        const bool planned = view.offsets[k] >= 0;
        slots.push_back({static_cast<uint64_t>(view.sizes[k]), static_cast<uint64_t>(view.offsets[k]), 0, 0, planned});
      }
      begins.push_back(slots.size());
    }
    slots_ = std::move(slots);
    begins_ = std::move(begins);
    start(-1);
  }
  // Blocks of an earlier plan that are still alive keep their places.
  LivePlaces places(const LivePlaces& before) {
    const auto alive = before.ranges();
    std::vector<uint64_t> offsets;
    for (const Slot& slot : slots_) {
      if (slot.planned) offsets.push_back(slot.offset);
    }
    for (const auto& range : alive) offsets.push_back(range.first);
    LivePlaces result(std::move(offsets));
    for (const auto& [begin, end] : alive) result.insert(result.rank(begin), end);
    for (Slot& slot : slots_) {
      if (!slot.planned) continue;
      slot.place = result.rank(slot.offset);
      slot.end_rank = result.rank(slot.offset + slot.size);
    }
    return result;
  }
  // Goes to the first request of a phase. One that the plan doesn't have has no slots.
  void start(int32_t phase) {
    const bool known = phase >= 0 && static_cast<size_t>(phase) + 1 < begins_.size();
    next_ = known ? begins_[static_cast<size_t>(phase)] : slots_.size();
    end_ = known ? begins_[static_cast<size_t>(phase) + 1] : slots_.size();
  }
  bool at_end() const { return next_ == end_; }
  // The slot for a request of this size, nullptr if none of the next few has it. `skipped` counts those left out.
  const Slot* take(uint64_t size, int64_t& skipped) {
    constexpr size_t look_ahead = 8;
    const size_t limit = std::min(end_, next_ + 1 + look_ahead);
    for (size_t i = next_; i < limit; ++i) {
      if (slots_[i].size != size) continue;
      skipped += static_cast<int64_t>(i - next_);
      next_ = i + 1;
      return &slots_[i];
    }
    return nullptr;
  }

 private:
  static std::string where(int64_t phase, int64_t slot) {
    return "phase " + std::to_string(phase) + ", request " + std::to_string(slot) + ": ";
  }
  static std::string fault_of(int64_t size, int64_t offset, uint64_t arena, uint64_t min_bytes, uint64_t alignment) {
    const std::string bytes = std::to_string(size) + " bytes";
    if (size <= 0 || static_cast<uint64_t>(size) < min_bytes) {
      return bytes + ", requests below " + std::to_string(std::max<uint64_t>(min_bytes, 1)) + " are never planned";
    }
    if (offset < 0) return "";
    const std::string at = bytes + " at offset " + std::to_string(offset);
    if (static_cast<uint64_t>(offset) % alignment != 0) return at + ", not a multiple of " + std::to_string(alignment);
    if (static_cast<uint64_t>(offset) > arena || static_cast<uint64_t>(size) > arena - static_cast<uint64_t>(offset)) {
      return at + ", beyond the arena's " + std::to_string(arena);
    }
    return "";
  }
  std::vector<Slot> slots_;
  std::vector<size_t> begins_{0};
  size_t next_ = 0;
  size_t end_ = 0;
};

}  // namespace lightning_memo
