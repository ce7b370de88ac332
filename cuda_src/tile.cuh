// A tile of 16-bit elements in shared memory, laid out so that ldmatrix and 16-byte copies meet no
// bank conflict: slabs of 64 columns (32 or 16 where the width is no multiple), rows of a slab
// back to back, and the 16-byte groups of a row permuted by its number.
#pragma once
#include "common.cuh"
#include "mask.cuh"
#include "params.cuh"

using Slice = Head<unsigned short>;  // elements as bits

// Eight elements of a row of x, from this column on; none beyond the width.
template <bool kVector>
DEVICE void store_group(const Slice& x, int row, int column, int width, uint4 e) {
  char* to = x.data + row * x.row + column * x.column;
  if constexpr (kVector) {
    *reinterpret_cast<uint4*>(to) = e;
  } else {
    const unsigned words[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + j < width)
        *reinterpret_cast<unsigned short*>(to + j * x.column) = words[j / 2] >> j % 2 * 16;
  }
}

template <int kTileRows, int kTileWidth, int kThreads>
struct Tile {
  static constexpr int kRows = kTileRows, kWidth = kTileWidth;
  static constexpr int kSlab = kWidth % 64 == 0 ? 64 : kWidth % 32 == 0 ? 32 : 16;
  static constexpr int kGroups = kSlab / 8;  // of 16 bytes, in a row of a slab
  static constexpr int kSlabBytes = kRows * kSlab * 2;
  // Copies: a thread keeps its group of columns and steps down the rows.
  static constexpr int kRowGroups = kWidth / 8, kRowStep = kThreads / kRowGroups;
  static constexpr int kCopies = (kRows + kRowStep - 1) / kRowStep;
  static constexpr bool kIdle = kThreads % kRowGroups != 0;  // some threads have nothing to copy
  static_assert(kWidth % kSlab == 0 && kRows % 8 == 0, "whole slabs");

  struct __align__(1024) Storage {
    char bytes[(kRows * kWidth * 2 + 1023) / 1024 * 1024];
  };

  // Of the 16-byte group g (8 columns) of a row. Eight consecutive rows lie in eight different
  // sets of four banks.
  static DEVICE unsigned address(unsigned tile, int row, int g) {
    const int flip = row / (8 / kGroups) % kGroups;
    return tile + g / kGroups * kSlabBytes + row * kSlab * 2 + ((g % kGroups) ^ flip) * 16;
  }

  // From an address in the 16 x 16 block at the tile's origin to the same place in block (i, j):
  // rows 16 i .., columns 16 j ..; two 16-byte groups further is one bit flipped. One register
  // serves a whole row of blocks.
  static DEVICE unsigned part(unsigned origin, int i, int j) {
    return (origin ^ j % (kSlab / 16) * 32) + j / (kSlab / 16) * kSlabBytes + i * 16 * kSlab * 2;
  }

  // Rows row0 .. of x, zeros beyond `rows` and `width`: values out there never enter.
  template <bool kVector>
  static DEVICE void load(unsigned tile, const Slice& x, int row0, int rows, int width) {
    const int first = threadIdx.x / kRowGroups, g = threadIdx.x % kRowGroups;
    const char* from = x.data + (row0 + first) * x.row + g * 8 * x.column;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int row = n * kRowStep + first;
      if ((kIdle && first >= kRowStep) || (kRows % kRowStep && row >= kRows)) break;
      const unsigned to = address(tile, row, g);
      const bool inside = row0 + row < rows;
      if constexpr (kVector) {
        copy16(to, from, inside && g * 8 < width);
      } else {
        unsigned e[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          e[j] = inside && g * 8 + j < width
                     ? *reinterpret_cast<const unsigned short*>(from + j * x.column)
                     : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) store_shared(to + 4 * j, e[2 * j] | e[2 * j + 1] << 16);
      }
      from += kRowStep * x.row;
      // Else all the rows' pointers are kept in registers across the main loop.
      asm("" : "+l"(from));
    }
  }

  template <bool kVector>
  static DEVICE void store(const Slice& x, unsigned tile, int row0, int rows, int width) {
    const int first = threadIdx.x / kRowGroups, g = threadIdx.x % kRowGroups;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int row = n * kRowStep + first;
      if (first >= kRowStep || row >= kRows || row0 + row >= rows || g * 8 >= width) break;
      store_group<kVector>(x, row0 + row, g * 8, width, load_shared16(address(tile, row, g)));
    }
  }
};

