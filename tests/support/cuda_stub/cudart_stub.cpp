// A CUDA runtime with one device whose memory is the host's, for tests without a GPU. It has what torch's allocator
// calls. Streams do nothing; an event is finished unless stub_hold_events() says otherwise, and waits are counted.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "device_memory.h"

namespace {

using namespace device_memory;

std::map<void*, size_t> allocated;
bool events_pending = false;
int waits = 0;
int live_events = 0;

template <class Handle>
Handle new_handle() {
  return static_cast<Handle>(std::malloc(8));
}

}  // namespace

extern "C" {

void stub_hold_events(int hold) { events_pending = hold != 0; }
int stub_waits() { return waits; }
int stub_live_events() { return live_events; }
size_t stub_used_bytes() { return used_bytes; }
void stub_set_total_bytes(size_t bytes) { total_bytes = bytes; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stub");
  properties->totalGlobalMem = total_bytes;
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = total_bytes - used_bytes;
  *total = total_bytes;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t size) {
  *address = fits(size) ? take_addresses(size) : nullptr;
  if (*address == nullptr) return cudaErrorMemoryAllocation;
  allocated[*address] = size;
  used_bytes += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  const auto found = allocated.find(address);
  if (found == allocated.end()) return address == nullptr ? cudaSuccess : cudaErrorInvalidValue;
  used_bytes -= found->second;
  forget(address, found->second);
  allocated.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return std::memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  return std::memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaErrorNotSupported; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = new_handle<cudaStream_t>(), cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return ++waits, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ++live_events;
  return *event = new_handle<cudaEvent_t>(), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  --live_events;
  return std::free(event), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return events_pending ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0, cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "stub"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stub runtime"; }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &address, sizeof address);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *entry = driver_function(name);
  if (result != nullptr) *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *entry ? cudaSuccess : cudaErrorInvalidValue;
}

// Required by torch's library, but not called by the tests.
cudaError_t cudaMallocAsync(void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaErrorNotSupported; }
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
}
