// What this GPU can do at most, measured: the rates that bound every kernel.
#pragma once
#include "harness/device.h"

namespace flash {

struct Rates {
  double fp32_flops = 0;  // multiply-adds of registers, two operations each, a second
  // Products of tensor cores that are fed without a pause, a second; 0 where the course has no kernel for the type.
  double bf16_flops = 0, e4m3_flops = 0;  // fp16 is as fast as bf16
  double mma_sync_flops = 0;              // bf16 again, by the instruction of chapter 07: less on Hopper
  double hbm_bytes = 0;                   // a copy between two large arrays, bytes read plus bytes written, a second
};

// Takes about a tenth of a second and 2 GB of GPU memory. Throws Error where there is no GPU.
Rates measure_rates(Device& gpu);

}  // namespace flash
