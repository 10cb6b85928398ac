// The arithmetic of tensor cores: operands become fp32, products are summed in fp32, k after k. A GPU sums in an order,
// and with a rounding, that NVIDIA does not document; e4m3 products lose more there than here.
#pragma once
#include <cstddef>

#include "simt/cuda_fp8.h"
#include "simt/tensor_cores.h"

namespace simt {

constexpr unsigned element_bytes(Element type) { return type == Element::e4m3 ? 1 : 2; }

// `count` elements, as many as fill words of 16 bytes, as floats.
void to_floats(Element type, const void* elements, float* values, size_t count);

// d [m][n] += a [m][k] · b [k][n], row after row; n a multiple of 8, m of 4.
void multiply_add(const float* a, const float* b, float* d, int m, int n, int k);

}  // namespace simt
