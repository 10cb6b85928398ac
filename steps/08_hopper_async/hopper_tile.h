// What the forward kernels of this chapter have word for word in common: the shape of their tiles, the order of the
// work, the two products, the softmax of a tile, the way out, and the arguments. What differs between them is in their
// files.
#pragma once
#include <cfloat>
#include <cmath>

#include "harness/mask.h"
#include "harness/wgmma.h"

namespace {
using namespace flash;

// A block owns Br query rows at a time, 64 for each warpgroup that computes, and walks over tiles of Bc keys. With and
// without a causal mask kernels are different ones: the one without asks nothing about it.
template <class T_, int D_, int kConsumers_, int Bc_, int kStages_, bool kCausal_>
struct Shape {
  using T = T_;  // of Q, K, V, P and O; sums are fp32
  static constexpr bool kCausal = kCausal_;
  static constexpr int D = D_, kConsumers = kConsumers_, Br = 64 * kConsumers, Bc = Bc_, kStages = kStages_;
};

// Registers of a thread. A kernel of 384, 512 or 640 threads is launched with 168, 128 or 96 for each; a producer needs
// few, and gives the rest of its to the consumers (setmaxnreg).
template <class Shape>
constexpr int kProducerRegisters = Shape::kConsumers == 2 ? 40 : 32;
template <class Shape>
constexpr int kConsumerRegisters = Shape::kConsumers == 2   ? 232
                                   : Shape::kConsumers == 3 ? 160
                                                            : 112;
// Who asks for more than was launched with waits for ever.
template <class Shape>
constexpr bool kRegistersSuffice = kProducerRegisters<Shape> + Shape::kConsumers* kConsumerRegisters<Shape> <=
                                   (1 + Shape::kConsumers) * (512 / (1 + Shape::kConsumers) / 8 * 8);

// A tile in shared memory, as TMA writes it and wgmma reads it: panels of 64 columns, 128 bytes a row, swizzled.
template <class T, int kRows, int D>
struct alignas(1024) Tile {
  T panel[D / 64][kRows][64];
};

// What decides about the order of the work.
struct Order {
  Problem p;
  int heads;           // of Q, over the batch too
  int q_tiles, tiles;  // of a head, of all
  int head_group;      // how many heads are worked on at a time when causal
};

// What a kernel is told. TMA wants its tensor maps in the parameters of the kernel, so all of it is one parameter.
template <class T>
struct Arguments : Order {
  TensorMap Q, K, V;                  // [heads][rows][D], batch and heads as one axis
  const T *Q_rows, *K_rows, *V_rows;  // the same for plain loads
  T* O;
  float* LSE;
  float scale, scale_log2;  // |scale| and |scale| · log2(e)
  bool negative;            // scale < 0: the kernel turns the signs of Q
};

// ---- The order of the work: which rows of which head tile number `tile` of the output is, and how many key tiles it
// needs; past the last tile head is −1. Heads that share keys are neighbours, so that L2 serves the second.
struct Work {
  int head, kv_head, row0, key_tiles;
};
// How many keys a row sees; rows past the last, which a tile may have, too.
template <class Shape>
__device__ __forceinline__ int seen_by(const Order& a, int row) {
  return Shape::kCausal ? min(keys_seen(a.p, row), a.p.Nk) : a.p.Nk;
}
template <class Shape>
__device__ __forceinline__ Work work_of(int tile, const Order& a) {
  if (tile >= a.tiles) return {.head = -1, .kv_head = 0, .row0 = 0, .key_tiles = 0};
  Work w;
  w.head = tile / a.q_tiles, w.row0 = tile % a.q_tiles * Shape::Br;
  if (Shape::kCausal) {  // the longest tiles of a group of heads first: no long tile begins when the others are done
    const int first = tile / (a.q_tiles * a.head_group) * a.head_group;
    const int in_group = min(a.head_group, a.heads - first), i = tile - first * a.q_tiles;
    w.head = first + i % in_group, w.row0 = (a.q_tiles - 1 - i / in_group) * Shape::Br;
  }
  w.kv_head = w.head / (a.p.Hq / a.p.Hkv);  // Hkv divides Hq, so this holds across batches
  w.key_tiles = ceil_div(seen_by<Shape>(a, min(w.row0 + Shape::Br, a.p.Nq) - 1), Shape::Bc);
  return w;
}

// A warp's copy of the work that the producer has left in shared memory. Lane 0 reads it and tells the others, so that
// its own arrival at "empty", later, covers the reading.
__device__ __forceinline__ Work read_work(const Work& shared) {
  Work w{};
  if (threadIdx.x % 32 == 0) w = shared;
  return {.head = __shfl_sync(~0u, w.head, 0),
          .kv_head = __shfl_sync(~0u, w.kv_head, 0),
          .row0 = __shfl_sync(~0u, w.row0, 0),
          .key_tiles = __shfl_sync(~0u, w.key_tiles, 0)};
}

// ---- The two products of a warpgroup, started, each as one group. Their operands are wgmma_operand()s.
// 16 columns further in a panel are 32 bytes, 2 in a descriptor; 64 columns further are in the next panel.
template <class Shape>
__device__ __forceinline__ void start_scores(float (&S)[Shape::Bc / 2], uint64_t q, uint64_t k) {  // S = Q Kᵀ
  using T = typename Shape::T;
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < Shape::D / 16; d++) {
    const uint64_t q_d = q + d / 4 * (Shape::Br * 128 >> 4) + d % 4 * 2;
    const uint64_t k_d = k + d / 4 * (Shape::Bc * 128 >> 4) + d % 4 * 2;
    if (d == 0)
      wgmma<Shape::Bc, T, Major::K, Major::K, false>(S, q_d, k_d);
    else
      wgmma<Shape::Bc, T, Major::K, Major::K, true>(S, q_d, k_d);
  }
  wgmma_commit();
}
template <class Shape>
__device__ __forceinline__ void start_weighted_sum(float (&O)[Shape::D / 2], const uint32_t (&P)[Shape::Bc / 4],
                                                   uint64_t v) {  // O += P V
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < Shape::Bc / 16; j++)
    wgmma<Shape::D, typename Shape::T, Major::MN, true>(O, P + 4 * j, v + j * (16 * 128 >> 4));
  wgmma_commit();
}

