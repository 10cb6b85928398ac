// From bf16 or fp32 to e4m3, for fp8.cu: a power of two as the scale of each tile, Q and K rotated, V transposed.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include <cmath>

#include "harness/philox.h"
#include "harness/wgmma.h"

namespace {
using namespace flash;

// What quantising leaves for the attention. Scales: what e4m3 is to be multiplied by.
struct Quantised {
  uint8_t *Q, *K;    // [heads][rows][D]
  uint8_t* V;        // [heads][D][pitch], the keys in the order of first_key_of_word()
  float* q_scale;    // [heads][tiles of Bc rows]
  float2* kv_scale;  // of K, of V
  float* largest;    // numbers in Q, K and V, for tensor scales; then each head's largest scale of V
};

__host__ __device__ inline int pitch_of(int keys) {
  return ceil_div(keys, 16) * 16;
}  // TMA wants multiples of 16 bytes

// The smallest power of two that brings numbers up to `largest` into the range of e4m3, ±448. Multiplying by it is
// exact, and e4m3, a floating-point format, has as many digits after it as with any other scale.
__device__ inline float scale_for(float largest) {
  const unsigned up = (__float_as_uint(largest / 448.0f) + 0x7fffff) & 0x7f800000;
  return __uint_as_float(max(up, 0x00800000u));  // 2^-126 for zeros
}

// For numbers that are at least 0, whose bits are ordered as they are.
__device__ inline void raise_to(float* largest, float x) {
  atomicMax(reinterpret_cast<int*>(largest), __float_as_int(x));
}

// Eight neighbours of a row, as they lie in memory.
template <class T>
struct Eight {
  uint32_t word[2 * sizeof(T)];
};
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const T* from, bool inside) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) / 2; i++) {
    const uint4 four = inside ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
    eight.word[4 * i] = four.x, eight.word[4 * i + 1] = four.y;
    eight.word[4 * i + 2] = four.z, eight.word[4 * i + 3] = four.w;
  }
  return eight;
}
template <class T>
__device__ __forceinline__ float number(const Eight<T>& eight, int i) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(eight.word[i]);
  return __uint_as_float(i % 2 ? eight.word[i / 2] & 0xffff0000u : eight.word[i / 2] << 16);
}

// The bits of the largest magnitude among eight, as a float. The bits of magnitudes are ordered as they are, ∞ and NaN
// come after all numbers.
template <class T>
__device__ __forceinline__ uint32_t largest_bits(const Eight<T>& eight) {
  uint32_t bits = 0;
#pragma unroll
  for (const uint32_t word : eight.word)
    bits = sizeof(T) == 4 ? max(bits, word & 0x7fffffff) : max(bits, max(word & 0x7fff0000, word << 16 & 0x7fff0000));
  return bits;
}

// The largest of all threads' x. `part` is 32 floats of shared memory that nobody else has used since the last but one
// barrier.
__device__ __forceinline__ float block_max(float x, float* part) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < int(blockDim.x) / 32; warp++) x = fmaxf(x, part[warp]);
  return x;
}

// Where scales come from: each tile's own numbers; or those of the whole tensor, which a launch before has measured.
enum class Scales { of_tiles, measure, of_tensor };

// What a thread multiplies its numbers by, the largest of them being `most`. e4m3 has NaN, but no ∞: who has one brings
// NaN in its place, and whoever meets that looks at the given numbers.
__device__ inline float factor_for(float scale, float most) { return most < INFINITY ? 1.0f / scale : NAN; }

// ---- Q and K: a thread has 32 columns of a row, a block a tile of Bc rows and one scale. Blocks stay, as many as fit
// at 64 registers a thread, and take every gridDim-th tile.
template <class T>
struct Rows {
  const T* from;  // [heads][rows][D]
  uint8_t* to;
  float* largest;
  int rows, tiles_of_head;
  unsigned tiles;
  uint32_t minus[8];  // which columns change their sign, before the rotation: a bit for each
};

template <int D>
constexpr int kLanes = D / 32;  // threads of a row
template <int D>
constexpr int kMostThreads = 128 * kLanes<D>;  // of a tile of 128 rows

