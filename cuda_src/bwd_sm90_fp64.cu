// Backward for float64 on Hopper: tensor copies (TMA), and products by mma.sync.
//
//   row_delta      delta = rowsum(dO * O) - dlse, and dQ = 0
//   bwd_sm90_fp64  a block, or cluster of CLUSTER blocks, per tile of keys of a key/value head:
//                  dV += P^T dO, dK += dS^T Q, and dQ += dS K in memory: as it comes, or if there
//                  are counters in turns, as in bwd_simt.cu
//
// K and V of a block stay. Queries come kStreamed at a time in slots of a ring, in the order they
// are used: Q for S, dO for dV, dO for dP, Q for dK; for dV and dK PART_Q of them at a time, and a
// part of the columns of each warp. ACROSS warps share 16 keys: each makes as large a part of S^T
// and dP^T, and has as many columns of dK and dV. P and dS pass through shared memory, in pairs of
// two keys: of 16 keys 128 bytes a query, permuted as boxes are. So they are left operands for dV
// and dK, and dS the right one for dQ^T = K^T dS^T, of which a warp makes 16 rows, columns of K, at
// a time. The blocks of a cluster have the same keys and queries, and HEAD_DIM and VALUE_DIM
// columns each: their S and dP are added up, in ROUNDS.
// Options: HEAD_DIM, VALUE_DIM (padded to 64), CLUSTER, ROUNDS, ACROSS, PART_Q, STAGES (slots),
// LAG (turns that a warp may be before another), WARPS, SOFTCAP, VECTOR (of row_delta). Source:
// Dao 2023, arXiv:2307.08691, algorithm 2.
#include "backward.cuh"
#include "fp64_sm90.cuh"
#include "work.cuh"

constexpr int kRows = 16 * WARPS / ACROSS, kStreamed = 64;
constexpr int kShare = kStreamed / ACROSS;  // queries of which a warp makes scores
constexpr int kPart = PART_Q, kParts = kStreamed / kPart;
// Boxes of a slot: for scores, for products, and of these for one warp.
constexpr int kScoreBoxes = kSlotBytes / (kStreamed * kRowBytes);
constexpr int kTimesBoxes = kSlotBytes / (kPart * kRowBytes), kOwnBoxes = kTimesBoxes / ACROSS;
constexpr int kHeadTimes = kHeadBoxes / kTimesBoxes, kValueTimes = kValueBoxes / kTimesBoxes;
// Slots of what a tile of queries is used for, and the first of each: S, dV, dP, dK. In a cluster
// dP comes before dV, so that blocks tell each other S beside dP and dP beside dV.
constexpr bool kCluster = CLUSTER > 1;
constexpr int kOfS = kHeadBoxes / kScoreBoxes, kOfDp = kValueBoxes / kScoreBoxes;
constexpr int kOfDv = kParts * kValueTimes;
constexpr int kForDv = kOfS + (kCluster ? kOfDp : 0), kForDp = kOfS + (kCluster ? 0 : kOfDv);
constexpr int kForDk = kOfS + kOfDv + kOfDp, kSlots = kForDk + kParts * kHeadTimes;
// Where K has fewer boxes than there are warps, two make dQ of one, for half of the queries each.
constexpr int kDqParts = kHeadBoxes < WARPS ? 2 : 1, kDqQueries = kStreamed / kDqParts;
constexpr int kAhead = STAGES - LAG;
// In this slot of S a warp passes on its turn at dQ. After all of S, turns cost up to 29 %; now 8.
constexpr int kPassTurn = 1;
static_assert(kAhead <= kSlots, "at most one tile ahead");
static_assert(kHeadTimes * kTimesBoxes == kHeadBoxes && kValueTimes * kTimesBoxes == kValueBoxes,
              "whole slots");

using Work = KeyWork<kRows, kStreamed>;

// Tile number n of queries.
struct Place {
  int n, head, q0;
};

struct Shared {
  __align__(1024) char own[(kHeadBoxes + kValueBoxes) * kRows * kRowBytes];
  __align__(1024) char slots[STAGES][kSlotBytes];
  __align__(1024) char scores[kRows / 16][kStreamed * kRowBytes];  // P, then dS
  Told<kShare / 8, ROUNDS> told[WARPS];
  Powers powers;
  Work work;
  unsigned long long own_full, full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, dout;
};

