// Streams, events and copies.
#include <cstring>
#include <random>
#include <thread>

#include "simulation.h"

namespace emulated {
namespace {

constexpr size_t queue_length = 4096;  // the queue of a GPU is finite, too: then the host waits

struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all;
  std::map<int, Stream*> defaults;  // by device
};
Streams& streams() {
  static Streams* s = new Streams;
  return *s;
}

Stream* add_stream(int device, int priority) {
  Streams& s = streams();
  s.all.push_back(new Stream(static_cast<int>(s.all.size()), device, priority));
  return s.all.back();
}

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

/// In simulated time, no more bytes are copied.
constexpr size_t simulated_pageable_bytes = size_t{16} << 20, simulated_bytes = size_t{256} << 10;
thread_local bool copies_values = false;  // all the same

EmulatedCost cost_of_copy(Where to, Where from, size_t size) {
  const auto bytes = static_cast<double>(size);
  if (to == Where::pageable || from == Where::pageable) return {emulated_pageable, 0, bytes};
  if (to == from) return {emulated_memory, 0, 2 * bytes};
  return {to == Where::device ? emulated_to_device : emulated_to_host, 0, bytes};
}

/// Adds a copy to a stream. Copies of memory that is not locked end before the call returns, as on a GPU.
cudaError_t copy(const void* to, const void* from, size_t size, cudaStream_t handle, bool host_waits, uint32_t callback_id,
                 std::function<void()> move) {
  Inside inside;
  EmulatedCost cost;
  {
    MemoryLock lock(memory().mutex);
    if (memory().crosses_lock(to, size) || memory().crosses_lock(from, size)) return fail(cudaErrorInvalidValue);
    cost = cost_of_copy(memory().where(to), memory().where(from), size);
  }
  const bool pageable = cost.kind == emulated_pageable;
  ++counters().copies;
  Stream* stream = stream_of(handle);
  if (settings().simulated) {
    simulate(*stream, pageable ? "copy of pageable memory" : "copy", cost);
    if (!copies_values && size > (pageable ? simulated_pageable_bytes : simulated_bytes)) move = [] {};
  }
  stream->add(Work::copy, std::move(move));
  if (host_waits || pageable) {
    HostWait wait(callback_id);
    stream->wait();
  } else if (settings().blocking) {
    stream->wait();
  }
  return cudaSuccess;
}

}  // namespace

void Moment::end() {
  time = std::chrono::steady_clock::now();
  done.store(1);
  done.notify_all();
}
std::shared_ptr<Moment> Event::get() {
  std::lock_guard<std::mutex> lock(mutex);
  return moment;
}

void Stream::add(Work work, std::function<void()> task) {
  if (settings().simulated) return task();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  tasks_.push_back({work, std::move(task)});
  ++given_;
  wake_.notify_one();
  idle_.wait(lock, [this] { return tasks_.size() < queue_length; });
}
bool Stream::idle() {
  if (settings().simulated) {
    Inside inside;
    spend_host_time(machine().query);
    return timeline.ready <= host_time();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == given_;
}
void Stream::wait() {
  if (settings().simulated) {
    Inside inside;
    return host_until(timeline.ready, "stream");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = given_;
  idle_.wait(lock, [&] { return done_ >= target; });
}
void Stream::run() {
  std::mt19937 random(static_cast<unsigned>(settings().seed) * 7919u + static_cast<unsigned>(number));
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (task.work != Work::other) {
      const long longest = task.work == Work::copy ? settings().copy_delay : settings().kernel_delay;
      if (longest > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (longest + 1)));
    }
    task.run();
    task.run = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
    idle_.notify_all();
  }
}

Stream* make_stream(int device, int priority) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return add_stream(device, priority);
}
Stream* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return reinterpret_cast<Stream*>(handle);  // 1 and 2: the default's other names
  const int device = use_device();
  std::lock_guard<std::mutex> lock(streams().mutex);
  Stream*& stream = streams().defaults[device];
  if (stream == nullptr) stream = add_stream(device, 0);
  return stream;
}
void wait_for_streams() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    all = streams().all;
  }
  for (Stream* stream : all) stream->wait();
}

}  // namespace emulated

