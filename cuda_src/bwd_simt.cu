// Backward for float32 and float64 on CUDA cores, at those dtypes' accuracy.
//
//   row_delta  a warp per row: delta = rowsum(dO * O) - dlse
//   bwd_simt   a block per tile of rows; the others stream past.
//              KEYS 1: rows are keys, the result dK and dV, for each key/value head
//              KEYS 0: rows are queries, the result dQ, for each head
// No atomics, results repeat bit for bit.
// Options: as fwd_simt.cu; KEYS; PARTS: dK (1), dV (2), for KEYS 0: 1.
// Source: Dao 2023, arXiv:2307.08691, algorithm 2.
#include "delta.cuh"
#include "simt.cuh"

// dV alone has no use for the block's own values.
constexpr int kMine = kHead + (PARTS & 1 ? kValue : 0);
constexpr int kStats = KEYS ? STREAMED : kRows;  // queries that a tile of scores has
struct Memory : Shared<kMine> {
  Real stats[2][kStats];  // lse and delta
};
static_assert(sizeof(Memory) == SHARED_BYTES, "shared memory here and in cuda_backend.py differ");

extern "C" __global__ void row_delta(const Params p) {
  write_delta<Real, Real>(p, [](Real x) { return x; }, [](long long, long long) {});
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_simt(const Params p) {
  extern __shared__ __align__(16) char memory[];
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  // Rows of this block's tile, and of what streams past.
  const int rows = KEYS ? p.sk : p.sq, others = KEYS ? p.sq : p.sk;
  const int heads = KEYS ? p.heads / p.group : p.heads;
  const int tiles = (rows + kRows - 1) / kRows;
  // Of all heads the first keys or the last queries first: under a causal mask they take longest.
  const int tile = blockIdx.x / (heads * p.batch);
  const int row0 = (KEYS ? tile : tiles - 1 - tile) * kRows;
  const int head = blockIdx.x % heads, batch = blockIdx.x / heads % p.batch;
  const int lo_shift = KEYS ? 1 - p.hi_shift : p.lo_shift,
            hi_shift = KEYS ? 1 - p.lo_shift : p.hi_shift;
  const Bounds first = k_bounds(row0, others, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(row0 + kRows, rows) - 1, others, lo_shift, hi_shift);
  const Matrix mine(KEYS ? p.k : p.q, batch, head), mine_value(KEYS ? p.v : p.dout, batch, head);

  const Score score(p);

  // dK or dQ; and dV.
  Out wide[PARTS & 1 ? kHead : 1], value[PARTS & 2 ? kValue : 1];
  for (auto& part : wide) clear(part);
  for (auto& part : value) clear(part);

  // The tiles that stream past: of one query head after the other, where several share a key/value
  // head.
  struct Place {
    int head, row0;
  };
  const int partners = KEYS ? p.group : 1;
  const Place start = {KEYS ? head * partners : head / p.group, first.lo / STREAMED * STREAMED};
  const int end =
      start.row0 < last.hi ? start.head + partners : start.head;  // none where it sees none

  int turn = 0;  // the buffer of the slice that is worked on; the next one goes to the other
  // Slice n of Q or K (wide), or of dO or V. `turned`: for a product with the block's own rows, of
  // which the slice comes along if they do not stay.
  const auto fetch_slice = [&](int buffer, Place at, int n, bool turned, bool is_wide) {
    const Array& of = is_wide ? KEYS ? p.q : p.k : KEYS ? p.dout : p.v;
    const Matrix theirs(of, batch, at.head);
    const int width = is_wide ? p.d : p.v_width;
    if (!WHOLE && turned)
      fetch_turned<kRows>(shared.mine[buffer], is_wide ? mine : mine_value, row0, rows, n, width);
    if (turned)
      fetch_turned<STREAMED>(shared.theirs[buffer].turned, theirs, at.row0, others, n, width);
    else
      fetch(shared.theirs[buffer].straight, theirs, at.row0, others, n, width);
    copies_commit();
  };
  const auto fetch_wide = [&](int buffer, Place at, int n, bool turned) {
    fetch_slice(buffer, at, n, turned, true);
  };
  const auto fetch_value = [&](int buffer, Place at, int n, bool turned) {
    fetch_slice(buffer, at, n, turned, false);
  };
  const auto fetch_stats = [&](int query0, int query_head) {
    const long long row = first_row(p, batch, query_head) + query0;
    for (int i = threadIdx.x; i < kStats; i += kThreads) {
      const bool inside = query0 + i < p.sq;
      copy_one(shared_address(&shared.stats[0][i]), static_cast<const Real*>(p.lse) + row + i,
               inside);
      copy_one(shared_address(&shared.stats[1][i]), static_cast<const Real*>(p.delta) + row + i,
               inside);
    }
  };
  const auto fetch_tile = [&](int buffer, Place at) {
    if (KEYS) fetch_stats(at.row0, at.head);
    fetch_wide(buffer, at, 0, true);
  };

  if (WHOLE) {
    for (int n = 0; n < kHead; ++n) fetch_turned<kRows>(shared.mine[n], mine, row0, rows, n, p.d);
    for (int n = kHead; n < kMine; ++n)
      fetch_turned<kRows>(shared.mine[n], mine_value, row0, rows, n - kHead, p.v_width);
  }
  if (!KEYS) fetch_stats(row0, head);
  if (start.head < end) fetch_tile(turn, start);
  for (Place at = start, next; at.head < end; at = next) {
    next = {at.head, at.row0 + STREAMED};
    if (next.row0 >= last.hi) next = {at.head + 1, start.row0};
    const auto fetch_next = [&](int buffer) {
      if (next.head < end) fetch_tile(buffer, next);
    };
    // Sets to 0 what does not see each other.
    const auto hide = [&](Scores& c) {
      if (at.row0 >= last.lo && at.row0 + STREAMED <= first.hi) return;  // all do
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const Bounds seen = k_bounds(row0 + row_of(i), others, lo_shift, hi_shift);
#pragma unroll
        for (int j = 0; j < kS; ++j) {
          const int column = at.row0 + column_of(j);
          if (column < seen.lo || column >= seen.hi) c[i][j] = 0;
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
        fetch_wide(turn ^ 1, at, n + 1, true);
      else
        fetch_value(turn ^ 1, at, 0, PARTS == 1);
      accumulate(s, shared.mine[WHOLE ? n : turn], shared.theirs[turn].turned,
                 min(p.d - n * SLICE, SLICE));
    }
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kS; ++j) {
        const Real x = score(s[i][j]), lse = shared.stats[0][KEYS ? column_of(j) : row_of(i)];
        // A row whose every score is -inf has no gradient: -inf + inf is NaN.
        s[i][j] = Exponential(1)(x - (lse == -kInfinity ? kInfinity : lse));
        slope[i][j] = score.slope(x);
      }
    hide(s);

    if (PARTS & 2) {
      put(shared.p, s);
#pragma unroll
      for (int n = 0; n < kValue; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kValue)
          fetch_value(turn ^ 1, at, n + 1, false);
        else if (PARTS & 1)
          fetch_value(turn ^ 1, at, 0, true);
        else
          fetch_next(turn ^ 1);
        accumulate(value[n], shared.p, shared.theirs[turn].straight, STREAMED);
      }
    }
    if (PARTS & 1) {
      // dP, then dS = P (dP - delta), times the softcap's slope.
      Scores ds;
      clear(ds);
#pragma unroll 1
      for (int n = 0; n < kValue; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kValue)
          fetch_value(turn ^ 1, at, n + 1, true);
        else
          fetch_wide(turn ^ 1, at, 0, false);
        accumulate(ds, shared.mine[WHOLE ? kHead + n : turn], shared.theirs[turn].turned,
                   min(p.v_width - n * SLICE, SLICE));
      }
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int j = 0; j < kS; ++j) {
          const Real delta = shared.stats[1][KEYS ? column_of(j) : row_of(i)];
          ds[i][j] = s[i][j] * (ds[i][j] - delta) * slope[i][j];
        }
      hide(ds);
      put(shared.p, ds);
#pragma unroll
      for (int n = 0; n < kHead; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kHead)
          fetch_wide(turn ^ 1, at, n + 1, false);
        else
          fetch_next(turn ^ 1);
        accumulate(wide[n], shared.p, shared.theirs[turn].straight, STREAMED);
      }
    }
  }

  Real scale[kM], one[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) scale[i] = score.scale, one[i] = 1;
  if (PARTS & 1) store(Matrix(KEYS ? p.dk : p.dq, batch, head), wide, scale, row0, rows, p.d);
  if (PARTS & 2) store(Matrix(p.dv, batch, head), value, one, row0, rows, p.v_width);
}
