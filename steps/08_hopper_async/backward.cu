// 08 asynchronous attention, backward: all three gradients in one kernel; no warp waits where it need not.
//
//     Sᵀ = K Qᵀ      Pᵀ = exp(scale · Sᵀ − LSE)      dPᵀ = V dOᵀ      dSᵀ = Pᵀ ∘ (dPᵀ − D)      D = rowsum(dO ∘ O)
//     dV = Pᵀ dO     dK = scale · dSᵀ Q              dQ = scale · dS K
//     Q, O, dO, dQ [B, Hq, Nq, D]   K, V, dK, dV [B, Hkv, Nk, D]   fp16 or bf16     LSE [B, Hq, Nq]   fp32
//
// A block owns 128 keys of a head and visits the query tiles that see them, as keys_gradient of chapter 06 does. New:
//
// 1. Warps have roles. A producer thread fetches by TMA, two consumer warpgroups of 64 keys each compute, two sender
//    threads carry dQ away. Barriers say which place in shared memory is full and which is free.
// 2. S and dP are computed transposed, so that Pᵀ and dSᵀ lie in the registers where wgmma wants its first operand.
//    Only dS goes to shared memory: for dQ, the sum over the keys of both warpgroups.
// 3. Blocks add their shares of dQ to an fp32 sum in HBM, by bulk reductions: five products a tile for chapter 06's
//    seven; the price is the traffic.
// 4. Blocks stay: each takes keys from a counter, and the next K, V and Q arrive while the last dK and dV leave.
//
// Page: docs/08_hopper_async.md.  Source: FlashAttention-3 (Shah et al. 2024).
#include "backward_tiles.h"

namespace {

// ---- The producer: one thread, which waits for free places and starts copies
template <class S>
__device__ __forceinline__ void produce(const Arguments& a, Shared<S>& s) {
  constexpr unsigned kKeyBytes = sizeof s.K, kQueryBytes = sizeof s.Q[0], kRowBytes = sizeof s.lse2[0];
  const auto load = [](auto& tile, const TensorMap* map, int row, int head, Mbarrier* full) {
#pragma unroll 1
    for (int panel = 0; panel < S::D / 64; panel++) tma_load_3d(tile[panel], map, panel * 64, row, head, full);
  };
  int n = 0;  // rounds, over all work
  for (int t = 0;; t++) {
    // Also the first work is taken from the counter: so whatever comes before it is in a running block's hands, and
    // waiting for it (see send_dQ) comes to an end.
    const int index = atomicAdd(a.taken, 1);
    s.taken.wait_empty(t);
    Work& w = s.work[t % 2];
    w = index < a.work ? work_of<S>(a, index) : Work{};
    mbarrier_arrive(&s.taken.full[t % 2]);
    if (w.rounds == 0) return;
    s.k.wait_empty(t);
    mbarrier_arrive_expect_tx(&s.k.full[0], kKeyBytes);
    load(s.K, &a.K, w.key0, w.kv_head, &s.k.full[0]);
    const int n0 = n;
    for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; head++) {
      int tile = w.start;
      do {
        const int stage = n % 2, query0 = tile * S::Br;
        const size_t row = (size_t(head) * a.query_tiles + tile) * S::Br;
        s.q.wait_empty(n);
        s.edge[stage] = edge_of<S>(a.p, w.key0, query0);
        mbarrier_arrive_expect_tx(&s.q.full[stage], kQueryBytes + 2 * kRowBytes);
        load(s.Q[stage], &a.Q, query0, head, &s.q.full[stage]);
        bulk_load(s.lse2[stage], a.lse2 + row, kRowBytes, &s.q.full[stage]);
        bulk_load(s.row_dot[stage], a.row_dot + row, kRowBytes, &s.q.full[stage]);
        if (n == n0) {  // K and Q first: S can begin without V
          mbarrier_arrive_expect_tx(&s.v.full[0], kKeyBytes);
          load(s.V, &a.V, w.key0, w.kv_head, &s.v.full[0]);
        }
        s.grad.wait_empty(n);
        mbarrier_arrive_expect_tx(&s.grad.full[stage], kQueryBytes);
        load(s.dO[stage], &a.dO, query0, head, &s.grad.full[stage]);
        n++;
        tile = next_tile(a, w, tile);
      } while (tile != w.start);
    }
  }
}

// ---- The senders: a thread for each consumer warpgroup adds its parts of dQ to the sum in global memory

