// Products in float or double on CUDA cores, or in double on tensor cores (MMA), without anything
// rounded to fewer bits.
//
// A block owns kRows rows of a product; other rows stream past, STREAMED at a time, in slices of
// SLICE columns. All products are sums over the first index of two tiles in shared memory,
// c += left^T right:
//   scores += mine theirs^T   both turned on their way in: columns first
//   out    += p theirs        p is written columns first, theirs lie as in global memory
// Each warp has kRows / (WARPS / ACROSS) of the rows and one of ACROSS parts of the columns, and of
// these lane (y, x) has groups of rows and of columns: y, y + kLanesY, ... and x, x + kLanesX, ....
//
// On CUDA cores a thread reads kM numbers of one tile and kN of the other in groups of 16 bytes,
// for kM x kN multiply-adds. On tensor cores the same groups are operands of mma, two rows or
// columns each: of a block of 16 x 16, lane (y, x) then has two rows from 2 y on and four columns
// from 4 x on. As they lie, those are left operands of the next product, if it takes row 4 x + j of
// the right tile where it would take row x + 4 j: so tiles that lie as in global memory have them
// there.
#pragma once
#include "common.cuh"
#include "exponential.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "quad.cuh"

constexpr int kVector = 16 / sizeof(Real);
constexpr int kThreads = 32 * WARPS;
constexpr int kLanesY = MMA ? 8 : 4, kLanesX = 32 / kLanesY;
constexpr int kColumnGroup = MMA ? 4 : kVector;  // a lane's columns that are neighbours
constexpr int kM = ROWS_PER_THREAD, kRows = kLanesY * kM * WARPS / ACROSS;
// A thread's columns of scores and of a slice.
constexpr int kS = STREAMED / (kLanesX * ACROSS), kO = SLICE / (kLanesX * ACROSS);
constexpr int kHead = HEAD_DIM / SLICE, kValue = VALUE_DIM / SLICE;
// Of a result that is wider than CHUNK columns a block makes as many, and the same scores as the
// blocks of others. Slices of it, and blocks:
DEVICE constexpr int kept(int slices) { return slices * SLICE < CHUNK ? slices : CHUNK / SLICE; }
DEVICE constexpr int chunks(int slices) { return (slices + kept(slices) - 1) / kept(slices); }
constexpr bool kWide = HEAD_DIM > 256 || VALUE_DIM > 256;
// Beside that, addresses are worked out when needed: kept in registers, up to 240 bytes spilled.
DEVICE int when_needed(int x) { return kWide ? again(x) : x; }
static_assert(kM % kVector == 0 && kS % kColumnGroup == 0 && kO % kColumnGroup == 0, "groups");
static_assert(!MMA || sizeof(Real) == 8, "not on these cores");

// A warp that has all scores of its rows multiplies with them as they lie in its registers.
constexpr bool kScoresStay = MMA && ACROSS == 1;

// Steps of a product that are unrolled: 16 are up to 4 % faster than 8, and 8 % than 4, but 3 %
// slower for the backward pass of wide heads in float (docs/kernels.md).
constexpr int kUnroll = sizeof(Real) == 4 && kHead * SLICE > 128 ? 8 : 16;
static_assert(STREAMED % kUnroll == 0 && SLICE % kUnroll == 0, "whole steps");

// Rows in shared memory start 16 bytes of banks apart; for tensor cores 32, as the eight lanes that
// read 16 bytes each at once have two neighbours in each of four rows.
DEVICE constexpr int pitch(int width) { return width + (MMA ? 4 : kVector); }

using Matrix = Head<Real>;
template <int kCount>
using Turned = Real[SLICE][pitch(kCount)];  // a slice of kCount rows, columns first
using Straight = Real[STREAMED][pitch(SLICE)];
using Scores = Real[kM][kS];
using Out = Real[kM][kO];

// kSlices: of the block's own rows. With WHOLE they stay, otherwise they pass with the others'.
// kColumns: of scores that pass through shared memory.
template <int kSlices, int kColumns>
struct __align__(16) Shared {
  Turned<kRows> mine[WHOLE ? kSlices : 2];
  Real p[kColumns][pitch(kRows)];  // without ACROSS, a warp's part is its own
  union {
    Turned<STREAMED> turned;
    Straight straight;
  } theirs[2];
  double powers[16];
};

struct __align__(16) Group {
  Real x[kVector];
};

