// 07 warp partitioning, backward: FlashAttention-2's gradient on tensor cores.
#include "harness/mask.h"
#include "harness/philox.h"
#include "backward_tiles.h"

namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kQueryPad = 64;  // rows of LSE, D and the sum of dQ in the workspace: a multiple, for each head
__host__ __device__ constexpr int padded(int Nq) { return ceil_div(Nq, kQueryPad) * kQueryPad; }

// What the kernels read and write. LSE2 = LSE · log₂e, +∞ where a row has no weights.
template <class T>
struct Arrays {
  const T *Q, *K, *V, *O, *dO;
  const float* LSE;
  float *LSE2, *row_dot, *dQ_sum;
  T *dQ, *dK, *dV;
  float scale;
};

template <class T_, int D_, int kKeyWarps_, int kM_, int kTeams_, int Br_, int kChunk_, int kBlocks_, int kRed_ = 0>
struct Shape {
  using T = T_;
  static constexpr int D = D_, kKeyWarps = kKeyWarps_, kM = kM_, kTeams = kTeams_, Br = Br_, kChunk = kChunk_,
                       kBlocks = kBlocks_, kRed = kRed_;
  static constexpr int kWarps = kKeyWarps * kTeams, kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = 16 * kM, Bc = kKeyWarps * kWarpKeys;

  struct Tiles {
    T K[Bc * D], V[Bc * D], Q[2][Br * D], dO[2][Br * D];
    T dS[2][Bc * Br];
    float4 P[kTeams == 2 ? kKeyWarps * (Br / 8) * kM * 32 : 1];
    float LSE2[2][Br], row_dot[2][Br];
  };
};

