// Backward for float16 and bfloat16 on Hopper, of widths up to 128: tensor copies and wgmma.
//
//   row_delta  delta and lse in base 2, of each head whole tiles of queries
//   bwd_sm90   as many blocks as multiprocessors, each with 128 keys of a key/value head, and then
//              the next that nobody has. dK and dV stay in registers, queries stream past, and what
//              they get from these keys is added to float32 dQ in memory
//   store_dq   a block per tile of queries: dQ times the scale, as 16-bit numbers
//
// Two warpgroups compute, 64 keys each; of the third, one thread copies and two add to dQ:
//   S^T = K Q^T, dP^T = V dO^T    keys x queries, both operands in shared memory
//   dV += P^T dO, dK += dS^T Q    what the two became, rounded, is the left operand as it lies
//   dQ^T = K^T dS^T               of all 128 keys: dS goes through shared memory, a query a row
// Of dQ^T a warpgroup makes what belongs to 64 columns of the head, or with a head of no more to 64
// of the 128 queries.
//
//   thread       waits for                 then
//   copying      work_empty                says what the work is, arrives at work_full
//                kv_, q_, o_empty          copies, which complete k_full, v_full, q_full, o_full
//   computing    k, v, q, o_full           products; a lane of each warp arrives at *_empty
//                dq_empty                  writes its part of dQ, arrives at dq_full
//   adding       work_full                 arrives at work_empty
//                dq_full                   adds that to dQ in memory, arrives at dq_empty
//   named barriers: 1, the computing ones: dS is there, or may be written; 2 + w: warpgroup w; 4:
//   dQ of the first has begun
//
// What a computing warpgroup does in a tile of queries (+ what runs meanwhile):
//   S and dP begin; dQ of the tile before is passed on (+ S); P = exp(S) (+ dP), and half of dV
//   begins; dS (+ dV), and the rest begins; dQ and dK begin; dQ is put away (+ dK)
// Of 128 queries it is 64 and 64: the second P (+ dV and dK of the first half).
//
// The first block at a tile of dQ stores, and others add once that is there, so that only counters
// must begin as zeros. With p.in_turns they add in the order of their keys, as in bwd_sm80.cu, so
// that results repeat bit for bit. Without p.counters dQ begins as zeros, and nobody waits. Those
// that wait for other blocks are the adding threads only.
//
// Options: ELEMENT, HEAD_DIM, VALUE_DIM (padded to 32), BLOCK_Q (128; or 64 or 80, with HEAD_DIM of
// two slabs), DQ_STAGES (buffers for dQ, 1 or 2), TRANSFORM (softmax.cuh), VECTOR (as in
// fwd_sm80.cu).
// Source: Dao 2023, arXiv:2307.08691, algorithm 2; Shah et al. 2024, arXiv:2407.08608.
#include "softmax.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int kGroups = 2, kComputing = 128 * kGroups, kThreads = kComputing + 128;
constexpr int BLOCK_K = 64 * kGroups;
constexpr int kCopyingRegisters = 24, kComputingRegisters = 240;  // 168 each to begin with

using KTile = Tile<BLOCK_K, 64 * slabs(HEAD_DIM), kComputing>;
using VTile = Tile<BLOCK_K, 64 * slabs(VALUE_DIM), kComputing>;
using QTile = Tile<BLOCK_Q, 64 * slabs(HEAD_DIM), kComputing>;
using OTile = Tile<BLOCK_Q, 64 * slabs(VALUE_DIM), kComputing>;
using STile = Tile<BLOCK_Q, BLOCK_K, kComputing>;  // dS
using Work = KeyWork<BLOCK_K, BLOCK_Q>;

