// 03 tiling, in registers: the same products, each thread with a block of results.
//
//     scores   S = scale · Q Kᵀ, −∞ where the query does not see the key       Q, O [B, H, Nq, D]    K, V [B, H, Nk, D]
//     softmax  P = softmax(S), LSE                                             S, P [B, H, Nq, Nk]   fp32
//     weighted sum  O = P V
//
// New since shared_tiles.cu: there, every multiplication waits for two loads from shared memory. Here a thread computes
// R rows and C columns of the result: R + C loads feed R · C multiplications. The loads that feed them are of 16 bytes,
// and placed so that no two of them want the same bank.
//
// The chapters from 04 on take these products from steps/harness/register_tiles.h, which is the outcome of this file.
//
// Page: docs/03_tiling.md.
#include "softmax.h"

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kDepth = 32;  // how much of the sums a tile holds: columns of Q and K for S, keys for O
constexpr int kPad = 4;     // floats after each row of a tile: rows that are read together fall in different banks

// ---- Who computes what. A warp's 32 lanes stand 4 high and 8 wide. With R rows and C columns a thread, a warp
// computes 4R rows of 8C columns; a thread's columns are groups of four neighbours, so that it can store a float4.
struct WarpPlace {
  int warp = int(threadIdx.x / 32), y = int(threadIdx.x % 32 / 8), x = int(threadIdx.x % 8);

  template <int R>
  __device__ int row(int r) const {
    return warp * 4 * R + 4 * r + y;
  }
  __device__ int column(int c) const { return c / 4 * 32 + 4 * x + c % 4; }
};

// Where row j of K is stored in its tile (V too, which would not need it: chapter 06 uses one tile as K and as V). The
// 8 lanes beside each other read rows of K 4 apart, which the padding alone would put in only two groups of banks;
// stored in this order, those are 8 neighbouring rows: 8 groups of four banks.
__device__ constexpr int slot(int j) { return (j / 32 * 4 + j % 4) * 8 + j % 32 / 4; }

// ---- Load: rows [row0, row0 + kRows) of kCols columns, 16 bytes a thread at a time, from a matrix whose rows are
// `stride` apart. Rows past the end become zeros. Four loads are under way before the first is stored; the pointer that
// walks along costs fewer registers than an address for each.
template <int kRows, int kCols, bool kSlots>
__device__ void load_tile(float (&tile)[kRows][kCols + kPad], const float* matrix, int row0, int rows, int stride) {
  constexpr int kStep = kThreads / (kCols / 4);  // rows that the block loads at a time
  const int first = int(threadIdx.x) / (kCols / 4), column = int(threadIdx.x) % (kCols / 4) * 4;
  const float* from = matrix + size_t(row0 + first) * stride + column;
#pragma unroll 4
  for (int row = first; row < kRows; row += kStep, from += kStep * stride) {
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row0 + row < rows) four = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(&tile[kSlots ? slot(row) : row][column]) = four;
  }
}

// The same for P, whose rows have any length: they start at multiples of 4 bytes only. A warp loads 32 neighbours.
template <int kRows>
__device__ void load_weights(float (&tile)[kRows][kDepth + kPad], const float* P, int query0, int key0, int Nq,
                             int Nk) {
  const int column = int(threadIdx.x) % kDepth;
#pragma unroll 8
  for (int row = int(threadIdx.x) / kDepth; row < kRows; row += kThreads / kDepth)
    tile[row][column] = query0 + row < Nq && key0 + column < Nk ? P[size_t(query0 + row) * Nk + key0 + column] : 0.0f;
}

// ---- Multiply. sum[r][c] += Σ_d A[row r][d] · B[column c][d], four d at a time: R + C loads for 4 · R · C
// multiplications. Arrays in registers must be indexed by constants, so their loops are unrolled.
template <int R, int C, int kRowsA, int kRowsB>
__device__ void add_dots(float (&sum)[R][C], const float (&A)[kRowsA][kDepth + kPad],
                         const float (&B)[kRowsB][kDepth + kPad]) {
  const WarpPlace place;
#pragma unroll 2
  for (int d = 0; d < kDepth; d += 4) {
    float4 a[R];
#pragma unroll
    for (int r = 0; r < R; r++) a[r] = *reinterpret_cast<const float4*>(&A[place.row<R>(r)][d]);
#pragma unroll
    for (int c = 0; c < C; c++) {
      const float4 b = *reinterpret_cast<const float4*>(&B[c * 8 + place.x][d]);  // = slot(place.column(c))
#pragma unroll
      for (int r = 0; r < R; r++) {
        sum[r][c] = fmaf(a[r].x, b.x, sum[r][c]);
        sum[r][c] = fmaf(a[r].y, b.y, sum[r][c]);
        sum[r][c] = fmaf(a[r].z, b.z, sum[r][c]);
        sum[r][c] = fmaf(a[r].w, b.w, sum[r][c]);
      }
    }
  }
}

