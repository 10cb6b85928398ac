// 04 online softmax, before it: a warp a row, in three passes.
//
//     scores   S = scale · Q Kᵀ, −∞ where the query does not see the key       Q, O [B, H, Nq, D]    K, V [B, H, Nk, D]
//     softmax  P = softmax(S), LSE                                             S, P [B, H, Nq, Nk]   fp32
//     weighted sum  O = P V
//
// New since 03: a row of S belongs to a warp, not to a thread. Its 32 lanes read 32 neighbours at once, and pass what
// each has found to the others by shuffles, without shared memory or a barrier. HBM still sees every element of S and P
// six times: written, read for the maximum, for the sum, for P, P written, P read. The exponential is the hardware's
// __expf, and a row is divided once, by its reciprocal.
//
// Page: docs/04_online_softmax.md.
#include "scores.h"

namespace {

constexpr int kRowsABlock = 8;  // a warp each

// Of all lanes of the warp, in every lane: after the steps 16, 8, 4, 2, 1 each has met all others.
__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// P = softmax(S) and LSE. __expf is a multiplication and the hardware's 2^x: its error grows with the distance from the
// maximum, where the weight shrinks much faster.
__global__ void softmax(Problem p, size_t rows, const float* S, float* P, float* LSE) {
  const size_t row = size_t(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  const int lane = int(threadIdx.x % 32);
  if (row >= rows) return;
  S += row * p.Nk, P += row * p.Nk;

  // Pass 1: the maximum.
  float m = -INFINITY;
#pragma unroll 4
  for (int j = lane; j < p.Nk; j += 32) m = fmaxf(m, S[j]);
  m = warp_max(m);
  if (m == -INFINITY) m = 0.0f;  // no key is seen; −∞ − (−∞) would not be a number

  // Pass 2: the sum.
  float l = 0.0f;
#pragma unroll 4
  for (int j = lane; j < p.Nk; j += 32) l += __expf(S[j] - m);
  l = warp_sum(l);

  // Pass 3: P.
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll 4
  for (int j = lane; j < p.Nk; j += 32) P[j] = __expf(S[j] - m) * inverse;
  if (lane == 0) LSE[row] = m + logf(l);  // log 0 = −∞
}

// A tile of P: rows [query0, query0 + kRows), keys [key0, key0 + kDepth); zeros past the end. A warp loads 32
// neighbours.
template <int kRows>
__device__ void load_weights(float (&tile)[kRows][kDepth + kTilePad], const float* P, int query0, int key0, int Nq,
                             int Nk) {
  const int column = int(threadIdx.x) % kDepth, key = key0 + column;
#pragma unroll 8
  for (int row = int(threadIdx.x) / kDepth; row < kRows; row += kThreads / kDepth) {
    const bool inside = query0 + row < Nq && key < Nk;
    tile[row][column] = inside ? P[size_t(query0 + row) * Nk + key] : 0.0f;
  }
}

// O = P V, as in chapter 03: a block computes Br rows, over the keys in pieces of kDepth.
template <int D>
struct SumTiles {
  static constexpr int R = D < 128 ? 8 : 4, C = D / 8, Br = kWarps * 4 * R;
  float P[Br][kDepth + kTilePad];
  float V[kDepth][D + kTilePad];
};

template <int D>
__global__ void __launch_bounds__(kThreads, 3) weighted_sum(Problem p, const float* P, const float* V, float* O) {
  constexpr int R = SumTiles<D>::R, C = SumTiles<D>::C, Br = SumTiles<D>::Br;
  SumTiles<D>& tile = *dynamic_shared<SumTiles<D>>();
  const WarpPlace place;
  const int query_tiles = ceil_div(p.Nq, Br), block = int(blockIdx.x);
  const int head = block / query_tiles, query0 = block % query_tiles * Br;
  P += size_t(head) * p.Nq * p.Nk, V += size_t(head) * p.Nk * D, O += size_t(head) * p.Nq * D;

  float o[R][C] = {};
  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no query of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += kDepth) {
    __syncthreads();  // every warp is done with the last tiles
    load_weights(tile.P, P, query0, key0, p.Nq, p.Nk);
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
  float *S = t.scratch<float>("S"), *P = t.scratch<float>("P");
  const size_t rows = p.query_rows(), O_tiles = p.query_heads() * ceil_div(p.Nq, SumTiles<D>::Br);

  launch_scores(p, Q, K, S, stream);
  launch(softmax, grid_of(ceil_div(rows, unsigned(kRowsABlock))), kRowsABlock * 32, 0, stream, p, rows, S, P,
         static_cast<float*>(t.LSE));
  launch(weighted_sum<D>, grid_of(O_tiles), kThreads, sizeof(SumTiles<D>), stream, p, P, V, static_cast<float*>(t.O));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  const auto run = p.D == 32 ? forward_for<32> : p.D == 64 ? forward_for<64> : forward_for<128>;
  run(p, t, stream);
}

std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.scores() * sizeof(float);
  return {{"S", bytes}, {"P", bytes}};
}

const Registration step = register_step(__FILE__, {.idea = "softmax with a warp a row, in three passes",
                                                   .rung = 1,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .forward = forward});

}  // namespace
