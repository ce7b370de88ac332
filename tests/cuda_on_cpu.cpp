#include "cuda_on_cpu.h"

#include <barrier>
#include <memory>
#include <thread>

static std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];

void __syncthreads() { block_barrier->arrive_and_wait(); }
void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

int launch(int grid, int block, const std::function<void()>& kernel) {
  blockDim.x = block, gridDim.x = grid;
  for (int b = 0; b < grid; ++b) {
    block_barrier = std::make_unique<std::barrier<>>(block);
    for (int w = 0; w < block / 32; ++w) warp_barriers[w] = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> threads;
    for (int t = 0; t < block; ++t)
      threads.emplace_back([&, t] {
        threadIdx.x = t, blockIdx.x = b;
        kernel();
      });
    for (auto& thread : threads) thread.join();
  }
  return copies_left.exchange(0);
}
