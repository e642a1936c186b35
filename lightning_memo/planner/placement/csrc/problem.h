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
class Problem {
 public:
  // `ranges` holds the bounds of two ranges for each buffer. The second range is empty for most buffers.
  Problem(int32_t count, int32_t sections, const int32_t* ranges, const int64_t* sizes)
      : sections_(sections), ranges_(count) {
    for (int32_t i = 0; i < count; i++)
      for (int32_t k = 0; k < 2; k++) {
        const Range range{ranges[4 * i + 2 * k], ranges[4 * i + 2 * k + 1]};
        if (range.first < range.last) ranges_[i].push_back(range);
      }
    find_neighbours(sizes);
  }

  int32_t count() const { return static_cast<int32_t>(ranges_.size()); }
  int32_t sections() const { return sections_; }
  const std::vector<Range>& ranges(int32_t buffer) const { return ranges_[buffer]; }
  // Buffers that share a section with this one, the smallest first.
  const std::vector<int32_t>& neighbours(int32_t buffer) const { return neighbours_[buffer]; }

 private:
  void find_neighbours(const int64_t* sizes) {
    std::vector<std::vector<int32_t>> starting(sections_);
    for (int32_t i = 0; i < count(); i++)
      for (const Range& range : ranges_[i]) starting[range.first].push_back(i);
    neighbours_.resize(count());
    std::vector<int32_t> last(count(), 0), alive;
    for (int32_t s = 0; s < sections_; s++) {
      alive.erase(std::remove_if(alive.begin(), alive.end(), [&](int32_t i) { return last[i] <= s; }), alive.end());
      for (int32_t i : starting[s]) {
        for (int32_t j : alive) {
          neighbours_[i].push_back(j);
          neighbours_[j].push_back(i);
        }
        for (const Range& range : ranges_[i])
          if (range.first == s) last[i] = range.last;
        alive.push_back(i);
      }
    }
    for (std::vector<int32_t>& list : neighbours_) {  // two buffers may meet at both ends of a step
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
      std::stable_sort(list.begin(), list.end(), [&](int32_t a, int32_t b) { return sizes[a] < sizes[b]; });
      list.shrink_to_fit();
    }
  }

  int32_t sections_;
  std::vector<std::vector<Range>> ranges_;
  std::vector<std::vector<int32_t>> neighbours_;
};

}  // namespace placement