// D = rowsum(dO ∘ O), and the sum of dQ set to zero.
template <class T, int D, bool kZero>
__global__ void __launch_bounds__(256) row_dots(Problem p, Arrays<T> a) {
  constexpr int kLanes = D / 8;
  const size_t i = size_t(blockIdx.x) * 256 + threadIdx.x;
  const size_t row = i / kLanes;
  const int piece = int(i % kLanes), rows = padded(p.Nq);
  const size_t head = row / rows;
  if (kZero) {
    float4* zero = reinterpret_cast<float4*>(a.dQ_sum) + i / 32 * 64 + i % 32;
    zero[0] = zero[32] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int query = int(row % rows);
  float sum = 0.0f;
  if (query < p.Nq) {
    const size_t at = (head * p.Nq + query) * D + piece * 8;
    const uint4 o4 = *reinterpret_cast<const uint4*>(a.O + at), g4 = *reinterpret_cast<const uint4*>(a.dO + at);
    const T *o = reinterpret_cast<const T*>(&o4), *g = reinterpret_cast<const T*>(&g4);
#pragma unroll
    for (int e = 0; e < 8; e++) sum += float(o[e]) * float(g[e]);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (piece == 0) {
    const float lse = query < p.Nq ? a.LSE[head * p.Nq + query] : -INFINITY;
    a.row_dot[row] = sum;
    a.LSE2[row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
  }
}

// Which of a lane's four elements of a 16×8 block (16 keys from key0, 8 queries from query0) dropout keeps.
__device__ __forceinline__ unsigned kept_of_block(const Dropout& drop, int head, int query0, int key0) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4, mine = g % 4;
  const uint4 word = drop.words(head, query0 + 2 * t + mine % 2, key0 / 4 + g / 4 + mine / 2 * 2);
  const unsigned x = __ballot_sync(0xffffffffu, word.x >= drop.threshold);
  const unsigned y = __ballot_sync(0xffffffffu, word.y >= drop.threshold);
  const unsigned z = __ballot_sync(0xffffffffu, word.z >= drop.threshold);
  const unsigned w = __ballot_sync(0xffffffffu, word.w >= drop.threshold);
  const unsigned of_my_key = mine == 0 ? x : mine == 1 ? y : mine == 2 ? z : w;
  const unsigned four = of_my_key >> (g / 4 * 16 + t);
  return (four & 1) | (four >> 3 & 2) | (four >> 6 & 4) | (four >> 9 & 8);
}

template <class S, bool kDropout, bool kAddsQueries>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) keys_gradient(Problem p, Dropout drop, Arrays<typename S::T> a) {
  using T = typename S::T;
  constexpr int D = S::D, Bc = S::Bc, Br = S::Br, kM = S::kM, kN = S::kChunk / 8;
  auto& tile = *dynamic_shared<typename S::Tiles>();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int team = S::kTeams == 1 ? 0 : warp / S::kKeyWarps, key_warp = S::kTeams == 1 ? warp : warp % S::kKeyWarps;
  const int key_tiles = ceil_div(p.Nk, Bc), group = p.Hq / p.Hkv;
  const int kv_head = int(blockIdx.x) / key_tiles, key0 = int(blockIdx.x) % key_tiles * Bc;
  const int own_row = key_warp * S::kWarpKeys, own_key = key0 + own_row;
  const size_t key_row0 = size_t(kv_head) * p.Nk;
  const float scale2 = a.scale * kLog2e;

  const int first = first_query(p, key0) / Br * Br;
  const int steps = group * ceil_div(p.Nq - first, Br);
  int next_head = kv_head * group, next_query = first, head = next_head, query0 = first;
  const auto fetch = [&](int stage) {
    if (next_head < (kv_head + 1) * group && next_query < p.Nq) {
      const size_t row0 = size_t(next_head) * p.Nq * D;
      copy_rows<D, Br, S::kThreads>(tile.Q[stage], a.Q + row0, next_query, p.Nq);
      copy_rows<D, Br, S::kThreads>(tile.dO[stage], a.dO + row0, next_query, p.Nq);
      const size_t at = size_t(next_head) * padded(p.Nq) + next_query;
      const int i = int(threadIdx.x) % (Br / 4) * 4;
      if (threadIdx.x < Br / 4) cp_async_16(&tile.LSE2[stage][i], a.LSE2 + at + i);
      else if (threadIdx.x < Br / 2) cp_async_16(&tile.row_dot[stage][i], a.row_dot + at + i);
      next_query += Br;
      if (next_query >= p.Nq) next_query = first, next_head++;
    }
    cp_async_commit();
  };
  copy_rows<D, Bc, S::kThreads>(tile.K, a.K + key_row0 * D, key0, p.Nk);
  copy_rows<D, Bc, S::kThreads>(tile.V, a.V + key_row0 * D, key0, p.Nk);
  fetch(0);
  fetch(1);
  cp_async_wait<1>();
  __syncthreads();

  float dk[kM][D / 8][4] = {}, dv[kM][D / 8][4] = {};  // with two teams: dv is the sum of either
  for (int step = 0; step < steps; step++) {
    const int stage = step % 2;
#pragma unroll
    for (int c = 0; c < Br; c += S::kChunk) {
      const int chunk_query = query0 + c;
      const bool all_unseen = keys_seen(p, chunk_query + S::kChunk - 1) <= own_key;
      const bool some_unseen = keys_seen(p, chunk_query) < own_key + S::kWarpKeys || chunk_query + S::kChunk > p.Nq;
      const auto keep_seen = [&](float (&x)[kM][kN][4]) {
#pragma unroll
        for (int n = 0; n < kN; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int query = chunk_query + 8 * n + 2 * t + e;
            const int seen = query < p.Nq ? keys_seen(p, query) - own_key - g : 0;
#pragma unroll
            for (int m = 0; m < kM; m++) {
              if (16 * m >= seen) x[m][n][e] = 0.0f;
              if (16 * m + 8 >= seen) x[m][n][e + 2] = 0.0f;
            }
          }
      };
      const auto store_dS = [&](int k, const uint32_t (&ds)[kM][4]) {
        if (!kAddsQueries) return;
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            *reinterpret_cast<uint32_t*>(tile.dS[stage] + 2 * t +
                                         piece_at<Br>(own_row + 16 * m + g + i % 2 * 8, (c + 16 * k) / 8 + i / 2)) =
                ds[m][i];
      };
      const auto pack_a = [&](uint32_t (&r)[kM][4], const float (&x)[kM][kN][4], int k) {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            r[m][i] = pack<T>(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
      };
      if (all_unseen) {
        const uint32_t zero[kM][4] = {};
        if (S::kTeams == 1 || team == 1)
#pragma unroll
          for (int k = 0; k < kN / 2; k++) store_dS(k, zero);
        continue;
      }
      if constexpr (S::kTeams == 1) {
        float s[kM][kN][4], dp[kM][kN][4];
        dot_rows<D>(s, tile.K, own_row, tile.Q[stage], c);
        dot_rows<D>(dp, tile.V, own_row, tile.dO[stage], c);
#pragma unroll
        for (int n = 0; n < kN; n++) {
          const float2 lse = *reinterpret_cast<const float2*>(&tile.LSE2[stage][c + 8 * n + 2 * t]);
          const float2 dot = *reinterpret_cast<const float2*>(&tile.row_dot[stage][c + 8 * n + 2 * t]);
#pragma unroll
          for (int m = 0; m < kM; m++) {
            const unsigned kept = kDropout ? kept_of_block(drop, head, chunk_query + 8 * n, own_key + 16 * m) : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const float P = exp2_fast(fmaf(s[m][n][i], scale2, i % 2 ? -lse.y : -lse.x));
              float grad = dp[m][n][i];
              if (kDropout) grad = kept >> i & 1 ? grad * drop.kept_scale : 0.0f;
              s[m][n][i] = kDropout && !(kept >> i & 1) ? 0.0f : P;
              dp[m][n][i] = P * (grad - (i % 2 ? dot.y : dot.x));
            }
          }
        }
        if (some_unseen) keep_seen(s), keep_seen(dp);
#pragma unroll
        for (int k = 0; k < kN / 2; k++) {
          uint32_t r[kM][4];
          pack_a(r, dp, k);
          store_dS(k, r);
          add_rows<D>(dk, r, tile.Q[stage], c + 16 * k);
          pack_a(r, s, k);
          add_rows<D>(dv, r, tile.dO[stage], c + 16 * k);
        }
      } else {
        float x[kM][kN][4];
        dot_rows<D>(x, team == 0 ? tile.K : tile.V, own_row, team == 0 ? tile.Q[stage] : tile.dO[stage], c);
        float4* exchange = tile.P + ((key_warp * (Br / 8) + c / 8) * kM) * 32 + lane;
        const int barrier = 1 + c / S::kChunk * S::kKeyWarps + key_warp;
        uint32_t r[kN / 2][kM][4];
        if (team == 0) {
#pragma unroll
          for (int n = 0; n < kN; n++) {
            const float2 lse = *reinterpret_cast<const float2*>(&tile.LSE2[stage][c + 8 * n + 2 * t]);
#pragma unroll
            for (int m = 0; m < kM; m++)
#pragma unroll
              for (int i = 0; i < 4; i++)
                x[m][n][i] = exp2_fast(fmaf(x[m][n][i], scale2, i % 2 ? -lse.y : -lse.x));
          }
          if (some_unseen) keep_seen(x);
          if (kDropout) {
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
              for (int m = 0; m < kM; m++) {
                const unsigned kept = kept_of_block(drop, head, chunk_query + 8 * n, own_key + 16 * m);
#pragma unroll
                for (int i = 0; i < 4; i++)
                  if (!(kept >> i & 1)) x[m][n][i] = -x[m][n][i];
              }
          }
#pragma unroll
          for (int n = 0; n < kN; n++)
#pragma unroll
            for (int m = 0; m < kM; m++)
              exchange[(n * kM + m) * 32] = make_float4(x[m][n][0], x[m][n][1], x[m][n][2], x[m][n][3]);
          named_barrier_arrive(barrier, 64);
          if (kDropout) {
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
              for (int m = 0; m < kM; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) x[m][n][i] = fmaxf(x[m][n][i], 0.0f);
          }
#pragma unroll
          for (int k = 0; k < kN / 2; k++) pack_a(r[k], x, k);
        } else {
          named_barrier_sync(barrier, 64);
#pragma unroll
          for (int n = 0; n < kN; n++) {
            const float2 dot = *reinterpret_cast<const float2*>(&tile.row_dot[stage][c + 8 * n + 2 * t]);
#pragma unroll
            for (int m = 0; m < kM; m++) {
              const float4 four = exchange[(n * kM + m) * 32];
              const float P[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
              for (int i = 0; i < 4; i++) {
                float grad = x[m][n][i];
                if (kDropout) grad = __float_as_uint(P[i]) >> 31 ? 0.0f : grad * drop.kept_scale;
                x[m][n][i] = fabsf(P[i]) * (grad - (i % 2 ? dot.y : dot.x));
              }
            }
          }
          if (some_unseen) keep_seen(x);
#pragma unroll
          for (int k = 0; k < kN / 2; k++) pack_a(r[k], x, k), store_dS(k, r[k]);
        }
#pragma unroll
        for (int k = 0; k < kN / 2; k++)
          add_rows<D>(dv, r[k], team == 0 ? tile.dO[stage] : tile.Q[stage], c + 16 * k);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
    fetch(stage);

    if (kAddsQueries) {
      constexpr int kRows = 32, kColWarps = S::kWarps / (Br / kRows), kCols = D / kColWarps;
      const int row = warp / kColWarps * kRows, col = warp % kColWarps * kCols;
      const int keys = min(Bc, keys_seen(p, min(query0 + Br, p.Nq) - 1) - key0);
      float dq[kRows / 16][kCols / 8][4] = {};
#pragma unroll 2
      for (int key = 0; key < keys; key += 16) {
        uint32_t ds[kRows / 16][4];
#pragma unroll
        for (int m = 0; m < kRows / 16; m++) load_a_transposed<Br>(ds[m], tile.dS[stage], key, row + 16 * m);
        add_rows<D>(dq, ds, tile.K, key, col);
      }
      const size_t block = size_t(head) * (padded(p.Nq) / 16) + (query0 + row) / 16;
#pragma unroll
      for (int m = 0; m < kRows / 16; m++)
#pragma unroll
        for (int n = 0; n < kCols / 8; n++) {
          float* sum = a.dQ_sum + ((block + m) * (D / 8) + col / 8 + n) * 128;
#ifdef __CUDACC__
          if (S::kRed == 1) {
            asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(sum + 4 * lane), "f"(dq[m][n][0]), "f"(dq[m][n][1]), "f"(dq[m][n][2]), "f"(dq[m][n][3]) : "memory");
          } else
#endif
#pragma unroll
          for (int i = 0; i < 4; i++) atomicAdd(sum + 32 * i + lane, dq[m][n][i]);
        }
    }
    query0 += Br;
    if (query0 >= p.Nq) query0 = first, head++;
  }
  __syncthreads();
  if constexpr (S::kTeams == 1) {
    store_rows<D, T>(dk, a.scale, tile.K, own_row, a.dK + key_row0 * D, own_key, p.Nk);
    store_rows<D, T>(dv, drop.kept_scale, tile.V, own_row, a.dV + key_row0 * D, own_key, p.Nk);
  } else {
    if (team == 0) store_rows<D, T>(dv, drop.kept_scale, tile.V, own_row, a.dV + key_row0 * D, own_key, p.Nk);
    else store_rows<D, T>(dv, a.scale, tile.K, own_row, a.dK + key_row0 * D, own_key, p.Nk);
  }
}

// dQ = scale · its sum, from the order of the fragments to rows.
template <class T, int D, int kRed>
__global__ void __launch_bounds__(256) convert_dQ(Problem p, Arrays<T> a) {
  const size_t i = size_t(blockIdx.x) * 256 + threadIdx.x, row = i / (D / 8);
  if (row >= size_t(p.B) * p.Hq * p.Nq) return;
  const int n = int(i % (D / 8));
  const int query = int(row % p.Nq);
  const size_t block = row / p.Nq * (padded(p.Nq) / 16) + query / 16;
  const int g = query % 8, half = query / 8 % 2;
  const float* sum = a.dQ_sum + (block * (D / 8) + n) * 128;
  uint4 out;
  uint32_t* r = &out.x;
  if (kRed == 0) {
    const float4 even = *reinterpret_cast<const float4*>(sum + half * 64 + 4 * g);
    const float4 odd = *reinterpret_cast<const float4*>(sum + half * 64 + 32 + 4 * g);
    out = make_uint4(pack<T>(even.x * a.scale, odd.x * a.scale), pack<T>(even.y * a.scale, odd.y * a.scale),
                     pack<T>(even.z * a.scale, odd.z * a.scale), pack<T>(even.w * a.scale, odd.w * a.scale));
  } else {
    for (int t = 0; t < 4; t++) {
      const float2 two = *reinterpret_cast<const float2*>(sum + (4 * g + t) * 4 + 2 * half);
      r[t] = pack<T>(two.x * a.scale, two.y * a.scale);
    }
  }
  *reinterpret_cast<uint4*>(a.dQ + row * D + n * 8) = out;
}


// dQ with an owner: a block keeps queries and walks over the keys that they see. For the deterministic mode.
template <class T_, int D_, int kWarps_, int kM_, int Bc_, int kChunk_, int kBlocks_>
struct QueryShape {
  using T = T_;
  static constexpr int D = D_, kWarps = kWarps_, kM = kM_, Bc = Bc_, kChunk = kChunk_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarps, kWarpQueries = 16 * kM, Br = kWarps * kWarpQueries;
  struct Tiles {
    T Q[Br * D], dO[Br * D], K[2][Bc * D], V[2][Bc * D];
  };
};

// Which of a lane's four elements of a 16×8 block (16 queries, 8 keys) dropout keeps.
__device__ __forceinline__ unsigned kept_of_row_block(const Dropout& drop, int head, int query0, int key0) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const uint4 word = drop.words(head, query0 + g + t % 2 * 8, key0 / 4 + t / 2);
  const unsigned x = __ballot_sync(0xffffffffu, word.x >= drop.threshold);
  const unsigned y = __ballot_sync(0xffffffffu, word.y >= drop.threshold);
  const unsigned z = __ballot_sync(0xffffffffu, word.z >= drop.threshold);
  const unsigned w = __ballot_sync(0xffffffffu, word.w >= drop.threshold);
  const unsigned even = (t % 2 ? z : x) >> (4 * g + t / 2 * 2), odd = (t % 2 ? w : y) >> (4 * g + t / 2 * 2);
  return (even & 1) | (odd & 1) << 1 | (even & 2) << 1 | (odd & 2) << 2;
}

template <class S, bool kDropout>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    queries_gradient(Problem p, Dropout drop, Arrays<typename S::T> a) {
  using T = typename S::T;
  constexpr int D = S::D, Bc = S::Bc, Br = S::Br, kM = S::kM, kN = S::kChunk / 8;
  auto& tile = *dynamic_shared<typename S::Tiles>();
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int query_tiles = ceil_div(p.Nq, Br), head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;  // those that see most keys first
  const int own_row = warp * S::kWarpQueries, own_query = query0 + own_row;
  const size_t row0 = size_t(head) * p.Nq, key_row0 = size_t(head / (p.Hq / p.Hkv)) * p.Nk;
  const float scale2 = a.scale * kLog2e;
  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);

  const auto fetch = [&](int stage, int key0) {
    if (key0 < keys) {
      copy_rows<D, Bc, S::kThreads>(tile.K[stage], a.K + key_row0 * D, key0, p.Nk);
      copy_rows<D, Bc, S::kThreads>(tile.V[stage], a.V + key_row0 * D, key0, p.Nk);
    }
    cp_async_commit();
  };
  copy_rows<D, Br, S::kThreads>(tile.Q, a.Q + row0 * D, query0, p.Nq);
  copy_rows<D, Br, S::kThreads>(tile.dO, a.dO + row0 * D, query0, p.Nq);
  fetch(0, 0);
  fetch(1, Bc);
  float lse[kM][2], dot[kM][2];
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = own_query + 16 * m + 8 * half + g;
      const size_t at = size_t(head) * padded(p.Nq) + query;
      lse[m][half] = query < p.Nq ? a.LSE2[at] : INFINITY;
      dot[m][half] = query < p.Nq ? a.row_dot[at] : 0.0f;
    }
  cp_async_wait<1>();
  __syncthreads();

  float dq[kM][D / 8][4] = {};
  for (int key0 = 0, stage = 0; key0 < keys; key0 += Bc, stage ^= 1) {
#pragma unroll
    for (int c = 0; c < Bc; c += S::kChunk) {
      const int chunk_key = key0 + c;
      if (keys_seen(p, own_query + S::kWarpQueries - 1) <= chunk_key) continue;
      float s[kM][kN][4], dp[kM][kN][4];
      dot_rows<D>(s, tile.Q, own_row, tile.K[stage], c);
      dot_rows<D>(dp, tile.dO, own_row, tile.V[stage], c);
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int m = 0; m < kM; m++) {
          const unsigned kept =
              kDropout ? kept_of_row_block(drop, head, own_query + 16 * m, chunk_key + 8 * n) : 0;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float grad = dp[m][n][i];
            if (kDropout) grad = kept >> i & 1 ? grad * drop.kept_scale : 0.0f;
            dp[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale2, -lse[m][i / 2])) * (grad - dot[m][i / 2]);
          }
        }
      if (keys_seen(p, own_query) < chunk_key + S::kChunk || own_query + S::kWarpQueries > p.Nq) {
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int query = own_query + 16 * m + 8 * half + g;
            const int seen = query < p.Nq ? keys_seen(p, query) - chunk_key - 2 * t : 0;
#pragma unroll
            for (int n = 0; n < kN; n++)
#pragma unroll
              for (int e = 0; e < 2; e++)
                if (8 * n + e >= seen) dp[m][n][2 * half + e] = 0.0f;
          }
      }
