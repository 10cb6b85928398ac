// 05 kernel fusion, the fast one: forward.cu with the products of chapter 03 inside.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE [B, Hq, Nq]    fp32
//
// New since forward.cu: a thread holds R rows and C keys of S in registers, and R rows and D/8 columns of O. Each
// number that it loads from shared memory takes part in R or C multiplications instead of one. And nobody waits for a
// tile: V comes from HBM while the scores are computed, the next K while the weighted sum is. What is computed, and in
// which order of tiles, is the same.
//
// Page: docs/05_kernel_fusion.md.  Source: FlashAttention (Dao et al. 2022), Algorithm 1, loops exchanged.
#include "harness/mask.h"
#include "harness/philox.h"
#include "harness/register_tiles.h"

namespace {
using namespace flash;

// The tiles of a block: kWarps warps with R query rows a thread, C keys a thread.
template <int D_, int R_, int C_, int kWarps_>
struct Shape {
  static constexpr int D = D_, R = R_, C = C_, kWarps = kWarps_;
  static constexpr int Br = kWarps * 4 * R;  // query rows of a block
  static constexpr int Bc = 8 * C;           // keys of a tile

  struct Tiles {  // shared memory
    float Q[Br][D + kTilePad];
    float K[Bc][D + kTilePad];
    float V[Bc][D + kTilePad];
    float P[Br][Bc + kTilePad];
  };
};

// `kDropout`: without it the draws take no registers.
template <class T, bool kDropout>
__global__ void __launch_bounds__(T::kWarps * 32, 2)
    fused_forward(Problem p, Dropout drop, const float* Q, const float* K, const float* V, float* O, float* LSE) {
  constexpr int R = T::R, C = T::C, D = T::D, Br = T::Br, Bc = T::Bc;
  auto& tile = *dynamic_shared<typename T::Tiles>();
  const WarpPlace place;

  // The block finds its work: a head, and a tile of its queries. With a causal mask the last queries see most keys;
  // they go first, so that no long block starts when the others are done.
  const int query_tiles = ceil_div(p.Nq, Br);
  const int head = int(blockIdx.x) / query_tiles;
  const int query0 = (query_tiles - 1 - int(blockIdx.x) % query_tiles) * Br;
  const int kv_head = head / (p.Hq / p.Hkv);  // Hkv divides Hq, so this holds across batches
  Q += size_t(head) * p.Nq * D, O += size_t(head) * p.Nq * D, LSE += size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;
  const float scale = float(p.scale);

  // What a thread carries from tile to tile. Its 8 lanes of a row have the same m; each has the sum l of its own keys.
  float m[R], l[R], o[R][D / 8];
#pragma unroll
  for (int r = 0; r < R; r++) {
    m[r] = -INFINITY, l[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 8; c++) o[r][c] = 0.0f;
  }
  load_tile<Br, D, false>(tile.Q, Q, query0, p.Nq);

  const int keys = keys_seen(p, min(query0 + Br, p.Nq) - 1);  // no row of the tile sees a key past these
  const int keys_for_all = keys_seen(p, query0);              // every row sees the ones before this
  TileInFlight<Bc, D, T::kWarps * 32> in_flight;
  if (keys > 0) in_flight.fetch(K, 0, p.Nk);
  if (keys > 0) in_flight.store(tile.K);
  for (int key0 = 0; key0 < keys; key0 += Bc) {
    __syncthreads();                 // every warp sees this K, and is done with the last V
    in_flight.fetch(V, key0, p.Nk);  // arrives while the scores are computed

    // Scores.
    float s[R][C] = {};
    add_dots<R, C, D>(s, tile.Q, tile.K);

    const bool some_unseen = key0 + Bc > keys_for_all;
    int seen[R];  // how many keys of the tile each row sees
#pragma unroll
    for (int r = 0; r < R; r++) {
      // Online softmax of the thread's part of a row. Only tiles at the edge need the mask.
      const int query = query0 + place.row<R>(r);
      seen[r] = some_unseen ? min(keys_seen(p, query), keys) - key0 : Bc;
      float largest = m[r];
#pragma unroll
      for (int c = 0; c < C; c++) {
        s[r][c] = place.column(c) < seen[r] ? s[r][c] * scale : -INFINITY;
        largest = fmaxf(largest, s[r][c]);
      }
      largest = row_max(largest);
      const float from = largest == -INFINITY ? 0.0f : largest;  // no key seen yet: ∞ − ∞ is not a number
      const float shrink = __expf(m[r] - from);
      m[r] = largest;
      l[r] *= shrink;
#pragma unroll
      for (int c = 0; c < C; c++) {
        s[r][c] = __expf(s[r][c] - from);
        l[r] += s[r][c];
      }
#pragma unroll
      for (int c = 0; c < D / 8; c++) o[r][c] *= shrink;

      // Dropout takes weights out of O, not out of l. Four neighbouring keys share a draw.
      if constexpr (kDropout) {
#pragma unroll
        for (int c = 0; c < C; c += 4) {
          const uint4 word = drop.words(head, query, (key0 + place.column(c)) / 4);
          s[r][c] = word.x >= drop.threshold ? s[r][c] * drop.kept_scale : kDropped;
          s[r][c + 1] = word.y >= drop.threshold ? s[r][c + 1] * drop.kept_scale : kDropped;
          s[r][c + 2] = word.z >= drop.threshold ? s[r][c + 2] * drop.kept_scale : kDropped;
          s[r][c + 3] = word.w >= drop.threshold ? s[r][c + 3] * drop.kept_scale : kDropped;
        }
      }
#pragma unroll
      for (int c = 0; c < C; c += 4)
        *reinterpret_cast<float4*>(&tile.P[place.row<R>(r)][place.column(c)]) =
            make_float4(s[r][c], s[r][c + 1], s[r][c + 2], s[r][c + 3]);
    }

    in_flight.store(tile.V);
    in_flight.fetch(K, key0 + Bc, p.Nk);  // the next tile's, arrives while the weighted sum is computed
    __syncthreads();                      // every warp sees this V, and is done with this K

    // Weighted sum of V. The weights of a row were computed by the 8 lanes of one warp and are read by the same 8.
    if (kDropout || some_unseen)
      add_weighted_rows<R, D / 8, Bc, D>(o, tile.P, tile.V, [&](int r, int j, float weight) {
        return j < seen[r] && !(kDropout && is_dropped(weight));
      });
    else
      add_weighted_rows<R, D / 8, Bc, D>(o, tile.P, tile.V, AllTerms());
    in_flight.store(tile.K);
  }

#pragma unroll
  for (int r = 0; r < R; r++) {
    const int query = query0 + place.row<R>(r);
    const float sum = row_sum(l[r]);
    if (query >= p.Nq) continue;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int c = 0; c < D / 8; c += 4)
      *reinterpret_cast<float4*>(&O[size_t(query) * D + place.column(c)]) =
          make_float4(o[r][c] * inverse, o[r][c + 1] * inverse, o[r][c + 2] * inverse, o[r][c + 3] * inverse);
    if (place.x == 0) LSE[query] = sum == 0.0f ? -INFINITY : m[r] + logf(sum);
  }
}

