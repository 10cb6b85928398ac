// Q and K from bf16 or fp32 to e4m3, rotated, for fp8.cu.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include "fp8_scales.h"
#include "harness/tensor_cores.h"

namespace {

// A tile of Bc rows has one scale. Blocks stay, as many as fit, and take every gridDim-th tile.
//
// The rotation, x becomes x H with the Hadamard matrix of D × D, all whose elements are ±1, is done in two parts. H is
// blocks of 16 × 16, each ± the Hadamard matrix of 16 × 16. Products with that one are the tensor cores': exact
// products, fp32 sums. What is left are log2(D / 16) rounds of sums and differences of pairs. In which order a row's
// columns are taken does not matter, as long as Q and K do the same: so a thread takes them as they lie in memory, 16
// bytes at a time, and leaves them as they lie in registers.
//
// A warp has 32 pieces of 64 columns: rows, halves or quarters of one. In a thread, as mma_m16n8k16 wants it, are parts
// of four pieces: columns 8t … 8t + 7 and 32 + 8t … of pieces g, g + 8, g + 16 and g + 24; g = lane / 4, t = lane % 4.
template <class T>
struct Rows {
  const T* from;  // [heads][rows][D]
  uint8_t* to;
  float* largest;
  int rows, tiles_of_head;
  unsigned tiles;
  uint32_t minus[8];  // which columns change their sign, before the rotation: bits for thread t, 4 + t of columns ≥ 128
};

template <int D, int Bc>
constexpr int kRowThreads = D / 64 * Bc;  // of a block; 512 fit on a multiprocessor, at 128 registers each
template <int D, int Bc>
constexpr int kRowBlocks = 512 / kRowThreads<D, Bc>;

// The sign of two numbers, in bf16, is changed if bits `pair` and `pair` + 16 of minus say so.
__device__ __forceinline__ uint32_t with_signs(uint32_t two, uint32_t minus, int pair) {
  return two ^ (minus << (15 - pair) & 0x80008000u);
}

// Numbers 2i and 2i + 1 as the sum of bf16 numbers, of which this is the part-th: bf16 has one, fp32 three of 8 bits.
template <class T>
constexpr int kParts = sizeof(T) == 2 ? 1 : 3;
template <class T>
__device__ __forceinline__ uint32_t part_of(const Eight<T>& eight, int i, int part) {
  if constexpr (sizeof(T) == 2) return eight.word[i];
  float x = number(eight, 2 * i), y = number(eight, 2 * i + 1);
#pragma unroll
  for (int before = 0; before < part; before++) {
    x -= __uint_as_float(__float_as_uint(x) & 0xffff0000u);
    y -= __uint_as_float(__float_as_uint(y) & 0xffff0000u);
  }
  return __float_as_uint(x) >> 16 | (__float_as_uint(y) & 0xffff0000u);
}

// The thread's part of a 16 × 16 matrix as right operand, columns g and 8 + g: Hadamard's, or the one that changes
// nothing.
__device__ __forceinline__ void matrix_16(uint32_t (&B)[2][2], bool rotated) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int e = i % 2, half = i / 2 % 2, u = i / 4;
    const int row = 8 * half + threadIdx.x % 4 * 2 + e, column = 8 * u + threadIdx.x % 32 / 4;
    const uint32_t sign = __popc(row & column) & 1;
    const uint32_t one = 0x3f80, bits = rotated ? one | sign << 15 : row == column ? one : 0;  // bf16
    B[u][half] = e == 0 ? bits : B[u][half] | bits << 16;
  }
}

