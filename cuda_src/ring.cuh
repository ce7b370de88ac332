// Tiles of queries that stream past a block of a Hopper backward kernel.
#pragma once
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int kStages = 2;

// In shared memory: buffers for tiles of q (or dout), for a number of each row, and their barriers.
// Tiles are numbered through the block's life.
template <class T>
struct Ring {
  typename T::Storage tiles[kStages];
  __align__(16) float numbers[kStages][T::kRows];  // lse in base 2 (or delta)
  unsigned long long full[kStages], empty[kStages];

  DEVICE void init(int warps) {  // so many release a tile
    for (int i = 0; i < kStages; ++i)
      barrier_init(shared_address(&full[i]), 1), barrier_init(shared_address(&empty[i]), warps);
  }
  // By one thread: tile i, of queries q0 .., when its buffer is free.
  DEVICE void copy(int i, const TensorMap& map, const void* all_numbers, const Params& p, int q0,
                   int head, int batch) {
    const int stage = i % kStages, rows = (p.sq + T::kRows - 1) / T::kRows * T::kRows;
    const long long row = (static_cast<long long>(batch) * p.heads + head) * rows + q0;
    const unsigned barrier = shared_address(&full[stage]);
    barrier_wait(shared_address(&empty[stage]), i / kStages % 2 ^ 1);
    load<T>(shared_address(&tiles[stage]), map, barrier, q0, head, batch, sizeof(numbers[0]));
    bulk_load(shared_address(&numbers[stage]), static_cast<const float*>(all_numbers) + row,
              barrier, sizeof(numbers[0]));
  }
  DEVICE void wait(int i) const {
    barrier_wait(shared_address(&full[i % kStages]), i / kStages % 2);
  }
  DEVICE void release(int i) const {  // by each warp
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&empty[i % kStages]));
  }
  DEVICE unsigned tile(int i) const { return shared_address(&tiles[i % kStages]); }
  // Of a fragment's columns 8 n .., which are queries here, the numbers of this thread's two.
  DEVICE float2 pair(int i, int n) const {
    return *reinterpret_cast<const float2*>(numbers[i % kStages] + 8 * n + fragment_column());
  }
};
