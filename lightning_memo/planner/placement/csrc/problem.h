// The buffers and the sections of time in which they live.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace placement {

struct Range {
  int32_t first, last;  // sections [first, last)
};

// A section is a piece of time in which no buffer is born or dies. Steps repeat: the last section is followed by the
// first, and a buffer that lives across the end of a step has two ranges, one at the end and one at the start.
//
// Two buffers are neighbors if they share a section. A deep model has about as many pairs of neighbors as the square of
// its buffers, which would take more memory than the buffers themselves: neighbors are looked up, not stored.
class Problem {
 public:
  // `ranges` holds the bounds of two ranges for each buffer. The second range is empty for most buffers.
  Problem(int32_t count, int32_t sections, const int32_t* ranges) : sections_(sections), ranges_(count) {
    for (int32_t i = 0; i < count; i++)
      for (int32_t k = 0; k < 2; k++) {
        const Range range{ranges[4 * i + 2 * k], ranges[4 * i + 2 * k + 1]};
        if (range.first >= range.last) continue;
        ranges_[i].push_back(range);
        spans_.push_back({range, i});
      }
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const Span& a, const Span& b) { return a.range.first < b.range.first; });
    starting_.resize(sections + 1);
    for (int32_t s = 0, k = 0; s <= sections; s++) {
      while (k < span_count() && spans_[k].range.first < s) k++;
      starting_[s] = k;
    }
    while (leaves_ * leaf_spans < span_count()) leaves_ *= 2;
    latest_.resize(2 * leaves_, 0);
    for (int32_t k = 0; k < span_count(); k++) {
      int32_t& latest = latest_[leaves_ + k / leaf_spans];
      latest = std::max(latest, spans_[k].range.last);
    }
    for (int32_t node = leaves_ - 1; node > 0; node--)
      latest_[node] = std::max(latest_[2 * node], latest_[2 * node + 1]);
  }

  int32_t count() const { return static_cast<int32_t>(ranges_.size()); }
  int32_t sections() const { return sections_; }
  const std::vector<Range>& ranges(int32_t buffer) const { return ranges_[buffer]; }

  // Calls `visit` with each neighbor of a buffer, with some twice: two buffers may meet at both ends of a step.
  template <typename Visit>
  void visit_neighbours(int32_t buffer, Visit visit) const {
    const auto visit_other = [&](int32_t other) {
      if (other != buffer) visit(other);
    };
    for (const Range& range : ranges_[buffer]) {
      const int32_t first = starting_[range.first], last = starting_[range.last];
      visit_alive(1, 0, leaves_ * leaf_spans, first, range.first, visit_other);
      for (int32_t k = first; k < last; k++) visit_other(spans_[k].buffer);
    }
  }

 private:
  struct Span {
    Range range;
    int32_t buffer;
  };

  static constexpr int32_t leaf_spans = 4;

  int32_t span_count() const { return static_cast<int32_t>(spans_.size()); }

  // Visits the buffers of those of the first `end` spans that last beyond the start of a section. `node` of the tree
  // stands for the spans [first, last).
  template <typename Visit>
  void visit_alive(int32_t node, int32_t first, int32_t last, int32_t end, int32_t section, const Visit& visit) const {
    if (first >= end || latest_[node] <= section) return;
    if (node < leaves_) {
      const int32_t middle = first + (last - first) / 2;
      visit_alive(2 * node, first, middle, end, section, visit);
      visit_alive(2 * node + 1, middle, last, end, section, visit);
      return;
    }
    for (int32_t k = first; k < std::min(last, end); k++)
      if (spans_[k].range.last > section) visit(spans_[k].buffer);
  }

  int32_t sections_;
  std::vector<std::vector<Range>> ranges_;
  std::vector<Span> spans_;        // the ranges of all buffers by their first section
  std::vector<int32_t> starting_;  // [sections + 1] number of the spans that start before each section
  int32_t leaves_ = 1;             // a power of two
  std::vector<int32_t> latest_;    // a binary tree over the spans: the latest end of those below each node
};

}  // namespace placement
