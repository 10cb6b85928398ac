// 03 tiling, in shared memory: the two matrix products by tiles of 32 x 32.
//
//     scores   S = scale · Q Kᵀ, −∞ where the query does not see the key       Q, O [B, H, Nq, D]    K, V [B, H, Nk, D]
//     softmax  P = softmax(S), LSE                                             S, P [B, H, Nq, Nk]   fp32
//     weighted sum  O = P V
//
// New since 02: threads work together. A block of 32 x 32 threads computes a tile of the product; it brings the tiles
// that it needs into shared memory, where each number is fetched once for a block and used by 32 of its threads. The
// mask is applied where S is written, which saves its kernel.
//
// Page: docs/03_tiling.md.
#include "softmax.h"

namespace {

constexpr int kTile = 32;  // rows and columns of a tile; a warp is a row of the block: 32 threads with the same y

// Where a block's tile lies in a [heads, rows, cols] tensor.
struct TilePlace {
  int head, row0, col0;
  __device__ TilePlace(int rows, int cols) {
    const int down = ceil_div(rows, kTile), across = ceil_div(cols, kTile), block = int(blockIdx.x);
    head = block / across / down, row0 = block / across % down * kTile, col0 = block % across * kTile;
  }
};

// S[head, query, key]: a dot product of one row of Q and one row of K, 32 columns of them at a time.
__global__ void __launch_bounds__(kTile* kTile) scores(Problem p, const float* Q, const float* K, float* S) {
  __shared__ float Q_tile[kTile][kTile];
  __shared__ float K_tile[kTile][kTile + 1];  // read down a column: the odd row length puts that in 32 different banks
  const TilePlace tile(p.Nq, p.Nk);
  const int x = int(threadIdx.x), y = int(threadIdx.y);
  Q += size_t(tile.head) * p.Nq * p.D, K += size_t(tile.head) * p.Nk * p.D;
  S += size_t(tile.head) * p.Nq * p.Nk;

  const int last_query = min(tile.row0 + kTile, p.Nq) - 1;
  float dot = 0.0f;
  if (tile.col0 < keys_seen(p, last_query)) {  // else no query of the tile sees a key of it
    for (int d0 = 0; d0 < p.D; d0 += kTile) {
      // Load: neighbouring threads read neighbouring numbers. What lies past the end counts as zero.
      Q_tile[y][x] = tile.row0 + y < p.Nq ? Q[size_t(tile.row0 + y) * p.D + d0 + x] : 0.0f;
      K_tile[y][x] = tile.col0 + y < p.Nk ? K[size_t(tile.col0 + y) * p.D + d0 + x] : 0.0f;
      __syncthreads();  // the tiles are complete

      // Multiply.
      for (int d = 0; d < kTile; d++) {
        const float q = Q_tile[y][d];  // one number for the whole warp
        dot += q * K_tile[x][d];       // a column of K
      }
      __syncthreads();  // every warp is done with them
    }
  }

  const int query = tile.row0 + y, key = tile.col0 + x;
  if (query < p.Nq && key < p.Nk)
    S[size_t(query) * p.Nk + key] = key < keys_seen(p, query) ? float(p.scale) * dot : -INFINITY;
}

// O[head, query, column]: one row of P times one column of V, 32 keys at a time.
__global__ void __launch_bounds__(kTile* kTile) weighted_sum(Problem p, const float* P, const float* V, float* O) {
  __shared__ float P_tile[kTile][kTile];
  __shared__ float V_tile[kTile][kTile];
  const TilePlace tile(p.Nq, p.D);
  const int x = int(threadIdx.x), y = int(threadIdx.y);
  P += size_t(tile.head) * p.Nq * p.Nk, V += size_t(tile.head) * p.Nk * p.D;
  O += size_t(tile.head) * p.Nq * p.D;

  const int query = tile.row0 + y, column = tile.col0 + x;
  const int keys = keys_seen(p, min(tile.row0 + kTile, p.Nq) - 1);  // no query of the tile sees a key past these
  const int seen = min(keys_seen(p, query), keys);
  float sum = 0.0f;
  for (int key0 = 0; key0 < keys; key0 += kTile) {
    // Load.
    P_tile[y][x] = query < p.Nq && key0 + x < p.Nk ? P[size_t(query) * p.Nk + key0 + x] : 0.0f;
    V_tile[y][x] = key0 + y < p.Nk ? V[size_t(key0 + y) * p.D + column] : 0.0f;
    __syncthreads();

    // Multiply: a warp reads one number of P and a row of V. It stops at the last key that its query sees: a NaN in V
    // must not reach a query that does not see it, and 0 · NaN = NaN.
    const int end = min(seen - key0, kTile);
    for (int j = 0; j < end; j++) sum += P_tile[y][j] * V_tile[j][x];
    __syncthreads();
  }
  if (query < p.Nq) O[size_t(query) * p.D + column] = sum;
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto* V = static_cast<const float*>(t.V);
  float *S = t.scratch<float>("S"), *P = t.scratch<float>("P");
  const dim3 block(kTile, kTile);
  const size_t row_tiles = p.query_heads() * ceil_div(p.Nq, kTile);

  launch(scores, grid_of(row_tiles * ceil_div(p.Nk, kTile)), block, 0, stream, p, Q, K, S);
  launch_softmax(p, S, P, static_cast<float*>(t.LSE), stream);
  launch(weighted_sum, grid_of(row_tiles * (p.D / kTile)), block, 0, stream, p, P, V, static_cast<float*>(t.O));
}

const Registration step = register_step(__FILE__, {.idea = "matrix products by tiles in shared memory",
                                                   .rung = 1,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .forward = forward});

}  // namespace
