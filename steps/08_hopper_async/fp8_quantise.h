// From bf16 or fp32 to e4m3, for fp8.cu: a power of two as the scale of each tile, Q and K rotated, V transposed.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include "fp8_quantise_columns.h"
#include "fp8_quantise_rows.h"
#include "harness/philox.h"

namespace {

// The largest numbers of Q, K and V begin at 0, where they are asked for.
__global__ void clear_largest(float* largest) {
  grid_dependency_launch();
  largest[threadIdx.x] = 0.0f;
}

// ---- For the host. Bc: how many rows have a scale in common; of K and V the attention takes as many at a time.

// The workspace that holds what quantising leaves, and where it is.
inline std::vector<Workspace> quantised_workspace(const Problem& p, int Bc) {
  const size_t q_scales = p.query_heads() * ceil_div(p.Nq, Bc), kv_scales = p.kv_heads() * ceil_div(p.Nk, Bc);
  return {{.name = "Q in e4m3", .bytes = p.q_elements()},
          {.name = "K in e4m3", .bytes = p.kv_elements()},
          {.name = "V in e4m3", .bytes = p.kv_heads() * p.D * pitch_of(p.Nk)},
          {.name = "scales of Q", .bytes = q_scales * sizeof(float)},
          {.name = "scales of K and V", .bytes = kv_scales * sizeof(TileScales)},
          {.name = "largest", .bytes = (3 + p.kv_heads()) * sizeof(float)}};
}

inline Quantised quantised(const Tensors& t) {
  return {t.scratch<uint8_t>("Q in e4m3"),
          t.scratch<uint8_t>("K in e4m3"),
          t.scratch<uint8_t>("V in e4m3"),
          t.scratch<float>("scales of Q"),
          t.scratch<TileScales>("scales of K and V"),
          t.scratch<float>("largest")};
}

// Launches the kernels.
template <class T, int D, int Bc>
void quantise_from(const Problem& p, const Tensors& t, const Quantised& to, Stream stream) {
  const auto rows = [](const void* from, uint8_t* to, float* largest, int rows, size_t heads) {
    const int tiles = ceil_div(rows, Bc);
    return Rows<T>{static_cast<const T*>(from), to, largest, rows, tiles, checked_grid_length(tiles * heads), {}};
  };
  Rows<T> q = rows(t.Q, to.Q, to.largest, p.Nq, p.query_heads());
  Rows<T> k = rows(t.K, to.K, to.largest + 1, p.Nk, p.kv_heads());
  // Random signs before the rotation: no row of ones is brought into one column by it. The signs of Q are turned where
  // scale < 0.
  for (unsigned i = 0; i < 8; i++) {
    const uint4 four = philox4x32_10(make_uint4(i / 4, 0, 0, 0), make_uint2(0, 0));
    const uint32_t random = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
    k.minus[i] = p.quantisation.rotation ? random : 0;
    q.minus[i] = p.scale < 0 ? ~k.minus[i] : k.minus[i];
  }
  const Columns<T> v{
      static_cast<const T*>(t.V), to.V, to.kv_scales, to.largest + 2, to.largest + 3, p.Nk, k.tiles_of_head};

  const auto go = [&](Scales scales) {
    const unsigned blocks = unsigned(multiprocessors() * kRowBlocks<D, Bc>);
    launch(quantise_rows<T, D, Bc>, std::min(q.tiles + k.tiles, blocks), kRowThreads<D, Bc>, 0, stream, q, k,
           to.q_scale, to.kv_scales, p.quantisation.rotation, scales, to.largest + 3, int(p.kv_heads()));
    launch_early(quantise_columns<T, D, Bc>, k.tiles, kColumnThreads<D, Bc>, 0, stream, v, scales);
  };
  if (p.quantisation.tile_scales) return go(Scales::of_tiles);
  launch(clear_largest, 1, 3, 0, stream, to.largest);
  go(Scales::measure);
  go(Scales::of_tensor);
}

}  // namespace
