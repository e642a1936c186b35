// The C functions that Python calls, the same for both back ends. A back end includes this file and defines the
// functions of namespace `backend` below. Functions that can fail return a negative number, and memo_error() returns
// the message.
#pragma once
#include <pthread.h>

#include <cstdint>
#include <exception>
#include <string>

#include "allocator_core.h"

namespace lightning_memo {

Core& core();

namespace backend {
extern const uint64_t alignment;  // of planned blocks, in bytes
void install();
void uninstall();
bool installed();
void use_device(int device);  // records and serves the current stream of this device from now on
Arena take_arena(uint64_t bytes);
}  // namespace backend

inline std::string& last_error() {
  thread_local std::string text;
  return text;
}

template <class Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::invalid_argument& error) {
    last_error() = error.what();
    return -2;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return -1;
  }
}

// The core is never destroyed, because blocks may be freed until the end of the process.
inline Core* make_core() {
  pthread_atfork([] { core().before_fork(); }, [] { core().after_fork_in_parent(); },
                 [] { core().after_fork_in_child(); });
  return new Core();
}

}  // namespace lightning_memo

#define MEMO_API extern "C" __attribute__((visibility("default")))

MEMO_API const char* memo_error() { return lightning_memo::last_error().c_str(); }
MEMO_API int memo_install() { return lightning_memo::guarded(lightning_memo::backend::install); }
MEMO_API int memo_uninstall() { return lightning_memo::guarded(lightning_memo::backend::uninstall); }
MEMO_API int memo_installed() { return lightning_memo::backend::installed(); }

MEMO_API void memo_phase(int32_t index) { lightning_memo::core().phase(index); }
MEMO_API void memo_leave() { lightning_memo::core().leave(); }
MEMO_API void memo_idle() { lightning_memo::core().idle(); }

MEMO_API int memo_record(int32_t device, int64_t min_bytes) {
  return lightning_memo::guarded([=] {
    lightning_memo::backend::use_device(device);
    lightning_memo::core().record(static_cast<uint64_t>(min_bytes));
  });
}

MEMO_API int memo_serve(int32_t device, int64_t min_bytes, int64_t arena_bytes, int64_t phases, const int64_t* counts,
                        const int64_t* sizes, const int64_t* offsets, const int8_t* in_turn) {
  using namespace lightning_memo;
  return guarded([=] {
    const PlanView plan{phases, counts, sizes, offsets, in_turn};
    const uint64_t bytes = static_cast<uint64_t>(arena_bytes);
    PlanTable{}.load(plan, bytes, static_cast<uint64_t>(min_bytes), backend::alignment);  // throws before any change
    backend::use_device(device);
    if (!core().keep_arena(bytes)) core().set_arena(backend::take_arena(bytes));
    core().serve_plan(plan, static_cast<uint64_t>(min_bytes), backend::alignment);
  });
}

MEMO_API int memo_release() { return lightning_memo::core().release(); }

MEMO_API int64_t memo_event_count() { return lightning_memo::core().event_count(); }
MEMO_API int64_t memo_take_events(lightning_memo::Event* out, int64_t capacity) {
  return lightning_memo::core().take_events(out, capacity);
}
MEMO_API void memo_stats(lightning_memo::Stats* out) { *out = lightning_memo::core().stats(); }
MEMO_API void memo_reset_stats() { lightning_memo::core().reset_stats(); }
