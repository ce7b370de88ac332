// Forward for float16 and bfloat16 on the tensor cores of every GPU from Turing on (mma.sync).
//
// Grid: one block per (query tile, head, batch entry), all on x. A warp owns 16 * kMTiles queries:
// their scores, exponentials and output never leave its registers. K and V tiles pass through
// shared memory, one buffer each: V is copied in while Q K^T is computed, the next K during softmax
// and P V. Options: ELEMENT (Half | BFloat16), HEAD_DIM, VALUE_DIM (widths padded to 32), BLOCK_Q,
// BLOCK_K, WARPS, TRANSFORM (softmax.cuh), VECTOR (1: rows of 16-byte aligned 8-element groups; 0:
// any strides). Source: Dao 2023, arXiv:2307.08691, algorithm 1.
#include "softmax.cuh"
#include "tile.cuh"

using Element = ELEMENT;
constexpr int kThreads = WARPS * 32;
constexpr int kMTiles = BLOCK_Q / (16 * WARPS);
static_assert(BLOCK_Q == kMTiles * 16 * WARPS && BLOCK_K % 16 == 0, "tiles of 16");

using QTile = Tile<BLOCK_Q, HEAD_DIM, kThreads>;
using KTile = Tile<BLOCK_K, HEAD_DIM, kThreads>;
using VTile = Tile<BLOCK_K, VALUE_DIM, kThreads>;
using OTile = Tile<BLOCK_Q, VALUE_DIM, kThreads>;

struct Shared {
  union {
    QTile::Storage q;
    OTile::Storage out;  // at the end
  };
  KTile::Storage k;
  VTile::Storage v;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm80(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned q_tile = shared_address(&shared.q), k_tile = shared_address(&shared.k),
                 v_tile = shared_address(&shared.v);

  const int tiles = (p.sq + BLOCK_Q - 1) / BLOCK_Q;
  const int head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int q0 =
      (tiles - 1 - blockIdx.x % tiles) * BLOCK_Q;  // under a causal mask the longest first
  const Slice q(p.q, batch, head), out(p.out, batch, head);
  const Slice k(p.k, batch, head / p.group), v(p.v, batch, head / p.group);

  const Bounds first = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift);
  const Bounds last = k_bounds(min(q0 + BLOCK_Q, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);
  const int k_begin = first.lo / BLOCK_K * BLOCK_K;

  const Scores scores(p.scale, p.softcap);
  OnlineSoftmax<kMTiles> softmax;
  float o[kMTiles][VALUE_DIM / 8][4];
  clear(o);

  // From the last key block to the first: the one with a ragged end comes when all is still to do.
  int k0 = last.hi > k_begin ? (last.hi - 1) / BLOCK_K * BLOCK_K : k_begin - 1;
  QTile::load<VECTOR>(q_tile, q, q0, p.sq, p.d);
  if (k0 >= k_begin) KTile::load<VECTOR>(k_tile, k, k0, p.sk, p.d);
  copies_commit();
  for (; k0 >= k_begin; k0 -= BLOCK_K) {
    copies_wait();
    __syncthreads();  // K is here, and all are done with the V before
    VTile::load<VECTOR>(v_tile, v, k0, p.sk, p.v_width);
    copies_commit();

    float s[kMTiles][BLOCK_K / 8][4];
    multiply<Element, QTile, KTile>(s, q_tile, k_tile);
    scores.transform(s);
    if (k0 < last.lo || k0 + BLOCK_K > first.hi)
      apply_mask(s, q0, k0, p.sk, p.lo_shift, p.hi_shift, -kInfinity);

    copies_wait();
    __syncthreads();  // V is here, and all are done with this K
    if (k0 > k_begin) KTile::load<VECTOR>(k_tile, k, k0 - BLOCK_K, p.sk, p.d);
    copies_commit();

    softmax.raise(s, scores.unit);
    softmax.rescale(o);
    softmax.exponentiate<true>(s, scores.unit);
    softmax.add();
    accumulate<Element, VTile>(o, s, v_tile);
  }
  copies_wait();
  __syncthreads();  // all are done with Q, whose place the output takes

  float* lse = static_cast<float*>(p.lse) + first_row(p, batch, head);
  float inverse[kMTiles][2];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_lse;
      inverse[m][r] = softmax.finish(m, r, scores.unit, row_lse);
      const int row = q0 + fragment_row<kMTiles>(m, r);
      if (fragment_column() == 0 && row < p.sq) lse[row] = row_lse;
    }
  }
  stage_rows<Element, OTile>(o, inverse, q_tile);
  __syncthreads();
  OTile::store<VECTOR>(out, q_tile, q0, p.sq, p.v_width);
}
