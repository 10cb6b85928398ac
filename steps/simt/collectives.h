// Meetings of warps, for the parts of the executor that define instructions of whole warps.
#pragma once
#include "simt/block.h"

namespace simt {

// The lanes of a mask meet; see BlockRunner::meet. `mine` is what this lane brings, at its own place.
bool meet_in_warp(unsigned mask, const char* what, void* mine, BlockRunner::Act act, const void* code,
                  bool orders_memory);

}  // namespace simt
