// 08 Hopper in eight bits: both products in e4m3, at twice the rate.
//
//     O = softmax(scale · Q Kᵀ) V      Q [B, Hq, Nq, D]    K, V [B, Hkv, Nk, D], bf16 or fp32, products in e4m3
//                                      O [B, Hq, Nq, D] bf16    LSE [B, Hq, Nq]
//
// New since overlapped.cu:
//   - Q, K and V are quantised first, by the kernels of fp8_quantise.h, each tile with a scale of its own.
//   - A tile's scores are to be multiplied by the scales of its Q and its K; a factor of the exponent, which was there
//     anyway. The scale of its V would be a factor of P: it is an addend of the exponent.
//   - P fills the range of e4m3: its exponents are shifted, and it is packed four to a register.
//   - A row whose result is not finite is computed again from the numbers that were given.
//
// Page: docs/08_hopper_async.md.  Source: FlashAttention-3 (Shah et al. 2024), section 3.3.
#include <type_traits>

#include "fp8_tile.h"
#include "tile_counter.h"

namespace {

template <class Shape>
constexpr int kThreads = 128 * (1 + Shape::kConsumers);  // warpgroup 0 is the producer

// What goes with a tile of Q: V's largest scale; the scales of its tiles of Bc rows, from the first; and those of its
// first K and V, which is the last tile of them.
template <class Shape>
struct alignas(16) Task {
  Work work;
  float largest_v_scale, q_scale[Shape::kQScales];
  uint32_t kv_scales;
};

template <class Shape>
struct Shared {
  uint8_t Q[2][Shape::D / Shape::kRow][Shape::Br][Shape::kRow];  // while one is used, the next arrives
  uint8_t K[Shape::kStages][Shape::D / Shape::kRow][Shape::Bc][Shape::kRow];
  uint8_t V[Shape::kStages][Shape::D][Shape::kKeys];
  Mbarrier q_full[2], q_empty[2];
  Mbarrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  Task<Shape> task[2];
};

// The producer, one thread: hands out the work, and fills the rings.
template <class Shape>
__device__ __forceinline__ void produce(Shared<Shape>& s, const Fp8Arguments& a, int* counter) {
  constexpr int kStages = Shape::kStages, kPanels = Shape::D / Shape::kRow;
  unsigned turn = 0;  // V tiles loaded since the kernel began; K is one ahead
  const auto wait_for_stage = [&](Mbarrier* empty, unsigned turn) {
    mbarrier_wait(&empty[turn % kStages], (turn / kStages & 1) ^ 1);  // the first round finds every stage empty
    return turn % kStages;
  };
  const auto load_k = [&](unsigned turn, int j, int head) {
    const unsigned stage = wait_for_stage(s.k_empty, turn);
    mbarrier_arrive_expect_tx(&s.k_full[stage], sizeof s.K[0]);
#pragma unroll 1
    for (int panel = 0; panel < kPanels; panel++)
      tma_load_3d(s.K[stage][panel], &a.K, Shape::kRow * panel, j * Shape::Bc, head, &s.k_full[stage]);
  };
  const auto load_v = [&](int j, int head) {
    const unsigned stage = wait_for_stage(s.v_empty, turn);
    mbarrier_arrive_expect_tx(&s.v_full[stage], sizeof s.V[0]);
    tma_load_3d(s.V[stage], &a.V, j * Shape::Bc, 0, head, &s.v_full[stage]);
  };

  int tile = blockIdx.x;
  for (unsigned q_turn = 0;; q_turn++) {
    const Work w = work_of<Shape>(tile, a);
    if (w.key_tiles > 0) load_k(turn, w.key_tiles - 1, w.kv_head);
    const unsigned q = q_turn % 2;
    mbarrier_wait(&s.q_empty[q], (q_turn / 2 & 1) ^ 1);
    Task<Shape>& task = s.task[q];
    task.work = w;
    if (w.key_tiles == 0) {
      mbarrier_arrive(&s.q_full[q]);
    } else {
      const int scales = ceil_div(a.p.Nq, Shape::Bc);
#pragma unroll 1
      for (int i = 0; i < Shape::kQScales; i++)
        task.q_scale[i] = a.q_scale[size_t(w.head) * scales + min(w.row0 / Shape::Bc + i, scales - 1)];
      task.largest_v_scale = a.largest_v_scale[w.kv_head];
      task.kv_scales = a.kv_scales[size_t(w.kv_head) * ceil_div(a.p.Nk, Shape::Bc) + w.key_tiles - 1];
      mbarrier_arrive_expect_tx(&s.q_full[q], sizeof s.Q[0]);
#pragma unroll 1
      for (int panel = 0; panel < kPanels; panel++)
        tma_load_3d(s.Q[q][panel], &a.Q, Shape::kRow * panel, w.row0, w.head, &s.q_full[q]);
    }
    if (w.head < 0) break;
    // Taken late, before the last loads: the block that is free first gets the longest tile that is left.
    const auto take_next = [&] {
      if (Shape::kCausal && q_turn == 0) grid_dependency_wait();  // the counter is ready
      tile = gridDim.x + (Shape::kCausal ? atomicAdd(counter, 1) : tile);
    };
    if (w.key_tiles == 0) take_next();
#pragma unroll 1
    for (int j = w.key_tiles - 1; j >= 0; j--, turn++) {
      if (j > 0)
        load_k(turn + 1, j - 1, w.kv_head);
      else
        take_next();
      load_v(j, w.kv_head);
    }
  }
}

// Tiles with and without a mask have loops of their own: overlapped.cu.
constexpr std::true_type kMasked;
constexpr std::false_type kWhole;

// A consumer warpgroup: 64 rows of Q against all their keys, from the last to the first.
template <class Shape>
__device__ __forceinline__ void consume(Shared<Shape>& s, const Fp8Arguments& a) {
  constexpr int D = Shape::D, Bc = Shape::Bc, kStages = Shape::kStages;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  const int lane = threadIdx.x % 32, row_in_tile = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint64_t q_operand = wgmma_operand<Shape::kRow>(s.Q[0][0][64 * warpgroup]);
  const uint64_t k_operand = wgmma_operand<Shape::kRow>(s.K), v_operand = wgmma_operand<Shape::kKeys>(s.V);

  float O[D / 2], S[Bc / 2], m[2], l[2], alpha[2];
  uint32_t P[Bc / 8];
  unsigned turn = 0;  // K and V tiles used up since the kernel began
  unsigned q = 0;     // which Q

  const auto is_there = [&](Mbarrier* full, unsigned turn) {
    return mbarrier_test(&full[turn % kStages], turn / kStages & 1);
  };
  const auto wait = [&](Mbarrier* full, unsigned turn) { mbarrier_wait(&full[turn % kStages], turn / kStages & 1); };
  const auto release = [&](Mbarrier* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  const auto take_turn = [&] {
    if (Shape::kTurns) named_barrier_sync(1 + warpgroup, 256);
  };
  const auto pass_turn = [&] {
    if (Shape::kTurns) named_barrier_arrive(1 + (warpgroup + 1) % Shape::kConsumers, 256);
  };
  const auto start_qk = [&](unsigned turn) {
    start_fp8_scores<Shape>(S, q_operand + q * (sizeof s.Q[0] >> 4), k_operand + turn % kStages * (sizeof s.K[0] >> 4));
  };
  const auto start_pv = [&](unsigned turn) {
    start_fp8_weighted_sum<Shape>(O, P, v_operand + turn % kStages * (sizeof s.V[0] >> 4));
  };
  // What the producer has left for all lanes. Lane 0 reads it and tells the others, as in read_work().
  const auto read = [&]<class X>(const X& shared) { return __shfl_sync(~0u, lane == 0 ? shared : X(), 0); };

  if (warpgroup == Shape::kConsumers - 1) pass_turn();  // the first turn is the first warpgroup's
  for (unsigned q_turn = 0;; q_turn++) {
    q = q_turn % 2;
    mbarrier_wait(&s.q_full[q], q_turn / 2 & 1);
    const Work w = read_work(s.task[q].work);
    if (w.head < 0) break;
    const int row = w.row0 + row_in_tile;
    const int whole = whole_tiles<Shape>(a, w.row0 + 64 * warpgroup);
#pragma unroll
    for (int i = 0; i < D / 2; i++) O[i] = 0.0f;
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.0f;
    float limit = -INFINITY;  // fp8_softmax
    float q_scale = 0.0f, scale = 0.0f, last_v_scale = 0.0f;
    uint32_t kv_now = 0, kv_next = 0;  // scales of this tile of K and V, and of the next: global memory is far
    const uint32_t* kv_scales = a.kv_scales + size_t(w.kv_head) * ceil_div(a.p.Nk, Bc);
    const auto v_scale = [&](uint32_t scales) { return v_scale_of(scales, read(s.task[q].largest_v_scale)); };
    const auto take_scales = [&](int j) {
      // Scale 0 would make NaN of a masked −∞; the smallest number there is makes every visible score 0 just as well.
      scale = fmaxf(q_scale * k_scale_of(kv_next), FLT_TRUE_MIN);
      if (__any_sync(~0u, (kv_now ^ kv_next) & 0xffff)) change_v_scale(m, l, v_scale(kv_now), v_scale(kv_next));
      kv_now = kv_next, kv_next = kv_scales[max(j - 1, 0)];
    };

    // S of tile j becomes P.
    const auto softmax = [&](auto masked, int j) -> bool {
      const int key0 = j * Bc;
      bool grew = true;
      if (masked.value || !Shape::kAhead) {
        if (masked.value) mask_scores(S, seen_by<Shape>(a, row) - key0, seen_by<Shape>(a, row + 8) - key0);
        grew = fp8_softmax(S, m, l, alpha, limit, scale);
      } else {
        grew = fp8_softmax_ahead(S, m, l, alpha, limit, scale, [&] {
          fp8_scores_by_hand<Shape>(S, s.Q[q], row_in_tile, a.K_rows + (size_t(w.kv_head) * a.p.Nk + key0) * D);
          __syncwarp();  // lane 0, which will give Q back, has waited for all who read it here
        });
      }
      if (grew) limit = fmaxf(fabsf(m[0]), fabsf(m[1])) <= kSteep ? kGrow : -INFINITY;
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
      const Task<Shape>& task = s.task[q];
      q_scale = read(task.q_scale[(row - lane / 4) / Bc - w.row0 / Bc]) * a.scale_log2;
      kv_next = read(task.kv_scales);
      if (j < w.key_tiles - 1) kv_next = kv_scales[j];
      kv_now = kv_next;
      wait(s.k_full, turn);
      start_qk(turn);
      take_scales(j);
      wgmma_wait<0>(S);
      release(&s.k_empty[turn % kStages]);
      softmax(kMasked, j);
      pack_fp8_weights(P, S);

      const auto next_tile = [&](auto masked) {
        const bool v_there = is_there(s.v_full, turn);
        take_turn();
        start_qk(turn + 1);
        if (!v_there) wait(s.v_full, turn);
        start_pv(turn);
        pass_turn();
        take_scales(j);  // while S is computed
        const bool k_there = j == 0 || is_there(s.k_full, turn + 2);
        wgmma_wait<1>(S);
        release(&s.k_empty[(turn + 1) % kStages]);
        const bool grew = softmax(masked, j);
        // Here, because ptxas would move the wait for O up into the softmax, but moves none across a branch.
        if (!k_there) wait(s.k_full, turn + 2);
        wgmma_wait<0>(O);
        release(&s.v_empty[turn % kStages]);
        pack_fp8_weights(P, S);
        if (grew) rescale(O, alpha);
        turn++;
      };
      if (--j >= 0) wait(s.k_full, turn + 1);
      for (; j >= 0 && j >= whole; j--) next_tile(kMasked);
      for (; j >= 0; j--) next_tile(kWhole);
      last_v_scale = v_scale(kv_now);
      release(&s.q_empty[q]);
      wait(s.v_full, turn);
      start_pv(turn);
      wgmma_wait<0>(O);
      release(&s.v_empty[turn++ % kStages]);
    } else {
      release(&s.q_empty[q]);
    }
    store_fp8_output<Shape>(O, m, l, last_v_scale, w.head, row, a);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads<Shape>, 1) fp8(const __grid_constant__ Fp8Arguments a, int* counter) {
  Shared<Shape>& s = *dynamic_shared<Shared<Shape>>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++)
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

// Calls act with the shape that was fastest on an H200. K and V have a scale for each Bc keys, so the quantising
// kernels ask here, too.
template <class Act>
auto with_shape(const Problem& p, const Act& act) {
  //                                                               D  warpgroups  Bc  stages  mask  turns  ahead
  if (p.D == 64 && p.causal && p.Nk <= 4096) return act(Fp8Shape<64, 4, 64, 4, true, false, true>{});
  if (p.D == 64 && p.causal) return act(Fp8Shape<64, 3, 128, 3, true, false, true>{});
  if (p.D == 64 && p.Nk <= 1024) return act(Fp8Shape<64, 4, 64, 4, false, false, true>{});
  if (p.D == 64) return act(Fp8Shape<64, 3, 128, 3, false, false, true>{});
  if (p.D == 256 && p.causal) return act(Fp8Shape<256, 2, 128, 2, true, true, false>{});
  if (p.D == 256) return act(Fp8Shape<256, 2, 128, 2, false, false, false>{});
  if (p.causal && p.Nk < 2048) return act(Fp8Shape<128, 2, 128, 2, true, true, true>{});
  if (p.causal) return act(Fp8Shape<128, 3, 96, 3, true, true, true>{});
  if (p.Nk < 1024) return act(Fp8Shape<128, 2, 128, 2, false, true, true>{});
  return act(Fp8Shape<128, 3, 96, 3, false, false, true>{});
}

std::vector<Workspace> workspace(const Problem& p) {
  std::vector<Workspace> all = with_shape(p, [&](auto shape) { return quantised_workspace(p, decltype(shape)::Bc); });
  all.push_back({.name = "tiles handed out", .bytes = sizeof(int)});
  return all;
}

void quantise(const Problem& p, const Tensors& t, Stream stream) {
  if (p.query_rows() == 0) return;
  with_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    if (p.quantisation.from == DType::fp32)
      quantise_from<float, Shape::D, Shape::Bc>(p, t, quantised(t), stream);
    else
      quantise_from<__nv_bfloat16, Shape::D, Shape::Bc>(p, t, quantised(t), stream);
  });
}

template <class Shape>
void forward_with(const Problem& p, const Tensors& t, Stream stream) {
  constexpr int D = Shape::D;
  const Quantised x = quantised(t);
  Fp8Arguments a{};
  static_cast<Order&>(a) = order_of<Shape>(p);
  const unsigned q_size[3] = {unsigned(D), unsigned(p.Nq), unsigned(p.query_heads())};
  const unsigned k_size[3] = {unsigned(D), unsigned(std::max(p.Nk, 1)), unsigned(p.kv_heads())};
  const unsigned v_size[3] = {unsigned(pitch_of(std::max(p.Nk, 1))), unsigned(D), unsigned(p.kv_heads())};
  a.Q = tensor_map<uint8_t, Shape::kRow>(x.Q, q_size, Shape::Br);
  a.K = tensor_map<uint8_t, Shape::kRow>(p.Nk > 0 ? x.K : x.Q, k_size, Shape::Bc);  // without keys nothing is read
  a.V = tensor_map<uint8_t, Shape::kKeys>(p.Nk > 0 ? x.V : x.Q, v_size, D);
  a.K_rows = x.K, a.q_scale = x.q_scale, a.kv_scales = reinterpret_cast<const uint32_t*>(x.kv_scales);
  a.largest_v_scale = x.largest + 3;
  a.given_Q = t.Q, a.given_K = t.K, a.given_V = t.V;
  a.O = static_cast<__nv_bfloat16*>(t.O), a.LSE = static_cast<float*>(t.LSE);
  a.scale_log2 = float(std::fabs(p.scale) * 1.4426950408889634 / (p.quantisation.rotation ? D : 1));
  launch_over_tiles<Shape>(fp8<Shape>, kThreads<Shape>, sizeof(Shared<Shape>), stream, a,
                           t.scratch<int>("tiles handed out"));
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  if (p.query_rows() == 0) return;
  with_shape(p, [&](auto shape) { forward_with<decltype(shape)>(p, t, stream); });
}

const Registration step =
    register_step(__FILE__, {.idea = "products in e4m3: scales for tiles, rotated Q and K, P without shuffles",
                             .rung = 5,
                             .dtypes = {DType::e4m3},
                             .head_dims = {64, 128, 256},
                             .kv_heads = true,
                             .min_sm = 90,
                             .workspace = workspace,
                             .quantise = quantise,
                             .forward = forward});

}  // namespace
