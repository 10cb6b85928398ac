// What fp8.cu does with a tile: overlapped.cu's products, softmax and way out, in e4m3.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include "fp8_quantise.h"
#include "hopper_tile.h"

namespace {

// Two choices more: whether warpgroups take turns, and whether exponentials use the maximum of the tiles before.
template <int D_, int kConsumers_, int Bc_, int kStages_, bool kCausal_, bool kTurns_, bool kAhead_>
struct Fp8Shape : Shape<__nv_fp8_e4m3, D_, kConsumers_, Bc_, kStages_, kCausal_> {
  static constexpr bool kTurns = kTurns_, kAhead = kAhead_;
  static constexpr int kRow = D_ < 128 ? D_ : 128;    // bytes of a row of Q and K in shared memory, …
  static constexpr int kKeys = Bc_ <= 64 ? 64 : 128;  // … and of Vᵀ, of which only Bc are used
  static constexpr int kQScales = (64 * kConsumers_ - 1) / Bc_ + 1 + (64 * kConsumers_ % Bc_ != 0);  // of Br rows
};

// With D 256 the consumers' O, S and P take 208 registers.
template <bool kCausal, bool kTurns>
constexpr int kProducerRegisters<Fp8Shape<256, 2, 128, 2, kCausal, kTurns, false>> = 24;
template <bool kCausal, bool kTurns>
constexpr int kConsumerRegisters<Fp8Shape<256, 2, 128, 2, kCausal, kTurns, false>> = 240;

struct Fp8Arguments : Order {
  TensorMap Q, K, V;      // e4m3: [heads][rows][D], V [heads][D][pitch]
  const uint8_t* K_rows;  // the same for plain loads
  const float *q_scale, *largest_v_scale;
  const uint32_t* kv_scales;                // of tiles of Bc keys
  const void *given_Q, *given_K, *given_V;  // [heads][rows][D], fp32 or bf16
  __nv_bfloat16* O;
  float* LSE;
  float scale_log2;  // |scale| · log2(e), over D if Q and K are rotated
};

// The scales of a tile of K and of V: upper and lower half of a word, as bf16.
__device__ __forceinline__ float k_scale_of(uint32_t scales) { return __uint_as_float(scales & 0xffff0000u); }
// Only ratios between V's scales matter. Those far below the head's largest are taken as 2^-40 of it, so that fp32 has
// room for P with and without them.
__device__ __forceinline__ float v_scale_of(uint32_t scales, float largest) {
  return fmaxf(__uint_as_float(scales << 16), largest * 0x1p-40f);
}

// ---- The two products, started. 32 columns further in a panel are 32 bytes, 2 in a descriptor.
template <class Shape>
__device__ __forceinline__ void start_fp8_scores(float (&S)[Shape::Bc / 2], uint64_t q, uint64_t k) {  // S = Q Kᵀ
  using T = typename Shape::T;
  constexpr int kRow = Shape::kRow, kSteps = kRow / 32;
  wgmma_fence();
#pragma unroll
  for (int d = 0; d < Shape::D / 32; d++) {
    const uint64_t q_d = q + d / kSteps * (Shape::Br * kRow >> 4) + d % kSteps * 2;
    const uint64_t k_d = k + d / kSteps * (Shape::Bc * kRow >> 4) + d % kSteps * 2;
    if (d == 0)
      wgmma<Shape::Bc, T, Major::K, Major::K, false>(S, q_d, k_d);
    else
      wgmma<Shape::Bc, T, Major::K, Major::K, true>(S, q_d, k_d);
  }
  wgmma_commit();
}
template <class Shape>
__device__ __forceinline__ void start_fp8_weighted_sum(float (&O)[Shape::D / 2], const uint32_t (&P)[Shape::Bc / 8],
                                                       uint64_t v) {  // O += P V
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < Shape::Bc / 32; j++) wgmma<Shape::D, typename Shape::T, Major::K, true>(O, P + 4 * j, v + j * 2);
  wgmma_commit();
}

// P as the operand of the second product, whose keys are in the order that V has them in (fp8_quantise_columns.h): of
// 16 keys a thread brings the four that it has.
template <int n>
__device__ __forceinline__ void pack_fp8_weights(uint32_t (&P)[n / 4], const float (&S)[n]) {
  // 32 keys are 16 of S and 4 of P: two rows of the first 16 keys, then of the others.
#pragma unroll
  for (int i = 0; i < n / 4; i++) {
    const int x = i / 4 * 16 + i % 4 / 2 * 8 + i % 2 * 2;
    P[i] = pack_e4m3(S[x], S[x + 1], S[x + 4], S[x + 5]);
  }
}

