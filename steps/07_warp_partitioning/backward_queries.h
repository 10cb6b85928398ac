// What backward.cu does in deterministic mode for dQ: a block keeps queries and walks over the keys that they see, as
// the forward pass does. The rows of its products are queries, so that S and dP come out as they are written, and dS is
// in the registers where dQ = dS K wants it. S and dP are computed here a second time.
#pragma once
#include "backward_tiles.h"
#include "harness/mask.h"

namespace {

constexpr float kLog2e = 1.4426950408889634f;

// Rows of a head in the workspace: whole tiles of queries, so that no kernel asks where the last one ends.
constexpr int kQueryTile = 64;
__host__ __device__ constexpr int padded(int Nq) { return ceil_div(Nq, kQueryTile) * kQueryTile; }

// What the kernels read and write. LSE2 and row_dot are workspace, [B·Hq, padded(Nq)]; dQ_sum has D columns as well.
template <class T>
struct Arrays {
  const T *Q, *K, *V, *O, *dO;
  const float* LSE;
  T *dQ, *dK, *dV;
  float *LSE2, *row_dot;  // LSE · log₂e, +∞ where a row has no weights; D
  float* dQ_sum;          // in 16×8 blocks, as they lie in a warp: [row / 16][column / 8][element][lane]
  float scale, scale2;    // scale2 = scale · log₂e
};

// The tiles of a block that keeps queries and walks over keys.
template <class T_, int D_, int kWarps_, int Bc_, int kBlocks_>
struct QueryShape {
  using T = T_;
  static constexpr int D = D_, kWarps = kWarps_, kWarpQueries = 32, Bc = Bc_;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlocks_, Br = kWarps * kWarpQueries;

  struct Tiles {
    T Q[Br * D], dO[Br * D], K[2 * Bc * D], V[2 * Bc * D];
    float LSE2[Br], row_dot[Br];
  };
};

// dQ by the owner of each query, who walks over the keys that it sees: S, dP, and no atomics.
template <class S, bool kDropout>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    queries_gradient(Problem p, Dropout drop, Arrays<typename S::T> a) {
  constexpr int D = S::D, Bc = S::Bc, Br = S::Br, kM = S::kWarpQueries / 16;
  constexpr int kChunk = kDropout ? 16 : 32, kN = kChunk / 8;  // keys that a warp works on at a time
  auto& tile = *dynamic_shared<typename S::Tiles>();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int query_tiles = ceil_div(p.Nq, Br), head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;  // those that see most keys first
  const int own_row = warp * S::kWarpQueries, own_query = query0 + own_row;
  const int kv_head = head / (p.Hq / p.Hkv);
  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these

  const auto fetch = [&](int stage, int key0) {
    if (key0 < keys) {
      copy_rows<D, Bc, S::kThreads>(tile.K + stage * Bc * D, a.K + size_t(kv_head) * p.Nk * D, key0, p.Nk);
      copy_rows<D, Bc, S::kThreads>(tile.V + stage * Bc * D, a.V + size_t(kv_head) * p.Nk * D, key0, p.Nk);
    }
    cp_async_commit();
  };
  copy_rows<D, Br, S::kThreads>(tile.Q, a.Q + size_t(head) * p.Nq * D, query0, p.Nq);
  copy_rows<D, Br, S::kThreads>(tile.dO, a.dO + size_t(head) * p.Nq * D, query0, p.Nq);
  fetch(0, 0);
  fetch(1, Bc);
  for (int i = int(threadIdx.x); i < Br; i += S::kThreads) {
    const size_t at = size_t(head) * padded(p.Nq) + query0 + i;
    tile.LSE2[i] = query0 + i < p.Nq ? a.LSE2[at] : INFINITY;
    tile.row_dot[i] = query0 + i < p.Nq ? a.row_dot[at] : 0.0f;
  }
  cp_async_wait<1>();
  __syncthreads();

  float dq[kM][D / 8][4] = {};
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    const int stage = key0 / Bc % 2;
#pragma unroll
    for (int c = 0; c < Bc; c += kChunk) {
      if (keys_seen(p, own_query + S::kWarpQueries - 1) <= key0 + c) break;
      float s[kM][kN][4], dp[kM][kN][4];
      dot_rows<D>(s, tile.Q, own_row, tile.K, stage * Bc + c);
      dot_rows<D>(dp, tile.dO, own_row, tile.V, stage * Bc + c);
#pragma unroll
      for (int m = 0; m < kM; m++) {
        const int at = own_row + 16 * m + g;
        const float lse[2] = {tile.LSE2[at], tile.LSE2[at + 8]}, dot[2] = {tile.row_dot[at], tile.row_dot[at + 8]};
#pragma unroll
        for (int n = 0; n < kN; n++) {
          const unsigned kept = kDropout ? kept_queries_down(drop, head, own_query + 16 * m, key0 + c + 8 * n) : 15;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float P = exp2_fast(fmaf(s[m][n][i], a.scale2, -lse[i / 2]));
            const float grown = kDropout ? (kept >> i & 1 ? dp[m][n][i] * drop.kept_scale : 0.0f) : dp[m][n][i];
            dp[m][n][i] = P * (grown - dot[i / 2]);
          }
        }
      }
      if (keys_seen(p, own_query) < key0 + c + kChunk || own_query + S::kWarpQueries > p.Nq) {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int query = own_query + 16 * m + g + i / 2 * 8, key = key0 + c + 2 * t + i % 2;
            const int seen = query < p.Nq ? keys_seen(p, query) - key : 0;
#pragma unroll
            for (int n = 0; n < kN; n++)
              if (8 * n >= seen) dp[m][n][i] = 0.0f;
          }
      }
#pragma unroll
      for (int k = 0; k < kN / 2; k++) {
        uint32_t ds[kM][4];
        pack_operand<typename S::T>(ds, dp, k);
        add_rows<D>(dq, ds, tile.K, stage * Bc + c + 16 * k);
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // the next tile is there, and nobody needs this one any more
    fetch(stage, key0 + 2 * Bc);
  }
  store_rows<D>(dq, a.scale, tile.Q, own_row, a.dQ + size_t(head) * p.Nq * D, own_query, p.Nq);
}

}  // namespace
