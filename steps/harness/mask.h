// Which keys a query sees (a causal mask is aligned bottom right), for host and kernels alike.
#pragma once
#include "harness/kernel.h"

namespace flash {
inline namespace FLASH_TARGET {

// Query `query` sees the keys 0, 1, …, keys_seen − 1: all of them, or with a causal mask those up to its own place
// counted from the end. 0 for a query that sees none.
__host__ __device__ inline int keys_seen(const Problem& p, int query) {
  if (!p.causal) return p.Nk;
  const int seen = query + 1 - p.Nq + p.Nk;
  return seen < 0 ? 0 : seen;
}

// The first query that sees key `key`; every later one does too. At most Nq.
__host__ __device__ inline int first_query(const Problem& p, int key) {
  if (!p.causal) return 0;
  const int first = key - p.Nk + p.Nq;
  return first < 0 ? 0 : first;
}

}  // namespace FLASH_TARGET
}  // namespace flash
