// The functions of NVIDIA's management library that torch requires before it uses expandable segments. No package has
// its header. Results are therefore numbers, and functions that always fail have no arguments.
namespace {
constexpr int success = 0, not_supported = 3;
}

extern "C" {

int nvmlInit_v2() { return success; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, success; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return not_supported; }
int nvmlDeviceGetComputeRunningProcesses() { return not_supported; }
int nvmlSystemGetCudaDriverVersion_v2() { return not_supported; }
}
