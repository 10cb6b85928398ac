// wgmma: the threads of a warpgroup meet to start a product. It is computed when they wait for it.
//
// A descriptor's address counts from the beginning of dynamic shared memory, which lies at a multiple of 1,024 bytes.
#include "simt/wgmma.h"

#include <algorithm>
#include <cmath>

#include "simt/async.h"
#include "simt/findings.h"
#include "simt/matrix_product.h"
#include "simt/observer.h"

namespace simt {
namespace {

constexpr int kRows = 64;           // of a and d
constexpr unsigned kRowBytes = 32;  // of one row of an operand that is K-major: 16 elements of 2 bytes, or 32 of 1

Warpgroup& my_group() {
  Warpgroup& group = runner->async->warpgroups[size_t(runner->running->id / kWarpgroupSize)];
  group.used = true;
  return group;
}

// ---- Operands in shared memory

// An operand's pieces of 16 bytes, as offsets in dynamic shared memory: row after row of m (n) when K-major, of k when
// MN-major.
struct Pieces {
  std::array<uint32_t, 512> offsets;
  size_t count = 0;
  void add(size_t offset) { offsets[count++] = uint32_t(offset ^ (offset >> 7 & 7) << 4); }
};

Pieces pieces_of(uint64_t operand, Major major, int mn) {
  const size_t start = (operand & 0x3fff) << 4, next = (operand >> 16 & 0x3fff) << 4;
  const size_t group = (operand >> 32 & 0x3fff) << 4;  // from 8 rows of 128 bytes to the next 8
  Pieces pieces;
  if (major == Major::K) {
    for (size_t row = 0; row < size_t(mn); ++row)
      for (size_t half = 0; half < 2; ++half) pieces.add(start + row / 8 * group + row % 8 * 128 + half * 16);
  } else {
    for (size_t k = 0; k < 16; ++k)
      for (size_t i = 0; i < size_t(mn) / 8; ++i)
        pieces.add(start + i / 8 * next + k / 8 * group + k % 8 * 128 + i % 8 * 16);
  }
  return pieces;
}

// Ends the block if an operand does not lie where it may.
void check_operand(uint64_t operand, const Pieces& pieces, const void* code) {
  if (operand >> 3 & 7)
    runner->fail(Kind::misaligned, code, {{"an operand of wgmma that does not begin in the first of 8 rows"}});
  const size_t last = *std::max_element(pieces.offsets.begin(), pieces.offsets.begin() + pieces.count);
  if (last + 16 > runner->dynamic_bytes())
    runner->fail(Kind::out_of_bounds, code,
                 {{"an operand of wgmma that reads dynamic shared memory up to byte " + std::to_string(last + 16) +
                   " of " + std::to_string(runner->dynamic_bytes())}});
}

// ---- The arithmetic

struct Scratch {
  alignas(32) unsigned char bytes[256 * kRowBytes];
  alignas(32) float values[256 * 32], a[kRows * 32], b[32 * 256];
};
Scratch& scratch() {
  static thread_local std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  return *scratch;
}

void transpose(const float* from, float* to, int rows, int columns) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// An operand's values as [m][k] (k_first) or as [k][n].
void gather(uint64_t operand, Major major, Element type, int mn, bool k_last, float* values) {
  Scratch& s = scratch();
  const Pieces pieces = pieces_of(operand, major, mn);
  for (size_t i = 0; i < pieces.count; ++i) std::memcpy(&s.bytes[i * 16], runner->shared + pieces.offsets[i], 16);
  const int k = int(kRowBytes / element_bytes(type));
  if ((major == Major::K) == k_last) return to_floats(type, s.bytes, values, size_t(mn) * k);
  to_floats(type, s.bytes, s.values, size_t(mn) * k);
  major == Major::K ? transpose(s.values, values, mn, k) : transpose(s.values, values, k, mn);
}

void multiply(const Product& product) {
  Scratch& s = scratch();
  const WarpgroupProduct& what = product.what;
  const int k = int(kRowBytes / element_bytes(what.type));
  if (what.a_registers) {
    to_floats(what.type, product.a_registers.data(), s.a, size_t(kRows * k));
  } else {
    gather(what.a, what.a_major, what.type, kRows, /*k_last=*/true, s.a);
  }
  gather(what.b, what.b_major, what.type, what.n, /*k_last=*/false, s.b);
  std::vector<float>& values = product.accumulator->values;
  if (!what.add) std::fill(values.begin(), values.end(), 0.0f);
  multiply_add(s.a, s.b, values.data(), kRows, what.n, k);
  runner->counts.matrix_flops += uint64_t(2 * kRows) * uint64_t(what.n) * uint64_t(k);
}

// ---- Registers

// Calls visit(thread, i, place) for each register d[i], with its place in [64][n].
template <class Visit>
void for_each_register(int n, Visit visit) {
  for (int t = 0; t < kWarpgroupSize; ++t)
    for (int i = 0; i < n / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + (i & 2 ? 8 : 0), column = i / 4 * 8 + t % 4 * 2 + (i & 1);
      visit(t, i, size_t(row * n + column));
    }
}

struct Call {
  WarpgroupProduct what;
  const void* code;
};

// The accumulator that these threads' registers are, made if they are none yet.
Accumulator& accumulator_of(Warpgroup& group, Meeting& meeting) {
  const WarpgroupProduct& what = static_cast<Call*>(meeting.brought[0])->what;
  for (auto& known : group.accumulators)
    if (known->d[0] == what.d && known->n == what.n) return *known;
  Accumulator& made = *group.accumulators.emplace_back(std::make_unique<Accumulator>());
  made.n = what.n;
  made.values.resize(size_t(kRows * what.n));
  for (int t = 0; t < kWarpgroupSize; ++t) made.d[size_t(t)] = static_cast<Call*>(meeting.brought[size_t(t)])->what.d;
  for_each_register(what.n, [&](int t, int i, size_t place) {
    made.values[place] = made.d[size_t(t)][i];
    made.d[size_t(t)][i] = NAN;  // not to be looked at before the wait
  });
  return made;
}

// Rows of 32 bytes from a's registers, each of which holds 4 bytes.
std::vector<unsigned char> rows_of_registers(const Meeting& meeting) {
  std::vector<unsigned char> rows(kRows * kRowBytes);
  for (unsigned t = 0; t < unsigned(kWarpgroupSize); ++t)
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8;
      std::memcpy(&rows[row * kRowBytes + t % 4 * 4 + i / 2 * 16],
                  &static_cast<Call*>(meeting.brought[t])->what.a_registers[i], 4);
    }
  return rows;
}

bool alike(const WarpgroupProduct& x, const WarpgroupProduct& y) {
  return x.type == y.type && x.a_major == y.a_major && x.b_major == y.b_major && x.add == y.add && x.n == y.n &&
         x.a == y.a && x.b == y.b && !x.a_registers == !y.a_registers;
}

// ---- What the last thread of the warpgroup to arrive does

void check_commits(const Warpgroup& group, const void* code) {
  for (unsigned commits : group.commits)
    if (commits != group.committed)
      runner->fail(Kind::divergence, code, {{"not all threads of the warpgroup have called wgmma_commit as often"}});
}

void start_for_all(Meeting& meeting, unsigned) {
  Warpgroup& group = my_group();
  const Call& first = *static_cast<Call*>(meeting.brought[0]);
  for (void* brought : meeting.brought)
    if (!alike(first.what, static_cast<Call*>(brought)->what))
      runner->fail(Kind::divergence, first.code, {{"wgmma with operands that differ between threads of a warpgroup"}});
  check_commits(group, first.code);
  const size_t before = group.accumulators.size();
  Product product{first.what, &accumulator_of(group, meeting), {}, first.code, {}};
  const bool needs_fence = group.accumulators.size() > before || first.what.a_registers;
  if (needs_fence && std::find(group.fenced.begin(), group.fenced.end(), false) != group.fenced.end())
    add_note({Kind::missing_fence,
              first.code,
              runner->who(),
              {{"wgmma without a wgmma_fence between it and what its registers were used for before"}}});
  if (first.what.a_registers) product.a_registers = rows_of_registers(meeting);

  const Pieces b = pieces_of(first.what.b, first.what.b_major, first.what.n);
  check_operand(first.what.b, b, first.code);
  const Pieces a = first.what.a_registers ? Pieces{} : pieces_of(first.what.a, first.what.a_major, kRows);
  if (a.count > 0) check_operand(first.what.a, a, first.code);
  if (observer()) {
    const int leader = runner->running->id / kWarpgroupSize * kWarpgroupSize;
    observer()->start_product_reads(a.offsets.data(), a.count, leader, first.code);
    observer()->start_product_reads(b.offsets.data(), b.count, leader, first.code);
    product.issued = observer()->take_view(leader);
  }
  ++product.accumulator->pending;
  group.groups.back().push_back(std::move(product));
}

void finish_product(Warpgroup& group, const Product& product) {
  if (observer()) {
    const WarpgroupProduct& what = product.what;
    const int number = runner->running->id / kWarpgroupSize;
    const Pieces b = pieces_of(what.b, what.b_major, what.n);
    observer()->finish_product_reads(b.offsets.data(), b.count, product.issued, number, group, product.code);
    if (!what.a_registers) {
      const Pieces a = pieces_of(what.a, what.a_major, kRows);
      observer()->finish_product_reads(a.offsets.data(), a.count, product.issued, number, group, product.code);
    }
  }
  multiply(product);
  --product.accumulator->pending;
}

struct Wait {
  size_t pending;
  const void* code;
};

void wait_for_all(Meeting& meeting, unsigned) {
  Warpgroup& group = my_group();
  const Wait& wait = *static_cast<Wait*>(meeting.brought[0]);
  check_commits(group, wait.code);
  if (observer()) observer()->begin_product_wait(group);
  for (; group.groups.size() - 1 > wait.pending; group.groups.pop_front())
    for (const Product& product : group.groups.front()) finish_product(group, product);
  if (observer()) observer()->end_product_wait(group, runner->running->id / kWarpgroupSize * kWarpgroupSize);
  for (auto& accumulator : group.accumulators) {
    if (accumulator->pending > 0) continue;
    for_each_register(accumulator->n,
                      [&](int t, int i, size_t place) { accumulator->d[size_t(t)][i] = accumulator->values[place]; });
    accumulator.reset();
  }
  std::erase(group.accumulators, nullptr);
  group.fenced = {};
}

void meet_in_group(void* mine, BlockRunner::Act act, const char* what, const void* code) {
  BlockRunner& block = *runner;
  const int id = block.running->id;
  if (id / kWarpgroupSize * kWarpgroupSize + kWarpgroupSize > block.threads)
    block.fail(Kind::divergence, code,
               {{std::string(what) + " in a block of " + std::to_string(block.threads) +
                 " threads, the last of which are no warpgroup of 128"}});
  block.meet(my_group().meeting, kWarpgroupSize, id % kWarpgroupSize, mine, act, 0, what, code,
             /*orders_memory=*/false);
}

}  // namespace

