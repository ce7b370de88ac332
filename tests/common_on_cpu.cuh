// What cuda_src/common.cuh says in PTX, said in C++ for CPU threads: the same functions.
#pragma once
#include "params.cuh"

struct Half {};
struct BFloat16 {};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
inline float float_of(unsigned x) { return __builtin_bit_cast(float, x); }

template <class T>
float to_float(unsigned short bits);
template <>
inline float to_float<BFloat16>(unsigned short bits) {
  return float_of(static_cast<unsigned>(bits) << 16);
}
template <>
inline float to_float<Half>(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400) return (sign ? -1 : 1) * std::ldexp(magnitude, -24);
  return float_of(sign | ((magnitude << 13) + 0x38000000u));
}

template <class T>
unsigned short rounded(float x);  // to the nearest, ties to even
template <>
inline unsigned short rounded<BFloat16>(float x) {
  return x != x ? 0x7fc0 : (bits_of(x) + 0x7fffu + (bits_of(x) >> 16 & 1)) >> 16;
}
template <>
inline unsigned short rounded<Half>(float x) {
  const unsigned sign = bits_of(x) >> 16 & 0x8000u, magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;
  if (magnitude < 0x38800000u) return sign | std::lrint(std::ldexp(std::fabs(x), 24));
  return sign | (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
}

template <class T>
unsigned pack(float low, float high) {
  return rounded<T>(low) | static_cast<unsigned>(rounded<T>(high)) << 16;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }

inline int thread_again() { return threadIdx.x; }
inline int again(int x) { return x; }
inline unsigned shared_address(const void* p) { return static_cast<const char*>(p) - memory; }
template <class T>
T& shared(unsigned address) {
  return *reinterpret_cast<T*>(memory + address);
}
// Copies arrive as late as they may: when they are waited for, having been committed.
struct Copy {
  unsigned to;
  const void* from;
  int bytes;
};
inline thread_local std::vector<Copy> begun, committed;
inline void begin_copy(unsigned to, const void* from, int bytes, bool valid) {
  std::memset(memory + to, 0xff, bytes);  // NaN until then
  begun.push_back({to, valid ? from : nullptr, bytes});
  ++copies_left;
}
inline void copy16(unsigned to, const void* from, bool valid) { begin_copy(to, from, 16, valid); }
inline void copy4(unsigned to, const void* from, bool valid) { begin_copy(to, from, 4, valid); }
inline void copies_commit() {
  committed.insert(committed.end(), begun.begin(), begun.end());
  begun.clear();
}
inline void copies_wait() {
  for (const Copy& copy : committed) {
    if (copy.from)
      std::memcpy(memory + copy.to, copy.from, copy.bytes);
    else
      std::memset(memory + copy.to, 0, copy.bytes);
  }
  copies_left -= committed.size();
  committed.clear();
}
inline void copy8(unsigned to, const void* from, bool valid) { begin_copy(to, from, 8, valid); }
inline void store_shared(unsigned address, unsigned x) { shared<unsigned>(address) = x; }
inline uint4 load_shared16(unsigned address) { return shared<uint4>(address); }

// Blocks run one after another here, and never wait.
template <class Real>
void add(Real* to, Real x, bool valid) {
  if (valid) *to += x;
}
inline void add_fragment(float* to, const float (&x)[4]) {
  for (int e = 0; e < 4; ++e) to[e * 32 + threadIdx.x % 32] += x[e];
}
inline void load_fragment(float (&x)[4], const float* from) {
  for (int e = 0; e < 4; ++e) x[e] = from[e * 32 + threadIdx.x % 32];
}
inline int load_relaxed(const int* from) { return *from; }
inline int load_acquire(const int* from) { return *from; }
inline void count_up(int* counter) { ++*counter; }
inline int count_up_from(int* counter) { return (*counter)++; }
inline bool claim(int* counter) { return *counter == 0 && ++*counter; }
inline void fence() {}

// Lane i gets row i / 4, columns 2 (i % 4) and the next, of each matrix; transposed: column and
// rows.
template <bool kTransposed>
void load_four(unsigned (&r)[4], unsigned address) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  const auto four = with_lanes(address, [&](unsigned* rows) {
    uint4 result;
    unsigned* words = &result.x;
    for (int m = 0; m < 4; ++m) {
      auto element = [&](int i, int j) { return (&shared<unsigned short>(rows[8 * m + i]))[j]; };
      words[m] = kTransposed ? element(column, row) | element(column + 1, row) << 16
                             : element(row, column) | element(row, column + 1) << 16;
    }
    return result;
  });
  r[0] = four.x, r[1] = four.y, r[2] = four.z, r[3] = four.w;
}
inline void load_matrices(unsigned (&r)[4], unsigned address) { load_four<false>(r, address); }
inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  load_four<true>(r, address);
}

struct Fragments {
  unsigned a[4], b[2];
};

template <class T>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int lane = threadIdx.x % 32;
  with_lanes(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](Fragments* warp) {
    auto half = [](unsigned word, int k) { return to_float<T>(word >> k % 2 * 16); };
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      for (int k = 0; k < 16; ++k)
        c[e] += half(warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k) *
                half(warp[column * 4 + k % 8 / 2].b[k / 8], k);
    }
    return 0;
  });
}

struct DoubleFragments {
  double a[8], b[4];
};

template <int kA, int kB>
void mma(double& c0, double& c1, double& c2, double& c3, const double (&a)[kA],
         const double (&b)[kB]) {
  const int lane = threadIdx.x % 32;
  DoubleFragments mine;
  std::copy(a, a + kA, mine.a), std::copy(b, b + kB, mine.b);
  with_lanes(mine, [&](DoubleFragments* warp) {
    double* c[4] = {&c0, &c1, &c2, &c3};
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4, column = lane % 4 * 2 + e % 2;
      for (int k = 0; k < 4 * kB; ++k)
        *c[e] = std::fma(warp[row * 4 + k % 4].a[k / 4 * 2 + e / 2],
                         warp[column * 4 + k % 4].b[k / 4], *c[e]);
    }
    return 0;
  });
}

inline void mma(double& c0, double& c1, double& c2, double& c3, const double (&a)[2], double b) {
  const double right[1] = {b};
  mma(c0, c1, c2, c3, a, right);
}