template <int kM, int kN>
DEVICE void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] = 0;
}

// Columns 16 n .. of c += a b, for the two B operands that one load brings.
template <class T, int kM, int kN>
DEVICE void mma_pair(float (&c)[kM][kN][4], int n, const unsigned (&a)[kM][4],
                     const unsigned (&b)[4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    mma<T>(c[m][2 * n], a[m], b[0], b[1]);
    mma<T>(c[m][2 * n + 1], a[m], b[2], b[3]);
  }
}

// One side of a product, as a warp reads it from a tile: 16 x 16 blocks, from `first` in steps of
// kStep. kLeft: they are rows of the product; else columns. kOver: the tile's rows are summed over,
// and its columns are rows or columns of the product; else the other way round.
template <class TheTile, bool kLeft, int kStep, bool kOver>
struct Side {
  static constexpr int kDepth = (kOver ? TheTile::kRows : TheTile::kWidth) / 16;
  unsigned origin;  // where this lane reads its row of 8 x 8 matrices

  DEVICE Side(unsigned tile, int first) {
    // Of four matrices the second is eight rows down or eight columns to the right.
    const int lane = threadIdx.x % 32;
    const int row = kLeft != kOver ? lane % 16 : lane / 16 * 8 + lane % 8;
    const int group = kLeft != kOver ? lane / 16 : lane / 8 % 2;
    origin = kOver ? TheTile::address(tile, row, group + 2 * first)
                   : TheTile::address(tile, row + 16 * first, group);
  }
  DEVICE void load(unsigned (&r)[4], int i, int k) const {
    if constexpr (kOver)
      load_matrices_transposed(r, TheTile::part(origin, k, i * kStep));
    else
      load_matrices(r, TheTile::part(origin, i * kStep, k));
  }
};

template <class TheTile, int kStep, bool kOver = false>
DEVICE Side<TheTile, true, kStep, kOver> rows_of(unsigned tile, int first) {
  return {tile, first};
}
template <class TheTile, int kStep, bool kOver = false>
DEVICE Side<TheTile, false, kStep, kOver> columns_of(unsigned tile, int first) {
  return {tile, first};
}

// c += A B; of B's columns from the warp's block n0 on.
template <class T, class A, class B, int kM, int kN>
DEVICE void product(float (&c)[kM][kN][4], const A& a, const B& b, int n0 = 0) {
  static_assert(A::kDepth == B::kDepth, "A and B do not fit");
#pragma unroll
  for (int k = 0; k < A::kDepth; ++k) {
    unsigned x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a.load(x[m], m, k);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      unsigned y[4];
      b.load(y, n0 + n, k);
      mma_pair<T>(c, n, x, y);
    }
  }
}

// c = A B^T, over the widths of the tiles; the warp's rows of A, all rows of B.
template <class T, class ATile, class BTile, int kM, int kN>
DEVICE void multiply(float (&c)[kM][kN][4], unsigned a_tile, unsigned b_tile) {
  clear(c);
  product<T>(c, rows_of<ATile, 1>(a_tile, threadIdx.x / 32 * kM), columns_of<BTile, 1>(b_tile, 0));
}

// c += P B. The accumulators p of an earlier product, rounded, are A fragments as they lie.
template <class T, class BTile, int kM, int kN, int kP>
DEVICE void accumulate(float (&c)[kM][kN][4], const float (&p)[kM][kP][4], unsigned b_tile) {
  const auto b = columns_of<BTile, 1, true>(b_tile, 0);
#pragma unroll
  for (int i = 0; i < kP / 2; ++i) {
    unsigned x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&two)[4] = p[m][2 * i + r / 2];
        x[m][r] = pack<T>(two[r % 2 * 2], two[r % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      unsigned y[4];
      b.load(y, n, i);
      mma_pair<T>(c, n, x, y);
    }
  }
}