// On CUDA cores neighbours in pairs have the same x, and pairs of pairs the same y: than with
// x = lane % 8, the products in double were 11 % faster, those in float 1 to 4 %.
DEVICE int lane_x() { return MMA ? threadIdx.x % 4 : threadIdx.x / 2 % 8; }
DEVICE int lane_y() {
  return MMA ? threadIdx.x % 32 / 4 : threadIdx.x % 2 + threadIdx.x % 32 / 16 * 2;
}

// Where element i of a thread's kM rows, or j of its kN columns, lies in the tile.
DEVICE int first_row() { return threadIdx.x / 32 / ACROSS * kLanesY * kM; }
DEVICE int row_of(int i) {
  return first_row() + (i / kVector * kLanesY + lane_y()) * kVector + i % kVector;
}
template <int kN>
DEVICE int first_column() {
  return threadIdx.x / 32 % ACROSS * kLanesX * kN;
}
template <int kN>
DEVICE int column_of(int j) {
  return first_column<kN>() + (j / kColumnGroup * kLanesX + lane_x()) * kColumnGroup +
         j % kColumnGroup;
}

// Where row i of a tile is that lies as in global memory, and column i of one that is written
// columns first: for tensor cores, 16 rows as a 4 x 4 matrix are transposed.
DEVICE constexpr int slot(int i) { return MMA ? i / 16 * 16 + i % 4 * 4 + i % 16 / 4 : i; }

DEVICE const Group& group(const Real& first) { return reinterpret_cast<const Group&>(first); }

// One element, or zero where it is not inside.
DEVICE void copy_one(unsigned to, const void* from, bool inside) {
  if (sizeof(Real) == 4)
    copy4(to, from, inside);
  else
    copy8(to, from, inside);
}

// tile[slot(i)][j] = x[row0 + i][n SLICE + j], zeros beyond the ends of x; complete after
// arrived().
DEVICE void fetch(Straight& tile, const Matrix& x, int row0, int rows, int n, int width) {
  row0 = when_needed(row0), n = when_needed(n);
  constexpr int kSize = VECTOR ? kVector : 1, kAcross = SLICE / kSize, kStep = kThreads / kAcross;
  static_assert(kThreads % kAcross == 0 && STREAMED % kStep == 0, "whole rows at a time");
  const int i0 = threadIdx.x / kAcross, j = threadIdx.x % kAcross * kSize;
  const int left = n * SLICE + j < width ? rows - row0 - i0 : 0;
  const char* from =
      x.data + (row0 + i0) * x.row + (n * SLICE + j) * (VECTOR ? sizeof(Real) : x.column);
  const unsigned to = shared_address(&tile[slot(i0)][j]);
#pragma unroll
  for (int i = 0; i < STREAMED; i += kStep, from += kStep * x.row) {
    const unsigned here = to + slot(i) * sizeof(tile[0]);  // slots only move bits of a number
    if (VECTOR)
      copy16(here, from, i < left);
    else
      copy_one(here, from, i < left);
  }
}

// The row of a tile written columns first that column j is, and back. For tensor cores, of each
// eight those are the first that are a product's first four in fp64_sm90.cuh: scores are summed in
// the same order there, and are the same numbers.
DEVICE constexpr int row_of_column(int j) { return MMA ? j / 8 * 8 + j % 2 * 4 + j % 8 / 2 : j; }
DEVICE constexpr int column_of_row(int i) { return MMA ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i; }

// tile[row_of_column(j)][i] = x[row0 + i][n SLICE + j], element by element: a warp copies 8
// neighbours of each of 4 rows at once, which lie in different banks.
template <int kCount>
DEVICE void fetch_turned(Turned<kCount>& tile, const Matrix& x, int row0, int rows, int n,
                         int width) {
  row0 = when_needed(row0), n = when_needed(n);
  const int j0 = threadIdx.x % 8;
  const long long step = VECTOR ? sizeof(Real) : x.column;
#pragma unroll 1
  for (int i = threadIdx.x / 8; i < kCount; i += kThreads / 8) {
    const char* from = x.data + (row0 + i) * x.row + (n * SLICE + j0) * step;
    const unsigned to = shared_address(&tile[row_of_column(j0)][i]);
    const int left = row0 + i < rows ? width - n * SLICE - j0 : 0;
#pragma unroll
    for (int j = 0; j < SLICE; j += 8)
      copy_one(to + j * sizeof(tile[0]), from + j * step, j < left);
  }
}

