// Forward for float64 on Hopper: tensor copies (TMA), and products by mma.sync.
//
// Grid: one block, or cluster of CLUSTER blocks, per (query tile, head, batch entry), all on x. A
// warp has 16 queries, all of the scores of a key block if ACROSS is 1, and VALUE_DIM / ACROSS
// columns of out. Else ACROSS warps share 16 queries: each makes the scores of as large a part of
// the keys, and exponentials pass through shared memory. The blocks of a cluster have the same
// queries and keys, and HEAD_DIM and VALUE_DIM columns each: their scores are added up.
//
// Q stays. K and V come in slots of a ring, in the order they are used: of K all keys of a block
// and a part of its width, of V PART_K keys and a part of the columns of each of ACROSS warps. No
// two warps meet but those that share queries: while one takes exponentials others multiply.
//
//   barrier        completed by                    waited for
//   q_full, full   tensor copies                   before products
//   empty          a lane of each warp             before the next copy
//
// Options: HEAD_DIM, VALUE_DIM (padded to whole slots), GROUP (columns over which scores are summed
// first), CLUSTER, ACROSS, BLOCK_K, PART_K, BOXES (times 16 columns of P V are made at a time),
// STAGES (slots), LAG (turns that a warp may be before another), WARPS, TRANSFORM, SOFTCAP. Source:
// Dao 2023, arXiv:2307.08691, algorithm 1.
#include "fp64_sm90.cuh"
#include "work.cuh"

constexpr int kRows = 16 * WARPS / ACROSS;
constexpr int kKeys = BLOCK_K / ACROSS;  // whose scores a warp makes
// Of K and of V in a slot, the latter for one warp and for all.
constexpr int kKeyBoxes = kSlotBytes / (BLOCK_K * kRowBytes);
constexpr int kOwnBoxes = kSlotBytes / (PART_K * kRowBytes * ACROSS),
              kSlotBoxes = kOwnBoxes * ACROSS;
constexpr int kGroupBoxes = GROUP / kBoxColumns;  // over which scores are summed first
constexpr int kKeySlots = kHeadBoxes / kKeyBoxes, kValueSlots = kValueBoxes / kSlotBoxes;
constexpr int kParts = BLOCK_K / PART_K;
constexpr int kSlots = kKeySlots + kParts * kValueSlots;  // of a key block
constexpr int kAhead = STAGES - LAG;
static_assert(kKeySlots * kKeyBoxes == kHeadBoxes && kValueSlots * kSlotBoxes == kValueBoxes,
              "whole slots");

using Work = QueryWork<kRows, BLOCK_K>;

struct Shared {
  __align__(1024) char q[kHeadBoxes * kRows * kRowBytes];
  __align__(1024) char slots[STAGES][kSlotBytes];
  // Exponentials of each 16 queries, as lanes have them.
  Pair p[ACROSS > 1 ? kRows / 16 : 1][ACROSS > 1 ? BLOCK_K / 8 : 1][2][32];
  Told<kKeys / 8, 1> told[WARPS];
  double rows[ACROSS][kRows];  // what warps that share queries say about them
  Powers powers;
  Work work;
  int kv_head;
  unsigned long long q_full, full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v;
};

// Slot `index` of key block i of the work.
DEVICE void copy(const TensorMaps& maps, const Work& work, int kv_head, int i, int index,
                 unsigned to, unsigned full) {
  const int k0 = (work.k_begin + i) * BLOCK_K;
  if (index < kKeySlots) {
#pragma unroll
    for (int n = 0; n < kKeyBoxes; ++n)
      tensor_load(to + n * BLOCK_K * kRowBytes, maps.k, full,
                  column_of(index * kKeyBoxes + n, kHeadBoxes), k0, kv_head, work.batch);
    return;
  }
  const int part = (index - kKeySlots) / kValueSlots;
  const int box = (index - kKeySlots) % kValueSlots * kOwnBoxes;
#pragma unroll
  for (int n = 0; n < kSlotBoxes; ++n)  // those of a warp, then those of the next
    tensor_load(
        to + n * PART_K * kRowBytes, maps.v, full,
        column_of(n / kOwnBoxes * (kValueBoxes / ACROSS) + box + n % kOwnBoxes, kValueBoxes),
        k0 + part * PART_K, kv_head, work.batch);
}