#pragma unroll
      for (int k = 0; k < kN / 2; k++) {
        uint32_t r[kM][4];
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            r[m][i] = pack<T>(dp[m][2 * k + i / 2][i % 2 * 2], dp[m][2 * k + i / 2][i % 2 * 2 + 1]);
        add_rows<D>(dq, r, tile.K[stage], c + 16 * k);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
    fetch(stage, key0 + 2 * Bc);
  }
  store_rows<D, T>(dq, a.scale, tile.Q, own_row, a.dQ + row0 * D, own_query, p.Nq);
}

template <class Keys, class Queries, bool kDropout>
void backward_with(const Problem& p, const Tensors& t, Stream stream) {
  using T = typename Keys::T;
  constexpr int D = Keys::D;
  const Arrays<T> a = {static_cast<const T*>(t.Q), static_cast<const T*>(t.K), static_cast<const T*>(t.V),
                       static_cast<const T*>(t.O), static_cast<const T*>(t.dO), static_cast<const float*>(t.LSE),
                       t.scratch<float>("LSE2"), t.scratch<float>("D"),
                       p.deterministic ? nullptr : t.scratch<float>("sum of dQ"), static_cast<T*>(t.dQ),
                       static_cast<T*>(t.dK), static_cast<T*>(t.dV), float(p.scale)};
  const Dropout drop(p);
  const size_t pieces = p.query_heads() * padded(p.Nq) * (D / 8);
  const dim3 key_grid = grid_of(p.kv_heads() * ceil_div(p.Nk, Keys::Bc));
  const size_t key_bytes = sizeof(typename Keys::Tiles);
  if (p.deterministic) {
    launch(row_dots<T, D, false>, grid_of(ceil_div(pieces, 256u)), 256, 0, stream, p, a);
    launch(keys_gradient<Keys, kDropout, false>, key_grid, Keys::kThreads, key_bytes, stream, p, drop, a);
    launch(queries_gradient<Queries, kDropout>, grid_of(p.query_heads() * ceil_div(p.Nq, Queries::Br)),
           Queries::kThreads, sizeof(typename Queries::Tiles), stream, p, drop, a);
  } else {
    launch(row_dots<T, D, true>, grid_of(ceil_div(pieces, 256u)), 256, 0, stream, p, a);
    launch(keys_gradient<Keys, kDropout, true>, key_grid, Keys::kThreads, key_bytes, stream, p, drop, a);
    launch(convert_dQ<T, D, Keys::kRed>, grid_of(ceil_div(p.q_elements() / 8, 256u)), 256, 0, stream, p, a);
  }
}

