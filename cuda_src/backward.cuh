// What backward passes share: delta = rowsum(dO * O) - dlse, with which all begin; turns at dQ.
#pragma once
#include "common.cuh"
#include "params.cuh"

constexpr int kDeltaRows = 64;  // of a block of 256 threads: DELTA_ROWS of cuda_variants.py

// In delta the rows of a head are filled up to a multiple of kMultiple, with 0. Every lane of a row
// calls `also(row, batch, head, i, lane, lanes)`: row of delta, and of the head, where from p.sq on
// there is none; which of how many lanes it is.
template <class Real, class Stored, int kMultiple = 1, class Convert, class Also>
DEVICE void write_delta(const Params& p, Convert real, Also also) {
  constexpr int kColumns = VECTOR ? 16 / sizeof(Stored) : 1;  // of a lane at a time
  struct __align__(kColumns * sizeof(Stored)) Group {
    Stored x[kColumns];
  };
  // Up to four groups of columns for a lane: with one for each, finding its row took longer than
  // reading it, and this kernel an eighth of the time of short sequences.
  constexpr int kGroups = (VALUE_DIM + kColumns - 1) / kColumns;
  constexpr int kLanes = kGroups > 64 ? 32 : kGroups > 32 ? 16 : kGroups > 16 ? 8 : 4;
  constexpr int kAtOnce = kGroups > 8 ? 4 : 2, kTogether = 256 / kLanes;  // groups; rows
  const int rows = filled_up(p.sq, kMultiple), lane = threadIdx.x % kLanes;
  const long long begin = static_cast<long long>(blockIdx.x) * kDeltaRows;
  int flat = begin / rows, i = begin % rows;  // head of all, and row of it
  auto step = [&](int n) {
    for (i += n; i >= rows; i -= rows) ++flat;
  };
  step(threadIdx.x / kLanes);
#pragma unroll 1
  for (int n = threadIdx.x / kLanes; n < kDeltaRows; n += kTogether, step(kTogether)) {
    const int batch = flat / p.heads, head = flat % p.heads;
    const bool here = batch < p.batch, exists = here && (kMultiple == 1 || i < p.sq);
    if (here) also(begin + n, batch, head, i, lane, kLanes);
    Real sum = 0;
    if (exists) {
      const Head<Stored> dout(p.dout, batch, head), out(p.out, batch, head);
#pragma unroll 1
      for (int c0 = lane * kColumns; c0 < p.v_width; c0 += kAtOnce * kLanes * kColumns) {
        Group a[kAtOnce] = {}, b[kAtOnce] = {};
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g) {
          const int c = c0 + g * kLanes * kColumns;
          if (c >= p.v_width) continue;
          a[g] = reinterpret_cast<const Group&>(dout.at(i, c));
          b[g] = reinterpret_cast<const Group&>(out.at(i, c));
        }
#pragma unroll
        for (int g = 0; g < kAtOnce; ++g)
#pragma unroll
          for (int e = 0; e < kColumns; ++e) sum += real(a[g].x[e]) * real(b[g].x[e]);
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane || !here) continue;
    if (exists && p.dlse) sum -= static_cast<const Real*>(p.dlse)[first_row(p, batch, head) + i];
    static_cast<Real*>(p.delta)[begin + n] = sum;
  }
}

// The same of numbers that are Real themselves, and dQ = 0, to which blocks add then.
template <class Real>
DEVICE void write_delta_and_zeros(const Params& p) {
  write_delta<Real, Real>(
      p, [](Real x) { return x; },
      [&](long long, int batch, int head, int i, int lane, int lanes) {
        const Head<Real> dq(p.dq, batch, head);
        for (int c = lane; c < p.d; c += lanes) dq.at(i, c) = 0;
      });
}

// The number of a tile of dQ, of kRows queries from q0 on.
template <int kRows>
DEVICE int dq_tile(const Params& p, int batch, int head, int q0) {
  return (batch * p.heads + head) * ((p.sq + kRows - 1) / kRows) + q0 / kRows;
}

// A warp's turn at its part of a tile of dQ, after so many blocks before.
struct WarpTurn {
  int held = -1;  // the counter, in lane 0

  DEVICE void take(const Params& p, int counter, int before) {
    if (threadIdx.x % 32 == 0) {
      held = counter;
      while (load_acquire(p.counters + held) != before) continue;
    }
    __syncwarp();
  }
  DEVICE void pass(const Params& p) {  // once what was added is there
    __syncwarp();
    if (held < 0) return;
    fence();
    count_up(p.counters + held);
    held = -1;
  }
};
