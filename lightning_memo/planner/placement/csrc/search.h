// Depth-first search for a placement whose peak does not exceed a given capacity.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "problem.h"

namespace placement {

enum class Outcome : int32_t { Infeasible = 0, Found = 1, Interrupted = 2 };

// Puts a buffer, which may not lie below its release, on the stacks of `count` sections. Returns the highest stack.
template <typename Height>
inline Height put_on_stacks(Height* stack, int32_t count, Height release, Height size) {
  Height highest = 0;
  for (int32_t s = 0; s < count; s++) {
    stack[s] = std::max(stack[s], release) + size;
    highest = std::max(highest, stack[s]);
  }
  return highest;
}

// The same for many sections, compiled for processors with and without wide vector registers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
inline int32_t put_on_many_stacks(int32_t* stack, int32_t count, int32_t release, int32_t size) {
  int32_t highest = 0;
  for (int32_t s = 0; s < count; s++) {
    stack[s] = std::max(stack[s], release) + size;
    highest = std::max(highest, stack[s]);
  }
  return highest;
}
inline int64_t put_on_many_stacks(int64_t* stack, int32_t count, int64_t release, int64_t size) {
  return put_on_stacks(stack, count, release, size);
}
constexpr int32_t few_sections = 24;

struct Limits {
  int64_t nodes;
  double seconds;
};

// Lists of neighbors, which a search reads at each node. They take memory for each pair, so that only problems of few
// buffers are searched.
class NeighbourLists {
 public:
  NeighbourLists(const Problem& problem, const int64_t* sizes) : lists_(problem.count()) {
    std::vector<int32_t> found;
    for (int32_t i = 0; i < problem.count(); i++) {
      found.clear();
      problem.visit_neighbours(i, [&](int32_t other) { found.push_back(other); });
      std::sort(found.begin(), found.end());
      found.erase(std::unique(found.begin(), found.end()), found.end());
      std::stable_sort(found.begin(), found.end(), [&](int32_t a, int32_t b) { return sizes[a] < sizes[b]; });
      lists_[i].assign(found.begin(), found.end());
    }
  }

  // The neighbors of a buffer, the smallest first.
  const std::vector<int32_t>& of(int32_t buffer) const { return lists_[buffer]; }

