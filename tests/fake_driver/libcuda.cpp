// A driver that answers what it is told to by the environment: as much of libcuda.so.1 as the CUDA runtime asks before
// it says that there is a GPU.
#include <cstdlib>
#include <cstring>

namespace {

int told(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

int unknown_error() { return 999; }

}  // namespace

extern "C" {
int cuDriverGetVersion(int* version) {
  *version = told("FAKE_DRIVER_VERSION", 99000);
  return 0;
}
int cuInit(unsigned) { return told("FAKE_DRIVER_INIT", 0); }
int cuDeviceGetCount(int* count) {
  *count = 0;
  return 0;
}
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return 100;
}
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long, void* status) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  *function = is("cuDriverGetVersion") ? reinterpret_cast<void*>(cuDriverGetVersion)
              : is("cuInit")           ? reinterpret_cast<void*>(cuInit)
              : is("cuDeviceGetCount") ? reinterpret_cast<void*>(cuDeviceGetCount)
              : is("cuGetProcAddress") ? reinterpret_cast<void*>(cuGetProcAddress_v2)
                                       : reinterpret_cast<void*>(unknown_error);
  if (status) *static_cast<int*>(status) = 0;
  return 0;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
