// Products of doubles on Hopper's tensor cores (mma.sync), of boxes that tensor copies write.
//
// A box is 16 columns of so many rows, 128 bytes a row; its groups of 16 bytes are permuted by the
// row's number (128-byte swizzle). As it lies it is the right operand of both kinds of product: of
// one whose summed index runs along its rows (Q and K for scores), and of one where it counts rows
// (V). A lane (y, x) of a warp reads 16 bytes at a time, which are of two steps, or of two columns,
// and any eight lanes that read at once meet in no bank, if row y of an mma is row spread(y) of
// eight in the box:
//   along  row spread(y), columns 8 h + 2 x ..     y, y + 1: rows 4 apart, other halves of 128
//   bytes down   row spread(2 x + e), columns 2 y ..     rows 2 apart for x, x + 1
// The left operand of a product of scores stays in shared memory, and is laid anew once, as an mma
// takes it: in pairs of one column of two rows, own_row(0) and own_row(1).
// An accumulator of scores has for e = 0, 1 column spread(2 x + e) of eight in lane x: in pairs of
// rows it is, as it lies, the left operand of a product that is summed over these columns.
#pragma once
#include "exponential.cuh"
#include "ring.cuh"

DEVICE int lane_x() { return threadIdx.x % 4; }
DEVICE int lane_y() { return threadIdx.x % 32 / 4; }
DEVICE constexpr int spread(int y) { return y ^ (y & 1) << 2; }
// Which of 16 rows row y or y + 8 of an mma is.
DEVICE int own_row(int r) { return 8 * r + spread(lane_y()); }

constexpr int kBoxColumns = 16, kRowBytes = 128, kEightRows = 8 * kRowBytes;
// Of K and Q, and of V, those of a block; blocks of a cluster divide columns among them.
constexpr int kHeadBoxes = HEAD_DIM / kBoxColumns, kValueBoxes = VALUE_DIM / kBoxColumns;
// Where such a box begins, of so many.
DEVICE int column_of(int box, int boxes) { return (cluster_rank() * boxes + box) * kBoxColumns; }
constexpr int kSlotBytes = 16384;  // of 8 KiB, kernels were up to 10 % slower

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
constexpr int kOtherHalf = 64;
DEVICE unsigned down(int e) { return group_at(spread(2 * lane_x() + e), lane_y()); }

// The numbers of two columns of rows i and i + 8 of each 16 become a pair of each column: the first
// column's lies where those of row i did, the other's where those of row i + 8 four groups away
// did. So pairs of 8 neighbouring columns lie in different banks. By all threads.
template <int kBytes>
DEVICE void pair_rows(char (&boxes)[kBytes]) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kBytes / 64; i += 32 * WARPS) {
    char* const first = boxes + i / 32 * (2 * kEightRows) + i / 4 % 8 * kRowBytes + i % 4 * 16;
    auto at = [&](int row, int group) -> Pair& {
      return *reinterpret_cast<Pair*>(first + row * kEightRows + group * kOtherHalf);
    };
    const Pair rows[2][2] = {{at(0, 0), at(0, 1)}, {at(1, 0), at(1, 1)}};
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      at(0, g) = {{rows[0][g].x[0], rows[1][g].x[0]}};
      at(1, 1 - g) = {{rows[0][g].x[1], rows[1][g].x[1]}};
    }
  }
}

// 16 rows and 8 kTiles columns: of each eight columns a lane has two, in two rows.
template <int kTiles>
using Sums = double[kTiles][4];
// As a left operand.
template <int kTiles>
using Factors = Pair[kTiles][2];

// c += a b over 4 steps, and over 8: 3 % faster.
DEVICE void mma(double (&c)[4], const Pair& a, double b) { mma(c[0], c[1], c[2], c[3], a.x, b); }
DEVICE void mma(double (&c)[4], const Pair (&a)[2], const Pair& b) {
  mma(c[0], c[1], c[2], c[3], {a[0].x[0], a[0].x[1], a[1].x[0], a[1].x[1]}, b.x);
}

// c += a b^T over the 16 columns of two boxes, of 16 rows in pairs and of 8 kTiles: addresses with
// along().
template <int kTiles>
DEVICE void multiply_along(Sums<kTiles>& c, unsigned a, unsigned b) {
#pragma unroll
  for (int half = 0; half < 2; ++half, a ^= kOtherHalf, b ^= kOtherHalf) {
    const Pair left[2] = {load_pair(a), load_pair((a ^ kOtherHalf) + kEightRows)};
    Pair right[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) right[t] = load_pair(b + t * kEightRows);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) mma(c[t], left, right[t]);
  }
}

