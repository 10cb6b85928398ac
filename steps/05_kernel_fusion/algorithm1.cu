// 05 kernel fusion, as first published: attention in one kernel, keys outside, queries inside.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE, m, l [B, Hq, Nq]    fp32
//
// New since 04: S and P are never written. They exist a tile at a time, Br query rows by Bc keys, in registers. A row
// meets its keys tile by tile, and each tile's share is merged with what came before, as chapter 04 merges two partial
// rows. What is known of a row in between, its maximum m, its sum l and its output O so far, waits in HBM: what is
// stored grows with N, not with N².
//
// As printed, line numbers included: each tile of keys is loaded once, and all queries pass by it. So O, m and l are
// read and written once per key tile, O being kept normalised all the time.
//
// Page: docs/05_kernel_fusion.md.  Source: FlashAttention (Dao et al. 2022), Algorithm 1 (with mask, dropout: 2).
#include "harness/mask.h"
#include "harness/philox.h"
#include "tiles.h"

namespace {
using namespace flash;

constexpr int Br = 32;  // query rows of a tile
constexpr int Bc = 32;  // keys of a tile: one for each lane
constexpr int kWarps = 8;
constexpr int kRows = Br / kWarps;  // query rows of a tile that one warp owns

template <int D>
struct Tiles {  // shared memory
  float Q[Br][D];
  float K[Bc][D + 1];  // lanes read down a column: the odd row length puts them in 32 different banks
  float V[Bc][D];
  float m[Br], l[Br];
};

template <int D>
__global__ void __launch_bounds__(kWarps * 32, 2) algorithm1(Problem p, Dropout drop, const float* Q, const float* K,
                                                             const float* V, float* O, float* m, float* l, float* LSE) {
  Tiles<D>& tile = *dynamic_shared<Tiles<D>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // A block does a whole head, since all of the head's rows wait for each key tile in turn.
  const int head = blockIdx.x, kv_head = head / (p.Hq / p.Hkv);  // Hkv divides Hq, so this holds across batches
  const size_t row0 = size_t(head) * p.Nq;
  Q += row0 * D, O += row0 * D, m += row0, l += row0, LSE += row0;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  const float scale = float(p.scale);

  // Line 2: nothing is known of any row yet.
  for (size_t i = threadIdx.x; i < size_t(p.Nq) * D; i += blockDim.x) O[i] = 0.0f;
  for (int i = threadIdx.x; i < p.Nq; i += blockDim.x) m[i] = -INFINITY, l[i] = 0.0f;
  __syncthreads();  // every warp sees the initial values

  for (int key0 = 0; key0 < p.Nk; key0 += Bc) {  // line 5
    load_tile<D>(tile.K, K, key0, p.Nk);         // line 6
    load_tile<D>(tile.V, V, key0, p.Nk);

    for (int query0 = first_query(p, key0) / Br * Br; query0 < p.Nq; query0 += Br) {  // line 7: those that see it
      load_tile<D>(tile.Q, Q, query0, p.Nq);                                          // line 8
      for (int i = threadIdx.x; i < min(Br, p.Nq - query0); i += blockDim.x)
        tile.m[i] = m[query0 + i], tile.l[i] = l[query0 + i];
      __syncthreads();  // every warp sees the tiles

      for (int row = warp * kRows; row < (warp + 1) * kRows; row++) {
        const int query = query0 + row;
        if (query >= p.Nq) break;
        const int seen = keys_seen(p, query) - key0;  // keys from here on that the row sees
        if (seen <= 0) continue;                      // nothing changes for it

        // Line 9, scores: the lane is a key.
        float s = 0.0f;
#pragma unroll 4
        for (int d = 0; d < D; d++) s += tile.Q[row][d] * tile.K[lane][d];
        s = lane < seen ? s * scale : -INFINITY;

        // Line 10: the tile's own maximum, weights and sum. Where all scores are −∞, ∞ − ∞ would not be a number.
        const float m_tile = warp_max(s);
        float weight = expf(s - (m_tile == -INFINITY ? 0.0f : m_tile));
        const float l_tile = warp_sum(weight);

        // Line 11: merged with those of the tiles before. Each side's sum shrinks to the larger maximum of the two.
        const float m_old = tile.m[row], l_old = tile.l[row];
        const float m_new = fmaxf(m_old, m_tile), from = m_new == -INFINITY ? 0.0f : m_new;
        const float shrink = expf(m_old - from), shrink_tile = expf(m_tile - from);
        const float l_new = l_old * shrink + l_tile * shrink_tile;

        // Dropout takes weights out of O, not out of l.
        bool kept = lane < seen;
        if (drop.threshold > 0) {
          kept = kept && drop.keeps(head, query, key0 + lane);
          weight *= drop.kept_scale;
        }

        // Line 12, weighted sum of V: the lane is a column of O, and takes each key's weight from the lane that has
        // it. Keys without a say are left out, not added with weight 0: their V may be NaN, and 0 · NaN is NaN.
        const unsigned adds = __ballot_sync(0xffffffffu, kept);
        float o[D / 32] = {};
#pragma unroll 4
        for (int j = 0; j < Bc; j++) {
          const float w = __shfl_sync(0xffffffffu, weight, j);
          if (!(adds >> j & 1)) continue;
#pragma unroll
          for (int c = 0; c < D / 32; c++) o[c] += w * tile.V[j][c * 32 + lane];
        }
        const float inverse = l_new == 0.0f ? 0.0f : 1.0f / l_new;
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
          float& sum = O[size_t(query) * D + c * 32 + lane];
          sum = (l_old * shrink * sum + shrink_tile * o[c]) * inverse;
        }
        if (lane == 0) m[query] = m_new, l[query] = l_new;  // line 13
      }
      __syncthreads();  // every warp is done with the tiles
    }
  }

  // What a backward pass needs of m and l, in one number.
  for (int i = threadIdx.x; i < p.Nq; i += blockDim.x) LSE[i] = l[i] == 0.0f ? -INFINITY : m[i] + logf(l[i]);
}

template <int D>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch(algorithm1<D>, grid_of(p.query_heads()), kWarps * 32, sizeof(Tiles<D>), stream, p, Dropout(p),
         static_cast<const float*>(t.Q), static_cast<const float*>(t.K), static_cast<const float*>(t.V),
         static_cast<float*>(t.O), t.scratch<float>("m"), t.scratch<float>("l"), static_cast<float*>(t.LSE));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 32) return forward_with<32>(p, t, stream);
  if (p.D == 64) return forward_with<64>(p, t, stream);
  return forward_with<128>(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.query_rows() * sizeof(float);
  return {{"m", bytes}, {"l", bytes}};
}

const Registration step =
    register_step(__FILE__, {.idea = "FlashAttention-1's Algorithm 1: O, m and l revisited in HBM",
                             .rung = 1,
                             .dtypes = {DType::fp32},
                             .head_dims = {32, 64, 128},
                             .dropout = true,
                             .kv_heads = true,
                             .min_sm = 75,
                             .workspace = workspace,
                             .forward = forward});

}  // namespace