extern "C" __global__ void OF_CLUSTER __launch_bounds__(32 * WARPS, 1)
    fwd_sm90_fp64(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  SlotRing ring{shared_address(&shared.slots), shared_address(&shared.full),
                shared_address(&shared.empty)};
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.q_full), 1);
    ring.init();
    for (const auto& told : shared.told) told.init();
    barrier_init_fence();
    shared.work = Work(p, blockIdx.x / CLUSTER);
    shared.kv_head = shared.work.head / p.group;
  }
  write(shared.powers);
  sync_blocks();
  const Work& work = shared.work;  // there, and not in registers
  const int warp = threadIdx.x / 32, share = warp % ACROSS, rows16 = warp / ACROSS;
  const int row0 = work.q0 + 16 * rows16;
  auto row_of = [&](int r) { return row0 + own_row(r); };
  auto keys_of = [&](int row) { return k_bounds(row, p.sk, p.lo_shift, p.hi_shift); };
  const unsigned q = shared_address(shared.q) + 16 * rows16 * kRowBytes + along();
  const unsigned of_keys = kKeys * share * kRowBytes + along();
  const unsigned of_values[2] = {down(0), down(1)};

  // What is said to the warps that share queries is seen by them.
  auto meet = [&] { named_sync(1 + rows16, 32 * ACROSS); };
  // x of each row becomes `both` of what they have.
  auto exchange = [&](double (&x)[2], auto both) {
    if (ACROSS == 1) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (lane_x() == 0) shared.rows[share][16 * rows16 + 8 * r + lane_y()] = x[r];
    meet();
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 1; n < ACROSS; ++n)
        x[r] = both(x[r], shared.rows[(share + n) % ACROSS][16 * rows16 + 8 * r + lane_y()]);
  };

  const Score score(p);
  const Exponential exponential(TRANSFORM ? 1 : score.scale, shared.powers);
  // The largest score in units of the exponent, and the sum of this thread's columns only.
  double top[2] = {-kInfinity, -kInfinity}, sum[2] = {0, 0};
  Sums<kValueBoxes / ACROSS * 2> o;
  clear(o);
  SumOfBlocks<kKeys / 8, 1> across(shared.told[warp]);
  // Slot `index`, or one of the next key blocks, goes into the ring.
  auto fill = [&](int i, int index, Turn<STAGES> to) {
    i += index / kSlots, index %= kSlots;
    if (threadIdx.x % 32 == 0 && i < work.blocks)
      ring.fill(to, [&](unsigned memory, unsigned full) {
        copy(maps, work, shared.kv_head, i, index, memory, full);
      });
  };
  if (work.blocks > 0) {
    const unsigned q_full = shared_address(&shared.q_full);
    if (threadIdx.x == 0) {
      barrier_expect(q_full, sizeof(shared.q));
      for (int n = 0; n < kHeadBoxes; ++n)
        tensor_load(shared_address(shared.q) + n * (kRows * kRowBytes), maps.q, q_full,
                    column_of(n, kHeadBoxes), work.q0, work.head, work.batch);
    }
    if (warp == 0) {
#pragma unroll 1
      for (Turn<STAGES> to; to.stage < kAhead; to.next()) fill(0, to.stage, to);
    }
    barrier_wait(q_full, 0);
    pair_rows(shared.q);
    __syncthreads();
  }
  auto use = [&](int i, int index, auto products) {
    if (index % WARPS == warp) fill(i, index + kAhead, ring.turn.later(kAhead));
    __syncwarp();
    ring.use(products);
  };
