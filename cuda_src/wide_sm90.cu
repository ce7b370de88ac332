// Heads wider than 256 on Hopper, float16 and bfloat16, forward and backward, by tensor copies
// (TMA) and wgmma.
//
// As in wide_sm80.cu a result is a sum over rows that stream past, by factors that come from
// scores:
//   PASS   result   own rows   streamed   factors   times
//   0      out      Q          K          P         V
//   1      dV       K          Q          P^T       dO
//   2      dK       K, V       Q, dO      dS^T      Q
//   3      dQ       Q, dO      K, V       dS        K
// Grid: one block per (64 rows, CHUNK columns of the result, head, batch entry), all on x. CLUSTER
// blocks of neighbouring rows share what streams past: each copies its part of the rows to all.
//
// 64 rows of a result fill the registers of two warpgroups: each has half of the columns. They work
// on pairs of tiles of 64 streamed rows: each makes the factors of its own tile, and both multiply
// with the factors of both, which pass through shared memory. What a warpgroup multiplies comes in
// slices of SLICE columns through a ring of its own, in this order:
//   S(0)  S(1) R(0)  S(2) R(1)  ..  R(last)      S, with dP: scores of a pair; R: its products
// so that factors of one pair are made while products of the one before run.
//
//   thread               waits for          then
//   copying, one a ring  empty              copies, which complete full
//   computing            own_full, full     products; a lane of each warp arrives at empty
//   named barrier 1: what the warpgroups tell each other is there; 2: the factors are
//
// Options: as fwd_sm90.cu, with widths padded to SLICE; PASS, CHUNK, SLICE, STAGES (of a ring),
// CLUSTER. Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2.
#include "hopper.cuh"
#include "mask.cuh"
#include "softmax.cuh"
#include "warpgroup.cuh"

constexpr int kRows = 64, kComputing = 256, kThreads = kComputing + 128;
constexpr bool kOut = PASS == 0, kOfKeys = PASS == 1 || PASS == 2, kOfDs = PASS >= 2;
constexpr int kHead = HEAD_DIM / SLICE, kValue = kOfDs ? VALUE_DIM / SLICE : 0;  // of S and dP
constexpr int kKept = CHUNK / SLICE / 2;                                         // of a warpgroup
constexpr int kChunks = ((kOfDs ? HEAD_DIM : VALUE_DIM) + CHUNK - 1) / CHUNK;
static_assert(CHUNK % (2 * SLICE) == 0 && SLICE % 64 == 0, "halves of whole slices");

using Own = Tile<kRows, HEAD_DIM + kOfDs * VALUE_DIM, kComputing>;  // of S, then of dP
using Theirs = Tile<kRows, SLICE, kComputing>;
using Factors = Tile<kRows, kRows, kComputing>;
using Products = float[1][kRows / 8][4];

