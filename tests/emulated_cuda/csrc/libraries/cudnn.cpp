// The version of cuDNN that PyTorch 2.13 was built for. Attention by cuDNN is an emulated operator.
#include <cstddef>

extern "C" {
size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return 13000; }
size_t cudnnGetMaxDeviceVersion() { return 9000; }
const char* cudnnGetErrorString(int) { return "an error of the emulated cuDNN"; }
int cudnnGetProperty(int which, int* value) {
  constexpr int version[] = {9, 20, 0};
  return *value = version[which], 0;
}
}
