// Products of doubles on Hopper's tensor cores (mma.sync), of boxes that tensor copies write.
//
// A box is 16 columns of so many rows, 128 bytes a row; its groups of 16 bytes are permuted by the
// row's number (128-byte swizzle). As it lies it is an operand of both kinds: one whose summed
// index runs along its rows (Q and K for scores), and one where it counts rows (V). A lane (y, x)
// of a warp reads 16 bytes at a time, which are of two steps, or of two columns, and any eight
// lanes that read at once meet in no bank, if row y of an mma is row spread(y) of eight in the box:
//   along  row spread(y), columns 8 h + 2 x ..     y, y + 1: rows 4 apart, other halves of 128
//   bytes down   row spread(2 x + e), columns 2 y ..     rows 2 apart for x, x + 1
// An accumulator of scores has for e = 0, 1 column spread(2 x + e) of eight in lane x: as it lies
// it is the left operand of a product that is summed over these columns.
#pragma once
#include "ring.cuh"

DEVICE int lane_x() { return threadIdx.x % 4; }
DEVICE int lane_y() { return threadIdx.x % 32 / 4; }
DEVICE constexpr int spread(int y) { return y ^ (y & 1) << 2; }

constexpr int kBoxColumns = 16, kRowBytes = 128, kEightRows = 8 * kRowBytes;

struct Pair {
  double x[2];
};
DEVICE Pair load_pair(unsigned address) {
  Pair pair;
  load_shared16(pair.x, address);
  return pair;
}

// Where in a box a lane's groups are: `along`, the first of two, of which the other has a bit
// flipped; `down`, of each e.
DEVICE unsigned group_at(int row, int group) { return row * kRowBytes + ((group ^ row) & 7) * 16; }
DEVICE unsigned along() { return group_at(spread(lane_y()), lane_x()); }
constexpr unsigned kOtherHalf = 64;
DEVICE unsigned down(int e) { return group_at(spread(2 * lane_x() + e), lane_y()); }

// 16 rows and 8 kTiles columns: of each eight columns a lane has two, in two rows.
template <int kTiles>
using Sums = double[kTiles][4];

template <int kTiles>
DEVICE void clear(Sums<kTiles>& c) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[t][e] = 0;
}

template <int kTiles>
DEVICE void add(Sums<kTiles>& c, const Sums<kTiles>& more) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) c[t][e] += more[t][e];
}

// c += a b^T over the 16 columns of two boxes, of 16 rows and of 8 kTiles: addresses with along().
template <int kTiles>
DEVICE void multiply_along(Sums<kTiles>& c, unsigned a, unsigned b) {
#pragma unroll
  for (int half = 0; half < 2; ++half, a ^= kOtherHalf, b ^= kOtherHalf) {
    // An mma takes the same column of both rows. Read in pairs these have fewer bank conflicts, but
    // moves bring them together: 40.1 instead of 41.4 TFLOP/s with four tiles (a width of 256), but
    // 35.9 instead of 33.6 with two (512), where reading is what takes longest.
    double left[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned row = a + r * kEightRows;
      if (kTiles > 2) {
        left[0][r] = load_shared_double(row), left[1][r] = load_shared_double(row ^ 8);
      } else {
        const Pair pair = load_pair(row);
        left[0][r] = pair.x[0], left[1][r] = pair.x[1];
      }
    }
    Pair right[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) right[t] = load_pair(b + t * kEightRows);
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        mma(c[t][0], c[t][1], c[t][2], c[t][3], left[e], right[t].x[e]);
  }
}

// c += a b: a, 16 rows and 8 kSteps columns as accumulators have them; b, as many rows of kBoxes
// boxes, `box` bytes apart. Of each box c has 16 columns, four of them in a lane: 4 x + 2 i + e in
// c[2 box + e], i = 0, 1.
template <int kBoxes, int kSteps>
DEVICE void multiply_down(Sums<2 * kBoxes>& c, const Sums<kSteps>& a, unsigned b, int box,
                          const unsigned (&down)[2]) {
#pragma unroll
  for (int t = 0; t < kSteps; ++t)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int n = 0; n < kBoxes; ++n) {
        const Pair right = load_pair(b + n * box + t * kEightRows + down[e]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          double (&sum)[4] = c[2 * n + i];
          mma(sum[0], sum[1], sum[2], sum[3], {a[t][e], a[t][2 + e]}, right.x[i]);
        }
      }
}
