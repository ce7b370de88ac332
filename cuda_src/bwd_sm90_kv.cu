// dK and dV for float16 and bfloat16 on Hopper, where they are too wide for bwd_sm90.cu: tensor
// copies and wgmma. bwd_sm90_q.cu computes dQ.
//
//   row_delta     delta and lse in base 2, of each head whole tiles of queries
//   bwd_sm90_kv   a block per 64 keys of a key/value head; queries stream past
//
// Two warpgroups compute, each one sum in registers, the third copies:
//   warpgroup 0   S^T = K Q^T, P^T = exp(S^T), dV += P^T dO
//   warpgroup 1   dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q
// Both are keys x queries, then keys x columns, and what becomes of the first product, rounded, is
// the left operand of the second as it lies. Only P goes through shared memory, as float32: thread
// i of warpgroup 0 writes what thread i of warpgroup 1 reads. The exponentials of the one, and dS
// of the other, run beside the other's products.
//
//   thread        waits for          then
//   copying       q_empty, o_empty   copies, which complete k_full, v_full, q_full, o_full
//   computing     k, v, q, o_full    products; a lane of each warp arrives at q_empty, o_empty
//   warpgroup 0   p_empty            writes P, arrives at p_full
//   warpgroup 1   p_full             reads it, arrives at p_empty
//
// With SPLIT arrays are float32, of which split.cu has made float16 numbers, as for fwd_sm90.cu.
// Powers of two are those of rows; a row of P or dS, times those of the queries it is multiplied
// with, is brought into float16's range by one for each tile. Sums over queries would be cut, not
// rounded: the product of a tile begins with 0, and is added to dV or dK on CUDA cores. lse is off
// by what float32 leaves of it, and so are all P of a row by the same factor: bwd_sm90_q, which
// comes before, has its inverse, as it finds it in the same S, bit for bit.
//
// Options: as bwd_sm90.cu, but for those about dS and dQ; SPLIT as in fwd_sm90.cu; P_STAGES
// (buffers for P); STATS_KEYS (rows of a head in k_factors and v_factors are filled up to a
// multiple of it). Source: Dao 2023, arXiv:2307.08691, algorithm 2, its sums over queries.
#include "softmax.cuh"
#include "split.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int BLOCK_K = 64;
constexpr int kComputing = 256, kThreads = kComputing + 128;
constexpr int kCopyingRegisters = 24, kComputingRegisters = 240;  // 168 each to begin with

#if SPLIT
using Stored = float;
#else
using Stored = ELEMENT;
#endif
constexpr int kParts = SPLIT == 2 ? 2 : 1;
using KTile = Tile<BLOCK_K, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using VTile = Tile<BLOCK_K, kParts * 64 * slabs(VALUE_DIM), kComputing>;
using QTile = Tile<BLOCK_Q, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using OTile = Tile<BLOCK_Q, kParts * 64 * slabs(VALUE_DIM), kComputing>;
// Numbers of a row: lse or delta; with SPLIT, the factor too, and with lse the weight.
using QRing = Ring<QTile, SPLIT ? 3 : 1>;
using ORing = Ring<OTile, SPLIT ? 2 : 1>;
using Work = KeyWork<BLOCK_K, BLOCK_Q>;