// Slot `index` of a tile.
DEVICE void copy(const TensorMaps& maps, Place at, int batch, int index, unsigned to,
                 unsigned full) {
  const bool of_q = index < kOfS || index >= kForDk;
  const int boxes = of_q ? kHeadBoxes : kValueBoxes;
  const TensorMap& map = of_q ? maps.q : maps.dout;
  if (index < kOfS || (index >= kForDp && index < kForDp + kOfDp)) {
    const int box = (index - (of_q ? 0 : kForDp)) * kScoreBoxes;
#pragma unroll
    for (int n = 0; n < kScoreBoxes; ++n)
#pragma unroll
      for (int i = 0; i < kStreamed; i += kPart)
        tensor_load(to + (n * kStreamed + i) * kRowBytes, map, full, column_of(box + n, boxes),
                    at.q0 + i, at.head, batch);
    return;
  }
  const int slots = of_q ? kHeadTimes : kValueTimes, slot = index - (of_q ? kForDk : kForDv);
  const int box = slot % slots * kOwnBoxes;
#pragma unroll
  for (int n = 0; n < kTimesBoxes; ++n)  // those of a warp, then those of the next
    tensor_load(to + n * kPart * kRowBytes, map, full,
                column_of(n / kOwnBoxes * (boxes / ACROSS) + box + n % kOwnBoxes, boxes),
                at.q0 + slot / slots * kPart, at.head, batch);
}

extern "C" __global__ void row_delta(const Params p) { write_delta_and_zeros<double>(p); }

