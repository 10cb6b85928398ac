// Kernels that bring a program down.
#include "harness/kernel.h"
#include "simt_kernels/simt_kernels.h"

using flash::kTarget;
using flash::launch;

namespace simt_kernels {
namespace {

__global__ void dividing(int by, int* result) {
  if (threadIdx.x == 37) *result = int(threadIdx.x) / by;
}

__global__ void writing(int* where) {
  if (threadIdx.x == 5) *where = 1;
}

}  // namespace

template <>
void Kernels<kTarget>::divide(int by, int* result) {
  launch(dividing, 3, 64, 0, nullptr, by, result);
}

template <>
void Kernels<kTarget>::write_to(int* where) {
  launch(writing, 1, 64, 0, nullptr, where);
}

}  // namespace simt_kernels