// Waits until this part of the sum may be added to. True for who comes first: it stores, and so the sum needs no zeros.
// The flag, as it was a moment ago, is `state`.
__device__ __forceinline__ bool wait_for_turn(int* flag, int state, int key_block, bool deterministic) {
  // Deterministic: it counts the blocks of keys that have added, in their order. Else 0: nothing is there, 1: the first
  // is storing, 2: add.
  if (!deterministic && state == 0 && atomicCAS(flag, 0, 1) == 0) return true;
  const int turn = deterministic ? key_block : 2;
  while (state != turn) state = load_acquire(flag);
  return turn == 0;
}

template <class S>
__device__ __forceinline__ void send_dQ(const Arguments& a, Shared<S>& s, int part) {
  int n = 0;
  for (int t = 0;; t++) {
    s.taken.wait_full(t);
    const Work& w = s.work[t % 2];
    if (w.rounds == 0) break;
    for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; head++) {
      int tile = w.start;
      do {
        const size_t place = (size_t(head) * a.query_tiles + tile) * 2 + part;
        int* flag = a.flags + place;
        float* sum = a.dQ + place * S::kPartFloats;
        const int state = load_acquire(flag);  // asked early: mostly it is 2 already, and then nobody waits for it
        s.dq[part].wait_full(n);
        const bool first = wait_for_turn(flag, state, w.key0 / kBc, a.p.deterministic);
        fence_proxy_async_global();  // what the flag vouches for was written by the async proxy, and is added to by it
        if (first)
          bulk_store(sum, s.dQ[part], sizeof s.dQ[part]);
        else
          bulk_reduce_add(sum, s.dQ[part], sizeof s.dQ[part]);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(&s.dq[part].empty[0]);
        if (first || a.p.deterministic) {
          bulk_wait<0>();
          store_release(flag, a.p.deterministic ? w.key0 / kBc + 1 : 2);
        }
        n++;
        tile = next_tile(a, w, tile);
      } while (tile != w.start);
    }
    mbarrier_arrive(&s.taken.empty[t % 2]);
  }
  bulk_wait<0>();
}

