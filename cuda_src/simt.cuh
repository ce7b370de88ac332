// Products in float or double on CUDA cores, without anything rounded to fewer bits.
//
// A warp owns 4 * kM rows of a tile and all SLICE columns: lane (y, x) = (lane / 8, lane % 8) holds
// kM x kN of its numbers, in groups of 16 bytes, so that what a warp reads at once lies in
// different banks. Operands come through shared memory SLICE columns at a time, the summed index
// first: `a` [SLICE][kRows] and `b` [SLICE][SLICE]. A warp reads only its own rows' part of `a`.
#pragma once
#include "mask.cuh"
#include "params.cuh"

using Real = REAL;
constexpr int kVector = 16 / sizeof(Real);
constexpr int kThreads = 32 * WARPS;
constexpr int kM = ROWS_PER_THREAD, kN = SLICE / 8;
constexpr int kRows = 4 * kM * WARPS;
static_assert(kM % kVector == 0 && kN % kVector == 0, "whole 16-byte groups");

// One group of columns more: then rows of `a` start 16 bytes of banks apart.
constexpr int kAPitch = kRows + kVector, kBPitch = SLICE + kVector;

constexpr Real kInfinity = static_cast<Real>(__builtin_bit_cast(float, 0x7f800000));

struct __align__(16) Shared {
  Real a[SLICE][kAPitch];
  Real b[SLICE][kBPitch];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_backend.py differ");

struct __align__(16) Group {
  Real x[kVector];
};

DEVICE constexpr int kSlices(int width) { return (width + SLICE - 1) / SLICE; }

using Matrix = Head<Real>;

// Where element i of a thread's kM rows, or j of its kN columns, lies in the tile.
DEVICE int row_of(int i) {
  const int warp = threadIdx.x / 32, y = threadIdx.x % 32 / 8;
  return warp * 4 * kM + i / kVector * 4 * kVector + y * kVector + i % kVector;
}
DEVICE int column_of(int j) {
  return j / kVector * 8 * kVector + threadIdx.x % 8 * kVector + j % kVector;
}

// Elements [row][column ..] of x, zeros beyond its ends.
DEVICE Group read_group(const Matrix& x, int row, int rows, int column, int width) {
  Group g;
  if (VECTOR && row < rows && column + kVector <= width)
    return *reinterpret_cast<const Group*>(&x.at(row, column));
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    g.x[j] = row < rows && column + j < width ? x.at(row, column + j) : Real(0);
  return g;
}

// tile[j][i] = x[row0 + i][column0 + j], kCount rows of x. Neighbouring threads have neighbouring
// rows.
template <int kCount, int kPitch>
DEVICE void load_transposed(Real (&tile)[SLICE][kPitch], const Matrix& x, int row0, int rows,
                            int column0, int width) {
#pragma unroll 4
  for (int n = threadIdx.x; n < kCount * (SLICE / kVector); n += kThreads) {
    const int i = n % kCount, j = n / kCount * kVector;
    const Group g = read_group(x, row0 + i, rows, column0 + j, width);
#pragma unroll
    for (int e = 0; e < kVector; ++e) tile[j + e][i] = g.x[e];
  }
}

// tile[i][j] = x[row0 + i][column0 + j], SLICE rows of x.
template <int kPitch>
DEVICE void load_straight(Real (&tile)[SLICE][kPitch], const Matrix& x, int row0, int rows,
                          int column0, int width) {
#pragma unroll 4
  for (int n = threadIdx.x; n < SLICE * (SLICE / kVector); n += kThreads) {
    const int i = n / (SLICE / kVector), j = n % (SLICE / kVector) * kVector;
    *reinterpret_cast<Group*>(&tile[i][j]) = read_group(x, row0 + i, rows, column0 + j, width);
  }
}

using Part = Real[kM][kN];

DEVICE void clear(Part& c) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) c[i][j] = 0;
}

// c += a^T b: the sum over the first index of both.
DEVICE void accumulate(Part& c, const Shared& shared) {
#pragma unroll 4
  for (int k = 0; k < SLICE; ++k) {
    Real a[kM], b[kN];
#pragma unroll
    for (int i = 0; i < kM; i += kVector) {
      const Group g = *reinterpret_cast<const Group*>(&shared.a[k][row_of(i)]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) a[i + e] = g.x[e];
    }
#pragma unroll
    for (int j = 0; j < kN; j += kVector) {
      const Group g = *reinterpret_cast<const Group*>(&shared.b[k][column_of(j)]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) b[j + e] = g.x[e];
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) c[i][j] += a[i] * b[j];
  }
}

// c = left right^T for the rows from i0 and j0 on, by slices of their width.
DEVICE void multiply(Part& c, Shared& shared, const Matrix& left, int i0, int left_rows,
                     const Matrix& right, int j0, int right_rows, int width) {
  clear(c);
  for (int column = 0; column < width; column += SLICE) {
    __syncthreads();  // all are done with what a and b held
    load_transposed<kRows>(shared.a, left, i0, left_rows, column, width);
    load_transposed<SLICE>(shared.b, right, j0, right_rows, column, width);
    __syncthreads();
    accumulate(c, shared);
  }
}

// The thread's part of a tile into `a`, columns first: only this warp reads it.
DEVICE void put(Shared& shared, const Part& c) {
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kN; ++j)
#pragma unroll
    for (int i = 0; i < kM; i += kVector) {
      Group g;
#pragma unroll
      for (int e = 0; e < kVector; ++e) g.x[e] = c[i + e][j];
      *reinterpret_cast<Group*>(&shared.a[column_of(j)][row_of(i)]) = g;
    }
  __syncwarp();
}

// total[n] += (the tile in a) right, slice by slice of the width of right.
template <int kSliceCount>
DEVICE void accumulate_slices(Part (&total)[kSliceCount], Shared& shared, const Matrix& right,
                              int j0, int rows, int width) {
#pragma unroll
  for (int n = 0; n < kSliceCount; ++n) {
    __syncthreads();  // all are done with b
    load_straight(shared.b, right, j0, rows, n * SLICE, width);
    __syncthreads();
    accumulate(total[n], shared);
  }
}

// x[row0 + i][n SLICE + j] = factor[i] * part: each thread its own numbers.
template <int kSliceCount>
DEVICE void store(const Matrix& x, const Part (&part)[kSliceCount], const Real (&factor)[kM],
                  int row0, int rows, int width) {
#pragma unroll
  for (int n = 0; n < kSliceCount; ++n)
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int row = row0 + row_of(i), column = n * SLICE + column_of(j);
        if (row < rows && column < width) x.at(row, column) = part[n][i][j] * factor[i];
      }
}

// Over the eight lanes that share rows.
DEVICE Real lanes_max(Real x) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) {
    const Real other = __shfl_xor_sync(~0u, x, lanes);
    x = x > other ? x : other;
  }
  return x;
}
DEVICE Real lanes_sum(Real x) {
#pragma unroll
  for (int lanes = 4; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Scores from products: scale, then softcap.
struct Scores {
  Real scale, softcap;
  DEVICE explicit Scores(const Params& p) : scale(p.scale), softcap(p.softcap) {}
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
