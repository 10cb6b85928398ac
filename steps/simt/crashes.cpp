#include "simt/crashes.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <mutex>

#include "simt/block.h"
#include "simt/cuda.h"

namespace simt {
namespace {

// What the handler needs, ready before: in a handler nothing may be allocated.
struct Crashing {
  char kernel[128] = "";
  alignas(16) char stack[16384];  // of its own, since a fiber's may be what is used up
};
thread_local Crashing crashing;
struct sigaction before[NSIG];  // what was to be done about each signal

// A line, put together without allocation.
class Line {
 public:
  Line& operator<<(const char* text) {
    const size_t n = std::min(std::strlen(text), sizeof text_ - length_);
    std::memcpy(text_ + length_, text, n);
    length_ += n;
    return *this;
  }
  Line& operator<<(uint3 at) { return *this << "(" << at.x << "," << at.y << "," << at.z << ")"; }
  Line& operator<<(unsigned number) {
    char digits[16] = "";
    std::to_chars(digits, digits + 15, number);
    return *this << digits;
  }
  void print() const {
    if (::write(STDERR_FILENO, text_, length_) < 0) return;
  }

 private:
  char text_[512];
  size_t length_ = 0;
};

void end_with_a_line(int signal, siginfo_t*, void*) {
  if (!runner) {  // not in a kernel: as if this handler were not there
    sigaction(signal, &before[signal], nullptr);
    return;  // to the instruction, which does it again
  }
  Line line;
  line << "flashsteps: " << crashing.kernel << ": block " << blockIdx << ", thread " << threadIdx << ": "
       << (signal == SIGFPE ? "an integer divided by zero" : "an access where no memory is");
  if (signal != SIGFPE && !runner->observed) line << "; without --no-observe its line is found";
  line << "\n";
  line.print();
  _exit(1);
}

}  // namespace

void report_crashes(const std::string& kernel) {
  static std::once_flag installed;
  std::call_once(installed, [] {
    struct sigaction action {};
    action.sa_sigaction = end_with_a_line;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (const int signal : {SIGFPE, SIGSEGV, SIGBUS}) sigaction(signal, &action, &before[signal]);
  });
  if (crashing.kernel[0] == 0) {
    stack_t stack{};
    stack.ss_sp = crashing.stack, stack.ss_size = sizeof crashing.stack;
    sigaltstack(&stack, nullptr);
  }
  std::strncpy(crashing.kernel, kernel.c_str(), sizeof crashing.kernel - 1);
}

}  // namespace simt
