// 08 Hopper, warps with roles: a producer keeps the ring full, consumers compute.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE [B, Hq, Nq]    fp16 or bf16
//
// New since tma_wgmma.cu:
//   - One more warpgroup, the producer. One of its threads does nothing but start copies. Consumers tell it by
//     mbarriers, the "empty" ones, that they are done with a stage, so they need not meet any more: no __syncthreads in
//     the loop.
//   - Registers move from the producer to the consumers (setmaxnreg).
//   - Blocks stay: as many as there are multiprocessors, each doing one tile of the output after the other. While the
//     consumers finish one, the producer already loads for the next.
//
// Page: docs/08_hopper_async.md.  Source: FlashAttention-3 (Shah et al. 2024), section 3.1 and algorithm 1.
#include "hopper_tile.h"

namespace {

template <class Shape>
constexpr int kThreads = 128 * (1 + Shape::kConsumers);  // warpgroup 0 is the producer

template <class Shape>
struct Shared {
  Tile<typename Shape::T, Shape::Br, Shape::D> Q;
  Tile<typename Shape::T, Shape::Bc, Shape::D> K[Shape::kStages], V[Shape::kStages];
  Mbarrier q_full, q_empty;
  Mbarrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  Work work;  // to which Q belongs
};

// The producer, one thread: hands out the work, and fills Q and the two rings.
template <class Shape, class T>
__device__ __forceinline__ void produce(Shared<Shape>& s, const Arguments<T>& a) {
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
    mbarrier_wait(&s.q_empty, (q_turn & 1) ^ 1);
    s.work = w;
    if (w.key_tiles == 0) {
      mbarrier_arrive(&s.q_full);
    } else {
      mbarrier_arrive_expect_tx(&s.q_full, sizeof s.Q);
      for (int panel = 0; panel < kPanels; panel++)
        tma_load_3d(s.Q.panel[panel], &a.Q, 64 * panel, w.row0, w.head, &s.q_full);
    }
    if (w.head < 0) break;
    for (int j = w.key_tiles - 1; j >= 0; j--, turn++) {
      if (j > 0) load(s.K, s.k_full, s.k_empty, a.K, turn + 1, j - 1, w.kv_head);
      load(s.V, s.v_full, s.v_empty, a.V, turn, j, w.kv_head);
    }
    tile += gridDim.x;
  }
}

// A consumer warpgroup: 64 rows of Q against all their keys, from the last to the first.
template <class Shape, class T>
__device__ __forceinline__ void consume(Shared<Shape>& s, const Arguments<T>& a) {
  constexpr int D = Shape::D, Bc = Shape::Bc, kStages = Shape::kStages;
  // From lane 0, so that the compiler knows it to be the same in the whole warp, and the descriptors with it.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  const int lane = threadIdx.x % 32, row_in_tile = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t q_operand = wgmma_operand(s.Q.panel[0][64 * warpgroup]);
  const uint64_t k_operand = wgmma_operand(s.K), v_operand = wgmma_operand(s.V, sizeof s.V[0].panel[0]);

  float O[D / 2], S[Bc / 2], m[2], l[2], alpha[2];
  uint32_t P[Bc / 4];
  unsigned turn = 0;  // K and V tiles used up since the kernel began

  const auto wait = [&](Mbarrier* full, unsigned turn) { mbarrier_wait(&full[turn % kStages], turn / kStages & 1); };
  const auto release = [&](Mbarrier* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  const auto start_qk = [&](unsigned turn) {
    start_scores<Shape>(S, q_operand, k_operand + turn % kStages * (sizeof s.K[0] >> 4));
  };
  const auto start_pv = [&](unsigned turn) {
    start_weighted_sum<Shape>(O, P, v_operand + turn % kStages * (sizeof s.V[0] >> 4));
  };

  for (unsigned q_turn = 0;; q_turn++) {
    mbarrier_wait(&s.q_full, q_turn & 1);
    const Work w = read_work(s.work);
    if (w.head < 0) break;
    const int row = w.row0 + row_in_tile;
    const int whole = whole_tiles<Shape>(a, w.row0 + 64 * warpgroup);
#pragma unroll
    for (int i = 0; i < D / 2; i++) O[i] = 0.0f;
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.0f;
    const auto softmax = [&](int j) {  // S of tile j becomes P
      const int key0 = j * Bc;
      if (j >= whole) mask_scores(S, seen_by<Shape>(a, row) - key0, seen_by<Shape>(a, row + 8) - key0);
      softmax_tile(S, m, l, alpha, a.scale_log2);
      pack_weights<T>(P, S);
    };

    if (w.key_tiles > 0) {
      if (a.negative) turn_signs(s.Q, warpgroup);
      for (int j = w.key_tiles - 1; j >= 0; j--, turn++) {
        wait(s.k_full, turn);
        start_qk(turn);
        wgmma_wait<0>(S);
        release(&s.k_empty[turn % kStages]);
        softmax(j);
        rescale(O, alpha);
        wait(s.v_full, turn);
        start_pv(turn);
        wgmma_wait<0>(O);
        release(&s.v_empty[turn % kStages]);
      }
    }
    release(&s.q_empty);
    store_output<Shape>(O, m, l, w.head, row, a);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads<Shape>, 1)
    warp_specialized(const __grid_constant__ Arguments<typename Shape::T> a) {
  Shared<Shape>& s = *dynamic_shared<Shared<Shape>>();
  if (threadIdx.x == 0) {
    mbarrier_init(&s.q_full, 1);
    mbarrier_init(&s.q_empty, 4 * Shape::kConsumers);  // an arrival from each warp
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
    if (threadIdx.x == 0) produce<Shape>(s, a);
  } else {
    setmaxnreg_inc<kConsumerRegisters<Shape>>();
    consume<Shape>(s, a);
  }
}

template <class Shape>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  const auto a = arguments_of<Shape>(p, t);
  launch(warp_specialized<Shape>, std::min(a.tiles, multiprocessors()), kThreads<Shape>, sizeof(Shared<Shape>), stream,
         a);
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.query_rows() == 0) return;
  for_type_and_mask(p, [&]<class T, bool kCausal>() {
    //                                            D  warpgroups  Bc  stages
    if (p.D == 64) return forward_with<Shape<T, 64, 2, 128, 2, kCausal>>(p, t, stream);
    if (p.D == 128) return forward_with<Shape<T, 128, 2, 128, 2, kCausal>>(p, t, stream);
    forward_with<Shape<T, 256, 2, 64, 2, kCausal>>(p, t, stream);
  });
}

const Registration step =
    register_step(__FILE__, {.idea = "a producer warpgroup keeps the ring full, consumers compute",
                             .rung = 2,
                             .dtypes = {DType::fp16, DType::bf16},
                             .head_dims = {64, 128, 256},
                             .kv_heads = true,
                             .min_sm = 90,
                             .forward = forward});

}  // namespace