constexpr bool kTwoSlabs = slabs(HEAD_DIM) == 2;
static_assert(kTwoSlabs ? BLOCK_Q <= 80 : BLOCK_Q == 128, "what registers hold");
// Of dQ^T, what a warpgroup computes: 64 columns of the head by so many queries.
constexpr int kDqQueries = kTwoSlabs ? BLOCK_Q : 64;
constexpr int kDqPart = 64 * kDqQueries;  // numbers
// Of so many steps of 16 queries P and dS are made at a time: of 128 queries in two halves, as P
// both rounded and not is more than registers hold. `half` is the first step of one.
constexpr int kSteps = (kTwoSlabs ? BLOCK_Q : 64) / 16, kLastHalf = BLOCK_Q / 16 - kSteps;
// dV of so many steps begins before dS, and only then are the others rounded: 2 % faster than all
// before or after. With 80 queries there are no registers for any. With 64 and scores that are
// transformed, P of which is rounded at once, 2 spilled 16 bytes more.
constexpr int kEarly = BLOCK_Q == 80 ? 0 : BLOCK_Q == 64 && TRANSFORM ? 3 : 2;

struct Shared {
  KTile::Storage k;
  VTile::Storage v;
  Ring<QTile> q;
  Ring<OTile> dout;
  STile::Storage ds[2];
  __align__(16) float dq[DQ_STAGES][kGroups][kDqPart];
  Work work[2];
  unsigned long long k_full, v_full, kv_empty, work_full[2], work_empty[2], dq_full[2],
      dq_empty[DQ_STAGES];
};
static_assert(sizeof(STile::Storage) >= 64 * 128 * 2, "dK or dV of a warpgroup fits");
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, dout, dk, dv;
};

// Write a warpgroup's rows of dK or dV, from row k0 on. `tile`: where they fit in shared memory,
// and nobody reads any more; `copies`: this thread starts the tensor copies.
template <int kWidth>
DEVICE void store(const Array& array, const TensorMap& map, unsigned tile, bool copies, int k0,
                  int head, int batch, const float (&c)[kWidth / 8][4], float factor, int rows,
                  int width) {
  // Not handed over: that took a register, and with 80 queries no dS was stored before the last.
  const int group = warpgroup();
  if constexpr (VECTOR) {
    using Rows = Tile<64, 64 * slabs(kWidth), 128>;
    const float factors[2] = {factor, factor};
    const unsigned origin = stored_origin<Rows>(tile);
    if (copies) bulk_wait_read();  // what was there before has been read
    named_sync(2 + group, 128);
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) store_columns<Rows>(origin, i, c, i, factors);
    fence_async();
    named_sync(2 + group, 128);
    if (!copies) return;
#pragma unroll
    for (int slab = 0; slab < slabs(kWidth); ++slab)
      tensor_store(map, tile + slab * Rows::kSlabBytes, slab * 64, k0 + 64 * group, head, batch);
  } else {
    const Slice to(array, batch, head);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_row<false>(to, c, r, factor, k0 + fragment_row<1>(0, r), rows, width);
  }
}

DEVICE Work uniform(const Work& work) {
  Work x;
  x.head = uniform(work.head), x.batch = uniform(work.batch), x.k0 = uniform(work.k0);
  x.q_first = uniform(work.q_first), x.q_last = uniform(work.q_last);
  x.total = uniform(work.total);
  return x;
}