// Where a fragment lies in its tile: the row of half r of 16-row tile m, and the column of
// element 0 of 8-column tile 0 (element e of n-tile n: + 8 n + e). For a warp with all columns of
// kM 16-row tiles in a row:
template <int kM>
DEVICE int fragment_row(int m, int r) {
  return (threadIdx.x / 32 * kM + m) * 16 + threadIdx.x % 32 / 4 + 8 * r;
}
DEVICE int fragment_column() { return threadIdx.x % 4 * 2; }

template <int kM>
struct AllColumns {
  DEVICE int fragment_row(int m, int r) const { return ::fragment_row<kM>(m, r); }
  DEVICE int fragment_column() const { return ::fragment_column(); }
  static DEVICE int column_step(int n) { return n * 8; }
};

// The same where 16 x 16 blocks are dealt in turn to a grid of kRowWarps x kColumnWarps warps:
// block (m, n) of this warp is (m * kRowWarps + row, n * kColumnWarps + column) of the tile.
template <int kRows, int kColumns>
struct Share {
  static constexpr int kRowWarps = kRows, kColumnWarps = kColumns;
  const int row = threadIdx.x / 32 / kColumns, column = threadIdx.x / 32 % kColumns;

  DEVICE int fragment_row(int m, int r) const {
    return (m * kRows + row) * 16 + threadIdx.x % 32 / 4 + 8 * r;
  }
  DEVICE int fragment_column() const { return column * 16 + threadIdx.x % 4 * 2; }
  static DEVICE int column_step(int n) { return n / 2 * kColumns * 16 + n % 2 * 8; }
};

// Put `hidden` where row i does not see a column: one outside seen(i). (i0, j0): the first row and
// column of the tile.
template <int kM, int kN, class TheShare, class Seen>
DEVICE void apply_mask(float (&c)[kM][kN][4], const TheShare& share, int i0, int j0, float hidden,
                       Seen seen) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Bounds bounds = seen(i0 + share.fragment_row(m, r));
      const int j = j0 + share.fragment_column(), lo = bounds.lo - j, hi = bounds.hi - j;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int step = share.column_step(n) + e;
          if (step < lo || step >= hi) c[m][n][2 * r + e] = hidden;
        }
    }
  }
}
template <int kM, int kN>
DEVICE void apply_mask(float (&c)[kM][kN][4], int i0, int j0, int columns, int lo_shift,
                       int hi_shift, float hidden) {
  apply_mask(c, AllColumns<kM>(), i0, j0, hidden,
             [=](int i) { return k_bounds(i, columns, lo_shift, hi_shift); });
}

template <int kM, int kN>
DEVICE void scale_by(float (&c)[kM][kN][4], float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] *= factor;
}

// c, rounded into the tile in shared memory.
template <class T, class TheTile, int kM, int kN, class TheShare>
DEVICE void stage_rows(const float (&c)[kM][kN][4], const TheShare& share, unsigned tile) {
  const int column = share.fragment_column();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned origin =
          TheTile::address(tile, share.fragment_row(m, r), column / 8) + column % 8 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int step = share.column_step(n);
        store_shared(TheTile::part(origin, 0, step / 16) ^ step % 16 * 2,
                     pack<T>(c[m][n][2 * r], c[m][n][2 * r + 1]));
      }
    }
}
// The same with a factor for each row.
template <class T, class TheTile, int kM, int kN>
DEVICE void stage_rows(const float (&c)[kM][kN][4], const float (&factor)[kM][2], unsigned tile) {
  float scaled[kM][kN][4];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scaled[m][n][e] = c[m][n][e] * factor[m][e / 2];
  stage_rows<T, TheTile>(scaled, AllColumns<kM>(), tile);
}
