// The functions of the emulated runtime that CUDA does not have: for the emulated operators, the other libraries and tests.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
/// Runs `run(argument)` on a stream of the current device, as a kernel. The runtime calls it exactly once.
void emulated_cuda_launch(void* stream, void (*run)(void*), void* argument);
/// Waits for the work that a stream has been given, without counting a wait of the host.
void emulated_cuda_wait(void* stream);
/// Reports a function that is not emulated, once per name, and returns an error number.
int emulated_cuda_missing(const char* name);

/// Sets the longest random delay of each copy and of each kernel.
void emulated_cuda_set_delays(long copy_microseconds, long kernel_microseconds);
/// Sets the memory of each device.
void emulated_cuda_set_memory(size_t bytes);
/// Whether memory that is not allocated is filled with 0xFF.
int emulated_cuda_poisons();

// Counters since the start of the process.
long emulated_cuda_launched();
long emulated_cuda_copies();
long emulated_cuda_host_waits();
long emulated_cuda_unknown_kernels();
/// A bit for each device on which this process has a context.
long emulated_cuda_contexts();
}

/// A call of the runtime during which the host waited.
struct EmulatedCall {
  uint32_t callback_id;  // CUPTI's number of the function
  uint32_t thread;
  uint64_t start, stop;  // by the clock of `emulated_cuda_record_calls`
};
extern "C" {
/// Starts to record the calls during which the host waits, or stops if `clock` is null.
void emulated_cuda_record_calls(uint64_t (*clock)());
/// Moves recorded calls to `calls`, at most `count`, and returns their number.
size_t emulated_cuda_take_calls(EmulatedCall* calls, size_t count);
}
