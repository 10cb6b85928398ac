// 06 recomputation backward, the fast one: backward.cu with the products of chapter 03 inside.
//
//     P = exp(scale · Q Kᵀ − LSE)      D = rowsum(dO ∘ O)      dP = M ∘ (dO Vᵀ) / (1 − p)      dS = P ∘ (dP − D)
//     dV = (M ∘ P / (1 − p))ᵀ dO       dK = scale · dSᵀ Q      dQ = scale · dS K
//
//     Q, O, dO, dQ [B, Hq, Nq, D]   K, V, dK, dV [B, Hkv, Nk, D]   LSE, D [B, Hq, Nq]   fp32; M: what dropout kept
//
// New since backward.cu: a thread holds R × C elements of P and dP, and R rows of the gradients, in registers. In the
// kernel for dK and dV its rows are keys and its columns queries: what it computes is Pᵀ and dSᵀ, already turned the
// way the products with dO and Q want them.
// The next tiles are fetched into registers while the products of this one run.
//
// Both kernels recompute P and dP, seven products in all where five would do. In exchange each gradient has one owner:
// no atomics, and the same bits from run to run.
//
// Page: docs/06_recompute_backward.md.  Source: FlashAttention (Dao et al. 2022), Algorithm 4.
#include "harness/mask.h"
#include "harness/philox.h"
#include "harness/register_tiles.h"

namespace {
using namespace flash;

// The tiles of a block. `Left` is what its threads' rows are (keys, or queries), `Right` what their columns are.
template <int D_, int R_, int C_, int kWarps_>
struct Shape {
  static constexpr int D = D_, R = R_, C = C_, kWarps = kWarps_;
  static constexpr int kLeft = kWarps * 4 * R;
  static constexpr int kRight = 8 * C;

  struct Tiles {  // shared memory; an `inner` tile meets its like in S, an `outer` one in dP
    float left_inner[kLeft][D + kTilePad], left_outer[kLeft][D + kTilePad];      // K and V, or Q and dO
    float right_inner[kRight][D + kTilePad], right_outer[kRight][D + kTilePad];  // Q and dO, or K and V
    float weights[kLeft][kRight + kTilePad];                                     // P or dS, on its way between lanes
    float LSE[kRight], row_dot[kRight];                                          // used where the columns are queries
  };
};

// D = rowsum(dO ∘ O): a warp a row.
template <int D>
__global__ void row_dots(size_t rows, const float* O, const float* dO, float* row_dot) {
  const size_t row = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum = fmaf(O[row * D + d], dO[row * D + d], sum);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) row_dot[row] = sum;
}

// Hands a thread's R × C elements to the lanes of its rows, and adds their products with `values` to `sum`.
template <class T, class Counts>
__device__ void add_rows(float (&sum)[T::R][T::D / 8], const float (&x)[T::R][T::C], typename T::Tiles& tile,
                         const float (&values)[T::kRight][T::D + kTilePad], Counts counts) {
  const WarpPlace place;
  __syncwarp();  // the row's lanes are done with what was handed over before
#pragma unroll
  for (int r = 0; r < T::R; r++)
#pragma unroll
    for (int c = 0; c < T::C; c += 4)
      *reinterpret_cast<float4*>(&tile.weights[place.row<T::R>(r)][place.column(c)]) =
          make_float4(x[r][c], x[r][c + 1], x[r][c + 2], x[r][c + 3]);
  __syncwarp();
  add_weighted_rows<T::R, T::D / 8, T::kRight, T::D>(sum, tile.weights, values, counts);
}

// Writes R rows of a gradient, scaled.
template <class T>
__device__ void store_rows(const float (&sum)[T::R][T::D / 8], float factor, float* gradient, int row0, int rows) {
  const WarpPlace place;
#pragma unroll
  for (int r = 0; r < T::R; r++) {
    const int row = row0 + place.row<T::R>(r);
    if (row >= rows) continue;
#pragma unroll
    for (int c = 0; c < T::D / 8; c += 4)
      *reinterpret_cast<float4*>(&gradient[size_t(row) * T::D + place.column(c)]) =
          make_float4(sum[r][c] * factor, sum[r][c + 1] * factor, sum[r][c + 2] * factor, sum[r][c + 3] * factor);
  }
}

// LSE of a row as P needs it: a query that sees no key (LSE = −∞) or is none at all gets +∞, and so P = exp(S − ∞) = 0.
__device__ float lse_or_infinity(const float* LSE, int query, int Nq) {
  const float lse = query < Nq ? LSE[query] : -INFINITY;
  return lse == -INFINITY ? INFINITY : lse;
}

