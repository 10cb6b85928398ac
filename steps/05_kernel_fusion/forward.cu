// 05 kernel fusion, loops exchanged: queries outside, keys inside.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE [B, Hq, Nq]    fp32
//
// New since algorithm1.cu: a block keeps a tile of Br query rows and walks over the keys. What is known of a row stays
// in registers from the first key to the last, so O and LSE are written once and no workspace is left; O is divided by
// l once, at the end. Query tiles need nothing of each other: there is a block for each, not one for each head.
//
// HBM sees each query tile once, and the keys once per query tile.
//
// Page: docs/05_kernel_fusion.md.  Source: FlashAttention (Dao et al. 2022), Algorithm 1, with the loop order of
// FlashAttention-2 (Dao 2023), section 3.1.
#include "harness/mask.h"
#include "harness/philox.h"
#include "tiles.h"

namespace {
using namespace flash;

constexpr int Br = 32;  // query rows of a tile
constexpr int Bc = 32;  // keys of a tile: one for each lane
constexpr int kWarps = 8;
constexpr int kRows = Br / kWarps;  // query rows that one warp owns

template <int D>
struct Tiles {  // shared memory
  float Q[Br][D];
  float K[Bc][D + 1];  // lanes read down a column: the odd row length puts them in 32 different banks
  float V[Bc][D];
};

template <int D>
__global__ void __launch_bounds__(kWarps * 32, 2)
    fused_forward(Problem p, Dropout drop, const float* Q, const float* K, const float* V, float* O, float* LSE) {
  Tiles<D>& tile = *dynamic_shared<Tiles<D>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // The block finds its work: a head, and a tile of its queries. With a causal mask the last queries see most keys;
  // they go first, so that no long block starts when the others are done.
  const int query_tiles = ceil_div(p.Nq, Br);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;
  const int kv_head = head / (p.Hq / p.Hkv);  // Hkv divides Hq, so this holds across batches
  Q += size_t(head) * p.Nq * D, O += size_t(head) * p.Nq * D, LSE += size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  const float scale = float(p.scale);

  // What a warp carries from tile to tile: for each of its rows the maximum and the sum so far (the same in every lane)
  // and the output, not yet divided by the sum (D / 32 columns in each lane).
  float m[kRows], l[kRows], o[kRows][D / 32];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    m[r] = -INFINITY, l[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 32; c++) o[r][c] = 0.0f;
  }
  load_tile<D>(tile.Q, Q, query0, p.Nq);

  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    __syncthreads();  // every warp is done with the last K and V
    load_tile<D>(tile.K, K, key0, p.Nk);
    load_tile<D>(tile.V, V, key0, p.Nk);
    __syncthreads();  // every warp sees the new ones

#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = warp * kRows + r, query = query0 + row;
      if (query >= p.Nq) break;
      const int seen = keys_seen(p, query) - key0;  // keys from here on that the row sees

      // Scores: the lane is a key.
      float s = 0.0f;
#pragma unroll 4
      for (int d = 0; d < D; d++) s += tile.Q[row][d] * tile.K[lane][d];
      s = lane < seen ? s * scale : -INFINITY;

      // Online softmax: what was summed under the old maximum shrinks by exp(m_old − m_new).
      const float m_new = fmaxf(m[r], warp_max(s));
      const float from = m_new == -INFINITY ? 0.0f : m_new;  // no key seen yet: ∞ − ∞ is not a number
      const float shrink = expf(m[r] - from);
      float weight = expf(s - from);
      l[r] = l[r] * shrink + warp_sum(weight);
      m[r] = m_new;

      // Dropout takes weights out of O, not out of l.
      bool kept = lane < seen;
      if (drop.threshold > 0) {
        kept = kept && drop.keeps(head, query, key0 + lane);
        weight *= drop.kept_scale;
      }

      // Weighted sum of V: the lane is a column of O, and takes each key's weight from the lane that has it. Keys
      // without a say are left out, not added with weight 0: their V may be NaN, and 0 · NaN is NaN.
      const unsigned adds = __ballot_sync(0xffffffffu, kept);
#pragma unroll
      for (int c = 0; c < D / 32; c++) o[r][c] *= shrink;
#pragma unroll 4
      for (int j = 0; j < Bc; j++) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
        if (!(adds >> j & 1)) continue;
#pragma unroll
        for (int c = 0; c < D / 32; c++) o[r][c] += w * tile.V[j][c * 32 + lane];
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int query = query0 + warp * kRows + r;
    if (query >= p.Nq) break;
    const float inverse = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
#pragma unroll
    for (int c = 0; c < D / 32; c++) O[size_t(query) * D + c * 32 + lane] = o[r][c] * inverse;
    if (lane == 0) LSE[query] = l[r] == 0.0f ? -INFINITY : m[r] + logf(l[r]);
  }
}

template <int D>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch(fused_forward<D>, grid_of(p.query_heads() * ceil_div(p.Nq, Br)), kWarps * 32, sizeof(Tiles<D>), stream, p,
         Dropout(p), static_cast<const float*>(t.Q), static_cast<const float*>(t.K), static_cast<const float*>(t.V),
         static_cast<float*>(t.O), static_cast<float*>(t.LSE));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 32) return forward_with<32>(p, t, stream);
  if (p.D == 64) return forward_with<64>(p, t, stream);
  return forward_with<128>(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "one kernel: O, m and l in registers, S and P never in HBM",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 75,
                                                   .forward = forward});

}  // namespace
