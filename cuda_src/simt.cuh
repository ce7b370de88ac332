// Products in float or double on CUDA cores, without anything rounded to fewer bits.
//
// A block owns kRows rows of a product, each of its warps 4 kM of them; other rows stream past,
// STREAMED at a time, through shared memory in slices of SLICE columns. Nothing is transposed: all
// slices lie as in global memory, by asynchronous copies, and serve in both kinds of product:
//   dot    scores += mine theirs^T   16 bytes of a row of each at a time
//   outer  out += p theirs           16 bytes of a row of p, and as many rows of theirs
// Lane (y, x) of a warp holds rows y + 4 i and columns x + 8 j of scores, and columns in groups of
// 16 bytes of out.
#pragma once
#include "common.cuh"
#include "mask.cuh"
#include "params.cuh"

using Real = REAL;
constexpr int kVector = 16 / sizeof(Real);
constexpr int kThreads = 32 * WARPS;
constexpr int kM = ROWS_PER_THREAD, kRows = 4 * kM * WARPS;
constexpr int kS = STREAMED / 8, kO = SLICE / 8;  // a thread's columns of scores and of a slice
constexpr int kHead = HEAD_DIM / SLICE, kValue = VALUE_DIM / SLICE;
static_assert(STREAMED % 8 == 0 && SLICE % (8 * kVector) == 0, "whole 16-byte groups");

// Rows of slices start 16 bytes of banks apart: a dot product reads eight at once. Rows of p start
// 8 numbers apart, so that each warp's store of 4 x 8 numbers has no conflicts.
constexpr int kPitch = SLICE + kVector, kPPitch = STREAMED + 8;

constexpr Real kInfinity = static_cast<Real>(__builtin_bit_cast(float, 0x7f800000));

using Matrix = Head<Real>;
using Mine = Real[kRows][kPitch];
using Theirs = Real[STREAMED][kPitch];
using Scores = Real[kM][kS];
using Out = Real[kM][kO];

// kSlices: of the block's own rows. With WHOLE they stay, otherwise they pass with the others'.
template <int kSlices>
struct __align__(16) Shared {
  Mine mine[WHOLE ? kSlices : 2];
  Theirs theirs[2];
  Real p[kRows][kPPitch];  // a warp's part is its own
};

struct __align__(16) Group {
  Real x[kVector];
};

// Pairs of lanes have the same x, and pairs of pairs the same y: then a load of 16 bytes a lane
// takes two turns for the banks and not four.
DEVICE int lane_x() { return threadIdx.x / 2 % 8; }
DEVICE int lane_y() { return threadIdx.x % 2 + threadIdx.x % 32 / 16 * 2; }

DEVICE int row_of(int i) { return threadIdx.x / 32 * 4 * kM + i * 4 + lane_y(); }
DEVICE int score_column(int j) { return j * 8 + lane_x(); }
DEVICE int out_column(int j) { return (j / kVector * 8 + lane_x()) * kVector + j % kVector; }

DEVICE const Group& group(const Real& first) { return reinterpret_cast<const Group&>(first); }

// One element, or zero where it is not inside.
DEVICE void copy_one(unsigned to, const void* from, bool inside) {
  if (sizeof(Real) == 4)
    copy4(to, from, inside);
  else
    copy8(to, from, inside);
}

// tile[i][j] = x[row0 + i][n SLICE + j], zeros beyond the ends of x; complete after arrived().
template <int kCount>
DEVICE void fetch(Real (&tile)[kCount][kPitch], const Matrix& x, int row0, int rows, int n,
                  int width) {
  constexpr int kSize = VECTOR ? kVector : 1, kAcross = SLICE / kSize, kStep = kThreads / kAcross;
  static_assert(kThreads % kAcross == 0 && kCount % kStep == 0, "whole rows at a time");
  const int i0 = threadIdx.x / kAcross, j = threadIdx.x % kAcross * kSize;
  const int left = n * SLICE + j < width ? rows - row0 - i0 : 0;
  const char* from =
      x.data + (row0 + i0) * x.row + (n * SLICE + j) * (VECTOR ? sizeof(Real) : x.column);
  const unsigned to = shared_address(&tile[i0][j]);
#pragma unroll
  for (int i = 0; i < kCount; i += kStep, from += kStep * x.row) {
    const unsigned here = to + i * sizeof(tile[0]);
    if (VECTOR)
      copy16(here, from, i < left);
    else
      copy_one(here, from, i < left);
  }
}

// What was fetched is there, and all are done with what came before it.
DEVICE void arrived() {
  copies_wait();
  __syncthreads();
}

template <int kN>
DEVICE void clear(Real (&c)[kM][kN]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) c[i][j] = 0;
}