// c += a b: b, 8 kSteps rows of kBoxes boxes, `box` bytes apart. Of each box c has 16 columns, four
// of them in a lane: 4 x + 2 i + e in c[2 box + e], i = 0, 1.
template <int kBoxes, int kSteps>
DEVICE void multiply_down(Sums<2 * kBoxes>& c, const Factors<kSteps>& a, unsigned b, int box,
                          const unsigned (&down)[2]) {
#pragma unroll
  for (int t = 0; t < kSteps; ++t)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int n = 0; n < kBoxes; ++n) {
        const Pair right = load_pair(b + n * box + t * kEightRows + down[e]);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma(c[2 * n + i], a[t][e], right.x[i]);
      }
}

// The ring of slots. All warps use all slots, in order, and by turns fill the one that is so many
// slots from there: with a warp that only copies, the others could have 168 registers.
struct SlotRing {
  unsigned slots, full, empty;  // memory and barriers, of each slot
  Turn<STAGES> turn;

  DEVICE void init() const {  // by one thread
    for (int i = 0; i < STAGES; ++i)
      barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, WARPS);
  }
  // What copy(memory, barrier) brings into a slot, when it is free.
  template <class Copy>
  DEVICE void fill(Turn<STAGES> to, Copy copy) const {
    barrier_wait(empty + 8 * to.stage, to.round ^ 1);
    barrier_expect(full + 8 * to.stage, kSlotBytes);
    copy(slots + to.stage * kSlotBytes, full + 8 * to.stage);
  }
  template <class Products>
  DEVICE void use(Products products) {
    barrier_wait(full + 8 * turn.stage, turn.round);
    products(slots + turn.stage * kSlotBytes);
    release(empty + 8 * turn.stage, true);
    turn.next();
  }
};

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
DEVICE void sync_blocks() { cluster_sync(); }
#else
#define OF_CLUSTER
DEVICE void sync_blocks() { __syncthreads(); }
#endif

// What blocks of a cluster tell each other of scores, of each of which they have a part: the
// numbers of a warp in so many rounds.
template <int kTiles, int kRounds, int kBlocks = CLUSTER>
struct Told {
  // Numbers of a lane that a block adds up.
  static constexpr int kShares = 4 * kTiles / (kRounds * kBlocks);
  double x[2][kBlocks - 1][kShares][32];  // parts, and sums, of each other block
  unsigned long long full[2];             // barriers of these

  DEVICE void init() const {  // by one thread
    for (const auto& barrier : full) barrier_init(shared_address(&barrier), 1);
  }
};
template <int kTiles, int kRounds>
struct Told<kTiles, kRounds, 1> {
  DEVICE void init() const {}
};

// The sum of what a warp has and the same warps of the other blocks have: of each two blocks, then
// of these, so the same bits in all. A block adds up as large a share as the others. Each step
// waits for the one before in all blocks: with products between them that takes no time.
template <int kTiles, int kRounds, int kBlocks = CLUSTER>
struct SumOfBlocks {
  static constexpr int kShares = Told<kTiles, kRounds>::kShares;
  const Told<kTiles, kRounds>& told;
  double own[kShares];
  unsigned phase = 0;

  DEVICE SumOfBlocks(const Told<kTiles, kRounds>& told) : told(told) {}
  DEVICE void tell(Sums<kTiles>& c, int round) {
    if (threadIdx.x % 32 == 0)
      for (int n = 0; n < 2; ++n) barrier_expect(shared_address(&told.full[n]), sizeof(told.x[n]));
    __syncwarp();
    each([&](int block, bool this_one, int i) {
      if (this_one)
        own[i] = number(c, round, block, i);
      else
        send(0, block, i, number(c, round, block, i));
    });
  }
  DEVICE void add_up() {
    barrier_wait_cluster(shared_address(&told.full[0]), phase);
    double sum[kShares], two[kShares];
    each([&](int block, bool this_one, int i) {
      const double part = this_one ? own[i] : received(0, block, i);
      two[i] = block % 2 == 0 ? part : two[i] + part;
      if (block % 2 == 1) sum[i] = block == 1 ? two[i] : sum[i] + two[i];
    });
    each([&](int block, bool this_one, int i) {
      if (!this_one) send(1, block, i, sum[i]);
    });
#pragma unroll
    for (int i = 0; i < kShares; ++i) own[i] = sum[i];
  }
  DEVICE void hear(Sums<kTiles>& c, int round) {
    barrier_wait_cluster(shared_address(&told.full[1]), phase);
    phase ^= 1;
    each([&](int block, bool this_one, int i) {
      number(c, round, block, i) = this_one ? own[i] : received(1, block, i);
    });
  }

