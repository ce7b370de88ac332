// Backward for float16 and bfloat16 on the tensor cores of every GPU from Turing on (mma.sync).
//
// Three kernels, no atomics, results repeat bit for bit:
//   row_delta     a warp per row: delta = rowsum(dO * O) - dlse, and lse in base 2
//   bwd_sm80_kv   a block per (key tile, key/value head, batch entry): dK and dV. Rows of the
//   products
//                 are keys, so that P^T and dS^T are A fragments as they lie and never leave
//                 registers
//   bwd_sm80_q    a block per (query tile, head, batch entry): dQ, the same with queries as rows
// Resident operands stay in shared memory; streamed ones pass through STAGES buffers, the next tile
// being copied in while this one is computed on.
// Options: as fwd_sm80.cu; BLOCK_R and BLOCK_S are the rows of a resident and of a streamed tile,
// PARTS which of dK (1) and dV (2) bwd_sm80_kv computes.
// Source: Dao 2023, arXiv:2307.08691, algorithm 2.
#include "softmax.cuh"
#include "tile.cuh"

using Element = ELEMENT;
constexpr int kThreads = WARPS * 32;
constexpr int kM = BLOCK_R / (16 * WARPS);  // 16-row tiles of a warp
constexpr int kN = BLOCK_S / 8;
static_assert(BLOCK_R == kM * 16 * WARPS && BLOCK_S % 16 == 0, "tiles of 16");

// R: resident rows, S: streamed rows. K and Q have HEAD_DIM columns, V and dO VALUE_DIM.
using RWide = Tile<BLOCK_R, HEAD_DIM, kThreads>;
using RValue = Tile<BLOCK_R, VALUE_DIM, kThreads>;
using SWide = Tile<BLOCK_S, HEAD_DIM, kThreads>;
using SValue = Tile<BLOCK_S, VALUE_DIM, kThreads>;

struct Stage {
  SWide::Storage wide;
  SValue::Storage value;
};

