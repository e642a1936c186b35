// Simulated time, for rehearsals at full size: operations take as long as a model of the device says, and none waits.
// An operation begins at the latest of: the end of the one before on its stream, the events that the stream waits for, the time
// of the host that launches it, and a free engine. The host's time is the processor time of its threads outside of the emulator,
// and a constant for each launch.
#pragma once
#include "device.h"

namespace emulated {

/// What is known of the machine; rates are per second, times in seconds.
struct Machine {
#define RATE(name) double name = 0;
  EMULATED_COMPUTE(RATE)
#undef RATE
  double hbm = 0, to_device = 0, to_host = 0, pageable = 0, lock = 0;
  double network = 0, network_latency = 0;  // of a device to the others, in each direction; of a collective
  double kernel_latency = 0, copy_latency = 0, launch = 0, query = 0, allocate = 0;
  double host_scale = 1;       // of measured processor time
  double host_bytes = 1e18;    // that can be locked
  double ranks = 1;            // of which this process is one; each locks as much memory of the host
  double queue_length = 1024;  // of a stream, in operations
};
Machine& machine();

/// An operation, or a wait of the host (stream -1).
struct Span {
  int32_t stream, kind, waited_for, thread;  // waited_for: the stream for which it began late, or -1
  double launched, start, end, flops, bytes;
  const char* name;
};

/// Time inside the emulator is not the host's.
struct Inside {
  Inside() { emulated_cuda_enter(); }
  ~Inside() { emulated_cuda_leave(); }
  Inside(const Inside&) = delete;
};

void simulate(Stream& stream, const char* name, EmulatedCost cost);
double host_time();
/// The time of this thread, or the program's if that is later: for threads that look whether operations have ended.
double observed_time();
void spend_host_time(double seconds);
/// The host waits.
void host_until(double time, const char* name);
/// Waits, if this is a thread besides the program's, until the program has reached its time or waits for it.
void keep_pace();
/// The next operation of the stream begins after a moment.
void wait_for(Stream& stream, const Moment& moment);
void record(Stream& stream, Moment& moment);

}  // namespace emulated