// ---- The consumers: warpgroup wg owns keys 64 wg … 64 wg + 63 of the block
template <class S>
__device__ __forceinline__ void consume(const Arguments& a, Shared<S>& s) {
  using Element = typename S::Element;
  constexpr int D = S::D, Br = S::Br, kPanels = D / 64;
  // The shuffle changes nothing; it tells the compiler that all lanes have the same number.
  const int wg = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1;
  const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  const auto release = [&](Mbarrier& empty) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&empty);
  };
  int n = 0;  // rounds, over all work

  for (int t = 0;; t++) {
    s.taken.wait_full(t);
    const int rounds = __shfl_sync(0xffffffffu, s.work[t % 2].rounds, 0);
    if (rounds == 0) break;
    float dK[D / 2] = {}, dV[D / 2] = {};        // 64 keys × D
    using Rounded = uint32_t(&)[Br / 16][4];     // 64 keys × Br queries, as wgmma's first operand
    using Part = float(&)[S::kPartQueries / 2];  // see Shape

    // Pᵀ and dSᵀ of one tile. dS also goes to shared memory.
    const auto scores = [&](Rounded P16, Rounded dS16, bool first) {
      float P[Br / 2], dS[Br / 2];
      s.q.wait_full(n);
      wgmma_fence();
      product<Br, D / 16, Major::K, kBc, Major::K, Br>(P, s.K[0][wg * 64], s.Q[n % 2][0][0]);  // Sᵀ = K Qᵀ
      wgmma_commit();
      if (first) s.v.wait_full(t);
      s.grad.wait_full(n);
      wgmma_fence();
      product<Br, D / 16, Major::K, kBc, Major::K, Br>(dS, s.V[0][wg * 64], s.dO[n % 2][0][0]);  // dPᵀ = V dOᵀ
      wgmma_commit();

      wgmma_wait<1>(P);  // P = exp(scale · S − LSE) while dP is computed
      const int column = lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < Br / 2; i += 4) {
        const float2 lse = *reinterpret_cast<const float2*>(&s.lse2[n % 2][i * 2 + column]);
        P[i] = exp2_fast(P[i] * a.scale_log2 - lse.x), P[i + 1] = exp2_fast(P[i + 1] * a.scale_log2 - lse.y);
        P[i + 2] = exp2_fast(P[i + 2] * a.scale_log2 - lse.x), P[i + 3] = exp2_fast(P[i + 3] * a.scale_log2 - lse.y);
      }
      if (wg * 64 + 64 > s.edge[n % 2].uncut) {
        const Edge edge = s.edge[n % 2];
        mask_unseen(P, edge, a.p.causal ? 1 : Br, wg * 64 + warp * 16 + lane / 4, column);
        if (edge.end < Br) mask_past_end(P, edge.end - column);
      }
#pragma unroll
      for (int i = 0; i < Br / 4; i++) P16[i / 4][i % 4] = pack<Element>(P[2 * i], P[2 * i + 1]);

      wgmma_wait<0>(dS);  // dS = P ∘ (dP − D)
      if (first) {        // the previous work's dV and dK may still be on their way out of dS and dQ
        if (thread == 0) bulk_wait_read<0>();
        named_barrier_sync(1, 256);
      }
      s.ds.wait_empty(n);
#pragma unroll
      for (int i = 0; i < Br / 2; i += 4) {
        const float2 d = *reinterpret_cast<const float2*>(&s.row_dot[n % 2][i * 2 + column]);
        dS16[i / 8][i / 4 % 2 * 2] = pack<Element>(P[i] * (dS[i] - d.x), P[i + 1] * (dS[i + 1] - d.y));
        dS16[i / 8][i / 4 % 2 * 2 + 1] = pack<Element>(P[i + 2] * (dS[i + 2] - d.x), P[i + 3] * (dS[i + 3] - d.y));
      }
      const int row = lane / 16 * 8 + lane % 8, piece = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
#pragma unroll
      for (int i = 0; i < Br / 16; i++) stmatrix_x4_trans(&s.dS[n % 2][wg][i * 16 + row][piece * 8], dS16[i]);
      fence_proxy_async();
      release(s.ds.full[n % 2]);
    };
    const auto start_dV = [&](Rounded P16) {  // dV += Pᵀ dO
      wgmma_fence();
      add_product<D, Br / 16, Br>(dV, P16, s.dO[n % 2][0][0]);
      wgmma_commit();
    };
    const auto start_dK = [&](Rounded dS16) {  // dK += dSᵀ Q
      wgmma_fence();
      add_product<D, Br / 16, Br>(dK, dS16, s.Q[n % 2][0][0]);
      wgmma_commit();
    };
    // dQᵀ = Kᵀ dSᵀ of round n, over all 128 keys: one part of it for each warpgroup.
    const auto start_dQ = [&](Part dQ, int n) {
      s.ds.wait_full(n);
      wgmma_fence();
      product<S::kPartQueries, kBc / 16, Major::MN, kBc, Major::K, Br>(dQ, s.K[S::kPartsByDim ? wg : 0][0],
                                                                       s.dS[n % 2][0][S::kPartsByDim ? 0 : wg * 64]);
      wgmma_commit();
    };
    // To the sender.
    const auto hand_over_dQ = [&](Part dQ, int n) {
      release(s.ds.empty[n % 2]);
      s.dq[wg].wait_empty(n);
      auto* staged = reinterpret_cast<float4*>(s.dQ[wg]) + thread;
#pragma unroll
      for (int i = 0; i < S::kPartQueries / 2; i += 4)
        staged[i * 32] = make_float4(dQ[i], dQ[i + 1], dQ[i + 2], dQ[i + 3]);
      fence_proxy_async();
      release(s.dq[wg].full[0]);
    };

    // The rounds. dQ of a tile waits for both warpgroups' dS, so it is computed a round later: they need not keep step.
    s.k.wait_full(t);
    {
      uint32_t P16[Br / 16][4], dS16[Br / 16][4];
      scores(P16, dS16, true);
      start_dV(P16);
      start_dK(dS16);
      wgmma_wait<0>(dK);
      release(s.grad.empty[n % 2]);
      mbarrier_arrive(&s.q.empty[n % 2]);
      n++;
    }
    for (int round = 1; round < rounds; round++, n++) {
      uint32_t P16[Br / 16][4], dS16[Br / 16][4];
      float dQ[S::kPartQueries / 2];
      scores(P16, dS16, false);
      start_dV(P16);
      start_dQ(dQ, n - 1);
      start_dK(dS16);
      wgmma_wait<1>(dQ);
      release(s.grad.empty[n % 2]);
      hand_over_dQ(dQ, n - 1);  // while dK is computed
      wgmma_wait<0>(dK);
      mbarrier_arrive(&s.q.empty[n % 2]);
    }
    float dQ[S::kPartQueries / 2];
    start_dQ(dQ, n - 1);
    wgmma_wait<0>(dQ);
    release(s.k.empty[0]);
    hand_over_dQ(dQ, n - 1);

    // dV and dK leave through the places of dS and dQ, while the next work's K, V and Q arrive.
    const auto store = [&](const TensorMap* map, float(&x)[D / 2], float factor, void* place) {
      auto* panels = static_cast<Element(*)[64][64]>(place);
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) r[e] = pack<Element>(x[8 * i + 2 * e] * factor, x[8 * i + 2 * e + 1] * factor);
        stmatrix_x4(&panels[i / 4][warp * 16 + lane % 16][((i % 4 * 2 + lane / 16) ^ (lane % 8)) * 8], r);
      }
      fence_proxy_async();
      named_barrier_sync(2 + wg, 128);
      if (thread == 0) {
        const Work& w = s.work[t % 2];
        for (int panel = 0; panel < kPanels; panel++)
          tma_store_3d(map, panels[panel], panel * 64, w.key0 + wg * 64, w.kv_head);
        bulk_commit();
      }
    };
    named_barrier_sync(1, 256);  // both warpgroups are done with dS
    store(&a.dV, dV, 1, reinterpret_cast<Element*>(s.dS) + wg * 64 * D);
    s.dq[wg].wait_empty(n);
    store(&a.dK, dK, a.scale, s.dQ[wg]);
    release(s.taken.empty[t % 2]);
  }
  if (thread == 0) bulk_wait<0>();
}

