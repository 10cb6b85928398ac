// setmaxnreg: registers that move between the threads of a block. A thread takes what others have given back, and where
// that is never enough, the block stands still, as it does on a GPU.
#include "simt/async.h"
#include "simt/hopper.h"
#include "simt/observer.h"

namespace simt {
namespace {

void check_count(int registers, const void* code) {
  if (registers < 24 || registers > 256 || registers % 8 != 0)
    runner->fail(Kind::barrier_misuse, code,
                 {{"setmaxnreg to " + std::to_string(registers) + " registers; from 24 to 256, in eights"}});
}

}  // namespace

void give_registers(int registers) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  Fiber& mine = *block.running;
  check_count(registers, SIMT_CALLER);
  if (registers > mine.registers)
    block.fail(Kind::barrier_misuse, SIMT_CALLER,
               {{"setmaxnreg_dec to " + std::to_string(registers) +
                 " registers, more than the thread has: " + std::to_string(mine.registers)}});
  block.spare_registers += mine.registers - registers;
  mine.registers = registers;
  ++block.registers_given;
}

void take_registers(int registers) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  check_count(registers, SIMT_CALLER);
  const int more = registers - block.running->registers;
  while (more > block.spare_registers)
    block.wait_while(&block.registers_given, block.registers_given,
                     "setmaxnreg_inc, for registers that nobody gives back", SIMT_CALLER);
  block.spare_registers -= more;
  block.running->registers = registers;
}

}  // namespace simt
