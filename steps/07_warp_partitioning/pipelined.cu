// 07 warp partitioning, the fast one: split_q.cu with tiles that arrive while others are computed.
//
//     O = softmax(scale · Q Kᵀ) V    Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    fp16 or bf16    LSE [B, Hq, Nq]
//     fp32
//
// New since split_q.cu. Two tiles each of K and V: cp.async fills one pair while the other is used, and one barrier a
// tile is left. A warp owns 32 rows, so that an operand b that it has loaded serves two products. And the softmax is
// cut down to what a score cannot do without: one FMA and one exp2, a sum, half a conversion. The scale is part of the
// FMA; the largest score is only looked at to see that it is not too large; only tiles at the edge are masked.
//
// Page: docs/07_warp_partitioning.md.  Sources: FlashAttention-2 (Dao 2023), section 3; FlashAttention-4's rule when to
// rescale.
#include <cfloat>

#include "warp_tiles.h"

namespace {

// kRowTiles tiles of 16 query rows for a warp, kWarps warps, tiles of Bc keys; kBlocks blocks on an SM, which bounds
// the registers. kKeep: there are enough of them to keep Q, and what scores are measured from, instead of making both
// anew for every tile.
template <int D_, int kRowTiles_, int kWarps_, int Bc_, int kBlocks_, bool kKeep_>
struct Shape {
  static constexpr int D = D_, kRowTiles = kRowTiles_, kWarps = kWarps_, Bc = Bc_, kBlocks = kBlocks_;
  static constexpr bool kKeep = kKeep_;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kRowTiles, Br = kWarpRows * kWarps;
  // Shared memory, in elements: Q, two tiles of K, two of V.
  static constexpr int kAtK = Br * D, kAtV = kAtK + 2 * Bc * D, kElements = kAtV + 2 * Bc * D;
};

constexpr float kSlack = 8.0f;   // a row's reference stays until a score is 2⁸ times as heavy
constexpr float kFar = 4096.0f;  // a reference beyond which scaling before subtracting would round too coarsely

template <class S>
using Scores = float[S::kRowTiles][S::Bc / 8][4];

// What a score is measured against: m, a score that was the largest of its row. Its weight is 2^(c · s − c · m), in one
// FMA, with `scaled` for c · m. Where that product is so large that its rounding would matter, m is subtracted first.
struct Reference {
  float raw, scaled;

  __device__ __forceinline__ Reference(float m, float c) {
    const bool far = fabsf(m * c) > kFar;  // or −∞: no score seen yet
    raw = far && m != -INFINITY ? m : 0.0f;
    scaled = far ? 0.0f : m * c;
  }
};

// What a warp carries from tile to tile. Row r of a lane is row 16 · (r / 2) + 8 · (r % 2) + g of the warp.
template <class S>
struct Rows {
  static constexpr int kRows = 2 * S::kRowTiles;
  float m[kRows];
  float kept_scaled[S::kKeep ? kRows : 1];  // of the references, if kept
  float l[kRows];                           // sums of the lane's own weights
  float o[S::kRowTiles][S::D / 8][4];

