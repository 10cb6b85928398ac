// What this GPU can do at most, measured: the two rates that bound every kernel.
#pragma once
#include "harness/device.h"

namespace flash {

struct Rates {
  double fp32_flops = 0;  // multiply-adds of registers, two operations each, a second
  double hbm_bytes = 0;   // a copy between two large arrays, bytes read plus bytes written, a second
};

// Takes about a tenth of a second and 2 GB of GPU memory. Throws Error where there is no GPU.
Rates measure_rates(Device& gpu);

}  // namespace flash