// ---- The softmax of a tile. With c the factor of the tile's scores and b the log2 of its V's scale,
//
//     P = 2^(s·c + b − M + kShift)      M: the maximum of s·c + b of the row so far, or up to kGrow less
//
// so that O = Σ P V needs no scale for each tile, and P is at most 2^8, of the 448 that e4m3 has. Most tiles of V have
// the scale of the tile before, and then b costs nothing: m is M − b, and l is Σ P · 2^-b without the factor of this b.
constexpr float kGrow = 4.0f;
constexpr float kShift = 8.0f - kGrow;
constexpr float kTooLarge = 60.0f;  // by how much a score may exceed m if P, in fp32, is to be scaled down

// V's scale changes, both powers of two.
__device__ __forceinline__ void change_v_scale(float (&m)[2], float (&l)[2], float from, float to) {
  const float grows = float((__float_as_int(to) - __float_as_int(from)) >> 23);
#pragma unroll
  for (int r = 0; r < 2; r++) m[r] -= grows, l[r] *= exp2_fast(grows);
}

// The ordinary one: of this tile's own maximum. A thread accepts up to `limit` more than m, kGrow, or −∞ if one of its
// rows is steep or has no maximum yet. Returns whether O must be rescaled by alpha.
template <int n>
__device__ __forceinline__ bool fp8_softmax(float (&S)[n], float (&m)[2], float (&l)[2], float (&alpha)[2], float limit,
                                            float scale) {
  float x[2], shift[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x0 = S[2 * r], x1 = S[2 * r + 1];
#pragma unroll
    for (int i = 4; i < n; i += 4) x0 = fmaxf(x0, S[i + 2 * r]), x1 = fmaxf(x1, S[i + 2 * r + 1]);
    x[r] = row_max(fmaxf(x0, x1));
    shift[r] = m[r] - kShift;
  }
  const float grew = fmaxf(fmaf(x[0], scale, -m[0]), fmaf(x[1], scale, -m[1]));
  const bool changed = __any_sync(~0u, grew > limit || limit < kGrow);
  if (changed) {
    float from[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float old = m[r], most = x[r] * scale;
      if (most - old > kGrow) m[r] = most;
      from[r] = m[r] == -INFINITY ? 0.0f : m[r];  // no key seen yet: ∞ − ∞ is not a number
      shift[r] = from[r] - kShift;
      alpha[r] = exp2_fast(old - from[r]);
      l[r] *= alpha[r];
    }
    if (fmaxf(fabsf(from[0]), fabsf(from[1])) > kSteep) {  // the difference first: hopper_tile.h
#pragma unroll
      for (int r = 0; r < 2; r++) {
        shift[r] = from[r] - x[r] * scale - kShift;
        x[r] = x[r] == -INFINITY ? 0.0f : x[r];
      }
#pragma unroll
      for (int i = 0; i < n; i++) S[i] -= x[row_of(i)];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < n; i += 4) {
      S[i] = exp2_fast(fmaf(S[i], scale, -shift[r])), S[i + 1] = exp2_fast(fmaf(S[i + 1], scale, -shift[r]));
      sum0 += S[i], sum1 += S[i + 1];
    }
    l[r] += sum0 + sum1;
  }
  return changed;
}

// The one of overlapped.cu, with the maximum of the tiles before.
template <int n, class Recompute>
__device__ __forceinline__ bool fp8_softmax_ahead(float (&S)[n], float (&m)[2], float (&l)[2], float (&alpha)[2],
                                                  float limit, float scale, const Recompute& recompute) {
  float x[4], sum[4] = {};  // maximum and sum of even and odd columns of row g, of row g + 8
  const float shift[2] = {m[0] - kShift, m[1] - kShift};
#pragma unroll
  for (int i = 0; i < n; i++) {
    x[i & 3] = i < 4 ? S[i] : fmaxf(x[i & 3], S[i]);
    S[i] = exp2_fast(fmaf(S[i], scale, -shift[row_of(i)]));
    sum[i & 3] += S[i];
  }
  const float grew = fmaxf(fmaf(fmaxf(x[0], x[1]), scale, -m[0]), fmaf(fmaxf(x[2], x[3]), scale, -m[1]));
  if (!__any_sync(~0u, grew > limit)) {
    l[0] += sum[0] + sum[1], l[1] += sum[2] + sum[3];
    return false;
  }
  if (__any_sync(~0u, grew > kTooLarge || limit < kGrow)) {
    recompute();
    return fp8_softmax(S, m, l, alpha, -INFINITY, scale);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float old = m[r];
    m[r] = fmaxf(old, row_max(fmaxf(x[2 * r], x[2 * r + 1])) * scale);
    alpha[r] = exp2_fast(old - m[r]);
    l[r] = (l[r] + (sum[2 * r] + sum[2 * r + 1])) * alpha[r];
  }
  rescale(S, alpha);
  return true;
}

