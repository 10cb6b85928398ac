// 08 Hopper, the second overlap: inside a warpgroup the softmax of one tile runs under the products of the next.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE [B, Hq, Nq]    fp16 or bf16
//
// New since pingpong.cu:
//   - S of the next tile and O += P V of this one are started together; the softmax waits for S only, and runs while
//     P V is computed.
//   - Its exponentials use the maximum of the tiles before, so that none of them waits for this tile's maximum. That is
//     found beside them, and only a row whose maximum grew by more than 2^8 needs a correction.
//   - With a causal mask tiles differ in length, and blocks take the next one from a counter when they are free for it.
//   - Tile shapes chosen by measurement for each head dim, mask and length.
//
// Page: docs/08_hopper_async.md.  Source: FlashAttention-3 (Shah et al. 2024), section 3.2 and algorithm 2.
#include <type_traits>

#include "tile_counter.h"

namespace {

template <class Shape>
constexpr int kThreads = 128 * (1 + Shape::kConsumers);  // warpgroup 0 is the producer

template <class Shape>
struct Shared {
  static constexpr int kQ = Shape::D <= 128 ? 2 : 1;  // while one is used, the next arrives, where there is room
  Tile<typename Shape::T, Shape::Br, Shape::D> Q[kQ];
  Tile<typename Shape::T, Shape::Bc, Shape::D> K[Shape::kStages], V[Shape::kStages];
  Mbarrier q_full[kQ], q_empty[kQ];
  Mbarrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  Work work[kQ];  // to which Q belongs
};

// The producer, one thread: hands out the work, and fills Q and the two rings.
template <class Shape, class T>
__device__ __forceinline__ void produce(Shared<Shape>& s, const Arguments<T>& a, int* counter) {
  constexpr int kStages = Shape::kStages, kPanels = Shape::D / 64;
  unsigned turn = 0;  // V tiles loaded since the kernel began; K is one ahead
  const auto load = [&](auto& tiles, Mbarrier* full, Mbarrier* empty, const TensorMap& map, unsigned turn, int key_tile,
                        int head) {
    const int stage = turn % kStages;
    mbarrier_wait(&empty[stage], (turn / kStages & 1) ^ 1);  // the first round finds every stage empty
    mbarrier_arrive_expect_tx(&full[stage], sizeof tiles[0]);
    for (int panel = 0; panel < kPanels; panel++)
      tma_load_3d(tiles[stage].panel[panel], &map, 64 * panel, key_tile * Shape::Bc, head, &full[stage]);
  };

  int tile = blockIdx.x;
  for (unsigned q_turn = 0;; q_turn++) {
    const Work w = work_of<Shape>(tile, a);
    if (w.key_tiles > 0) load(s.K, s.k_full, s.k_empty, a.K, turn, w.key_tiles - 1, w.kv_head);
    const unsigned q = q_turn % s.kQ;
    mbarrier_wait(&s.q_empty[q], (q_turn / s.kQ & 1) ^ 1);
    s.work[q] = w;
    if (w.key_tiles == 0) {
      mbarrier_arrive(&s.q_full[q]);
    } else {
      mbarrier_arrive_expect_tx(&s.q_full[q], sizeof s.Q[q]);
      for (int panel = 0; panel < kPanels; panel++)
        tma_load_3d(s.Q[q].panel[panel], &a.Q, 64 * panel, w.row0, w.head, &s.q_full[q]);
    }
    if (w.head < 0) break;
    // Taken late, before the last loads: the block that is free first gets the longest tile that is left.
    const auto take_next = [&] {
      if (Shape::kCausal && q_turn == 0) grid_dependency_wait();  // the counter is ready
      tile = gridDim.x + (Shape::kCausal ? atomicAdd(counter, 1) : tile);
    };
    if (w.key_tiles == 0) take_next();
    for (int j = w.key_tiles - 1; j >= 0; j--, turn++) {
      if (j > 0)
        load(s.K, s.k_full, s.k_empty, a.K, turn + 1, j - 1, w.kv_head);
      else
        take_next();
      load(s.V, s.v_full, s.v_empty, a.V, turn, j, w.kv_head);
    }
  }
}

// S once more, when K's stage in the ring has been given back already: dot products of the thread's two rows of Q, in
// shared memory, and its columns of the tile of K, in global memory. Slow, and next to never needed.
template <class Shape, class T>
__device__ __forceinline__ void scores_by_hand(float (&S)[Shape::Bc / 2], const Tile<T, Shape::Br, Shape::D>& Q,
                                               int row, const T* K) {
  K += threadIdx.x % 4 * 2 * Shape::D;
#pragma unroll
  for (int i = 0; i < Shape::Bc / 2; i++) S[i] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < Shape::D; d++) {
    const int at = (d / 8 % 8 ^ row % 8) * 8 + d % 8;  // swizzled: piece p of row r is at p ^ r % 8
    const float q[2] = {float(Q.panel[d / 64][row][at]), float(Q.panel[d / 64][row + 8][at])};
#pragma unroll
    for (int i = 0; i < Shape::Bc / 2; i++) S[i] += q[row_of(i)] * float(K[(8 * (i / 4) + (i & 1)) * Shape::D + d]);
  }
}

