#include "reductions.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace emulated {
namespace {

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t raw;
    std::memcpy(&raw, &value, sizeof raw);
    const bool nan = value != value;
    bits = static_cast<uint16_t>(nan ? (raw >> 16 | 0x40) : (raw + 0x7FFF + (raw >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t raw = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &raw, sizeof value);
    return value;
  }
};

/// Reduces values of type T; sums are formed in type A, and rounded once.
template <class T, class A>
void reduce_as(const std::vector<const char*>& contributions, char* out, size_t count, int reduction, double factor) {
  for (size_t n = 0; n < count; ++n) {
    A result{};
    for (size_t rank = 0; rank < contributions.size(); ++rank) {
      T stored;
      std::memcpy(&stored, contributions[rank] + n * sizeof(T), sizeof(T));
      A value = static_cast<A>(stored);
      if (factor != 1) value = static_cast<A>(value * static_cast<A>(factor));
      if (rank == 0) result = value;
      else if (reduction == product) result = static_cast<A>(result * value);
      // A NaN of any rank stays, as in NCCL.
      else if (reduction == maximum) result = value != value || value > result ? value : result;
      else if (reduction == minimum) result = value != value || value < result ? value : result;
      else result = static_cast<A>(result + value);
    }
    if (reduction == average) result = static_cast<A>(result / static_cast<A>(contributions.size()));
    const T stored = static_cast<T>(result);
    std::memcpy(out + n * sizeof(T), &stored, sizeof(T));
  }
}

}  // namespace

size_t value_bytes(int type) {
  switch (type) {
    case 0: case 1: case 10: case 11: return 1;
    case 6: case 9: return 2;
    case 2: case 3: case 7: return 4;
    default: return 8;
  }
}

bool is_integer(int type) { return type < 6; }

bool reduce(const std::vector<const char*>& from, char* out, size_t count, int type, int reduction, double factor) {
  switch (type) {
    case 0: return reduce_as<int8_t, int64_t>(from, out, count, reduction, factor), true;
    case 1: return reduce_as<uint8_t, int64_t>(from, out, count, reduction, factor), true;
    case 2: return reduce_as<int32_t, int64_t>(from, out, count, reduction, factor), true;
    case 3: return reduce_as<uint32_t, int64_t>(from, out, count, reduction, factor), true;
    case 4: return reduce_as<int64_t, int64_t>(from, out, count, reduction, factor), true;
    case 5: return reduce_as<uint64_t, uint64_t>(from, out, count, reduction, factor), true;
    case 6: return reduce_as<_Float16, float>(from, out, count, reduction, factor), true;
    case 7: return reduce_as<float, float>(from, out, count, reduction, factor), true;
    case 8: return reduce_as<double, double>(from, out, count, reduction, factor), true;
    case 9: return reduce_as<BFloat16, float>(from, out, count, reduction, factor), true;
    default: return false;  // FP8
  }
}

}  // namespace emulated
