// The allocator's core without torch: a comparison with a slow but obvious allocator, threads, and edge cases.
#include "allocator_core.h"

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.h"

using namespace lightning_memo;

namespace {

constexpr uint64_t unit = 64;

struct Plan {
  std::vector<int64_t> counts, sizes, offsets;
  std::vector<int8_t> in_turn = {};
  PlanView view() const {
    return {static_cast<int64_t>(counts.size()), counts.data(), sizes.data(), offsets.data(),
            in_turn.empty() ? nullptr : in_turn.data()};
  }
};

// An arena whose bytes are never accessed needs no memory.
Arena arena_of(uint64_t bytes, bool* gone = nullptr) {
  return {reinterpret_cast<char*>(uint64_t{1} << 40), bytes, [=] {
            if (gone != nullptr) *gone = true;
          }};
}

// Not all sizes are multiples of the alignment.
int64_t random_size(std::mt19937& random, uint64_t most_units) {
  return static_cast<int64_t>((1 + random() % most_units) * unit - (random() % 2 == 0 ? 0 : random() % unit));
}

Plan random_plan(std::mt19937& random, uint64_t arena_units) {
  Plan plan;
  const int kinds = 1 + static_cast<int>(random() % 6);  // few sizes, so that neighbours are mistaken for each other
  std::vector<int64_t> sizes;
  for (int i = 0; i < kinds; ++i) sizes.push_back(random_size(random, arena_units / 3));
  const int phases = 1 + static_cast<int>(random() % 4);
  for (int phase = 0; phase < phases; ++phase) {
    plan.counts.push_back(static_cast<int64_t>(random() % 20));
    for (int64_t i = 0; i < plan.counts.back(); ++i) {
      const int64_t size = sizes[random() % sizes.size()];
      const uint64_t places = arena_units - (static_cast<uint64_t>(size) + unit - 1) / unit + 1;
      const auto offset = static_cast<int64_t>(random() % places * unit);
      plan.sizes.push_back(size);
      plan.in_turn.push_back(size % 3 == 0);
      plan.offsets.push_back(random() % 10 == 0 ? -1 : offset);
    }
  }
  return plan;
}

// A reference implementation of the core's behaviour.
class Oracle {
 public:
  explicit Oracle(uint64_t arena_bytes) : arena_bytes_(arena_bytes) {}
  void load(const Plan& plan) { plan_ = plan; }
  void phase(int32_t index) {
    begin_ = next_ = end_ = plan_.sizes.size();
    taken_.assign(end_, false);
    if (index < 0 || static_cast<size_t>(index) >= plan_.counts.size()) return;
    begin_ = 0;
    for (int32_t i = 0; i < index; ++i) begin_ += static_cast<size_t>(plan_.counts[static_cast<size_t>(i)]);
    next_ = begin_;
    end_ = begin_ + static_cast<size_t>(plan_.counts[static_cast<size_t>(index)]);
  }
  // Returns the offset at which a request is served; -1 if it is not served.
  int64_t serve(uint64_t size, Stats& stats) {
    size_t slot = end_;
    bool known = begin_ == end_;
    for (size_t i = end_; i-- > begin_;) {
      if (static_cast<uint64_t>(plan_.sizes[i]) != size) continue;
      known = true;
      if (!taken_[i] && (!plan_.in_turn[i] || i == next_)) slot = i;
    }
    for (size_t i = begin_; i < slot && slot != end_; ++i) {  // requests are not made up for
      if (static_cast<uint64_t>(plan_.sizes[i]) == size) taken_[i] = true;
    }
    if (slot == end_) {
      ++(known ? stats.miss_end : stats.miss_size);
      return fit(size, stats);
    }
    stats.out_of_order += slot != next_;
    taken_[slot] = true;
    next_ = slot + 1;
    const int64_t offset = plan_.offsets[slot];
    if (offset < 0) return ++stats.unplanned, -1;
    if (!is_free(static_cast<uint64_t>(offset), size)) {
      ++stats.miss_overlap;
      return fit(size, stats);
    }
    live[static_cast<uint64_t>(offset)] = size;
    return ++stats.hits, offset;
  }
  uint64_t next_size() const { return next_ < end_ ? static_cast<uint64_t>(plan_.sizes[next_]) : 0; }
  std::map<uint64_t, uint64_t> live;

