// dQ for float16 and bfloat16 on Hopper, where widths are too large for bwd_sm90.cu: tensor copies
// and wgmma. bwd_sm90_kv.cu computes dK and dV, and delta before.
//
// A block per 128 queries; keys stream past. Two warpgroups compute, 64 queries each, the third
// copies:
//   S = Q K^T, dP = dO V^T    queries x keys
//   dQ += dS K                dS, rounded, is the left operand as it lies
// P = exp(S) runs beside dP, and dQ of a key block beside S of the next.
//
//   thread       waits for                 then
//   copying      k_empty, v_empty          copies, which complete q_full, o_full, k_full, v_full
//   computing    q_, o_, k_full, v_full    products; a lane of each warp arrives at *_empty
//
// With SPLIT arrays are float32, of which split.cu has made float16 numbers, as for bwd_sm90_kv.cu:
// of dS, times the powers of two of the keys, a row gets one for each tile, and the product of a
// tile begins with 0 and is added to dQ on CUDA cores.
//
// Options: SPLIT (as in fwd_sm90.cu), ELEMENT, HEAD_DIM, VALUE_DIM (padded to 32), BLOCK_K,
// STATS_ROWS (rows of a head in lse_log2 and delta are filled up to a multiple of it), TRANSFORM
// (softmax.cuh), VECTOR (as in fwd_sm80.cu). Source: Dao 2023, arXiv:2307.08691, algorithm 2, its
// sum over keys.
#include "softmax.cuh"
#include "split.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int kGroups = BLOCK_Q / 64, kComputing = 128 * kGroups, kThreads = kComputing + 128;
// 168 each to begin with; one computing warpgroup has as many as a thread may have.
constexpr int kCopyingRegisters = 24, kComputingRegisters = 240;

constexpr int kParts = SPLIT == 2 ? 2 : 1;
using QTile = Tile<BLOCK_Q, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using OTile = Tile<BLOCK_Q, kParts * 64 * slabs(VALUE_DIM), kComputing>;
using KTile = Tile<BLOCK_K, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using VTile = Tile<BLOCK_K, kParts * 64 * slabs(VALUE_DIM), kComputing>;
// Factors of a tile; without SPLIT they are not used.
constexpr int kFactors = SPLIT ? BLOCK_K : 4, kFactorBytes = SPLIT ? 4 * kFactors : 0;
using Work = QueryWork<BLOCK_Q, BLOCK_K>;

struct Shared {
  QTile::Storage q;
  OTile::Storage dout;
  KTile::Storage k[kStages];
  VTile::Storage v[kStages];
  __align__(16) float k_factors[kStages][kFactors], v_factors[kStages][kFactors];
  Work work;
  unsigned long long q_full, o_full, k_full[kStages], k_empty[kStages], v_full[kStages],
      v_empty[kStages];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, dout;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    bwd_sm90_q(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned q_tile = shared_address(&shared.q), o_tile = shared_address(&shared.dout);
  const unsigned k_tiles = shared_address(&shared.k), v_tiles = shared_address(&shared.v);
  const unsigned q_full = shared_address(&shared.q_full), o_full = shared_address(&shared.o_full);
  const unsigned k_full = shared_address(&shared.k_full), v_full = shared_address(&shared.v_full);
  const unsigned k_empty = shared_address(&shared.k_empty);
  const unsigned v_empty = shared_address(&shared.v_empty);
  if (threadIdx.x == kComputing) {
    prefetch(maps.q), prefetch(maps.k), prefetch(maps.v), prefetch(maps.dout);
    barrier_init(q_full, 1), barrier_init(o_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(k_full + 8 * i, 1), barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 4 * kGroups), barrier_init(v_empty + 8 * i, 4 * kGroups);
    }
    barrier_init_fence();
    shared.work = Work(p, blockIdx.x);
  }
  __syncthreads();
  const Work& work = shared.work;  // there, and not in registers
  const int blocks = work.blocks;
  // From the last key block to the first: a ragged end comes when all is still to do.
  auto first_key = [&](int i) { return (work.k_begin + blocks - 1 - i) * BLOCK_K; };

