// CUPTI for PyTorch's profiler: it reports the calls of the runtime during which the host waited, and nothing else.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "../emulated_cuda.h"

namespace {

constexpr int success = 0, no_more_records = 12, runtime_kind = 5;

// CUpti_ActivityAPI: a call of the runtime.
struct __attribute__((packed)) __attribute__((aligned(8))) ActivityCall {
  uint32_t kind, callback_id;
  uint64_t start, stop;
  uint32_t process, thread, correlation, result;
};

using RequestBuffer = void (*)(uint8_t** buffer, size_t* size, size_t* most_records);
using CompleteBuffer = void (*)(void* context, uint32_t stream, uint8_t* buffer, size_t size, size_t valid_size);

RequestBuffer request_buffer = nullptr;
CompleteBuffer complete_buffer = nullptr;
uint64_t (*timestamp)() = nullptr;
uint32_t correlation = 0;

/// A buffer that the profiler has given, until it is given back. The profiler asks for records only after it gave one.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;
} buffer;

void take_buffer() {
  size_t most_records = 0;
  if (buffer.data == nullptr) request_buffer(&buffer.data, &buffer.size, &most_records);
}

}  // namespace

extern "C" {

int cuptiGetVersion(uint32_t* version) { return *version = 130000, success; }
int cuptiGetResultString(int, const char** text) { return *text = "an error of the emulated CUPTI", success; }
int cuptiActivityRegisterCallbacks(RequestBuffer request, CompleteBuffer complete) {
  return request_buffer = request, complete_buffer = complete, success;
}
int cuptiActivityRegisterTimestampCallback(uint64_t (*callback)()) { return timestamp = callback, success; }
int cuptiActivityEnable(int kind) {
  if (kind != runtime_kind) return success;
  take_buffer();
  emulated_cuda_record_calls(timestamp);
  return success;
}
int cuptiActivityDisable(int kind) {
  if (kind == runtime_kind) emulated_cuda_record_calls(nullptr);
  return success;
}
int cuptiActivityFlushAll(uint32_t) {
  if (buffer.data == nullptr) return success;
  std::vector<EmulatedCall> calls(buffer.size / sizeof(ActivityCall));
  calls.resize(emulated_cuda_take_calls(calls.data(), calls.size()));
  auto* records = reinterpret_cast<ActivityCall*>(buffer.data);
  for (const EmulatedCall& call : calls)
    *records++ = {runtime_kind, call.callback_id, call.start, call.stop, static_cast<uint32_t>(getpid()), call.thread, ++correlation, 0};
  const Buffer full = buffer;
  buffer = Buffer();
  return complete_buffer(nullptr, 0, full.data, full.size, calls.size() * sizeof(ActivityCall)), success;
}
int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid_size, uint8_t** record) {
  uint8_t* next = *record == nullptr ? buffer : *record + sizeof(ActivityCall);
  if (next + sizeof(ActivityCall) > buffer + valid_size) return no_more_records;
  return *record = next, success;
}
int cuptiGetCallbackName(int, uint32_t callback_id, const char** name) {
  static const std::map<uint32_t, const char*> names = {
      {31, "cudaMemcpy_v3020"}, {41, "cudaMemcpyAsync_v3020"}, {44, "cudaMemcpy2DAsync_v3020"}, {131, "cudaStreamSynchronize_v3020"},
      {137, "cudaEventSynchronize_v3020"}, {165, "cudaDeviceSynchronize_v3020"},
  };
  const auto found = names.find(callback_id);
  return *name = found == names.end() ? "unknown" : found->second, success;
}
int cuptiActivitySetAttribute(int, size_t*, void*) { return success; }
int cuptiActivityEnableRuntimeApi(int, uint8_t) { return success; }
int cuptiActivityEnableDriverApi(int, uint8_t) { return success; }
int cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return success; }
int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* dropped) { return *dropped = 0, success; }
int cuptiActivityPushExternalCorrelationId(int, uint64_t) { return success; }
int cuptiActivityPopExternalCorrelationId(int, uint64_t* last) {
  if (last != nullptr) *last = 0;
  return success;
}
int cuptiEnableCallback(uint32_t, void*, int, uint32_t) { return success; }
int cuptiEnableDomain(uint32_t, void*, int) { return success; }
int cuptiFinalize() { return success; }
int cuptiSubscribe(void** subscriber, void*, void*) { return *subscriber = reinterpret_cast<void*>(8), success; }
int cuptiUnsubscribe(void*) { return success; }
}
