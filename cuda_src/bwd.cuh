// What the one-pass backward kernels for 16-bit elements share: delta, and which tiles a block
// works on.
#pragma once
#include "mask.cuh"
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

// A block's tile of keys of a key/value head, and the tiles of queries that see any of them: the
// same of each head of the group, from the last to the first. Under a causal mask blocks of a head
// then begin with the same, and are a turn apart; in ascending order it would be two.
template <int kKeys, int kQueries>
struct Work {
  int head, batch, tile, k0;
  Bounds first, last;   // queries that see the first and the last key
  int q_first, q_last;  // of the first and the last tile of queries
  int total;            // tiles of queries of all heads

  Work() = default;
  // So many heads at a time: the first tile of each, then the second of each. Under a causal mask
  // the first keys have the most to do.
  DEVICE Work(const Params& p, int section) {
    const int heads = p.heads / p.group, tiles = (p.sk + kKeys - 1) / kKeys;
    const int before = blockIdx.x / (section * tiles) * section;
    const int together = min(section, p.batch * heads - before);
    const int index = blockIdx.x - before * tiles;
    head = (before + index % together) % heads, batch = (before + index % together) / heads;
    tile = index / together, k0 = tile * kKeys;
    first = queries(p, k0), last = queries(p, min(k0 + kKeys, p.sk) - 1);
    q_first = first.lo / kQueries * kQueries;
    q_last = last.hi > q_first ? (last.hi - 1) / kQueries * kQueries : q_first - kQueries;
    total = (q_last - q_first + kQueries) / kQueries * p.group;
  }
  // Those that see a key.
  static DEVICE Bounds queries(const Params& p, int key) {
    return k_bounds(key, p.sq, 1 - p.hi_shift, 1 - p.lo_shift);
  }
  // From one tile of queries to the next.
  DEVICE void step(int& q0, int& q_head) const {
    q0 -= kQueries;
    if (q0 < q_first) q0 = q_last, ++q_head;
  }
  // How many blocks add to dQ of the turn that begins with this query before this one does.
  DEVICE int turn(const Params& p, int query) const {
    return tile - k_bounds(query, p.sk, p.lo_shift, p.hi_shift).lo / kKeys;
  }
};
