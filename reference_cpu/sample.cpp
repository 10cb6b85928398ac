// Which rows a long problem is checked on.
#include <algorithm>
#include <random>

#include "reference_cpu/attention.h"

namespace flash::reference {
namespace {

// `wanted` of the numbers from 0 to count − 1: one out of each of as many equal stretches, first and last included.
std::vector<int64_t> spread(int64_t count, int64_t wanted, std::mt19937_64& random) {
  std::vector<int64_t> numbers;
  wanted = std::min(wanted, count);
  for (int64_t k = 0; k < wanted; ++k) {
    const int64_t begin = count / wanted * k + std::min(k, count % wanted);
    const int64_t length = count / wanted + (k < count % wanted ? 1 : 0);
    numbers.push_back(begin + int64_t(random() % uint64_t(length)));
  }
  if (wanted > 0) numbers.front() = 0;
  if (wanted > 1) numbers.back() = count - 1;
  return numbers;
}

}  // namespace

Selection sample(const Problem& problem, int rows, int heads, uint64_t seed) {
  std::mt19937_64 random(seed);
  Selection selection;
  selection.everything = false;
  selection.query_rows = spread(int64_t(problem.query_rows()), std::max(rows, 2), random);

  const std::vector<int64_t> key_heads = spread(int64_t(problem.kv_heads()), std::max(heads, 1), random);
  for (const int64_t head : key_heads) {
    const int64_t rows_per_head = std::max<int64_t>(2, rows / int64_t(key_heads.size()));
    for (const int64_t key : spread(problem.Nk, rows_per_head, random)) {
      selection.key_rows.push_back(head * problem.Nk + key);
    }
  }
  return selection;
}

}  // namespace flash::reference