// x becomes x H: a row times the Hadamard matrix of D × D, all whose elements are ±1. It is made of log2(D) rounds of
// sums and differences of pairs: of columns of one thread, then of columns of two threads, each of which takes half of
// the pairs. That leaves the columns in another order and some with their signs turned, in all rows alike; a dot
// product of two rows does not care.
template <int kLanes>
__device__ __forceinline__ void rotate(float (&x)[32]) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if (i & bit) continue;
      const float sum = x[i] + x[i | bit];
      x[i | bit] = x[i] - x[i | bit], x[i] = sum;
    }
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
    const bool upper = threadIdx.x & lane;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float kept = upper ? x[i + 16] : x[i];
      const float got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 16], lane);
      x[i] = kept + got, x[i + 16] = kept - got;
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kMostThreads<D>, 1024 / kMostThreads<D>)
    quantise_rows(const Rows<T> q, const Rows<T> k, float* q_scale, float2* kv_scale, bool rotated, Scales scales,
                  float* largest_v_scale, int v_heads) {
  constexpr bool kAhead = sizeof(T) == 2;  // the next row is on its way while this one is rotated
  __shared__ float part[2][32];
  __shared__ uint32_t minus[2][8];
  const int rows_of_tile = blockDim.x / kLanes<D>, t = threadIdx.x % kLanes<D>;
  grid_dependency_launch();
  if (scales == Scales::of_tensor) grid_dependency_wait();

  // The tiles of Q come first, then those of K.
  const unsigned tiles = q.tiles + k.tiles;
  const auto rows_of = [&](unsigned tile) { return tile < q.tiles ? q.rows : k.rows; };
  const auto row_of = [&](unsigned tile) {
    const unsigned in_head = tile < q.tiles ? tile % unsigned(q.tiles_of_head)  //
                                            : (tile - q.tiles) % unsigned(k.tiles_of_head);
    return int(in_head) * rows_of_tile + int(threadIdx.x) / kLanes<D>;
  };
  const auto place_of = [&](unsigned tile) {  // of the thread's first column: it has 8 i · kLanes + 8 t + 0 … 7
    const unsigned head = tile < q.tiles ? tile / unsigned(q.tiles_of_head)  //
                                         : (tile - q.tiles) / unsigned(k.tiles_of_head);
    return (size_t(head) * rows_of(tile) + row_of(tile)) * D + 8 * t;
  };
  Eight<T> fetched[4];
  const auto fetch = [&](unsigned tile) {
    const bool inside = tile < tiles && row_of(tile) < rows_of(tile);
    const T* from = (tile < q.tiles ? q.from : k.from) + (inside ? place_of(tile) : 0);
#pragma unroll
    for (int i = 0; i < 4; i++) fetched[i] = load_eight(from + 8 * kLanes<D> * i, inside);
  };

  if (kAhead) fetch(blockIdx.x);
#pragma unroll
  for (int i = 0; i < D / 32; i++)
    if (threadIdx.x == unsigned(i)) minus[0][i] = q.minus[i], minus[1][i] = k.minus[i];
  if (blockIdx.x == 0)
    for (int head = threadIdx.x; head < v_heads; head += blockDim.x) largest_v_scale[head] = 0.0f;
  __syncthreads();
  for (unsigned tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, turn ^= 1) {
    if (!kAhead) fetch(tile);
    float x[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const uint8_t signs = reinterpret_cast<const uint8_t*>(minus[tile >= q.tiles])[i / 8 * kLanes<D> + t];
      const uint32_t sign = uint32_t(signs) << (31 - i % 8) & 0x80000000u;
      x[i] = __uint_as_float(__float_as_uint(number(fetched[i / 8], i % 8)) ^ sign);
    }
    if (kAhead) fetch(tile + gridDim.x);
    if (rotated) rotate<kLanes<D>>(x);

    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) mine = fmaxf(mine, fabsf(x[i]));  // of a NaN and a number, the number
    const float most = block_max(mine < INFINITY ? mine : 0.0f, part[turn]);
    float* largest = tile < q.tiles ? q.largest : k.largest;
    if (scales == Scales::measure) {
      grid_dependency_wait();
      if (threadIdx.x == 0) raise_to(largest, most);
      continue;
    }
    const float scale = scale_for(scales == Scales::of_tensor ? *largest : most), factor = factor_for(scale, mine);
    if (threadIdx.x == 0) {
      if (tile < q.tiles)
        q_scale[tile] = scale;
      else
        kv_scale[tile - q.tiles].x = scale;
    }
    if (row_of(tile) >= rows_of(tile)) continue;
    uint8_t* to = (tile < q.tiles ? q.to : k.to) + place_of(tile);
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const auto four = [&](int j) {
        return pack_e4m3(x[j] * factor, x[j + 1] * factor, x[j + 2] * factor, x[j + 3] * factor);
      };
      *reinterpret_cast<uint2*>(to + kLanes<D> * i) = make_uint2(four(i), four(i + 4));
    }
  }
  grid_dependency_wait();
}

