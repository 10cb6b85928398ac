// V from bf16 or fp32 to e4m3, transposed, for fp8.cu.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include "fp8_scales.h"

namespace {

// A block has a tile of Bc keys. e4m3 operands of wgmma are K-major, so O = P V needs Vᵀ, where neighbours in
// memory are neighbours along the keys. And P: a thread that has S of keys 2t, 2t + 1, 2t + 8, 2t + 9 of 16 has to
// bring, as the left operand, four neighbours along the keys. A sum over keys may take them in any order; these four
// are made neighbours, the t-th word of 16 bytes.
__device__ inline int first_key_of_word(int word) { return word / 4 * 16 + word % 4 * 2; }

template <class T>
struct Columns {
  const T* from;  // [heads][keys][D]
  uint8_t* to;    // [heads][D][pitch]
  TileScales* scales;
  float *largest, *largest_scale;
  int keys, tiles_of_head;
};

template <int D, int Bc>
constexpr int kColumnThreads = Bc / 4 * (D / 8) < 512 ? Bc / 4 * (D / 8) : 512;

template <int D, int Bc>
constexpr int kColumnUnits = Bc / 4 * (D / 8) / kColumnThreads<D, Bc>;

template <class T, int D, int Bc>  // blocks on a multiprocessor: what registers allow
constexpr int kColumnBlocks = kColumnUnits<D, Bc> * sizeof(T) == 2   ? 1536 / kColumnThreads<D, Bc>
                              : kColumnUnits<D, Bc> * sizeof(T) == 4 ? 1024 / kColumnThreads<D, Bc>
                                                                     : 1;

template <class T, int D, int Bc>
__global__ void __launch_bounds__(kColumnThreads<D, Bc>, kColumnBlocks<T, D, Bc>)
    quantise_columns(const Columns<T> v, Scales scales) {
  constexpr int kThreads = kColumnThreads<D, Bc>, kWords = Bc / 4, kUnits = kColumnUnits<D, Bc>;
  __shared__ uint32_t transposed[D][kWords + 1];  // an odd distance: no bank conflicts
  __shared__ float part[32];
  const int head = blockIdx.x / v.tiles_of_head, key0 = blockIdx.x % v.tiles_of_head * Bc;
  grid_dependency_launch();
  if (scales == Scales::of_tensor) grid_dependency_wait();

  // A unit is four keys of eight columns. A warp has 8 words of keys, 32 columns.
  const int word = threadIdx.x / 4 % kWords, column = (threadIdx.x / 4 / kWords * 4 + threadIdx.x % 4) * 8;
  constexpr int kNextUnit = kThreads / kWords * 8;  // columns further
  Eight<T> given[kUnits][4];
#pragma unroll
  for (int unit = 0; unit < kUnits; unit++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = key0 + first_key_of_word(word) + (i & 1) + (i & 2) * 4;
      const bool inside = key < v.keys;
      const size_t at = inside ? (size_t(head) * v.keys + key) * D + column : 0;
      given[unit][i] = load_eight(v.from + at + unit * kNextUnit, inside);
    }
  uint32_t bits = 0;
#pragma unroll
  for (int unit = 0; unit < kUnits; unit++)
#pragma unroll
    for (int i = 0; i < 4; i++) bits = max(bits, largest_bits(given[unit][i]));
  const float mine = __uint_as_float(bits);
  const float most = block_max(mine < INFINITY ? mine : 0.0f, part);

  const float scale = scale_for(scales == Scales::of_tensor ? *v.largest : most), factor = factor_for(scale, mine);
  if (scales != Scales::measure) {
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const auto x = [&](int key) { return number(given[unit][key], i) * factor; };
        transposed[column + unit * kNextUnit + i][word] = pack_e4m3(x(0), x(1), x(2), x(3));
      }
    __syncthreads();
    const int lane = threadIdx.x % 32, pitch = pitch_of(v.keys);
    if (lane < kWords && key0 + 4 * lane < pitch)
      for (int d = threadIdx.x / 32; d < D; d += kThreads / 32)
        *reinterpret_cast<uint32_t*>(v.to + (size_t(head) * D + d) * pitch + key0 + 4 * lane) = transposed[d][lane];
  }
  grid_dependency_wait();
  if (threadIdx.x > 0) return;
  if (scales == Scales::measure) return raise_to(v.largest, most);
  v.scales[blockIdx.x].v = bf16_bits(scale);
  raise_to(v.largest_scale + head, scale);
}

}  // namespace
