#include "simulation.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace emulated {
namespace {

/// What does one operation at a time: the multiprocessors, the copy engine of each direction, and the links to other devices. An operation may begin in a gap
/// before others that were launched earlier.
class Unit {
 public:
  /// Returns when an operation begins that may begin at `from`.
  double take(double from, double seconds) {
    double begin = from;
    auto next = busy_.upper_bound(from);
    if (next != busy_.begin()) begin = std::max(begin, std::prev(next)->second);
    for (; next != busy_.end() && next->first < begin + seconds; ++next) begin = std::max(begin, next->second);
    if (seconds > 0) add(begin, begin + seconds);
    return begin;
  }

 private:
  void add(double begin, double end) {  // neighbours become one
    auto next = busy_.lower_bound(begin);
    if (next != busy_.end() && next->first <= end + tolerance) {
      end = std::max(end, next->second);
      next = busy_.erase(next);
    }
    if (next != busy_.begin() && std::prev(next)->second >= begin - tolerance) {
      std::prev(next)->second = std::max(std::prev(next)->second, end);
      return;
    }
    busy_[begin] = end;
    if (busy_.size() > kept) busy_.erase(busy_.begin());
  }
  static constexpr double tolerance = 1e-12;
  static constexpr size_t kept = 20000;
  std::map<double, double> busy_;  // begin: end
};

struct Units {
  Unit multiprocessors, to_device, to_host, network;
};

struct Simulation {
  std::recursive_mutex mutex;
  double program_time = 0;  // of the main thread and autograd's, of which one waits for the other
  std::atomic<int> program_waits = 0;
  std::vector<Units> devices{static_cast<size_t>(settings().devices)};
  std::vector<Span> spans;
};
Simulation& simulation() {
  static Simulation* s = new Simulation;
  return *s;
}
using Lock = std::lock_guard<std::recursive_mutex>;

/// The host's clock of a thread: the program's, or one of its own that begins at the program's time.
struct ThreadClock {
  double own = 0;
  double* time = nullptr;
  double outside_since = 0;  // processor time
  int depth = 0;
};
thread_local ThreadClock thread_clock;

double processor_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

ThreadClock& clock_of_thread() {
  ThreadClock& clock = thread_clock;
  if (clock.time != nullptr) return clock;
  char name[32] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  const bool program = getpid() == syscall(SYS_gettid) || std::strncmp(name, "pt_autograd", 11) == 0;
  clock.own = simulation().program_time;
  clock.time = program ? &simulation().program_time : &clock.own;
  clock.outside_since = processor_seconds();
  return clock;
}
bool of_program() { return clock_of_thread().time == &simulation().program_time; }

double compute_rate(EmulatedKind kind) {
  switch (kind) {
#define CASE(name) case emulated_##name: return machine().name;
    EMULATED_COMPUTE(CASE)
#undef CASE
    default: return 0;
  }
}

double seconds_of(const EmulatedCost& cost) {
  const Machine& m = machine();
  switch (cost.kind) {
    case emulated_pause: return cost.bytes;
    case emulated_memory: return m.kernel_latency + cost.bytes / m.hbm;
    case emulated_to_device: return m.copy_latency + cost.bytes / m.to_device;
    case emulated_to_host: return m.copy_latency + cost.bytes / m.to_host;
    case emulated_pageable: return m.copy_latency + cost.bytes / m.pageable;
    case emulated_network: return m.network_latency + cost.bytes / m.network;
    default: return m.kernel_latency + std::max(cost.flops / compute_rate(cost.kind), cost.bytes / m.hbm);
  }
}

Unit& unit_of(const Stream& stream, EmulatedKind kind) {
  Units& units = simulation().devices[static_cast<size_t>(stream.device)];
  switch (kind) {
    case emulated_to_device: return units.to_device;
    case emulated_to_host: return units.to_host;
    case emulated_network: return units.network;
    default: return units.multiprocessors;
  }
}

}  // namespace

Machine& machine() {
  static Machine* m = new Machine;
  return *m;
}

double host_time() { return *clock_of_thread().time; }
double observed_time() {
  const std::atomic_ref<double> program(simulation().program_time);
  return std::max(host_time(), program.load());
}
void spend_host_time(double seconds) { *clock_of_thread().time += seconds; }

void host_until(double time, const char* name) {
  Lock lock(simulation().mutex);
  const double now = host_time();
  if (time <= now) return;
  simulation().spans.push_back({-1, emulated_wait, -1, static_cast<int32_t>(syscall(SYS_gettid)), now, now, time, 0, 0, name});
  spend_host_time(time - now);
}

