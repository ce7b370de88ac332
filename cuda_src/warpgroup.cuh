// Tiles as tensor copies write them and wgmma reads them, rings of them, and what becomes of
// accumulators. Tile is a multiple of 64 columns wide; fragments are those of a warpgroup, 64 rows.
#pragma once
#include "quad.cuh"
#include "ring.cuh"
#include "tile.cuh"
#include "wgmma.cuh"

DEVICE constexpr int slabs(int width) { return (width + 63) / 64; }

// From row `row` on; the barrier waits for so many more bytes, of other copies.
template <class T>
DEVICE void load(unsigned tile, const TensorMap& map, unsigned barrier, int row, int head,
                 int batch, int more_bytes = 0) {
  barrier_expect(barrier, sizeof(typename T::Storage) + more_bytes);
#pragma unroll
  for (int slab = 0; slab < T::kWidth / 64; ++slab)
    tensor_load(tile + slab * T::kSlabBytes, map, barrier, slab * 64, row, head, batch);
}

// Of an operand that is summed over its columns: columns 16 i .., in the descriptor's units.
template <class T>
DEVICE constexpr int columns_at(int i) {
  return (i / 4 * T::kSlabBytes + i % 4 * 32) >> 4;
}
// Of one that is summed over its rows: rows 16 i ...
DEVICE constexpr int rows_at(int i) { return i * (16 * 128 >> 4); }

// Through a shuffle: else the compiler keeps sums of addresses in registers.
DEVICE unsigned hidden(unsigned operand) { return __shfl_sync(~0u, operand, 0); }
// By a reduction, after which the compiler knows that a warp's threads agree. What follows from
// this, addresses of operands first of all, is in uniform registers then.
DEVICE int uniform(int x) { return __reduce_or_sync(~0u, x); }
DEVICE int warpgroup() { return uniform(threadIdx.x / 128); }

// Products of operands that are sums of kParts, which lie side by side: high, then low. The small
// ones first: low x high, high x low, high x high.
DEVICE constexpr int first_term(int parts) { return parts == 2 ? 0 : 2; }

// Start c = a b^T, of tiles at these addresses, summed over kDepth columns.
// kRightFirst: high x low before low x high, so that b a^T has the same bits.
template <class A, class B, int kDepth, int kParts = 1, bool kRightFirst = false, int kN>
DEVICE void multiply_transposed(float (&c)[kN][4], unsigned a_tile, unsigned b_tile) {
  const unsigned a = hidden(operand(a_tile)), b = hidden(operand(b_tile));
  constexpr int kLow = 4 * slabs(kDepth);  // the low part's first 16 columns
  wgmma_fence();
#pragma unroll
  for (int term = first_term(kParts); term < 3; ++term)
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i)
      wgmma<false>(c, a + columns_at<A>(i + (term == kRightFirst) * kLow),
                   b + columns_at<B>(i + (term == !kRightFirst) * kLow),
                   term > first_term(kParts) || i > 0);
  wgmma_commit();
}
// Start c += a b, or c = a b, of what is in registers and a tile, summed over the tile's rows; of a
// only the steps kFrom .. of 16 rows.
template <class B, int kFrom, int kTo, int kParts, int kSteps, int kN>
DEVICE void multiply_steps(float (&c)[kN][4], const unsigned (&a)[kParts][kSteps][4],
                           unsigned b_tile, bool adds) {
  const unsigned b = operand(b_tile, B::kSlabBytes);
  constexpr int kLow = B::kWidth / 64 / kParts * B::kSlabBytes >> 4;
  wgmma_fence();
#pragma unroll
  for (int term = first_term(kParts); term < 3; ++term)
#pragma unroll
    for (int i = kFrom; i < kTo; ++i)
      wgmma<true>(c, a[kParts - 1 & term == 0][i], b + (term == 1) * kLow + rows_at(i),
                  term > first_term(kParts) || i > kFrom || adds);
  wgmma_commit();
}
template <class B, int kParts, int kSteps, int kN>
DEVICE void multiply(float (&c)[kN][4], const unsigned (&a)[kParts][kSteps][4], unsigned b_tile,
                     bool adds) {
  multiply_steps<B, 0, kSteps>(c, a, b_tile, adds);
}

// Accumulators, rounded, as the left operand of a product that is summed over their columns: for
// columns 16 i .., and for all.
template <int kN>
DEVICE void round_to_operand(unsigned (&operand)[4], const float (&c)[kN][4], int i) {
#pragma unroll
  for (int r = 0; r < 4; ++r)
    operand[r] = pack<ELEMENT>(c[2 * i + r / 2][r % 2 * 2], c[2 * i + r / 2][r % 2 * 2 + 1]);
}
template <int kN>
DEVICE void round_to_operands(unsigned (&operands)[kN / 2][4], const float (&c)[kN][4]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) round_to_operand(operands[i], c, i);
}

