#include "cuda_on_cpu.h"

#include <barrier>
#include <memory>
#include <thread>

struct Block {
  alignas(1024) char memory[1 << 18];
  std::unique_ptr<std::barrier<>> barrier, warp_barriers[32];
};
static Block blocks[kMostBlocks];
static std::unique_ptr<std::barrier<>> cluster_barrier;

void __syncthreads() { blocks[rank_of_block].barrier->arrive_and_wait(); }
void __syncwarp() { blocks[rank_of_block].warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
void cluster_sync() { cluster_barrier->arrive_and_wait(); }
char* memory_of(int rank) { return blocks[rank].memory; }

int launch(int grid, int cluster, int block, const std::function<void()>& kernel) {
  blockDim.x = block, gridDim.x = grid;
  for (int first = 0; first < grid; first += cluster) {
    cluster_barrier = std::make_unique<std::barrier<>>(cluster * block);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < cluster; ++rank) {
      blocks[rank].barrier = std::make_unique<std::barrier<>>(block);
      for (auto& warp : blocks[rank].warp_barriers) warp = std::make_unique<std::barrier<>>(32);
    }
    for (int t = 0; t < cluster * block; ++t)
      threads.emplace_back([&, t] {
        threadIdx.x = t % block, rank_of_block = t / block, blockIdx.x = first + t / block;
        memory = memory_of(rank_of_block);
        kernel();
      });
    for (auto& thread : threads) thread.join();
  }
  return copies_left.exchange(0);
}