 private:
  std::vector<std::vector<int32_t>> lists_;
};

// Buffers are placed by ascending offset (ties by rank), each on the floor or on top of a placed neighbor. Pushing down
// all buffers of any placement as far as possible yields a placement of this form, so no solution is lost. A node is
// pruned if
//   * an unplaced buffer would fit entirely below all buffers still to be placed, so that it could be pushed down; or
//   * the unplaced buffers of a section cannot be stacked below the capacity. Buffers of a section exclude each other,
//     like jobs on one machine whose release times are the lowest offsets that they can still have. Scheduling the jobs
//     by release time gives the exact minimum.
// The unplaced buffers are divided wherever none of them lives in two adjacent sections; the parts are independent.
//
// Buffers of the sections in which the stacks did not fit gain `weight`. Ranks that are derived from the weights direct
// the next search to the difficult sections.
template <typename Height>
class Search {
 public:
  Search(const Problem& problem, const NeighbourLists& neighbours, const int64_t* sizes, int64_t capacity,
         const int32_t* rank, Limits limits)
      : problem_(problem),
        neighbours_(neighbours),
        size_(sizes, sizes + problem.count()),
        capacity_(static_cast<Height>(capacity)),
        rank_(rank, rank + problem.count()),
        nodes_left_(limits.nodes),
        deadline_(Clock::now() +
                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limits.seconds))),
        lowest_(problem.count(), 0),
        offset_(problem.count(), 0),
        placed_(problem.count(), 0),
        weight_(problem.count(), 0),
        crossing_(problem.sections(), 0),
        stack_(problem.sections(), 0) {
    for (int32_t i = 0; i < problem_.count(); i++) add_crossings(i, 1);
  }

  Outcome run() {
    for (int32_t i = 0; i < problem_.count(); i++) unplaced_.push_back(i);
    return solve_parts(0, 0, -1);
  }

  Height offset(int32_t buffer) const { return offset_[buffer]; }
  int64_t weight(int32_t buffer) const { return weight_[buffer]; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {   // an unplaced buffer at a node
    Height release;  // lowest offset in any placement below this node
    int32_t rank;
    int32_t buffer;
    bool open;  // may be placed next; otherwise it was passed over and waits until a neighbor raises it

    bool before(const Waiting& other) const {
      return release != other.release ? release < other.release : rank < other.rank;
    }
  };

  struct Change {
    int32_t buffer;
    Height lowest;  // value before the change; -1 if the buffer was placed
  };

  // Solves the buffers of `unplaced_` from `first` on in independent parts, and removes them from `unplaced_`.
  Outcome solve_parts(size_t first, Height floor, int32_t floor_rank) {
    const size_t mark = trail_.size(), end = unplaced_.size();
    Outcome outcome = Outcome::Found;
    for (const std::vector<int32_t>& part : split(first)) {
      const size_t start = unplaced_.size();
      unplaced_.insert(unplaced_.end(), part.begin(), part.end());
      outcome = solve(start, floor, floor_rank);
      if (outcome != Outcome::Found) break;
    }
    unplaced_.resize(end);
    if (outcome != Outcome::Found) undo(mark);
    return outcome;
  }

  // Solves the buffers of `unplaced_` from `first` on as one part, and removes them from `unplaced_`. The last buffer
  // was placed at `floor` with `floor_rank`. The next one is placed higher, or equally high with a higher rank.
  Outcome solve(size_t first, Height floor, int32_t floor_rank) {
    const size_t mark = waiting_.size();
    const Outcome outcome = branch(first, floor, floor_rank);
    waiting_.resize(mark);
    unplaced_.resize(first);
    return outcome;
  }

  Outcome branch(size_t first, Height floor, int32_t floor_rank) {
    if (out_of_time()) return Outcome::Interrupted;
    const Height lowest_top = find_lowest_top(first);
    if (lowest_top <= floor) return Outcome::Infeasible;
    const size_t start = waiting_.size();
    wait_by_release(first, floor, floor_rank);
    const size_t end = waiting_.size();
    if (!stacks_fit(start, end)) return Outcome::Infeasible;
    for (size_t k = start; k < end && waiting_[k].release < lowest_top; k++) {
      const Waiting next = waiting_[k];
      if (!next.open) continue;
      const size_t rest = unplaced_.size();
      for (size_t other = start; other < end; other++)
        if (other != k) unplaced_.push_back(waiting_[other].buffer);
      const size_t mark = trail_.size();
      const Placed placed = place(next.buffer, next.release);
      const int32_t rank = rank_[next.buffer];
      const Outcome outcome = rest == unplaced_.size() ? Outcome::Found
                              : placed.cut             ? solve_parts(rest, next.release, rank)
                                                       : solve(rest, next.release, rank);
      unplaced_.resize(rest);
      if (outcome == Outcome::Found) return outcome;
      undo(mark);
      // A buffer without unplaced neighbors does not constrain the others, wherever it lies.
      if (outcome == Outcome::Interrupted || !placed.touches) return outcome;
    }
    return Outcome::Infeasible;
  }

  Height find_lowest_top(size_t first) const {
    Height lowest_top = std::numeric_limits<Height>::max();
    for (size_t k = first; k < unplaced_.size(); k++)
      lowest_top = std::min<Height>(lowest_top, lowest_[unplaced_[k]] + size_[unplaced_[k]]);
    return lowest_top;
  }

  // Sorts the buffers into `waiting_` by release and rank. Their order at the parent node is nearly the same.
  void wait_by_release(size_t first, Height floor, int32_t floor_rank) {
    const size_t start = waiting_.size();
    for (size_t k = first; k < unplaced_.size(); k++) {
      const int32_t i = unplaced_[k];
      const bool open = lowest_[i] > floor || (lowest_[i] == floor && rank_[i] > floor_rank);
      const Waiting own{open ? lowest_[i] : lowest_neighbour_top(i, floor), rank_[i], i, open};
      size_t place = waiting_.size();
      waiting_.push_back(own);
      for (; place > start && own.before(waiting_[place - 1]); place--) waiting_[place] = waiting_[place - 1];
      waiting_[place] = own;
    }
  }

  // Lowest top that an unplaced neighbor can have; above the capacity if there is no such neighbor.
  Height lowest_neighbour_top(int32_t buffer, Height floor) const {
    Height best = capacity_ + 1;
    for (int32_t other : neighbours_.of(buffer)) {
      if (floor + size_[other] >= best) break;
      if (!placed_[other]) best = std::min<Height>(best, std::max(lowest_[other], floor) + size_[other]);
    }
    return best;
  }

  bool stacks_fit(size_t start, size_t end) {
    for (size_t k = start; k < end; k++)
      for (const Range& range : problem_.ranges(waiting_[k].buffer))
        std::fill(stack_.begin() + range.first, stack_.begin() + range.last, 0);
    for (size_t k = start; k < end; k++) {
      const Height release = waiting_[k].release, size = size_[waiting_[k].buffer];
      Height highest = release + size;
      for (const Range& range : problem_.ranges(waiting_[k].buffer)) {
        Height* const stack = stack_.data() + range.first;
        const int32_t count = range.last - range.first;
        highest = std::max(highest, count < few_sections ? put_on_stacks(stack, count, release, size)
                                                         : put_on_many_stacks(stack, count, release, size));
      }
      if (highest > capacity_) {
        add_weight(start, end, waiting_[k].buffer);
        return false;
      }
    }
    return true;
  }

  void add_weight(size_t start, size_t end, int32_t overflowing) {
    int32_t section = -1;
    for (const Range& range : problem_.ranges(overflowing))
      for (int32_t s = range.first; s < range.last && section < 0; s++)
        if (stack_[s] > capacity_) section = s;
    for (size_t k = start; k < end; k++)
      for (const Range& range : problem_.ranges(waiting_[k].buffer))
        if (range.first <= section && section < range.last) weight_[waiting_[k].buffer]++;
  }

  struct Placed {
    bool touches;  // has an unplaced neighbor
    bool cut;      // divides the unplaced buffers into parts
  };

  Placed place(int32_t buffer, Height at) {
    placed_[buffer] = 1;
    offset_[buffer] = at;
    Placed result{false, add_crossings(buffer, -1)};
    trail_.push_back({buffer, -1});
    const Height top = at + size_[buffer];
    for (int32_t other : neighbours_.of(buffer)) {
      if (placed_[other]) continue;
      result.touches = true;
      if (lowest_[other] < top) {
        trail_.push_back({other, lowest_[other]});
        lowest_[other] = top;
      }
    }
    return result;
  }

  void undo(size_t mark) {
    for (; trail_.size() > mark; trail_.pop_back()) {
      const Change& change = trail_.back();
      if (change.lowest >= 0) {
        lowest_[change.buffer] = change.lowest;
      } else {
        placed_[change.buffer] = 0;
        add_crossings(change.buffer, 1);
      }
    }
  }

  // Independent parts, the smallest first: if one has no solution, the others do not have to be tried.
  std::vector<std::vector<int32_t>> split(size_t first) const {
    std::vector<int32_t> part_of(problem_.sections());
    int32_t part = 0;
    for (int32_t s = 0; s < problem_.sections(); s++) {
      part_of[s] = part;
      if (crossing_[s] == 0) part++;
    }
    const int32_t open_end = crossing_.empty() || crossing_.back() == 0 ? -1 : part;  // continues in the first part
    std::vector<std::vector<int32_t>> parts(part + 1);
    for (size_t k = first; k < unplaced_.size(); k++) {
      const int32_t i = unplaced_[k];
      const int32_t own = part_of[problem_.ranges(i)[0].first];
      parts[own == open_end ? 0 : own].push_back(i);
    }
    std::erase_if(parts, [](const auto& list) { return list.empty(); });
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    return parts;
  }

  // crossing_[s] counts the unplaced buffers that live in sections s and s + 1. Returns whether a count became 0.
  bool add_crossings(int32_t buffer, int32_t by) {
    const std::vector<Range>& ranges = problem_.ranges(buffer);
    bool cut = false;
    for (const Range& range : ranges)
      for (int32_t s = range.first; s + 1 < range.last; s++) cut |= (crossing_[s] += by) == 0;
    if (ranges.size() > 1) cut |= (crossing_.back() += by) == 0;
    return cut;
  }

  bool out_of_time() {
    nodes_left_--;
    return nodes_left_ < 0 || (nodes_left_ % 1024 == 0 && Clock::now() > deadline_);
  }

  const Problem& problem_;
  const NeighbourLists& neighbours_;
  const std::vector<Height> size_;
  const Height capacity_;
  const std::vector<int32_t> rank_;
  int64_t nodes_left_;
  const Clock::time_point deadline_;
  std::vector<Height> lowest_;  // top of the highest placed neighbor
  std::vector<Height> offset_;
  std::vector<char> placed_;
  std::vector<int64_t> weight_;
  std::vector<int32_t> crossing_;
  std::vector<Height> stack_;
  std::vector<Change> trail_;
  std::vector<int32_t> unplaced_;  // concatenated lists of the nodes from the root to this one
  std::vector<Waiting> waiting_;  // likewise
};

}  // namespace placement