  __device__ Rows() {
#pragma unroll
    for (int r = 0; r < kRows; r++) m[r] = -INFINITY, l[r] = 0.0f;
    if constexpr (S::kKeep) {
#pragma unroll
      for (int r = 0; r < kRows; r++) kept_scaled[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < S::kRowTiles; i++)
#pragma unroll
      for (int n = 0; n < S::D / 8; n++) o[i][n][0] = o[i][n][1] = o[i][n][2] = o[i][n][3] = 0.0f;
  }

  // What the exponents of row r are measured from.
  __device__ __forceinline__ float scaled(int r, float c) const {
    if constexpr (S::kKeep)
      return kept_scaled[r];
    else
      return Reference(m[r], c).scaled;
  }

  // Takes a new m for the rows that need one, and brings what was summed under the old one to it.
  __device__ __forceinline__ void refer(Scores<S>& s, const float (&largest)[kRows], float c) {
    bool needed = false;
#pragma unroll
    for (int r = 0; r < kRows; r++) needed |= (largest[r] - m[r]) * c > kSlack || fabsf(m[r] * c) > kFar;
    if (!__any_sync(0xffffffffu, needed)) return;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float of_row = quad_max(largest[r]);
      const float m_new = (of_row - m[r]) * c > kSlack ? of_row : m[r];
      const Reference before(m[r], c), now(m_new, c);
      const float shrink =
          m[r] == -INFINITY ? 0.0f : exp2_fast(fmaf(before.raw - now.raw, c, before.scaled - now.scaled));
      m[r] = m_new, l[r] *= shrink;
      if constexpr (S::kKeep) kept_scaled[r] = now.scaled;
#pragma unroll
      for (int n = 0; n < S::D / 8; n++) o[r / 2][n][r % 2 * 2] *= shrink, o[r / 2][n][r % 2 * 2 + 1] *= shrink;
      if (now.raw != 0.0f)
#pragma unroll
        for (int n = 0; n < S::Bc / 8; n++) s[r / 2][n][r % 2 * 2] -= now.raw, s[r / 2][n][r % 2 * 2 + 1] -= now.raw;
    }
  }
};

// `c` is |scale| · log₂ e. `group`: how many heads are worked on at a time.
template <class S, class T, bool kDropout>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    pipelined_forward(Problem p, Dropout drop, float c, int group, const T* Q, const T* K, const T* V, T* O,
                      float* LSE) {
  constexpr int D = S::D, Bc = S::Bc, kRowTiles = S::kRowTiles, kRows = 2 * kRowTiles;
  T* const tile = dynamic_shared<T>();
  const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  const int row0 = int(threadIdx.x) / 32 * S::kWarpRows;  // of the warp, in the block

  // The block finds its work. Heads in groups, so that blocks that run together share K and V in L2; in a group the
  // last queries of every head come first: with a causal mask they see most keys.
  const int query_tiles = ceil_div(p.Nq, S::Br);
  const int head0 = int(blockIdx.x) / (group * query_tiles) * group;
  const int heads = min(group, p.B * p.Hq - head0);
  const int place = int(blockIdx.x) - head0 * query_tiles;
  const int head = head0 + place % heads;
  const int query0 = (query_tiles - 1 - place / heads) * S::Br;
  const int kv_head = head / (p.Hq / p.Hkv);
  Q += size_t(head) * p.Nq * D, O += size_t(head) * p.Nq * D, LSE += size_t(head) * p.Nq;
  K += size_t(kv_head) * p.Nk * D, V += size_t(kv_head) * p.Nk * D;

  const int keys = keys_seen(p, min(query0 + S::Br, p.Nq) - 1);  // no row of the tile sees a key past these
  const int tiles = ceil_div(keys, Bc);
  const int whole_tiles = min(keys_seen(p, query0), keys) / Bc;   // seen by every row
  const int seen_by_first = query0 + row0 + g + 1 - p.Nq + p.Nk;  // with a causal mask, by the lane's first row
  Rows<S> rows;

  // Starts the copies of key tile j. Past the last they write zeros.
  const auto start_keys = [&](int j) {
    start_tile<Bc, D, S::kThreads>(tile + S::kAtK + j % 2 * Bc * D, K, j * Bc, keys);
    start_tile<Bc, D, S::kThreads>(tile + S::kAtV + j % 2 * Bc * D, V, j * Bc, keys);
    cp_async_commit();
  };
  start_tile<S::Br, D, S::kThreads>(tile, Q, query0, p.Nq);
  start_keys(0);
  cp_async_wait<0>();

  // The sign of the scale goes into Q, where it is exact; what is left of the scale is positive. A thread turns the
  // elements that it copied itself, so that it need not wait for others.
  if (p.scale <= 0.0)
    for (int i = threadIdx.x; i < S::Br * D / 8; i += S::kThreads) {
      T* const chunk = &tile[swizzled<D>(i / (D / 8), i % (D / 8))];
      for (int e = 0; e < 8; e++) chunk[e] = T(float(chunk[e]) * (p.scale < 0.0 ? -1.0f : 0.0f));
    }
  __syncthreads();  // Q is there for all

  const int corner_Q = corner_by_rows<D>() + row0 * D;
  const auto load_Q = [&](uint32_t(&q)[kRowTiles][4], int k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) load_a<D>(q[i], tile, corner_Q, 16 * i, k);
  };
  uint32_t kept_Q[S::kKeep ? D / 16 : 1][kRowTiles][4];
  if constexpr (S::kKeep)
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_Q(kept_Q[k], k);

