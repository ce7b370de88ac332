// Forward for float32 and float64 on CUDA cores, and float64 on tensor cores, at those dtypes'
// accuracy.
//
// Grid: one block per (query tile, CHUNK columns of out, head, batch entry), all on x. simt.cuh
// says how tiles are held. Options: REAL (float | double), HEAD_DIM, VALUE_DIM, SLICE, STREAMED,
// ROWS_PER_THREAD, WARPS, ACROSS, MMA, WHOLE, CHUNK, SOFTCAP, TRANSFORM (1: with a softcap, or a
// scale that is not positive), VECTOR (1: rows of 16-byte aligned groups; 0: any strides). Source:
// Dao 2023, arXiv:2307.08691, algorithm 1.
#include "simt.cuh"

constexpr int kKept = kept(kValue), kChunks = chunks(kValue);

struct Memory : Shared<kHead, kScoresStay ? 1 : STREAMED> {
  Real rows[ACROSS][kRows];  // what warps that share rows say about them
};
static_assert(sizeof(Memory) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

// x[i] of each row i becomes `both` of what the warps have that share rows.
template <class Both>
DEVICE void exchange(Real (&x)[kM], Real (&rows)[ACROSS][kRows], Both both) {
  if (ACROSS == 1) return;
  const int part = threadIdx.x / 32 % ACROSS;
#pragma unroll
  for (int i = 0; i < kM; ++i)
    if (lane_x() == 0) rows[part][row_of(i)] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int n = 1; n < ACROSS; ++n) x[i] = both(x[i], rows[(part + n) % ACROSS][row_of(i)]);
}

struct OnlineSoftmax {
  // The largest score, in units of the exponent, rounded once and for all: whatever is subtracted
  // from all scores of a row, fma rounds only what is left. Sum: of this thread's columns only.
  Real max[kM], sum[kM];