// c += mine theirs^T over `width` columns; those up to a multiple of 2 groups are zeros.
DEVICE void dot(Scores& c, const Mine& mine, const Theirs& theirs, int width) {
#pragma unroll 1
  for (int k0 = 0; k0 < width; k0 += 2 * kVector)
#pragma unroll
    for (int k = k0; k < k0 + 2 * kVector; k += kVector) {
      Group right[kS];
#pragma unroll
      for (int j = 0; j < kS; ++j) right[j] = group(theirs[score_column(j)][k]);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const Group left = group(mine[row_of(i)][k]);
#pragma unroll
        for (int e = 0; e < kVector; ++e)
#pragma unroll
          for (int j = 0; j < kS; ++j) c[i][j] += left.x[e] * right[j].x[e];
      }
    }
}

// c += p theirs
DEVICE void outer(Out& c, const Real (&p)[kRows][kPPitch], const Theirs& theirs) {
#pragma unroll 2
  for (int k = 0; k < STREAMED; k += kVector) {
    Group left[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) left[i] = group(p[row_of(i)][k]);
#pragma unroll
    for (int e = 0; e < kVector; ++e)
#pragma unroll
      for (int j = 0; j < kO; j += kVector) {
        const Group right = group(theirs[k + e][out_column(j)]);
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
          for (int f = 0; f < kVector; ++f) c[i][j + f] += left[i].x[e] * right.x[f];
      }
  }
}

// The thread's scores into p: only this warp reads them.
DEVICE void put(Real (&p)[kRows][kPPitch], const Scores& c) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kS; ++j) p[row_of(i)][score_column(j)] = c[i][j];
  __syncwarp();
}

// x[row0 + i][n SLICE + j] = factor[i] * part: each thread its own numbers.
template <int kSlices>
DEVICE void store(const Matrix& x, const Out (&part)[kSlices], const Real (&factor)[kM], int row0,
                  int rows, int width) {
#pragma unroll
  for (int n = 0; n < kSlices; ++n)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kO; ++j) {
        const int row = row0 + row_of(i), column = n * SLICE + out_column(j);
        if (row < rows && column < width) x.at(row, column) = part[n][i][j] * factor[i];
      }
}

DEVICE Real larger(Real x, Real y) {
  if constexpr (sizeof(Real) == 4) return max(x, y);  // one instruction
  return x > y ? x : y;
}

// Over the eight lanes that share rows.
DEVICE Real lanes_max(Real x) {
#pragma unroll
  for (int lanes = 2; lanes < 16; lanes *= 2) x = larger(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
DEVICE Real lanes_sum(Real x) {
#pragma unroll
  for (int lanes = 2; lanes < 16; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// exp(x) for x at most little more than 0: 14 steps and no branch, so that a thread's exponentials
// overlap; CUDA's own has a branch each. The error relative to 1, not to a small result, is that of
// the last rounding. Below 2^-1022 it is 0.
DEVICE double exp_branchless(double x) {
  constexpr double kToInteger = 0x1.8p52;  // added, leaves a whole number in the low bits
  if (x < -1000) x = -1000;
  const double shifted = fma(x, 1.4426950408889634, kToInteger);
  const double r = fma(shifted - kToInteger, -0.6931471805599453, x);  // |r| <= log(2) / 2
  // (e^r - 1 - r) / r^2 interpolated at 10 Chebyshev nodes: e^r to 1.6e-17.
  constexpr double kTerms[] = {2.510038549551032e-08,
                               2.7620088445409746e-07,
                               2.7557268459997064e-06,
                               2.4801521295954376e-05,
                               1.9841269863053618e-04,
                               1.3888888917213717e-03,
                               8.333333333330062e-03,
                               4.166666666662413e-02,
                               1.6666666666666669e-01,
                               5.000000000000001e-01,
                               1,
                               1};
  double e = kTerms[0];
#pragma unroll
  for (int n = 1; n < 12; ++n) e = fma(e, r, kTerms[n]);
  const int power = static_cast<int>(__builtin_bit_cast(long long, shifted));
  const long long biased = min(max(power + 1023, 0), 2047);
  return e * __builtin_bit_cast(double, biased << 52);
}

// exp(x * factor)
struct Exponential {
  Real unit;
  DEVICE explicit Exponential(Real factor)
      : unit(sizeof(Real) == 4 ? factor * Real(1.4426950408889634) : factor) {}
  DEVICE Real operator()(Real x) const {
    if constexpr (sizeof(Real) == 4)
      return exp2_approx(x * unit);
    else
      return exp_branchless(x * unit);
  }
};

// Scores from products: scale, then softcap.
struct Score {
  Real scale, softcap;
  DEVICE explicit Score(const Params& p) : scale(p.scale), softcap(p.softcap) {}
  DEVICE Real operator()(Real product) const {
    const Real s = product * scale;
    return SOFTCAP ? softcap * tanh(s / softcap) : s;
  }
  // 1 - tanh^2 at a score; 1 without a softcap.
  DEVICE Real slope(Real s) const {
    const Real t = SOFTCAP ? s / softcap : Real(0);
    return 1 - t * t;
  }
};