uint64_t describe_operand(const void* shared, unsigned next) {
  const size_t offset = uintptr_t(shared) - uintptr_t(runner->shared);
  if (offset >= kSharedArenaBytes || offset % 16 != 0)
    runner->fail(offset % 16 == 0 ? Kind::out_of_bounds : Kind::misaligned, SIMT_CALLER,
                 {{"an operand of wgmma that is not at a multiple of 16 bytes of dynamic shared memory"}});
  return offset >> 4 | uint64_t(next >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

void start_product(const WarpgroupProduct& product) {
  const ObservationPause pause;
  Call mine{product, SIMT_CALLER};
  meet_in_group(&mine, start_for_all, "wgmma", mine.code);
}

void fence_warpgroup() {
  const ObservationPause pause;
  my_group().fenced[size_t(runner->running->id % kWarpgroupSize)] = true;
}

void commit_products() {
  const ObservationPause pause;
  Warpgroup& group = my_group();
  unsigned& mine = group.commits[size_t(runner->running->id % kWarpgroupSize)];
  if (++mine <= group.committed) return;
  group.committed = mine;
  group.groups.emplace_back();
}

void wait_for_products(int pending) {
  const ObservationPause pause;
  Wait mine{size_t(pending), SIMT_CALLER};
  meet_in_group(&mine, wait_for_all, "wgmma_wait", mine.code);
}

}  // namespace simt
