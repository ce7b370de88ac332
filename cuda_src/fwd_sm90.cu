// Forward on Hopper, by tensor copies (TMA) and wgmma: of float16 and bfloat16, and of float32 that
// split.cu has made float16 of.
//
// Grid: as many blocks as multiprocessors. Each takes query tiles in the order that struct Work
// gives: every gridDim-th, or under a mask, where they differ, the next that nobody has. Of its
// warpgroups the last one copies: one thread keeps Q, K and V tiles coming, K and V into rings of
// STAGES buffers, and is ahead of the others, into the next query tile too. Each of the others
// computes 64 queries; the softmax of a key block runs beside P V of the block before it.
//
//   thread       waits for                      then
//   copying      q_empty, k_empty, v_empty      copies, which complete q_full, k_full, v_full
//   computing    q_full, k_full, v_full         products; a lane of each warp arrives at *_empty
//   named barrier 1 + w: warpgroup w agrees on whether a maximum rose too far
//
// Maxima are looked for in the first key block alone; in later ones exponentials are taken with the
// maxima as they are, and only where one of those is too large (never, on normal numbers) Q K^T is
// computed again, and the maxima are looked for in the blocks after it too, 8 at first, then 128.
// The bits are the same either way, as softmax.cuh says.
//
// With SPLIT operands are float16 times powers of two, of which a row of Q or K has one, and a
// column of V one for each key block. With SPLIT 2 they are two float16 each, high + low, which
// hold 23 bits. Of a product's four the smallest is left out. P is split in registers. Sums that
// grow with the number of keys would be cut, not rounded, at every step: P V of a key block begins
// with 0, and is added to the output on CUDA cores. Maxima never lag, and are subtracted before
// anything is scaled.
//
// Options: ELEMENT (Half | BFloat16), SPLIT (0: 16-bit arrays; 1, 2: split.cu), HEAD_DIM, VALUE_DIM
// (widths padded to 32), BLOCK_Q (64 a computing warpgroup), BLOCK_K, STAGES, Q_STAGES (buffers for
// Q), TRANSFORM (softmax.cuh), VECTOR (1: `out` has a tensor map, and goes through shared memory;
// 0: any strides). Source: Shah et al. 2024, arXiv:2407.08608, algorithms 1 and 2.
#include "hopper.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int kGroups = BLOCK_Q / 64;
constexpr int kComputing = 128 * kGroups, kThreads = kComputing + 128;
static_assert(BLOCK_Q % 64 == 0 && BLOCK_K % 16 == 0, "tiles of wgmma");

// Of the 65,536 registers: as few for the copying warpgroup as it can do with.
constexpr bool kMany = SPLIT || VALUE_DIM > 224;
constexpr int kCopyingRegisters = kGroups == 3 ? 32 : kMany ? 40 : 56;
constexpr int kComputingRegisters = kGroups == 3 ? 160 : kMany ? 232 : 224;
static_assert(kCopyingRegisters + kGroups * kComputingRegisters <=
                  65536 / 128 / (kGroups + 1) / 8 * 8 * (kGroups + 1),
              "else it hangs");

// Parts of an operand lie side by side.
constexpr int kParts = SPLIT == 2 ? 2 : 1;
using QTile = Tile<BLOCK_Q, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using KTile = Tile<BLOCK_K, kParts * 64 * slabs(HEAD_DIM), kComputing>;
using VTile = Tile<BLOCK_K, kParts * 64 * slabs(VALUE_DIM), kComputing>;

// Of the output of a warpgroup, slabs of 64 columns, by turns; with SPLIT it is not used.
using OutTile = Tile<SPLIT ? 8 : 64, 64 * (VALUE_DIM > 64 && !SPLIT ? 2 : 1), 128>;

// Columns of P V at a time, with SPLIT: it and the output have registers of their own.
constexpr int kSlice = SPLIT && VALUE_DIM > 128 ? 64 : VALUE_DIM;
static_assert(VALUE_DIM % kSlice == 0, "whole slices");

// Factors of a tile; without SPLIT there are none.
constexpr int kQFactors = SPLIT ? BLOCK_Q : 4, kKFactors = SPLIT ? BLOCK_K : 4;
constexpr int kVFactors = SPLIT ? 64 * slabs(VALUE_DIM) : 4;

using Work = QueryWork<BLOCK_Q, BLOCK_K>;
using Softmax = OnlineSoftmax<1, SPLIT != 0>;

