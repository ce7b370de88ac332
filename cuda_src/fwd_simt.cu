// Forward for float32 and float64 on CUDA cores, at those dtypes' accuracy.
//
// Grid: one block per (query tile, head, batch entry), all on x. simt.cuh says how tiles are held;
// P goes through `a`, where the slice of Q was, since only the warp that wrote it reads it.
// Options: REAL (float | double), HEAD_DIM, VALUE_DIM, SLICE, ROWS_PER_THREAD, WARPS, SOFTCAP,
// VECTOR (1: rows of 16-byte aligned groups; 0: any strides). Source: Dao 2023, arXiv:2307.08691,
// algorithm 1.
#include "simt.cuh"

constexpr int kOut = kSlices(VALUE_DIM);

struct OnlineSoftmax {
  Real max[kM], sum[kM];  // sum: of this thread's columns only

  // s becomes exponentials; o is rescaled.
  DEVICE void add(Part& s, Part (&o)[kOut]) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      Real top = s[i][0];
#pragma unroll
      for (int j = 1; j < kN; ++j) top = s[i][j] > top ? s[i][j] : top;
      top = lanes_max(top);
      top = top > max[i] ? top : max[i];
      // A row that has seen nothing: exp(-inf - 0) = 0, where -inf + inf would be NaN.
      const Real base = top == -kInfinity ? Real(0) : top;
      const Real rescale = exp(max[i] - base);
      max[i] = top;
      sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        s[i][j] = exp(s[i][j] - base);
        sum[i] += s[i][j];
      }
#pragma unroll
      for (int n = 0; n < kOut; ++n)
#pragma unroll
        for (int j = 0; j < kN; ++j) o[n][i][j] *= rescale;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_simt(const Params p) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int tiles = (p.sq + kRows - 1) / kRows;
  const int head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int q0 = (tiles - 1 - blockIdx.x % tiles) * kRows;  // under a causal mask the longest first
  const Matrix q(p.q, batch, head), out(p.out, batch, head);
  const Matrix k(p.k, batch, head / p.group), v(p.v, batch, head / p.group);
  const Bounds first = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift);
  const Bounds last = k_bounds(min(q0 + kRows, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);

  const Scores score(p);
  OnlineSoftmax softmax;
  Part o[kOut];
#pragma unroll
  for (int i = 0; i < kM; ++i) softmax.max[i] = -kInfinity, softmax.sum[i] = 0;
#pragma unroll
  for (int n = 0; n < kOut; ++n) clear(o[n]);

  for (int k0 = first.lo / SLICE * SLICE; k0 < last.hi; k0 += SLICE) {
    Part s;
    multiply(s, shared, q, q0, p.sq, k, k0, p.sk, p.d);
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const Bounds keys = k_bounds(q0 + row_of(i), p.sk, p.lo_shift, p.hi_shift);
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int key = k0 + column_of(j);
        s[i][j] = keys.lo <= key && key < keys.hi ? score(s[i][j]) : -kInfinity;
      }
    }
    softmax.add(s, o);
    put(shared, s);
    accumulate_slices(o, shared, v, k0, p.sk, p.v_width);
  }

  Real inverse[kM];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    const Real total = lanes_sum(softmax.sum[i]);
    const int row = q0 + row_of(i);
    inverse[i] = total == 0 ? Real(0) : Real(1) / total;
    if (threadIdx.x % 8 == 0 && row < p.sq)
      static_cast<Real*>(p.lse)[first_row(p, batch, head) + row] =
          total == 0 ? -kInfinity : softmax.max[i] + log(total);
  }
  store(out, o, inverse, q0, p.sq, p.v_width);
}
