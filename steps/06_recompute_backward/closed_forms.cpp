// What docs/06_recompute_backward.md counts: bytes of global memory that each kernel asks for.
#include "harness/closed_forms.h"

namespace {
using namespace flash;

KernelBytes row_dots(const Problem& p) {
  return {"row_dots", 4 * 2 * double(p.q_elements()), 4 * double(p.query_rows())};
}

// A block owns Bc keys: K and V once, and for each query head of the group the queries from the first that sees one of
// them, in tiles of Br: Q, dO, LSE and D.
KernelBytes keys_gradient(const Problem& p, int Bc, int Br) {
  const double keys = double(p.kv_elements());
  return {"keys_gradient", 4 * (2 * keys + double(p.query_heads()) * queries_walked(p, Bc, Br) * (2 * p.D + 2)),
          4 * 2 * keys};
}

// A block owns Br queries: Q and dO once, LSE and D once for each of `lanes` lanes, and `keys` rows of K and V a head.
KernelBytes queries_gradient(const Problem& p, int lanes, double keys) {
  const double q = double(p.q_elements()), heads = double(p.query_heads());
  return {"queries_gradient", 4 * (2 * q + 2 * lanes * double(p.query_rows()) + heads * keys * 2 * p.D), 4 * q};
}

std::vector<KernelBytes> backward(const Problem& p) {
  const int owned = p.D < 128 ? 32 : 16, walked = 32;
  return {row_dots(p), keys_gradient(p, owned, walked), queries_gradient(p, 1, keys_walked(p, owned, walked))};
}

// All eight lanes of a row ask for its LSE and D. Keys are fetched up to the last one seen, not to the end of its tile.
std::vector<KernelBytes> register_tiled(const Problem& p) {
  const int own_keys = p.D < 128 ? 64 : 32, own_queries = p.D < 128 ? 128 : 64;
  return {row_dots(p), keys_gradient(p, own_keys, own_keys), queries_gradient(p, 8, keys_walked(p, own_queries, 1))};
}

const ClosedFormRegistration forms[] = {{__FILE__, "backward", Pass::backward, backward},
                                        {__FILE__, "register_tiled", Pass::backward, register_tiled}};

}  // namespace