// ---- The kernel: barriers, then each warp to its role
template <class S>
__global__ void __launch_bounds__(384, 1) backward_kernel(const __grid_constant__ Arguments a) {
  auto& s = *dynamic_shared<Shared<S>>();
  grid_dependency_launch();
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&a.Q, &a.dO, &a.K, &a.V, &a.dK, &a.dV}) tma_prefetch(map);
    s.k.init(1, 8), s.v.init(1, 8), s.grad.init(1, 8);  // 1 producer; 8 warps consume
    s.q.init(1, 256);                                   // every thread, since each has read LSE, D and edge
    s.ds.init(8, 8);
    for (auto& part : s.dq) part.init(4, 1);
    s.taken.init(1, 10);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<S::Br == 80 ? 24 : 40>();
    grid_dependency_wait();  // for the counter, the flags and what each query row needs
    if (threadIdx.x == 0) produce(a, s);
    if (threadIdx.x == 32 || threadIdx.x == 64) send_dQ(a, s, int(threadIdx.x) / 32 - 1);
  } else {
    setmaxnreg_inc<S::Br == 80 ? 240 : 232>();
    consume(a, s);
  }
}

template <class S>
void backward_with(const Problem& p, const Tensors& t, Stream stream) {
  using Element = typename S::Element;
  if (p.q_elements() == 0) {
    const dim3 blocks = grid_of(ceil_div(p.kv_elements(), 256u));
    launch(clear<Element>, blocks, 256, 0, stream, static_cast<Element*>(t.dK), p.kv_elements());
    launch(clear<Element>, blocks, 256, 0, stream, static_cast<Element*>(t.dV), p.kv_elements());
    return;
  }
  const Arguments a = arguments_of<S>(p, t);
  launch(prepare<S>, grid_of(p.query_heads() * ceil_div(a.query_tiles * S::Br, kPreparedRows<S>)), 256, 0, stream, a,
         static_cast<const Element*>(t.O), static_cast<const Element*>(t.dO), static_cast<const float*>(t.LSE));
  launch_early(backward_kernel<S>, grid_of(std::min(a.work, multiprocessors())), 384, sizeof(Shared<S>), stream, a);
  launch_early(finish_dQ<S>, grid_of(p.query_heads() * a.query_tiles * (S::Br / kFinishedRows<S>)), 256, 0, stream, a,
               static_cast<Element*>(t.dQ));
}

// Calls `run` with the shape for this problem.
template <class Element, class Run>
auto with_shape_of(const Problem& p, const Run& run) {
  if (p.D == 64) return run(Shape<Element, 64, 128>());
  if (p.Nq <= 512) return run(Shape<Element, 128, 64>());  // fewer rows past the end and above the diagonal
  return run(Shape<Element, 128, 80>());
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  const auto run = [&](auto shape) { backward_with<decltype(shape)>(p, t, stream); };
  p.dtype == DType::bf16 ? with_shape_of<__nv_bfloat16>(p, run) : with_shape_of<__half>(p, run);
}

std::vector<Workspace> workspace(const Problem& p) {
  return with_shape_of<__half>(p, [&](auto shape) { return workspace_of<decltype(shape)>(p); });
}

const Registration step = register_step(__FILE__, {.idea = "the backward pass with TMA, wgmma and warps of three roles",
                                                   .rung = 5,
                                                   .dtypes = {DType::fp16, DType::bf16},
                                                   .head_dims = {64, 128},
                                                   .kv_heads = true,
                                                   .min_sm = 90,
                                                   .spreads_nonfinite = true,
                                                   .workspace = workspace,
                                                   .backward = backward});

}  // namespace
