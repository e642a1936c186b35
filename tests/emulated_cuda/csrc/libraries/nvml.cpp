// What PyTorch asks NVIDIA's management library before it uses expandable segments, and when memory runs out.
namespace {
constexpr int success = 0, not_supported = 3;
}

extern "C" {
int cudaGetDeviceCount(int* count);

int nvmlInit_v2() { return success; }
int nvmlInit() { return success; }
int nvmlInitWithFlags(unsigned) { return success; }
int nvmlShutdown() { return success; }
int nvmlDeviceGetCount_v2(int* count) { return cudaGetDeviceCount(count); }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, success; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = nullptr, success; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return not_supported; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, success; }
int nvmlSystemGetCudaDriverVersion_v2() { return not_supported; }
const char* nvmlErrorString(int) { return "an error of the emulated NVML"; }
}
