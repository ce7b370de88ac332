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
// Whether it is so for any of them.
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

#ifdef ELEMENT
// --- matrix products of a warpgroup: c (64 x N, float) = a (64 x 16) b (16 x N) [+ c]

// Operands in shared memory lie as tensor copies with 128-byte swizzle put them: slabs of 64
// columns, 128 bytes a row. Where the summed index runs along rows (K-major), 16 of it are 32
// bytes; where it counts rows, 16 of them are 2,048 bytes, and the next 64 columns lie `slab`
// bytes on.
// This is the lower word of the descriptor; the upper one is the same for all.
DEVICE unsigned operand(unsigned address, int slab_bytes = 16) {
  return slab_bytes >> 4 << 16 | (address & 0x3ffff) >> 4;
}
#define UPPER "0x40000040"  // 128-byte swizzle; eight rows are 1,024 bytes

// Before the first product of a batch, and after registers of c or a were touched.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most so many batches are still running.
template <int kRunning>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
}

#define TYPE_Half "f16"
#define TYPE_BFloat16 "bf16"
#define TYPE_OF(element) TYPE_##element
#define TYPES(element) TYPE_OF(element) "." TYPE_OF(element)

// Registers of c: names in the instruction, and operands, 16 columns at a time.
#define C_AT(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_32 NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_64 NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_144 NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_160 NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_176 NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_192 NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_208 NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_224 NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_240 NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_256 NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define C_16 C_AT(0), C_AT(1)
#define C_32 C_16, C_AT(2), C_AT(3)
#define C_48 C_32, C_AT(4), C_AT(5)
#define C_64 C_48, C_AT(6), C_AT(7)
#define C_80 C_64, C_AT(8), C_AT(9)
#define C_96 C_80, C_AT(10), C_AT(11)
#define C_112 C_96, C_AT(12), C_AT(13)
#define C_128 C_112, C_AT(14), C_AT(15)
#define C_144 C_128, C_AT(16), C_AT(17)
#define C_160 C_144, C_AT(18), C_AT(19)
#define C_176 C_160, C_AT(20), C_AT(21)
#define C_192 C_176, C_AT(22), C_AT(23)
#define C_208 C_192, C_AT(24), C_AT(25)
#define C_224 C_208, C_AT(26), C_AT(27)
#define C_240 C_224, C_AT(28), C_AT(29)
#define C_256 C_240, C_AT(30), C_AT(31)

// With a in shared memory, and with a in registers; i .. n number the operands after those of c.
// Transposed: the summed index counts rows of the operand in memory.
#define WGMMA(N, i, j, k, l, m, n, o)                                                              \
  template <bool kTransposedB>                                                                     \
  DEVICE void wgmma(float (&c)[N / 8][4], unsigned a, unsigned b, bool add) {                      \
    asm volatile("{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, %" #k                         \
                 ", 0; "                                                                           \
                 "mov.b64 a, {%" #i ", " UPPER "}; mov.b64 b, {%" #j ", " UPPER                    \
                 "}; "                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES(ELEMENT) " {" NAMES_##N   \
                 "}, a, b, add, 1, 1, 0, %" #l "; }"                                               \
                 : C_##N                                                                           \
                 : "r"(a), "r"(b), "r"(static_cast<int>(add)), "n"(kTransposedB));                 \
  }                                                                                                \
  template <bool kTransposedB>                                                                     \
  DEVICE void wgmma(float (&c)[N / 8][4], const unsigned (&a)[4], unsigned b, bool add = true) {   \
    asm volatile("{ .reg .pred add; .reg .b64 b; setp.ne.b32 add, %" #n                            \
                 ", 0; "                                                                           \
                 "mov.b64 b, {%" #m ", " UPPER                                                     \
                 "}; "                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES(ELEMENT) " {" NAMES_##N   \
                 "}, {%" #i ", %" #j ", %" #k ", %" #l "}, b, add, 1, 1, %" #o "; }"               \
                 : C_##N                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)), \
                   "n"(kTransposedB));                                                             \
  }

WGMMA(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#endif
