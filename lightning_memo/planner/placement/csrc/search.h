// Depth-first search for a placement whose peak is at most a given capacity.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "problem.h"

namespace placement {

enum class Outcome : int32_t { Infeasible = 0, Found = 1, Interrupted = 2 };

struct Limits {
  int64_t nodes;
  double seconds;
};

// Buffers are placed by rising offset (ties by rank), each on the floor or on top of a placed neighbour. Pushing every
// buffer of any placement down as far as it goes gives one of this form, so nothing is lost. A node is given up when
//   * an unplaced buffer would fit wholly below everything that is still to come: it could be pushed down; or
//   * in some section, the unplaced buffers can't be stacked below the capacity. Buffers of a section exclude each
//     other, so they are jobs on one machine, released at the lowest offset each can still have: taken by release, the
//     time when the last one ends is exact.
// What remains is split wherever no unplaced buffer lives on from one section to the next: parts are independent.
//
// Buffers of the sections where stacks did not fit gain `weight`; ranks made from it lead the next search to where the
// difficulty is.
template <typename Height>
class Search {
 public:
  Search(const Problem& problem, const int64_t* sizes, int64_t capacity, const int32_t* rank, Limits limits)
      : problem_(problem),
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
    sort_neighbours_by_size();
    for (int32_t i = 0; i < problem_.count(); i++) add_crossings(i, 1);
  }

  Outcome run() {
    std::vector<int32_t> all(problem_.count());
    for (int32_t i = 0; i < problem_.count(); i++) all[i] = i;
    return solve_parts(all, 0, -1);
  }

