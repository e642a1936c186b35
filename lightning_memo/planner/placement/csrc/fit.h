// One-pass placements, without backtracking.
#pragma once
#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "problem.h"

namespace placement {

// Places the buffers in order, each in the first (or tightest) gap between its placed neighbors that is large enough.
inline int64_t fit(const Problem& problem, const int64_t* sizes, const int32_t* order, bool tightest, int64_t* offsets) {
  std::fill(offsets, offsets + problem.count(), -1);
  std::vector<std::pair<int64_t, int64_t>> taken;
  int64_t peak = 0;
  for (int32_t k = 0; k < problem.count(); k++) {
    const int32_t buffer = order[k];
    taken.clear();
    problem.visit_neighbours(buffer, [&](int32_t other) {
      if (offsets[other] >= 0) taken.emplace_back(offsets[other], offsets[other] + sizes[other]);
    });
    std::sort(taken.begin(), taken.end());
    int64_t end = 0, found = -1, tightest_gap = 0;
    for (const auto& [first, last] : taken) {
      const int64_t gap = first - end;
      if (gap >= sizes[buffer] && (found < 0 || gap < tightest_gap)) {
        found = end;
        tightest_gap = gap;
        if (!tightest) break;
      }
      end = std::max(end, last);
    }
    offsets[buffer] = found < 0 ? end : found;
    peak = std::max(peak, offsets[buffer] + sizes[buffer]);
  }
  return peak;
}

// Repeatedly places the buffer that can lie lowest on top of its placed neighbors; ties are broken by `rank`.
inline int64_t skyline(const Problem& problem, const int64_t* sizes, const int32_t* rank, int64_t* offsets) {
  std::fill(offsets, offsets + problem.count(), -1);
  std::vector<int64_t> lowest(problem.count(), 0);
  using Entry = std::tuple<int64_t, int32_t, int32_t>;  // offset, rank, buffer
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> waiting;
  for (int32_t i = 0; i < problem.count(); i++) waiting.emplace(0, rank[i], i);
  int64_t peak = 0;
  while (!waiting.empty()) {
    const auto [offset, buffer_rank, buffer] = waiting.top();
    waiting.pop();
    if (offsets[buffer] >= 0 || offset != lowest[buffer]) continue;  // out of date
    offsets[buffer] = offset;
    const int64_t top = offset + sizes[buffer];
    peak = std::max(peak, top);
    problem.visit_neighbours(buffer, [&](int32_t other) {
      if (offsets[other] < 0 && lowest[other] < top) {
        lowest[other] = top;
        waiting.emplace(top, rank[other], other);
      }
    });
  }
  return peak;
}

}  // namespace placement