// The softmax of a tile with the maximum of the tiles before. Returns whether O must be rescaled by alpha. What matters
// is by how much a score exceeds that maximum, in powers of 2. A thread accepts up to `limit`: kNoMatter, where P is at
// most 2^8 and as exact as P up to 1; or −∞ if one of its rows is steep or has no maximum yet.
constexpr float kNoMatter = 8.0f;
constexpr float kTooLarge = 100.0f;  // up to here P, in fp32, can still be scaled down

template <class Shape, class Recompute>
__device__ __forceinline__ bool softmax_ahead(float (&S)[Shape::Bc / 2], float (&m)[2], float (&l)[2],
                                              float (&alpha)[2], float limit, float scale_log2,
                                              const Recompute& recompute) {
  float x[4], sum[4] = {};  // maximum and sum of even and odd columns of row g, of row g + 8
  const float shift[2] = {m[0] * scale_log2, m[1] * scale_log2};
#pragma unroll
  for (int i = 0; i < Shape::Bc / 2; i++) {
    x[i & 3] = i < 4 ? S[i] : fmaxf(x[i & 3], S[i]);
    S[i] = exp2_fast(fmaf(S[i], scale_log2, -shift[row_of(i)]));
    sum[i & 3] += S[i];
  }
  const float grew = fmaxf(fmaxf(x[0], x[1]) - m[0], fmaxf(x[2], x[3]) - m[1]) * scale_log2;
  if (!__any_sync(~0u, grew > limit)) {
    l[0] += sum[0] + sum[1], l[1] += sum[2] + sum[3];
    return false;
  }
  if (__any_sync(~0u, grew > kTooLarge || limit < kNoMatter)) {
    recompute();
    softmax_tile(S, m, l, alpha, scale_log2);
    return true;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float old = m[r];
    m[r] = fmaxf(old, row_max(fmaxf(x[2 * r], x[2 * r + 1])));
    alpha[r] = exp2_fast((old - m[r]) * scale_log2);
    l[r] = (l[r] + (sum[2 * r] + sum[2 * r + 1])) * alpha[r];
  }
  rescale(S, alpha);
  return true;
}

// Tiles with and without a mask have loops of their own: a branch in the loop would keep the compiler from mixing the
// instructions on its two sides.
constexpr std::true_type kMasked;
constexpr std::false_type kWhole;

