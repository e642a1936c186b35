// The functions that Python calls. Arrays have one entry per buffer, except `ranges`, which has four.
#include <cstdint>
#include <limits>
#include <optional>

#include "fit.h"
#include "problem.h"
#include "search.h"

namespace {

// A problem, and the lists that its first search makes.
struct OpenProblem {
  placement::Problem problem;
  std::optional<placement::NeighbourLists> neighbours;
};

template <typename Height>
int32_t search(const OpenProblem& open, const int64_t* sizes, int64_t capacity, const int32_t* rank,
               placement::Limits limits, int64_t* offsets, int64_t* weights) {
  const placement::Problem& problem = open.problem;
  placement::Search<Height> search(problem, *open.neighbours, sizes, capacity, rank, limits);
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

OpenProblem* placement_new(int32_t count, int32_t sections, const int32_t* ranges) {
  return new OpenProblem{placement::Problem(count, sections, ranges), std::nullopt};
}

void placement_delete(OpenProblem* open) { delete open; }

int64_t placement_fit(const OpenProblem* open, const int64_t* sizes, const int32_t* order, int32_t tightest,
                      int64_t* offsets) {
  return placement::fit(open->problem, sizes, order, tightest != 0, offsets);
}

int64_t placement_skyline(const OpenProblem* open, const int64_t* sizes, const int32_t* rank, int64_t* offsets) {
  return placement::skyline(open->problem, sizes, rank, offsets);
}

// Sizes, which are those of the first search, and capacity are at most 2^61: no sum of an offset and a size overflows.
int32_t placement_search(OpenProblem* open, const int64_t* sizes, int64_t capacity, const int32_t* rank, int64_t nodes,
                         double seconds, int64_t* offsets, int64_t* weights) {
  if (!open->neighbours) open->neighbours.emplace(open->problem, sizes);
  const placement::Limits limits{nodes, seconds};
  const bool narrow = capacity <= std::numeric_limits<int32_t>::max() / 4;  // twice as many per register
  return narrow ? search<int32_t>(*open, sizes, capacity, rank, limits, offsets, weights)
                : search<int64_t>(*open, sizes, capacity, rank, limits, offsets, weights);
}
}
#pragma GCC visibility pop