// Where a tile of dQ begins in memory: its warpgroups' fragments one after another, of each the
// four numbers of each thread.
DEVICE float* dq_sum(const Params& p, int tile) {
  return p.dq_sum + static_cast<long long>(tile) * (kGroups * kDqPart);
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<ELEMENT, BLOCK_Q>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    bwd_sm90(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);
  const unsigned ds_tiles = shared_address(&shared.ds), dq_parts = shared_address(&shared.dq);
  const unsigned k_full = shared_address(&shared.k_full), v_full = shared_address(&shared.v_full);
  const unsigned kv_empty = shared_address(&shared.kv_empty);
  const unsigned work_full = shared_address(&shared.work_full);
  const unsigned work_empty = shared_address(&shared.work_empty);
  const unsigned dq_full = shared_address(&shared.dq_full);
  const unsigned dq_empty = shared_address(&shared.dq_empty);

  if (threadIdx.x == kComputing) {
    prefetch(maps.q), prefetch(maps.k), prefetch(maps.v), prefetch(maps.dout);
    barrier_init(k_full, 1), barrier_init(v_full, 1), barrier_init(kv_empty, 4 * kGroups);
    shared.q.init(4 * kGroups), shared.dout.init(4 * kGroups);
    for (int i = 0; i < 2; ++i) {
      barrier_init(work_full + 8 * i, 1), barrier_init(work_empty + 8 * i, 4 * kGroups + 2);
      barrier_init(dq_full + 8 * i, 4 * kGroups);
    }
    for (int i = 0; i < DQ_STAGES; ++i) barrier_init(dq_empty + 8 * i, 1);
    barrier_init_fence();
  }
  __syncthreads();
  // Tiles of queries are numbered through the block's life. What a tile of keys is stays in shared
  // memory, and not in registers.
  unsigned i = 0;

  if (threadIdx.x >= kComputing) {
    registers_lower<kCopyingRegisters>();
    // Loops here are not unrolled: these 24 registers would not do.
    const int role = threadIdx.x / 32 - kComputing / 32;
    if (threadIdx.x % 32) return;
    if (role == 0) {
#pragma unroll 1
      for (int job = 0;; ++job) {
        Work& work = shared.work[job % 2];
        barrier_wait(work_empty + 8 * (job % 2), job / 2 % 2 ^ 1);
        // In the order in which blocks ask for them, so that none waits for a turn of one that has
        // not begun.
        work = Work(p, count_up_from(p.tickets));
        barrier_arrive(work_full + 8 * (job % 2));
        int q_head = work.head * p.group, q0 = work.q_last;
        if (work.total > 0) shared.q.copy(i, maps.q, p, q0, q_head, work.batch, p.lse_log2);
        barrier_wait(kv_empty, job % 2 ^ 1);
        if (work.total > 0) {
          load<KTile>(k_tile, maps.k, k_full, work.k0, work.head, work.batch);
          load<VTile>(v_tile, maps.v, v_full, work.k0, work.head, work.batch);
        } else {
          barrier_arrive(k_full), barrier_arrive(v_full);
        }
        if (work.total < 0) return;
#pragma unroll 1
        for (int n = 0; n < work.total; ++n, ++i, work.step(q0, q_head)) {
          if (n > 0) shared.q.copy(i, maps.q, p, q0, q_head, work.batch, p.lse_log2);
          shared.dout.copy(i, maps.dout, p, q0, q_head, work.batch, p.delta);
        }
      }
    } else if (role <= 2) {
      // Every other tile each: one waits until its numbers are added while the other adds.
      const unsigned parity = role - 1;
#pragma unroll 1
      for (int job = 0;; ++job) {
        // Not k_full, which may be two phases on: a tile of keys with one tile of queries is over
        // while this thread still waits for its tile of the keys before.
        barrier_wait(work_full + 8 * (job % 2), job / 2 % 2);
        const Work& work = shared.work[job % 2];
        if (work.total < 0) return;
        int q_head = work.head * p.group, q0 = work.q_last;
#pragma unroll 1
        for (const unsigned end = i + work.total; i != end; ++i, work.step(q0, q_head)) {
          if (i % 2 != parity) continue;
          const int tile = dq_tile<BLOCK_Q>(p, work.batch, q_head, q0);
          constexpr int kBytes = kGroups * kDqPart * sizeof(float);
          const unsigned part = dq_parts + i % DQ_STAGES * kBytes;
          int* const counter = p.counters + tile;
          const int before = p.in_turns ? work.turn(p, q0) : 2;  // claimed, and stored
          auto is_there = [&] {
            if (!p.counters) return true;
            if (load_acquire(counter) != before) return false;
            fence_async_global();
            return true;
          };
          // Asked here, it takes no time; after this block's part has come, 7 % with 80 queries.
          bool there = is_there();
          barrier_wait(dq_full + 8 * parity, i / 2 % 2);
          // Not claimed earlier: those that wait for this block keep their buffers full.
          const bool first = p.in_turns ? before == 0 : !there && claim(counter);
          if (first) {
            bulk_store(dq_sum(p, tile), part, kBytes);
          } else {
            while (!there) there = is_there();
            bulk_add(dq_sum(p, tile), part, kBytes);
          }
          bulk_wait_read();
          barrier_arrive(dq_empty + 8 * (i % DQ_STAGES));
          if (first || p.in_turns) {
            bulk_wait();
            fence_async_global();
            fence();
            count_up(counter);
          }
        }
        barrier_arrive(work_empty + 8 * (job % 2));
      }
    }
    return;
  }
  registers_raise<kComputingRegisters>();

  const int group = warpgroup();
  const bool copies = threadIdx.x % 128 == 0;
  const Scores scores(p.scale, p.softcap);
  float s[1][BLOCK_Q / 8][4], ds[1][BLOCK_Q / 8][4], own_dq[kTwoSlabs ? 1 : kDqQueries / 8][4];
  // In the registers of S, by name: the compiler would find others, which there are not.
  auto& dq = [&]() -> auto& {
    if constexpr (kTwoSlabs)
      return s[0];
    else
      return own_dq;
  }();
  float dk[1][HEAD_DIM / 8][4], dv[1][VALUE_DIM / 8][4];
  unsigned p_rounded[1][kSteps][4], ds_rounded[1][kSteps][4];
  auto multiply_kq = [&](int i) {  // start S^T = K Q^T
    multiply_transposed<KTile, QTile, HEAD_DIM>(s[0], k_tile + group * 64 * 128, shared.q.tile(i));
  };
  auto multiply_vo = [&](int i) {  // dP^T = V dO^T
    multiply_transposed<VTile, OTile, VALUE_DIM>(ds[0], v_tile + group * 64 * 128,
                                                 shared.dout.tile(i));
  };
  // Of a half of the queries that begins with step `half`; 16 rows of a slab are 16 x 128 bytes.
  auto multiply_po_early = [&](int i, int half) {  // dV += P^T dO
    multiply_steps<OTile, 0, kEarly>(dv[0], p_rounded, shared.dout.tile(i) + half * 16 * 128, true);
  };
  auto multiply_po_late = [&](int i, int half) {
    multiply_steps<OTile, kEarly, kSteps>(dv[0], p_rounded, shared.dout.tile(i) + half * 16 * 128,
                                          true);
  };
  auto multiply_sq = [&](int i, int half) {  // dK += dS^T Q
    multiply<QTile>(dk[0], ds_rounded, shared.q.tile(i) + half * 16 * 128, true);
  };
  auto multiply_ks = [&](int i) {  // dQ^T = K^T dS^T
    const unsigned k = operand(k_tile + (kTwoSlabs ? group * KTile::kSlabBytes : 0));
    const unsigned ds =
        operand(ds_tiles + i % 2 * sizeof(STile::Storage) + (kTwoSlabs ? 0 : group * 64 * 128));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < BLOCK_K / 16; ++j)
      wgmma<false, true>(dq, k + rows_at(j), ds + columns_at<STile>(j), j > 0);
    wgmma_commit();
  };

  // Put dQ of tile i where an adding thread finds it, and tell that thread.
  auto stage_dq = [&](int i) {
    const int stage = i % DQ_STAGES;
    barrier_wait(dq_empty + 8 * stage, i / DQ_STAGES % 2 ^ 1);
    const unsigned part =
        dq_parts + (stage * kGroups + group) * kDqPart * sizeof(float) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int n = 0; n < kDqQueries / 8; ++n) store_shared16(part + n * 128 * 16, dq[n]);
  };
  auto pass_on_dq = [&](int i) {
    fence_async();
    __syncwarp();
    release(dq_full + 8 * (i % 2));
  };
  for (int job = 0;; ++job) {
    barrier_wait(k_full, job % 2);
    const Work work = uniform(shared.work[job % 2]);
    if (work.total < 0) break;
    int q_head = work.head * p.group, q0 = work.q_last;
    const int key0 = work.k0 + 64 * group;  // this warpgroup's
    const Bounds first = work.queries(p, key0);
    const Bounds last = work.queries(p, min(key0 + 64, p.sk) - 1);
    const unsigned begin = i, end = i + work.total;
    clear(dk);
    clear(dv);
    // lse or delta of a half, in registers where P or dS will be: loads take long beside products,
    // which read shared memory too.
    float2 numbers[2 * kSteps];
    auto load_numbers = [&](const auto& ring, int i, int half) {
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) numbers[n] = ring.pair(i, 2 * half + n);
    };
    for (; i != end; ++i, work.step(q0, q_head)) {
      const bool masked = q0 < last.lo || q0 + BLOCK_Q > first.hi || key0 + 64 > p.sk;
      auto seen = [&](int key) { return key < p.sk ? work.queries(p, key) : Bounds{0, 0}; };
      const unsigned ds_tile =
          transposed_origin<STile>(ds_tiles + i % 2 * sizeof(STile::Storage), group * 8);
      auto wait_for_dout = [&] {  // with the first for v too; with others dQ is passed on before
        if (i == begin)
          barrier_wait(v_full, job % 2);
        else
          pass_on_dq(i - 1);
        shared.dout.wait(i);
      };
      auto wait_to_write_ds = [&] {  // until dK and dV of the keys before were read from there
        if (copies) bulk_wait_read();
        named_sync(1, kComputing);
      };
      auto start_dq = [&] {
        fence_async();
        named_sync(1, kComputing);  // dS is there
        // One after the other, so that the first puts its dQ away while the other's is computed.
        if (kTwoSlabs && group == 1) named_sync(4, kComputing);
        multiply_ks(i);
        if (kTwoSlabs && group == 0) named_arrive(4, kComputing);
      };
      shared.q.wait(i);
      // At the edge of a mask no query may see any of this warpgroup's keys.
      if (kTwoSlabs && (q0 >= last.hi || q0 + BLOCK_Q <= first.lo || key0 >= p.sk)) {
        wait_for_dout();
        if (VECTOR && i == begin) wait_to_write_ds();
        const unsigned zeros[4] = {};
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
          store_matrices_transposed(STile::part(ds_tile, j, 0), zeros);
        start_dq();
        wgmma_wait<0>();
        shared.dout.release(i);
        stage_dq(i);
        shared.q.release(i);
        continue;
      }
      multiply_kq(i);
      wait_for_dout();
      load_numbers(shared.q, i, 0);
      multiply_vo(i);
      wgmma_wait<1>();
      scores.transform(s);
      if (masked) apply_mask(s, AllColumns<1>(), work.k0, q0, -kInfinity, seen);
#pragma unroll
      for (int half = 0; half <= kLastHalf; half += kSteps) {
        if (half > 0) {
          load_numbers(shared.q, i, half);
          wgmma_wait<1>();  // dV of the half before, which has the registers for P
        }
        // s becomes P, times the slope of the softcap once P is rounded.
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          if (kEarly > 0 && j == kEarly) multiply_po_early(i, half);
          float slope[2][4];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float2 lse = numbers[2 * j + n];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = s[0][2 * (half + j) + n][e];
              slope[n][e] = fmaxf(scores.slope(x), 0.0f);  // it is -inf where masked
              x = exp2_approx(x * scores.unit - (e % 2 ? lse.y : lse.x));
            }
          }
          if (TRANSFORM || j < kEarly) round_to_operand(p_rounded[0][j], s[0], half + j);
