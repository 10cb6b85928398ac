// 06 recomputation, backward: FlashAttention's gradient, from O and LSE instead of stored matrices.
//
//     P = exp(scale · Q Kᵀ − LSE)      D = rowsum(dO ∘ O)      dP = M ∘ (dO Vᵀ) / (1 − p)      dS = P ∘ (dP − D)
//     dV = (M ∘ P / (1 − p))ᵀ dO       dK = scale · dSᵀ Q      dQ = scale · dS K
//
//     Q, O, dO, dQ [B, Hq, Nq, D]   K, V, dK, dV [B, Hkv, Nk, D]   LSE, D [B, Hq, Nq]   fp32; M: what dropout kept
//
// New since the backward pass of chapter 02: nothing of size N² is read or written. Each tile of P is computed anew in
// registers, in one step, since LSE holds a row's maximum and sum; M is drawn anew from the seed; and the sum over a
// row of P ∘ dP, for which no thread sees enough of the row, is the row's D, which follows from O and dO.
//
// dK and dV are sums over queries, dQ is one over keys. Whoever owns a sum walks over its terms alone and in order, in
// a kernel for the keys and one for the queries: no atomics, and the same bits from run to run. P and dP are computed
// in both. (The paper's one kernel computes them once, and reads and writes dQ in HBM for each tile of keys.)
//
// Page: docs/06_recompute_backward.md.  Source: FlashAttention (Dao et al. 2022), Algorithm 4.
#include "harness/mask.h"
#include "harness/philox.h"

namespace {
using namespace flash;

constexpr int kWarps = 8;
constexpr int kWalked = 32;  // rows of a tile that a block walks over: one for each lane

// Shared memory. A block owns rows of one side (keys, or queries) and walks over tiles of the other; an `inner` tile
// meets its like in S, an `outer` one in dP. A warp owns kRows rows, fewer where a T4's 64 KB would not do. Lanes read
// down a column of what is walked over: the odd row length puts them in 32 different banks.
template <int D>
struct Tiles {
  static constexpr int kRows = D <= 64 ? 4 : 2;
  static constexpr int kOwned = kWarps * kRows;

  float own_inner[kOwned][D], own_outer[kOwned][D];              // K and V, or Q and dO
  float walk_inner[kWalked][D + 1], walk_outer[kWalked][D + 1];  // Q and dO, or K and V
  float LSE[kWalked], row_dot[kWalked];                          // of the tile's queries, on whichever side they are
};

// Copies rows [row0, row0 + kRows) of a row-major [rows, D] matrix into shared memory, neighbouring threads
// neighbouring columns; rows past the end become zeros.
template <int D, int kRows, int kStride>
__device__ void load_tile(float (&tile)[kRows][kStride], const float* matrix, int row0, int rows) {
  for (int i = threadIdx.x; i < kRows * D; i += blockDim.x) {
    const int row = row0 + i / D, column = i % D;
    tile[i / D][column] = row < rows ? matrix[size_t(row) * D + column] : 0.0f;
  }
}

// D = rowsum(dO ∘ O), as row_dot: a warp a row. It is the sum over the row of P ∘ dP, since O = (M ∘ P / (1 − p)) V.
template <int D>
__global__ void row_dots(size_t rows, const float* O, const float* dO, float* row_dot) {
  const size_t row = size_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum += dO[row * D + d] * O[row * D + d];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) row_dot[row] = sum;
}

// Of the row of one side in the warp and the row of the other in the lane: the two products, before scale and softmax.
struct Dots {
  float s, dp;
};
template <int D>
__device__ Dots dots(const Tiles<D>& tile, int row, int lane) {
  Dots sum = {0.0f, 0.0f};
#pragma unroll 4
  for (int d = 0; d < D; d++) {
    sum.s += tile.own_inner[row][d] * tile.walk_inner[lane][d];
    sum.dp += tile.own_outer[row][d] * tile.walk_outer[lane][d];
  }
  return sum;
}