// sum[r][c] += Σ_j P[row r][j] · V[j][column c], over the keys that `sees(r, j)` says the row sees: a NaN in V must not
// reach a query that does not see it, and 0 · NaN = NaN.
template <int R, int C, int kRowsP, class Sees>
__device__ void add_weighted_rows(float (&sum)[R][C], const float (&P)[kRowsP][kDepth + kPad],
                                  const float (&V)[kDepth][8 * C + kPad], Sees sees) {
  const WarpPlace place;
#pragma unroll 2
  for (int j = 0; j < kDepth; j += 4) {
    float4 p[R];
#pragma unroll
    for (int r = 0; r < R; r++) p[r] = *reinterpret_cast<const float4*>(&P[place.row<R>(r)][j]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int c = 0; c < C; c += 4) {
        const float4 v = *reinterpret_cast<const float4*>(&V[slot(j) + 8 * k][place.column(c)]);  // slot(j + k)
#pragma unroll
        for (int r = 0; r < R; r++) {
          const float weight = k == 0 ? p[r].x : k == 1 ? p[r].y : k == 2 ? p[r].z : p[r].w;
          if (!sees(r, j + k)) continue;
          sum[r][c] = fmaf(weight, v.x, sum[r][c]);
          sum[r][c + 1] = fmaf(weight, v.y, sum[r][c + 1]);
          sum[r][c + 2] = fmaf(weight, v.z, sum[r][c + 2]);
          sum[r][c + 3] = fmaf(weight, v.w, sum[r][c + 3]);
        }
      }
    }
  }
}

// ---- Scores: a block computes Br x Bc of S, over D in pieces of kDepth.
struct ScoreTiles {
  static constexpr int R = 8, C = 8, Br = kWarps * 4 * R, Bc = 8 * C;  // 128 queries, 64 keys
  float Q[Br][kDepth + kPad];
  float K[Bc][kDepth + kPad];
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
      load_tile<Br, kDepth, false>(tile.Q, Q + d, query0, p.Nq, p.D);
      load_tile<Bc, kDepth, true>(tile.K, K + d, key0, p.Nk, p.D);
      __syncthreads();  // the new ones are complete
      add_dots(s, tile.Q, tile.K);
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

// ---- Weighted sum: a block computes Br rows of O, all D columns of them, over the keys in pieces of kDepth.
template <int D>
struct SumTiles {
  static constexpr int R = D < 128 ? 8 : 4, C = D / 8, Br = kWarps * 4 * R;
  float P[Br][kDepth + kPad];
  float V[kDepth][D + kPad];
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
    __syncthreads();
    load_weights(tile.P, P, query0, key0, p.Nq, p.Nk);
    load_tile<kDepth, D, true>(tile.V, V, key0, p.Nk, D);
    __syncthreads();
    if (p.causal && key0 + kDepth > keys_seen(p, query0))
      add_weighted_rows(o, tile.P, tile.V,
                        [&](int r, int j) { return key0 + j < keys_seen(p, query0 + place.row<R>(r)); });
    else
      add_weighted_rows(o, tile.P, tile.V, [](int, int) { return true; });
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
  const size_t S_tiles = p.query_heads() * ceil_div(p.Nq, ScoreTiles::Br) * ceil_div(p.Nk, ScoreTiles::Bc);
  const size_t O_tiles = p.query_heads() * ceil_div(p.Nq, SumTiles<D>::Br);

  launch(scores, grid_of(S_tiles), kThreads, sizeof(ScoreTiles), stream, p, Q, K, S);
  launch_softmax(p, S, P, static_cast<float*>(t.LSE), stream);
  launch(weighted_sum<D>, grid_of(O_tiles), kThreads, sizeof(SumTiles<D>), stream, p, P, V, static_cast<float*>(t.O));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  const auto run = p.D == 32 ? forward_for<32> : p.D == 64 ? forward_for<64> : forward_for<128>;
  run(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "matrix products with a block of results in each thread",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .forward = forward});

}  // namespace
