// 04 online softmax: maximum and sum of a row in one pass.
//
//     scores      S = scale · Q Kᵀ, −∞ where the query does not see the key    Q, O [B, H, Nq, D]    K, V [B, H, Nk, D]
//     statistics  m = max S, l = Σ exp(S − m) of each row, LSE                 S [B, H, Nq, Nk]      fp32
//     weighted sum  O = P V, P = exp(S − m) / l                                m, 1 / l [B, H, Nq]
//
// New since three_pass.cu: the sum does not wait for the maximum. It is kept relative to the maximum so far, and
// shrinks when that grows. With m and l known, P need not be stored either: the weighted sum makes it from S when it
// loads a tile. HBM sees every element of S three times: written, read for m and l, read for O. P is never there.
//
// Page: docs/04_online_softmax.md.  Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax",
// Algorithm 3 and section 3.1.
#include "scores.h"

namespace {

constexpr int kRowsABlock = 8;  // a warp each

// What is known of some scores of a row: their maximum m, and l = Σ exp(s − m). Of none: m = −∞, l = 0.
struct Partial {
  float m, l;
};

// Of both together: each sum shrinks by as much as its maximum was too low. The order of merging does not matter, so
// the scores may be cut up among lanes here, and among tiles from chapter 05 on.
__device__ Partial merge(Partial a, Partial b) {
  const float m = fmaxf(a.m, b.m);
  const float from = m == -INFINITY ? 0.0f : m;  // nothing seen yet; −∞ − (−∞) would not be a number
  return {m, a.l * __expf(a.m - from) + b.l * __expf(b.m - from)};
}

// m, 1 / l and LSE of each row. __expf is a multiplication and the hardware's 2^x: its error grows with the distance
// from the maximum, where the weight shrinks much faster.
__global__ void row_statistics(Problem p, size_t rows, const float* S, float2* statistics, float* LSE) {
  const size_t row = size_t(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  const int lane = int(threadIdx.x % 32);
  if (row >= rows) return;
  S += row * p.Nk;

  // The one pass: each lane merges in its scores one by one.
  Partial seen = {-INFINITY, 0.0f};
#pragma unroll 4
  for (int j = lane; j < p.Nk; j += 32) seen = merge(seen, {S[j], 1.0f});

  // Then the lanes merge what they have.
  for (int step = 16; step > 0; step /= 2)
    seen = merge(seen, {__shfl_xor_sync(0xffffffffu, seen.m, step), __shfl_xor_sync(0xffffffffu, seen.l, step)});
  if (lane > 0) return;

  // LSE = m + log l alone would give P = exp(S − LSE), and chapter 06 uses that. Where scores are huge, adding log l to
  // m rounds it away; here m and l stay apart.
  statistics[row] = seen.l == 0.0f ? make_float2(0.0f, 0.0f) : make_float2(seen.m, 1.0f / seen.l);
  LSE[row] = seen.m + logf(seen.l);  // log 0 = −∞
}

// A tile of P, made from S on the way: rows [query0, query0 + kRows), keys [key0, key0 + kDepth); zeros past the end. A
// warp loads 32 neighbours.
template <int kRows>
__device__ void load_weights(float (&tile)[kRows][kDepth + kTilePad], const float* S, const float2 (&statistics)[kRows],
                             int query0, int key0, int Nq, int Nk) {
  const int column = int(threadIdx.x) % kDepth, key = key0 + column;
#pragma unroll 8
  for (int row = int(threadIdx.x) / kDepth; row < kRows; row += kThreads / kDepth) {
    const bool inside = query0 + row < Nq && key < Nk;
    const float s = inside ? S[size_t(query0 + row) * Nk + key] : -INFINITY;
    tile[row][column] = __expf(s - statistics[row].x) * statistics[row].y;
  }
}

// O = P V, as in chapter 03: a block computes Br rows, over the keys in pieces of kDepth.
template <int D>
struct SumTiles {
  static constexpr int R = D < 128 ? 8 : 4, C = D / 8, Br = kWarps * 4 * R;
  float P[Br][kDepth + kTilePad];
  float V[kDepth][D + kTilePad];
  float2 statistics[Br];
};

template <int D>
__global__ void __launch_bounds__(kThreads, 3)
    weighted_sum(Problem p, const float* S, const float2* statistics, const float* V, float* O) {
  constexpr int R = SumTiles<D>::R, C = SumTiles<D>::C, Br = SumTiles<D>::Br;
  SumTiles<D>& tile = *dynamic_shared<SumTiles<D>>();
  const WarpPlace place;
  const int query_tiles = ceil_div(p.Nq, Br), block = int(blockIdx.x);
  const int head = block / query_tiles, query0 = block % query_tiles * Br;
  S += size_t(head) * p.Nq * p.Nk, statistics += size_t(head) * p.Nq, V += size_t(head) * p.Nk * D;
  O += size_t(head) * p.Nq * D;

  for (int row = int(threadIdx.x); row < Br; row += kThreads)
    tile.statistics[row] = query0 + row < p.Nq ? statistics[query0 + row] : make_float2(0.0f, 0.0f);

  float o[R][C] = {};
  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no query of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += kDepth) {
    __syncthreads();  // every warp is done with the last tiles; the statistics are there
    load_weights(tile.P, S, tile.statistics, query0, key0, p.Nq, p.Nk);
    load_tile<kDepth, D, true>(tile.V, V, key0, p.Nk);
    __syncthreads();  // the new ones are complete
    if (p.causal && key0 + kDepth > keys_seen(p, query0))
      add_weighted_rows<R, C, kDepth, D>(
          o, tile.P, tile.V, [&](int r, int j, float) { return key0 + j < keys_seen(p, query0 + place.row<R>(r)); });
    else
      add_weighted_rows<R, C, kDepth, D>(o, tile.P, tile.V, AllTerms());
  }

#pragma unroll
  for (int r = 0; r < R; r++) {
    const int query = query0 + place.row<R>(r);
    if (query >= p.Nq) break;
#pragma unroll
    for (int c = 0; c < C; c += 4)
      *reinterpret_cast<float4*>(&O[size_t(query) * D + place.column(c)]) =
          make_float4(o[r][c], o[r][c + 1], o[r][c + 2], o[r][c + 3]);
  }
}

template <int D>
void forward_for(const Problem& p, const Tensors& t, Stream stream) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto* V = static_cast<const float*>(t.V);
  float* S = t.scratch<float>("S");
  float2* statistics = t.scratch<float2>("statistics");
  const size_t rows = p.query_rows(), O_tiles = p.query_heads() * ceil_div(p.Nq, SumTiles<D>::Br);

  launch_scores(p, Q, K, S, stream);
  launch(row_statistics, grid_of(ceil_div(rows, unsigned(kRowsABlock))), kRowsABlock * 32, 0, stream, p, rows, S,
         statistics, static_cast<float*>(t.LSE));
  launch(weighted_sum<D>, grid_of(O_tiles), kThreads, sizeof(SumTiles<D>), stream, p, S, statistics, V,
         static_cast<float*>(t.O));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  const auto run = p.D == 32 ? forward_for<32> : p.D == 64 ? forward_for<64> : forward_for<128>;
  run(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) {
  return {{"S", p.scores() * sizeof(float)}, {"statistics", p.query_rows() * sizeof(float2)}};
}

const Registration step = register_step(__FILE__, {.idea = "maximum and sum of a row in one pass; P is never stored",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .forward = forward});

}  // namespace
