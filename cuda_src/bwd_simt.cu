// Backward for float32 and float64 on CUDA cores, at those dtypes' accuracy.
//
//   row_delta  a warp per row: delta = rowsum(dO * O) - dlse
//   bwd_simt   a block per tile of rows; the others stream past.
//              KEYS 1: rows are keys, the result dK and dV, for each key/value head
//              KEYS 0: rows are queries, the result dQ, for each head
// No atomics, results repeat bit for bit.
// Options: as fwd_simt.cu; KEYS; PARTS: dK (1), dV (2), for KEYS 0: 1.
// Source: Dao 2023, arXiv:2307.08691, algorithm 2.
#include "simt.cuh"

extern "C" __global__ void row_delta(const Params p) {
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * p.sq) return;
  const int i = row % p.sq, head = row / p.sq % p.heads, batch = row / p.sq / p.heads;
  const Matrix dout(p.dout, batch, head), out(p.out, batch, head);
  Real sum = 0;
  for (int c = threadIdx.x % 32; c < p.v_width; c += 32) sum += dout.at(i, c) * out.at(i, c);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0)
    static_cast<Real*>(p.delta)[row] = p.dlse ? sum - static_cast<const Real*>(p.dlse)[row] : sum;
}

// s: products to P. dp to dS = P (dP - delta), times the softcap's slope.
DEVICE void differentiate(Real& s, Real& dp, Real lse, Real delta, const Scores& score) {
  const Real x = score(s);
  s = exp(x - lse);
  dp = s * (dp - delta) * score.slope(x);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_simt(const Params p) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  // Rows of this block's tile, and of what streams past.
  const int rows = KEYS ? p.sk : p.sq, others = KEYS ? p.sq : p.sk;
  const int heads = KEYS ? p.heads / p.group : p.heads;
  const int tiles = (rows + kRows - 1) / kRows;
  const int row0 = blockIdx.x % tiles * kRows;
  const int head = blockIdx.x / tiles % heads, batch = blockIdx.x / tiles / heads;
  const int lo_shift = KEYS ? 1 - p.hi_shift : p.lo_shift,
            hi_shift = KEYS ? 1 - p.lo_shift : p.hi_shift;
  const Bounds first = k_bounds(row0, others, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(row0 + kRows, rows) - 1, others, lo_shift, hi_shift);
  const Matrix mine(KEYS ? p.k : p.q, batch, head), mine_value(KEYS ? p.v : p.dout, batch, head);

  const Scores score(p);

  // dK or dQ; and dV.
  Part wide[PARTS & 1 ? kSlices(HEAD_DIM) : 1], value[PARTS & 2 ? kSlices(VALUE_DIM) : 1];
  for (auto& part : wide) clear(part);
  for (auto& part : value) clear(part);

  const int partners = KEYS ? p.group : 1;  // query heads of a key/value head
  for (int n = 0; n < partners; ++n) {
    const int other = KEYS ? head * p.group + n : head / p.group;
    const Matrix theirs(KEYS ? p.q : p.k, batch, other),
        theirs_value(KEYS ? p.dout : p.v, batch, other);
    const long long stats = first_row(p, batch, KEYS ? other : head);
    const Real* lse = static_cast<const Real*>(p.lse) + stats;
    const Real* delta = static_cast<const Real*>(p.delta) + stats;
    for (int other0 = first.lo / SLICE * SLICE; other0 < last.hi; other0 += SLICE) {
      Part s, ds;
      multiply(s, shared, mine, row0, rows, theirs, other0, others, p.d);
      if (PARTS & 1)
        multiply(ds, shared, mine_value, row0, rows, theirs_value, other0, others, p.v_width);
      else
        clear(ds);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const int row = row0 + row_of(i);
        const Bounds seen = k_bounds(row, others, lo_shift, hi_shift);
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const int column = other0 + column_of(j), query = KEYS ? column : row;
          // A row whose every score is -inf has no gradient: -inf + inf is NaN.
          if (row < rows && seen.lo <= column && column < seen.hi && lse[query] != -kInfinity)
            differentiate(s[i][j], ds[i][j], lse[query], delta[query], score);
          else
            s[i][j] = ds[i][j] = 0;
        }
      }
      if (PARTS & 2) {
        put(shared, s);
        accumulate_slices(value, shared, theirs_value, other0, others, p.v_width);
      }
      if (PARTS & 1) {
        put(shared, ds);
        accumulate_slices(wide, shared, theirs, other0, others, p.d);
      }
    }
  }

  Real scale[kM], one[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) scale[i] = p.scale, one[i] = 1;
  if (PARTS & 1) store(Matrix(KEYS ? p.dk : p.dq, batch, head), wide, scale, row0, rows, p.d);
  if (PARTS & 2) store(Matrix(p.dv, batch, head), value, one, row0, rows, p.v_width);
}
