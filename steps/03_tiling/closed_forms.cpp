// What docs/03_tiling.md counts: bytes of global memory that each kernel asks for.
#include "harness/closed_forms.h"

namespace {
using namespace flash;

// Scores by tiles of Br x Bc: where a query of the tile sees a key of it, its rows of Q and of K; and all of S.
KernelBytes scores(const Problem& p, int Br, int Bc) {
  return {"scores", 4 * p.D * double(p.query_heads()) * rows_of_seen_tiles(p, Br, Bc), 4 * double(p.scores())};
}

// Three sweeps over S; the third writes zeros where a row sees nothing, without a look at S.
KernelBytes softmax(const Problem& p) {
  return {"softmax", 4 * (3 * double(p.scores()) - double(p.query_heads()) * empty_rows(p) * p.Nk),
          4 * double(p.scores() + p.query_rows())};
}

// O by tiles of Br rows: P once for each of `strips` strips of columns, V once for each tile.
KernelBytes weighted_sum(const Problem& p, int Br, int strips) {
  const double heads = double(p.query_heads());
  return {"weighted_sum", 4 * heads * (strips * elements_walked(p, Br, 32) + p.D * keys_walked(p, Br, 32)),
          4 * double(p.q_elements())};
}

std::vector<KernelBytes> shared_tiles(const Problem& p) {
  return {scores(p, 32, 32), softmax(p), weighted_sum(p, 32, p.D / 32)};
}

std::vector<KernelBytes> register_tiles(const Problem& p) {
  return {scores(p, 128, 64), softmax(p), weighted_sum(p, p.D < 128 ? 128 : 64, 1)};
}

const ClosedFormRegistration forms[] = {{__FILE__, "shared_tiles", Pass::forward, shared_tiles},
                                        {__FILE__, "register_tiles", Pass::forward, register_tiles}};

}  // namespace
