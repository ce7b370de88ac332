// Matrix products of a warpgroup (wgmma): c (64 x N, float) = a (64 x 16) b (16 x N) [+ c], of
// ELEMENT.
#pragma once
#include "hopper.cuh"

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
  template <bool kTransposedB, bool kTransposedA = false>                                          \
  DEVICE void wgmma(float (&c)[N / 8][4], unsigned a, unsigned b, bool add) {                      \
    asm volatile("{ .reg .pred add; .reg .b64 a, b; setp.ne.b32 add, %" #k                         \
                 ", 0; "                                                                           \
                 "mov.b64 a, {%" #i ", " UPPER "}; mov.b64 b, {%" #j ", " UPPER                    \
                 "}; "                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES(ELEMENT) " {" NAMES_##N   \
                 "}, a, b, add, 1, 1, %" #m ", %" #l "; }"                                         \
                 : C_##N                                                                           \
                 : "r"(a), "r"(b), "r"(static_cast<int>(add)), "n"(kTransposedB),                  \
                   "n"(kTransposedA));                                                             \
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