#pragma unroll
          for (int e = 0; e < 8; ++e) s[0][2 * (half + j) + e / 4][e % 4] *= slope[e / 4][e % 4];
        }
        load_numbers(shared.dout, i, half);
        // Here, as the assembler moves no exponentials past a branch, and else does past the wait.
        if (half == 0 && VECTOR && i == begin) wait_to_write_ds();
        wgmma_wait<(kEarly > 0)>();  // dP; or dK of the half before, which has the registers for dS
        // Keys that do not exist must not reach dQ either: 0 times what they are may be NaN.
        if (half == 0 && masked) apply_mask(ds, AllColumns<1>(), work.k0, q0, 0.0f, seen);
        // Step by step to the end: that takes the fewest registers.
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float2 delta = numbers[2 * j + n];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = ds[0][2 * (half + j) + n][e];
              x = s[0][2 * (half + j) + n][e] * (x - (e % 2 ? delta.y : delta.x));
            }
          }
          round_to_operand(ds_rounded[0][j], ds[0], half + j);
          store_matrices_transposed(STile::part(ds_tile, half + j, 0), ds_rounded[0][j]);
        }
#pragma unroll
        for (int j = kEarly; j < kSteps; ++j)
          if (!TRANSFORM) round_to_operand(p_rounded[0][j], s[0], half + j);
        multiply_po_late(i, half);
        if (half < kLastHalf) multiply_sq(i, half);
      }
      start_dq();
      multiply_sq(i, kLastHalf);
      wgmma_wait<1>();
      shared.dout.release(i);
      stage_dq(i);
      wgmma_wait<0>();
      shared.q.release(i);
    }
    if (begin != end) pass_on_dq(i - 1);
    release(kv_empty);

    // By way of the buffers for dS, one for each.
    if (VECTOR) named_sync(1, kComputing);
    const unsigned buffer = ds_tiles + group * sizeof(STile::Storage);
    store<HEAD_DIM>(p.dk, maps.dk, buffer, copies, work.k0, work.head, work.batch, dk[0],
                    static_cast<float>(p.scale), p.sk, p.d);
    store<VALUE_DIM>(p.dv, maps.dv, buffer, copies, work.k0, work.head, work.batch, dv[0], 1.0f,
                     p.sk, p.v_width);
    __syncwarp();  // all lanes have read what the work was
    release(work_empty + 8 * (job % 2));
  }
  if (VECTOR && copies) bulk_wait_read();  // shared memory must last as long
}