using namespace emulated;

extern "C" {

void emulated_cuda_launch(void* handle, void (*run)(void*), void* argument, const char* name, EmulatedCost cost) {
  ++counters().launched;
  Stream* stream = stream_of(static_cast<cudaStream_t>(handle));
  if (settings().simulated) simulate(*stream, name, cost);
  stream->add(Work::kernel, [=] { run(argument); });
  if (settings().blocking) stream->wait();
}
void emulated_cuda_copy_values(int always) { copies_values = always != 0; }
void emulated_cuda_wait(void* stream) { stream_of(static_cast<cudaStream_t>(stream))->wait(); }

// ---- copies

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  return copy(to, from, size, stream, false, 41, [=] { std::memmove(to, from, size); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  if (size == 0) return cudaSuccess;
  return copy(to, from, size, nullptr, true, 31, [=] { std::memmove(to, from, size); });
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  return copy(to, from, width * height, stream, false, 44, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t stream) {
  if (settings().simulated) {
    Inside inside;
    simulate(*stream_of(stream), "memset", {emulated_memory, 0, static_cast<double>(size)});
    if (size > simulated_bytes) return cudaSuccess;
  }
  return stream_of(stream)->add(Work::kernel, [=] { std::memset(address, value, size); }), cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t size) { return cudaMemsetAsync(address, value, size, nullptr); }

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  return *stream = reinterpret_cast<cudaStream_t>(make_stream(use_device(), priority)), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its thread sleeps until the process ends
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  HostWait wait(131);
  return stream_of(stream)->wait(), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream_of(stream)->idle() ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return *priority = stream_of(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto moment = event_of(event)->get();
  if (settings().simulated) {
    Inside inside;
    if (moment != nullptr) wait_for(*stream_of(stream), *moment);
    return cudaSuccess;
  }
  if (moment != nullptr && moment->done.load() == 0) stream_of(stream)->add(Work::other, [moment] { moment->wait(); });
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* argument) {
  return stream_of(stream)->add(Work::other, [=] { run(argument); }), cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t run, void* argument, unsigned) {
  return stream_of(stream)->add(Work::other, [=] { run(stream, cudaSuccess, argument); }), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return fail(cudaErrorNotSupported, "the emulated device has no CUDA graphs");
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  use_device();
  auto* made = new Event;
  made->flags = flags;
  return *event = reinterpret_cast<cudaEvent_t>(made), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event_of(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto moment = std::make_shared<Moment>();
  if (settings().simulated) {
    Inside inside;
    record(*stream_of(stream), *moment);
  }
  {
    std::lock_guard<std::mutex> lock(event_of(event)->mutex);
    event_of(event)->moment = moment;
  }
  if (settings().simulated) return cudaSuccess;
  return stream_of(stream)->add(Work::other, [moment] { moment->end(); }), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto moment = event_of(event)->get();
  if (settings().simulated) {
    Inside inside;
    spend_host_time(machine().query);
    return moment == nullptr || moment->simulated_time <= observed_time() ? cudaSuccess : cudaErrorNotReady;
  }
  return moment == nullptr || moment->done.load() != 0 ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto moment = event_of(event)->get();
  if (settings().simulated) {
    Inside inside;
    HostWait wait(137);
    if (moment != nullptr) host_until(moment->simulated_time, "event");
    return cudaSuccess;
  }
  if (moment != nullptr && moment->done.load() == 0) {
    HostWait wait(137);
    moment->wait();
  }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  auto from = event_of(start)->get(), to = event_of(stop)->get();
  const unsigned flags = event_of(start)->flags | event_of(stop)->flags;
  if (from == nullptr || to == nullptr || (flags & cudaEventDisableTiming) != 0)
    return fail(cudaErrorInvalidResourceHandle);
  if (from->done.load() == 0 || to->done.load() == 0) return cudaErrorNotReady;
  if (settings().simulated)
    return *milliseconds = static_cast<float>(1e3 * (to->simulated_time - from->simulated_time)), cudaSuccess;
  *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
  return cudaSuccess;
}
}