template <class T, int D, int Bc>
__global__ void __launch_bounds__(kRowThreads<D, Bc>, kRowBlocks<D, Bc>)
    quantise_rows(const __grid_constant__ Rows<T> q, const __grid_constant__ Rows<T> k, float* q_scale,
                  TileScales* kv_scales, bool rotated, Scales scales, float* largest_v_scale, int v_heads) {
  constexpr bool kAhead = sizeof(T) == 2;  // the next tile is on its way while this one is rotated
  __shared__ float part[2][32];
  grid_dependency_launch();
  if (scales == Scales::of_tensor) grid_dependency_wait();
  if (blockIdx.x == 0)
    for (int head = threadIdx.x; head < v_heads; head += blockDim.x) largest_v_scale[head] = 0.0f;

  // The tiles of Q come first, then those of K. Of one: where the thread's first piece is, in which row.
  struct Place {
    bool is_q;
    int tile, row;
    size_t at;
  };
  const unsigned tiles = q.tiles + k.tiles;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto place_of = [&](unsigned wanted) -> Place {
    const unsigned tile = min(wanted, tiles - 1);
    const bool is_q = tile < q.tiles;
    const Rows<T>& rows = is_q ? q : k;
    const int own = int(tile - (is_q ? 0 : q.tiles)), head = own / rows.tiles_of_head;
    const int row = own % rows.tiles_of_head * Bc + int(threadIdx.x) / 32 * (2048 / D) + g;
    return {is_q, own, wanted < tiles ? row : rows.rows, (size_t(head) * rows.rows + row) * D};
  };
  // By how much further pieces g + 8 (r = 1) and those 16 further (b = 1) are: rows, and numbers in memory.
  const auto rows_on = [](int r, int b) { return (D < 256 ? 8 * r : 0) + (D < 128 ? 16 * b : 0); };
  const auto numbers_on = [&](int r, int b) {
    return rows_on(r, b) * D + (D < 128 ? 0 : 64 * b) + (D < 256 ? 0 : 128 * r);
  };
  Eight<T> given[2][2][2];
  const auto fetch = [&](const Place& place) {
    const Rows<T>& rows = place.is_q ? q : k;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int r = i / 4, b = i / 2 % 2, half = i % 2;
      given[r][b][half] = load_eight(rows.from + place.at + 8 * t + (numbers_on(r, b) + 32 * half),
                                     place.row + rows_on(r, b) < rows.rows);
    }
  };

  uint32_t B[2][2];
  matrix_16(B, rotated);
  Place next = place_of(blockIdx.x);
  if (kAhead) fetch(next);
  for (unsigned tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, turn ^= 1) {
    const Place here = next;
    const Rows<T>& rows = here.is_q ? q : k;
    if (!kAhead) fetch(here);
    const uint32_t minus[2] = {rows.minus[t], rows.minus[D < 256 ? t : 4 + t]};
    float x[2][8][4] = {};  // of each r eight groups of 16 columns
#pragma unroll
    for (int group = 0; group < 8; group++)
#pragma unroll
      for (int n = 0; n < kParts<T>; n++) {
        uint32_t A[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int pair = group * 2 + i / 2;
          const uint32_t two = part_of(given[i % 2][group / 4][group / 2 % 2], pair % 4, n);
          A[i] = with_signs(two, minus[i % 2], D < 128 ? pair % 8 : pair);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
          float(&x0)[4] = x[0][group], (&x1)[4] = x[1][group];
          float d[4] = {x0[2 * u], x0[2 * u + 1], x1[2 * u], x1[2 * u + 1]};
          mma_m16n8k16<__nv_bfloat16>(d, A, B[u]);
          x0[2 * u] = d[0], x0[2 * u + 1] = d[1], x1[2 * u] = d[2], x1[2 * u + 1] = d[3];
        }
      }
    next = place_of(tile + gridDim.x);
    if (kAhead) fetch(next);
    if (rotated) {
#pragma unroll
      for (int bit = 1; bit < D / 16; bit *= 2)
#pragma unroll
        for (int i = 0; i < 64; i++) {
          const int group = i / 4, other = group | bit;
          if (group & bit) continue;
          float &a = x[group / 8][group % 8][i % 4], &b = x[other / 8][other % 8][i % 4];
          const float sum = a + b;
          b = a - b, a = sum;
        }
    }

    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; i++)
      mine = fmaxf(mine, fabsf(x[i / 32][i / 4 % 8][i % 4]));  // of a NaN and a number, the number
    const float most = block_max(mine < INFINITY ? mine : 0.0f, part[turn]);
    if (scales == Scales::measure) {
      grid_dependency_wait();
      if (threadIdx.x == 0) raise_to(rows.largest, most);
      continue;
    }
    const float scale = scale_for(scales == Scales::of_tensor ? *rows.largest : most), factor = factor_for(scale, mine);
    if (threadIdx.x == 0) {
      if (here.is_q)
        q_scale[here.tile] = scale;
      else
        kv_scales[here.tile].k = bf16_bits(scale);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, b = i % 2;
      const auto four = [&](const float(&y)[4]) {
        return pack_e4m3(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor);
      };
      const auto* y = &x[r][4 * b];
      if (here.row + rows_on(r, b) < rows.rows)
        *reinterpret_cast<uint4*>(rows.to + here.at + 16 * t + numbers_on(r, b)) =
            make_uint4(four(y[0]), four(y[1]), four(y[2]), four(y[3]));
    }
  }
  grid_dependency_wait();
}

}  // namespace