extern "C" __global__ void __launch_bounds__(kComputing, 1) store_dq(const Params p) {
  const int tiles = (p.sq + BLOCK_Q - 1) / BLOCK_Q, q0 = blockIdx.x % tiles * BLOCK_Q;
  const int head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const int group = warpgroup();
  const float* part = dq_sum(p, blockIdx.x) + group * kDqPart + threadIdx.x % 128 * 4;
  float dq[1][kDqQueries / 8][4];
  if (p.counters && p.counters[blockIdx.x] == 0)  // queries that see no key
    clear(dq);
  else
#pragma unroll
    for (int n = 0; n < kDqQueries / 8; ++n) load_16(dq[0][n], part + n * 128 * 4);
  scale_by(dq, static_cast<float>(p.scale));
  extern __shared__ __align__(1024) char memory[];
  const unsigned tile = shared_address(memory);
  const unsigned origin = transposed_origin<QTile>(tile, kTwoSlabs ? group * 8 : 0);
#pragma unroll
  for (int j = 0; j < kDqQueries / 16; ++j) {
    unsigned words[4];
    round_to_operand(words, dq[0], j);
    store_matrices_transposed(QTile::part(origin, kTwoSlabs ? j : group * 4 + j, 0), words);
  }
  __syncthreads();
  QTile::store<VECTOR>(Slice(p.dq, batch, head), tile, q0, p.sq, p.d);
}