#pragma unroll 1
  for (int i = 0; i < work.blocks; ++i) {
    const int k0 = (work.k_begin + i) * BLOCK_K;
    const Bounds first = keys_of(again(row0)), last = keys_of(min(again(row0) + 16, p.sq) - 1);
    if (k0 >= last.hi || k0 + BLOCK_K <= first.lo) {  // none of these rows sees any of these keys
#pragma unroll 1
      for (int n = 0; n < kSlots; ++n) use(i, n, [](unsigned) {});
      continue;
    }
    Sums<kKeys / 8> s;
    multiply_scores<kHeadBoxes, kGroupBoxes, kKeyBoxes>(
        s, q, kRows * kRowBytes, BLOCK_K * kRowBytes, [&](int slot, auto products) {
          use(i, slot, [&](unsigned keys) { products(keys + of_keys); });
        });
    across.tell(s, 0), across.add_up(), across.hear(s, 0);
    auto key_of = [&](int t, int e) {
      return k0 + share * kKeys + 8 * t + spread(2 * lane_x() + e);
    };
    if (TRANSFORM) {
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][e] = score(s[t][e]);
    }
    if (k0 < last.lo || k0 + BLOCK_K > first.hi) {  // not all of these rows see all of these keys
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Bounds seen = keys_of(row_of(r));
#pragma unroll
        for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (key_of(t, e) < seen.lo || key_of(t, e) >= seen.hi) s[t][2 * r + e] = -kInfinity;
      }
    }

    double tops[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tops[r] = s[0][2 * r];
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) tops[r] = larger(tops[r], s[t][2 * r + e]);
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        tops[r] = larger(tops[r], __shfl_xor_sync(~0u, tops[r], lanes));
    }
    exchange(tops, larger);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const double before = top[r];
      top[r] = larger(before, tops[r] * exponential.unit);
      // A row that has seen nothing: exp(-inf - 0) = 0, where -inf + inf would be NaN.
      const double base = top[r] == -kInfinity ? 0 : top[r];
      const double rescale = exponential.of(before - base);
      double block = 0;
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[t][2 * r + e] = exponential(s[t][2 * r + e], base);
          block += s[t][2 * r + e];
        }
      sum[r] = sum[r] * rescale + block;
      if (!__any_sync(~0u, rescale != 1)) continue;  // maxima seldom rise
#pragma unroll
      for (int n = 0; n < kValueBoxes / ACROSS * 2; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) o[n][2 * r + e] *= rescale;
    }

    if (ACROSS > 1) {
      auto& all = shared.p[rows16];
#pragma unroll
      for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          all[share * (kKeys / 8) + t][e][threadIdx.x % 32] = {{s[t][e], s[t][2 + e]}};
      meet();
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Factors<PART_K / 8> factors;
#pragma unroll
      for (int t = 0; t < PART_K / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = part * (PART_K / 8) + t;
          if constexpr (ACROSS > 1)
            factors[t][e] = shared.p[rows16][at][e][threadIdx.x % 32];
          else
            factors[t][e] = {{s[at][e], s[at][2 + e]}};
        }
      add_products<kValueSlots, kOwnBoxes, BOXES>(
          o, factors, of_values, [&](int slot, auto products) {
            use(i, kKeySlots + part * kValueSlots + slot, [&](unsigned values) {
              products(values + share * kOwnBoxes * (PART_K * kRowBytes));
            });
          });
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], lanes);
  exchange(sum, [](double x, double y) { return x + y; });
  double inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse[r] = sum[r] == 0 ? 0 : 1 / sum[r];
    if (row_of(r) < p.sq && lane_x() == 0 && share + cluster_rank() == 0)
      static_cast<double*>(p.lse)[first_row(p, work.batch, work.head) + row_of(r)] =
          sum[r] == 0 ? -kInfinity : top[r] + log(sum[r]);
  }
  store(Head<double>(p.out, work.batch, work.head), o, inverse,
        column_of(share * (kValueBoxes / ACROSS), kValueBoxes), row_of, p.sq, p.v_width);
}
