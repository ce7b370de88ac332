// Element types and one PTX instruction per function. Nothing here knows attention.
#pragma once
#include "params.cuh"

// 16-bit elements are kept as bits; T only selects the instruction.
struct Half {};
struct BFloat16 {};

DEVICE unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// threadIdx.x, read where it says so: what is made of it need not stay in a register.
DEVICE int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// x, of which the compiler knows nothing more: what is made of it need not stay in a register.
DEVICE int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// --- conversions

template <class T>
DEVICE unsigned pack(float low, float high);  // two 16-bit elements, rounded to nearest even

template <>
DEVICE unsigned pack<Half>(float low, float high) {
  unsigned r;
  asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
      : "=r"(r)
      : "f"(low), "f"(high));
  return r;
}

#if __CUDA_ARCH__ >= 800
template <>
DEVICE unsigned pack<BFloat16>(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
#endif

template <class T>
DEVICE float to_float(unsigned short bits);

template <>
DEVICE float to_float<Half>(unsigned short bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

template <>
DEVICE float to_float<BFloat16>(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

DEVICE float log2_approx(float x) {  // 2^-22 absolutely, between 1/2 and 2; else 1 ulp
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE float exp2_approx(float x) {  // 2 ulp; 2^-inf = 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// --- global to shared memory

// 16 bytes, or zeros where `valid` is false (then nothing is read).
DEVICE void copy16(unsigned to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0));
#else
  uint4 x = {0, 0, 0, 0};
  if (valid) x = *static_cast<const uint4*>(from);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w));
#endif
}

DEVICE void copy4(unsigned to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0));
#else
  const unsigned x = valid ? *static_cast<const unsigned*>(from) : 0;
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x));
#endif
}

DEVICE void copy8(unsigned to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 8 : 0));
#else
  const unsigned long long x = valid ? *static_cast<const unsigned long long*>(from) : 0;
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(x));
#endif
}

DEVICE void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

DEVICE void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// --- shared memory to registers and back

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

DEVICE void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

DEVICE void store_shared(unsigned address, unsigned x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x));
}

DEVICE uint4 load_shared16(unsigned address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}

// --- global memory that blocks add to in turns

// Added where it is, in L2, and nobody waits for it. Nothing is where `valid` is false.
DEVICE void add(float* to, float x, bool valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f32 [%0], %1; }" ::"l"(
          to),
      "f"(x), "r"(static_cast<int>(valid))
      : "memory");
}

DEVICE void add(double* to, double x, bool valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.s32 p, %2, 0; @p red.relaxed.gpu.global.add.f64 [%0], %1; }" ::"l"(
          to),
      "d"(x), "r"(static_cast<int>(valid))
      : "memory");
}

// The four numbers of each lane of a warp, 512 bytes; nothing else knows in which order they lie.
DEVICE void add_fragment(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + threadIdx.x % 32 * 4),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) add(to + e * 32 + threadIdx.x % 32, x[e], true);
#endif
}

DEVICE void load_fragment(float (&x)[4], const float* from) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
#if __CUDA_ARCH__ >= 900
    x[e] = from[threadIdx.x % 32 * 4 + e];
#else
    x[e] = from[e * 32 + threadIdx.x % 32];
#endif
}

// Counters. Whoever acquires a count, or has a fence after reading it, comes after all that lay
// before the fence of the one who counted.
DEVICE int load_relaxed(const int* from) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

DEVICE void count_up(int* counter) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// What it was before. (atomicAdd makes one of those of a warp, with 20 instructions.)
DEVICE int count_up_from(int* counter) {
  int x;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// Whether it was 0, and is 1 now.
DEVICE bool claim(int* counter) {
  int x;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;"
               : "=r"(x)
               : "l"(counter)
               : "memory");
  return x == 0;
}

DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// --- matrix product: c (16 x 8, float) += a (16 x 16) b (16 x 8)

template <class T>
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
DEVICE void mma<Half>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "
      "%2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "
      "%2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
DEVICE void mma<BFloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#if __CUDA_ARCH__ >= 800
// c (8 x 8, double) += a (8 x 4) b (4 x 8)
DEVICE void mma(double& c0, double& c1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c0), "+d"(c1)
      : "d"(a), "d"(b));
}
#endif

// c (16 x 8, double) += a (16 x 4) b (4 x 8), in the rows that c0, c1 and c2, c3 belong to.
DEVICE void mma(double& c0, double& c1, double& c2, double& c3, const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "
      "%2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a[0]), "d"(a[1]), "d"(b));
#elif __CUDA_ARCH__ >= 800
  mma(c0, c1, a[0], b);
  mma(c2, c3, a[1], b);
#endif
}

#if __CUDA_ARCH__ >= 900
// c (16 x 8, double) += a (16 x 8) b (8 x 8), in the rows that c0, c1 and c2, c3 belong to.
DEVICE void mma(double& c0, double& c1, double& c2, double& c3, const double (&a)[4],
                const double (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
#endif

// c (16 x 8, double) += a (16 x 16) b (16 x 8), in the rows that c0, c1 and c2, c3 belong to.
DEVICE void mma(double& c0, double& c1, double& c2, double& c3, const double (&a)[8],
                const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, "
      "%9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    mma(c0, c1, a[2 * k], b[k]);
    mma(c2, c3, a[2 * k + 1], b[k]);
  }
#endif
}
