// Enough of CUDA to run the kernels on CPU threads: one thread each, a block, or the blocks of a
// cluster, at a time. `launch` returns how many copies to shared memory nobody waited for.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

using std::exp, std::log, std::max, std::min, std::tanh;

#define __device__
#define __global__ inline  // a kernel that is not launched is not compiled
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)

struct Dim {
  int x = 0;
};
inline thread_local Dim threadIdx, blockIdx;
inline Dim blockDim, gridDim;
inline std::atomic<int> copies_left;  // begun, and not waited for
constexpr int kMostBlocks = 4;        // of a cluster
inline thread_local int rank_of_block;
inline thread_local char* memory;  // shared memory of the block

// In cuda_on_cpu.cpp, compiled once for all kernels.
void __syncthreads();
void __syncwarp();
void cluster_sync();
char* memory_of(int rank);
int launch(int grid, int cluster, int block, const std::function<void()>& kernel);

// What every lane of this warp passes, seen by all of them while `use` runs.
template <class T, class Use>
auto with_lanes(const T& mine, Use use) {
  static T lanes[kMostBlocks][32][32];
  T(&warp)[32] = lanes[rank_of_block][threadIdx.x / 32];
  warp[threadIdx.x % 32] = mine;
  __syncwarp();
  const auto result = use(warp);
  __syncwarp();
  return result;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return with_lanes(value, [=](T* warp) { return warp[threadIdx.x % 32 ^ lanes]; });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return with_lanes(value, [=](T* warp) { return warp[lane]; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return with_lanes(value,
                    [](unsigned* warp) { return std::reduce(warp, warp + 32, 0u, std::bit_or{}); });
}
inline bool __any_sync(unsigned, bool value) {
  return with_lanes(value,
                    [](bool* warp) { return std::any_of(warp, warp + 32, std::identity{}); });
}
inline float __fdividef(float x, float y) { return x / y; }