  for (int j = 0; j < tiles; j++) {
    // Tile j is there for all, and all are done with tile j − 1, where the next one goes.
    cp_async_wait<0>();
    bool taken_out = false;
    if (kDropout || j >= whole_tiles)
      taken_out = __syncthreads_or(take_out_non_finite<Bc, D, S::kThreads>(tile + S::kAtV + j % 2 * Bc * D));
    else
      __syncthreads();
    start_keys(j + 1);

    // Scores.
    const int corner_K = corner_by_chunks<D>() + S::kAtK + j % 2 * Bc * D;
    Scores<S> s = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t loaded_Q[kRowTiles][4];
      if constexpr (!S::kKeep) load_Q(loaded_Q, k);
      uint32_t(&q)[kRowTiles][4] = S::kKeep ? kept_Q[S::kKeep ? k : 0] : loaded_Q;
#pragma unroll
      for (int n = 0; n < Bc / 16; n++) {
        uint32_t b[2][2];
        load_b_transposed<D>(b, tile, corner_K, 16 * n, k);
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
          mma_m16n8k16<T>(s[i][2 * n], q[i], b[0]);
          mma_m16n8k16<T>(s[i][2 * n + 1], q[i], b[1]);
        }
      }
    }

    // Only tiles at the edge need the mask.
    if (j >= whole_tiles)
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int seen = (p.causal ? seen_by_first + r / 2 * 16 + r % 2 * 8 : keys) - j * Bc - 2 * t;
#pragma unroll
        for (int n = 0; n < Bc / 8; n++) {
          if (8 * n >= seen) s[r / 2][n][r % 2 * 2] = -INFINITY;
          if (8 * n + 1 >= seen) s[r / 2][n][r % 2 * 2 + 1] = -INFINITY;
        }
      }

    // Online softmax.
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      largest[r] = -INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; n++)
        largest[r] = fmaxf(largest[r], fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    }
    rows.refer(s, largest, c);
    float from[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) from[r] = rows.scaled(r, c);

    // 16 keys at a time: weights, in the registers in which the second product wants them, and the product.
    const int corner_V = corner_by_rows<D>() + S::kAtV + j % 2 * Bc * D;
#pragma unroll
    for (int k = 0; k < Bc / 16; k++) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float(&x)[4] = s[i][2 * k + half];
#pragma unroll
          for (int e = 0; e < 4; e++) x[e] = exp2_fast(fmaf(x[e], c, -from[2 * i + e / 2]));
          rows.l[2 * i] += x[0] + x[1], rows.l[2 * i + 1] += x[2] + x[3];
          if constexpr (kDropout) drop_weights(x, drop, head, query0 + row0 + 16 * i + g, j * Bc + 16 * k + 8 * half);
          a[i][2 * half] = pack<T>(x[0], x[1]), a[i][2 * half + 1] = pack<T>(x[2], x[3]);
        }
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        uint32_t b[2][2];
        load_b<D>(b, tile, corner_V, 16 * k, n);
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
          mma_m16n8k16<T>(rows.o[i][2 * n], a[i], b[0]);
          mma_m16n8k16<T>(rows.o[i][2 * n + 1], a[i], b[1]);
        }
      }
    }
    if (taken_out)
