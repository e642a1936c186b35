// The functions of the emulated runtime that CUDA does not have: for the emulated operators, the other libraries and tests.
#pragma once
#include <cstddef>
#include <cstdint>

// What an operation is, for simulated time. Each compute kind has a rate in FLOP/s of this name, see simulation.cpp.
#define EMULATED_COMPUTE(X)                                                                                             \
  X(gemm_half) X(gemm_tf32) X(gemm_fp32) X(gemm_fp64) X(gemm_fp8) X(flash_forward) X(flash_backward) X(cudnn_forward)     \
  X(cudnn_backward) X(efficient_forward) X(efficient_backward)
enum EmulatedKind : int32_t {
#define KIND(name) emulated_##name,
  EMULATED_COMPUTE(KIND)
#undef KIND
  emulated_memory,  // bound by the memory of the device
  emulated_to_device,
  emulated_to_host,
  emulated_pageable,  // copies of memory of the host that is not locked
  emulated_network,   // messages to and from other devices; bytes: in the direction with more
  emulated_pause,   // for a given time
  emulated_wait,    // of the host
};
struct EmulatedCost {
  EmulatedKind kind = emulated_memory;
  double flops = 0, bytes = 0;  // read and written; the seconds of a pause
};

extern "C" {
/// Runs `run(argument)` on a stream of the current device, as a kernel. The runtime calls it exactly once. In simulated time
/// this is at once, and the stream is busy for what the kernel costs; `name` has to stay.
void emulated_cuda_launch(void* stream, void (*run)(void*), void* argument, const char* name, EmulatedCost cost);
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

/// Whether time is simulated: operations on large tensors are not computed.
int emulated_cuda_simulates();
/// In simulated time: the number of ranks of which this process is one.
int emulated_cuda_ranks();
/// Whether the next copies of this thread move values whatever their size: those of integers, which decide what is computed.
void emulated_cuda_copy_values(int always);
/// Enter and leave the emulator: the processor time of a thread outside of it is the host's time.
void emulated_cuda_enter();
void emulated_cuda_leave();

// Counters since the start of the process.
long emulated_cuda_launched();
long emulated_cuda_copies();
long emulated_cuda_host_waits();
long emulated_cuda_unknown_kernels();
long emulated_cuda_pinned_bytes();
long emulated_cuda_pinned_peak();
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
