// 07 warp partitioning, backward: FlashAttention-2's gradient on tensor cores.
//
//     P = exp(scale · Q Kᵀ − LSE)      D = rowsum(dO ∘ O)      dP = M ∘ (dO Vᵀ) / (1 − p)      dS = P ∘ (dP − D)
//     dV = (M ∘ P / (1 − p))ᵀ dO       dK = scale · dSᵀ Q      dQ = scale · dS K
//
//     Q, O, dO, dQ [B, Hq, Nq, D]   K, V, dK, dV [B, Hkv, Nk, D]   fp16 or bf16;   LSE [B, Hq, Nq] fp32
//
// New since chapter 06: the products are tensor cores'. A block keeps 128 keys, a warp 16 or 32 of them, and walks over
// the queries. It computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that Pᵀ and dSᵀ come out of one product in the registers where
// the next ones, Pᵀ dO and dSᵀ Q, want them. Only dS passes through shared memory, for dQ = dS K, which all warps of
// the block compute together. Copies of the next queries run under all that; there is one barrier a tile.
//
// dQ is a sum over keys, hence over blocks: each adds its part to an fp32 sum in HBM by atomics, in whatever order they
// come. In deterministic mode nobody adds: a second kernel walks over the keys for the owner of each query.
//
// Page: docs/07_warp_partitioning.md.  Source: FlashAttention-2 (Dao 2023), Algorithm 2, sections 3.2 and 3.3.
#include "backward_queries.h"

namespace {

// The tiles of a block that keeps keys and walks over queries.
template <class T_, int D_, int kWarps_, int kWarpKeys_, int Br_, int kBlocks_>
struct KeyShape {
  using T = T_;
  static constexpr int D = D_, kWarps = kWarps_, kWarpKeys = kWarpKeys_, Br = Br_;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlocks_;  // blocks that share a multiprocessor
  static constexpr int Bc = kWarps * kWarpKeys;
  static_assert(kQueryTile % Br == 0);

