// The CUDA back end in front of torch's real caching allocator, on the stub runtime.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/headeronly/version.h>

#include <string>
#include <thread>
#include <vector>

#include "../../allocator/cpp/check.h"
#include "allocator_core.h"

// Declared in no header; torch's larger CUDA library calls it when it is loaded.
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(DeviceIndex));
}

namespace cuda = c10::cuda::CUDACachingAllocator;
using lightning_memo::Event;
using lightning_memo::Stats;

extern "C" {
const char* memo_error();
int memo_install();
int memo_uninstall();
int memo_installed();
void memo_phase(int32_t);
void memo_leave();
void memo_idle();
int memo_record(int32_t, int64_t);
int memo_serve(int32_t, int64_t, int64_t, int64_t, const int64_t*, const int64_t*, const int64_t*, const int8_t*);
int memo_release();
int64_t memo_event_count();
int64_t memo_take_events(Event*, int64_t);
void memo_stats(Stats*);
void memo_reset_stats();

void stub_hold_events(int);
int stub_waits();
int stub_live_events();
size_t stub_used_bytes();
}

namespace {

constexpr size_t mib = size_t{1} << 20;

c10::DataPtr block(size_t size) { return cuda::get()->allocate(size); }
char* at(const c10::DataPtr& pointer) { return static_cast<char*>(pointer.get()); }
Stats stats() {
  Stats now;
  memo_stats(&now);
  return now;
}
int64_t allocated_bytes() { return cuda::getDeviceStats(0).allocated_bytes[0].current; }

// Phase 0: 1 MiB at 0, 2 MiB at 1 MiB, 1 MiB at 0, in an arena of 8 MiB. Returns the arena's begin.
char* serve() {
  const int64_t count = 3, sizes[] = {mib, 2 * mib, mib}, offsets[] = {0, mib, 0};
  CHECK(memo_serve(0, 1024, 8 * mib, 1, &count, sizes, offsets, nullptr) == 0);
  memo_reset_stats();
  memo_phase(0);
  const c10::DataPtr first = block(mib);
  char* const base = at(first);
  memo_phase(0);
  return base;
}

void test_install_after_blocks_exist() {
  c10::DataPtr before = block(3 * mib);
  const int64_t bytes = allocated_bytes();
  CHECK(memo_install() == 0 && memo_install() == 0 && memo_installed());
  CHECK(cuda::get()->name() == "native");
  CHECK(c10::GetAllocator(c10::DeviceType::CUDA) == cuda::get());
  c10::DataPtr after = block(5 * mib);
  CHECK(allocated_bytes() - bytes == 5 * static_cast<int64_t>(mib));
  after.clear();
  CHECK(allocated_bytes() == bytes);
}

void test_record() {
  CHECK(memo_record(0, 1024) == 0);
  memo_phase(2);
  c10::DataPtr first = block(mib), second = block(2 * mib), small = block(100);
  second.clear();
  c10::DataPtr other_stream;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    other_stream = block(mib);
  }
  memo_leave();
  memo_idle();
  CHECK(memo_event_count() == 4);
  Event events[4];
  CHECK(memo_take_events(events, 4) == 4);
  CHECK(events[0].size == mib && events[0].phase == 2 && events[0].sequence == 0);
  CHECK(events[1].sequence == 1 && events[2].kind == 1 && events[2].id == events[1].id);
  CHECK(events[3].sequence == -1 && events[3].stream != events[0].stream);
}

void test_planned_addresses_and_misses() {
  char* const base = serve();
  const int64_t bytes = allocated_bytes();
  c10::DataPtr first = block(mib), second = block(2 * mib);
  CHECK(at(first) == base && at(second) == base + mib);
  c10::DataPtr overlapping = block(mib), late = block(mib);
  CHECK(stats().miss_overlap == 1 && stats().miss_end == 1 && stats().fitted == 2);
  CHECK(at(overlapping) == base + 7 * mib && at(late) == base + 6 * mib && allocated_bytes() == bytes);
  c10::DataPtr without_room = block(4 * mib);
  CHECK(stats().miss_size == 1 && stats().fitted == 2);
  CHECK(allocated_bytes() - bytes == 4 * static_cast<int64_t>(mib));
  std::thread([] { c10::DataPtr foreign = block(mib); }).join();
  CHECK(stats().foreign == 1);
}

void test_other_streams_and_pools_are_delegated() {
  serve();
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    c10::DataPtr other = block(mib);
  }
  CHECK(stats().hits == 1 && stats().outside == 1);
  const c10::MempoolId_t pool{0, 7};
  cuda::beginAllocateToPool(0, pool, [](cudaStream_t) { return true; });
  c10::DataPtr pooled = block(mib);
  cuda::endAllocateToPool(0, pool);
  CHECK(stats().hits == 1 && stats().outside == 2);
  pooled.clear();
  cuda::releasePool(0, pool);
  c10::DataPtr planned = block(mib);
  CHECK(stats().hits == 2);
}

