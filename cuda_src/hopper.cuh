// What only Hopper (sm_90a) has, one instruction per function: barriers in shared memory, tensor
// copies (TMA), matrix products of a warpgroup (wgmma). Nothing here knows attention.
#pragma once
#include "common.cuh"

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "needs -arch=sm_90a"
#endif

// --- barriers in shared memory (mbarrier)

DEVICE void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to tensor copies.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;"); }

DEVICE void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and this phase ends only when so many bytes have been copied too.
DEVICE void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Until the phase of this parity has ended; that before the first counts as ended, with parity 1.
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barriers of some warps, by number; 0 is that of __syncthreads.
DEVICE void named_sync(int name, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same for warps that don't wait for the others.
DEVICE void named_arrive(int name, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// The same, and whether `so` holds for any thread.
DEVICE bool named_any(int name, int threads, bool so) {
  int any;
  asm volatile(
      "{ .reg .pred p, any; setp.ne.b32 p, %3, 0; barrier.cta.red.or.pred any, %1, %2, p; "
      "selp.b32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"(static_cast<int>(so))
      : "memory");
  return any;
}

// --- clusters of blocks

DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Of all threads of all blocks.
DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// Where what a block has at this address lies in the shared memory of another.
DEVICE unsigned in_block(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Stores there, and counts 8 bytes as copied at a barrier of the same block.
DEVICE void store_in_block(unsigned address, double x, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
          address),
      "d"(x), "r"(barrier)
      : "memory");
}
// As barrier_wait, for what other blocks have stored.
DEVICE void barrier_wait_cluster(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- tensor copies

struct __align__(64) TensorMap {
  char bytes[128];
};

// The box at these coordinates (column, row, head, batch), zeros where it lies outside.
DEVICE void tensor_load(unsigned to, const TensorMap& map, unsigned barrier, int column, int row,
                        int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
// The other way, of what the fence below was called for; a group of its own.
DEVICE void tensor_store(const TensorMap& map, unsigned from, int column, int row, int head,
                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// --- copies of so many bytes in a row, as tensor copies are made; multiples of 16, as addresses

DEVICE void bulk_load(unsigned to, const void* from, unsigned barrier, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Stores, or adds floats to those in global memory, in L2, and is a group of its own.
DEVICE void bulk_store(void* to, unsigned from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
DEVICE void bulk_add(float* to, unsigned from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
// Until all of this thread's groups have read shared memory, and until what they do is done.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between this thread's loads and stores and what copies and products (wgmma) do to the same
// memory. One fence for both kinds of it took 1,000 clocks longer than that of shared memory.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- registers to shared memory and back, and from global memory

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
// The opposite of load_matrices.
DEVICE void store_matrices(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// Each transposed: the addresses are those of columns.
DEVICE void store_matrices_transposed(unsigned address, const unsigned (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
DEVICE void store_shared16(unsigned address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
DEVICE void load_shared16(float (&x)[4], unsigned address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}
// A load that stays where it is, though what it brings were the same before a loop.
DEVICE float2 load_shared8(unsigned address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
DEVICE double load_shared_double(unsigned address) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
  return x;
}
DEVICE void load_shared16(double (&x)[2], unsigned address) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
               : "=d"(x[0]), "=d"(x[1])
               : "r"(address)
               : "memory");
}
DEVICE float load_4(const float* from) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
DEVICE void load_16(float (&x)[4], const float* from) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from));
}

// --- registers of a warpgroup

template <int kRegisters>
DEVICE void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