 private:
  template <class Use>
  static DEVICE void each(Use use) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kShares; ++i) use(block, block == cluster_rank(), i);
  }
  static DEVICE double& number(Sums<kTiles>& c, int round, int block, int i) {
    const int n = kRounds * (block * kShares + i) + round;
    return c[n / 4][n % 4];
  }
  // Where block `to` keeps what block `from` tells it.
  DEVICE unsigned place(int n, int from, int to, int i) const {
    return shared_address(&told.x[n][from - (from > to)][i][threadIdx.x % 32]);
  }
  DEVICE void send(int n, int block, int i, double x) const {
    store_in_block(in_block(place(n, cluster_rank(), block, i), block), x,
                   in_block(shared_address(&told.full[n]), block));
  }
  DEVICE double received(int n, int block, int i) const {
    return load_shared_double(place(n, block, cluster_rank(), i));
  }
};
template <int kTiles, int kRounds>
struct SumOfBlocks<kTiles, kRounds, 1> {
  DEVICE SumOfBlocks(const Told<kTiles, kRounds>&) {}
  DEVICE void tell(Sums<kTiles>&, int) {}
  DEVICE void add_up() {}
  DEVICE void hear(Sums<kTiles>&, int) {}
};

// c = own theirs^T: kBoxes boxes of both, kSlotBoxes of theirs in a slot, which use(slot, products)
// brings. Scores are summed over so many columns, and these sums added up: with one sum over more
// than 128 columns a case was off by 2.3 times as much as the plain formula. And first over
// kGroup boxes, which are those of a block of a cluster backward: in another order than lse's
// scores made dv 5 times as far off as the formula's.
template <int kBoxes, int kGroup, int kSlotBoxes, int kTiles, class Use>
DEVICE void multiply_scores(Sums<kTiles>& c, unsigned own, int own_box, int their_box, Use use) {
  constexpr int kPiece = kBoxes > 8 ? 4 : kBoxes;
  static_assert(kBoxes % kPiece == 0 && kPiece % kSlotBoxes == 0, "whole slots");
  auto sum_pieces = [&](Sums<kTiles>& sum, int box, int end) {
    clear(sum);
#pragma unroll 1
    while (box < end) {
      Sums<kTiles> piece;
      clear(piece);
#pragma unroll 1
      for (int i = 0; i < kPiece; i += kSlotBoxes, box += kSlotBoxes)
        use(box / kSlotBoxes, [&](unsigned theirs) {
#pragma unroll
          for (int n = 0; n < kSlotBoxes; ++n)
            multiply_along(piece, own + (box + n) * own_box, theirs + n * their_box);
        });
      add(sum, piece);
    }
  };
  sum_pieces(c, 0, min(kGroup, kBoxes));
  if constexpr (kBoxes > kGroup) {
    static_assert(kBoxes <= 2 * kGroup && kGroup % kPiece == 0, "two groups");
    Sums<kTiles> second;
    sum_pieces(second, kGroup, kBoxes);
    add(c, second);
  }
}

// result += factors theirs: kSlots slots of kBoxes boxes, kTogether at a time. Each product begins
// with 0: as one sum over 4,096 keys P V was off by 4 times as much as the plain formula
// (docs/kernels.md).
template <int kSlots, int kBoxes, int kTogether, int kTiles, int kSteps, class Use>
DEVICE void add_products(Sums<kTiles>& result, const Factors<kSteps>& factors,
                         const unsigned (&down)[2], Use use) {
  static_assert(kTiles == 2 * kSlots * kBoxes && kBoxes % kTogether == 0, "whole products");
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot)
    use(slot, [&](unsigned theirs) {
#pragma unroll
      for (int box = 0; box < kBoxes; box += kTogether) {
        Sums<2 * kTogether> product;
        clear(product);
        multiply_down<kTogether>(product, factors, theirs + box * (kSteps * kEightRows),
                                 kSteps * kEightRows, down);
        add(result, product, 2 * (slot * kBoxes + box));
      }
    });
}

// to = c factor: a warp's 16 rows, of which it has the columns from column0 on.
template <int kTiles, class RowOf>
DEVICE void store(const Head<double>& to, const Sums<kTiles>& c, const double (&factor)[2],
                  int column0, RowOf row_of, int rows, int width) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = column0 + t / 2 * kBoxColumns + 4 * lane_x() + 2 * e + t % 2;
        if (row_of(r) < rows && column < width)
          to.at(row_of(r), column) = c[t][2 * r + e] * factor[r];
      }
}
