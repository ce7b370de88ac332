// Backward for float32 and float64 on CUDA cores, and float64 on tensor cores, at those dtypes'
// accuracy.
//
//   row_delta  delta = rowsum(dO * O) - dlse, and dQ = 0
//   bwd_simt   a block per tile of keys of a key/value head, and CHUNK columns of the result. dK
//              and dV stay in registers, queries stream past, and what they get from these keys is
//              added to dQ in memory
//
// All blocks of a head add to the same dQ. They take turns, in the order of their keys, so that
// results repeat bit for bit: a turn is a tile of queries, and a counter for each turn and warp
// (the same warp has the same part of dQ in every block; chunks of dK have their own columns, and
// their own counters) says how many blocks have added. A block
// waits only for blocks with smaller indices; GPUs start blocks in the order of their indices,
// though CUDA does not promise it, so those have started.
// Options: as fwd_simt.cu; PARTS: dK and dQ (1), dV (2).
// Source: Dao 2023, arXiv:2307.08691, algorithm 2.
#include "backward.cuh"
#include "simt.cuh"

// dV alone has no use for the block's own values.
constexpr int kMine = kHead + (PARTS & 1 ? kValue : 0);
constexpr int kKeptK = kept(kHead), kKeptV = kept(kValue);
constexpr int kChunks = chunks(PARTS & 1 ? kHead : kValue);
static_assert(kChunks == 1 || (PARTS != 3 && !WHOLE), "all of dK and dV, or parts of one");
struct Memory : Shared<kMine, STREAMED> {
  Real stats[2][STREAMED];  // lse and delta
};
static_assert(sizeof(Memory) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

// dQ of a slice, or of all that the block keeps: the grid of warps, and a thread's queries and
// columns. On tensor cores the larger part of a warp saves reads from shared memory.
constexpr int kQueryWarps = kWide && WARPS > 2 ? 4 : (WARPS > 1 ? 2 : 1);
constexpr int kColumnWarps = WARPS / kQueryWarps;
constexpr int kQueries = STREAMED / (kLanesY * kQueryWarps);
constexpr int kDqSlices = MMA && WHOLE && kColumnWarps % kHead == 0 ? kHead : 1;
constexpr int kColumns = kDqSlices * SLICE / (kLanesX * kColumnWarps);
static_assert(kQueries > 0 && kColumns > 0, "no grid of warps divides dQ");
static_assert(!MMA || (kQueries % 2 == 0 && kColumns % 2 == 0), "whole mma");
DEVICE int dq_first_query() { return threadIdx.x / 32 % kQueryWarps * kLanesY * kQueries; }
DEVICE int dq_first_column() { return threadIdx.x / 32 / kQueryWarps * kLanesX * kColumns; }

// Of eight rows of `keys`, the one that is column m of the mma: rows that are read at once start in
// different banks, and one number each of lanes that share queries makes 32 bytes of dQ.
DEVICE int mma_row(int m) { return m / 4 * 4 + m % 2 * 2 + m % 4 / 2; }

DEVICE int dq_query_of(int i) { return slot(dq_first_query() + kLanesY * i + lane_y()); }
DEVICE int dq_column_of(int j) {
  return dq_first_column() +
         (MMA ? j / 2 * 8 + column_of_row(mma_row(2 * lane_x() + j % 2)) : 8 * j + lane_x());
}

// dq += ds^T keys: sums over all keys of the block, which both have in rows. On CUDA cores they are
// read in vectors, and columns are taken there and back, as in accumulate(). In tiles of 64 keys,
// unrolled steps would spill registers.
DEVICE void accumulate_dq(Real (&dq)[kQueries][kColumns], const Real (&ds)[STREAMED][pitch(kRows)],
                          const Turned<kRows>& keys) {
#if MMA
#pragma unroll 1
  for (int k = lane_x(); k < kRows; k += 16) {
    Real a[kQueries / 2][8], b[4];
#pragma unroll
    for (int i = 0; i < kQueries; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        a[i / 2][2 * e + i % 2] = ds[dq_first_query() + kLanesY * i + lane_y()][k + 4 * e];
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        b[e] = keys[dq_first_column() % SLICE + 4 * j + mma_row(lane_y())][k + 4 * e];
#pragma unroll
      for (int i = 0; i < kQueries; i += 2)
        mma(dq[i][j], dq[i][j + 1], dq[i + 1][j], dq[i + 1][j + 1], a[i / 2], b);
    }
  }
#else
#pragma unroll kRows < 128 ? 1 : 4
  for (int k = 0; k < kRows; k += kVector) {
    Group a[kQueries], b[kColumns];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) a[i] = group(ds[dq_query_of(i)][k]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) b[j] = group(keys[dq_column_of(j)][k]);
#pragma unroll
    for (int e = 0; e < kVector; ++e)
#pragma unroll
      for (int i = 0; i < kQueries; ++i)
#pragma unroll
        for (int m = 0; m < kColumns; ++m) {
          const int j = i % 2 ? kColumns - 1 - m : m;
          dq[i][j] += a[i].x[e] * b[j].x[e];
        }
  }
#endif
}

