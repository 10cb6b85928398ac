// CUDA's words, one by one, for one thread a number.
#include "harness/kernel.h"
#include "simt_kernels/simt_kernels.h"

using flash::kTarget;
using flash::launch;

namespace simt_kernels {
namespace {

__constant__ float weights[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ const int primes[4] = {2, 3, 5, 7};

__global__ void integers(const int* in, int* out, int count) {
  const int i = threadIdx.x;
  if (i >= count) return;
  const int x = in[i];
  int* result = out + i * kIntegerWords;
  result[0] = __popc(unsigned(x));
  result[1] = __ffs(x);
  result[2] = __clz(x);
  result[3] = int(__umulhi(unsigned(x), 0xdeadbeefu));
  result[4] = __mulhi(x, -123456789);
  result[5] = int(__brev(unsigned(x)));
  result[6] = min(x, 17);
  result[7] = max(x, -17);
  result[8] = __float_as_int(__int_as_float(x));
  result[9] = int(__float_as_uint(__uint_as_float(unsigned(x))));
}

__global__ void floats(const float* in, float* out, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float x = __ldg(&in[i]);
  float* result = out + i * kFloatWords;
  result[0] = rsqrtf(x);
  result[1] = __expf(x);
  result[2] = __logf(x);
  result[3] = exp2f(x);
  result[4] = __fdividef(x, 3.0f);
  result[5] = __frcp_rn(x);
  result[6] = fmaf(x, x, 1.0f);
  result[7] = fmaxf(x, 1.5f);
  result[8] = fminf(x, 1.5f);
  result[9] = max(x, 1.5f);
  result[10] = min(x, 1.5f);
  result[11] = max(NAN, x);
  result[12] = min(x, NAN);
  result[13] = fabsf(-x);
  result[14] = sqrtf(x);
  result[15] = float(__float2int_rn(x));
  result[16] = __saturatef(x - 1.0f);
  result[17] = log2f(x);
  result[18] = __fadd_rn(__fmul_rn(x, x), 1.0f);
  result[19] = tanhf(x);
}

__global__ void vectors(const float* in, float* out) {
  const float4 a = *reinterpret_cast<const float4*>(in);
  const float2 b = reinterpret_cast<const float2*>(in)[1];  // z, w of a
  float4 sum = make_float4(a.x + b.x, a.y + b.y, a.z, a.w);
  float4 copy;
  copy = sum;
  reinterpret_cast<float4*>(out)[0] = copy;
  const int4 i = make_int4(1, 2, 3, 4);
  const uint2 u = make_uint2(5u, 6u);
  reinterpret_cast<float4*>(out)[1] = make_float4(i.x, i.y, i.z, i.w);
  reinterpret_cast<float2*>(out)[4] = make_float2(u.x, u.y);
  const int2 j = make_int2(-7, -8);
  const uint4 v = make_uint4(9u, 10u, 11u, 12u);
  reinterpret_cast<float2*>(out)[5] = make_float2(j.x, j.y);
  reinterpret_cast<float4*>(out)[3] = make_float4(v.x, v.y, v.z, v.w);
}

__global__ void halves(const float* in, uint16_t* bits, float* back, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const half h = __float2half(in[i]);
  bits[i] = __half_as_ushort(h);
  back[i] = __half2float(__ushort_as_half(bits[i]));
}

__global__ void bfloat16s(const float* in, uint16_t* bits, float* back, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const __nv_bfloat16 h = __float2bfloat16(in[i]);
  bits[i] = __bfloat16_as_ushort(h);
  back[i] = __bfloat162float(__ushort_as_bfloat16(bits[i]));
}

template <class Two, class One>
__device__ void arithmetic(Two a, Two b, One x, One y, float* out) {
  const Two sum = __hadd2(a, b), product = __hmul2(a, b), difference = __hsub2(a, b);
  out[0] = __low2float(sum);
  out[1] = __high2float(sum);
  out[2] = __low2float(product);
  out[3] = __high2float(product);
  out[4] = __low2float(difference);
  out[5] = __high2float(difference);
  out[6] = float(__hadd(x, y));
  out[7] = float(__hmul(x, y));
  out[8] = float(__hsub(x, y));
}

__global__ void half_arithmetic(const float* in, float* out) {
  const float2 two = *reinterpret_cast<const float2*>(in);
  arithmetic(__float22half2_rn(two), __floats2half2_rn(in[2], in[3]), __float2half_rn(in[0]), __float2half_rn(in[1]),
             out);
  arithmetic(__float22bfloat162_rn(two), __floats2bfloat162_rn(in[2], in[3]), __float2bfloat16_rn(in[0]),
             __float2bfloat16_rn(in[1]), out + 9);
  const float2 h =
      __half22float2(__halves2half2(__low2half(__float2half2_rn(in[0])), __high2half(__half2half2(in[1]))));
  const float2 b = __bfloat1622float2(
      __halves2bfloat162(__low2bfloat16(__float2bfloat162_rn(in[0])), __high2bfloat16(__float2bfloat162_rn(in[1]))));
  out[18] = h.x;
  out[19] = h.y;
  out[20] = b.x;
  out[21] = b.y;
}

__global__ void __launch_bounds__(4, 1) constant_memory(float* out) {
  out[threadIdx.x] = weights[threadIdx.x] * float(primes[threadIdx.x]);
  __threadfence();
}

}  // namespace

template <>
void Kernels<kTarget>::integer_words(const int* in, int* out, int count) {
  launch(integers, 1, 1024, 0, nullptr, in, out, count);
}
template <>
void Kernels<kTarget>::float_words(const float* in, float* out, int count) {
  launch(floats, flash::ceil_div(count, 64), 64, 0, nullptr, in, out, count);
}
template <>
void Kernels<kTarget>::vector_words(const float* in, float* out) {
  launch(vectors, 1, 1, 0, nullptr, in, out);
}
template <>
void Kernels<kTarget>::round_to_half(const float* in, uint16_t* bits, float* back, int count) {
  launch(halves, flash::ceil_div(count, 256), 256, 0, nullptr, in, bits, back, count);
}
template <>
void Kernels<kTarget>::round_to_bfloat16(const float* in, uint16_t* bits, float* back, int count) {
  launch(bfloat16s, flash::ceil_div(count, 256), 256, 0, nullptr, in, bits, back, count);
}
template <>
void Kernels<kTarget>::half_words(const float* in, float* out) {
  launch(half_arithmetic, 1, 1, 0, nullptr, in, out);
}
template <>
void Kernels<kTarget>::constants(float* out) {
  launch(constant_memory, 1, 4, 0, nullptr, out);
}

}  // namespace simt_kernels