// One element of P, as dV sees it after dropout (if kept), and of dS. Means nothing where the key is not seen.
struct Element {
  float P_dropped, dS;
};
__device__ Element recompute(const Dots& dot, float scale, float LSE, float row_dot, bool kept, float kept_scale) {
  const float P = expf(dot.s * scale - LSE);
  const float dP = kept ? dot.dp * kept_scale : 0.0f;
  return {P * kept_scale, P * (dP - row_dot)};
}

// sum[c] += Σ_j weight j · tile[j][column c], where lane j has weight j and the lane is a column of the sum. Terms that
// `adds` has no bit for are left out, not added with weight 0: their row may be NaN, and 0 · NaN is NaN.
template <int D>
__device__ void add_rows(float (&sum)[D / 32], float weight, unsigned adds, const float (&tile)[kWalked][D + 1]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int j = 0; j < kWalked; j++) {
    const float w = __shfl_sync(0xffffffffu, weight, j);
    if (!(adds >> j & 1)) continue;
#pragma unroll
    for (int c = 0; c < D / 32; c++) sum[c] += w * tile[j][c * 32 + lane];
  }
}

// dK and dV: a block owns a tile of keys and walks over the queries that see them, in each query head of its group.
template <int D>
__global__ void __launch_bounds__(kWarps * 32, 2)
    keys_gradient(Problem p, Dropout drop, const float* Q, const float* K, const float* V, const float* dO,
                  const float* LSE, const float* row_dot, float* dK, float* dV) {
  constexpr int kRows = Tiles<D>::kRows, Bc = Tiles<D>::kOwned, Br = kWalked;
  Tiles<D>& tile = *dynamic_shared<Tiles<D>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_tiles = ceil_div(p.Nk, Bc), group = p.Hq / p.Hkv;
  const int kv_head = int(blockIdx.x) / key_tiles, key0 = int(blockIdx.x) % key_tiles * Bc;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  load_tile<D>(tile.own_inner, K, key0, p.Nk);
  load_tile<D>(tile.own_outer, V, key0, p.Nk);

  float dk[kRows][D / 32] = {}, dv[kRows][D / 32] = {};  // D / 32 columns in each lane
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const size_t row0 = size_t(head) * p.Nq;
    for (int query0 = first_query(p, key0) / Br * Br; query0 < p.Nq; query0 += Br) {
      __syncthreads();  // every warp is done with the last queries
      load_tile<D>(tile.walk_inner, Q + row0 * D, query0, p.Nq);
      load_tile<D>(tile.walk_outer, dO + row0 * D, query0, p.Nq);
      for (int i = threadIdx.x; i < min(Br, p.Nq - query0); i += blockDim.x)
        tile.LSE[i] = LSE[row0 + query0 + i], tile.row_dot[i] = row_dot[row0 + query0 + i];
      __syncthreads();  // every warp sees the new ones

      // The warp's row is a key, the lane a query.
      const int query = query0 + lane;
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int row = warp * kRows + r, key = key0 + row;
        if (key >= p.Nk) break;
        const Dots dot = dots<D>(tile, row, lane);

        // A query with LSE = −∞ sees nothing that counts, and −∞ − (−∞) is not a number.
        const bool seen = query < p.Nq && key < keys_seen(p, query) && tile.LSE[lane] != -INFINITY;
        const bool kept = seen && (drop.threshold == 0 || drop.keeps(head, query, key));
        Element e = {0.0f, 0.0f};
        if (seen) e = recompute(dot, float(p.scale), tile.LSE[lane], tile.row_dot[lane], kept, drop.kept_scale);

        add_rows<D>(dv[r], e.P_dropped, __ballot_sync(0xffffffffu, kept), tile.walk_outer);
        add_rows<D>(dk[r], e.dS, __ballot_sync(0xffffffffu, seen), tile.walk_inner);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int key = key0 + warp * kRows + r;
    if (key >= p.Nk) break;
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
      const size_t at = (size_t(kv_head) * p.Nk + key) * D + c * 32 + lane;
      dK[at] = dk[r][c] * float(p.scale);
      dV[at] = dv[r][c];
    }
  }
}