// A consumer warpgroup: 64 rows of Q against all their keys, from the last to the first.
template <class Shape, class T>
__device__ __forceinline__ void consume(Shared<Shape>& s, const Arguments<T>& a) {
  constexpr int D = Shape::D, Bc = Shape::Bc, kStages = Shape::kStages;
  // From lane 0, so that the compiler knows it to be the same in the whole warp, and the descriptors with it.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  const int lane = threadIdx.x % 32, row_in_tile = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t q_operand = wgmma_operand(s.Q[0].panel[0][64 * warpgroup]);
  const uint64_t k_operand = wgmma_operand(s.K), v_operand = wgmma_operand(s.V, sizeof s.V[0].panel[0]);

  float O[D / 2], S[Bc / 2], m[2], l[2], alpha[2];
  uint32_t P[Bc / 4];
  unsigned turn = 0;  // K and V tiles used up since the kernel began
  unsigned q = 0;     // which Q

  const auto is_there = [&](Mbarrier* full, unsigned turn) {
    return mbarrier_test(&full[turn % kStages], turn / kStages & 1);
  };
  const auto wait = [&](Mbarrier* full, unsigned turn) { mbarrier_wait(&full[turn % kStages], turn / kStages & 1); };
  const auto release = [&](Mbarrier* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  const auto take_turn = [&] { named_barrier_sync(1 + warpgroup, 256); };
  const auto pass_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % Shape::kConsumers, 256); };
  const auto start_qk = [&](unsigned turn) {
    start_scores<Shape>(S, q_operand + q * (sizeof s.Q[0] >> 4), k_operand + turn % kStages * (sizeof s.K[0] >> 4));
  };
  const auto start_pv = [&](unsigned turn) {
    start_weighted_sum<Shape>(O, P, v_operand + turn % kStages * (sizeof s.V[0] >> 4));
  };

  if (warpgroup == Shape::kConsumers - 1) pass_turn();  // the first turn is the first warpgroup's
  for (unsigned q_turn = 0;; q_turn++) {
    q = q_turn % s.kQ;
    mbarrier_wait(&s.q_full[q], q_turn / s.kQ & 1);
    const Work w = read_work(s.work[q]);
    if (w.head < 0) break;
    const int row = w.row0 + row_in_tile;
    const int whole = whole_tiles<Shape>(a, w.row0 + 64 * warpgroup);
#pragma unroll
    for (int i = 0; i < D / 2; i++) O[i] = 0.0f;
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.0f;
    float limit = -INFINITY;  // softmax_ahead

    // S of tile j becomes P.
    const auto softmax = [&](auto masked, int j) -> bool {
      const int key0 = j * Bc;
      bool grew = true;
      if (!masked.value) {
        grew = softmax_ahead<Shape>(S, m, l, alpha, limit, a.scale_log2, [&] {
          scores_by_hand<Shape>(S, s.Q[q], row - s.work[q].row0,
                                a.K_rows + (size_t(s.work[q].kv_head) * a.p.Nk + key0) * D);
          __syncwarp();  // lane 0, which will give Q back, has waited for all who read it here
        });
      } else {
        mask_scores(S, seen_by<Shape>(a, row) - key0, seen_by<Shape>(a, row + 8) - key0);
        softmax_tile(S, m, l, alpha, a.scale_log2);
      }
      if (grew) limit = fmaxf(fabsf(m[0]), fabsf(m[1])) * a.scale_log2 <= kSteep ? kNoMatter : -INFINITY;
      return grew;
    };

    int j = w.key_tiles - 1;
    if constexpr (Shape::kCausal) {  // tiles that only rows of later warpgroups see pass by
      const int own = ceil_div(seen_by<Shape>(a, w.row0 + 64 * warpgroup + 63), Bc);
#pragma unroll 1
      for (; j >= own; j--, turn++) {
        if (j > 0) take_turn(), pass_turn();
        wait(s.k_full, turn);
        release(&s.k_empty[turn % kStages]);
        wait(s.v_full, turn);
        release(&s.v_empty[turn % kStages]);
      }
    }
    if (j >= 0) {
      if (a.negative) turn_signs(s.Q[q], warpgroup);
      wait(s.k_full, turn);
      start_qk(turn);
      wgmma_wait<0>(S);
      release(&s.k_empty[turn % kStages]);
      softmax(kMasked, j);
      pack_weights<T>(P, S);

      const auto next_tile = [&](auto masked) {
        const bool v_there = is_there(s.v_full, turn);
        take_turn();
        start_qk(turn + 1);
        if (!v_there) wait(s.v_full, turn);
        start_pv(turn);
        pass_turn();
        const bool k_there = j == 0 || is_there(s.k_full, turn + 2);
        wgmma_wait<1>(S);
        release(&s.k_empty[(turn + 1) % kStages]);
        const bool grew = softmax(masked, j);
        // Here, because ptxas would move the wait for O up into the softmax, but moves none across a branch.
        if (!k_there) wait(s.k_full, turn + 2);
        wgmma_wait<0>(O);
        release(&s.v_empty[turn % kStages]);
        pack_weights<T>(P, S);
        if (grew) rescale(O, alpha);
        turn++;
      };
      if (--j >= 0) wait(s.k_full, turn + 1);
      for (; j >= 0 && j >= whole; j--) next_tile(kMasked);
      for (; j >= 0; j--) next_tile(kWhole);
      release(&s.q_empty[q]);
      wait(s.v_full, turn);
      start_pv(turn);
      wgmma_wait<0>(O);
      release(&s.v_empty[turn++ % kStages]);
    } else {
      release(&s.q_empty[q]);
    }
    store_output<Shape>(O, m, l, w.head, row, a);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads<Shape>, 1)
    overlapped(const __grid_constant__ Arguments<typename Shape::T> a, int* counter) {
  Shared<Shape>& s = *dynamic_shared<Shared<Shape>>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.kQ; i++)
      mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4 * Shape::kConsumers);  // an arrival a warp
    for (int i = 0; i < Shape::kStages; i++) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * Shape::kConsumers);
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * Shape::kConsumers);
    }
    fence_mbarrier_init();
    tma_prefetch(&a.Q), tma_prefetch(&a.K), tma_prefetch(&a.V);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<kProducerRegisters<Shape>>();
    if (threadIdx.x == 0) produce<Shape>(s, a, counter);
  } else {
    setmaxnreg_inc<kConsumerRegisters<Shape>>();
    consume<Shape>(s, a);
  }
}