// dK and dV: a block owns a tile of keys and walks over the queries that see them, in each query head of its group.
// `kDropout`: without it the draws take no registers.
template <class T, bool kDropout>
__global__ void __launch_bounds__(T::kWarps * 32, 2)
    keys_gradient(Problem p, Dropout drop, const float* Q, const float* K, const float* V, const float* dO,
                  const float* LSE, const float* row_dot, float* dK, float* dV) {
  constexpr int R = T::R, C = T::C, D = T::D;
  auto& tile = *dynamic_shared<typename T::Tiles>();
  const WarpPlace place;
  const int key_tiles = ceil_div(p.Nk, T::kLeft), group = p.Hq / p.Hkv;
  const int kv_head = int(blockIdx.x) / key_tiles, key0 = int(blockIdx.x) % key_tiles * T::kLeft;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  load_tile<T::kLeft, D, false>(tile.left_inner, K, key0, p.Nk);
  load_tile<T::kLeft, D, false>(tile.left_outer, V, key0, p.Nk);

  float dk[R][D / 8] = {}, dv[R][D / 8] = {};
  TileInFlight<T::kRight, D, T::kWarps * 32> next_q, next_grad;
  const int first = first_query(p, key0) / T::kRight * T::kRight;
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const float *q = Q + size_t(head) * p.Nq * D, *grad = dO + size_t(head) * p.Nq * D;
    const size_t row0 = size_t(head) * p.Nq;
    next_q.fetch(q, first, p.Nq);
    next_grad.fetch(grad, first, p.Nq);
    for (int query0 = first; query0 < p.Nq; query0 += T::kRight) {
      __syncthreads();  // every warp is done with the last queries
      next_q.store(tile.right_inner);
      next_grad.store(tile.right_outer);
      for (int i = threadIdx.x; i < T::kRight; i += blockDim.x) {
        tile.LSE[i] = lse_or_infinity(LSE + row0, query0 + i, p.Nq);
        tile.row_dot[i] = query0 + i < p.Nq ? row_dot[row0 + query0 + i] : 0.0f;
      }
      __syncthreads();  // every warp sees the new ones

      float s[R][C] = {}, dp[R][C] = {};
      add_dots<R, C, D>(s, tile.left_inner, tile.right_inner);   // Sᵀ = K Qᵀ
      add_dots<R, C, D>(dp, tile.left_outer, tile.right_outer);  // dPᵀ = V dOᵀ

      const bool some_unseen = keys_seen(p, query0) < key0 + T::kLeft || query0 + T::kRight > p.Nq;
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int key = key0 + place.row<R>(r);
#pragma unroll
        for (int c = 0; c < C; c++) {
          const int query = query0 + place.column(c);
          const bool seen = !some_unseen || (query >= first_query(p, key) && query < p.Nq && key < p.Nk);
          const float weight = seen ? __expf(s[r][c] * float(p.scale) - tile.LSE[place.column(c)]) : 0.0f;
          float kept = 1.0f;
          if (kDropout) kept = drop.keeps(head, query, key) ? drop.kept_scale : 0.0f;
          const float grown = kept == 0.0f ? 0.0f : dp[r][c] * kept;
          dp[r][c] = seen ? weight * (grown - tile.row_dot[place.column(c)]) : 0.0f;  // dSᵀ
          s[r][c] = kept == 0.0f ? kDropped : weight * kept;                          // Pᵀ, dropped
        }
      }
      next_q.fetch(q, query0 + T::kRight, p.Nq);  // arrive while the gradients are summed
      next_grad.fetch(grad, query0 + T::kRight, p.Nq);
      if (kDropout || some_unseen) {
        const auto sees = [&](int r, int j, float) { return query0 + j >= first_query(p, key0 + place.row<R>(r)); };
        add_rows<T>(dv, s, tile, tile.right_outer,
                    [&](int r, int j, float x) { return sees(r, j, x) && !(kDropout && is_dropped(x)); });
        add_rows<T>(dk, dp, tile, tile.right_inner, sees);
      } else {
        add_rows<T>(dv, s, tile, tile.right_outer, AllTerms());
        add_rows<T>(dk, dp, tile, tile.right_inner, AllTerms());
      }
    }
  }
  store_rows<T>(dk, float(p.scale), dK + size_t(kv_head) * p.Nk * D, key0, p.Nk);
  store_rows<T>(dv, 1.0f, dV + size_t(kv_head) * p.Nk * D, key0, p.Nk);
}