 private:
  bool is_free(uint64_t first, uint64_t size) const {
    for (const auto& [begin, bytes] : live) {
      if (begin < first + size && first < begin + bytes) return false;
    }
    return first + size <= arena_bytes_;
  }
  // The highest free bytes end at the end of the arena or where a block begins, or less than `unit` below.
  int64_t fit(uint64_t size, Stats& stats) {
    int64_t highest = -1;
    std::vector<uint64_t> ends{arena_bytes_};
    for (const auto& block : live) ends.push_back(block.first);
    for (const uint64_t end : ends) {
      if (end < size) continue;
      const uint64_t offset = (end - size) / unit * unit;
      if (is_free(offset, size)) highest = std::max(highest, static_cast<int64_t>(offset));
    }
    if (highest < 0) return -1;
    live[static_cast<uint64_t>(highest)] = size;
    return ++stats.fitted, highest;
  }
  Plan plan_;
  uint64_t arena_bytes_;
  std::vector<bool> taken_;
  size_t begin_ = 0;
  size_t next_ = 0;
  size_t end_ = 0;
};

void check_equal(const Stats& one, const Stats& other, size_t live_blocks) {
  CHECK(one.hits == other.hits);
  CHECK(one.fitted == other.fitted);
  CHECK(one.miss_size == other.miss_size);
  CHECK(one.miss_end == other.miss_end);
  CHECK(one.miss_overlap == other.miss_overlap);
  CHECK(one.unplanned == other.unplanned);
  CHECK(one.out_of_order == other.out_of_order);
  CHECK(one.bad_frees == 0);
  CHECK(one.live_blocks == static_cast<int64_t>(live_blocks));
}

// Runs steps of a random plan, with late frees, requests that are missing or too many, phases in any order, and new
// plans over living blocks.
int64_t fuzz(uint32_t seed) {
  std::mt19937 random(seed);
  const uint64_t arena_units = 8 + random() % (seed % 3 == 0 ? 20000 : 200);
  const uint32_t chaos = random() % 30;  // percent
  Core core;
  Oracle oracle(arena_units * unit);
  Stats expected;
  const Arena arena = arena_of(arena_units * unit);
  core.set_arena(arena);
  const auto load = [&] {
    const Plan plan = random_plan(random, arena_units);
    core.serve_plan(plan.view(), 1, unit);
    oracle.load(plan);
    return plan;
  };
  Plan plan = load();
  const auto free_some = [&](uint32_t percent) {
    for (auto block = oracle.live.begin(); block != oracle.live.end();) {
      if (random() % 100 >= percent) {
        ++block;
        continue;
      }
      CHECK(core.planned_size(arena.base + block->first) == block->second);
      CHECK(core.free_planned(arena.base + block->first));
      block = oracle.live.erase(block);
    }
  };
  for (int step = 0; step < 40; ++step) {
    if (random() % 400 < chaos) plan = load();
    int32_t phase = step % static_cast<int32_t>(plan.counts.size() + 1);
    if (random() % 100 < chaos) phase = static_cast<int32_t>(random() % 6);
    core.phase(phase);
    oracle.phase(phase);
    for (int i = 0; i < 22; ++i) {
      uint64_t size = oracle.next_size();
      if (size == 0 || random() % 100 < chaos) {
        if (plan.sizes.empty() || random() % 3 == 0) break;
        size = static_cast<uint64_t>(plan.sizes[random() % plan.sizes.size()]);
        if (random() % 4 == 0) size = static_cast<uint64_t>(random_size(random, arena_units / 2));
      }
      const int64_t offset = oracle.serve(size, expected);
      const void* address = core.serve(size);
      CHECK(address == (offset < 0 ? nullptr : arena.base + offset));
      free_some(random() % 100 < chaos ? 5 : 30);
    }
    check_equal(core.stats(), expected, oracle.live.size());
  }
  free_some(100);
  CHECK(core.stats().live_bytes == 0);
  CHECK(core.release());
  core.leave();
  return expected.hits + expected.fitted;
}

void test_against_oracle(uint32_t rounds) {
  int64_t decided = 0;
  for (uint32_t seed = 0; seed < rounds; ++seed) decided += fuzz(seed);
  CHECK(decided > 50 * static_cast<int64_t>(rounds));  // enough requests were compared
}

void test_bit_tree(uint32_t rounds) {
  std::mt19937 random(1);
  for (const size_t limit : {1, 63, 64, 65, 4095, 4096, 4097, 300000}) {
    BitTree tree(limit);
    std::set<size_t> members;
    CHECK(tree.previous(limit) == -1);
    for (uint32_t i = 0; i < rounds; ++i) {
      const size_t member = random() % limit;
      if (random() % 2 == 0) {
        tree.insert(member);
        members.insert(member);
      } else {
        tree.erase(member);
        members.erase(member);
      }
      const size_t asked = random() % (limit + 1);
      const auto above = members.lower_bound(asked);
      const int64_t before = above == members.begin() ? -1 : static_cast<int64_t>(*std::prev(above));
      CHECK(tree.previous(asked) == before);
    }
  }
}

// Two blocks of 64 bytes, one after the other.
Plan two_blocks() { return {{2}, {64, 64}, {0, 64}}; }

void test_release_waits() {
  Core core;
  bool gone = false;
  core.set_arena(arena_of(128, &gone));
  const Plan plan = two_blocks();
  core.serve_plan(plan.view(), 1, unit);
  core.phase(0);
  void* first = core.serve(64);
  CHECK(first != nullptr);
  CHECK(!core.release() && !gone);
  CHECK(core.serve(64) == nullptr);
  CHECK(core.keep_arena(128));  // a new plan reuses the arena
  core.serve_plan(plan.view(), 1, unit);
  core.phase(0);
  CHECK(core.serve(64) == static_cast<char*>(first) + 64 && core.serve(64) == nullptr);
  CHECK(core.free_planned(static_cast<char*>(first) + 64));
  CHECK(!core.release() && !gone);
  CHECK(core.free_planned(first) && gone);
  CHECK(!core.free_planned(first));  // not in the arena any more
  CHECK(core.stats().arena_bytes == 0 && core.stats().bad_frees == 0);
  core.leave();
}

// Requests without a place get the highest free bytes, and no place is given away while its bytes are in use.
void test_requests_without_a_place() {
  Core core;
  core.set_arena(arena_of(512));
  const Plan plan{{2}, {64, 128}, {0, 320}};
  core.serve_plan(plan.view(), 1, unit);
  core.phase(0);
  char* const base = arena_of(512).base;
  CHECK(core.serve(100) == base + 384);  // ends above the place of the second request, whose bytes it takes
  CHECK(core.serve(64) == base && core.serve(128) == base + 256);
  CHECK(core.serve(300) == nullptr);  // 192 bytes are free
  CHECK(core.serve(192) == base + 64 && core.serve(1) == nullptr);
  const Stats stats = core.stats();
  CHECK(stats.hits == 1 && stats.fitted == 3 && stats.miss_size == 4 && stats.miss_overlap == 1);
  CHECK(stats.live_blocks == 4 && stats.live_bytes == 100 + 64 + 128 + 192);
  core.serve_plan(plan.view(), 1, unit);  // the blocks stay where they are
  core.phase(0);
  CHECK(core.serve(64) == nullptr && core.serve(128) == nullptr);
  for (const int offset : {0, 64, 256, 384}) CHECK(core.free_planned(base + offset));
  CHECK(core.stats().bad_frees == 0 && core.release());
  core.leave();
}

void test_bad_frees_are_counted() {
  Core core;
  core.set_arena(arena_of(128));
  const Plan plan = two_blocks();
  core.serve_plan(plan.view(), 1, unit);
  char* const base = arena_of(128).base;
  CHECK(core.free_planned(base) && core.free_planned(base + 3) && core.free_planned(base + 127));
  CHECK(!core.free_planned(base + 128) && !core.free_planned(base - 1));
  CHECK(core.stats().bad_frees == 3);
}

template <class Function>
bool refuses(Function function) {
  try {
    function();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

void test_refusals() {
  Core core;
  core.set_arena(arena_of(128));
  CHECK(refuses([&] { core.set_arena(arena_of(128)); }));
  for (const Plan& plan : {Plan{{1}, {64}, {65}}, Plan{{1}, {65}, {64}}, Plan{{1}, {64}, {int64_t{1} << 62}},
                           Plan{{1}, {0}, {0}}, Plan{{1}, {-64}, {0}}, Plan{{1}, {INT64_MAX}, {64}}}) {
    CHECK(refuses([&] { core.serve_plan(plan.view(), 1, unit); }));
    CHECK(core.mode() == Mode::idle);
  }
  const Plan plan = two_blocks();
  core.serve_plan(plan.view(), 1, unit);
  core.phase(0);
  void* const block = core.serve(64);
  CHECK(refuses([&] { core.keep_arena(256); }));
  CHECK(core.free_planned(block) && !core.keep_arena(256));
  core.leave();
}

void test_fork_handlers() {
  Core core;
  core.set_arena(arena_of(128));
  const Plan plan = two_blocks();
  core.serve_plan(plan.view(), 1, unit);
  core.phase(0);
  core.before_fork();
  core.after_fork_in_parent();
  CHECK(core.serve(64) != nullptr);
  core.before_fork();
  core.after_fork_in_child();
  CHECK(core.mode() == Mode::idle && core.stats().live_blocks == 1);
  core.leave();
}

// Eight threads make requests, free each other's blocks, mark phases and record. Owners write to their blocks, so that
// the thread sanitizer detects a block that is served twice.
void test_threads(int rounds) {
  constexpr int64_t slots = 64, bytes = 256;
  std::vector<char> memory(static_cast<size_t>(slots * bytes) + 64);
  char* const base = memory.data() + (64 - reinterpret_cast<uint64_t>(memory.data()) % 64);
  Core core;
  core.set_arena({base, slots * bytes, [] {}});
  Plan plan{{slots}, {}, {}};
  for (int64_t i = 0; i < slots; ++i) {
    plan.sizes.push_back(bytes);
    plan.offsets.push_back(i * 37 % slots * (bytes - 64));  // neighbours overlap
  }
  core.serve_plan(plan.view(), 1, 64);
  std::mutex exchange;
  std::vector<char*> handed_over;
  const auto work = [&](uint32_t seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < rounds; ++i) {
      if (random() % 32 == 0) core.phase(0);
      if (random() % 256 == 0) core.record(1);
      if (random() % 64 == 0) core.serve_plan(plan.view(), 1, 64);
      if (auto* block = static_cast<char*>(core.serve(bytes))) {
        std::memset(block, static_cast<int>(seed), bytes);
        core.log_malloc(block, bytes, 0, true);
        for (int64_t j = 0; j < bytes; j += 63) CHECK(block[j] == static_cast<char>(seed));
        const std::lock_guard guard(exchange);
        handed_over.push_back(block);
      }
      char* other = nullptr;
      {
        const std::lock_guard guard(exchange);
        if (!handed_over.empty() && random() % 8 != 0) {
          other = handed_over.back();
          handed_over.pop_back();
        }
      }
      if (other == nullptr) continue;
      other[0] = 0;
      core.log_free(other);
      CHECK(core.free_planned(other));
    }
    core.leave();
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 1; seed <= 8; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
  for (char* block : handed_over) CHECK(core.free_planned(block));
  CHECK(core.stats().hits > 0 && core.stats().fitted > rounds / 4);
  CHECK(core.stats().live_blocks == 0 && core.stats().bad_frees == 0 && core.release());
}

}  // namespace

int main(int, char** arguments) {
  const auto rounds = static_cast<uint32_t>(std::atoi(arguments[1]));
  test_bit_tree(rounds * 5);
  test_against_oracle(rounds);
  test_release_waits();
  test_requests_without_a_place();
  test_bad_frees_are_counted();
  test_refusals();
  test_fork_handlers();
  test_threads(static_cast<int>(rounds) * 10);
}
