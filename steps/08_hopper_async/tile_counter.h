// The counter from which causal kernels take the next tile of the output (overlapped.cu, fp8.cu), and their launch.
#pragma once
#include "hopper_tile.h"

namespace {

// Makes the counter of the tiles handed out ready. The kernel after it may begin at once, and waits before it counts.
__global__ void start_counting(int* counter) {
  grid_dependency_launch();
  *counter = 0;
}

// Launches kernel(arguments, counter) with a block for each multiprocessor, as long as there are tiles. Without a mask
// tiles take equally long, and nobody counts.
template <class Shape, class Args>
void launch_over_tiles(void (*kernel)(Args, int*), unsigned threads, size_t smem_bytes, Stream stream,
                       const Args& arguments, int* counter) {
  const int blocks = std::min(arguments.tiles, multiprocessors());
  if constexpr (Shape::kCausal) {
    launch(start_counting, 1, 1, 0, stream, counter);
    launch_early(kernel, blocks, threads, smem_bytes, stream, arguments, counter);
  } else {
    launch(kernel, blocks, threads, smem_bytes, stream, arguments, counter);
  }
}

}  // namespace
