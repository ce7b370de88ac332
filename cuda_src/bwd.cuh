// What the backward kernels for 16-bit elements share.
#pragma once
#include "softmax.cuh"

// A warp writes a row of lse_log2 and delta, in which the rows of a head are filled up to a
// multiple of kMultiple: delta = rowsum(dO * O) - dlse, and lse in base 2.
template <int kMultiple>
DEVICE void write_row_delta(const Params& p) {
  const int rows = (p.sq + kMultiple - 1) / kMultiple * kMultiple;
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * rows) return;
  const int i = row % rows, head = row / rows % p.heads, batch = row / rows / p.heads;
  float delta = 0, lse = -kInfinity;
  if (kMultiple == 1 || i < p.sq) {
    const Head<unsigned short> dout(p.dout, batch, head), out(p.out, batch, head);
    for (int c = threadIdx.x % 32; c < p.v_width; c += 32)
      delta += to_float<ELEMENT>(dout.at(i, c)) * to_float<ELEMENT>(out.at(i, c));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    const long long at = first_row(p, batch, head) + i;
    if (p.dlse) delta -= static_cast<const float*>(p.dlse)[at];
    lse = static_cast<const float*>(p.lse)[at];
  }
  if (threadIdx.x % 32) return;
  static_cast<float*>(p.delta)[row] = delta;
  // A row that saw nothing has lse -inf, and must get P = exp2(s - inf) = 0.
  static_cast<float*>(p.lse_log2)[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
}