// ---- V: a block a tile of Bc keys. e4m3 operands of wgmma are K-major, so O = P V needs Vᵀ, where neighbours in
// memory are neighbours along the keys. And P: a thread that has S of keys 2t, 2t + 1, 2t + 8, 2t + 9 of 16 has to
// bring, as the left operand, four neighbours along the keys. A sum over keys may take them in any order; these four
// are made neighbours, the t-th word of 16 bytes.
__device__ inline int first_key_of_word(int word) { return word / 4 * 16 + word % 4 * 2; }

template <class T>
struct Columns {
  const T* from;  // [heads][keys][D]
  uint8_t* to;    // [heads][D][pitch]
  float2* scale;
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
  v.scale[blockIdx.x].y = scale;
  raise_to(v.largest_scale + head, scale);
}

// The largest numbers of Q, K and V begin at 0, where they are asked for.
__global__ void clear_largest(float* largest) {
  grid_dependency_launch();
  largest[threadIdx.x] = 0.0f;
}

// ---- For the host. Bc: how many rows have a scale in common; of K and V the attention takes as many at a time.
template <class T, int D, int Bc>
void quantise_from(const Problem& p, const Tensors& t, const Quantised& to, Stream stream) {
  const auto rows = [](const void* from, uint8_t* to, float* largest, int rows, size_t heads) {
    const int tiles = ceil_div(rows, Bc);
    return Rows<T>{static_cast<const T*>(from), to, largest, rows, tiles, checked_grid_length(tiles * heads), {}};
  };
  Rows<T> q = rows(t.Q, to.Q, to.largest, p.Nq, p.query_heads());
  Rows<T> k = rows(t.K, to.K, to.largest + 1, p.Nk, p.kv_heads());
  // Random signs before the rotation: no row of ones is brought into one column by it. The signs of Q are turned where
  // scale < 0.
  for (unsigned i = 0; i < 8; i++) {
    const uint4 four = philox4x32_10(make_uint4(i / 4, 0, 0, 0), make_uint2(0, 0));
    const uint32_t random = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
    k.minus[i] = p.quantisation.rotation ? random : 0;
    q.minus[i] = p.scale < 0 ? ~k.minus[i] : k.minus[i];
  }
  const Columns<T> v{
      static_cast<const T*>(t.V), to.V, to.kv_scale, to.largest + 2, to.largest + 3, p.Nk, k.tiles_of_head};

  const auto go = [&](Scales scales) {
    const unsigned threads = Bc * kLanes<D>, blocks = unsigned(multiprocessors()) * (1024 / threads);
    launch(quantise_rows<T, D>, std::min(q.tiles + k.tiles, blocks), threads, 0, stream, q, k, to.q_scale, to.kv_scale,
           p.quantisation.rotation, scales, to.largest + 3, int(p.kv_heads()));
    launch_early(quantise_columns<T, D, Bc>, k.tiles, kColumnThreads<D, Bc>, 0, stream, v, scales);
  };
  if (p.quantisation.tile_scales) return go(Scales::of_tiles);
  launch(clear_largest, 1, 3, 0, stream, to.largest);
  go(Scales::measure);
  go(Scales::of_tensor);
}

}  // namespace