extern "C" __global__ void OF_CLUSTER __launch_bounds__(32 * WARPS, 1)
    bwd_sm90_fp64(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  SlotRing ring{shared_address(&shared.slots), shared_address(&shared.full),
                shared_address(&shared.empty)};
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.own_full), 1);
    ring.init();
    for (const auto& told : shared.told) told.init();
    barrier_init_fence();
    shared.work = Work(p, blockIdx.x / CLUSTER);
  }
  write(shared.powers);
  sync_blocks();
  const Work& work = shared.work;  // there, and not in registers
  const int warp = threadIdx.x / 32, share = warp % ACROSS, rows16 = warp / ACROSS;
  auto key_of = [&](int r) { return work.k0 + 16 * rows16 + own_row(r); };
  const unsigned own = shared_address(shared.own) + 16 * rows16 * kRowBytes + along();
  const unsigned of_scores = kShare * share * kRowBytes + along();
  const unsigned of_columns[2] = {down(0), down(1)};
  // In `scores`, of eight queries: a lane's own pairs, of each e, and those of another lane's.
  auto pair_at = [](int query, int key) { return group_at(spread(query), spread(key)); };
  const unsigned mine[2] = {pair_at(2 * lane_x(), lane_y()), pair_at(2 * lane_x() + 1, lane_y())};
  const unsigned turned[2] = {pair_at(lane_y(), 2 * lane_x()), pair_at(lane_y(), 2 * lane_x() + 1)};
  // In a box of K: column y of a lane's key of eight, where pair_rows() has put it.
  auto key_at = [](int key, int y) {
    return y % 2 * kEightRows + group_at(spread(key), y / 2 ^ y % 2 * 4);
  };
  const unsigned of_keys[2] = {key_at(2 * lane_x(), lane_y()), key_at(2 * lane_x() + 1, lane_y())};
  auto meet = [&] { named_sync(1 + rows16, 32 * ACROSS); };
  const Score score(p);
  const Exponential exponential(1, shared.powers);

  Sums<kHeadBoxes / ACROSS * 2> dk;
  Sums<kValueBoxes / ACROSS * 2> dv;
  clear(dk), clear(dv);
  Sums<kShare / 8> s, ds;
  SumOfBlocks<kShare / 8, ROUNDS> across(shared.told[warp]);

  auto after = [&](Place at) {
    work.step(at.q0, at.head);
    return Place{at.n + 1, at.head, at.q0};
  };
  // Slot `index`, or one of the next tile, goes into the ring.
  auto fill = [&](Place at, int index, Turn<STAGES> to) {
    if (threadIdx.x % 32 != 0) return;
    if (index >= kSlots) at = after(at), index -= kSlots;
    if (at.n < work.total)
      ring.fill(to, [&](unsigned memory, unsigned full) {
        copy(maps, at, work.batch, index, memory, full);
      });
  };
  const Place start = {0, work.head * p.group, work.q_last};
  if (work.total > 0) {
    const unsigned own_full = shared_address(&shared.own_full);
    if (threadIdx.x == 0) {
      barrier_expect(own_full, sizeof(shared.own));
#pragma unroll 1
      for (int n = 0; n < kHeadBoxes + kValueBoxes; ++n) {
        const bool of_k = n < kHeadBoxes;
        tensor_load(shared_address(shared.own) + n * (kRows * kRowBytes), of_k ? maps.k : maps.v,
                    own_full,
                    of_k ? column_of(n, kHeadBoxes) : column_of(n - kHeadBoxes, kValueBoxes),
                    work.k0, work.head, work.batch);
      }
    }
    if (warp == 0) {
#pragma unroll 1
      for (Turn<STAGES> to; to.stage < kAhead; to.next()) fill(start, to.stage, to);
    }
    barrier_wait(own_full, 0);
    pair_rows(shared.own);
    __syncthreads();
  }
  // Before slot i of the n in which blocks tell each other: each round is added up in its middle.
  auto sum_meanwhile = [&](Sums<kShare / 8>& scores, int i, int n) {
    if (ROUNDS == 2 && i == n / 2) across.hear(scores, 0), across.tell(scores, 1);
    if (i % (n / ROUNDS) == n / ROUNDS / 2) across.add_up();
  };
  auto use = [&](Place at, int index, auto products) {
    if (index % WARPS == warp) fill(at, index + kAhead, ring.turn.later(kAhead));
    if (kCluster && index >= kForDp && index < kForDp + kOfDp)
      sum_meanwhile(s, index - kForDp, kOfDp);
    if (kCluster && index >= kForDv && index < kForDk) sum_meanwhile(ds, index - kForDv, kOfDv);
    __syncwarp();
    ring.use(products);
  };
  // result += what is in `scores` theirs, from slot `first` on.
  auto add_times = [&](auto& result, Place at, int first) {
    constexpr int kTimes = sizeof(result) / sizeof(Sums<2 * kOwnBoxes>);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Factors<kPart / 8> factors;
#pragma unroll
      for (int t = 0; t < kPart / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          factors[t][e] = load_pair(shared_address(shared.scores[rows16]) +
                                    (part * kPart / 8 + t) * kEightRows + mine[e]);
      add_products<kTimes, kOwnBoxes, kOwnBoxes>(
          result, factors, of_columns, [&](int slot, auto products) {
            use(at, first + part * kTimes + slot, [&](unsigned theirs) {
              products(theirs + share * kOwnBoxes * (kPart * kRowBytes));
            });
          });
    }
  };
  auto put = [&](int t, int e, double x, double y) {
    char* const of_share = shared.scores[rows16] + share * kShare * kRowBytes;
    *reinterpret_cast<Pair*>(of_share + t * kEightRows + mine[e]) = {{x, y}};
  };
  const auto* all_lse = static_cast<const double*>(p.lse);
  const auto* all_delta = static_cast<const double*>(p.delta);

  WarpTurn dq_turn;
  auto take_turn = [&](Place at) {
    const int tile = dq_tile<kStreamed>(p, work.batch, at.head, at.q0);
    dq_turn.take(p, (tile * CLUSTER + cluster_rank()) * WARPS + warp, work.turn(p, at.q0));
  };

  // Slots from `first` on, for scores.
  auto slots_from = [&](Place at, int first) {
    return [&, at, first](int slot, auto products) {
      if (first + slot == kPassTurn) dq_turn.pass(p);
      use(at, first + slot, [&](unsigned theirs) { products(theirs + of_scores); });
    };
  };