// ---- A thread's parts of S and O (wgmma.h) belong to two rows of its warp's 16: g = lane / 4 and g + 8. Which, for i?
__device__ constexpr int row_of(int i) { return i >> 1 & 1; }

// How many of the key tiles, from the first, need no mask in this warpgroup, whose first row is `row`; and before
// which, as tiles go from the last to the first, every row has seen a key.
template <class Shape>
__device__ __forceinline__ int whole_tiles(const Order& a, int row) {
  return max(seen_by<Shape>(a, row) - 1, 0) / Shape::Bc;
}

// Scores of keys that a row does not see become −∞. Of the tile's keys the two rows see the first seen0 and seen1.
template <int n>
__device__ __forceinline__ void mask_scores(float (&S)[n], int seen0, int seen1) {
  const int column0 = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < n; i++)
    if (8 * (i / 4) + (i & 1) >= (row_of(i) ? seen1 : seen0) - column0) S[i] = -INFINITY;
}

// Of the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// 2^((s − m)·c) is computed as 2^(s·c − m·c), one multiply-add. m·c is rounded, and the exponent is off by as much: up
// to 2^-14 if |m·c| is this large. Rows beyond it take the difference first.
constexpr float kSteep = 1024.0f;

// Online softmax: S becomes P. m is the maximum of a row's scores so far, l the sum of P so far over this thread's own
// columns; O, like l, is to be multiplied by alpha.
template <int n>
__device__ __forceinline__ void softmax_tile(float (&S)[n], float (&m)[2], float (&l)[2], float (&alpha)[2],
                                             float scale_log2) {
  float from[2], shift[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x0 = S[2 * r], x1 = S[2 * r + 1];
#pragma unroll
    for (int i = 4; i < n; i += 4) x0 = fmaxf(x0, S[i + 2 * r]), x1 = fmaxf(x1, S[i + 2 * r + 1]);
    const float old = m[r];
    m[r] = fmaxf(old, row_max(fmaxf(x0, x1)));
    from[r] = m[r] == -INFINITY ? 0.0f : m[r];  // no key seen yet: ∞ − ∞ is not a number
    shift[r] = from[r] * scale_log2;
    alpha[r] = exp2_fast((old - from[r]) * scale_log2);
  }
  if (fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kSteep) {
#pragma unroll
    for (int i = 0; i < n; i++) S[i] -= from[row_of(i)];
    shift[0] = shift[1] = 0.0f;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      S[i] = exp2_fast(fmaf(S[i], scale_log2, -shift[r])), S[i + 1] = exp2_fast(fmaf(S[i + 1], scale_log2, -shift[r]));
      sum0 += S[i], sum1 += S[i + 1];
    }
    l[r] = l[r] * alpha[r] + (sum0 + sum1);
  }
}

