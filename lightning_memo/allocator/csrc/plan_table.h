// The plan: the offset of each request of each phase, and the request that is expected next.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "live_places.h"

namespace lightning_memo {

// A request of the recorded step.
struct PlannedRequest {
  uint64_t size;
  uint64_t offset;
  uint32_t place;
  uint32_t end_rank;
  bool planned;
  bool in_turn;
  size_t group;  // the group of this size in its phase
  size_t later;  // the next request of this group
};

// Slots of one size in one phase.
struct SizeGroup {
  uint64_t size;
  size_t first;
  size_t next;   // the first one that is not taken yet
  bool in_turn;  // whether a request is served only after the one that was recorded before it
};

// The plan as Python passes it: the requests of all phases one after the other.
struct PlanView {
  int64_t phases;
  const int64_t* counts;   // number of requests of each phase
  const int64_t* sizes;    // in bytes
  const int64_t* offsets;  // in bytes from the start of the arena; negative if not planned
  const int8_t* in_turn = nullptr;  // whether a request is served in turn only; the same for all of a size in a phase
};

class PlanTable {
 public:
  // Throws std::invalid_argument without any change if the plan can't be served.
  void load(const PlanView& view, uint64_t arena_bytes, uint64_t min_bytes, uint64_t alignment) {
    std::vector<PlannedRequest> requests;
    std::vector<SizeGroup> groups;
    std::vector<size_t> begins{0}, group_begins{0};
    for (int64_t phase = 0; phase < view.phases; ++phase) {
      for (int64_t i = 0; i < view.counts[phase]; ++i) {
        const size_t k = requests.size();
        const std::string fault = fault_of(view.sizes[k], view.offsets[k], arena_bytes, min_bytes, alignment);
        if (!fault.empty()) throw std::invalid_argument(where(phase, i) + fault);
        const bool planned = view.offsets[k] >= 0;
        const auto size = static_cast<uint64_t>(view.sizes[k]);
        const bool in_turn = view.in_turn != nullptr && view.in_turn[k] != 0;
        requests.push_back({size, static_cast<uint64_t>(view.offsets[k]), 0, 0, planned, in_turn, 0, no_request});
      }
      group(requests, begins.back(), groups);
      begins.push_back(requests.size());
      group_begins.push_back(groups.size());
    }
    requests_ = std::move(requests);
    groups_ = std::move(groups);
    begins_ = std::move(begins);
    group_begins_ = std::move(group_begins);
    start(-1);
  }
  // Returns the places of this plan. Blocks of an earlier plan that are still in use keep their offsets.
  LivePlaces places(const LivePlaces& before) {
    const auto alive = before.ranges();
    std::vector<uint64_t> offsets;
    for (const PlannedRequest& request : requests_) {
      if (request.planned) offsets.push_back(request.offset);
    }
    for (const auto& range : alive) offsets.push_back(range.first);
    LivePlaces result(std::move(offsets));
    for (const auto& [begin, end] : alive) result.insert(result.rank(begin), end);
    for (PlannedRequest& request : requests_) {
      if (!request.planned) continue;
      request.place = result.rank(request.offset);
      request.end_rank = result.rank(request.offset + request.size);
    }
    return result;
  }
  // Goes to the first request of a phase. A phase that the plan doesn't have has no requests.
  void start(int32_t phase) {
    const bool known = phase >= 0 && static_cast<size_t>(phase) + 1 < begins_.size();
    const auto number = static_cast<size_t>(phase);
    next_ = known ? begins_[number] : requests_.size();
    end_ = known ? begins_[number + 1] : requests_.size();
    group_ = known ? group_begins_[number] : groups_.size();
    group_end_ = known ? group_begins_[number + 1] : groups_.size();
    for (size_t i = group_; i < group_end_; ++i) groups_[i].next = groups_[i].first;
  }
  // Returns the first request of the phase that has this size and is not taken yet. Requests that some steps make and
  // others do not, like those of packed documents, therefore do not disturb the other ones. A step like the recorded
  // one takes the requests in order. Returns nullptr if all requests of this size are taken, or, with `known` false, if
  // the phase has none.
  //
  // If steps make different numbers of requests of a size, the first one that is not taken may be another than this
  // one. Such a request is taken only if the request before it was the one that was recorded before it.
  const PlannedRequest* take(uint64_t size, bool& known, int64_t& out_of_order) {
    SizeGroup* group = find(size);
    known = group != nullptr || group_ == group_end_;
    if (group == nullptr || group->next == no_request) return nullptr;
    if (group->in_turn && (next_ >= end_ || next_ < group->next || requests_[next_].size != size)) return nullptr;
    const size_t taken = group->in_turn ? next_ : group->next;
    group->next = requests_[taken].later;
    out_of_order += static_cast<int64_t>(taken != next_);
    next_ = taken + 1;
    return &requests_[taken];
  }

 private:
  static constexpr size_t no_request = static_cast<size_t>(-1);

  // Adds the groups of one phase, by size.
  static void group(std::vector<PlannedRequest>& requests, size_t begin, std::vector<SizeGroup>& groups) {
    std::vector<size_t> order(requests.size() - begin);
    std::iota(order.begin(), order.end(), begin);
    const auto smaller = [&](size_t a, size_t b) { return requests[a].size < requests[b].size; };
    std::stable_sort(order.begin(), order.end(), smaller);
    for (size_t i = 0; i < order.size(); ++i) {
      const bool same = i > 0 && requests[order[i - 1]].size == requests[order[i]].size;
      if (same) requests[order[i - 1]].later = order[i];
      if (!same) groups.push_back({requests[order[i]].size, order[i], order[i], false});
      groups.back().in_turn |= requests[order[i]].in_turn;
      requests[order[i]].group = groups.size() - 1;
    }
  }
  SizeGroup* find(uint64_t size) {
    if (next_ < end_ && requests_[next_].size == size) return &groups_[requests_[next_].group];  // the usual case
    const auto end = groups_.begin() + static_cast<std::ptrdiff_t>(group_end_);
    const auto begin = groups_.begin() + static_cast<std::ptrdiff_t>(group_);
    const auto found = std::lower_bound(begin, end, size, [](const SizeGroup& g, uint64_t s) { return g.size < s; });
    return found != end && found->size == size ? &*found : nullptr;
  }
  static std::string where(int64_t phase, int64_t request) {
    return "phase " + std::to_string(phase) + ", request " + std::to_string(request) + ": ";
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
  std::vector<PlannedRequest> requests_;
  std::vector<SizeGroup> groups_;
  std::vector<size_t> begins_{0};        // index of the first request of each phase
  std::vector<size_t> group_begins_{0};  // index of the first group of each phase
  size_t next_ = 0;
  size_t end_ = 0;
  size_t group_ = 0;
  size_t group_end_ = 0;
};

}  // namespace lightning_memo