// What was fetched is there, and all are done with what came before it.
DEVICE void arrived() {
  copies_wait();
  __syncthreads();
}

// Of two rows or columns of a tile, from `first` on, what a lane gives to an mma over 16 steps.
template <int kApart, int kPitch>
DEVICE void load(Real* one, Real* other, const Real (*tile)[kPitch], int first) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const Group pair = group(tile[4 * k + lane_x()][first]);
    one[k * kApart] = pair.x[0], other[k * kApart] = pair.x[1];
  }
}

// c += left^T right over 16 steps on tensor cores.
template <int kN, int kPitch>
DEVICE void multiply(Real (&c)[kM][kN], const Real (&left)[kM / 2][8],
                     const Real (*right)[kPitch]) {
#pragma unroll
  for (int n = 0; n < kN; n += 4) {
    Real b[2][4];
    load<1>(b[0], b[1], right, first_column<kN>() + 4 * n + 2 * lane_y());
#pragma unroll
    for (int m = 0; m < kM; m += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        mma(c[m][n + e], c[m][n + 2 + e], c[m + 1][n + e], c[m + 1][n + 2 + e], left[m / 2], b[e]);
  }
}

// Of kPairs pairs of rows or columns of a tile, from `first` on, the same over 4 steps.
template <int kPairs, int kPitch>
DEVICE void load(Group (&pairs)[kPairs], const Real (*tile)[kPitch], int first) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    pairs[i] = group(tile[lane_x()][first + 2 * (kLanesY * i + lane_y())]);
}

// c += left^T right over 4 steps, in the columns from n0 on.
template <int kN, int kPairs>
DEVICE void multiply(Real (&c)[kM][kN], int n0, const Group (&left)[kM / 2],
                     const Group (&right)[kPairs]) {
#pragma unroll
  for (int n = n0; n < n0 + 4 * kPairs; n += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int m = 0; m < kM; m += 2)
        mma(c[m][n + e], c[m][n + 2 + e], c[m + 1][n + e], c[m + 1][n + 2 + e], left[m / 2].x,
            right[(n - n0) / 4].x[e]);
}

// Columns that are multiplied at a time where operands are loaded ahead, and how many times.
template <int kN>
constexpr int kPart = kN < 8 ? kN : 8;
template <int kN>
constexpr int kParts = kN / kPart<kN>;

// c += left^T right: the sum over `steps` rows of both, up to a multiple of kUnroll. On CUDA cores
// columns are taken there and back: an operand that two instructions in a row share need not be
// read again, and reads of registers are what bounds these products (docs/kernels.md). kAhead: on
// tensor cores 4 steps at a time, with the next ones' operands on their way while they work: as all
// products, 8 % faster forward and 10 % slower backward than 16 steps at a time.
template <bool kAhead = false, int kN, int kLeftPitch, int kRightPitch>
DEVICE void accumulate(Real (&c)[kM][kN], const Real (*left)[kLeftPitch],
                       const Real (*right)[kRightPitch], int steps) {
  if constexpr (MMA && kAhead) {
    Group a[2][kM / 2], b[2][kPart<kN> / 4];
    load(a[0], left, first_row()), load(b[0], right, first_column<kN>());
#pragma unroll 1
    for (int k0 = 0; k0 < steps; k0 += 16)
#pragma unroll
      for (int i = 0; i < 4 * kParts<kN>; ++i) {
        const int k = i / kParts<kN>, part = (i + 1) % kParts<kN>;
        const int after = k0 + 16 < steps ? k0 + 16 : 0;
        const int next = i + 1 < 4 * kParts<kN> ? k0 + (i + 1) / kParts<kN> * 4 : after;
        if (part == 0) load(a[(k + 1) % 2], left + next, first_row());
        load(b[(i + 1) % 2], right + next, first_column<kN>() + part * kPart<kN> * kLanesX);
        multiply(c, i % kParts<kN> * kPart<kN>, a[k % 2], b[i % 2]);
      }
  } else if constexpr (MMA) {
#pragma unroll 1
    for (int k = 0; k < steps; k += 16) {
      Real a[kM / 2][8];
#pragma unroll
      for (int m = 0; m < kM; m += 2) load<2>(a[m / 2], a[m / 2] + 1, left + k, row_of(m));
      multiply(c, a, right + k);
    }
  } else {
#pragma unroll 1
    for (int k0 = 0; k0 < steps; k0 += kUnroll)
#pragma unroll
      for (int k = k0; k < k0 + kUnroll; ++k) {
        Group a[kM / kVector], b[kN / kVector];
#pragma unroll
        for (int i = 0; i < kM; i += kVector) a[i / kVector] = group(left[k][row_of(i)]);
#pragma unroll
        for (int j = 0; j < kN; j += kVector) b[j / kVector] = group(right[k][column_of<kN>(j)]);
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
          for (int m = 0; m < kN; ++m) {
            const int j = i % 2 ? kN - 1 - m : m;
            c[i][j] += a[i / kVector].x[i % kVector] * b[j / kVector].x[j % kVector];
          }
      }
  }
}

