// What a launch is told. PARAMS of cuflash/cuda_variants.py is for the same bytes; the size is
// checked here, so that a drift of the two fails when compiling.
#pragma once

#define DEVICE __device__ __forceinline__

// A four-axis array: strides in bytes.
struct Array {
  void* data;
  long long batch, head, row, column;
};

struct Params {
  Array q, k, v, out, dout, dq, dk, dv;  // a forward kernel has no use for the last four
  // (batch, heads, sq), contiguous; dlse may be null. On Hopper the last two have rows for whole
  // tiles of queries.
  void *lse, *dlse, *lse_log2, *delta;
  float* dq_sum;  // of bwd_sm80 and bwd_sm90: dQ in tiles
  int* counters;  // backward: of those that add to dQ, from 0; on Hopper it may be null
  int* tickets;   // fwd_sm90, or null, and bwd_sm90: tiles given out, from 0
  // Of split.cu: parts of float32 arrays, a row after the other, and what undoes their powers of
  // two.
  float *q_factors, *k_factors, *v_factors, *dout_factors;
  void *q_parts, *k_parts, *v_parts, *dout_parts;
  float* weights;  // of bwd_sm90_q, for bwd_sm90_kv: of rows of P in float32
  int batch, heads, group, sq, sk, d, v_width;
  int lo_shift, hi_shift;       // of k_bounds
  int section;                  // heads that a Hopper launch works on at a time
  int turn_bits, pass_at_once;  // of bwd_sm80: 2^turn_bits queries are a turn, whole tiles
  int in_turns;                 // of bwd_sm90: blocks add to dQ in the order of their keys
  double scale, softcap;        // softcap 0: none
};
static_assert(sizeof(Params) == PARAMS_BYTES, "Params here and in cuda_variants.py differ");

// Where the numbers of a head's queries begin in lse, delta and their kin: of so many, filled up to
// a multiple.
DEVICE int filled_up(int rows, int multiple) { return (rows + multiple - 1) / multiple * multiple; }
DEVICE long long first_row(const Params& p, int batch, int head, int multiple = 1) {
  return (static_cast<long long>(batch) * p.heads + head) * filled_up(p.sq, multiple);
}

// One head of an array. The strides stay in the launch's parameters and take no registers.
template <class T>
struct Head {
  char* data;
  const long long &row, &column;  // bytes
  DEVICE Head(const Array& a, int batch, int head)
      : data(static_cast<char*>(a.data) + batch * a.batch + head * a.head),
        row(a.row),
        column(a.column) {}
  DEVICE T& at(int i, int j) const { return *reinterpret_cast<T*>(data + i * row + j * column); }
};