// S once more, when K's stage in the ring has been given back already: dot products of the thread's two rows of Q, in
// shared memory, and its columns of the tile of K, in global memory. Slow, and next to never needed.
template <class Shape>
__device__ __forceinline__ void fp8_scores_by_hand(float (&S)[Shape::Bc / 2],
                                                   const uint8_t (&Q)[Shape::D / Shape::kRow][Shape::Br][Shape::kRow],
                                                   int row, const uint8_t* K) {
  constexpr int kRow = Shape::kRow;
  const auto value = [](uint8_t bits) {
    __nv_fp8_e4m3 x;
    x.__x = bits;
    return float(x);
  };
  K += threadIdx.x % 4 * 2 * Shape::D;
#pragma unroll
  for (int i = 0; i < Shape::Bc / 2; i++) S[i] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < Shape::D; d++) {
    const int swizzle = kRow == 128 ? row % 8 : row / 2 % 4;  // the same for row + 8
    const int at = (d % kRow / 16 ^ swizzle) * 16 + d % 16;
    const float q[2] = {value(Q[d / kRow][row][at]), value(Q[d / kRow][row + 8][at])};
#pragma unroll
    for (int i = 0; i < Shape::Bc / 2; i++) S[i] += q[row_of(i)] * value(K[(8 * (i / 4) + (i & 1)) * Shape::D + d]);
  }
}

// ---- The way out. A row that is not finite is computed again, by hand, over the keys that it sees, from the numbers
// that were given: a NaN may come from a key that it does not see (0 · NaN), or stand for an ∞. Each of the row's four
// lanes writes a quarter of its columns. Slow, so short.
template <class Shape>
__device__ __forceinline__ void store_row_by_hand(int head, int row, const Fp8Arguments& a) {
  constexpr int D = Shape::D;
  const auto number = [&](const void* tensor, size_t i) {
    return a.p.quantisation.from == DType::fp32 ? static_cast<const float*>(tensor)[i]
                                                : float(static_cast<const __nv_bfloat16*>(tensor)[i]);
  };
  const size_t at = size_t(head) * a.p.Nq + row, first_key = size_t(head / (a.p.Hq / a.p.Hkv)) * a.p.Nk;
  const int seen = seen_by<Shape>(a, row), t = threadIdx.x % 4;
  float most = -INFINITY;
#pragma unroll 1
  for (int column = t * (D / 4) - 1; column < (t + 1) * (D / 4);
       column++) {  // at first the maximum, then a column each
    const bool first = column < t * (D / 4);
    if (!first && most == -INFINITY) most = 0.0f;
    float sum = 0.0f, O = 0.0f;
#pragma unroll 1
    for (int j = 0; j < seen; j++) {
      float s = 0.0f;
#pragma unroll 1
      for (int d = 0; d < D; d++) s += number(a.given_Q, at * D + d) * number(a.given_K, (first_key + j) * D + d);
      s *= float(a.p.scale);
      if (first) {
        most = fmaxf(most, s);
      } else {
        const float weight = exp2_fast((s - most) * 1.44269504f);
        sum += weight, O += weight * number(a.given_V, (first_key + j) * D + column);
      }
    }
    if (first) continue;
    a.O[at * D + column] = __nv_bfloat16(sum == 0.0f ? 0.0f : O / sum);
    if (column == 0) a.LSE[at] = sum == 0.0f ? -INFINITY : most + logf(sum);
  }
}

// O / l · V's scale and LSE, 16 bytes a thread: store_output of hopper_tile.h says how.
template <class Shape>
__device__ __forceinline__ void store_fp8_output(const float (&O)[Shape::D / 2], const float (&m)[2],
                                                 const float (&l)[2], float v_scale, int head, int row,
                                                 const Fp8Arguments& a) {
  constexpr int D = Shape::D;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = row_sum(l[r]);
    const float factor = sum == 0.0f ? 0.0f : v_scale / sum;
    float zero = sum * 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; i++)
      if (row_of(i) == r) zero = fmaf(O[i], 0.0f, zero);
    const bool finite = row_sum(zero) == 0.0f, inside = row + 8 * r < a.p.Nq;
    const size_t at = size_t(head) * a.p.Nq + row + 8 * r;
    if (inside && finite && t == 0) a.LSE[at] = sum == 0.0f ? -INFINITY : (m[r] - kShift) * 0.693147181f + logf(sum);
#pragma unroll
    for (int c = 0; c < D / 2; c += 16) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        x[i] = pack<__nv_bfloat16>(O[c + 4 * i + 2 * r] * factor, O[c + 4 * i + 2 * r + 1] * factor);
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
      if (inside && finite)
        *reinterpret_cast<uint4*>(a.O + at * D + 2 * c + 8 * t) = make_uint4(x[0], x[1], x[2], x[3]);
    }
    if (inside && !finite) store_row_by_hand<Shape>(head, row + 8 * r, a);
  }
}

}  // namespace
