// What the backward passes of all dtypes begin with: delta = rowsum(dO * O) - dlse, a warp per row.
#pragma once
#include "params.cuh"

// `also(row, batch, head, i)` is called in every lane.
template <class Real, class Stored, class Convert, class Also>
DEVICE void write_delta(const Params& p, Convert real, Also also) {
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * p.sq) return;
  const int i = row % p.sq, head = row / p.sq % p.heads, batch = row / p.sq / p.heads;
  const Head<Stored> dout(p.dout, batch, head), out(p.out, batch, head);
  also(row, batch, head, i);
  Real sum = 0;
  for (int c = threadIdx.x % 32; c < p.v_width; c += 32)
    sum += real(dout.at(i, c)) * real(out.at(i, c));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32) return;
  static_cast<Real*>(p.delta)[row] = p.dlse ? sum - static_cast<const Real*>(p.dlse)[row] : sum;
}
