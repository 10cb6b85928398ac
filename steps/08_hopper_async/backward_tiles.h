// What surrounds the backward kernel of this chapter: the tile shape and the layout of what it keeps in shared and
// leaves in global memory, the kernels before and after it, and the matrix products on its tiles.
#pragma once
#include <type_traits>

#include "harness/mask.h"
#include "harness/wgmma.h"

namespace {
using namespace flash;

constexpr int kBc = 128;  // keys of a block, 64 for each of the two consumer warpgroups

// Tiles of Br queries. Two elements of 16 bits, as loads see them, are a Pair.
template <class Element_, int D_, int Br_>
struct Shape {
  using Element = Element_;
  using Pair = std::conditional_t<kIsBfloat16<Element>, __nv_bfloat162, __half2>;
  static constexpr int D = D_, Br = Br_;

  // dQᵀ of a tile, [D][Br], falls into one part for each consumer warpgroup, 64 × kPartQueries: halves of the head dim,
  // or where that is only 64, halves of the queries. A part lies in memory as it lies in registers: for each 8 queries,
  // four floats of thread 0, of thread 1, … of 127 (wgmma.h says which).
  static constexpr bool kPartsByDim = D == 128;
  static constexpr int kPartQueries = kPartsByDim ? Br : Br / 2, kPartFloats = 64 * kPartQueries;

