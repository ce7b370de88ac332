// A tile of 16-bit elements in shared memory, laid out so that ldmatrix and 16-byte copies meet no
// bank conflict: slabs of 64 columns (32 where the width is no multiple of 64), rows of a slab
// back to back, and the 16-byte groups of a row permuted by its number.
#pragma once
#include "common.cuh"
#include "mask.cuh"
#include "params.cuh"

using Slice = Head<unsigned short>;  // elements as bits

template <int kTileRows, int kTileWidth, int kThreads>
struct Tile {
  static constexpr int kRows = kTileRows, kWidth = kTileWidth;
  static constexpr int kSlab = kWidth % 64 == 0 ? 64 : 32;
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
    const int flip = kSlab == 64 ? row % 8 : row / 2 % 4;
    return tile + g / kGroups * kSlabBytes + row * kSlab * 2 + ((g % kGroups) ^ flip) * 16;
  }

  // Where this lane reads its row of the 16 x 16 part at the tile's origin, in the three ways that
  // fragments are loaded; `part` moves on from there. One register serves a whole row of parts.
  // A operand: the warp's rows of the tile.
  static DEVICE unsigned a_origin(unsigned tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return address(tile, warp * (kRows / (kThreads / 32)) + lane % 16, lane / 16);
  }
  // Two B operands, the tile's rows being columns of the product.
  static DEVICE unsigned b_origin(unsigned tile) {
    const int lane = threadIdx.x % 32;
    return address(tile, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // The same for load_matrices_transposed: the tile's rows being summed over.
  static DEVICE unsigned bt_origin(unsigned tile) {
    const int lane = threadIdx.x % 32;
    return address(tile, lane % 16, lane / 16);
  }
  // Rows 16 i .., columns 16 j ..: two 16-byte groups further is one bit flipped.
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
      const uint4 e = load_shared16(address(tile, row, g));
      char* to = x.data + (row0 + row) * x.row + g * 8 * x.column;
      if constexpr (kVector) {
        *reinterpret_cast<uint4*>(to) = e;
      } else {
        const unsigned words[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (g * 8 + j < width)
            *reinterpret_cast<unsigned short*>(to + j * x.column) = words[j / 2] >> j % 2 * 16;
      }
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

// c = A B^T, over the widths of the tiles; the warp's rows of A, all rows of B.
template <class T, class ATile, class BTile, int kM, int kN>
DEVICE void multiply(float (&c)[kM][kN][4], unsigned a_tile, unsigned b_tile) {
  clear(c);
  const unsigned a_origin = ATile::a_origin(a_tile), b_origin = BTile::b_origin(b_tile);
#pragma unroll
  for (int i = 0; i < ATile::kWidth / 16; ++i) {
    unsigned a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_matrices(a[m], ATile::part(a_origin, m, i));
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      unsigned b[4];
      load_matrices(b, BTile::part(b_origin, n, i));
      mma_pair<T>(c, n, a, b);
    }
  }
}

// c += P B. The accumulators p of an earlier product, rounded, are A fragments as they lie.
template <class T, class BTile, int kM, int kN, int kP>
DEVICE void accumulate(float (&c)[kM][kN][4], const float (&p)[kM][kP][4], unsigned b_tile) {
  const unsigned b_origin = BTile::bt_origin(b_tile);
#pragma unroll
  for (int i = 0; i < kP / 2; ++i) {
    unsigned a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&two)[4] = p[m][2 * i + r / 2];
        a[m][r] = pack<T>(two[r % 2 * 2], two[r % 2 * 2 + 1]);
      }
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      unsigned b[4];
      load_matrices_transposed(b, BTile::part(b_origin, i, n));
      mma_pair<T>(c, n, a, b);
    }
  }
}

// Where a fragment lies in its tile: the row of half r of 16-row tile m, and the column of
// element 0 of 8-column tile 0 (element e of n-tile n: + 8 n + e).
template <int kM>
DEVICE int fragment_row(int m, int r) {
  return (threadIdx.x / 32 * kM + m) * 16 + threadIdx.x % 32 / 4 + 8 * r;
}
DEVICE int fragment_column() { return threadIdx.x % 4 * 2; }

// Put `hidden` where a row does not see a column. (i0, j0): the first row and column of the tile.
template <int kM, int kN>
DEVICE void apply_mask(float (&c)[kM][kN][4], int i0, int j0, int columns, int lo_shift,
                       int hi_shift, float hidden) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Bounds seen = k_bounds(i0 + fragment_row<kM>(m, r), columns, lo_shift, hi_shift);
      const int lo = seen.lo - j0 - fragment_column(), hi = seen.hi - j0 - fragment_column();
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (n * 8 + e < lo || n * 8 + e >= hi) c[m][n][2 * r + e] = hidden;
    }
  }
}

// Rows of c, each times a factor, rounded into the tile in shared memory: the warp's own rows.
template <class T, class OTile, int kM, int kN>
DEVICE void stage_rows(const float (&c)[kM][kN][4], const float (&factor)[kM][2], unsigned tile) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kN; ++n)
        store_shared(OTile::address(tile, fragment_row<kM>(m, r), n) + 2 * fragment_column(),
                     pack<T>(c[m][n][2 * r] * factor[m][r], c[m][n][2 * r + 1] * factor[m][r]));
}