  if (threadIdx.x >= kComputing) {
    if (kGroups > 1) registers_lower<kCopyingRegisters>();
    if (threadIdx.x > kComputing || blocks == 0) return;
    const int kv_head = work.head / p.group;
    const long long factors_row = SPLIT ? first_kv_row<BLOCK_K>(p, work.batch, kv_head) : 0;
    auto load_factors = [&](const float* to, const float* all, int i, unsigned barrier) {
      if (SPLIT)
        bulk_load(shared_address(to), all + factors_row + first_key(i), barrier, kFactorBytes);
    };
    load<QTile>(q_tile, maps.q, q_full, work.q0, work.head, work.batch);
    for (int i = 0; i < blocks; ++i) {
      const int stage = i % kStages;
      const unsigned free = i / kStages % 2 ^ 1;
      barrier_wait(k_empty + 8 * stage, free);
      load<KTile>(k_tiles + stage * sizeof(KTile::Storage), maps.k, k_full + 8 * stage,
                  first_key(i), kv_head, work.batch, kFactorBytes);
      load_factors(shared.k_factors[stage], p.k_factors, i, k_full + 8 * stage);
      if (i == 0) load<OTile>(o_tile, maps.dout, o_full, work.q0, work.head, work.batch);
      barrier_wait(v_empty + 8 * stage, free);
      load<VTile>(v_tiles + stage * sizeof(VTile::Storage), maps.v, v_full + 8 * stage,
                  first_key(i), kv_head, work.batch, kFactorBytes);
      load_factors(shared.v_factors[stage], p.v_factors, i, v_full + 8 * stage);
    }
    return;
  }
  if (kGroups > 1) registers_raise<kComputingRegisters>();

  const int group = warpgroup();
  const Scores scores(p.scale, p.softcap);
  float s[1][BLOCK_K / 8][4], ds[1][BLOCK_K / 8][4], dq[1][HEAD_DIM / 8][4];
  // Of a tile, with SPLIT, so many columns at a time.
  constexpr int kSlice = SPLIT && HEAD_DIM > 128 ? 64 : HEAD_DIM;
  static_assert(HEAD_DIM % kSlice == 0, "whole slices");
  float part[kSlice / 8][4];
  unsigned rounded[kParts][BLOCK_K / 16][4];
  float undo[2];                   // with SPLIT, factors of what is rounded
  auto multiply_qk = [&](int i) {  // start S = Q K^T
    const int stage = i % kStages;
    barrier_wait(k_full + 8 * stage, i / kStages % 2);
    multiply_transposed<QTile, KTile, HEAD_DIM, kParts>(s[0], q_tile + group * 64 * 128,
                                                        k_tiles + stage * sizeof(KTile::Storage));
  };
  auto multiply_ov = [&](int i) {  // dP = dO V^T
    const int stage = i % kStages;
    barrier_wait(v_full + 8 * stage, i / kStages % 2);
    multiply_transposed<OTile, VTile, VALUE_DIM, kParts>(ds[0], o_tile + group * 64 * 128,
                                                         v_tiles + stage * sizeof(VTile::Storage));
  };
  auto multiply_sk = [&](int i, int slice = 0) {  // dQ += dS K
    multiply<KTile>(
        first_if<SPLIT != 0>(part, dq[0]), rounded,
        k_tiles + i % kStages * sizeof(KTile::Storage) + slice * (kSlice / 64 * KTile::kSlabBytes),
        !SPLIT);
  };

