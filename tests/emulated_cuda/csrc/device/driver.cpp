// The driver's functions that PyTorch calls: contexts, and the memory of expandable segments.
#include <cuda.h>
#include <sys/mman.h>

#include "device.h"

using namespace emulated;

namespace {

struct Physical {  // what cuMemCreate makes
  size_t size;
  int device;
};
struct Segments {
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  CUmemGenericAllocationHandle last = 0;
};
Segments& segments() {
  static Segments* s = new Segments;
  return *s;
}
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 16); }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  // The driver numbers attributes as the runtime does.
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device), CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "an error of the emulated driver", CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = (counters().contexts >> device & 1) != 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device()), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = page_bytes, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  MemoryLock lock(memory().mutex);
  char* reserved = memory().reserve(size);
  if (reserved == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                     unsigned long long) {
  MemoryLock lock(memory().mutex);
  const int device = properties->location.id;
  if (!memory().fits(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  memory().use(device, static_cast<long long>(size));
  segments().physical[*handle = ++segments().last] = {size, device};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  MemoryLock lock(memory().mutex);
  const auto found = segments().physical.find(handle);
  if (found == segments().physical.end()) return CUDA_ERROR_INVALID_VALUE;
  memory().use(found->second.device, -static_cast<long long>(found->second.size));
  segments().physical.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  MemoryLock lock(memory().mutex);
  const auto found = segments().physical.find(handle);
  if (found == segments().physical.end() || found->second.size != size) return CUDA_ERROR_INVALID_VALUE;
  const bool opened = memory().open(reinterpret_cast<void*>(address), size, found->second.device);
  return opened ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ++counters().host_waits;
  wait_for_streams();
  MemoryLock lock(memory().mutex);
  return memory().close(reinterpret_cast<void*>(address), size), CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  int device = 0;
  MemoryLock lock(memory().mutex);
  memory().where(reinterpret_cast<void*>(address), &device);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<uint64_t*>(value) = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = context_of(device); return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
#define ENTRY(name) {#name, reinterpret_cast<void*>(name)}
  static const std::map<std::string, void*> entries = {
      ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute), ENTRY(cuGetErrorString),
      ENTRY(cuDevicePrimaryCtxGetState), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSetCurrent),
      ENTRY(cuMemGetAllocationGranularity), ENTRY(cuMemAddressReserve), ENTRY(cuMemAddressFree), ENTRY(cuMemCreate),
      ENTRY(cuMemRelease), ENTRY(cuMemMap), ENTRY(cuMemUnmap), ENTRY(cuMemSetAccess), ENTRY(cuPointerGetAttribute),
  };
#undef ENTRY
  const auto found = entries.find(name);
  *entry = found == entries.end() ? reinterpret_cast<void*>(not_supported) : found->second;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