// P as the operand of the second product: where wgmma leaves S is where it wants its left operand.
template <class T, int n>
__device__ __forceinline__ void pack_weights(uint32_t (&P)[n / 2], const float (&S)[n]) {
#pragma unroll
  for (int i = 0; i < n / 2; i++) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
}

template <int n>
__device__ __forceinline__ void rescale(float (&O)[n], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < n; i++) O[i] *= alpha[row_of(i)];
}

// For scale < 0: softmax(scale · Q Kᵀ) = softmax(|scale| · (−Q) Kᵀ). A warpgroup turns the signs of its own 64 rows of
// Q, which is exact. wgmma reads them through the async proxy, so each thread fences before they meet.
template <class T, int Br, int D>
__device__ __forceinline__ void turn_signs(Tile<T, Br, D>& Q, int warpgroup) {
  for (int panel = 0; panel < D / 64; panel++) {
    auto* words = reinterpret_cast<uint32_t*>(Q.panel[panel][64 * warpgroup]);
    for (int i = threadIdx.x % 128; i < 64 * 64 / 2; i += 128) words[i] ^= 0x80008000u;
  }
  fence_proxy_async();
  named_barrier_sync(8 + warpgroup, 128);
}

// A key that a row does not see must not reach it, whatever is in it. Masked weights are 0, and to a tensor core 0 ·
// NaN is NaN. So under a causal mask a row that is not finite in the end is summed again, by hand, over the keys that
// it sees: it may be a NaN of its own. One multiply-add for each element of O tells.
template <class Shape, class T>
__device__ __forceinline__ void leave_out_unseen(float (&O)[Shape::D / 2], const float (&m)[2], int head, int row,
                                                 const Arguments<T>& a) {
  constexpr int D = Shape::D;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
      if (row_of(i) == r) zero = fmaf(O[i], 0.0f, zero);
    if (zero == 0.0f || row + 8 * r >= a.p.Nq) continue;

    const T* q = a.Q_rows + (size_t(head) * a.p.Nq + row + 8 * r) * D;
    const size_t first_key = size_t(head / (a.p.Hq / a.p.Hkv)) * a.p.Nk;
    const T *k = a.K_rows + first_key * D, *v = a.V_rows + first_key * D + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
      if (row_of(i) == r) O[i] = 0.0f;
#pragma unroll 1
    for (int j = 0; j < seen_by<Shape>(a, row + 8 * r); j++, k += D, v += D) {
      float s = 0.0f;
#pragma unroll 1
      for (int d = 0; d < D; d++) s += float(q[d]) * float(k[d]);
      const float weight = exp2_fast(((a.negative ? -s : s) - m[r]) * a.scale_log2);
#pragma unroll
      for (int i = 0; i < D / 2; i++)
        if (row_of(i) == r) O[i] += weight * float(v[8 * (i / 4) + (i & 1)]);
    }
  }
}