  // It is done, or its first slice is.
  auto finish_sk = [&](int i) {
    if constexpr (SPLIT) {
#pragma unroll
      for (int slice = 0; slice < HEAD_DIM / kSlice; ++slice) {
        if (slice > 0) {
          multiply_sk(i, slice);
          wgmma_wait<0>();
        }
        add_rows(dq[0], part, slice * kSlice, undo);
      }
    }
    release(k_empty + 8 * (i % kStages), SPLIT);
  };
  // Of this thread's two rows; a row that does not exist must get P = 0. With SPLIT, factors of Q
  // and the scale, and of dO.
  float lse_log2[2], delta[2], of_q[2] = {}, of_dout[2] = {};
  float total[2] = {}, missed[2] = {};  // sums of P, with SPLIT, and what rounding took from them
  const long long row0 = first_row(p, work.batch, work.head, STATS_ROWS);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = work.q0 + fragment_row<1>(0, r);
    lse_log2[r] = row < p.sq ? static_cast<const float*>(p.lse_log2)[row0 + row] : kInfinity;
    delta[r] = row < p.sq ? static_cast<const float*>(p.delta)[row0 + row] : 0.0f;
    if (SPLIT && row < p.sq) {
      of_q[r] = p.q_factors[row0 + row] * static_cast<float>(p.scale);
      of_dout[r] = p.dout_factors[row0 + row];
    }
  }
  const int q0 = work.q0 + 64 * group;  // this warpgroup's
  const Bounds first = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift);
  const Bounds last = k_bounds(min(q0 + 64, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);
  // Factors of this thread's two keys of columns 8 n ...
  auto of_keys = [&](const float* all, int n) {
    return *reinterpret_cast<const float2*>(all + 8 * n + fragment_column());
  };
  auto scaled = [&](float (&c)[BLOCK_K / 8][4], const float (&of_row)[2], const float* of_column,
                    const float (&less)[2]) {
    undo_and_subtract<false>(
        c, of_row, [&](int n) { return of_keys(of_column, n); },
        [&](int) { return float2{less[0], less[1]}; });
  };
  auto exponentiate = [&](int n, int e) {
    if constexpr (SPLIT) {
      s[0][n][e] = exp2_approx(s[0][n][e] * kLog2e);
      return;
    }
    s[0][n][e] = exp2_approx(s[0][n][e] * scores.unit - lse_log2[e / 2]);
  };
  // From S and dP of a key block, under way, to dS as operands.
  auto differentiate = [&](int i) {
    const int k0 = first_key(i);
    const bool masked = k0 < last.lo || k0 + BLOCK_K > first.hi;
    auto mask = [&](float (&c)[1][BLOCK_K / 8][4], float hidden) {
      if (masked) apply_mask(c, work.q0, k0, p.sk, p.lo_shift, p.hi_shift, hidden);
    };
    wgmma_wait<1>();
    if constexpr (SPLIT)
      scaled(s[0], of_q, shared.k_factors[i % kStages], lse_log2);
    else
      scores.transform(s);
    mask(s, -kInfinity);
    // P beside dP, except with a softcap, whose slope needs the scores again, and registers are
    // few.
    if constexpr (SPLIT || !TRANSFORM) {
#pragma unroll
      for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) exponentiate(n, e);
    }
    if constexpr (SPLIT) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float more = missed[r];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n) more += s[0][n][2 * r] + s[0][n][2 * r + 1];
        const float sum = total[r] + more;
        missed[r] = more - (sum - total[r]);
        total[r] = sum;
      }
    }
    // Over long since, but no exponential is moved behind a loop, and they are to run beside dP.
    barrier_wait(q_full, 0);
    wgmma_wait<0>();
    if constexpr (SPLIT) scaled(ds[0], of_dout, shared.v_factors[i % kStages], delta);
    release(v_empty + 8 * (i % kStages), SPLIT);
    mask(ds, 0.0f);  // 0 times what they are may be NaN
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) {
      float2 of_key = {1, 1};
      if (SPLIT) of_key = of_keys(shared.k_factors[i % kStages], n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (SPLIT) {
          ds[0][n][e] *= s[0][n][e] * finite(element(of_key, e));
          continue;
        }
        const float slope = fmaxf(scores.slope(s[0][n][e]), 0.0f);  // -inf where masked
        if constexpr (TRANSFORM) exponentiate(n, e);
        ds[0][n][e] = s[0][n][e] * (ds[0][n][e] - delta[e / 2]) * slope;
      }
    }
    if constexpr (SPLIT) {
      float power[2];
      powers_for(ds[0], power, undo);
      split_to_operands(rounded, ds[0], power);
    } else {
      round_to_operands(rounded[0], ds[0]);
    }
  };

  clear(dq);
  if (blocks > 0) {
    barrier_wait(q_full, 0);
    multiply_qk(0);
    barrier_wait(o_full, 0);
    multiply_ov(0);
    differentiate(0);
    for (int i = 1; i < blocks; ++i) {
      multiply_sk(i - 1);
      multiply_qk(i);
      wgmma_wait<1>();
      finish_sk(i - 1);
      multiply_ov(i);
      differentiate(i);
    }
    multiply_sk(blocks - 1);
    wgmma_wait<0>();
    finish_sk(blocks - 1);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = work.q0 + fragment_row<1>(0, r);
    const float scale = static_cast<float>(p.scale);
    if constexpr (SPLIT) {
      const float weight = weight_for(quad_sum(total[r]), lse_log2[r]);
      const Head<float> to(p.dq, work.batch, work.head);
      if (row < p.sq) {
        if (fragment_column() == 0) p.weights[row0 + row] = weight;
        store_floats<VECTOR>(to, dq[0], r, weight * scale, row, p.d);
      }
    } else {
      store_row<VECTOR>(Slice(p.dq, work.batch, work.head), dq[0], r, scale, row, p.sq, p.d);
    }
  }
}