// dQ: a block owns a tile of queries and walks over the keys that they see.
template <class T, bool kDropout>
__global__ void __launch_bounds__(T::kWarps * 32, 2)
    queries_gradient(Problem p, Dropout drop, const float* Q, const float* K, const float* V, const float* dO,
                     const float* LSE, const float* row_dot, float* dQ) {
  constexpr int R = T::R, C = T::C, D = T::D;
  auto& tile = *dynamic_shared<typename T::Tiles>();
  const WarpPlace place;
  const int query_tiles = ceil_div(p.Nq, T::kLeft);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * T::kLeft;  // those that see most keys first
  const int kv_head = head / (p.Hq / p.Hkv);
  const size_t row0 = size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  load_tile<T::kLeft, D, false>(tile.left_inner, Q + row0 * D, query0, p.Nq);
  load_tile<T::kLeft, D, false>(tile.left_outer, dO + row0 * D, query0, p.Nq);

  float dq[R][D / 8] = {}, lse[R], d_row[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int query = query0 + place.row<R>(r);
    lse[r] = lse_or_infinity(LSE + row0, query, p.Nq);
    d_row[r] = query < p.Nq ? row_dot[row0 + query] : 0.0f;
  }
  const int keys = keys_seen(p, min(query0 + T::kLeft, p.Nq) - 1);
  TileInFlight<T::kRight, D, T::kWarps * 32> next_k, next_v;
  next_k.fetch(K, 0, keys);
  next_v.fetch(V, 0, keys);
  for (int key0 = 0; key0 < keys; key0 += T::kRight) {
    __syncthreads();  // every warp is done with the last keys
    next_k.store(tile.right_inner);
    next_v.store(tile.right_outer);
    __syncthreads();                          // every warp sees the new ones
    next_k.fetch(K, key0 + T::kRight, keys);  // arrive while this tile is worked on
    next_v.fetch(V, key0 + T::kRight, keys);

    float s[R][C] = {}, dp[R][C] = {};
    add_dots<R, C, D>(s, tile.left_inner, tile.right_inner);   // S = Q Kᵀ
    add_dots<R, C, D>(dp, tile.left_outer, tile.right_outer);  // dP = dO Vᵀ

    const bool some_unseen = keys_seen(p, query0) < key0 + T::kRight;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int query = query0 + place.row<R>(r);
      const int seen = some_unseen ? keys_seen(p, query) - key0 : T::kRight;
#pragma unroll
      for (int c = 0; c < C; c++) {
        const float weight = __expf(s[r][c] * float(p.scale) - lse[r]);
        float grown = dp[r][c];
        if (kDropout) grown = drop.keeps(head, query, key0 + place.column(c)) ? dp[r][c] * drop.kept_scale : 0.0f;
        s[r][c] = place.column(c) < seen ? weight * (grown - d_row[r]) : 0.0f;  // dS
      }
    }
    if (some_unseen)
      add_rows<T>(dq, s, tile, tile.right_inner,
                  [&](int r, int j, float) { return key0 + j < keys_seen(p, query0 + place.row<R>(r)); });
    else
      add_rows<T>(dq, s, tile, tile.right_inner, AllTerms());
  }
  store_rows<T>(dq, float(p.scale), dQ + row0 * D, query0, p.Nq);
}

template <class Keys, class Queries>
void backward_with(const Problem& p, const Tensors& t, Stream stream) {
  constexpr int D = Keys::D;
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto *V = static_cast<const float*>(t.V), *dO = static_cast<const float*>(t.dO);
  const auto* LSE = static_cast<const float*>(t.LSE);
  float* row_dot = t.scratch<float>("D");
  const size_t rows = p.query_rows();
  const bool drops = p.dropout > 0;
  launch(row_dots<D>, grid_of(ceil_div(rows, 8u)), 256, 0, stream, rows, static_cast<const float*>(t.O), dO, row_dot);
  launch(drops ? keys_gradient<Keys, true> : keys_gradient<Keys, false>,
         grid_of(p.kv_heads() * ceil_div(p.Nk, Keys::kLeft)), Keys::kWarps * 32, sizeof(typename Keys::Tiles), stream,
         p, Dropout(p), Q, K, V, dO, LSE, row_dot, static_cast<float*>(t.dK), static_cast<float*>(t.dV));
  launch(drops ? queries_gradient<Queries, true> : queries_gradient<Queries, false>,
         grid_of(p.query_heads() * ceil_div(p.Nq, Queries::kLeft)), Queries::kWarps * 32,
         sizeof(typename Queries::Tiles), stream, p, Dropout(p), Q, K, V, dO, LSE, row_dot, static_cast<float*>(t.dQ));
}

// The large tiles where a block may have that much shared memory, else (a T4 has 64 KB) the small ones.
template <class LargeKeys, class LargeQueries, class Small>
void backward_for(const Problem& p, const Tensors& t, Stream stream) {
  constexpr size_t kNeeded = std::max(sizeof(typename LargeKeys::Tiles), sizeof(typename LargeQueries::Tiles));
  if (kNeeded <= shared_memory_limit())
    backward_with<LargeKeys, LargeQueries>(p, t, stream);
  else
    backward_with<Small, Small>(p, t, stream);
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 32) return backward_with<Shape<32, 4, 8, 4>, Shape<32, 8, 4, 4>>(p, t, stream);  // 63 KB: for every GPU
  if (p.D == 64) return backward_for<Shape<64, 4, 8, 4>, Shape<64, 8, 4, 4>, Shape<64, 4, 4, 4>>(p, t, stream);
  return backward_for<Shape<128, 2, 4, 4>, Shape<128, 4, 4, 4>, Shape<128, 2, 4, 2>>(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) { return {{"D", p.query_rows() * sizeof(float)}}; }

const Registration step = register_step(__FILE__, {.idea = "the recomputing backward pass with register tiles",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .backward = backward});

}  // namespace
