// The grid of `flashsteps check`: small problems of the shapes that break attention kernels.
#pragma once
#include <vector>

#include "harness/problem.h"

namespace flash::cli {

// Lengths of 1, just off a tile, far below one; more queries than keys and the reverse; no keys at all; grouped heads;
// scales that are negative, zero, large; dropout that is slight or heavy.
std::vector<Problem> awkward_problems(int head_dim);

}  // namespace flash::cli
