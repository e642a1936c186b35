// Settings from the environment, counters, errors, and the record of host waits.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace emulated {
namespace {

long number_from(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  const long number = std::strtol(text, &end, 10);
  if (*end == 0 && number >= 0) return number;
  say("%s=%s: give a whole number", name, text);
  std::exit(2);
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_message;

struct Calls {
  std::mutex mutex;
  std::atomic<uint64_t (*)()> clock{nullptr};
  std::vector<EmulatedCall> recorded;
};
Calls& calls() {
  static Calls* c = new Calls;
  return *c;
}

}  // namespace

Settings& settings() {
  static Settings* s = new Settings{
      static_cast<int>(number_from("EMULATED_CUDA_DEVICES", 1)),
      static_cast<size_t>(number_from("EMULATED_CUDA_MEMORY_MIB", 8192)) << 20,
      number_from("EMULATED_CUDA_COPY_DELAY_US", 0),
      number_from("EMULATED_CUDA_KERNEL_DELAY_US", 0),
      number_from("EMULATED_CUDA_SEED", 1),
      number_from("CUDA_LAUNCH_BLOCKING", 0) != 0,
      number_from("EMULATED_CUDA_SIMULATE", 0) != 0,
      number_from("EMULATED_CUDA_POISON", 1) != 0 && number_from("EMULATED_CUDA_SIMULATE", 0) == 0,
  };
  return *s;
}

Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

void say(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::fputs("emulated CUDA: ", stderr);
  std::vfprintf(stderr, format, list);
  std::fputc('\n', stderr);
  va_end(list);
}

cudaError_t fail(cudaError_t error, std::string message) {
  last_message = std::move(message);
  return last_error = error;
}

HostWait::HostWait(uint32_t callback_id) : callback_id_(callback_id) {
  ++counters().host_waits;
  if (auto* clock = calls().clock.load()) start_ = clock();
}

HostWait::~HostWait() {
  auto* clock = calls().clock.load();
  if (clock == nullptr || start_ == 0) return;
  std::lock_guard<std::mutex> lock(calls().mutex);
  calls().recorded.push_back({callback_id_, static_cast<uint32_t>(syscall(SYS_gettid)), start_, clock()});
}

}  // namespace emulated

using namespace emulated;

extern "C" {

void emulated_cuda_set_delays(long copy, long kernel) {
  settings().copy_delay = copy;
  settings().kernel_delay = kernel;
}
void emulated_cuda_set_memory(size_t bytes) { settings().memory_bytes = bytes; }
int emulated_cuda_poisons() { return settings().poison; }
long emulated_cuda_launched() { return counters().launched; }
long emulated_cuda_copies() { return counters().copies; }
long emulated_cuda_host_waits() { return counters().host_waits; }
long emulated_cuda_unknown_kernels() { return counters().unknown_kernels; }
long emulated_cuda_contexts() { return counters().contexts; }

int emulated_cuda_missing(const char* name) {
  static std::mutex mutex;
  static std::set<std::string>* told = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  if (told->insert(name).second) say("%s is not emulated", name);
  return cudaErrorUnknown;
}

void emulated_cuda_record_calls(uint64_t (*clock)()) { calls().clock = clock; }
size_t emulated_cuda_take_calls(EmulatedCall* taken, size_t count) {
  std::lock_guard<std::mutex> lock(calls().mutex);
  std::vector<EmulatedCall>& recorded = calls().recorded;
  count = std::min(count, recorded.size());
  std::copy_n(recorded.begin(), count, taken);
  recorded.erase(recorded.begin(), recorded.begin() + static_cast<long>(count));
  return count;
}

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

#define ERRORS(X)                                                                    \
  X(cudaSuccess, "no error")                                                         \
  X(cudaErrorMemoryAllocation, "out of memory")                                      \
  X(cudaErrorNotSupported, "operation not supported")                                \
  X(cudaErrorNotReady, "device not ready")                                           \
  X(cudaErrorInvalidValue, "invalid argument")                                       \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                       \
  X(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped") \
  X(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")

const char* cudaGetErrorName(cudaError_t error) {
#define NAME(number, text) if (error == number) return #number;
  ERRORS(NAME)
#undef NAME
  return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorNotSupported && !last_message.empty()) return last_message.c_str();
#define TEXT(number, text) if (error == number) return text;
  ERRORS(TEXT)
#undef TEXT
  return "an error of the emulated device";
}
}