// ---- The way out: O / l and LSE. `row` is the first of the thread's two rows. The four lanes of a row hold 8
// neighbouring columns in pieces of 4 bytes; they transpose four such groups among themselves, so that each stores 16
// bytes.
template <class Shape, class T>
__device__ __forceinline__ void store_output(float (&O)[Shape::D / 2], const float (&m)[2], const float (&l)[2],
                                             int head, int row, const Arguments<T>& a) {
  if constexpr (Shape::kCausal) leave_out_unseen<Shape>(O, m, head, row, a);
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = row_sum(l[r]), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const bool inside = row + 8 * r < a.p.Nq;
    const size_t at = size_t(head) * a.p.Nq + row + 8 * r;
    if (inside && t == 0) a.LSE[at] = sum == 0.0f ? -INFINITY : m[r] * a.scale + logf(sum);
#pragma unroll
    for (int c = 0; c < Shape::D / 2; c += 16) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = pack<T>(O[c + 4 * i + 2 * r] * inverse, O[c + 4 * i + 2 * r + 1] * inverse);
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = t & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i & bit) continue;
          const uint32_t got = __shfl_xor_sync(~0u, upper ? x[i] : x[i | bit], bit);
          (upper ? x[i] : x[i | bit]) = got;
        }
      }
      if (inside) *reinterpret_cast<uint4*>(a.O + at * Shape::D + 2 * c + 8 * t) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// ---- For the host.
// Calls run.operator()<T, kCausal>() with the problem's element type and mask.
template <class Run>
void for_type_and_mask(const Problem& p, const Run& run) {
  const auto with_mask = [&]<class T>() {
    if (p.causal) return run.template operator()<T, true>();
    run.template operator()<T, false>();
  };
  if (p.dtype == DType::fp16) return with_mask.template operator()<__half>();
  with_mask.template operator()<__nv_bfloat16>();
}

template <class Shape>
Order order_of(const Problem& p) {
  static_assert(kRegistersSuffice<Shape>);
  Order order{};
  order.p = p;
  order.q_tiles = ceil_div(p.Nq, Shape::Br);
  order.tiles = int(checked_grid_length(size_t(order.q_tiles) * p.query_heads()));
  // Heads whose keys and values L2 can hold, 33 MiB, in groups of equal size. At short lengths fewer: the first tiles
  // of a group load its keys from HBM, and should do so beside the last tiles of the group before.
  const size_t group_bytes = std::min(size_t(33) << 20, size_t(p.Nk) * (16 << 10));
  const size_t key_bytes = Shape::D * 2 * sizeof(typename Shape::T);
  const size_t head_bytes = std::max(size_t(p.Nk) * key_bytes / (p.Hq / p.Hkv), size_t(1));
  const size_t heads = p.query_heads(), most = std::clamp(group_bytes / head_bytes, size_t(1), heads);
  order.heads = int(heads), order.head_group = int(ceil_div(heads, ceil_div(heads, most)));
  return order;
}

template <class Shape>
Arguments<typename Shape::T> arguments_of(const Problem& p, const Tensors& t) {
  using T = typename Shape::T;
  Arguments<T> a{};
  static_cast<Order&>(a) = order_of<Shape>(p);
  const unsigned q_size[3] = {unsigned(Shape::D), unsigned(p.Nq), unsigned(p.query_heads())};
  const unsigned kv_size[3] = {unsigned(Shape::D), unsigned(std::max(p.Nk, 1)), unsigned(p.kv_heads())};
  a.Q = tensor_map<T>(t.Q, q_size, Shape::Br);
  a.K = tensor_map<T>(p.Nk > 0 ? t.K : t.Q, kv_size, Shape::Bc);  // without keys nothing is read, but a map needs a row
  a.V = tensor_map<T>(p.Nk > 0 ? t.V : t.Q, kv_size, Shape::Bc);
  a.Q_rows = static_cast<const T*>(t.Q), a.K_rows = static_cast<const T*>(t.K);
  a.V_rows = static_cast<const T*>(t.V), a.O = static_cast<T*>(t.O), a.LSE = static_cast<float*>(t.LSE);
  a.negative = p.scale < 0;
  // Scale 0 would make NaN of a masked −∞; the smallest number there is makes every visible score 0 just as well.
  a.scale = std::max(float(std::fabs(p.scale)), FLT_TRUE_MIN);
  a.scale_log2 = std::max(float(std::fabs(p.scale) * 1.4426950408889634), FLT_TRUE_MIN);
  return a;
}

}  // namespace
