// What docs/08_hopper_async.md counts: bytes of global memory that each kernel asks for. TMA counts what lies inside
// the tensor.
#include <algorithm>

#include "harness/closed_forms.h"

namespace {
using namespace flash;

// A block reads its Br queries once, if they see any key, and tiles of Bc keys of K and of V up to the last key that
// one of them sees; O and LSE are written once.
std::vector<KernelBytes> forward(const char* kernel, const Problem& p, int Br, int Bc) {
  const double heads = double(p.query_heads()), row = p.D * double(bytes_of(p.dtype));
  double queries = 0;
  for (int query0 = 0; query0 < p.Nq; query0 += Br) {
    const int end = query0 + Br < p.Nq ? query0 + Br : p.Nq;
    if (keys_seen_by(p, end - 1) > 0) queries += end - query0;
  }
  return {{kernel, heads * row * (queries + 2 * keys_walked(p, Br, Bc)), heads * p.Nq * (row + 4)}};
}

// The shapes of the first three files.
template <const char* kernel>
std::vector<KernelBytes> in_turn(const Problem& p) {
  return forward(kernel, p, 128, p.D == 256 ? 64 : 128);
}

// Under a causal mask tiles come from a counter, which a kernel before sets to 0 and each tile raises.
std::vector<KernelBytes> overlapped(const Problem& p) {
  const bool short_rows = p.Nk < 2048;
  const int Br = p.D == 64 ? 256 : p.D == 256 || short_rows ? 128 : 192;
  const int Bc = p.D != 128 || p.Nk <= 512 ? 64 : short_rows ? 128 : 80;
  std::vector<KernelBytes> kernels = forward("overlapped", p, Br, Bc);
  if (p.causal) {
    kernels.front().written += 4.0 * double(p.query_heads()) * ((p.Nq + Br - 1) / Br);
    kernels.push_back({"start_counting", 0, 4});
  }
  return kernels;
}

// Quantising reads everything once and writes it in bytes, with a scale for Bc rows of Q, K and V, and clears and
// raises each head's largest scale of V; V has its keys rounded up to 16. The attention asks for boxes of V of 128
// keys, also where tiles have 96; the scales of a tile of Q and of its first keys; and each thread for those of K and
// V, a tile ahead.
std::vector<KernelBytes> fp8(const Problem& p) {
  const bool four = p.D == 64 && p.Nk <= (p.causal ? 4096 : 1024), wide = p.D == 64 && !four;
  const bool two = p.D == 256 || (p.D == 128 && p.Nk < (p.causal ? 2048 : 1024));
  const int Br = four ? 256 : two ? 128 : 192, Bc = four ? 64 : two || wide ? 128 : 96, box = four ? 64 : 128;
  const int q_scales = (Br + Bc - 1) / Bc + (Br % Bc ? 1 : 0);
  const double q_heads = double(p.query_heads()), kv_heads = double(p.kv_heads());
  const double q = double(p.q_elements()), kv = double(p.kv_elements()), from = double(bytes_of(input_dtype(p)));
  const int pitch = (p.Nk + 15) / 16 * 16;
  const auto tiles_of = [Bc](double rows) { return int(rows + Bc - 1) / Bc; };
  double tiles = 0, read = 0;
  for (int query0 = 0; query0 < p.Nq; query0 += Br) {
    const int end = std::min(query0 + Br, p.Nq), key_tiles = tiles_of(keys_seen_by(p, end - 1));
    tiles++;
    if (key_tiles == 0) continue;
    read += (end - query0) * p.D + 4 * q_scales + 4 + 4;
    for (int key0 = 0; key0 < key_tiles * Bc; key0 += Bc)
      read += (std::min(Bc, p.Nk - key0) + std::min(box, pitch - key0)) * p.D;
    for (int row = query0 + 63; row < query0 + Br; row += 64) {  // the last of a warpgroup, which may be past the end
      const int own = std::min(key_tiles, tiles_of(keys_seen_by(p, row)));
      read += 128 * 4 * (own + (own > 0 && own < key_tiles ? 1 : 0));
    }
  }
  std::vector<KernelBytes> kernels = {
      {"quantise_rows", from * (q + kv),
       q + kv + 4 * q_heads * tiles_of(p.Nq) + 2 * kv_heads * tiles_of(p.Nk) + 4 * kv_heads},
      {"quantise_columns", from * kv, kv_heads * (p.D * pitch + (2 + 4) * tiles_of(p.Nk))},
      {"fp8", q_heads * read, q_heads * p.Nq * (2 * p.D + 4) + (p.causal ? 4 * q_heads * tiles : 0)}};
  if (p.causal) kernels.push_back({"start_counting", 0, 4});
  return kernels;
}

// A block keeps 128 keys: K and V once, and for each query head of the group the tiles that see one of them: Q, dO, and
// LSE and D for whole tiles. Each tile of dQ goes to the sum in fp32.
std::vector<KernelBytes> backward(const Problem& p) {
  const int Br = p.D == 64 ? 128 : p.Nq <= 512 ? 64 : 80;
  const double heads = double(p.query_heads()), element = double(bytes_of(p.dtype)), row = p.D * element;
  const double q = double(p.q_elements()), kv = double(p.kv_elements());
  const int tiles = (p.Nq + Br - 1) / Br;
  const double visits = heads * query_tiles_walked(p, 128, Br);
  if (q == 0) return {{"clear", 0, 2 * kv * element}};  // dK and dV are zero
  double summed = 0;                                    // tiles of dQ to which some key has added
  for (int tile = 0; tile < tiles; tile++) {
    const int end = (tile + 1) * Br < p.Nq ? (tile + 1) * Br : p.Nq;
    summed += keys_seen_by(p, end - 1) > 0;
  }
  return {{"prepare", 2 * q * element + 4 * double(p.query_rows()), heads * tiles * (Br * 8 + 2 * 4) + 4},
          {"backward_kernel", 2 * kv * element + heads * queries_walked(p, 128, Br) * 2 * row + visits * Br * 8,
           2 * kv * element + visits * Br * p.D * 4, true},
          {"finish_dQ", heads * summed * Br * p.D * 4, q * element}};
}

constexpr char kTmaWgmma[] = "tma_wgmma", kWarpSpecialized[] = "warp_specialized", kPingpong[] = "pingpong";
const ClosedFormRegistration forms[] = {{__FILE__, kTmaWgmma, Pass::forward, in_turn<kTmaWgmma>},
                                        {__FILE__, kWarpSpecialized, Pass::forward, in_turn<kWarpSpecialized>},
                                        {__FILE__, kPingpong, Pass::forward, in_turn<kPingpong>},
                                        {__FILE__, "overlapped", Pass::forward, overlapped},
                                        {__FILE__, "fp8", Pass::forward, fp8},
                                        {__FILE__, "backward", Pass::backward, backward}};

}  // namespace