template <class Shape>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  launch_over_tiles<Shape>(overlapped<Shape>, kThreads<Shape>, sizeof(Shared<Shape>), stream, arguments_of<Shape>(p, t),
                           t.scratch<int>("tiles handed out"));
}

// The shapes that were fastest on an H200.
void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.query_rows() == 0) return;
  for_type_and_mask(p, [&]<class T, bool kCausal>() {
    //                                            D  warpgroups  Bc  stages
    if (p.D == 64) return forward_with<Shape<T, 64, 4, 64, 4, kCausal>>(p, t, stream);
    if (p.D == 256) return forward_with<Shape<T, 256, 2, 64, 2, kCausal>>(p, t, stream);
    if (p.Nk <= 512) return forward_with<Shape<T, 128, 2, 64, 4, kCausal>>(p, t, stream);
    if (p.Nk < 2048) return forward_with<Shape<T, 128, 2, 128, 2, kCausal>>(p, t, stream);
    forward_with<Shape<T, 128, 3, 80, kCausal ? 2 : 3, kCausal>>(p, t, stream);
  });
}

std::vector<Workspace> workspace(const Problem&) { return {{.name = "tiles handed out", .bytes = sizeof(int)}}; }

const Registration step = register_step(
    __FILE__, {.idea = "softmax under the products of the next tile; tiles from a counter; shapes that fit",
               .rung = 4,
               .dtypes = {DType::fp16, DType::bf16},
               .head_dims = {64, 128, 256},
               .kv_heads = true,
               .min_sm = 90,
               .workspace = workspace,
               .forward = forward});

}  // namespace