struct Shared {
  OutTile::Storage out[kGroups];
  QTile::Storage q[Q_STAGES];
  KTile::Storage k[STAGES];
  VTile::Storage v[STAGES];
  __align__(16) float q_factors[Q_STAGES][kQFactors];
  float k_factors[STAGES][kKFactors], v_factors[STAGES][kVFactors];
  int patience[kGroups];  // how long a warpgroup will be wary when it has erred next
  Work work[Q_STAGES];    // that q is for
  unsigned long long q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES],
      v_full[STAGES], v_empty[STAGES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, out;
};

constexpr int kFactorBytes = SPLIT ? 4 : 0;

// Of tile `tile` of all.
template <int kCount>
DEVICE void load_factors(const float* to, const float* all, long long tile, unsigned barrier) {
  bulk_load(shared_address(to), all + tile * kCount, barrier, 4 * kCount);
}

// What needs no output yet: write lse; 1 / the sums; and the warpgroup's buffer is free. `copies`:
// this thread starts its tensor copies.
DEVICE void finish(const Params& p, const Work& work, Softmax& softmax, float unit, bool copies,
                   float (&inverse)[2]) {
  float* lse = static_cast<float*>(p.lse) + first_row(p, work.batch, work.head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_lse;
    inverse[r] = softmax.finish(0, r, unit, row_lse);
    const int row = work.q0 + fragment_row<1>(0, r);
    if (fragment_column() == 0 && row < p.sq) lse[row] = row_lse;
  }
  if constexpr (VECTOR && !SPLIT) {
    if (copies) bulk_wait_read();
    named_sync(1 + threadIdx.x / 128, 128);
  }
}

