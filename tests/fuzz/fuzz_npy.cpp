#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flash::tests::read_any_npy(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
