// Replays the requests of a training step repeatedly with torch's real caching allocator, on the stub runtime.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <utility>
#include <vector>

// Declared in no header; torch's larger CUDA library calls it when it is loaded.
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(DeviceIndex));
}

extern "C" void stub_set_total_bytes(size_t);

namespace {

namespace cuda = c10::cuda::CUDACachingAllocator;

class Step {
 public:
  // A request of 0 bytes is left out. A death is the number of requests before it; -1 for none.
  Step(int64_t count, const int64_t* size, const int64_t* death)
      : count_(count), size_(size), freed_(count + 1), live_(count) {
    for (int64_t row = 0; row < count; ++row) {
      if (death[row] >= 0) freed_[death[row]].push_back(row);
    }
  }

  // Records the bytes in use and reserved after each request. A buffer without a death is freed when its successor
  // in the next step is allocated.
  void run(int64_t* allocated, int64_t* reserved) {
    for (int64_t row = 0; row < count_; ++row) {
      free(row);
      c10::DataPtr before = std::move(live_[row]);
      if (size_[row] > 0) live_[row] = cuda::get()->allocate(size_[row]);
      const auto stats = cuda::getDeviceStats(0);
      allocated[row] = stats.allocated_bytes[0].current;
      reserved[row] = stats.reserved_bytes[0].current;
    }
    free(count_);
  }

 private:
  void free(int64_t when) {
    for (const int64_t row : freed_[when]) live_[row].clear();
  }

  int64_t count_;
  const int64_t* size_;
  std::vector<std::vector<int64_t>> freed_;
  std::vector<c10::DataPtr> live_;
};

}  // namespace

// Must be called once before any other function.
extern "C" void start(int64_t total_bytes) {
  stub_set_total_bytes(total_bytes);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::device_count();
  c10::cuda::detail::init_p2p_access_cache(1);
  cuda::init(1);
}

// The results are [steps][count]. Returns the bytes that are reserved at the end, which must be 0, or -1 on errors.
extern "C" int64_t replay(int64_t steps, int64_t count, const int64_t* size, const int64_t* death,
                          int64_t resident_bytes, int64_t* allocated, int64_t* reserved) {
  try {
    {
      const c10::DataPtr resident = resident_bytes > 0 ? cuda::get()->allocate(resident_bytes) : c10::DataPtr();
      Step step(count, size, death);
      for (int64_t done = 0; done < steps; ++done) step.run(allocated + done * count, reserved + done * count);
    }
    cuda::emptyCache();
    return cuda::getDeviceStats(0).reserved_bytes[0].current;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -1;
  }
}