#ifndef TUNE
template <class T>
void backward_in(const Problem& p, const Tensors& t, Stream stream) {
  using Keys64 = Shape<T, 64, 4, 2, 1, 64, 16, 2>;
  using Queries64 = QueryShape<T, 64, 4, 2, 64, 32, 2>;
  using Keys128 = Shape<T, 128, 4, 2, 2, 64, 32, 1>;
  using Small128 = Shape<T, 128, 2, 2, 2, 32, 32, 1>;
  using Queries128 = QueryShape<T, 128, 4, 2, 32, 32, 2>;
  const bool drops = p.dropout > 0;
  if (p.D == 64)
    return drops ? backward_with<Keys64, Queries64, true>(p, t, stream)
                 : backward_with<Keys64, Queries64, false>(p, t, stream);
  if (sizeof(typename Keys128::Tiles) <= shared_memory_limit())
    return drops ? backward_with<Keys128, Queries128, true>(p, t, stream)
                 : backward_with<Keys128, Queries128, false>(p, t, stream);
  return drops ? backward_with<Small128, Queries128, true>(p, t, stream)
               : backward_with<Small128, Queries128, false>(p, t, stream);
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.dtype == DType::bf16) return backward_in<__nv_bfloat16>(p, t, stream);
  return backward_in<__half>(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.query_heads() * padded(p.Nq) * sizeof(float);
  std::vector<Workspace> needed = {{"LSE2", bytes}, {"D", bytes}};
  if (!p.deterministic) needed.push_back({"sum of dQ", bytes * p.D});
  return needed;
}

const Registration step = register_step(__FILE__, {.idea = "FlashAttention-2's gradient on tensor cores",
                                                   .rung = 4,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 80,
                                                   .workspace = workspace,
                                                   .backward = backward});
#endif

}  // namespace
