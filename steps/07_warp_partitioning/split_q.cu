// 07 warp partitioning, the queries split: FlashAttention-2's way of sharing a tile among the warps of a block.
//
//     O = softmax(scale · Q Kᵀ) V    Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    fp16 or bf16    LSE [B, Hq, Nq]
//     fp32
//
// New since split_k.cu: a warp has 16 query rows to itself and meets all keys of a tile. So it knows the whole of a
// row's scores, weights and output, and the warps exchange nothing. The accumulators of S are, converted, the operand a
// of P V: weights never leave the registers. Two barriers a tile are left, for loading it.
//
// Page: docs/07_warp_partitioning.md.  Source: FlashAttention-2 (Dao 2023), sections 3.1 to 3.3.
#include "warp_tiles.h"

namespace {

constexpr int Br = 64;  // query rows of a block
constexpr int Bc = 64;  // keys of a tile
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

template <int D, class T>
struct Tiles {  // shared memory
  T Q[Br * D];
  T K[Bc * D];
  T V[Bc * D];
};

template <int D, class T, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    split_q_forward(Problem p, Dropout drop, const T* Q, const T* K, const T* V, T* O, float* LSE) {
  auto& tile = *dynamic_shared<Tiles<D, T>>();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  // The block finds its work: a head, and a tile of its queries, longest first (chapter 05).
  const int query_tiles = ceil_div(p.Nq, Br);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;
  const int kv_head = head / (p.Hq / p.Hkv);
  Q += size_t(head) * p.Nq * D, O += size_t(head) * p.Nq * D, LSE += size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  const float scale = float(p.scale);

  // What a lane carries from tile to tile, for rows g and g + 8 of the warp.
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, o[D / 8][4] = {};
  const int row = warp * 16 + g;

  start_tile<Br, D, kThreads>(tile.Q, Q, query0, p.Nq);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t q[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) load_a<D>(q[k], tile.Q, corner_by_rows<D>(), warp * 16, k);

  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    __syncthreads();  // every warp is done with the last K and V
    start_tile<Bc, D, kThreads>(tile.K, K, key0, p.Nk);
    start_tile<Bc, D, kThreads>(tile.V, V, key0, p.Nk);
    cp_async_commit();
    cp_async_wait<0>();
    const bool at_edge = kDropout || key0 + Bc > keys_seen(p, query0);  // some row leaves keys of the tile out
    const bool taken_out = __syncthreads_or(at_edge && take_out_non_finite<Bc, D, kThreads>(tile.V));
    // Every warp sees the new tiles.

    // Scores: 16 rows, all keys of the tile.
    float s[Bc / 8][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int n = 0; n < Bc / 16; n++) {
        uint32_t b[2][2];
        load_b_transposed<D>(b, tile.K, corner_by_chunks<D>(), 16 * n, k);
        mma_m16n8k16<T>(s[2 * n], q[k], b[0]);
        mma_m16n8k16<T>(s[2 * n + 1], q[k], b[1]);
      }

      // Online softmax. The four lanes that share a row agree on its maximum.
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int seen = keys_seen(p, query0 + row + 8 * r) - key0;
      float largest = m[r];
#pragma unroll
      for (int n = 0; n < Bc / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][2 * r + e];
          x = 8 * n + 2 * t + e < seen ? x * scale : -INFINITY;
          largest = fmaxf(largest, x);
        }
      largest = quad_max(largest);
      const float from = largest == -INFINITY ? 0.0f : largest;  // no key seen yet: ∞ − ∞ is not a number
      const float shrink = exp2_fast((m[r] - from) * kLog2e);
      m[r] = largest;
      l[r] *= shrink;
#pragma unroll
      for (int n = 0; n < Bc / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][2 * r + e];
          x = exp2_fast((x - from) * kLog2e);
          l[r] += x;
        }
#pragma unroll
      for (int n = 0; n < D / 8; n++) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
    }
    if constexpr (kDropout)
#pragma unroll
      for (int n = 0; n < Bc / 8; n++) drop_weights(s[n], drop, head, query0 + row, key0 + 8 * n);

        // Weighted sum of V. Two neighbouring accumulators of S hold what operand a asks of a lane.
#pragma unroll
    for (int k = 0; k < Bc / 16; k++) {
      const uint32_t a[4] = {pack<T>(s[2 * k][0], s[2 * k][1]), pack<T>(s[2 * k][2], s[2 * k][3]),
                             pack<T>(s[2 * k + 1][0], s[2 * k + 1][1]), pack<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        uint32_t b[2][2];
        load_b<D>(b, tile.V, corner_by_rows<D>(), 16 * k, n);
        mma_m16n8k16<T>(o[2 * n], a, b[0]);
        mma_m16n8k16<T>(o[2 * n + 1], a, b[1]);
      }
    }
    if (taken_out)
      add_non_finite<D>(o, V + size_t(key0) * D, min(Bc, keys - key0), [&](int half, int key) {
        const int query = query0 + row + 8 * half;
        return key0 + key < keys_seen(p, query) && (!kDropout || drop.keeps(head, query, key0 + key));
      });
  }

  // O is divided by l, once.
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int query = query0 + row + 8 * r;
    const float sum = quad_sum(l[r]);
    if (query >= p.Nq) continue;
    const float factor = sum == 0.0f ? 0.0f : drop.kept_scale / sum;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t*>(&O[size_t(query) * D + 8 * n + 2 * t]) =
          pack<T>(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
    if (t == 0) LSE[query] = sum == 0.0f ? -INFINITY : m[r] + logf(sum);
  }
}

template <int D, class T, bool kDropout>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch(split_q_forward<D, T, kDropout>, grid_of(p.query_heads() * ceil_div(p.Nq, Br)), kThreads, sizeof(Tiles<D, T>),
         stream, p, Dropout(p), static_cast<const T*>(t.Q), static_cast<const T*>(t.K), static_cast<const T*>(t.V),
         static_cast<T*>(t.O), static_cast<float*>(t.LSE));
}

template <class T>
void forward_of(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 64)
    p.dropout > 0 ? forward_with<64, T, true>(p, t, stream) : forward_with<64, T, false>(p, t, stream);
  else
    p.dropout > 0 ? forward_with<128, T, true>(p, t, stream) : forward_with<128, T, false>(p, t, stream);
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  p.dtype == DType::fp16 ? forward_of<__half>(p, t, stream) : forward_of<__nv_bfloat16>(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "a warp owns query rows; the warps exchange nothing",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 80,
                                                   .forward = forward});

}  // namespace