  static int query_tiles(const Problem& p) { return ceil_div(p.Nq, Br); }
  // Of all heads: tile `tile` of head `head` has part 2 · (head · query_tiles + tile) and the next.
  static size_t parts(const Problem& p) { return p.query_heads() * query_tiles(p) * 2; }
};

// ---- What the kernel is told
struct Arguments {
  Problem p;
  float scale, scale_log2;        // scale · log2(e): exp(x) = 2^(x · log2(e))
  TensorMap Q, dO, K, V, dK, dV;  // dK and dV in boxes of 64 rows
  float *lse2, *row_dot;          // [B · Hq][query tiles · Br]: LSE in base 2; D
  float* dQ;                      // the sum, see Shape
  int *flags, *taken;             // a flag for each part of it; how much of the work has been taken
  int kv_heads, heads_together;   // see work_of
  int group;                      // query heads of a key/value head
  int query_tiles, step;          // of a head; 1 or −1, the direction of the visits
  int work;                       // how much there is
};

// ---- Work: 128 keys of a key/value head, and the query tiles that see them, in each query head of the group
struct Work {
  int kv_head, key0;  // which keys
  int first;          // the first query tile that sees any of them; the last is the head's last
  int start;          // where the visits begin
  int rounds;         // visits in all
};

// Work is numbered through groups of heads (see heads_together). In a group low keys come first: under a causal mask
// they are seen by most queries, and dQ is added in their order if its bits are to be the same in each run.
template <class S>
__device__ __forceinline__ Work work_of(const Arguments& a, int index) {
  Work w;
  const int key_blocks = ceil_div(a.p.Nk, kBc), before = index / (a.heads_together * key_blocks) * a.heads_together;
  const int together = min(a.heads_together, a.kv_heads - before);
  index -= before * key_blocks;
  w.key0 = index / together * kBc, w.kv_head = before + index % together;
  w.first = first_query(a.p, w.key0) / S::Br;
  w.rounds = (a.query_tiles - w.first) * a.group;
  // Blocks at work on the same head should not add to the same tile of dQ at once: each begins elsewhere. Under a
  // causal mask most do so anyway. If they must take turns, then all begin at the same tile, one after the other.
  w.start = a.step < 0 ? a.query_tiles - 1 : w.first;
  if (!a.p.causal && !a.p.deterministic) w.start = w.key0 / kBc % a.query_tiles;
  return w;
}

// The tile after `tile`, round and round.
__device__ __forceinline__ int next_tile(const Arguments& a, const Work& w, int tile) {
  tile += a.step;
  return tile == a.query_tiles ? w.first : tile < w.first ? a.query_tiles - 1 : tile;
}

// Where the causal diagonal, the last key and the last query cut a tile: its query c, 0 ≤ c < Br, sees the block's key
// r, 0 ≤ r < 128, if r · slope + first ≤ c < end, the slope being 1 under a causal mask, else Br. Keys r < uncut are
// seen by all Br queries; 0, if some of these are past the end.
struct Edge {
  int uncut, first, end;
};

template <class S>
__device__ __forceinline__ Edge edge_of(const Problem& p, int key0, int query0) {
  const int keys = min(p.Nk - key0, kBc), end = p.Nq - query0;
  const int first = p.causal ? key0 - p.Nk + p.Nq - query0 : (1 - keys) * S::Br;
  const int uncut = end < S::Br ? 0 : p.causal ? 1 - first : keys;
  // Not causal: r < keys has r · Br + first ≤ 0, and is seen by all; the other keys have Br at least, and by none.
  return {uncut, first, end};
}

// Zeros in a thread's part of Pᵀ (keys `row` and row + 8, queries `column`, the next, and both again 8 further, …)
// where the query does not see the key.
template <int n>
__device__ __forceinline__ void mask_unseen(float (&P)[n], const Edge& edge, int slope, int row, int column) {
  const int from = row * slope + edge.first - column, from8 = from + 8 * slope;  // of row, of row + 8
#pragma unroll
  for (int i = 0; i < n; i++)
    if (i / 4 * 8 + (i & 1) < (i & 2 ? from8 : from)) P[i] = 0;
}

// The same where the query is past the end, which is counted from `column` here. LSE is ∞ there, hence P = 0 already,
// unless K has an ∞: S = 0 · ∞ = NaN.
template <int n>
__device__ __forceinline__ void mask_past_end(float (&P)[n], int end) {
#pragma unroll
  for (int i = 0; i < n; i++)
    if (i / 4 * 8 + (i & 1) >= end) P[i] = 0;
}

// How many key/value heads' work is done together, by measurement (see work_of): as many as have so much of Q, dO and
// dQ; deterministic: enough that the blocks at work on one head, which wait for one another, are few.
template <class S>
int heads_together(const Problem& p) {
  const size_t group = size_t(p.Hq) / size_t(p.Hkv), head_bytes = group * p.Nq * S::D * (2 + 2 + 4);
  const size_t budget = size_t(S::D == 128 ? 16 : 32) << 20;
  const size_t together = p.deterministic ? (p.causal ? 32 : 16)
                          : p.causal      ? std::max<size_t>(1, budget / head_bytes)
                                          : 1;
  return int(std::min(together, p.kv_heads()));
}

template <class S>
std::vector<Workspace> workspace_of(const Problem& p) {
  const size_t rows = p.query_heads() * S::query_tiles(p) * S::Br;
  return {{"dQ in fp32", S::parts(p) * S::kPartFloats * sizeof(float)},
          {"LSE in base 2", rows * sizeof(float)},
          {"D", rows * sizeof(float)},
          {"flags", (1 + S::parts(p)) * sizeof(int)}};
}

template <class S>
Arguments arguments_of(const Problem& p, const Tensors& t) {
  using Element = typename S::Element;
  Arguments a = {};
  a.p = p;
  a.scale = float(p.scale), a.scale_log2 = float(p.scale * 1.4426950408889634);
  const unsigned query_size[3] = {unsigned(S::D), unsigned(p.Nq), unsigned(p.query_heads())};
  const unsigned key_size[3] = {unsigned(S::D), unsigned(p.Nk), unsigned(p.kv_heads())};
  a.Q = tensor_map<Element>(t.Q, query_size, S::Br), a.dO = tensor_map<Element>(t.dO, query_size, S::Br);
  if (p.Nk > 0) {
    a.K = tensor_map<Element>(t.K, key_size, kBc), a.V = tensor_map<Element>(t.V, key_size, kBc);
    a.dK = tensor_map<Element>(t.dK, key_size, 64), a.dV = tensor_map<Element>(t.dV, key_size, 64);
  }
  a.lse2 = t.scratch<float>("LSE in base 2"), a.row_dot = t.scratch<float>("D"), a.dQ = t.scratch<float>("dQ in fp32");
  a.taken = t.scratch<int>("flags"), a.flags = a.taken + 1;
  a.kv_heads = int(p.kv_heads()), a.heads_together = heads_together<S>(p), a.group = p.Hq / p.Hkv;
  a.query_tiles = S::query_tiles(p), a.step = p.deterministic && p.causal ? -1 : 1;
  a.work = int(checked_grid_length(p.kv_heads() * ceil_div(p.Nk, kBc)));
  return a;
}

// ---- Barriers
// The n-th filling of a buffer with kStages places goes to place n % kStages. Who fills and who uses count n for
// themselves.
template <int kStages>
struct Stages {
  Mbarrier full[kStages], empty[kStages];

