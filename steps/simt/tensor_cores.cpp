// mma, ldmatrix and stmatrix: instructions of a whole warp. Its lanes meet, and the last one acts for all.
#include "simt/tensor_cores.h"

#include "simt/collectives.h"
#include "simt/matrix_product.h"
#include "simt/observer.h"

namespace simt {
namespace {

constexpr unsigned kAllLanes = ~0u;

// A register that holds two neighbours of 16 bits.
uint32_t pair(uint16_t first, uint16_t second) { return first | uint32_t(second) << 16; }
uint16_t first_of(uint32_t pair) { return uint16_t(pair); }
uint16_t second_of(uint32_t pair) { return uint16_t(pair >> 16); }

// What a lane brings to mma.
struct Fragments {
  Element type;
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

void multiply_fragments(Meeting& meeting, unsigned) {
  const auto lane = [&](int i) { return static_cast<Fragments*>(meeting.brought[i]); };
  uint16_t a_bits[16][16], b_bits[16][8];
  alignas(32) float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < kWarpSize; ++i) {
    const int g = i / 4, t = i % 4 * 2;
    for (int half = 0; half < 4; ++half) {
      uint16_t* to = &a_bits[g + half % 2 * 8][t + half / 2 * 8];
      to[0] = first_of(lane(i)->a[half]);
      to[1] = second_of(lane(i)->a[half]);
    }
    for (int half = 0; half < 2; ++half) {
      b_bits[t + half * 8][g] = first_of(lane(i)->b[half]);
      b_bits[t + half * 8 + 1][g] = second_of(lane(i)->b[half]);
    }
    for (int j = 0; j < 4; ++j) d[g + j / 2 * 8][t + j % 2] = lane(i)->d[j];
  }
  to_floats(lane(0)->type, a_bits, a[0], 16 * 16);
  to_floats(lane(0)->type, b_bits, b[0], 16 * 8);
  multiply_add(a[0], b[0], d[0], 16, 8, 16);
  for (int i = 0; i < kWarpSize; ++i)
    for (int j = 0; j < 4; ++j) lane(i)->d[j] = d[i / 4 + j / 2 * 8][i % 4 * 2 + j % 2];
}

// What a lane brings to ldmatrix or stmatrix: registers, and the row whose address it gives.
struct MatrixRow {
  uint32_t* r;
  uint16_t* row;
};

void load_fragments(Meeting& meeting, unsigned) {
  const auto row = [&](int i) { return static_cast<MatrixRow*>(meeting.brought[i])->row; };
  for (int i = 0; i < kWarpSize; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      const uint16_t* from = row(matrix * 8 + i / 4) + i % 4 * 2;
      static_cast<MatrixRow*>(meeting.brought[i])->r[matrix] = pair(from[0], from[1]);
    }
}

void load_transposed_fragments(Meeting& meeting, unsigned) {
  const auto row = [&](int i) { return static_cast<MatrixRow*>(meeting.brought[i])->row; };
  for (int i = 0; i < kWarpSize; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int k = matrix * 8 + i % 4 * 2;
      static_cast<MatrixRow*>(meeting.brought[i])->r[matrix] = pair(row(k)[i / 4], row(k + 1)[i / 4]);
    }
}

void store_fragments(Meeting& meeting, unsigned) {
  const auto lane = [&](int i) { return static_cast<MatrixRow*>(meeting.brought[i]); };
  for (int i = 0; i < kWarpSize; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t* to = lane(matrix * 8 + i / 4)->row + i % 4 * 2;
      to[0] = first_of(lane(i)->r[matrix]);
      to[1] = second_of(lane(i)->r[matrix]);
    }
}

void store_transposed_fragments(Meeting& meeting, unsigned) {
  const auto lane = [&](int i) { return static_cast<MatrixRow*>(meeting.brought[i]); };
  for (int i = 0; i < kWarpSize; ++i)
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int k = matrix * 8 + i % 4 * 2;
      lane(k)->row[i / 4] = first_of(lane(i)->r[matrix]);
      lane(k + 1)->row[i / 4] = second_of(lane(i)->r[matrix]);
    }
}

// The row of 16 bytes whose address a lane gives must be shared memory.
void check_row(const char* what, const void* row, bool write, const void* code) {
  BlockRunner& block = *runner;
  if (observer()) {
    write ? observer()->access<16, true>(uintptr_t(row), code, false)
          : observer()->access<16, false>(uintptr_t(row), code, false);
  }
  if (uintptr_t(row) % 16 != 0)
    block.fail(Kind::misaligned, code,
               {{std::string(what) + " of a row that does not begin at a multiple of 16 bytes"}});
  if (!block.is_shared(row, 16))
    block.fail(Kind::out_of_bounds, code, {{std::string(what) + " of a row that is not in the block's shared memory"}});
}

}  // namespace

void mma(Element type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const ObservationPause pause;
  Fragments mine{type, d, a, b};
  if (meet_in_warp(kAllLanes, "mma_m16n8k16", &mine, multiply_fragments, SIMT_CALLER, /*orders_memory=*/false))
    runner->counts.matrix_flops += 2 * 16 * 8 * 16;
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  const ObservationPause pause;
  const char* what = transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4";
  check_row(what, row, false, SIMT_CALLER);
  MatrixRow mine{r, static_cast<uint16_t*>(const_cast<void*>(row))};
  meet_in_warp(kAllLanes, what, &mine, transposed ? load_transposed_fragments : load_fragments, SIMT_CALLER,
               /*orders_memory=*/false);
}

void store_matrices(void* row, const uint32_t (&r)[4], bool transposed) {
  const ObservationPause pause;
  const char* what = transposed ? "stmatrix_x4_trans" : "stmatrix_x4";
  check_row(what, row, true, SIMT_CALLER);
  MatrixRow mine{const_cast<uint32_t*>(r), static_cast<uint16_t*>(row)};
  meet_in_warp(kAllLanes, what, &mine, transposed ? store_transposed_fragments : store_fragments, SIMT_CALLER,
               /*orders_memory=*/false);
}

}  // namespace simt
