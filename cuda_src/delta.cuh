// What the backward passes of all dtypes begin with: delta = rowsum(dO * O) - dlse, a warp per row.
#pragma once
#include "params.cuh"

// In delta the rows of a head are filled up to a multiple of kMultiple, with 0. Every lane of a row
// calls `also(row, batch, head, i)`: row of delta, and of the head, where from p.sq on there is
// none.
template <class Real, class Stored, int kMultiple = 1, class Convert, class Also>
DEVICE void write_delta(const Params& p, Convert real, Also also) {
  const int rows = filled_up(p.sq, kMultiple);
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * rows) return;
  const int i = row % rows, head = row / rows % p.heads, batch = row / rows / p.heads;
  const bool exists = kMultiple == 1 || i < p.sq;
  also(row, batch, head, i);
  Real sum = 0;
  if (exists) {
    const Head<Stored> dout(p.dout, batch, head), out(p.out, batch, head);
    struct __align__(16) Group {
      Stored x[16 / sizeof(Stored)];
    };
    constexpr int kColumns = VECTOR ? 16 / sizeof(Stored) : 1;  // of a lane at a time
    for (int c = threadIdx.x % 32 * kColumns; c < p.v_width; c += 32 * kColumns) {
      if constexpr (VECTOR) {
        const Group a = reinterpret_cast<const Group&>(dout.at(i, c));
        const Group b = reinterpret_cast<const Group&>(out.at(i, c));
#pragma unroll
        for (int e = 0; e < kColumns; ++e) sum += real(a.x[e]) * real(b.x[e]);
      } else {
        sum += real(dout.at(i, c)) * real(out.at(i, c));
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  if (threadIdx.x % 32) return;
  if (exists && p.dlse) sum -= static_cast<const Real*>(p.dlse)[first_row(p, batch, head) + i];
  static_cast<Real*>(p.delta)[row] = sum;
}