  __device__ void init(unsigned fillers, unsigned users) {
    for (int i = 0; i < kStages; i++) mbarrier_init(&full[i], fillers), mbarrier_init(&empty[i], users);
  }
  __device__ __forceinline__ void wait_full(int n) { mbarrier_wait(&full[n % kStages], n / kStages & 1); }
  __device__ __forceinline__ void wait_empty(int n) { mbarrier_wait(&empty[n % kStages], (n / kStages & 1) ^ 1); }
};

// ---- Shared memory: tiles as TMA lays them, rows of 64 elements, and the barriers of each
template <class S>
struct Shared {
  using Element = typename S::Element;
  static constexpr int kPanels = S::D / 64;
  Element K[kPanels][kBc][64], V[kPanels][kBc][64];
  Element Q[2][kPanels][S::Br][64], dO[2][kPanels][S::Br][64];
  Element dS[2][2][S::Br][64];  // of each warpgroup's keys; at the end dV
  float dQ[2][S::kPartFloats];  // of each warpgroup, on its way out; at the end dK
  float lse2[2][S::Br], row_dot[2][S::Br];
  Edge edge[2];
  Work work[2];  // rounds 0: no more
  Stages<1> k, v, dq[2];
  Stages<2> q, grad, ds, taken;  // with q come lse2, row_dot and edge
};

// ---- Before: what each query row needs
constexpr int kRowsAThread = 4;
template <class S>
constexpr int kRowThreads = S::D / 8;  // threads that share a row, 16 bytes each
template <class S>
constexpr int kPreparedRows = kRowsAThread * 256 / kRowThreads<S>;

// For every row of every query tile D = rowsum(dO ∘ O), and LSE in base 2. A row that sees no key (LSE = −∞), and one
// past the end, get LSE = +∞: P = 2^(S − ∞) = 0. Flags and counter become 0.
template <class S>
__global__ void __launch_bounds__(256) prepare(const __grid_constant__ Arguments a, const typename S::Element* O,
                                               const typename S::Element* dO, const float* LSE) {
  using Pair = typename S::Pair;
  constexpr int kThreads = kRowThreads<S>, kStride = 256 / kThreads;
  grid_dependency_launch();
  const Problem& p = a.p;
  const size_t flags = size_t(p.B) * p.Hq * a.query_tiles * 2;
  for (size_t i = size_t(blockIdx.x) * 256 + threadIdx.x; i < flags; i += size_t(gridDim.x) * 256) a.flags[i] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.taken = 0;

  const int padded = a.query_tiles * S::Br, blocks = ceil_div(padded, kPreparedRows<S>);
  const int head = int(blockIdx.x) / blocks, piece = int(threadIdx.x) % kThreads;
  const int row0 = int(blockIdx.x) % blocks * kPreparedRows<S> + int(threadIdx.x) / kThreads;
  const size_t first = size_t(head) * p.Nq + row0;
  uint4 o[kRowsAThread], g[kRowsAThread];
  float lse[kRowsAThread];
#pragma unroll
  for (int r = 0; r < kRowsAThread; r++) {
    o[r] = g[r] = make_uint4(0, 0, 0, 0), lse[r] = -INFINITY;
    if (row0 + r * kStride >= p.Nq) continue;
    const size_t at = (first + r * kStride) * kThreads + piece;
    o[r] = reinterpret_cast<const uint4*>(O)[at];
    g[r] = reinterpret_cast<const uint4*>(dO)[at];
    if (piece == 0) lse[r] = LSE[first + r * kStride];
  }
#pragma unroll
  for (int r = 0; r < kRowsAThread; r++) {
    const int row = row0 + r * kStride;
    const auto *x = reinterpret_cast<const Pair*>(&o[r]), *y = reinterpret_cast<const Pair*>(&g[r]);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += __low2float(x[i]) * __low2float(y[i]) + __high2float(x[i]) * __high2float(y[i]);
#pragma unroll
    for (int step = kThreads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (piece != 0 || row >= padded) continue;
    a.lse2[size_t(head) * padded + row] = lse[r] == -INFINITY ? INFINITY : lse[r] * 1.44269504f;  // log2(e)
    a.row_dot[size_t(head) * padded + row] = sum;
  }
}

// ---- After: dQ = scale · its fp32 sum, rounded
template <class S>
constexpr int kFinishedRows = !S::kPartsByDim ? S::Br
                              : S::Br % 64    ? S::Br / 2
                                              : S::Br;  // queries of a block

// From the order of registers to rows, through shared memory.
template <class S>
__global__ void __launch_bounds__(256) finish_dQ(const __grid_constant__ Arguments a, typename S::Element* dQ) {
  const Problem& p = a.p;
  constexpr int D = S::D, kRows = kFinishedRows<S>, kQuads = kRows * D / 1024, kBlocksATile = S::Br / kRows;
  __shared__ __align__(16) typename S::Element tile[kRows][D + 8];
  const int part = int(threadIdx.x) / 128, thread = int(threadIdx.x) % 128;
  const int blocks = a.query_tiles * kBlocksATile;
  const int head = int(blockIdx.x) / blocks, block = int(blockIdx.x) % blocks, row0 = block * kRows;
  const int last = min(row0 / S::Br * S::Br + S::Br, p.Nq) - 1;
  grid_dependency_wait();  // for the sum
  float4 quads[kQuads] = {};
  if (keys_seen(p, last) > 0) {  // else no block of keys has added anything to this tile
    const size_t place = (size_t(head) * a.query_tiles + block / kBlocksATile) * 2 + part;
    const auto* from = reinterpret_cast<const float4*>(a.dQ + place * S::kPartFloats);
    from += block % kBlocksATile * kQuads * 128 + thread;
#pragma unroll
    for (int i = 0; i < kQuads; i++) quads[i] = from[i * 128];
  }
  const int d = (S::kPartsByDim ? part * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
  const int query = (S::kPartsByDim ? 0 : part * 64) + thread % 4 * 2;
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const float x[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = query + i * 8 + (e & 1);
      tile[row][d + (e & 2) * 4] = typename S::Element(keys_seen(p, row0 + row) > 0 ? x[e] * a.scale : 0.0f);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * D / 8; i += 256) {
    const int row = i / (D / 8), piece = i % (D / 8);
    if (row0 + row >= p.Nq) continue;
    auto* to = reinterpret_cast<uint4*>(dQ + (size_t(head) * p.Nq + row0 + row) * D);
    to[piece] = *reinterpret_cast<const uint4*>(&tile[row][piece * 8]);
  }
}

// Where there are no queries: the gradients of keys and values are 0.
template <class Element>
__global__ void clear(Element* x, size_t elements) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < elements) x[i] = Element(0.0f);
}

// ---- Products of a warpgroup with operands in shared memory: tiles of `rows` rows of 64 elements, box beside box.

// How much further in a descriptor, which counts in 16 bytes, the k-th 16 of the inner dimension lies.
template <Major kMajor, int kRows>
__device__ constexpr int inner_step(int k) {
  return (kMajor == Major::K ? k / 4 * kRows * 128 + k % 4 * 32 : k * 16 * 128) / 16;
}

// d (64 × kN) = a · b over 16 · kSteps.
template <int kN, int kSteps, Major kA, int kRowsA, Major kB, int kRowsB, class Element>
__device__ __forceinline__ void product(float (&d)[kN / 2], const Element* a, const Element* b) {
  const uint64_t a0 = wgmma_operand(a, kA == Major::MN ? kRowsA * 128 : 0);
  const uint64_t b0 = wgmma_operand(b, kB == Major::MN ? kRowsB * 128 : 0);
  wgmma<kN, Element, kA, kB, false>(d, a0, b0);
#pragma unroll
  for (int k = 1; k < kSteps; k++)
    wgmma<kN, Element, kA, kB, true>(d, a0 + inner_step<kA, kRowsA>(k), b0 + inner_step<kB, kRowsB>(k));
}

// d += a · b with a in registers.
template <int kN, int kSteps, int kRowsB, class Element>
__device__ __forceinline__ void add_product(float (&d)[kN / 2], const uint32_t (&a)[kSteps][4], const Element* b) {
  const uint64_t b0 = wgmma_operand(b, kRowsB * 128);
#pragma unroll
  for (int k = 0; k < kSteps; k++) wgmma<kN, Element, Major::MN, true>(d, a[k], b0 + inner_step<Major::MN, kRowsB>(k));
}

}  // namespace