  Height offset(int32_t buffer) const { return offset_[buffer]; }
  int64_t weight(int32_t buffer) const { return weight_[buffer]; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {    // an unplaced buffer at a node
    Height release;   // no placement from here on has it lower
    int32_t buffer;
    bool open;        // may be placed next; else it was passed over, and waits for a neighbour to raise it
  };

  struct Change {
    int32_t buffer;
    Height lowest;  // before the change; -1: the buffer was placed
  };

  Outcome solve_parts(const std::vector<int32_t>& unplaced, Height floor, int32_t floor_rank) {
    const size_t mark = trail_.size();
    for (const std::vector<int32_t>& part : split(unplaced)) {
      const Outcome outcome = solve(part, floor, floor_rank);
      if (outcome != Outcome::Found) {
        undo(mark);
        return outcome;
      }
    }
    return Outcome::Found;
  }

  // The last buffer was placed at `floor` with `floor_rank`; the next comes above, or beside it with a higher rank.
  Outcome solve(const std::vector<int32_t>& unplaced, Height floor, int32_t floor_rank) {
    if (out_of_time()) return Outcome::Interrupted;
    const Height lowest_top = find_lowest_top(unplaced);
    if (lowest_top <= floor) return Outcome::Infeasible;
    const std::vector<Waiting> waiting = by_release(unplaced, floor, floor_rank);
    if (!stacks_fit(waiting)) return Outcome::Infeasible;
    std::vector<int32_t> rest;
    rest.reserve(unplaced.size());
    for (const Waiting& next : waiting) {
      if (next.release >= lowest_top) break;
      if (!next.open) continue;
      rest.clear();
      std::copy_if(unplaced.begin(), unplaced.end(), std::back_inserter(rest),
                   [&](int32_t other) { return other != next.buffer; });
      const size_t mark = trail_.size();
      const bool has_unplaced_neighbours = place(next.buffer, next.release);
      const Outcome outcome = solve_parts(rest, next.release, rank_[next.buffer]);
      if (outcome == Outcome::Found) return outcome;
      undo(mark);
      // What nothing else touches is not in the way of the others, wherever it lies.
      if (outcome == Outcome::Interrupted || !has_unplaced_neighbours) return outcome;
    }
    return Outcome::Infeasible;
  }

  Height find_lowest_top(const std::vector<int32_t>& unplaced) const {
    Height lowest_top = std::numeric_limits<Height>::max();
    for (int32_t i : unplaced) lowest_top = std::min<Height>(lowest_top, lowest_[i] + size_[i]);
    return lowest_top;
  }

  std::vector<Waiting> by_release(const std::vector<int32_t>& unplaced, Height floor, int32_t floor_rank) const {
    std::vector<Waiting> waiting;
    waiting.reserve(unplaced.size());
    for (int32_t i : unplaced) {
      const bool open = lowest_[i] > floor || (lowest_[i] == floor && rank_[i] > floor_rank);
      waiting.push_back({open ? lowest_[i] : lowest_neighbour_top(i, floor), i, open});
    }
    std::sort(waiting.begin(), waiting.end(), [this](const Waiting& a, const Waiting& b) {
      return a.release != b.release ? a.release < b.release : rank_[a.buffer] < rank_[b.buffer];
    });
    return waiting;
  }

  // The lowest top that an unplaced neighbour can have; above the capacity if there is none.
  Height lowest_neighbour_top(int32_t buffer, Height floor) const {
    Height best = capacity_ + 1;
    for (int32_t other : by_size_[buffer]) {
      if (floor + size_[other] >= best) break;
      if (!placed_[other]) best = std::min<Height>(best, std::max(lowest_[other], floor) + size_[other]);
    }
    return best;
  }

  bool stacks_fit(const std::vector<Waiting>& waiting) {
    for (const Waiting& w : waiting)
      for (const Range& range : problem_.ranges(w.buffer))
        std::fill(stack_.begin() + range.first, stack_.begin() + range.last, 0);
    for (const Waiting& w : waiting) {
      if (w.release > capacity_) return false;
      Height highest = 0;
      const Height release = w.release, size = size_[w.buffer];
      for (const Range& range : problem_.ranges(w.buffer)) {
        Height* const stack = stack_.data();
        for (int32_t s = range.first; s < range.last; s++) {
          stack[s] = std::max(stack[s], release) + size;
          highest = std::max(highest, stack[s]);
        }
      }
      if (highest > capacity_) {
        add_weight(waiting, w.buffer);
        return false;
      }
    }
    return true;
  }

  void add_weight(const std::vector<Waiting>& waiting, int32_t overflowing) {
    int32_t section = -1;
    for (const Range& range : problem_.ranges(overflowing))
      for (int32_t s = range.first; s < range.last && section < 0; s++)
        if (stack_[s] > capacity_) section = s;
    for (const Waiting& w : waiting)
      for (const Range& range : problem_.ranges(w.buffer))
        if (range.first <= section && section < range.last) weight_[w.buffer]++;
  }

  bool place(int32_t buffer, Height at) {
    placed_[buffer] = 1;
    offset_[buffer] = at;
    add_crossings(buffer, -1);
    trail_.push_back({buffer, -1});
    bool has_unplaced_neighbours = false;
    const Height top = at + size_[buffer];
    for (int32_t other : problem_.neighbours(buffer)) {
      if (placed_[other]) continue;
      has_unplaced_neighbours = true;
      if (lowest_[other] < top) {
        trail_.push_back({other, lowest_[other]});
        lowest_[other] = top;
      }
    }
    return has_unplaced_neighbours;
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

  // Independent parts, the smallest first: where one can't be solved, the others need not be tried.
  std::vector<std::vector<int32_t>> split(const std::vector<int32_t>& unplaced) const {
    std::vector<int32_t> part_of(problem_.sections());
    int32_t part = 0;
    for (int32_t s = 0; s < problem_.sections(); s++) {
      part_of[s] = part;
      if (crossing_[s] == 0) part++;
    }
    const int32_t open_end = crossing_.empty() || crossing_.back() == 0 ? -1 : part;  // goes on in the first part
    std::vector<std::vector<int32_t>> parts(part + 1);
    for (int32_t i : unplaced) {
      const int32_t own = part_of[problem_.ranges(i)[0].first];
      parts[own == open_end ? 0 : own].push_back(i);
    }
    std::erase_if(parts, [](const auto& list) { return list.empty(); });
    std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
    return parts;
  }

  // crossing_[s]: unplaced buffers that live in section s and in the next one.
  void add_crossings(int32_t buffer, int32_t by) {
    const std::vector<Range>& ranges = problem_.ranges(buffer);
    for (const Range& range : ranges)
      for (int32_t s = range.first; s + 1 < range.last; s++) crossing_[s] += by;
    if (ranges.size() > 1) crossing_.back() += by;
  }

  void sort_neighbours_by_size() {
    by_size_.reserve(problem_.count());
    for (int32_t i = 0; i < problem_.count(); i++) {
      by_size_.push_back(problem_.neighbours(i));
      std::sort(by_size_[i].begin(), by_size_[i].end(), [this](int32_t a, int32_t b) { return size_[a] < size_[b]; });
    }
  }

  bool out_of_time() {
    nodes_left_--;
    return nodes_left_ < 0 || (nodes_left_ % 1024 == 0 && Clock::now() > deadline_);
  }

  const Problem& problem_;
  const std::vector<Height> size_;
  const Height capacity_;
  const std::vector<int32_t> rank_;
  int64_t nodes_left_;
  const Clock::time_point deadline_;
  std::vector<Height> lowest_;  // top of the highest placed neighbour
  std::vector<Height> offset_;
  std::vector<char> placed_;
  std::vector<int64_t> weight_;
  std::vector<int32_t> crossing_;
  std::vector<Height> stack_;
  std::vector<std::vector<int32_t>> by_size_;
  std::vector<Change> trail_;
};

}  // namespace placement