struct Shared {
  RWide::Storage wide;
  RValue::Storage value;
  Stage stages[STAGES];
  float lse_log2[STAGES][BLOCK_S], delta[STAGES][BLOCK_S];  // of streamed queries
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_backend.py differ");

DEVICE long long row_start(const Params& p, int batch, int head) {
  return (static_cast<long long>(batch) * p.heads + head) * p.sq;
}

// s: products to P. dp to dS = P (dP - delta), times the softcap's slope.
DEVICE void differentiate(float& s, float& dp, float lse_log2, float delta, const Scores& scores) {
  const float x = s * scores.unit;
  s = exp2_approx(x - lse_log2);
  dp = s * (dp - delta) * scores.slope(x);
}

extern "C" __global__ void row_delta(const Params p) {
  const long long row = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row >= static_cast<long long>(p.batch) * p.heads * p.sq) return;
  const int i = row % p.sq, head = row / p.sq % p.heads, batch = row / p.sq / p.heads;
  const Slice dout(p.dout, batch, head), out(p.out, batch, head);
  float sum = 0;
  for (int c = threadIdx.x % 32; c < p.v_width; c += 32)
    sum += to_float<Element>(dout.at(i, c)) * to_float<Element>(out.at(i, c));
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32) return;
  static_cast<float*>(p.delta)[row] = p.dlse ? sum - static_cast<const float*>(p.dlse)[row] : sum;
  // A row that saw nothing has lse -inf, and must get P = exp2(s - inf) = 0.
  const float lse = static_cast<const float*>(p.lse)[row];
  static_cast<float*>(p.lse_log2)[row] = lse == -kInfinity ? kInfinity : lse * kLog2e;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm80_kv(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned k_tile = shared_address(&shared.wide), v_tile = shared_address(&shared.value);

  const int tiles = (p.sk + BLOCK_R - 1) / BLOCK_R, heads_kv = p.heads / p.group;
  const int k0 = blockIdx.x % tiles * BLOCK_R;
  const int head_kv = blockIdx.x / tiles % heads_kv, batch = blockIdx.x / tiles / heads_kv;
  const Scores scores(p.scale, p.softcap);

  // Queries that see any of these keys, and those that see all; the same for each head of the
  // group.
  const int lo_shift = 1 - p.hi_shift, hi_shift = 1 - p.lo_shift;
  const Bounds first = k_bounds(k0, p.sq, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(k0 + BLOCK_R, p.sk) - 1, p.sq, lo_shift, hi_shift);
  const int q_begin = first.lo / BLOCK_S * BLOCK_S, q_end = last.hi;
  const int steps = max(0, (q_end - q_begin + BLOCK_S - 1) / BLOCK_S);

  int head = head_kv * p.group, next_q0 = q_begin;  // of the tile to be copied in next
  auto load = [&](int i) {
    const int q0 = next_q0;
    Stage& stage = shared.stages[i % STAGES];
    SWide::load<VECTOR>(shared_address(&stage.wide), Slice(p.q, batch, head), q0, p.sq, p.d);
    SValue::load<VECTOR>(shared_address(&stage.value), Slice(p.dout, batch, head), q0, p.sq,
                         p.v_width);
    const long long rows = row_start(p, batch, head) + q0;
    for (int j = threadIdx.x; j < BLOCK_S; j += kThreads) {
      const bool inside = q0 + j < p.sq;
      copy4(shared_address(&shared.lse_log2[i % STAGES][j]),
            static_cast<float*>(p.lse_log2) + rows + j, inside);
      copy4(shared_address(&shared.delta[i % STAGES][j]), static_cast<float*>(p.delta) + rows + j,
            inside);
    }
    copies_commit();
    next_q0 += BLOCK_S;
    if (next_q0 >= q_end) next_q0 = q_begin, ++head;
  };

  float dk[kM][HEAD_DIM / 8][4], dv[kM][VALUE_DIM / 8][4];
  clear(dk);
  clear(dv);
  RWide::load<VECTOR>(k_tile, Slice(p.k, batch, head_kv), k0, p.sk, p.d);
  RValue::load<VECTOR>(v_tile, Slice(p.v, batch, head_kv), k0, p.sk, p.v_width);
  const int total = steps * p.group;
  if (STAGES > 1 && total > 0) load(0);
  for (int i = 0, q0 = q_begin; i < total; ++i) {
    if constexpr (STAGES == 1) {
      __syncthreads();  // all are done with the tiles before
      load(i);
    }
    copies_wait();
    __syncthreads();  // this stage is here, and all are done with the other
    if (STAGES > 1 && i + 1 < total) load(i + 1);

    Stage& stage = shared.stages[i % STAGES];
    const unsigned q_tile = shared_address(&stage.wide), do_tile = shared_address(&stage.value);
    float s[kM][kN][4], ds[kM][kN][4];  // transposed: rows are keys
    multiply<Element, RWide, SWide>(s, k_tile, q_tile);
    scores.transform(s);
    if constexpr (PARTS & 1)
      multiply<Element, RValue, SValue>(ds, v_tile, do_tile);
    else
      clear(ds);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + fragment_column() + e;
        const float lse = shared.lse_log2[i % STAGES][column],
                    delta = shared.delta[i % STAGES][column];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            differentiate(s[m][n][2 * r + e], ds[m][n][2 * r + e], lse, delta, scores);
      }
    }
    if (q0 < last.lo || q0 + BLOCK_S > first.hi) {
      apply_mask(s, k0, q0, p.sq, lo_shift, hi_shift, 0.0f);
      apply_mask(ds, k0, q0, p.sq, lo_shift, hi_shift, 0.0f);
    }
    q0 = q0 + BLOCK_S < q_end ? q0 + BLOCK_S : q_begin;
    if constexpr (PARTS & 2) accumulate<Element, SValue>(dv, s, do_tile);
    if constexpr (PARTS & 1) accumulate<Element, SWide>(dk, ds, q_tile);
  }
  copies_wait();
  __syncthreads();

  float scale[kM][2], one[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = p.scale, one[m][0] = one[m][1] = 1;
  if constexpr (PARTS & 1) stage_rows<Element, RWide>(dk, scale, k_tile);
  if constexpr (PARTS & 2) stage_rows<Element, RValue>(dv, one, v_tile);
  __syncthreads();
  if constexpr (PARTS & 1) RWide::store<VECTOR>(Slice(p.dk, batch, head_kv), k_tile, k0, p.sk, p.d);
  if constexpr (PARTS & 2)
    RValue::store<VECTOR>(Slice(p.dv, batch, head_kv), v_tile, k0, p.sk, p.v_width);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm80_q(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned q_tile = shared_address(&shared.wide), do_tile = shared_address(&shared.value);

  const int tiles = (p.sq + BLOCK_R - 1) / BLOCK_R;
  const int head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int q0 =
      (tiles - 1 - blockIdx.x % tiles) * BLOCK_R;  // under a causal mask the longest first
  const Slice k(p.k, batch, head / p.group), v(p.v, batch, head / p.group);
  const Scores scores(p.scale, p.softcap);
  const Bounds first = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift);
  const Bounds last = k_bounds(min(q0 + BLOCK_R, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);
  const int k_begin = first.lo / BLOCK_S * BLOCK_S;
  const int total = max(0, (last.hi - k_begin + BLOCK_S - 1) / BLOCK_S);

  auto load = [&](int i) {
    Stage& stage = shared.stages[i % STAGES];
    SWide::load<VECTOR>(shared_address(&stage.wide), k, k_begin + i * BLOCK_S, p.sk, p.d);
    SValue::load<VECTOR>(shared_address(&stage.value), v, k_begin + i * BLOCK_S, p.sk, p.v_width);
    copies_commit();
  };

  const long long rows = row_start(p, batch, head);
  float lse_log2[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = q0 + fragment_row<kM>(m, r);
      lse_log2[m][r] = row < p.sq ? static_cast<float*>(p.lse_log2)[rows + row] : kInfinity;
      delta[m][r] = row < p.sq ? static_cast<float*>(p.delta)[rows + row] : 0.0f;
    }
  }
  float dq[kM][HEAD_DIM / 8][4];
  clear(dq);
  RWide::load<VECTOR>(q_tile, Slice(p.q, batch, head), q0, p.sq, p.d);
  RValue::load<VECTOR>(do_tile, Slice(p.dout, batch, head), q0, p.sq, p.v_width);
  if (STAGES > 1 && total > 0) load(0);
  for (int i = 0; i < total; ++i) {
    if constexpr (STAGES == 1) {
      __syncthreads();  // all are done with the tiles before
      load(i);
    }
    copies_wait();
    __syncthreads();  // this stage is here, and all are done with the other
    if (STAGES > 1 && i + 1 < total) load(i + 1);

    Stage& stage = shared.stages[i % STAGES];
    const unsigned k_tile = shared_address(&stage.wide), v_tile = shared_address(&stage.value);
    float s[kM][kN][4], ds[kM][kN][4];
    multiply<Element, RWide, SWide>(s, q_tile, k_tile);
    scores.transform(s);
    multiply<Element, RValue, SValue>(ds, do_tile, v_tile);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          differentiate(s[m][n][e], ds[m][n][e], lse_log2[m][e / 2], delta[m][e / 2], scores);
    const int k0 = k_begin + i * BLOCK_S;
    if (k0 < last.lo || k0 + BLOCK_S > first.hi)
      apply_mask(ds, q0, k0, p.sk, p.lo_shift, p.hi_shift, 0.0f);
    accumulate<Element, SWide>(dq, ds, k_tile);
  }
  copies_wait();
  __syncthreads();

  float scale[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = p.scale;
  stage_rows<Element, RWide>(dq, scale, q_tile);
  __syncthreads();
  RWide::store<VECTOR>(Slice(p.dq, batch, head), q_tile, q0, p.sq, p.d);
}