// c += left^T right for scores, of a slice. Wide heads sum a slice by itself: one chain of 1,024
// products in float had errors of 2.5 times the plain formula's.
template <bool kAhead = false>
DEVICE void accumulate_scores(Scores& c, const Turned<kRows>& left, const Turned<STREAMED>& right,
                              int steps) {
  if constexpr (kWide) {
    Scores part;
    clear(part);
    accumulate(part, left, right, steps);
    add(c, part);
  } else {
    accumulate<kAhead>(c, left, right, steps);
  }
}

// c += p right, by the scores in p or, where they stay, the thread's own, with operands loaded
// ahead.
template <int kN, class Memory>
DEVICE void accumulate(Real (&c)[kM][kN], const Memory& shared, const Scores& p,
                       const Straight& right) {
  if constexpr (!kScoresStay) {
    accumulate(c, shared.p, right, STREAMED);
  } else {
    Group a[kM / 2], b[2][kPart<kN> / 4];
    load(b[0], right, first_column<kN>());
#pragma unroll
    for (int i = 0; i < kS * kParts<kN>; ++i) {
      const int next = i + 1, part = next % kParts<kN>;
#pragma unroll
      for (int m = 0; m < kM; ++m) a[m / 2].x[m % 2] = p[m][i / kParts<kN>];
      if (next < kS * kParts<kN>)
        load(b[next % 2], right + next / kParts<kN> * 4,
             first_column<kN>() + part * kPart<kN> * kLanesX);
      multiply(c, i % kParts<kN> * kPart<kN>, a, b[i % 2]);
    }
  }
}

// The thread's scores into p: without ACROSS, only this warp reads them.
DEVICE void put(Real (*p)[pitch(kRows)], const Scores& c) {
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kS; ++j)
#pragma unroll
    for (int i = 0; i < kM; i += kVector) {
      Group g;
#pragma unroll
      for (int e = 0; e < kVector; ++e) g.x[e] = c[i + e][j];
      *reinterpret_cast<Group*>(&p[slot(column_of<kS>(j))][row_of(i)]) = g;
    }
  __syncwarp();
}

// x[row0 + i][(slice0 + n) SLICE + j] = factor[i] * part: each thread its own numbers. With `more`
// they are added to what is there.
template <int kSlices>
DEVICE void store(const Matrix& x, const Out (&part)[kSlices], const Real (&factor)[kM], int row0,
                  int rows, int slice0, int width, bool more = false) {
#pragma unroll
  for (int n = 0; n < kSlices; ++n)
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const int row = row0 + row_of(i), column0 = (slice0 + n) * SLICE;
#pragma unroll
      for (int j0 = 0; j0 < kO; j0 += kColumnGroup) {
        Real group[kColumnGroup];
#pragma unroll
        for (int e = 0; e < kColumnGroup; ++e) group[e] = part[n][i][j0 + e] * factor[i];
        int column = column0 + column_of<kO>(j0), step = 1;
        // What the lanes of a row add at once fills its 32 bytes.
        if constexpr (MMA)
          if (more) transpose_in_quad(group), column -= 3 * lane_x(), step = 4;
#pragma unroll
        for (int e = 0; e < kColumnGroup; ++e, column += step) {
          const bool inside = row < rows && column < width;
          if (more)
            add(&x.at(row, column), group[e], inside);
          else if (inside)
            x.at(row, column) = group[e];
        }
      }
    }
}

// Over the lanes that share rows.
constexpr int kFirstLane = MMA ? 1 : 2, kLastLane = kFirstLane * kLanesX;
DEVICE Real lanes_max(Real x) {
#pragma unroll
  for (int lanes = kFirstLane; lanes < kLastLane; lanes *= 2)
    x = larger(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}
DEVICE Real lanes_sum(Real x) {
#pragma unroll
  for (int lanes = kFirstLane; lanes < kLastLane; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}
