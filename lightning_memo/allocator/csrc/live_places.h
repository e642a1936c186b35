// The set of the arena's byte ranges in use, with exact queries in a few nanoseconds.
//
// The plan gives all offsets at which blocks can start. These offsets are sorted once; an index into them is called a
// place. A live block is one bit in a set of places. Live blocks never overlap. A range is therefore free if and only
// if the last live block that starts before the end of the range ends before its beginning, which takes one search for
// a bit.
//
// Blocks of requests without a place are kept in a map. They start wherever `highest_gap` found free bytes.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace lightning_memo {

// A set of integers below a limit. Each bit of a level says whether a word of the level below is not 0.
class BitTree {
 public:
  explicit BitTree(size_t limit = 0) {
    size_t bits = limit + 1;  // previous(limit) reads the word of `limit` itself
    do {
      bits = bits / 64 + 1;
      levels_.emplace_back(bits, 0);
    } while (bits > 1);
  }
  void insert(size_t i) {
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      const bool was_empty = word == 0;
      word |= bit(i);
      if (!was_empty) return;
      i /= 64;
    }
  }
  void erase(size_t i) {
    for (auto& level : levels_) {
      uint64_t& word = level[i / 64];
      word &= ~bit(i);
      if (word != 0) return;
      i /= 64;
    }
  }
  // Returns the largest member below i, or -1.
  int64_t previous(size_t i) const {
    for (size_t height = 0; height < levels_.size(); ++height) {
      const uint64_t below = levels_[height][i / 64] & (bit(i) - 1);
      i /= 64;
      if (below == 0) continue;
      i = i * 64 + highest(below);
      while (height-- > 0) i = i * 64 + highest(levels_[height][i]);
      return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  static uint64_t bit(size_t i) { return uint64_t{1} << (i % 64); }
  static size_t highest(uint64_t word) { return 63 - static_cast<size_t>(std::countl_zero(word)); }
  std::vector<std::vector<uint64_t>> levels_;
};

class LivePlaces {
 public:
  LivePlaces() : LivePlaces(std::vector<uint64_t>{}) {}
  // Takes the offsets at which blocks may start, in any order and with repetitions.
  explicit LivePlaces(std::vector<uint64_t> offsets) : offsets_(std::move(offsets)) {
    std::sort(offsets_.begin(), offsets_.end());
    offsets_.erase(std::unique(offsets_.begin(), offsets_.end()), offsets_.end());
    ends_.assign(offsets_.size(), 0);
    live_ = BitTree(offsets_.size());
    fill_table();
  }
  // Returns the number of places before an offset, which is the place of the offset if it has one.
  uint32_t rank(uint64_t offset) const {
    return static_cast<uint32_t>(std::lower_bound(offsets_.begin(), offsets_.end(), offset) - offsets_.begin());
  }
  // Returns whether a live block overlaps [offset, end), where end_rank = rank(end).
  bool occupied(uint64_t offset, uint64_t end, uint32_t end_rank) const {
    const int64_t last = live_.previous(end_rank);
    if (last >= 0 && ends_[static_cast<size_t>(last)] > offset) return true;
    if (elsewhere_.empty()) return false;
    const auto after = elsewhere_.lower_bound(end);
    return after != elsewhere_.begin() && std::prev(after)->second > offset;
  }
  void insert(uint32_t place, uint64_t end) {
    ends_[place] = end;
    live_.insert(place);
    ++count_;
  }
  // Adds a block in free bytes that need not begin at a place.
  void insert_elsewhere(uint64_t offset, uint64_t end) { elsewhere_.emplace(offset, end); }
  // Returns the highest multiple of `alignment` at which `size` bytes below `limit` are free, or `no_gap`. The search
  // visits the live blocks from the top of the arena down, until it finds a gap that is large enough.
  uint64_t highest_gap(uint64_t size, uint64_t limit, uint64_t alignment) const {
    int64_t place = live_.previous(offsets_.size());
    auto other = elsewhere_.rbegin();
    while (place >= 0 || other != elsewhere_.rend()) {
      const bool at_place = other == elsewhere_.rend() || (place >= 0 && offset_at(place) > other->first);
      const uint64_t end = at_place ? ends_[static_cast<size_t>(place)] : other->second;
      const uint64_t offset = highest_in(end, limit, size, alignment);
      if (offset != no_gap) return offset;
      limit = std::min(limit, at_place ? offset_at(place) : other->first);
      if (at_place) {
        place = live_.previous(static_cast<size_t>(place));
      } else {
        ++other;
      }
    }
    return highest_in(0, limit, size, alignment);
  }
  // Removes the block that starts at an offset. Returns its size; 0 if there is none.
  uint64_t erase(uint64_t offset) {
    const uint32_t place = find(offset);
    if (place == none || ends_[place] == 0) return erase_elsewhere(offset);
    const uint64_t size = ends_[place] - offset;
    ends_[place] = 0;
    live_.erase(place);
    --count_;
    return size;
  }
  // Returns the size of the live block that starts at an offset; 0 if there is none.
  uint64_t size_at(uint64_t offset) const {
    const uint32_t place = find(offset);
    if (place != none && ends_[place] != 0) return ends_[place] - offset;
    const auto found = elsewhere_.find(offset);
    return found == elsewhere_.end() ? 0 : found->second - offset;
  }
  uint64_t count() const { return count_ + elsewhere_.size(); }
  // Returns where the live blocks begin and end.
  std::vector<std::pair<uint64_t, uint64_t>> ranges() const {
    std::vector<std::pair<uint64_t, uint64_t>> found(elsewhere_.begin(), elsewhere_.end());
    for (size_t i = 0; i < offsets_.size(); ++i) {
      if (ends_[i] != 0) found.emplace_back(offsets_[i], ends_[i]);
    }
    return found;
  }
  static constexpr uint64_t no_gap = UINT64_MAX;

 private:
  static constexpr uint32_t none = UINT32_MAX;
  uint64_t offset_at(int64_t place) const { return offsets_[static_cast<size_t>(place)]; }
  // Returns the highest multiple of `alignment` at which `size` bytes fit into [begin, end), or `no_gap`.
  static uint64_t highest_in(uint64_t begin, uint64_t end, uint64_t size, uint64_t alignment) {
    if (end < size) return no_gap;
    const uint64_t offset = (end - size) / alignment * alignment;
    return offset >= begin ? offset : no_gap;
  }
  uint64_t erase_elsewhere(uint64_t offset) {
    const auto found = elsewhere_.find(offset);
    if (found == elsewhere_.end()) return 0;
    const uint64_t size = found->second - offset;
    elsewhere_.erase(found);
    return size;
  }
  // A hash table with open addressing. Its entries are 1 + place; none is ever removed, because places don't change.
  void fill_table() {
    table_.assign(std::bit_ceil(4 * offsets_.size() + 4), 0);
    shift_ = 64 - std::countr_zero(table_.size());
    for (uint32_t place = 0; place < offsets_.size(); ++place) {
      size_t i = hash(offsets_[place]);
      while (table_[i] != 0) i = (i + 1) & (table_.size() - 1);
      table_[i] = place + 1;
    }
  }
  uint32_t find(uint64_t offset) const {
    for (size_t i = hash(offset); table_[i] != 0; i = (i + 1) & (table_.size() - 1)) {
      if (offsets_[table_[i] - 1] == offset) return table_[i] - 1;
    }
    return none;
  }
  size_t hash(uint64_t offset) const { return (offset * 0x9E3779B97F4A7C15u) >> shift_; }

  std::vector<uint64_t> offsets_;
  std::vector<uint64_t> ends_;  // of the live blocks; 0 at places without one
  std::map<uint64_t, uint64_t> elsewhere_;  // begin and end of the live blocks without a place
  std::vector<uint32_t> table_;
  int shift_ = 0;
  BitTree live_;
  uint64_t count_ = 0;  // of the live blocks at places
};

}  // namespace lightning_memo