#pragma unroll
      for (int i = 0; i < kRowTiles; i++)
        add_non_finite<D>(rows.o[i], V + size_t(j) * Bc * D, min(Bc, keys - j * Bc), [&](int half, int key) {
          const int query = query0 + row0 + 16 * i + 8 * half + g;
          return j * Bc + key < keys_seen(p, query) && (!kDropout || drop.keeps(head, query, j * Bc + key));
        });
  }

  // O is divided by l, once, and goes to HBM in 16-byte pieces, by way of the warp's own rows of Q.
  T* const own = tile + row0 * D;
  __syncwarp();  // no lane reads Q any more
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const float sum = quad_sum(rows.l[r]);
    const float factor = sum == 0.0f ? 0.0f : drop.kept_scale / sum;
    const int row = r / 2 * 16 + r % 2 * 8 + g, query = query0 + row0 + row;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<uint32_t*>(&own[swizzled<D>(row, n) + 2 * t]) =
          pack<T>(rows.o[r / 2][n][r % 2 * 2] * factor, rows.o[r / 2][n][r % 2 * 2 + 1] * factor);
    const Reference reference(rows.m[r], c);
    if (t == 0 && query < p.Nq)
      LSE[query] = sum == 0.0f ? -INFINITY : fmaf(reference.raw, c, reference.scaled) * kLn2 + logf(sum);
  }
  __syncwarp();  // every lane sees the others' parts of a row
#pragma unroll
  for (int i = lane; i < S::kWarpRows * D / 8; i += 32) {
    const int row = i / (D / 8), chunk = i % (D / 8), query = query0 + row0 + row;
    if (query < p.Nq)
      *reinterpret_cast<uint4*>(&O[size_t(query) * D + chunk * 8]) =
          *reinterpret_cast<const uint4*>(&own[swizzled<D>(row, chunk)]);
  }
}

constexpr int kBlocksAtOnce = 1024;  // of a group of heads: several for each place on the GPU

template <class S, class T, bool kDropout>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  const int tiles = ceil_div(p.Nq, S::Br);
  if (p.Nq == 0) return;
  const int group = std::max(1, kBlocksAtOnce / tiles);
  const double scale = std::abs(p.scale == 0.0 ? 1.0 : p.scale) * double(kLog2e);
  const float c = float(std::clamp(scale, double(FLT_TRUE_MIN), double(FLT_MAX)));  // neither 0 nor ∞: −∞ · 0 is NaN
  launch(pipelined_forward<S, T, kDropout>, grid_of(p.query_heads() * tiles), S::kThreads, S::kElements * sizeof(T),
         stream, p, Dropout(p), c, group, static_cast<const T*>(t.Q), static_cast<const T*>(t.K),
         static_cast<const T*>(t.V), static_cast<T*>(t.O), static_cast<float*>(t.LSE));
}

// The fastest shapes on an H200 of those tried. Dropout needs registers: there a warp has 16 rows. The large tile of D
// 256 takes 192 KB of shared memory; where a block may not have that much, the small one takes 96.
template <class T>
void forward_of(const Problem& p, const Tensors& t, Stream stream) {
  using Large256 = Shape<256, 1, 8, 64, 1, false>;
  using Small256 = Shape<256, 1, 4, 32, 1, false>;
  if (p.dropout > 0) {
    if (p.D == 64) return forward_with<Shape<64, 1, 4, 64, 2, true>, T, true>(p, t, stream);
    if (p.D == 128) return forward_with<Shape<128, 1, 4, 64, 2, true>, T, true>(p, t, stream);
    return forward_with<Small256, T, true>(p, t, stream);
  }
  if (p.D == 64) return forward_with<Shape<64, 2, 4, 64, 2, true>, T, false>(p, t, stream);
  if (p.D == 128) return forward_with<Shape<128, 2, 4, 64, 2, false>, T, false>(p, t, stream);
  if (Large256::kElements * sizeof(T) <= shared_memory_limit()) return forward_with<Large256, T, false>(p, t, stream);
  forward_with<Small256, T, false>(p, t, stream);
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  p.dtype == DType::fp16 ? forward_of<__half>(p, t, stream) : forward_of<__nv_bfloat16>(p, t, stream);
}

const Registration step = register_step(__FILE__, {.idea = "tiles arrive while others are computed; 32 rows a warp",
                                                   .rung = 3,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128, 256},
                                                   .dropout = true,
                                                   .kv_heads = true,
                                                   .min_sm = 80,
                                                   .forward = forward});

}  // namespace
