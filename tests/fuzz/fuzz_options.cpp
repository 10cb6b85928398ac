#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flash::tests::parse_any_options(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
