// What cuda_src/wgmma.cuh says in PTX, said in C++ for CPU threads: the same functions.
#pragma once
#include "hopper.cuh"

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kRunning>
void wgmma_wait() {}

inline unsigned operand(unsigned address, int slab_bytes = 16) {
  return slab_bytes >> 4 << 16 | address >> 4;
}
inline float element_at(unsigned address) {
  return to_float<ELEMENT>(shared<unsigned short>(swizzled(address)));
}
// Row r (of 64, or a column of b), summed index k; or transposed.
inline float element_of(unsigned operand, int r, int k) {
  return element_at((operand & 0x3fff) * 16 + r / 8 * 1024 + r % 8 * 128 + k * 2);
}
inline float transposed_element_of(unsigned operand, int r, int k) {
  return element_at((operand & 0x3fff) * 16 + r / 64 * (operand >> 16) * 16 + k / 8 * 1024 +
                    k % 8 * 128 + r % 64 * 2);
}
// A sum as tensor cores make it: what lies 25 bits below the largest term's exponent is cut off,
// and the result is cut to float.
template <int kN>
float sum_of(const double (&terms)[kN]) {
  double largest = 0, sum = 0;
  for (double x : terms) largest = std::max(largest, std::fabs(x)), sum += x;
  if (largest == 0 || !std::isfinite(sum)) return sum;
  const double up = std::ldexp(1, 25 - std::ilogb(largest));
  long long units = 0;
  for (double x : terms) units += static_cast<long long>(x * up);
  sum = units / up;
  const float rounded = sum;
  return std::fabs(rounded) > std::fabs(sum) ? std::nextafterf(rounded, 0) : rounded;
}
template <bool kTransposedB, int kN, class A>
void product(float (&c)[kN][4], A a, unsigned b) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < kN; ++n)
    for (int e = 0; e < 4; ++e) {
      const int column = n * 8 + lane % 4 * 2 + e % 2;
      double terms[17] = {c[n][e]};
      for (int k = 0; k < 16; ++k)
        terms[k + 1] =
            static_cast<double>(a(e / 2, k)) *
            (kTransposedB ? transposed_element_of(b, column, k) : element_of(b, column, k));
      c[n][e] = sum_of(terms);
    }
}
template <bool kTransposedB, bool kTransposedA = false, int kN>
void wgmma(float (&c)[kN][4], unsigned a, unsigned b, bool add) {
  if (!add) std::memset(c, 0, sizeof(c));
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  product<kTransposedB>(
      c,
      [&](int half, int k) {
        return kTransposedA ? transposed_element_of(a, row + 8 * half, k)
                            : element_of(a, row + 8 * half, k);
      },
      b);
}
template <bool kTransposedB, int kN>
void wgmma(float (&c)[kN][4], const unsigned (&a)[4], unsigned b, bool add = true) {
  if (!add) std::memset(c, 0, sizeof(c));
  with_lanes(Fragments{{a[0], a[1], a[2], a[3]}}, [&](Fragments* warp) {
    const int quad = threadIdx.x % 32 / 4 * 4;
    product<kTransposedB>(
        c,
        [&](int half, int k) {
          return to_float<ELEMENT>(warp[quad + k % 8 / 2].a[half + k / 8 * 2] >> k % 2 * 16);
        },
        b);
    return 0;
  });
}