void test_snapshot_and_empty_cache_keep_the_arena() {
  char* const base = serve();
  cuda::emptyCache();
  bool found = false;
  for (const auto& segment : cuda::snapshot().segments) {
    for (const auto& part : segment.blocks) {
      found |= reinterpret_cast<char*>(segment.address) == base && part.allocated;
    }
  }
  CHECK(found);
  c10::DataPtr first = block(mib);
  CHECK(at(first) == base);
  size_t size = 0;
  CHECK(cuda::getBaseAllocation(base + 512, &size) == base);
  CHECK(cuda::shareIpcHandle(base + 512).offset == 512);
}

void test_out_of_memory_is_torchs_own() {
  serve();
  const int64_t ooms = cuda::getDeviceStats(0).num_ooms;
  try {
    block(size_t{2} << 30);
    CHECK(false);
  } catch (const c10::OutOfMemoryError& error) {
    CHECK(std::string(error.what()).find("Tried to allocate 2.00 GiB") != std::string::npos);
  }
  CHECK(cuda::getDeviceStats(0).num_ooms == ooms + 1);
  const int64_t count = 1, size = 4096, offset = 0;
  memo_leave();
  CHECK(memo_serve(0, 1024, int64_t{4} << 30, 1, &count, &size, &offset, nullptr) == -1);
  CHECK(std::string(memo_error()).find("Tried to allocate 4.00 GiB") != std::string::npos);
}

void test_side_streams() {
  char* const base = serve();
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  const int events = stub_live_events(), waits = stub_waits();
  stub_hold_events(1);
  c10::DataPtr first = block(mib);
  cuda::recordStream(first, side);
  cuda::recordStream(first, side);
  first.clear();
  CHECK(stub_live_events() == events + 1 && stub_waits() == waits);
  c10::DataPtr apart = block(2 * mib);
  CHECK(stub_waits() == waits);
  c10::DataPtr again = block(mib);
  CHECK(at(again) == base && stub_waits() == waits + 1 && stub_live_events() == events);
  again.clear();
  apart.clear();
  // Delegated blocks that are large enough for segments of their own: torch must see the stream despite our deleter.
  memo_leave();
  c10::DataPtr delegated = block(30 * mib);
  char* const address = at(delegated);
  cuda::recordStream(delegated, side);
  delegated.clear();
  c10::DataPtr next = block(30 * mib);
  CHECK(at(next) != address);
  stub_hold_events(0);
  c10::DataPtr last = block(30 * mib);
  CHECK(at(last) == address);
  // An arena that is freed waits too.
  memo_phase(0);
  first = block(mib);
  cuda::recordStream(first, side);
  const int events_before = stub_live_events(), waits_before = stub_waits();
  first.clear();
  CHECK(memo_release() == 1 && stub_waits() == waits_before + 1 && stub_live_events() == events_before);
}

void test_side_streams_of_blocks_without_a_place() {
  char* const base = serve();
  const int events = stub_live_events(), waits = stub_waits();
  stub_hold_events(1);
  c10::DataPtr fitted = block(4 * mib);
  CHECK(at(fitted) == base + 4 * mib);
  cuda::recordStream(fitted, c10::cuda::getStreamFromPool());
  fitted.clear();
  CHECK(stub_live_events() == events + 1 && stub_waits() == waits);
  c10::DataPtr on_its_bytes = block(3 * mib);
  CHECK(at(on_its_bytes) == base + 5 * mib && stub_waits() == waits + 1 && stub_live_events() == events);
  stub_hold_events(0);
}

void test_another_stream_needs_an_empty_arena() {
  serve();
  c10::DataPtr first = block(mib);
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const int64_t count = 1, size = mib, offset = 0;
  CHECK(memo_serve(0, 1024, 8 * mib, 1, &count, &size, &offset, nullptr) == -1);
  first.clear();
  CHECK(memo_serve(0, 1024, 8 * mib, 1, &count, &size, &offset, nullptr) == 0);
  memo_phase(0);
  c10::DataPtr other = block(mib);
  CHECK(stats().live_blocks == 1);
}

void test_uninstall_leaves_blocks_valid() {
  serve();
  c10::DataPtr planned = block(mib), delegated = block(9 * mib);
  CHECK(memo_uninstall() == 0 && !memo_installed());
  CHECK(c10::GetAllocator(c10::DeviceType::CUDA) == cuda::get());
  CHECK(memo_release() == 0);
  const int64_t bytes = allocated_bytes();
  planned.clear();
  CHECK(bytes - allocated_bytes() == 8 * static_cast<int64_t>(mib));
  delegated.clear();
  CHECK(allocated_bytes() == 0);
  cuda::emptyCache();
  CHECK(stub_used_bytes() == 0 && stats().bad_frees == 0);
}

}  // namespace

extern "C" int run_tests() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::device_count();
  cuda::init(1);
  test_install_after_blocks_exist();
  test_record();
  test_planned_addresses_and_misses();
  test_other_streams_and_pools_are_delegated();
  test_snapshot_and_empty_cache_keep_the_arena();
  test_out_of_memory_is_torchs_own();
  test_side_streams();
  test_side_streams_of_blocks_without_a_place();
  test_another_stream_needs_an_empty_arena();
  test_uninstall_leaves_blocks_valid();
  return 0;
}