void keep_pace() {
  const std::atomic_ref<double> program(simulation().program_time);
  if (!of_program()) {
    while (simulation().program_waits == 0 && host_time() > program) usleep(100);
  }
}

void simulate(Stream& stream, const char* name, EmulatedCost cost) {
  Lock lock(simulation().mutex);
  Timeline& timeline = stream.timeline;
  spend_host_time(machine().launch);
  timeline.queued.push_back(0);
  if (static_cast<double>(timeline.queued.size()) > machine().queue_length) {
    const double first_end = timeline.queued.front();
    timeline.queued.pop_front();
    host_until(first_end, "full queue");
  }
  const double launched = host_time(), seconds = seconds_of(cost);
  const bool waits = timeline.ready > std::max(timeline.end, launched);
  const double start = unit_of(stream, cost.kind).take(std::max(timeline.ready, launched), seconds);
  const auto thread = static_cast<int32_t>(syscall(SYS_gettid));
  simulation().spans.push_back({stream.number, cost.kind, waits ? timeline.waits_for : -1, thread, launched, start, start + seconds,
                                cost.flops, cost.bytes, name});
  timeline.end = timeline.ready = timeline.queued.back() = start + seconds;
  timeline.waits_for = -1;
}

void wait_for(Stream& stream, const Moment& moment) {
  Lock lock(simulation().mutex);
  spend_host_time(machine().query);
  if (moment.simulated_time <= stream.timeline.ready) return;
  stream.timeline.ready = moment.simulated_time;
  stream.timeline.waits_for = moment.stream;
}

void record(Stream& stream, Moment& moment) {
  Lock lock(simulation().mutex);
  spend_host_time(machine().query);
  moment.simulated_time = std::max(stream.timeline.ready, host_time());
  moment.stream = stream.number;
  moment.done.store(1);
}

}  // namespace emulated

using namespace emulated;

extern "C" {

int emulated_cuda_simulates() { return settings().simulated; }
int emulated_cuda_ranks() { return static_cast<int>(machine().ranks); }

void emulated_cuda_enter() {
  if (!settings().simulated) return;
  ThreadClock& clock = clock_of_thread();
  if (clock.depth++ == 0) *clock.time += (processor_seconds() - clock.outside_since) * machine().host_scale;
}
void emulated_cuda_leave() {
  if (!settings().simulated) return;
  if (--thread_clock.depth == 0) thread_clock.outside_since = processor_seconds();
}

/// The calling thread begins to wait for another one. Returns whether it is the program, whose wait has to be ended.
int emulated_cuda_begin_wait() {
  if (of_program()) ++simulation().program_waits;
  return of_program();
}
/// A wait of the program ends. The thread that it waited for may say so.
void emulated_cuda_end_wait() { --simulation().program_waits; }
void emulated_cuda_wait_until(double time) {
  Inside inside;
  host_until(time, "thread");
}

/// Sets a number of `Machine` by its name; 1 if there is none of this name.
int emulated_cuda_set_machine(const char* name, double value) {
  static const std::map<std::string, double Machine::*> fields = {
#define FIELD(name) {#name, &Machine::name},
      EMULATED_COMPUTE(FIELD) FIELD(hbm) FIELD(to_device) FIELD(to_host) FIELD(pageable) FIELD(lock) FIELD(network)
      FIELD(network_latency) FIELD(kernel_latency) FIELD(copy_latency) FIELD(launch) FIELD(query) FIELD(allocate)
      FIELD(host_scale) FIELD(host_bytes) FIELD(ranks) FIELD(queue_length)
#undef FIELD
  };
  const auto found = fields.find(name);
  if (found == fields.end()) return 1;
  machine().*(found->second) = value;
  return 0;
}

double emulated_cuda_now() {
  Inside inside;
  return host_time();
}

/// Moves the spans so far to `taken`, at most `count`, and returns their number; the number that there are if `taken` is null.
size_t emulated_cuda_take_spans(Span* taken, size_t count) {
  Inside inside;
  Lock lock(simulation().mutex);
  std::vector<Span>& spans = simulation().spans;
  if (taken == nullptr) return spans.size();
  count = std::min(count, spans.size());
  std::copy_n(spans.begin(), count, taken);
  spans.erase(spans.begin(), spans.begin() + static_cast<long>(count));
  return count;
}
}