// Where a lane stores such an operand with store_matrices_transposed: its columns become rows of
// the tile, from 0 on, and the 64 rows of a warpgroup the columns from group `g` of eight on.
template <class T>
DEVICE unsigned transposed_origin(unsigned tile, int g) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return T::address(tile, lane / 16 * 8 + lane % 8, g + 2 * warp + lane / 8 % 2);
}

// Where a lane stores it with store_matrices: rows and columns are those of the tile.
template <class T>
DEVICE unsigned stored_origin(unsigned tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return T::address(tile, warp * 16 + lane % 16, lane / 16);
}

// Columns 16 i .. of accumulators, each of a thread's two rows times a factor, as columns 16 j ..
// of the tile.
template <class T, int kN>
DEVICE void store_columns(unsigned origin, int j, const float (&c)[kN][4], int i,
                          const float (&factor)[2]) {
  unsigned words[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float (&x)[4] = c[2 * i + r / 2];
    words[r] = pack<ELEMENT>(x[r % 2 * 2] * factor[r % 2], x[r % 2 * 2 + 1] * factor[r % 2]);
  }
  store_matrices(T::part(origin, 0, j), words);
}

// One of a thread's two rows of accumulators, times a factor, as row `row` of an array that has so
// many rows and columns. (These are a launch's parameters, and take no registers as references.)
template <bool kVector, int kN>
DEVICE void store_row(const Slice& to, const float (&c)[kN][4], int r, float factor, int row,
                      const int& rows, const int& width) {
#pragma unroll
  for (int n = 0; n < kN; n += 4) {
    // A thread of a quad has two columns of each of four groups of eight: all of one it needs.
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack<ELEMENT>(c[n + i][2 * r] * factor, c[n + i][2 * r + 1] * factor);
    transpose_in_quad(words);
    const int column = (n + threadIdx.x % 4) * 8;
    if (row < rows && column < width)
      store_group<kVector>(to, row, column, width,
                           make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// --- tiles of queries that stream past a block of a backward kernel

constexpr int kStages = 2;  // buffers

// In shared memory: buffers for tiles of q (or dout), for numbers of each row, and their barriers.
// Tiles are numbered through the block's life.
template <class T, int kNumbers = 1>
struct Ring {
  using Tile = T;
  typename T::Storage tiles[kStages];
  __align__(16) float numbers[kStages][kNumbers][T::kRows];  // the first: lse in base 2 (or delta)
  unsigned long long full[kStages], empty[kStages];

  DEVICE void init(int warps) {  // so many release a tile
    for (int i = 0; i < kStages; ++i)
      barrier_init(shared_address(&full[i]), 1), barrier_init(shared_address(&empty[i]), warps);
  }
  // By one thread: tile i, of queries q0 .., when its buffer is free.
  template <class... Numbers>
  DEVICE void copy(int i, const TensorMap& map, const Params& p, int q0, int head, int batch,
                   const Numbers*... all_numbers) {
    static_assert(sizeof...(all_numbers) == kNumbers, "one array for each number");
    const int stage = i % kStages;
    const long long row = first_row(p, batch, head, T::kRows) + q0;
    const unsigned barrier = shared_address(&full[stage]);
    barrier_wait(shared_address(&empty[stage]), i / kStages % 2 ^ 1);
    load<T>(shared_address(&tiles[stage]), map, barrier, q0, head, batch, sizeof(numbers[0]));
    int n = 0;
    (bulk_load(shared_address(&numbers[stage][n++]), static_cast<const float*>(all_numbers) + row,
               barrier, sizeof(numbers[0][0])),
     ...);
  }
  DEVICE void wait(int i) const {
    barrier_wait(shared_address(&full[i % kStages]), i / kStages % 2);
  }
  // By each warp, when the numbers have been used: an arrival may overtake loads under way.
  DEVICE void release(int i) const { ::release(shared_address(&empty[i % kStages])); }
  DEVICE unsigned tile(int i) const { return shared_address(&tiles[i % kStages]); }
  // Of a fragment's columns 8 n .., which are queries here, the numbers of this thread's two.
  DEVICE float2 pair(int i, int n, int which = 0) const {
    return *reinterpret_cast<const float2*>(numbers[i % kStages][which] + 8 * n +
                                            fragment_column());
  }
};
