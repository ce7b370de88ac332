// Enough of CUDA to run kernels that use no PTX on CPU threads: one thread each, a block at a time.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::exp, std::log, std::max, std::min, std::tanh;

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct Dim {
  int x = 0;
};
inline thread_local Dim threadIdx, blockIdx;
inline Dim blockDim;
inline std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];
inline char exchanged[32][32][8];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::memcpy(exchanged[warp][lane], &value, sizeof value);
  __syncwarp();
  std::memcpy(&value, exchanged[warp][lane ^ lanes], sizeof value);
  __syncwarp();
  return value;
}

template <class Kernel, class Params>
void launch(Kernel kernel, int grid, int block, const Params& params) {
  blockDim.x = block;
  for (int b = 0; b < grid; ++b) {
    block_barrier = std::make_unique<std::barrier<>>(block);
    for (int w = 0; w < block / 32; ++w) warp_barriers[w] = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> threads;
    for (int t = 0; t < block; ++t)
      threads.emplace_back([&, t] {
        threadIdx.x = t, blockIdx.x = b;
        kernel(params);
      });
    for (auto& thread : threads) thread.join();
  }
}