  // s becomes exponentials; o is rescaled.
  DEVICE void add(Scores& s, Out (&o)[kKept], Memory& shared, const Exponential& exponential) {
    Real tops[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      tops[i] = s[i][0];
#pragma unroll
      for (int j = 1; j < kS; ++j) tops[i] = larger(tops[i], s[i][j]);
      tops[i] = lanes_max(tops[i]);
    }
    exchange(tops, shared.rows, larger);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const Real top = larger(max[i], tops[i] * exponential.unit);
      // A row that has seen nothing: exp(-inf - 0) = 0, where -inf + inf would be NaN.
      const Real base = top == -kInfinity ? Real(0) : top;
      const Real rescale = exponential.of(max[i] - base);
      max[i] = top;
      Real block = 0;
#pragma unroll
      for (int j = 0; j < kS; ++j) {
        s[i][j] = exponential(s[i][j], base);
        block += s[i][j];
      }
      sum[i] = sum[i] * rescale + block;
      // Tensor cores wait for what is multiplied here, and maxima seldom rise.
      if (MMA && !__any_sync(~0u, rescale != 1)) continue;
#pragma unroll
      for (int n = 0; n < kKept; ++n)
#pragma unroll
        for (int j = 0; j < kO; ++j) o[n][i][j] *= rescale;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_simt(const Params p) {
  extern __shared__ __align__(16) char memory[];
  Memory& shared = *reinterpret_cast<Memory*>(memory);
  const int tiles = (p.sq + kRows - 1) / kRows;
  // Of all heads the last queries first: under a causal mask they take longest.
  const unsigned index = blockIdx.x / (p.heads * p.batch);
  const int q0 = (tiles - 1 - index / kChunks) * kRows;
  const int slice0 = index % kChunks * kKept;
  const int head = blockIdx.x % p.heads, batch = blockIdx.x / p.heads % p.batch;
  const Matrix q(p.q, batch, head), out(p.out, batch, head);
  const Matrix k(p.k, batch, head / p.group), v(p.v, batch, head / p.group);
  const Bounds first = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift);
  const Bounds last = k_bounds(min(q0 + kRows, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);

  // Products are scaled in the exponent, where that keeps their order.
  const Score score(p);
  const Real factor = TRANSFORM ? Real(1) : score.scale;
  const Exponential exponential(factor, shared.powers);
  write(shared.powers);
  OnlineSoftmax softmax;
  Out o[kKept];
#pragma unroll
  for (int i = 0; i < kM; ++i) softmax.max[i] = -kInfinity, softmax.sum[i] = 0;
#pragma unroll
  for (int n = 0; n < kKept; ++n) clear(o[n]);

  int turn = 0;  // the buffer of the slice that is worked on; the next one goes to the other
  const auto fetch_keys = [&](int buffer, int k0, int n) {
    if (!WHOLE) fetch_turned<kRows>(shared.mine[buffer], q, q0, p.sq, n, p.d);
    fetch_turned<STREAMED>(shared.theirs[buffer].turned, k, k0, p.sk, n, p.d);
    copies_commit();
  };
  const auto fetch_values = [&](int buffer, int k0, int n) {
    fetch(shared.theirs[buffer].straight, v, k0, p.sk, slice0 + n, p.v_width);
    copies_commit();
  };

  const int begin = first.lo / STREAMED * STREAMED;
  if (WHOLE)
    for (int n = 0; n < kHead; ++n) fetch_turned<kRows>(shared.mine[n], q, q0, p.sq, n, p.d);
  fetch_keys(turn, begin, 0);
  for (int k0 = begin; k0 < last.hi; k0 += STREAMED) {
    Scores s;
    clear(s);
#pragma unroll 1
    for (int n = 0; n < kHead; ++n, turn ^= 1) {
      arrived();
      if (n + 1 < kHead)
        fetch_keys(turn ^ 1, k0, n + 1);
      else
        fetch_values(turn ^ 1, k0, 0);
      const auto& mine = shared.mine[WHOLE ? n : turn];
      const auto& theirs = shared.theirs[turn].turned;
      const int columns = min(p.d - n * SLICE, SLICE);
      if constexpr (sizeof(Real) == sizeof(float)) {
        // One sum over 64 columns is off by twice as much as two sums over 32.
        constexpr int kHalf = SLICE / 2;
#pragma unroll(kHead == 2 ? 2 : 1)  // else up to 16 bytes are spilled
        for (int first = 0; first < SLICE; first += kHalf) {
          Scores part;
          clear(part);
          accumulate(part, mine + first, theirs + first, min(columns - first, kHalf));
          add(s, part);
        }
      } else {
        // Of wider heads there are no registers for what would be loaded ahead.
        accumulate_scores<kHead == 1>(s, mine, theirs, columns);
      }
    }
    if (TRANSFORM) {
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int j = 0; j < kS; ++j) s[i][j] = score(s[i][j]);
    }
    if (k0 < last.lo || k0 + STREAMED > first.hi) {  // not all of these rows see all of these keys
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const Bounds keys = k_bounds(q0 + row_of(i), p.sk, p.lo_shift, p.hi_shift);
#pragma unroll
        for (int j = 0; j < kS; ++j) {
          const int key = k0 + column_of<kS>(j);
          if (key < keys.lo || key >= keys.hi) s[i][j] = -kInfinity;
        }
      }
    }
    softmax.add(s, o, shared, exponential);
    if (!kScoresStay) put(shared.p, s);
#pragma unroll
    for (int n = 0; n < kKept; ++n, turn ^= 1) {
      arrived();
      if (n + 1 < kKept)
        fetch_values(turn ^ 1, k0, n + 1);
      else if (k0 + STREAMED < last.hi)
        fetch_keys(turn ^ 1, k0 + STREAMED, 0);
      if constexpr (sizeof(Real) == sizeof(float) || (MMA && kValue == 1)) {
        // P V of these keys, then the sum: as one sum over 65,536 keys it was off by up to 14 times
        // as much as a product of matrices. In wider doubles there are no registers for that.
        Out part;
        clear(part);
        accumulate(part, shared, s, shared.theirs[turn].straight);
        add(o[n], part);
      } else {
        accumulate(o[n], shared, s, shared.theirs[turn].straight);
      }
    }
  }
  copies_wait();  // of a block that had nothing to do

  Real totals[kM], inverse[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) totals[i] = lanes_sum(softmax.sum[i]);
  exchange(totals, shared.rows, [](Real x, Real y) { return x + y; });
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const Real total = totals[i];
    const int row = q0 + row_of(i);
    inverse[i] = total == 0 ? Real(0) : Real(1) / total;
    if (slice0 == 0 && lane_x() == 0 && threadIdx.x / 32 % ACROSS == 0 && row < p.sq)
      static_cast<Real*>(p.lse)[first_row(p, batch, head) + row] =
          total == 0 ? -kInfinity : softmax.max[i] * Exponential::kNatural + log(total);
  }
  store(out, o, inverse, q0, p.sq, slice0, p.v_width);
}
