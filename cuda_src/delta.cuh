// What the backward passes of all dtypes begin with: delta = rowsum(dO * O) - dlse, a warp per row.
#pragma once
#include "params.cuh"

// In delta the rows of a head are filled up to a multiple of kMultiple. `also(row, at)` is called
// in one lane: row of delta, and of lse; -1 where it is such a row.
template <class Real, class Stored, int kMultiple = 1, class Convert, class Also>
DEVICE void write_delta(const Params& p, Convert real, Also also) {
  const int rows = filled_up(p.sq, kMultiple);
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * rows) return;
  const int i = row % rows, head = row / rows % p.heads, batch = row / rows / p.heads;
  const bool exists = kMultiple == 1 || i < p.sq;
  const long long at = kMultiple == 1 ? row : exists ? first_row(p, batch, head) + i : -1;
  Real sum = 0;
  if (exists) {
    const Head<Stored> dout(p.dout, batch, head), out(p.out, batch, head);
    for (int c = threadIdx.x % 32; c < p.v_width; c += 32)
      sum += real(dout.at(i, c)) * real(out.at(i, c));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  if (threadIdx.x % 32) return;
  static_cast<Real*>(p.delta)[row] =
      exists && p.dlse ? sum - static_cast<const Real*>(p.dlse)[at] : sum;
  also(row, at);
}
