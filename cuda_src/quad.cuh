// What the four lanes of a quad tell each other.
#pragma once
#include "common.cuh"

// Word j of thread i of four becomes word i of thread j.
template <class T, int kN>
DEVICE void transpose_in_quad(T (&x)[kN]) {
  static_assert(kN == 4, "a number for each lane");
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const T other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}
