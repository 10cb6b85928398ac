// wgmma: the threads of a warpgroup meet to start a product. It is computed when they wait for it.
//
// A descriptor's address counts from the beginning of dynamic shared memory, which lies at a multiple of 1,024 bytes.
#include "simt/wgmma.h"

#include <algorithm>
#include <bit>

#include "simt/async.h"
#include "simt/findings.h"
#include "simt/matrix_product.h"
#include "simt/observer.h"

namespace simt {
namespace {

Warpgroup& my_group() {
  Warpgroup& group = runner->async->warpgroups[size_t(runner->running->id / kWarpgroupSize)];
  group.used = true;
  return group;
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

// What stands in a register whose product is under way: a NaN that nothing else makes.
const float kUnderWay = std::bit_cast<float>(0x7fc0a51du);
bool is_under_way(const float& x) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(kUnderWay); }

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
    made.d[size_t(t)][i] = kUnderWay;  // not to be looked at before the wait
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
  const float* d;  // results that are wanted after it
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
    bool untouched = true;
    for_each_register(accumulator->n,
                      [&](int t, int i, size_t) { untouched &= is_under_way(accumulator->d[size_t(t)][i]); });
    if (!untouched)  // by then they may be anything on a thread's stack
      runner->fail(Kind::barrier_misuse, wait.code,
                   {{"the registers of a wgmma were used for something else before it was waited for"}});
    for_each_register(accumulator->n,
                      [&](int t, int i, size_t place) { accumulator->d[size_t(t)][i] = accumulator->values[place]; });
    accumulator.reset();
  }
  std::erase(group.accumulators, nullptr);
  group.fenced = {};
  for (const auto& accumulator : group.accumulators) {
    if (accumulator->d[0] != wait.d) continue;
    const auto& uncommitted = group.groups.back();
    const bool committed = std::none_of(uncommitted.begin(), uncommitted.end(), [&](const Product& product) {
      return product.accumulator == accumulator.get();
    });
    runner->fail(Kind::barrier_misuse, wait.code,
                 {{committed ? "wgmma_wait names registers whose products may still run: it leaves " +
                                   std::to_string(wait.pending) + " pending"
                             : std::string("wgmma_wait names registers whose products nobody has committed")}});
  }
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

uint64_t describe_operand(const void* shared, unsigned next, unsigned row_bytes) {
  const size_t offset = uintptr_t(shared) - uintptr_t(runner->shared);
  if (offset >= kSharedArenaBytes || offset % 16 != 0)
    runner->fail(offset % 16 == 0 ? Kind::out_of_bounds : Kind::misaligned, SIMT_CALLER,
                 {{"an operand of wgmma that is not at a multiple of 16 bytes of dynamic shared memory"}});
  return offset >> 4 | uint64_t(next >> 4) << 16 | uint64_t(8 * row_bytes >> 4) << 32 |
         uint64_t(row_bytes == 128 ? 1 : 2) << 62;
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

void wait_for_products(int pending, const float* d) {
  const ObservationPause pause;
  Wait mine{size_t(pending), d, SIMT_CALLER};
  meet_in_group(&mine, wait_for_all, "wgmma_wait", mine.code);
}

}  // namespace simt