// Normalise and write the output, by way of the buffer `tile`.
DEVICE void store(const Params& p, const TensorMap& map, unsigned tile, bool copies,
                  const Work& work, int group, const float (&o)[1][VALUE_DIM / 8][4],
                  const float (&inverse)[2]) {
  if constexpr (SPLIT) {
    const Head<float> out(p.out, work.batch, work.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.q0 + fragment_row<1>(0, r);
      if (row < p.sq) store_floats<VECTOR>(out, o[0], r, inverse[r], row, p.v_width);
    }
  } else if constexpr (VECTOR) {
#pragma unroll
    for (int slab = 0; slab < slabs(VALUE_DIM); ++slab) {
      const unsigned buffer = tile + slab % 2 * OutTile::kSlabBytes;
      const unsigned origin = stored_origin<OutTile>(buffer);
#pragma unroll
      for (int i = 4 * slab; i < min(4 * slab + 4, VALUE_DIM / 16); ++i)
        store_columns<OutTile>(origin, i % 4, o[0], i, inverse);
      fence_async();
      // The other buffer is what the next slab is written to.
      if (copies && 0 < slab && slab + 1 < slabs(VALUE_DIM)) bulk_wait_read();
      named_sync(1 + group, 128);
      if (copies) tensor_store(map, buffer, slab * 64, work.q0 + 64 * group, work.head, work.batch);
    }
  } else {
    const Slice out(p.out, work.batch, work.head);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_row<false>(out, o[0], r, inverse[r], work.q0 + fragment_row<1>(0, r), p.sq, p.v_width);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fwd_sm90(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned q_tiles = shared_address(&shared.q);
  const unsigned k_tiles = shared_address(&shared.k), v_tiles = shared_address(&shared.v);
  const unsigned q_full = shared_address(&shared.q_full);
  const unsigned q_empty = shared_address(&shared.q_empty);
  const unsigned k_full = shared_address(&shared.k_full), v_full = shared_address(&shared.v_full);
  const unsigned k_empty = shared_address(&shared.k_empty);
  const unsigned v_empty = shared_address(&shared.v_empty);

  if (threadIdx.x == kComputing) {
    prefetch(maps.q), prefetch(maps.k), prefetch(maps.v);
    if (VECTOR && !SPLIT) prefetch(maps.out);
    for (int i = 0; i < Q_STAGES; ++i)
      barrier_init(q_full + 8 * i, 1), barrier_init(q_empty + 8 * i, 4 * kGroups);
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(k_full + 8 * i, 1), barrier_init(v_full + 8 * i, 1);
      barrier_init(k_empty + 8 * i, 4 * kGroups), barrier_init(v_empty + 8 * i, 4 * kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  // Numbers of the query tile and of the key block in this block's life.
  unsigned job = 0, turn = 0;

  if (threadIdx.x >= kComputing) {
    registers_lower<kCopyingRegisters>();
    if (threadIdx.x > kComputing) return;
    for (int index = blockIdx.x;;) {
      const Work work(p, index);
      const int blocks = work.blocks;
      const int kv_head = work.head / p.group, slot = job % Q_STAGES;
      const int first_tile = SPLIT ? kv_tile<BLOCK_K>(p, work.batch, kv_head) + work.k_begin : 0;
      // From the last key block to the first: a ragged end comes when all is still to do. K goes
      // before Q, whose buffer may still be in use, and before the V of the block before.
#if SPLIT
#pragma unroll 1  // else up to 100 bytes are spilled
#endif
      for (int i = 0; i <= blocks; ++i) {
        const int row = (work.k_begin + blocks - 1 - i) * BLOCK_K;
        if (i < blocks) {
          const unsigned stage = (turn + i) % STAGES;
          barrier_wait(k_empty + 8 * stage, (turn + i) / STAGES % 2 ^ 1);
          load<KTile>(k_tiles + stage * sizeof(KTile::Storage), maps.k, k_full + 8 * stage, row,
                      kv_head, work.batch, kFactorBytes * kKFactors);
          if (SPLIT)
            load_factors<kKFactors>(shared.k_factors[stage], p.k_factors,
                                    first_tile + blocks - 1 - i, k_full + 8 * stage);
        }
        if (i == 0) {
          barrier_wait(q_empty + 8 * slot, job / Q_STAGES % 2 ^ 1);
          shared.work[slot] = work;
          if (blocks > 0) {
            load<QTile>(q_tiles + slot * sizeof(QTile::Storage), maps.q, q_full + 8 * slot, work.q0,
                        work.head, work.batch, kFactorBytes * kQFactors);
            if (SPLIT)
              load_factors<kQFactors>(shared.q_factors[slot], p.q_factors,
                                      q_tile<BLOCK_Q>(p, work.batch, work.head, work.q0),
                                      q_full + 8 * slot);
          } else {
            barrier_arrive(q_full + 8 * slot);
          }
        } else {
          const unsigned stage = (turn + i - 1) % STAGES;
          barrier_wait(v_empty + 8 * stage, (turn + i - 1) / STAGES % 2 ^ 1);
          load<VTile>(v_tiles + stage * sizeof(VTile::Storage), maps.v, v_full + 8 * stage,
                      row + BLOCK_K, kv_head, work.batch, kFactorBytes * kVFactors);
          if (SPLIT)
            load_factors<kVFactors>(shared.v_factors[stage], p.v_factors, first_tile + blocks - i,
                                    v_full + 8 * stage);
        }
      }
      if (work.q0 < 0) return;
      turn += blocks, ++job;
      index = gridDim.x + (p.tickets ? count_up_from(p.tickets) : index);
    }
  }
  registers_raise<kComputingRegisters>();

  // With SPLIT it spilled 12 bytes otherwise.
  const int group = SPLIT ? threadIdx.x / 128 : warpgroup();
  const bool copies = threadIdx.x % 128 == 0;  // for its warpgroup
  const Scores scores(p.scale, p.softcap);
  float s[1][BLOCK_K / 8][4], o[1][VALUE_DIM / 8][4];
  float part[kSlice / 8][4];  // P V of a block, with SPLIT, kSlice columns at a time
  unsigned probabilities[kParts][BLOCK_K / 16][4];
  auto wait_for_k = [&] { barrier_wait(k_full + 8 * (turn % STAGES), turn / STAGES % 2); };
  // Start S = Q K^T.
  auto multiply_qk = [&] {
    multiply_transposed<QTile, KTile, HEAD_DIM, kParts>(
        s[0], q_tiles + job % Q_STAGES * sizeof(QTile::Storage) + group * 64 * 128,
        k_tiles + turn % STAGES * sizeof(KTile::Storage));
  };
  // Start O += P V, for the block of the turn before; with SPLIT, a slice of it.
  bool adds = false;  // else O = P V
  auto multiply_pv = [&](int slice = 0) {
    const int stage = (turn - 1) % STAGES;
    barrier_wait(v_full + 8 * stage, (turn - 1) / STAGES % 2);
    multiply<VTile>(
        first_if<SPLIT != 0>(part, o[0]), probabilities,
        v_tiles + stage * sizeof(VTile::Storage) + slice * (kSlice / 64 * VTile::kSlabBytes),
        !SPLIT && adds);
    adds = true;
  };
  // It is done: its buffer is free.
  auto finish_pv = [&] {
    const int stage = (turn - 1) % STAGES;
    wgmma_wait<0>();
    if (SPLIT) {
#pragma unroll
      for (int slice = 0; slice < VALUE_DIM / kSlice; ++slice) {
        if (slice > 0) {
          multiply_pv(slice);
          wgmma_wait<0>();
        }
        add_scaled(o[0], part, slice * kSlice, shared.v_factors[stage]);
      }
    }
    release(v_empty + 8 * stage, SPLIT);
  };
  auto round = [&] {
    if constexpr (SPLIT)
      split_to_operands(probabilities, s[0], {kOfProbabilities, kOfProbabilities});
    else
      round_to_operands(probabilities[0], s[0]);
  };

  int wary = 0;  // key blocks for which maxima are looked for
  if (copies) shared.patience[group] = 8;

  for (;; ++job) {
    const int slot = job % Q_STAGES;
    barrier_wait(q_full + 8 * slot, job / Q_STAGES % 2);
    const Work& work = shared.work[slot];  // there, and not in registers
    if (work.q0 < 0) break;
    const int k_stop = work.k_begin * BLOCK_K;
    int k0 = k_stop + (work.blocks - 1) * BLOCK_K;
    // Keys that some and keys that all queries of this warpgroup see.
    const int row0 = work.q0 + 64 * group;
    const Bounds first = k_bounds(row0, p.sk, p.lo_shift, p.hi_shift);
    const Bounds last = k_bounds(min(row0 + 64, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift);
    for (; k0 >= k_stop && (k0 >= last.hi || row0 >= p.sq); k0 -= BLOCK_K, ++turn) {
      const int stage = turn % STAGES;
      // All lanes have seen a phase before the next may begin. With one stage V comes after the
      // next K.
      barrier_wait(k_full + 8 * stage, turn / STAGES % 2);
      __syncwarp();
      release(k_empty + 8 * stage);
      barrier_wait(v_full + 8 * stage, turn / STAGES % 2);
      __syncwarp();
      release(v_empty + 8 * stage);
    }
    Softmax softmax;
    adds = false;
    if (SPLIT) clear(o);
    wary = max(wary, 1);  // no maximum is known yet
    auto mask = [&] {
      if (SPLIT) scale_scores(s[0], shared.q_factors[slot], shared.k_factors[turn % STAGES]);
      scores.transform(s);
      if (k0 < last.lo || k0 + BLOCK_K > first.hi)
        apply_mask(s, work.q0, k0, p.sk, p.lo_shift, p.hi_shift, -kInfinity);
    };
    auto exponentiate = [&] {  // after a look at the maxima
      softmax.raise(s, scores.unit);
      softmax.exponentiate<true>(s, scores.unit);
      if (SPLIT) return;
      wary = named_any(1 + group, 128, !softmax.settled(scores.unit)) ? 1 : wary - 1;
    };
    // Without one, and where that proves wrong, S once more.
    auto try_exponentiate = [&] {
      softmax.exponentiate<false>(s, scores.unit);
      softmax.rose = false;
      if (!named_any(1 + group, 128, !softmax.calm())) return;
      multiply_qk();
      wgmma_wait<0>();
      mask();
      wary = shared.patience[group];
      named_sync(1 + group, 128);
      if (copies) shared.patience[group] = min(16 * wary, 1 << 20);
      exponentiate();
    };

    auto leave = [&] {
      const Work copy = work;
      release(q_empty + 8 * slot, true);
      return copy;
    };
    Work done;
    float inverse[2];
    if (k0 >= k_stop) {
      wait_for_k();
      multiply_qk();
      wgmma_wait<0>();
      mask();
      exponentiate();
      softmax.add();
      release(k_empty + 8 * (turn % STAGES), SPLIT);
      round();
      ++turn;
      for (k0 -= BLOCK_K; k0 >= k_stop; k0 -= BLOCK_K, ++turn) {
        wait_for_k();
        multiply_qk();
        multiply_pv();
        wgmma_wait<1>();
        mask();
        if (SPLIT || wary)
          exponentiate();
        else
          try_exponentiate();
        softmax.add();
        release(k_empty + 8 * (turn % STAGES), SPLIT);
        finish_pv();
        softmax.rescale(o);
        round();
      }
      multiply_pv();
      done = leave();
      finish(p, done, softmax, scores.unit, copies, inverse);
      finish_pv();
    } else {
      clear(o);
      done = leave();
      finish(p, done, softmax, scores.unit, copies, inverse);
    }
    store(p, maps.out, shared_address(&shared.out[group]), copies, done, group, o, inverse);
  }
  if (VECTOR && copies) bulk_wait_read();  // shared memory must last as long
}