  struct Tiles {
    T K[Bc * D], V[Bc * D];
    T Q[2 * Br * D], dO[2 * Br * D], dS[2 * Bc * Br];  // of two tiles of queries: this one and the next
    float LSE2[2][Br], row_dot[2][Br];
  };
};

// LSE2 and D = rowsum(dO ∘ O), 8 elements a thread; and the sum of dQ is set to 0.
template <class T, int D, bool kZero>
__global__ void __launch_bounds__(256) row_dots(Problem p, Arrays<T> a) {
  constexpr int kLanes = D / 8;  // to a row
  const size_t i = size_t(blockIdx.x) * 256 + threadIdx.x, row = i / kLanes, head = row / padded(p.Nq);
  const int query = int(row % padded(p.Nq)), piece = int(i % kLanes);
  if (kZero) {
    float4* zero = reinterpret_cast<float4*>(a.dQ_sum) + i / 32 * 64 + i % 32;
    zero[0] = zero[32] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  float sum = 0.0f;
  if (query < p.Nq) {
    const size_t at = (head * p.Nq + query) * D + piece * 8;
    const uint4 left = *reinterpret_cast<const uint4*>(a.O + at), right = *reinterpret_cast<const uint4*>(a.dO + at);
    const T *o = reinterpret_cast<const T*>(&left), *grad = reinterpret_cast<const T*>(&right);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(float(o[e]), float(grad[e]), sum);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (piece == 0) {
    const float lse = query < p.Nq ? a.LSE[head * p.Nq + query] : -INFINITY;
    a.LSE2[row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
    a.row_dot[row] = sum;
  }
}

// dK and dV, and with kAddsQueries the block's part of dQ.
template <class S, bool kDropout, bool kAddsQueries>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    keys_gradient(Problem p, Dropout drop, Arrays<typename S::T> a) {
  using T = typename S::T;
  constexpr int D = S::D, Bc = S::Bc, Br = S::Br, kM = S::kWarpKeys / 16;
  // Queries that a warp works on at a time: as many as its registers allow.
  constexpr int kFitting = (kDropout ? 512 : 1024) / S::kWarpKeys, kChunk = kFitting < Br ? kFitting : Br,
                kN = kChunk / 8;
  auto& tile = *dynamic_shared<typename S::Tiles>();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int key_tiles = ceil_div(p.Nk, Bc), group = p.Hq / p.Hkv;
  const int kv_head = int(blockIdx.x) / key_tiles, key0 = int(blockIdx.x) % key_tiles * Bc;  // longest walks first
  const int own_row = warp * S::kWarpKeys, own_key = key0 + own_row;

  // The walk: the query tiles that see the keys, in each query head of the group.
  const int first = first_query(p, key0) / Br * Br, heads_end = (kv_head + 1) * group;
  struct Place {
    int head, query0;
  };
  const auto after = [&](Place place) {
    return place.query0 + Br < p.Nq ? Place{place.head, place.query0 + Br} : Place{place.head + 1, first};
  };
  const auto inside = [&](Place place) { return place.head < heads_end && place.query0 < p.Nq; };
  const auto fetch = [&](int stage, Place place) {
    if (inside(place)) {
      copy_rows<D, Br, S::kThreads>(tile.Q + stage * Br * D, a.Q + size_t(place.head) * p.Nq * D, place.query0, p.Nq);
      copy_rows<D, Br, S::kThreads>(tile.dO + stage * Br * D, a.dO + size_t(place.head) * p.Nq * D, place.query0, p.Nq);
      const size_t at = size_t(place.head) * padded(p.Nq) + place.query0;
      const int i = int(threadIdx.x) * 4;
      if (i < Br) cp_async_16(&tile.LSE2[stage][i], a.LSE2 + at + i);
      if (i < Br) cp_async_16(&tile.row_dot[stage][i], a.row_dot + at + i);
    }
    cp_async_commit();
  };
  copy_rows<D, Bc, S::kThreads>(tile.K, a.K + size_t(kv_head) * p.Nk * D, key0, p.Nk);
  copy_rows<D, Bc, S::kThreads>(tile.V, a.V + size_t(kv_head) * p.Nk * D, key0, p.Nk);
  Place here = {kv_head * group, first};
  fetch(0, here);
  fetch(1, after(here));
  cp_async_wait<1>();
  __syncthreads();

  float dk[kM][D / 8][4] = {}, dv[kM][D / 8][4] = {};
  for (int stage = 0; inside(here); stage ^= 1, here = after(here)) {
#pragma unroll
    for (int c = 0; c < Br; c += kChunk) {
      const int query0 = here.query0 + c;
      uint32_t weights[kM][4];
      const auto store_dS = [&](int k) {
        if (kAddsQueries) store_operand<Br>(tile.dS, stage * Bc + own_row, c + 16 * k, weights);
      };
      if (keys_seen(p, query0 + kChunk - 1) <= own_key) {  // none of these queries sees any of the warp's keys
#pragma unroll
        for (int m = 0; m < kM; m++) weights[m][0] = weights[m][1] = weights[m][2] = weights[m][3] = 0;
#pragma unroll
        for (int k = 0; k < kN / 2; k++) store_dS(k);
        continue;
      }

      float s[kM][kN][4], dp[kM][kN][4];
      dot_rows<D>(s, tile.K, own_row, tile.Q, stage * Br + c);    // Sᵀ = K Qᵀ
      dot_rows<D>(dp, tile.V, own_row, tile.dO, stage * Br + c);  // dPᵀ = V dOᵀ

      // Pᵀ, as dV sees it, and dSᵀ.
#pragma unroll
      for (int n = 0; n < kN; n++) {
        const float2 lse = *reinterpret_cast<const float2*>(&tile.LSE2[stage][c + 8 * n + 2 * t]);
        const float2 dot = *reinterpret_cast<const float2*>(&tile.row_dot[stage][c + 8 * n + 2 * t]);
#pragma unroll
        for (int m = 0; m < kM; m++) {
          const unsigned kept = kDropout ? kept_keys_down(drop, here.head, query0 + 8 * n, own_key + 16 * m) : 15;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float P = exp2_fast(fmaf(s[m][n][i], a.scale2, i % 2 ? -lse.y : -lse.x));
            const float grown = kDropout ? (kept >> i & 1 ? dp[m][n][i] * drop.kept_scale : 0.0f) : dp[m][n][i];
            s[m][n][i] = kept >> i & 1 ? P : 0.0f;
            dp[m][n][i] = P * (grown - (i % 2 ? dot.y : dot.x));
          }
        }
      }
      if (keys_seen(p, query0) < own_key + S::kWarpKeys || query0 + kChunk > p.Nq) {
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int query = query0 + 8 * n + 2 * t + i % 2, key = own_key + g + i / 2 * 8;
            const int seen = query < p.Nq ? keys_seen(p, query) - key : 0;
#pragma unroll
            for (int m = 0; m < kM; m++)
              if (16 * m >= seen) s[m][n][i] = dp[m][n][i] = 0.0f;
          }
      }
#pragma unroll
      for (int k = 0; k < kN / 2; k++) {
        pack_operand<T>(weights, dp, k);
        store_dS(k);
        add_rows<D>(dk, weights, tile.Q, stage * Br + c + 16 * k);  // dK += dSᵀ Q
        pack_operand<T>(weights, s, k);
        add_rows<D>(dv, weights, tile.dO, stage * Br + c + 16 * k);  // dV += Pᵀ dO
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // dS is there, and the next tile; nobody needs this one any more
    fetch(stage, after(after(here)));

    if (kAddsQueries) {
      // dQ += dS K. The warps divide the tile of dQ into pieces of 32 queries and some columns.
      constexpr int kAcross = S::kWarps / (Br / 32), kCols = D / kAcross;
      const int row = warp / kAcross * 32, col = warp % kAcross * kCols;
      const int keys = min(Bc, keys_seen(p, min(here.query0 + Br, p.Nq) - 1) - key0);
      float dq[2][kCols / 8][4] = {};
#pragma unroll 4
      for (int key = 0; key < keys; key += 16) {
        uint32_t ds[2][4];
        load_a_transposed<Br>(ds[0], tile.dS, stage * Bc + key, row);
        load_a_transposed<Br>(ds[1], tile.dS, stage * Bc + key, row + 16);
        add_rows<D>(dq, ds, tile.K, key, col);
      }
      const size_t block = size_t(here.head) * (padded(p.Nq) / 16) + (here.query0 + row) / 16;
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < kCols / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            atomicAdd(a.dQ_sum + ((block + m) * (D / 8) + col / 8 + n) * 128 + i * 32 + lane, dq[m][n][i]);
    }
  }
  __syncthreads();  // every warp is done with K and V: their tiles take the results to HBM
  store_rows<D>(dk, a.scale, tile.K, own_row, a.dK + size_t(kv_head) * p.Nk * D, own_key, p.Nk);
  store_rows<D>(dv, drop.kept_scale, tile.V, own_row, a.dV + size_t(kv_head) * p.Nk * D, own_key, p.Nk);
}

// dQ = scale · its sum, 8 elements of a row a thread.
template <class T, int D>
__global__ void __launch_bounds__(256) round_dQ(Problem p, Arrays<T> a) {
  const size_t i = size_t(blockIdx.x) * 256 + threadIdx.x, row = i / (D / 8);
  if (row >= size_t(p.B) * p.Hq * p.Nq) return;
  const int query = int(row % p.Nq), n = int(i % (D / 8));
  const size_t block = row / p.Nq * (padded(p.Nq) / 16) + query / 16;
  const float* sum = a.dQ_sum + (block * (D / 8) + n) * 128 + query / 8 % 2 * 64 + query % 8 * 4;
  const float4 even = *reinterpret_cast<const float4*>(sum), odd = *reinterpret_cast<const float4*>(sum + 32);
  *reinterpret_cast<uint4*>(a.dQ + row * D + n * 8) =
      make_uint4(pack<T>(even.x * a.scale, odd.x * a.scale), pack<T>(even.y * a.scale, odd.y * a.scale),
                 pack<T>(even.z * a.scale, odd.z * a.scale), pack<T>(even.w * a.scale, odd.w * a.scale));
}

template <class Keys, class Queries, bool kDropout>
void backward_with(const Problem& p, const Tensors& t, Stream stream) {
  using T = typename Keys::T;
  constexpr int D = Keys::D;
  const Arrays<T> a = {.Q = static_cast<const T*>(t.Q),
                       .K = static_cast<const T*>(t.K),
                       .V = static_cast<const T*>(t.V),
                       .O = static_cast<const T*>(t.O),
                       .dO = static_cast<const T*>(t.dO),
                       .LSE = static_cast<const float*>(t.LSE),
                       .dQ = static_cast<T*>(t.dQ),
                       .dK = static_cast<T*>(t.dK),
                       .dV = static_cast<T*>(t.dV),
                       .LSE2 = t.scratch<float>("LSE2"),
                       .row_dot = t.scratch<float>("D"),
                       .dQ_sum = p.deterministic ? nullptr : t.scratch<float>("sum of dQ"),
                       .scale = float(p.scale),
                       .scale2 = float(p.scale) * kLog2e};
  const Dropout drop(p);
  const dim3 row_grid = grid_of(p.query_heads() * padded(p.Nq) * (D / 8) / 256);
  const dim3 key_grid = grid_of(p.kv_heads() * ceil_div(p.Nk, Keys::Bc));
  const size_t key_bytes = sizeof(typename Keys::Tiles);
  if (p.deterministic) {
    launch(row_dots<T, D, false>, row_grid, 256, 0, stream, p, a);
    launch(keys_gradient<Keys, kDropout, false>, key_grid, Keys::kThreads, key_bytes, stream, p, drop, a);
    launch(queries_gradient<Queries, kDropout>, grid_of(p.query_heads() * ceil_div(p.Nq, Queries::Br)),
           Queries::kThreads, sizeof(typename Queries::Tiles), stream, p, drop, a);
  } else {
    launch(row_dots<T, D, true>, row_grid, 256, 0, stream, p, a);
    launch(keys_gradient<Keys, kDropout, true>, key_grid, Keys::kThreads, key_bytes, stream, p, drop, a);
    launch(round_dQ<T, D>, grid_of(ceil_div(p.q_elements() / 8, 256u)), 256, 0, stream, p, a);
  }
}

template <class Keys, class Queries>
void backward_for(const Problem& p, const Tensors& t, Stream stream) {
  if (p.dropout > 0) return backward_with<Keys, Queries, true>(p, t, stream);
  return backward_with<Keys, Queries, false>(p, t, stream);
}

// D = 128 takes 161 KB, or where a block may not have that much, at most 97, as D = 64 does: all GPUs allow that.
template <class T>
void backward_in(const Problem& p, const Tensors& t, Stream stream) {
  using Large = KeyShape<T, 128, 8, 16, 64, 1>;
  using Small = KeyShape<T, 128, 4, 16, 32, 1>;
  using Queries = QueryShape<T, 128, 4, 32, 2>;
  if (p.D == 64) return backward_for<KeyShape<T, 64, 4, 32, 64, 2>, QueryShape<T, 64, 4, 64, 2>>(p, t, stream);
  if (sizeof(typename Large::Tiles) <= shared_memory_limit()) return backward_for<Large, Queries>(p, t, stream);
  return backward_for<Small, Queries>(p, t, stream);
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.dtype == DType::bf16) return backward_in<__nv_bfloat16>(p, t, stream);
  return backward_in<__half>(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.query_heads() * padded(p.Nq) * sizeof(float);
  if (p.deterministic) return {{"LSE2", bytes}, {"D", bytes}};
  return {{"LSE2", bytes}, {"D", bytes}, {"sum of dQ", bytes * p.D}};
}

const Registration step = register_step(__FILE__, {.idea = "FlashAttention-2's gradient on tensor cores",
                                                   .rung = 4,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 80,
                                                   .spreads_nonfinite = true,
                                                   .workspace = workspace,
                                                   .backward = backward});

}  // namespace
