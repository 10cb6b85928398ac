// 08 Hopper, its instructions: tiles come by TMA, both products are wgmma, one thing after the other.
//
//     O = softmax(scale · Q Kᵀ) V      Q, O [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D]    LSE [B, Hq, Nq]    fp16 or bf16
//
// New since chapter 07:
//   - One thread loads a whole tile, with one instruction for each 64 columns. The copy engine (TMA) computes
//     addresses, swizzles, fills with zeros past the end, and reports to an mbarrier in shared memory when the bytes
//     are there.
//   - A warpgroup, four warps, multiplies 64 rows by a whole tile. wgmma reads Q, K and V in shared memory itself; S,
//     P and O are in registers.
// K and V have two stages each: while one is used, the next tile arrives in the other.
//
// Page: docs/08_hopper_async.md.  Source: FlashAttention-3 (Shah et al. 2024), section 2.2 and section 3.1.
#include "hopper_tile.h"

namespace {

template <class Shape>
constexpr int kThreads = 128 * Shape::kConsumers;

template <class Shape>
struct Shared {
  Tile<typename Shape::T, Shape::Br, Shape::D> Q;
  Tile<typename Shape::T, Shape::Bc, Shape::D> K[Shape::kStages], V[Shape::kStages];
  Mbarrier q_full, k_full[Shape::kStages], v_full[Shape::kStages];
};

template <class Shape>
__global__ void __launch_bounds__(kThreads<Shape>, 1)
    tma_wgmma(const __grid_constant__ Arguments<typename Shape::T> a) {
  using T = typename Shape::T;
  constexpr int D = Shape::D, Bc = Shape::Bc, kStages = Shape::kStages, kPanels = D / 64;
  Shared<Shape>& s = *dynamic_shared<Shared<Shape>>();
  const Work w = work_of<Shape>(blockIdx.x, a);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.q_full, 1);
    for (int i = 0; i < kStages; i++) mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.v_full[i], 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  // Thread 0 starts the copies: it tells the barrier how many bytes will come, then TMA to bring them. The ring is
  // filled from the last key tile to the first; key tile j is turn key_tiles − 1 − j, and in stage turn % kStages.
  const auto load = [&](auto& tiles, Mbarrier* full, const TensorMap& map, int j, unsigned turn) {
    const int stage = turn % kStages;
    mbarrier_arrive_expect_tx(&full[stage], sizeof tiles[0]);
    for (int panel = 0; panel < kPanels; panel++)
      tma_load_3d(tiles[stage].panel[panel], &map, 64 * panel, j * Bc, w.kv_head, &full[stage]);
  };
  if (threadIdx.x == 0 && w.key_tiles > 0) {
    load(s.K, s.k_full, a.K, w.key_tiles - 1, 0);
    mbarrier_arrive_expect_tx(&s.q_full, sizeof s.Q);
    for (int panel = 0; panel < kPanels; panel++)
      tma_load_3d(s.Q.panel[panel], &a.Q, 64 * panel, w.row0, w.head, &s.q_full);
    load(s.V, s.v_full, a.V, w.key_tiles - 1, 0);
  }

  // A warpgroup has 64 rows of Q. Its index comes from lane 0, so that the compiler knows it to be the same in the
  // whole warp, and the descriptors with it.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int lane = threadIdx.x % 32, row_in_tile = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t q_operand = wgmma_operand(s.Q.panel[0][64 * warpgroup]);
  const uint64_t k_operand = wgmma_operand(s.K), v_operand = wgmma_operand(s.V, sizeof s.V[0].panel[0]);

  float O[D / 2], S[Bc / 2], m[2], l[2], alpha[2];
  uint32_t P[Bc / 4];
  unsigned turn = 0;  // K and V tiles used up

  const auto wait = [&](Mbarrier* full, unsigned turn) { mbarrier_wait(&full[turn % kStages], turn / kStages & 1); };
  const auto start_qk = [&](unsigned turn) {
    start_scores<Shape>(S, q_operand, k_operand + turn % kStages * (sizeof s.K[0] >> 4));
  };
  const auto start_pv = [&](unsigned turn) {
    start_weighted_sum<Shape>(O, P, v_operand + turn % kStages * (sizeof s.V[0] >> 4));
  };

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
    mbarrier_wait(&s.q_full, 0);
    if (a.negative) turn_signs(s.Q, warpgroup);
    for (int j = w.key_tiles - 1; j >= 0; j--, turn++) {
      if (threadIdx.x == 0 && j > 0) {
        load(s.K, s.k_full, a.K, j - 1, turn + 1);
        load(s.V, s.v_full, a.V, j - 1, turn + 1);
      }
      wait(s.k_full, turn);
      start_qk(turn);
      wgmma_wait<0>(S);
      softmax(j);
      rescale(O, alpha);
      wait(s.v_full, turn);
      start_pv(turn);
      wgmma_wait<0>(O);
      __syncthreads();  // everyone is done with this stage: the tile after the next may come into it
    }
  }
  store_output<Shape>(O, m, l, w.head, row, a);
}

template <class Shape>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  const auto a = arguments_of<Shape>(p, t);
  launch(tma_wgmma<Shape>, grid_of(a.tiles), kThreads<Shape>, sizeof(Shared<Shape>), stream, a);
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
    register_step(__FILE__, {.idea = "TMA copies into a ring with mbarriers, wgmma for both products",
                             .rung = 1,
                             .dtypes = {DType::fp16, DType::bf16},
                             .head_dims = {64, 128, 256},
                             .kv_heads = true,
                             .min_sm = 90,
                             .forward = forward});

}  // namespace
