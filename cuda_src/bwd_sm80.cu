// Backward for float16 and bfloat16 on the tensor cores of every GPU from Turing on (mma.sync).
//
// Three kernels, no atomics, results repeat bit for bit:
//   row_delta  a warp per row: delta = rowsum(dO * O) - dlse, and lse in base 2
//   bwd_sm80   a block per tile of rows; the others stream past. P and dS are A fragments as they
//              lie and never leave registers.
//              KEYS 1: rows are keys, the result dK and dV, for each key/value head
//              KEYS 0: rows are queries, the result dQ, for each head
// The block's own operands stay in shared memory; the others' pass through STAGES buffers, the next
// tile being copied in while this one is computed on.
// Options: as fwd_sm80.cu; KEYS; BLOCK_R and BLOCK_S are the rows of an own and of a streamed tile,
// PARTS which of dK (1) and dV (2) is computed, for KEYS 0: 1.
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

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm80(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned wide_tile = shared_address(&shared.wide),
                 value_tile = shared_address(&shared.value);

  // Rows of this block's tile, and of what streams past.
  const int rows = KEYS ? p.sk : p.sq, others = KEYS ? p.sq : p.sk;
  const int heads = KEYS ? p.heads / p.group : p.heads;
  const int tiles = (rows + BLOCK_R - 1) / BLOCK_R;
  // Under a causal mask the last queries and the first keys have the most to do: they go first.
  const int tile = KEYS ? blockIdx.x % tiles : tiles - 1 - blockIdx.x % tiles;
  const int row0 = tile * BLOCK_R;
  const int head = blockIdx.x / tiles % heads, batch = blockIdx.x / tiles / heads;
  const Scores scores(p.scale, p.softcap);

  // Others that see any of these rows, and those that see all; the same for each partner.
  const int lo_shift = KEYS ? 1 - p.hi_shift : p.lo_shift;
  const int hi_shift = KEYS ? 1 - p.lo_shift : p.hi_shift;
  const Bounds first = k_bounds(row0, others, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(row0 + BLOCK_R, rows) - 1, others, lo_shift, hi_shift);
  const int begin = first.lo / BLOCK_S * BLOCK_S, end = last.hi;

  // The query heads of a key/value head, or the key/value head of a query head.
  const int partners = KEYS ? p.group : 1;
  // Of the tile to copy in next:
  int partner = KEYS ? head * p.group : head / p.group, next = begin;
  auto load = [&](int i) {
    Stage& stage = shared.stages[i % STAGES];
    SWide::load<VECTOR>(shared_address(&stage.wide), Slice(KEYS ? p.q : p.k, batch, partner), next,
                        others, p.d);
    SValue::load<VECTOR>(shared_address(&stage.value), Slice(KEYS ? p.dout : p.v, batch, partner),
                         next, others, p.v_width);
    if constexpr (KEYS) {
      const long long stats = first_row(p, batch, partner) + next;
      for (int j = threadIdx.x; j < BLOCK_S; j += kThreads) {
        const bool inside = next + j < others;
        copy4(shared_address(&shared.lse_log2[i % STAGES][j]),
              static_cast<float*>(p.lse_log2) + stats + j, inside);
        copy4(shared_address(&shared.delta[i % STAGES][j]),
              static_cast<float*>(p.delta) + stats + j, inside);
      }
    }
    copies_commit();
    next += BLOCK_S;
    if (next >= end) next = begin, ++partner;
  };

  float lse_log2[kM][2], delta[kM][2];  // of rows that are queries
  if constexpr (!KEYS) {
    const long long stats = first_row(p, batch, head);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + fragment_row<kM>(m, r);
        lse_log2[m][r] = row < rows ? static_cast<float*>(p.lse_log2)[stats + row] : kInfinity;
        delta[m][r] = row < rows ? static_cast<float*>(p.delta)[stats + row] : 0.0f;
      }
    }
  }

  float wide[kM][HEAD_DIM / 8][4], value[kM][VALUE_DIM / 8][4];  // dK or dQ; and dV
  clear(wide);
  clear(value);
  RWide::load<VECTOR>(wide_tile, Slice(KEYS ? p.k : p.q, batch, head), row0, rows, p.d);
  RValue::load<VECTOR>(value_tile, Slice(KEYS ? p.v : p.dout, batch, head), row0, rows, p.v_width);
  const int total = max(0, (end - begin + BLOCK_S - 1) / BLOCK_S) * partners;
  if (STAGES > 1 && total > 0) load(0);
  for (int i = 0, other0 = begin; i < total; ++i) {
    if constexpr (STAGES == 1) {
      __syncthreads();  // all are done with the tiles before
      load(i);
    }
    copies_wait();
    __syncthreads();  // this stage is here, and all are done with the other
    if (STAGES > 1 && i + 1 < total) load(i + 1);

    Stage& stage = shared.stages[i % STAGES];
    const unsigned s_wide = shared_address(&stage.wide), s_value = shared_address(&stage.value);
    float s[kM][kN][4], ds[kM][kN][4];
    multiply<Element, RWide, SWide>(s, wide_tile, s_wide);
    scores.transform(s);
    if constexpr (PARTS & 1)
      multiply<Element, RValue, SValue>(ds, value_tile, s_value);
    else
      clear(ds);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + fragment_column() + e;
        const float column_lse = KEYS ? shared.lse_log2[i % STAGES][column] : 0;
        const float column_delta = KEYS ? shared.delta[i % STAGES][column] : 0;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            differentiate(s[m][n][2 * r + e], ds[m][n][2 * r + e],
                          KEYS ? column_lse : lse_log2[m][r], KEYS ? column_delta : delta[m][r],
                          scores);
      }
    }
    if (other0 < last.lo || other0 + BLOCK_S > first.hi) {
      if constexpr (PARTS & 2) apply_mask(s, row0, other0, others, lo_shift, hi_shift, 0.0f);
      if constexpr (PARTS & 1) apply_mask(ds, row0, other0, others, lo_shift, hi_shift, 0.0f);
    }
    other0 = other0 + BLOCK_S < end ? other0 + BLOCK_S : begin;
    if constexpr (PARTS & 2) accumulate<Element, SValue>(value, s, s_value);
    if constexpr (PARTS & 1) accumulate<Element, SWide>(wide, ds, s_wide);
  }
  copies_wait();
  __syncthreads();

  float scale[kM][2], one[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) scale[m][0] = scale[m][1] = p.scale, one[m][0] = one[m][1] = 1;
  if constexpr (PARTS & 1) stage_rows<Element, RWide>(wide, scale, wide_tile);
  if constexpr (PARTS & 2) stage_rows<Element, RValue>(value, one, value_tile);
  __syncthreads();
  if constexpr (PARTS & 1)
    RWide::store<VECTOR>(Slice(KEYS ? p.dk : p.dq, batch, head), wide_tile, row0, rows, p.d);
  if constexpr (PARTS & 2)
    RValue::store<VECTOR>(Slice(p.dv, batch, head), value_tile, row0, rows, p.v_width);
}