template <class T>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch(p.dropout > 0 ? fused_forward<T, true> : fused_forward<T, false>,
         grid_of(p.query_heads() * ceil_div(p.Nq, T::Br)), T::kWarps * 32, sizeof(typename T::Tiles), stream, p,
         Dropout(p), static_cast<const float*>(t.Q), static_cast<const float*>(t.K), static_cast<const float*>(t.V),
         static_cast<float*>(t.O), static_cast<float*>(t.LSE));
}

// The large tiles where a block may have that much shared memory, else (a T4 has 64 KB) the small ones.
template <class Large, class Small>
void forward_for(const Problem& p, const Tensors& t, Stream stream) {
  if (sizeof(typename Large::Tiles) <= shared_memory_limit())
    forward_with<Large>(p, t, stream);
  else
    forward_with<Small>(p, t, stream);
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.D == 32) return forward_with<Shape<32, 8, 4, 4>>(p, t, stream);  // 45 KB: for every GPU
  if (p.D == 64) return forward_for<Shape<64, 8, 4, 4>, Shape<64, 4, 4, 4>>(p, t, stream);
  return forward_for<Shape<128, 4, 4, 4>, Shape<128, 2, 4, 4>>(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "the fused kernel with register tiles",
                                                   .rung = 3,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = {32, 64, 128},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 75,
                                                   .forward = forward});

}  // namespace