struct Shared {
  Own::Storage own;
  Theirs::Storage rings[2][STAGES];
  Factors::Storage factors[2][2];  // of two pairs, by turns
  union {
    float2 twins[kComputing];
    __align__(16) float stats[2][2][2][kRows];  // of two pairs, tiles: lse in base 2 and delta
  };
  unsigned long long own_full, full[2][STAGES], empty[2][STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

struct TensorMaps {
  TensorMap q, k, v, dout;
};

// Streamed rows, of a head.
struct Place {
  int head, row0;
};

// What a block does: its rows, and what streams past them.
struct Work {
  int rows, others, row0, head, batch, column0;
  int lo_shift, hi_shift;
  Bounds first, last;  // streamed rows that the first and the last row of the cluster see
  Place start;
  int end;  // of heads

  DEVICE Work(const Params& p)
      : rows(kOfKeys ? p.sk : p.sq),
        others(kOfKeys ? p.sq : p.sk),
        lo_shift(kOfKeys ? 1 - p.hi_shift : p.lo_shift),
        hi_shift(kOfKeys ? 1 - p.lo_shift : p.hi_shift) {
    constexpr int kTogether = CLUSTER * kRows;
    const int heads = kOfKeys ? p.heads / p.group : p.heads;
    const int tiles = (rows + kTogether - 1) / kTogether;
    const int chunk = blockIdx.x / CLUSTER % kChunks, index = blockIdx.x / CLUSTER / kChunks;
    column0 = chunk * CHUNK;
    // Under a causal mask the longest first: the last queries, the first keys.
    const int begin = (kOfKeys ? index % tiles : tiles - 1 - index % tiles) * kTogether;
    head = index / tiles % heads, batch = index / tiles / heads;
    row0 = begin + (CLUSTER > 1 ? cluster_rank() * kRows : 0);
    first = k_bounds(begin, others, lo_shift, hi_shift);
    last = k_bounds(min(begin + kTogether, rows) - 1, others, lo_shift, hi_shift);
    start = {kOfKeys ? head * p.group : head / p.group, first.lo / (2 * kRows) * (2 * kRows)};
    end = start.head + (start.row0 < last.hi ? (kOfKeys ? p.group : 1) : 0);
  }
  DEVICE Place after(Place at) const {
    at.row0 += 2 * kRows;
    return at.row0 < last.hi ? at : Place{at.head + 1, start.row0};
  }
};

// By one thread: what warpgroup `group` multiplies, in order.
DEVICE void copy(const Params& p, const TensorMaps& maps, Shared& shared, const Work& work,
                 int group) {
  const TensorMap &theirs_s = kOfKeys ? maps.q : maps.k, &theirs_dp = kOfKeys ? maps.dout : maps.v;
  const TensorMap& times = kOfDs ? theirs_s : theirs_dp;
  constexpr int kPart = kRows / CLUSTER;  // rows that this block copies
  const int part = CLUSTER > 1 ? cluster_rank() * kPart : 0;
  unsigned turn = 0;
  auto put = [&](const TensorMap& map, int column, int row, int head, int more_bytes = 0) {
    const unsigned stage = turn % STAGES, full = shared_address(&shared.full[group][stage]);
    barrier_wait(shared_address(&shared.empty[group][stage]), turn / STAGES % 2 ^ 1);
    barrier_expect(full, sizeof(Theirs::Storage) + more_bytes);
    const unsigned to = shared_address(&shared.rings[group][stage]) + part * 128;
#pragma unroll
    for (int slab = 0; slab < SLICE / 64; ++slab) {
      const unsigned slab_to = to + slab * Theirs::kSlabBytes;
      if (CLUSTER > 1)
        tensor_load_to_all(slab_to, map, full, column + 64 * slab, row + part, head, work.batch,
                           (1 << CLUSTER) - 1);
      else
        tensor_load(slab_to, map, full, column + 64 * slab, row, head, work.batch);
    }
    ++turn;
    return full;
  };
  unsigned pair = 0;
  auto put_products = [&](Place at) {
    for (int i = 0; i < 2; ++i)
      for (int n = 0; n < kKept; ++n)
        put(times, work.column0 + (group * kKept + n) * SLICE, at.row0 + (i ^ group) * kRows,
            at.head);
  };
  Place before{};
  for (Place at = work.start; at.head < work.end; before = at, at = work.after(at), ++pair) {
    const int row = at.row0 + group * kRows;
    for (int n = 0; n < kHead; ++n) {
      constexpr int kBytes = kRows * sizeof(float);
      const unsigned full =
          put(theirs_s, n * SLICE, row, at.head, kOfKeys && n == 0 ? 2 * kBytes : 0);
      if (kOfKeys && n == 0) {
        const long long i = first_row(p, work.batch, at.head, 2 * kRows) + row;
        auto& stats = shared.stats[pair % 2][group];
        bulk_load(shared_address(stats[0]), static_cast<float*>(p.lse_log2) + i, full, kBytes);
        bulk_load(shared_address(stats[1]), static_cast<float*>(p.delta) + i, full, kBytes);
      }
    }
    for (int n = 0; n < kValue; ++n) put(theirs_dp, n * SLICE, row, at.head);
    if (pair > 0) put_products(before);
  }
  if (pair > 0) put_products(before);
}

// What the thread says that has the other half of this one's rows.
DEVICE float2 of_twin(float2 (&twins)[kComputing], float2 mine) {
  twins[threadIdx.x] = mine;
  named_sync(1, kComputing);
  return twins[threadIdx.x ^ 128];
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<ELEMENT, 2 * kRows>(p); }

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    wide_sm90(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned own_full = shared_address(&shared.own_full);
  const unsigned own = shared_address(&shared.own);
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    barrier_init(own_full, 1);
    for (int i = 0; i < 2 * STAGES; ++i) {
      barrier_init(shared_address(&shared.full[0][i]), 1);
      barrier_init(shared_address(&shared.empty[0][i]), 4 * CLUSTER);
    }
    barrier_init_fence();
  }
  if (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  const Work work(p);

  if (group == 2) {
    registers_lower<40>();
    const int warp = threadIdx.x / 32 % 4;
    if (threadIdx.x % 32 == 0 && warp < 2) {
      if (warp == 0) {
        const TensorMap &of_s = kOfKeys ? maps.k : maps.q, &of_dp = kOfKeys ? maps.v : maps.dout;
        barrier_expect(own_full, sizeof(Own::Storage));
        for (int n = 0; n < Own::kWidth / 64; ++n) {
          const int column = n * 64 - (n * 64 < HEAD_DIM ? 0 : HEAD_DIM);
          tensor_load(own + n * Own::kSlabBytes, n * 64 < HEAD_DIM ? of_s : of_dp, own_full, column,
                      work.row0, work.head, work.batch);
        }
      }
      copy(p, maps, shared, work, warp);
    }
    if (CLUSTER > 1) cluster_sync();
    return;
  }
  registers_raise<232>();

  const Scores scores(p.scale, p.softcap);
  OnlineSoftmax<1> softmax;
  float sum[kKept][1][SLICE / 8][4];
#pragma unroll
  for (int n = 0; n < kKept; ++n) clear(sum[n]);
  Products s, dp;

  // Of this warpgroup's slices.
  unsigned turn = 0;
  bool running = false;  // products with the one before
  auto release_last = [&] {
    __syncwarp();  // all lanes have seen a phase before the next may begin
    if (running && threadIdx.x % 32 < CLUSTER) {
      const unsigned empty = shared_address(&shared.empty[group][(turn - 1) % STAGES]);
      if (CLUSTER > 1)
        barrier_arrive_at(empty, threadIdx.x % 32);
      else
        barrier_arrive(empty);
    }
  };
  // Start products with the next slice; those with the one before are done.
  auto with_next = [&](auto products) {
    barrier_wait(shared_address(&shared.full[group][turn % STAGES]), turn / STAGES % 2);
    wgmma_fence();
    products(shared_address(&shared.rings[group][turn % STAGES]));
    wgmma_commit();
    wgmma_wait<1>();
    release_last();
    running = true, ++turn;
  };
  auto finish = [&] {
    wgmma_wait<0>();
    release_last();
    running = false;
  };
  auto multiply = [&](Products& c, unsigned mine, int slices) {
#pragma unroll 1
    for (int n = 0; n < slices; ++n)
      with_next([&](unsigned tile) {
        const unsigned a = operand(mine + n * (SLICE / 64) * Own::kSlabBytes), b = operand(tile);
#pragma unroll
        for (int i = 0; i < SLICE / 16; ++i)
          wgmma<false>(c[0], a + columns_at<Own>(i), b + columns_at<Theirs>(i), n > 0 || i > 0);
      });
  };
  auto multiply_scores = [&] {
    multiply(s, own, kHead);
    if (kOfDs) multiply(dp, own + HEAD_DIM / 64 * Own::kSlabBytes, kValue);
  };
  auto multiply_factors = [&](unsigned pair) {
    named_sync(2, kComputing);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned a = operand(shared_address(&shared.factors[pair % 2][i ^ group]));
#pragma unroll
      for (int n = 0; n < kKept; ++n)
        with_next([&](unsigned tile) {
          const unsigned b = operand(tile, Theirs::kSlabBytes);
#pragma unroll
          for (int k = 0; k < kRows / 16; ++k)
            wgmma<true>(sum[n][0], a + columns_at<Factors>(k), b + rows_at(k), true);
        });
    }
  };

  // From S, and dP, of this warpgroup's tile to factors, in shared memory. `finish` comes before
  // the sum is rescaled.
  float lse_log2[2] = {}, delta[2] = {};  // of own queries
  if (PASS == 3) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.row0 + fragment_row<1>(0, r) - group * kRows;
      const long long i = first_row(p, work.batch, work.head, 2 * kRows) + row;
      if (row >= work.rows) continue;
      lse_log2[r] = static_cast<float*>(p.lse_log2)[i];
      delta[r] = static_cast<float*>(p.delta)[i];
    }
  }
  auto make_factors = [&](Place at, unsigned pair) {
    const int other0 = at.row0 + group * kRows;
    auto hide = [&](Products& c, float hidden) {
      if (other0 >= work.last.lo && other0 + kRows <= work.first.hi) return;
      // (Fragments of the second warpgroup count rows from 64 on.)
      apply_mask(c, work.row0 - group * kRows, other0, work.others, work.lo_shift, work.hi_shift,
                 hidden);
    };
    scores.transform(s);
    if constexpr (kOut) {
      hide(s, -kInfinity);
      float top[2] = {-kInfinity, -kInfinity};  // of this thread's two rows
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[0][n][e]);
      const float2 other = of_twin(shared.twins, {top[0], top[1]});
      const float tops[1][1][4] = {{{top[0], other.x, top[1], other.y}}};
      softmax.raise(tops, scores.unit);
      softmax.exponentiate<true>(s, scores.unit);
      softmax.add();
    } else {
      if (!kOfDs) clear(dp);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const auto& stats = shared.stats[pair % 2][group];
        const int column = 8 * n + fragment_column();
#pragma unroll
        for (int e = 0; e < 4; ++e)
          differentiate(s[0][n][e], dp[0][n][e],
                        kOfKeys ? stats[0][column + e % 2] : lse_log2[e / 2],
                        kOfKeys ? stats[1][column + e % 2] : delta[e / 2], scores);
      }
      hide(kOfDs ? dp : s, 0.0f);
    }
    const unsigned origin =
        stored_origin<Factors>(shared_address(&shared.factors[pair % 2][group]));
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      store_columns<Factors>(origin, i, (kOfDs ? dp : s)[0], i, {1.0f, 1.0f});
    fence_async();
    finish();
    if constexpr (kOut) {
#pragma unroll
      for (int n = 0; n < kKept; ++n) softmax.rescale(sum[n]);
    }
  };

  Place at = work.start;
  if (at.head < work.end) {
    barrier_wait(own_full, 0);
    multiply_scores();
    finish();
    make_factors(at, 0);
    unsigned pair = 0;
    while ((at = work.after(at)).head < work.end) {
      multiply_scores();
      multiply_factors(pair);
      make_factors(at, ++pair);
    }
    multiply_factors(pair);
    finish();
  }
  if (CLUSTER > 1) cluster_sync();

  float factor[2] = {1.0f, 1.0f};
  if constexpr (kOut) {
    const float2 other = of_twin(shared.twins, {softmax.sum[0][0], softmax.sum[0][1]});
    softmax.sum[0][0] += other.x, softmax.sum[0][1] += other.y;
    float* lse = static_cast<float*>(p.lse) + first_row(p, work.batch, work.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_lse;
      factor[r] = softmax.finish(0, r, scores.unit, row_lse);
      const int row = work.row0 + fragment_row<1>(0, r) - group * kRows;
      if (group == 0 && work.column0 == 0 && fragment_column() == 0 && row < p.sq)
        lse[row] = row_lse;
    }
  } else if (kOfDs) {
    factor[0] = factor[1] = static_cast<float>(p.scale);
  }
  Slice result(kOut ? p.out : PASS == 1 ? p.dv : PASS == 2 ? p.dk : p.dq, work.batch, work.head);
  const int& width = kOfDs ? p.d : p.v_width;
#pragma unroll
  for (int n = 0; n < kKept; ++n) {
    const int column0 = work.column0 + (group * kKept + n) * SLICE;
    Slice part = result;
    part.data += column0 * part.column;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_row<VECTOR>(part, sum[n][0], r, factor[r],
                        work.row0 + fragment_row<1>(0, r) - group * kRows, work.rows,
                        width - column0);
  }
}