// dQ: a block owns a tile of queries and walks over the keys that they see.
template <int D>
__global__ void __launch_bounds__(kWarps * 32, 2)
    queries_gradient(Problem p, Dropout drop, const float* Q, const float* K, const float* V, const float* dO,
                     const float* LSE, const float* row_dot, float* dQ) {
  constexpr int kRows = Tiles<D>::kRows, Br = Tiles<D>::kOwned, Bc = kWalked;
  Tiles<D>& tile = *dynamic_shared<Tiles<D>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int query_tiles = ceil_div(p.Nq, Br);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;  // those that see most keys first
  const int kv_head = head / (p.Hq / p.Hkv);  // Hkv divides Hq, so this holds across batches
  const size_t row0 = size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  load_tile<D>(tile.own_inner, Q + row0 * D, query0, p.Nq);
  load_tile<D>(tile.own_outer, dO + row0 * D, query0, p.Nq);
  for (int i = threadIdx.x; i < min(Br, p.Nq - query0); i += blockDim.x)
    tile.LSE[i] = LSE[row0 + query0 + i], tile.row_dot[i] = row_dot[row0 + query0 + i];

  float dq[kRows][D / 32] = {};
  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    __syncthreads();  // every warp is done with the last keys
    load_tile<D>(tile.walk_inner, K, key0, p.Nk);
    load_tile<D>(tile.walk_outer, V, key0, p.Nk);
    __syncthreads();  // every warp sees the new ones

    // The warp's row is a query, the lane a key.
    const int key = key0 + lane;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = warp * kRows + r, query = query0 + row;
      if (query >= p.Nq || tile.LSE[row] == -INFINITY) continue;  // sees nothing that counts
      const Dots dot = dots<D>(tile, row, lane);

      const bool seen = key < keys_seen(p, query);
      const bool kept = seen && (drop.threshold == 0 || drop.keeps(head, query, key));
      const Element e = recompute(dot, float(p.scale), tile.LSE[row], tile.row_dot[row], kept, drop.kept_scale);
      add_rows<D>(dq[r], e.dS, __ballot_sync(0xffffffffu, seen), tile.walk_inner);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int query = query0 + warp * kRows + r;
    if (query >= p.Nq) break;
#pragma unroll
    for (int c = 0; c < D / 32; c++) dQ[(row0 + query) * D + c * 32 + lane] = dq[r][c] * float(p.scale);
  }
}

template <int D>
void backward_with(const Problem& p, const Tensors& t, Stream stream) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto *V = static_cast<const float*>(t.V), *dO = static_cast<const float*>(t.dO);
  const auto *O = static_cast<const float*>(t.O), *LSE = static_cast<const float*>(t.LSE);
  float* row_dot = t.scratch<float>("D");
  const size_t rows = p.query_rows();
  const int key_tiles = ceil_div(p.Nk, Tiles<D>::kOwned), query_tiles = ceil_div(p.Nq, Tiles<D>::kOwned);

  launch(row_dots<D>, grid_of(ceil_div(rows, size_t(kWarps))), kWarps * 32, 0, stream, rows, O, dO, row_dot);
  launch(keys_gradient<D>, grid_of(p.kv_heads() * key_tiles), kWarps * 32, sizeof(Tiles<D>), stream, p, Dropout(p), Q,
         K, V, dO, LSE, row_dot, static_cast<float*>(t.dK), static_cast<float*>(t.dV));
  launch(queries_gradient<D>, grid_of(p.query_heads() * query_tiles), kWarps * 32, sizeof(Tiles<D>), stream, p,
         Dropout(p), Q, K, V, dO, LSE, row_dot, static_cast<float*>(t.dQ));
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 32) return backward_with<32>(p, t, stream);
  if (p.D == 64) return backward_with<64>(p, t, stream);
  return backward_with<128>(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) { return {{"D", p.query_rows() * sizeof(float)}}; }

const Registration step = register_step(__FILE__, {.idea = "the gradient with P recomputed tile by tile from LSE",
                                                   .rung = 1,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .backward = backward});

}  // namespace
