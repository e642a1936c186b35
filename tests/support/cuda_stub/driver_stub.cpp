// The functions of the CUDA driver that torch's allocator calls for expandable segments. Torch looks them up by name.
#include <cuda.h>

#include <cstring>
#include <map>

#include "device_memory.h"

namespace {

using namespace device_memory;

// Sizes of the pieces of physical memory by their handles.
std::map<CUmemGenericAllocationHandle, size_t> created;
CUmemGenericAllocationHandle last_handle = 0;

CUresult get_device(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult get_attribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
CUresult get_error_string(CUresult, const char** text) {
  return *text = "an error of the stub driver", CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = page_bytes, CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(take_addresses(size));
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult free_addresses(CUdeviceptr address, size_t size) {
  return forget(reinterpret_cast<void*>(address), size), CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  if (!fits(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  used_bytes += size;
  created[*handle = ++last_handle] = size;
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  const auto found = created.find(handle);
  if (found == created.end()) return CUDA_ERROR_INVALID_VALUE;
  used_bytes -= found->second;
  created.erase(found);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr, size_t size, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const auto found = created.find(handle);
  return found != created.end() && found->second == size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult unmap(CUdeviceptr address, size_t size) { return free_addresses(address, size); }
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

template <class Function>
void* address_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

struct Entry {
  const char* name;
  void* function;
};

// Torch requires all of these functions before it calls any.
const Entry entries[] = {
    {"cuDeviceGet", address_of(get_device)},
    {"cuDeviceGetAttribute", address_of(get_attribute)},
    {"cuGetErrorString", address_of(get_error_string)},
    {"cuMemAddressFree", address_of(free_addresses)},
    {"cuMemAddressReserve", address_of(reserve)},
    {"cuMemCreate", address_of(create)},
    {"cuMemExportToShareableHandle", address_of(not_supported)},
    {"cuMemGetAddressRange", address_of(not_supported)},
    {"cuMemGetAllocationGranularity", address_of(granularity)},
    {"cuMemGetAllocationPropertiesFromHandle", address_of(not_supported)},
    {"cuMemImportFromShareableHandle", address_of(not_supported)},
    {"cuMemMap", address_of(map)},
    {"cuMemRelease", address_of(release)},
    {"cuMemRetainAllocationHandle", address_of(not_supported)},
    {"cuMemSetAccess", address_of(set_access)},
    {"cuMemUnmap", address_of(unmap)},
    {"cuMemsetD32Async", address_of(not_supported)},
    {"cuStreamWriteValue32", address_of(not_supported)},
};

}  // namespace

void* device_memory::driver_function(const char* name) {
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) == 0) return entry.function;
  }
  return nullptr;
}
