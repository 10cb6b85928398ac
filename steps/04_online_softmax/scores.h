// The scores of both files of this chapter: those of chapter 03.
#pragma once
#include "harness/mask.h"
#include "harness/register_tiles.h"

namespace {
using namespace flash;

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kDepth = 32;  // how much of the sums a tile holds: columns of Q and K for S, keys for O

// Columns [0, kDepth) of rows [row0, row0 + kRows) of a matrix whose rows are `stride` apart; zeros past the end.
template <int kRows, bool kSlots>
__device__ void load_columns(float (&tile)[kRows][kDepth + kTilePad], const float* matrix, int row0, int rows,
                             int stride) {
  constexpr int kStep = kThreads / (kDepth / 4);  // rows that the block loads at a time
  const int first = int(threadIdx.x) / (kDepth / 4), column = int(threadIdx.x) % (kDepth / 4) * 4;
  const float* from = matrix + size_t(row0 + first) * stride + column;
#pragma unroll 4
  for (int row = first; row < kRows; row += kStep, from += kStep * stride) {
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row0 + row < rows) four = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(&tile[kSlots ? slot(row) : row][column]) = four;
  }
}

// S = scale · Q Kᵀ, −∞ where the query does not see the key: a block computes 128 x 64 of it.
struct ScoreTiles {
  static constexpr int R = 8, C = 8, Br = kWarps * 4 * R, Bc = 8 * C;
  float Q[Br][kDepth + kTilePad];
  float K[Bc][kDepth + kTilePad];
};

__global__ void __launch_bounds__(kThreads, 3) scores(Problem p, const float* Q, const float* K, float* S) {
  constexpr int R = ScoreTiles::R, C = ScoreTiles::C, Br = ScoreTiles::Br, Bc = ScoreTiles::Bc;
  ScoreTiles& tile = *dynamic_shared<ScoreTiles>();
  const WarpPlace place;
  const int query_tiles = ceil_div(p.Nq, Br), key_tiles = ceil_div(p.Nk, Bc), block = int(blockIdx.x);
  const int head = block / key_tiles / query_tiles;
  const int query0 = block / key_tiles % query_tiles * Br, key0 = block % key_tiles * Bc;
  Q += size_t(head) * p.Nq * p.D, K += size_t(head) * p.Nk * p.D, S += size_t(head) * p.Nq * p.Nk;
  const float scale = float(p.scale);

  float s[R][C] = {};
  if (key0 < keys_seen(p, min(query0 + Br, p.Nq) - 1)) {  // else no query of the tile sees a key of it
    for (int d = 0; d < p.D; d += kDepth) {
      __syncthreads();  // every warp is done with the last tiles
      load_columns<Br, false>(tile.Q, Q + d, query0, p.Nq, p.D);
      load_columns<Bc, true>(tile.K, K + d, key0, p.Nk, p.D);
      __syncthreads();  // the new ones are complete
      add_dots<R, C, kDepth>(s, tile.Q, tile.K);
    }
  }

#pragma unroll
  for (int r = 0; r < R; r++) {
    const int query = query0 + place.row<R>(r), seen = keys_seen(p, query);
    if (query >= p.Nq) break;
    float* S_row = S + size_t(query) * p.Nk;
#pragma unroll
    for (int c = 0; c < C; c++) s[r][c] = key0 + place.column(c) < seen ? scale * s[r][c] : -INFINITY;
#pragma unroll
    for (int c = 0; c < C; c += 4) {
      const int key = key0 + place.column(c);
      if (p.Nk % 4 == 0) {  // every row of S starts at a multiple of 16 bytes
        if (key < p.Nk)
          *reinterpret_cast<float4*>(S_row + key) = make_float4(s[r][c], s[r][c + 1], s[r][c + 2], s[r][c + 3]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (key + k < p.Nk) S_row[key + k] = s[r][c + k];
      }
    }
  }
}

inline void launch_scores(const Problem& p, const float* Q, const float* K, float* S, Stream stream) {
  const size_t tiles = p.query_heads() * ceil_div(p.Nq, ScoreTiles::Br) * ceil_div(p.Nk, ScoreTiles::Bc);
  launch(scores, grid_of(tiles), kThreads, sizeof(ScoreTiles), stream, p, Q, K, S);
}

}  // namespace
