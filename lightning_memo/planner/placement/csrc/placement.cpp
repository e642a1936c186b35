// The functions that Python calls. Arrays have one entry per buffer, except `ranges`, which has four.
#include <cstdint>
#include <limits>

#include "fit.h"
#include "problem.h"
#include "search.h"

namespace {

template <typename Height>
int32_t search(const placement::Problem& problem, const int64_t* sizes, int64_t capacity, const int32_t* rank,
               placement::Limits limits, int64_t* offsets, int64_t* weights) {
  placement::Search<Height> search(problem, sizes, capacity, rank, limits);
  const placement::Outcome outcome = search.run();
  for (int32_t i = 0; i < problem.count(); i++) {
    weights[i] += search.weight(i);
    if (outcome == placement::Outcome::Found) offsets[i] = search.offset(i);
  }
  return static_cast<int32_t>(outcome);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

placement::Problem* placement_new(int32_t count, int32_t sections, const int32_t* ranges, const int64_t* sizes) {
  return new placement::Problem(count, sections, ranges, sizes);
}

void placement_delete(placement::Problem* problem) { delete problem; }

int64_t placement_fit(const placement::Problem* problem, const int64_t* sizes, const int32_t* order, int32_t tightest,
                      int64_t* offsets) {
  return placement::fit(*problem, sizes, order, tightest != 0, offsets);
}

int64_t placement_skyline(const placement::Problem* problem, const int64_t* sizes, const int32_t* rank,
                          int64_t* offsets) {
  return placement::skyline(*problem, sizes, rank, offsets);
}

// Sizes and capacity are at most 2^61, so no sum of an offset and a size overflows.
int32_t placement_search(const placement::Problem* problem, const int64_t* sizes, int64_t capacity,
                         const int32_t* rank, int64_t nodes, double seconds, int64_t* offsets, int64_t* weights) {
  const placement::Limits limits{nodes, seconds};
  const bool narrow = capacity <= std::numeric_limits<int32_t>::max() / 4;  // twice as many per register
  return narrow ? search<int32_t>(*problem, sizes, capacity, rank, limits, offsets, weights)
                : search<int64_t>(*problem, sizes, capacity, rank, limits, offsets, weights);
}
}
#pragma GCC visibility pop
