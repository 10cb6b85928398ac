// 07 warp partitioning, the keys split: FlashAttention-1's way of sharing a tile among the warps of a block.
//
//     O = softmax(scale · Q Kᵀ) V    Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    fp16 or bf16    LSE [B, Hq, Nq]
//     fp32
//
// New since chapter 05: 16-bit inputs, and tensor cores for both products. The warps share the tile's query rows; each
// has a quarter of its keys. So no warp knows all of a row: the maxima meet in shared memory, and so do the warps'
// parts of P V, D numbers a row from each warp, for every tile of keys.
//
// Page: docs/07_warp_partitioning.md.  Source: FlashAttention-2 (Dao 2023), section 3.3, which calls it "split-K".
#include "warp_tiles.h"

namespace {

constexpr int Br = 64;  // query rows of a block
constexpr int Bc = 64;  // keys of a tile
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowTiles = Br / 16;  // a warp computes all of them …
constexpr int kKeys = Bc / kWarps;  // … for these keys: 16, one step of the second product
constexpr int kOwned = Br / 16;     // rows of O that a thread adds up: threadIdx.x / 8 + 16 · r
static_assert(kKeys == 16);

// kWidth: columns of O that the warps exchange at a time.
template <int D, int kWidth, class T>
struct Tiles {  // shared memory
  T Q[Br * D];
  T K[Bc * D];
  T V[Bc * D];
  float m[Br];  // the maxima up to the last tile
  float largest[kWarps][Br];
  float part[kWarps][Br][kWidth + 8];  // of P V. 8 more, and the lanes of half a warp write to 32 different banks
};

template <int D, int kWidth, class T, bool kDropout>
__global__ void __launch_bounds__(kThreads)
    split_k_forward(Problem p, Dropout drop, const T* Q, const T* K, const T* V, T* O, float* LSE) {
  auto& tile = *dynamic_shared<Tiles<D, kWidth, T>>();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  // The block finds its work: a head, and a tile of its queries, longest first (chapter 05).
  const int query_tiles = ceil_div(p.Nq, Br);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;
  const int kv_head = head / (p.Hq / p.Hkv);
  Q += size_t(head) * p.Nq * D, O += size_t(head) * p.Nq * D, LSE += size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  const float scale = float(p.scale);

  // What a thread carries from tile to tile. As a lane of the products: the sum of its own weights, for the rows
  // 16 · (r / 2) + 8 · (r % 2) + g. As owner of a piece of O: 4 columns in every 32, for kOwned rows.
  float l[2 * kRowTiles], o[kOwned][D / 32][4] = {};
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; r++) l[r] = 0.0f;
  const int owned_row = threadIdx.x / 8, owned_column = threadIdx.x % 8 * 4;

  if (threadIdx.x < Br) tile.m[threadIdx.x] = -INFINITY;
  start_tile<Br, D, kThreads>(tile.Q, Q, query0, p.Nq);

  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    // Every warp is done with the last K and V: all had to be, before their parts of O could be added.
    start_tile<Bc, D, kThreads>(tile.K, K, key0, p.Nk);
    start_tile<Bc, D, kThreads>(tile.V, V, key0, p.Nk);
    cp_async_commit();
    cp_async_wait<0>();
    const bool at_edge = kDropout || key0 + Bc > keys_seen(p, query0);  // some row leaves keys of the tile out
    const bool taken_out = __syncthreads_or(at_edge && take_out_non_finite<Bc, D, kThreads>(tile.V));
    // Every warp sees the new tiles.

    // Scores: all rows, the warp's 16 keys.
    float s[kRowTiles][2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t b[2][2];
      load_b_transposed<D>(b, tile.K, corner_by_chunks<D>(), kKeys * warp, k);
#pragma unroll
      for (int i = 0; i < kRowTiles; i++) {
        uint32_t q[4];
        load_a<D>(q, tile.Q, corner_by_rows<D>(), 16 * i, k);
        mma_m16n8k16<T>(s[i][0], q, b[0]);
        mma_m16n8k16<T>(s[i][1], q, b[1]);
      }
    }

    // The maximum of a row: of the warp's keys first, then, through shared memory, of the tile's.
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; r++) {
      const int row = r / 2 * 16 + r % 2 * 8 + g;
      const int seen = keys_seen(p, query0 + row) - key0 - kKeys * warp;
      float largest = -INFINITY;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float& x = s[r / 2][c / 2][r % 2 * 2 + c % 2];
        x = c / 2 * 8 + 2 * t + c % 2 < seen ? x * scale : -INFINITY;
        largest = fmaxf(largest, x);
      }
      largest = quad_max(largest);
      if (t == 0) tile.largest[warp][row] = largest;
    }
    __syncthreads();  // every warp sees the maxima
    const auto new_m = [&](int row) {
      float largest = tile.m[row];
#pragma unroll
      for (int w = 0; w < kWarps; w++) largest = fmaxf(largest, tile.largest[w][row]);
      return largest;
    };

    // Online softmax.
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; r++) {
      const int row = r / 2 * 16 + r % 2 * 8 + g;
      const float m = new_m(row);
      const float from = m == -INFINITY ? 0.0f : m;  // no key seen yet: ∞ − ∞ is not a number
      l[r] *= exp2_fast((tile.m[row] - from) * kLog2e);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float& x = s[r / 2][c / 2][r % 2 * 2 + c % 2];
        x = exp2_fast((x - from) * kLog2e);
        l[r] += x;
      }
    }
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float(&x)[4] = s[i][half];
        if constexpr (kDropout) drop_weights(x, drop, head, query0 + 16 * i + g, key0 + kKeys * warp + 8 * half);
        a[i][2 * half] = pack<T>(x[0], x[1]), a[i][2 * half + 1] = pack<T>(x[2], x[3]);
      }
