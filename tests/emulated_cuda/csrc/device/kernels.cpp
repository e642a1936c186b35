// Kernels of the CUDA build: they are not run. A launch is an error that names the kernel.
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unordered_map>

#include "simulation.h"

namespace emulated {
namespace {

constexpr double cycles_per_second = 1.98e9;

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> names;  // by the address that launches give
  std::set<std::string> told;
};
Kernels& kernels() {
  static Kernels* k = new Kernels;
  return *k;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  Kernels& k = kernels();
  std::unique_lock<std::mutex> lock(k.mutex);
  const auto found = k.names.find(function);
  const std::string name = found == k.names.end() ? "without a name" : found->second;
  if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep
    lock.unlock();
    const std::chrono::duration<double> time(static_cast<double>(*static_cast<int64_t*>(arguments[0])) / cycles_per_second);
    if (settings().simulated) {
      Inside inside;
      return simulate(*stream_of(stream), "spin", {emulated_pause, 0, time.count()}), cudaSuccess;
    }
    stream_of(stream)->add(Work::kernel, [time] { std::this_thread::sleep_for(time); });
    return cudaSuccess;
  }
  ++counters().unknown_kernels;
  if (k.told.insert(name).second) say("a kernel that is not emulated was launched: %s", name.c_str());
  return fail(cudaErrorNotSupported, "emulated CUDA has no kernel " + name);
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace emulated

using namespace emulated;

extern "C" {

void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(std::calloc(1, sizeof(void*))); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { std::free(handle); }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names.emplace(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  return configurations.push_back({grid, block, shared_bytes, stream}), 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return cudaErrorUnknown;
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return configurations.pop_back(), cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
cudaError_t __cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
cudaError_t __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, cudaSuccess; }
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return launch(function, arguments, configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  return *blocks = std::max(1, 2048 / std::max(threads, 1)), cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t shared_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared_bytes);
}
}