struct Shared {
  KTile::Storage k;
  VTile::Storage v;
  QRing q;
  ORing dout;
  __align__(16) float p[P_STAGES][BLOCK_Q / 8][128][4];
  Work work;
  unsigned long long k_full, v_full, p_full[P_STAGES], p_empty[P_STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, dout;
};

// What one of the two computing warpgroups does: of keys A and the ring B it makes the first
// product, of that and the ring C the sum.
template <bool kFirst, int kWidth, class ATile, class BRing, class CRing>
DEVICE void compute(const Params& p, Shared& shared, unsigned a_tile, unsigned a_full,
                    const BRing& b_ring, const CRing& c_ring, const Array& to, float factor,
                    int width, const float* row_factors) {
  using BTile = typename BRing::Tile;
  using CTile = typename CRing::Tile;
  constexpr int kDepth = kFirst ? HEAD_DIM : VALUE_DIM;
  const Work& work = shared.work;  // there, and not in registers
  const Scores scores(p.scale, p.softcap);
  const unsigned p_full = shared_address(&shared.p_full);
  const unsigned p_empty = shared_address(&shared.p_empty);
  const unsigned p_tiles = shared_address(&shared.p) + threadIdx.x % 128 * 16;
  float x[1][BLOCK_Q / 8][4], sum[1][kWidth / 8][4];
  // Of a tile, with SPLIT, so many columns at a time.
  constexpr int kSlice = SPLIT && kWidth > 128 ? 64 : kWidth;
  static_assert(kWidth % kSlice == 0, "whole slices");
  float part[kSlice / 8][4];
  unsigned rounded[kParts][BLOCK_Q / 16][4];
  float of_row[2] = {}, undo[2];   // with SPLIT, factors of rows of A, and of what is rounded
  auto multiply_ab = [&](int i) {  // start A B^T
    b_ring.wait(i);
    multiply_transposed<ATile, BTile, kDepth, kParts, true>(x[0], a_tile, b_ring.tile(i));
  };
  auto accumulate = [&](int i, int slice = 0) {
    c_ring.wait(i);
    multiply<CTile>(first_if<SPLIT != 0>(part, sum[0]), rounded,
                    c_ring.tile(i) + slice * (kSlice / 64 * CTile::kSlabBytes), !SPLIT);
  };
  // It is done, or its first slice is.
  auto finish = [&](int i) {
    if constexpr (SPLIT) {
#pragma unroll
      for (int slice = 0; slice < kWidth / kSlice; ++slice) {
        if (slice > 0) {
          accumulate(i, slice);
          wgmma_wait<0>();
        }
        add_rows(sum[0], part, slice * kSlice, undo);
      }
    }
    c_ring.release(i);
  };

  clear(sum);
  const int total = work.total;
  int q_head = work.head * p.group, q0 = work.q_last;
  if constexpr (SPLIT) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = work.k0 + fragment_row<1>(0, r) - (kFirst ? 0 : 64);
      if (key < p.sk) of_row[r] = row_factors[key] * (kFirst ? static_cast<float>(p.scale) : 1.0f);
    }
  }
  // From the first product to P, or from the other one and P to dS; as an operand.
  auto elementwise = [&](int i) {
    const bool masked = q0 < work.queries(p, min(work.k0 + BLOCK_K, p.sk) - 1).lo ||
                        q0 + BLOCK_Q > work.queries(p, work.k0).hi || work.k0 + BLOCK_K > p.sk;
    auto mask = [&](float hidden) {
      if (!masked) return;
      const int row0 = work.k0 - (kFirst ? 0 : 64);  // rows are counted through the block
      apply_mask(x, AllColumns<1>(), row0, q0, hidden,
                 [&](int key) { return key < p.sk ? work.queries(p, key) : Bounds{0, 0}; });
    };
    const unsigned p_tile = p_tiles + i % P_STAGES * sizeof(shared.p[0]);
    if constexpr (SPLIT) {  // S - lse, or dP - delta
      undo_and_subtract<true>(
          x[0], of_row, [&](int n) { return b_ring.pair(i, n, 1); },
          [&](int n) { return b_ring.pair(i, n); });
      c_ring.wait(i);  // for its factors
    }
    if constexpr (kFirst) {
      if constexpr (!SPLIT) scores.transform(x);
      mask(-kInfinity);
      barrier_wait(p_empty + 8 * (i % P_STAGES), i / P_STAGES % 2 ^ 1);
    } else {
      mask(0.0f);  // keys that do not exist must not reach anything: 0 times NaN
      barrier_wait(p_full + 8 * (i % P_STAGES), i / P_STAGES % 2);
    }
#pragma unroll
    for (int n = 0; n < BLOCK_Q / 8; ++n) {
      const float2 number = SPLIT ? c_ring.pair(i, n, 1) : b_ring.pair(i, n);
      const float2 weight = SPLIT && kFirst ? b_ring.pair(i, n, 2) : float2{1, 1};
      const unsigned at = p_tile + n * 128 * 16;
      float other[4];
      if constexpr (!kFirst) load_shared16(other, at);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of_column = element(number, e);
        float& y = x[0][n][e];
        if constexpr (SPLIT) {
          if constexpr (kFirst)
            other[e] = exp2_approx(y * kLog2e) * element(weight, e), y = other[e];
          else
            y *= other[e];
          y *= finite(of_column);
        } else if constexpr (kFirst) {
          const float slope = fmaxf(scores.slope(y), 0.0f);  // -inf where masked
          y = exp2_approx(y * scores.unit - of_column);
          other[e] = y * slope;
        } else {
          y = other[e] * (y - of_column);
        }
      }
      if constexpr (kFirst) store_shared16(at, other);
    }
    __syncwarp();
    release((kFirst ? p_full : p_empty) + 8 * (i % P_STAGES));
    if constexpr (SPLIT) {
      float power[2];
      powers_for(x[0], power, undo);
      split_to_operands(rounded, x[0], power);
    } else {
      round_to_operands(rounded[0], x[0]);
    }
  };

  if (total > 0) {
    barrier_wait(a_full, 0);
    multiply_ab(0);
    wgmma_wait<0>();
    elementwise(0);
    for (int i = 1; i < total; ++i) {
      work.step(q0, q_head);
      accumulate(i - 1);
      b_ring.release(i - 1);  // its numbers have been loaded: they are in what is multiplied now
      multiply_ab(i);
      wgmma_wait<1>();
      finish(i - 1);  // early: what is copied there next is needed in the next turn
      wgmma_wait<0>();
      elementwise(i);
    }
    accumulate(total - 1);
    wgmma_wait<0>();
    finish(total - 1);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = work.k0 + fragment_row<1>(0, r) - (kFirst ? 0 : 64);
    if constexpr (SPLIT) {
      const Head<float> rows(to, work.batch, work.head);
      if (key < p.sk) store_floats<VECTOR>(rows, sum[0], r, factor, key, width);
    } else {
      store_row<VECTOR>(Slice(to, work.batch, work.head), sum[0], r, factor, key, p.sk, width);
    }
  }
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<Stored, BLOCK_Q>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    bwd_sm90_kv(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);
  const unsigned k_full = shared_address(&shared.k_full), v_full = shared_address(&shared.v_full);
  if (threadIdx.x == kComputing) {
    prefetch(maps.q), prefetch(maps.k), prefetch(maps.v), prefetch(maps.dout);
    barrier_init(k_full, 1), barrier_init(v_full, 1);
    shared.q.init(8), shared.dout.init(8);
    for (int i = 0; i < P_STAGES; ++i) {
      barrier_init(shared_address(&shared.p_full[i]), 4);
      barrier_init(shared_address(&shared.p_empty[i]), 4);
    }
    barrier_init_fence();
    shared.work = Work(p, blockIdx.x);
  }
  __syncthreads();

  const int group = warpgroup();
  const long long row0 =
      SPLIT ? first_kv_row<STATS_KEYS>(p, shared.work.batch, shared.work.head) : 0;
  if (group == 0) {
    registers_raise<kComputingRegisters>();
    compute<true, VALUE_DIM, KTile>(p, shared, k_tile, k_full, shared.q, shared.dout, p.dv, 1.0f,
                                    p.v_width, p.k_factors + row0);
  } else if (group == 1) {
    registers_raise<kComputingRegisters>();
    compute<false, HEAD_DIM, VTile>(p, shared, v_tile, v_full, shared.dout, shared.q, p.dk, p.scale,
                                    p.d, p.v_factors + row0);
  } else {
    registers_lower<kCopyingRegisters>();
    const Work& work = shared.work;
    if (threadIdx.x > kComputing || work.total == 0) return;
    load<KTile>(k_tile, maps.k, k_full, work.k0, work.head, work.batch);
    int q_head = work.head * p.group, q0 = work.q_last;
    auto copy_q = [&](int i) {
#if SPLIT
      shared.q.copy(i, maps.q, p, q0, q_head, work.batch, p.lse_log2, p.q_factors, p.weights);
#else
      shared.q.copy(i, maps.q, p, q0, q_head, work.batch, p.lse_log2);
#endif
    };
    auto copy_dout = [&](int i) {
#if SPLIT
      shared.dout.copy(i, maps.dout, p, q0, q_head, work.batch, p.delta, p.dout_factors);
#else
      shared.dout.copy(i, maps.dout, p, q0, q_head, work.batch, p.delta);
#endif
    };
    for (int i = 0; i < work.total; ++i, work.step(q0, q_head)) {
      copy_q(i);
      if (i == 0) load<VTile>(v_tile, maps.v, v_full, work.k0, work.head, work.batch);
      copy_dout(i);
    }
  }
}
