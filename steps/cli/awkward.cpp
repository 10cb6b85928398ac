#include "cli/awkward.h"

namespace flash::cli {

std::vector<Problem> awkward_problems(int D) {
  const auto make = [D](int B, int Hq, int Hkv, int Nq, int Nk, bool causal, double dropout = 0.0) {
    Problem p;
    p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.Nq = Nq, p.Nk = Nk, p.D = D;
    p.scale = default_scale(D), p.causal = causal, p.dropout = dropout;
    return p;
  };
  std::vector<Problem> problems = {
      make(1, 1, 1, 1, 1, false),       make(1, 5, 5, 8, 8, true),        make(2, 3, 3, 17, 31, false),
      make(1, 2, 2, 33, 65, true),      make(1, 2, 2, 65, 33, true),      make(1, 1, 1, 5, 2, true),
      make(1, 1, 1, 3, 128, true),      make(1, 1, 1, 64, 64, true),      make(1, 1, 1, 127, 129, false),
      make(2, 1, 1, 129, 127, true),    make(1, 1, 1, 1, 200, false),     make(1, 1, 1, 200, 1, false),
      make(1, 2, 2, 7, 0, false),       make(1, 2, 2, 0, 7, false),       make(0, 2, 2, 9, 9, false),
      make(1, 2, 2, 50, 70, true, .1),  make(1, 2, 2, 37, 37, false, .9), make(1, 4, 2, 40, 40, true),
      make(2, 6, 1, 19, 45, false, .1), make(1, 2, 2, 260, 20, true),     make(1, 0, 2, 9, 9, false),
  };
  for (double scale : {-0.5, 0.0, 3.0}) {
    problems.push_back(make(1, 2, 2, 40, 44, true));
    problems.back().scale = scale;
  }
  problems.push_back(make(1, 4, 2, 90, 170, true));
  problems.back().deterministic = true;
  return problems;
}

}  // namespace flash::cli