extern "C" __global__ void row_delta(const Params p) { write_delta_and_zeros<Real>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_simt(const Params p) {
  extern __shared__ __align__(16) char memory[];
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  const int heads = p.heads / p.group;
  // Of all heads the first keys first: under a causal mask they take longest.
  const int index = blockIdx.x / (heads * p.batch), tile = index / kChunks, k0 = tile * kRows;
  const int chunk = index % kChunks, slice0 = chunk * (PARTS & 1 ? kKeptK : kKeptV);
  const int head = blockIdx.x % heads, batch = blockIdx.x / heads % p.batch;
  // Queries that see any of these keys, and those that see all.
  const int lo_shift = 1 - p.hi_shift, hi_shift = 1 - p.lo_shift;
  const Bounds first = k_bounds(k0, p.sq, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(k0 + kRows, p.sk) - 1, p.sq, lo_shift, hi_shift);
  const Matrix k(p.k, batch, head), v(p.v, batch, head);
  const Score score(p);
  const Exponential exponential(1, shared.powers);
  write(shared.powers);

  Out dk[PARTS & 1 ? kKeptK : 1], dv[PARTS & 2 ? kKeptV : 1];
  // What so many tiles of queries add up to goes to memory: in double one sum over 4,096 queries
  // was off by 4 times as much as the plain formula. Read and added here, they were waited for one
  // by one: 15 % slower.
  constexpr bool kInPieces = sizeof(Real) == sizeof(double);
  constexpr int kTogether = 512 / STREAMED;
  int tiles = 0;
  bool more = false;
  const auto put_away = [&] {
    Real scale[kM], one[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) scale[i] = score.scale, one[i] = 1;
    if (PARTS & 1)
      store(Matrix(p.dk, batch, head), dk, scale, again(k0), p.sk, slice0, p.d, kInPieces && more);
    if (PARTS & 2)
      store(Matrix(p.dv, batch, head), dv, one, again(k0), p.sk, slice0, p.v_width,
            kInPieces && more);
    more = true;
  };
  const auto begin = [&] {
    for (auto& part : dk) clear(part);
    for (auto& part : dv) clear(part);
    tiles = 0;
  };
  begin();

  // The tiles that stream past: of one query head after the other, where several share a key/value
  // head. From the last to the first: under a causal mask blocks of a head begin with the same.
  struct Place {
    int head, q0;
  };
  const int lowest = first.lo / STREAMED * STREAMED;
  const Place start = {head * p.group, (last.hi - 1) / STREAMED * STREAMED};
  const int end = lowest < last.hi ? start.head + p.group : start.head;  // none if none sees any

  int turn = 0;  // the buffer of the slice that is worked on; the next one goes to the other
  // Slice n of Q or dO. `turned`: for a product with the block's own rows, of which the slice comes
  // along if they do not stay; so it does for dQ, beside the slice of Q for dK.
  const auto fetch_slice = [&](int buffer, Place at, int n, bool turned, bool is_q) {
    const Matrix theirs(is_q ? p.q : p.dout, batch, at.head);
    const int width = is_q ? p.d : p.v_width;
    if (!WHOLE && (turned || is_q))
      fetch_turned<kRows>(shared.mine[buffer], is_q ? k : v, k0, p.sk, n, width);
    if (turned)
      fetch_turned<STREAMED>(shared.theirs[buffer].turned, theirs, at.q0, p.sq, n, width);
    else
      fetch(shared.theirs[buffer].straight, theirs, at.q0, p.sq, n, width);
    copies_commit();
  };
  const auto fetch_q = [&](int buffer, Place at, int n, bool turned) {
    fetch_slice(buffer, at, n, turned, true);
  };
  const auto fetch_dout = [&](int buffer, Place at, int n, bool turned) {
    fetch_slice(buffer, at, n, turned, false);
  };
  const auto fetch_tile = [&](int buffer, Place at) {
    const long long row = first_row(p, batch, at.head) + at.q0;
    for (int i = threadIdx.x; i < STREAMED; i += kThreads) {
      const bool inside = at.q0 + i < p.sq;
      copy_one(shared_address(&shared.stats[0][i]), static_cast<const Real*>(p.lse) + row + i,
               inside);
      copy_one(shared_address(&shared.stats[1][i]), static_cast<const Real*>(p.delta) + row + i,
               inside);
    }
    fetch_q(buffer, at, 0, true);
  };

  // Of two warps that share a scheduler, one waits for its turn while the other multiplies.
  const bool waits_first = threadIdx.x / 128 % 2;
  WarpTurn dq_turn;
  const auto take_turn = [&](Place at) {
    const int part = dq_tile<STREAMED>(p, batch, at.head, at.q0) * kChunks + chunk;
    dq_turn.take(p, part * WARPS + static_cast<int>(threadIdx.x) / 32,
                 tile - k_bounds(at.q0, p.sk, p.lo_shift, p.hi_shift).lo / kRows);
  };

  if (WHOLE) {
    for (int n = 0; n < kHead; ++n) fetch_turned<kRows>(shared.mine[n], k, k0, p.sk, n, p.d);
    for (int n = kHead; n < kMine; ++n)
      fetch_turned<kRows>(shared.mine[n], v, k0, p.sk, n - kHead, p.v_width);
  }
  if (start.head < end) fetch_tile(turn, start);
  for (Place at = start, next; at.head < end; at = next) {
    if (kInPieces && tiles == kTogether) put_away(), begin();
    ++tiles;
    next = {at.head, at.q0 - STREAMED};
    if (next.q0 < lowest) next = {at.head + 1, start.q0};
    const auto fetch_next = [&](int buffer) {
      if (next.head < end) fetch_tile(buffer, next);
    };
    // Sets to 0 what does not see each other. Keys that do not exist must not reach dQ either: 0
    // times what they are may be NaN.
    const auto hide = [&](Scores& c) {
      if (at.q0 >= last.lo && at.q0 + STREAMED <= first.hi && k0 + kRows <= p.sk) return;
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const int key = k0 + row_of(i);
        const Bounds seen = k_bounds(key, key < p.sk ? p.sq : 0, lo_shift, hi_shift);
#pragma unroll
        for (int j = 0; j < kS; ++j) {
          const int query = at.q0 + column_of<kS>(j);
          if (query < seen.lo || query >= seen.hi) c[i][j] = 0;
        }
      }
    };

    // S, then P.
    Scores s, slope;
    clear(s);
#pragma unroll 1
    for (int n = 0; n < kHead; ++n, turn ^= 1) {
      arrived();
      if (n + 1 < kHead)
        fetch_q(turn ^ 1, at, n + 1, true);
      else
        fetch_dout(turn ^ 1, at, PARTS == 2 ? slice0 : 0, PARTS == 1);
      accumulate_scores(s, shared.mine[WHOLE ? n : turn], shared.theirs[turn].turned,
                        min(p.d - n * SLICE, SLICE));
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kS; ++j) {
        const Real x = score(s[i][j]), lse = shared.stats[0][column_of<kS>(j)];
        // A row whose every score is -inf has no gradient: -inf + inf is NaN.
        s[i][j] = exponential.of((x - (lse == -kInfinity ? kInfinity : lse)) * exponential.unit);
        slope[i][j] = score.slope(x);
      }
    hide(s);

    if (waits_first) dq_turn.pass(p);
    if (PARTS & 2) {
      if (!kScoresStay) put(shared.p, s);
#pragma unroll
      for (int n = 0; n < kKeptV; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kKeptV)
          fetch_dout(turn ^ 1, at, slice0 + n + 1, false);
        else if (PARTS & 1)
          fetch_dout(turn ^ 1, at, 0, true);
        else
          fetch_next(turn ^ 1);
        accumulate(dv[n], shared, s, shared.theirs[turn].straight);
      }
    }
    if (PARTS & 1) {
      if (!waits_first) dq_turn.pass(p);
      // dP, then dS = P (dP - delta), times the softcap's slope.
      Scores ds;
      clear(ds);
#pragma unroll 1
      for (int n = 0; n < kValue; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kValue)
          fetch_dout(turn ^ 1, at, n + 1, true);
        else
          fetch_q(turn ^ 1, at, slice0, false);
        accumulate_scores(ds, shared.mine[WHOLE ? kHead + n : turn], shared.theirs[turn].turned,
                          min(p.v_width - n * SLICE, SLICE));
      }
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int j = 0; j < kS; ++j) {
          const Real delta = shared.stats[1][column_of<kS>(j)];
          ds[i][j] = s[i][j] * (ds[i][j] - delta) * slope[i][j];
        }
      hide(ds);
      put(shared.p, ds);
#pragma unroll
      for (int n = 0; n < kKeptK; ++n, turn ^= 1) {
        turn = when_needed(turn);
        arrived();
        if (n + 1 < kKeptK)
          fetch_q(turn ^ 1, at, slice0 + n + 1, false);
        else
          fetch_next(turn ^ 1);
        accumulate(dk[n], shared, ds, shared.theirs[turn].straight);
        const int first_slice = n + 1 - kDqSlices;
        if (first_slice < 0) continue;
        if (first_slice == 0 && waits_first) take_turn(at);
        Real dq[kQueries][kColumns] = {};
        accumulate_dq(dq, shared.p,
                      shared.mine[WHOLE ? first_slice + dq_first_column() / SLICE : turn]);
        if (first_slice == 0 && !waits_first) take_turn(at);
        const Matrix sum(p.dq, batch, at.head);
#pragma unroll
        for (int i = 0; i < kQueries; ++i)
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int row = at.q0 + dq_query_of(i);
            const int column = when_needed(slice0 + first_slice) * SLICE + dq_column_of(j);
            add(&sum.at(row, column), dq[i][j] * score.scale, row < p.sq && column < p.d);
          }
      }
    }
  }
  dq_turn.pass(p);

  put_away();
}