#pragma unroll
    for (int r = 0; r < kOwned; r++) {
      const int row = owned_row + 16 * r;
      const float m = new_m(row);
      const float shrink = m == -INFINITY ? 0.0f : exp2_fast((tile.m[row] - m) * kLog2e);
#pragma unroll
      for (int c = 0; c < D / 32; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[r][c][e] *= shrink;
    }

    // Weighted sum of V: each warp has a part of every row's, for its keys. kWidth columns at a time the parts meet in
    // shared memory, and the owners add them up.
#pragma unroll
    for (int column0 = 0; column0 < D; column0 += kWidth) {
      if (column0 > 0) __syncthreads();  // the parts before these have been added up
      float part[kRowTiles][kWidth / 8][4] = {};
#pragma unroll
      for (int n = 0; n < kWidth / 16; n++) {
        uint32_t b[2][2];
        load_b<D>(b, tile.V, corner_by_rows<D>(), kKeys * warp, column0 / 16 + n);
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
          mma_m16n8k16<T>(part[i][2 * n], a[i], b[0]);
          mma_m16n8k16<T>(part[i][2 * n + 1], a[i], b[1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2 * kRowTiles; r++)
#pragma unroll
        for (int n = 0; n < kWidth / 8; n++)
          *reinterpret_cast<float2*>(&tile.part[warp][r / 2 * 16 + r % 2 * 8 + g][8 * n + 2 * t]) =
              make_float2(part[r / 2][n][r % 2 * 2], part[r / 2][n][r % 2 * 2 + 1]);
      __syncthreads();  // every part is there, and the old maxima have been read
      if (column0 == 0 && threadIdx.x < Br) tile.m[threadIdx.x] = new_m(threadIdx.x);
#pragma unroll
      for (int r = 0; r < kOwned; r++)
#pragma unroll
        for (int c = 0; c < kWidth / 32; c++)
#pragma unroll
          for (int w = 0; w < kWarps; w++) {
            const float4 x = *reinterpret_cast<const float4*>(&tile.part[w][owned_row + 16 * r][32 * c + owned_column]);
            float(&sum)[4] = o[r][column0 / 32 + c];
            sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
          }
    }
    if (taken_out)
      for (int j = key0; j < min(key0 + Bc, keys); j++)
#pragma unroll
        for (int i = 0; i < kOwned * D / 8; i++) {
          const int r = i / (D / 8), c = i / 4 % (D / 32), e = i % 4, query = query0 + owned_row + 16 * r;
          const float v = float(V[size_t(j) * D + 32 * c + owned_column + e]);
          if (!is_finite(v) && j < keys_seen(p, query) && (!kDropout || drop.keeps(head, query, j))) o[r][c][e] += v;
        }
  }

  // The sums of the weights meet too, once. Then the owners divide.
  __syncthreads();  // every warp has read the last maxima
#pragma unroll
  for (int r = 0; r < 2 * kRowTiles; r++) {
    const float sum = quad_sum(l[r]);
    if (t == 0) tile.largest[warp][r / 2 * 16 + r % 2 * 8 + g] = sum;
  }
  __syncthreads();  // every warp sees the sums
#pragma unroll
  for (int r = 0; r < kOwned; r++) {
    const int row = owned_row + 16 * r, query = query0 + row;
    if (query >= p.Nq) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) sum += tile.largest[w][row];
    const float factor = sum == 0.0f ? 0.0f : drop.kept_scale / sum;
#pragma unroll
    for (int c = 0; c < D / 32; c++)
      *reinterpret_cast<uint2*>(&O[size_t(query) * D + 32 * c + owned_column]) = make_uint2(
          pack<T>(o[r][c][0] * factor, o[r][c][1] * factor), pack<T>(o[r][c][2] * factor, o[r][c][3] * factor));
    if (owned_column == 0) LSE[query] = sum == 0.0f ? -INFINITY : tile.m[row] + logf(sum);
  }
}

template <int D, int kWidth, class T, bool kDropout>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch(split_k_forward<D, kWidth, T, kDropout>, grid_of(p.query_heads() * ceil_div(p.Nq, Br)), kThreads,
         sizeof(Tiles<D, kWidth, T>), stream, p, Dropout(p), static_cast<const T*>(t.Q), static_cast<const T*>(t.K),
         static_cast<const T*>(t.V), static_cast<T*>(t.O), static_cast<float*>(t.LSE));
}

// 64 columns at a time take 121 KB of shared memory at D 128; where a block may not have that much, 32 take 89 KB.
template <class T, bool kDropout>
void forward_of(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 64) return forward_with<64, 64, T, kDropout>(p, t, stream);
  if (sizeof(Tiles<128, 64, T>) <= shared_memory_limit()) return forward_with<128, 64, T, kDropout>(p, t, stream);
  forward_with<128, 32, T, kDropout>(p, t, stream);
}

template <class T>
void forward_in(const Problem& p, const Tensors& t, Stream stream) {
  p.dropout > 0 ? forward_of<T, true>(p, t, stream) : forward_of<T, false>(p, t, stream);
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  p.dtype == DType::fp16 ? forward_in<__half>(p, t, stream) : forward_in<__nv_bfloat16>(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "tensor cores; the warps split the keys and exchange",
                                                   .rung = 1,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 80,
                                                   .forward = forward});

}  // namespace