#pragma unroll 1
  for (Place at = start; at.n < work.total; at = after(at)) {
    auto query_of = [&](int t, int e) {
      return at.q0 + share * kShare + 8 * t + spread(2 * lane_x() + e);
    };
    // Of the queries' lse or delta.
    auto load_rows = [&](double (&x)[kShare / 8][2], const double* all, double none) {
#pragma unroll
      for (int t = 0; t < kShare / 8; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          x[t][e] = query_of(t, e) < p.sq ? all[first_row(p, work.batch, at.head) + query_of(t, e)]
                                          : none;
    };
    const Bounds first = Work::queries(p, work.k0);
    const Bounds last = Work::queries(p, min(work.k0 + kRows, p.sk) - 1);
    const bool whole = at.q0 >= last.lo && at.q0 + kStreamed <= first.hi && work.k0 + kRows <= p.sk;
    // Of each r, where not all see each other; 0 times what does not exist may be NaN.
    Bounds seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      seen[r] = key_of(r) < p.sk ? Work::queries(p, key_of(r)) : Bounds{0, 0};
    auto hidden = [&](int r, int t, int e) {
      return !whole && (query_of(t, e) < seen[r].lo || query_of(t, e) >= seen[r].hi);
    };

    double rows[kShare / 8][2];
    load_rows(rows, all_lse, kInfinity);
    multiply_scores<kHeadBoxes, kHeadBoxes, kScoreBoxes>(s, own, kRows * kRowBytes,
                                                         kStreamed * kRowBytes, slots_from(at, 0));
    auto make_dp = [&] {
      multiply_scores<kValueBoxes, kValueBoxes, kScoreBoxes>(
          ds, own + kHeadBoxes * (kRows * kRowBytes), kRows * kRowBytes, kStreamed * kRowBytes,
          slots_from(at, kForDp));
    };
    if (kCluster) {
      across.tell(s, 0);
      make_dp();
      across.hear(s, ROUNDS - 1);
      across.tell(ds, 0);
    }
    __syncthreads();  // all have used dS of the tile before
#pragma unroll
    for (int t = 0; t < kShare / 8; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // A row whose every score is -inf has no gradient: -inf + inf is NaN.
        const double lse = rows[t][e] == -kInfinity ? double(kInfinity) : rows[t][e];
        double x[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const double scaled = score(s[t][2 * r + e]);
          x[r] = hidden(r, t, e) ? 0 : exponential.of(scaled - lse);
          s[t][2 * r + e] = x[r] * score.slope(scaled);
        }
        put(t, e, x[0], x[1]);
      }
    meet();
    add_times(dv, at, kForDv);
    load_rows(rows, all_delta, 0);
    if (kCluster)
      across.hear(ds, ROUNDS - 1);
    else
      make_dp();
    meet();  // all have used P
#pragma unroll
    for (int t = 0; t < kShare / 8; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        double x[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          x[r] = hidden(r, t, e) ? 0 : s[t][2 * r + e] * (ds[t][2 * r + e] - rows[t][e]);
        put(t, e, x[0], x[1]);
      }
    __syncthreads();
    add_times(dk, at, kForDk);
#pragma unroll 1
    for (int n = warp; n < kHeadBoxes * kDqParts; n += WARPS) {
      const int box = n / kDqParts, query0 = n % kDqParts * kDqQueries;
      // Of columns y and y + 8 of K: 64 bytes of a query are added at once.
      Sums<kDqQueries / 8> dq;
      clear(dq);
      const unsigned keys = shared_address(shared.own) + box * (kRows * kRowBytes);
#pragma unroll
      for (int t = 0; t < kRows / 16; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Pair left[2], right[kDqQueries / 8];
          // Not in pairs: an mma takes both columns of a key.
          const unsigned key = keys + t * (2 * kEightRows) + of_keys[e];
#pragma unroll
          for (int r = 0; r < 2; ++r)
            left[r] = {
                {load_shared_double(key ^ 8 * r), load_shared_double(key ^ 8 * r ^ kOtherHalf)}};
#pragma unroll
          for (int i = 0; i < kDqQueries / 8; ++i)
            right[i] = load_pair(shared_address(shared.scores[t]) + query0 * kRowBytes +
                                 i * kEightRows + turned[e]);
#pragma unroll
          for (int i = 0; i < kDqQueries / 8; ++i) mma(dq[i], left, right[i]);
        }
      if (n == warp && p.counters) take_turn(at);
      const Head<double> sum(p.dq, work.batch, at.head);
#pragma unroll
      for (int i = 0; i < kDqQueries / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = at.q0 + query0 + 8 * i + spread(2 * lane_x() + e % 2);
          const int column = column_of(box, kHeadBoxes) + lane_y() + 8 * (e / 2);
          add(&sum.at(row, column), dq[i][e] * score.scale, row < p.sq && column < p.d);
        }
    }
  }
  dq_turn.pass(p);

  store(Head<double>(p.dk, work.batch, work.head), dk, {score.scale, score.scale},
        column_of(share * (kHeadBoxes / ACROSS), kHeadBoxes), key_of, p.sk, p.d);
  store(Head<double>(p.dv, work.batch, work.head), dv, {1, 1},
        column_of(share * (kValueBoxes / ACROSS), kValueBoxes), key_of, p.sk, p.v_width);
}
