// What cuda_src/hopper.cuh says in PTX, said in C++ for CPU threads: the same functions. Products
// and tensor copies are done at once; barriers count what is missing.
#pragma once
#include "common.cuh"

// --- barriers in shared memory

struct Barrier {
  int arrivals, missing, bytes;
  unsigned phase;
};
inline std::mutex barriers_mutex;
inline std::condition_variable barriers_changed;
inline std::map<unsigned, Barrier> barriers;  // of all blocks of a cluster

constexpr unsigned kBlockBytes = 1 << 20;  // of addresses
inline unsigned in_block(unsigned address, int rank) { return address + rank * kBlockBytes; }
inline int cluster_rank() { return rank_of_block; }

inline void change_in_block(unsigned barrier, int arrivals, int bytes) {
  std::lock_guard lock(barriers_mutex);
  Barrier& b = barriers.at(barrier);
  b.missing -= arrivals, b.bytes += bytes;
  if (b.missing == 0 && b.bytes == 0) {
    b.missing = b.arrivals, ++b.phase;
    barriers_changed.notify_all();
  }
}
inline void change(unsigned barrier, int arrivals, int bytes) {
  change_in_block(in_block(barrier, rank_of_block), arrivals, bytes);
}
inline void barrier_init(unsigned barrier, int arrivals) {
  std::lock_guard lock(barriers_mutex);
  barriers[in_block(barrier, rank_of_block)] = {arrivals, arrivals, 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(unsigned barrier) { change(barrier, 1, 0); }
inline void barrier_expect(unsigned barrier, int bytes) { change(barrier, 1, bytes); }
inline void barrier_wait(unsigned barrier, unsigned parity) {
  std::unique_lock lock(barriers_mutex);
  const Barrier& b = barriers.at(in_block(barrier, rank_of_block));
  barriers_changed.wait(lock, [&] { return b.phase % 2 != parity; });
}
inline void barrier_wait_cluster(unsigned barrier, unsigned parity) {
  barrier_wait(barrier, parity);
}
inline void store_in_block(unsigned address, double x, unsigned barrier) {
  std::memcpy(memory_of(address / kBlockBytes) + address % kBlockBytes, &x, sizeof x);
  change_in_block(barrier, 0, -8);
}

struct Named {
  int arrived = 0;
  unsigned generation = 0;
  bool any = false, result = false;
};
inline std::mutex named_mutex;
inline std::condition_variable named_changed;
inline Named all_named[kMostBlocks][16];
inline Named& named(int name) { return all_named[rank_of_block][name]; }

inline bool arrives_last(Named& n, int threads, bool so = false) {
  n.any |= so;
  if (++n.arrived < threads) return false;
  n.result = n.any, n.any = false, n.arrived = 0, ++n.generation;
  named_changed.notify_all();
  return true;
}
inline void named_arrive(int name, int threads) {
  std::unique_lock lock(named_mutex);
  arrives_last(named(name), threads);
}
inline bool named_any(int name, int threads, bool so) {
  std::unique_lock lock(named_mutex);
  Named& n = named(name);
  const unsigned generation = n.generation;
  if (!arrives_last(n, threads, so))
    named_changed.wait(lock, [&] { return n.generation != generation; });
  return n.result;
}
inline void named_sync(int name, int threads) { named_any(name, threads, false); }

// --- tensor copies. The tests write these maps, in place of the driver's.

struct alignas(64) TensorMap {
  const char* data;
  long long strides[4];  // bytes: column, row, head, batch
  int sizes[4], rows;    // rows of a box, of 128 bytes
  char unused[64];
};
static_assert(sizeof(TensorMap) == 128, "the size of a CUtensorMap");

inline void prefetch(const TensorMap&) {}
// Address bits 4 to 6 are flipped by bits 7 to 9.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// For each element of a box: where it lies in shared memory, and in global memory, or null.
template <class Use>
void each_element(unsigned box, const TensorMap& map, int column, int row, int head, int batch,
                  Use use) {
  const int bytes = map.strides[0];
  for (int i = 0; i < map.rows; ++i)
    for (int j = 0; j < 128 / bytes; ++j) {
      const long long at[] = {column + j, row + i, head, batch};
      bool inside = true;
      const char* global = map.data;
      for (int axis = 0; axis < 4; ++axis) {
        inside &= 0 <= at[axis] && at[axis] < map.sizes[axis];
        global += at[axis] * map.strides[axis];
      }
      use(memory + swizzled(box + i * 128 + j * bytes), inside ? global : nullptr, bytes);
    }
}
inline void tensor_load(unsigned to, const TensorMap& map, unsigned barrier, int column, int row,
                        int head, int batch) {
  each_element(to, map, column, row, head, batch, [](char* here, const char* global, int bytes) {
    global ? std::memcpy(here, global, bytes) : std::memset(here, 0, bytes);
  });
  change(barrier, 0, -map.rows * 128);
}
inline void tensor_store(const TensorMap& map, unsigned from, int column, int row, int head,
                         int batch) {
  each_element(from, map, column, row, head, batch, [](char* here, const char* global, int bytes) {
    if (global) std::memcpy(const_cast<char*>(global), here, bytes);
  });
}

// --- copies of bytes in a row

inline void bulk_load(unsigned to, const void* from, unsigned barrier, int bytes) {
  std::memcpy(memory + to, from, bytes);
  change(barrier, 0, -bytes);
}
inline void bulk_store(void* to, unsigned from, int bytes) {
  std::memcpy(to, memory + from, bytes);
}
inline void bulk_add(float* to, unsigned from, int bytes) {
  for (int i = 0; i < bytes / 4; ++i) to[i] += shared<float>(from + 4 * i);
}
inline void bulk_wait_read() {}
inline void bulk_wait() {}
inline void fence_async() {}
inline void fence_async_global() {}

// --- registers to shared memory and back, and from global memory

inline void store_matrices(unsigned address, const unsigned (&r)[4]) {
  const int lane = threadIdx.x % 32;
  with_lanes(address, [&](unsigned* rows) {
    for (int m = 0; m < 4; ++m) shared<unsigned>(rows[8 * m + lane / 4] + lane % 4 * 4) = r[m];
    return 0;
  });
}
inline void store_matrices_transposed(unsigned address, const unsigned (&r)[4]) {
  const int lane = threadIdx.x % 32;
  with_lanes(address, [&](unsigned* columns) {
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e)
        shared<unsigned short>(columns[8 * m + lane % 4 * 2 + e] + lane / 4 * 2) = r[m] >> e * 16;
    return 0;
  });
}
inline void store_shared16(unsigned address, const float (&x)[4]) {
  std::memcpy(memory + address, x, 16);
}
inline double load_shared_double(unsigned address) { return shared<double>(address); }
inline void load_shared16(double (&x)[2], unsigned address) {
  x[0] = shared<double>(address), x[1] = shared<double>(address + 8);
}
inline void load_shared16(float (&x)[4], unsigned address) { std::memcpy(x, memory + address, 16); }
inline float2 load_shared8(unsigned address) {
  float2 x;
  std::memcpy(&x, memory + address, 8);
  return x;
}
inline float load_4(const float* from) { return *from; }
inline void load_16(float (&x)[4], const float* from) { std::memcpy(x, from, 16); }

// --- registers and products of a warpgroup

template <int kRegisters>
void registers_raise() {}
template <int kRegisters>
void registers_lower() {}
