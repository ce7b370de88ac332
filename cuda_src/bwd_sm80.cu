// Backward for float16 and bfloat16 on the tensor cores of every GPU from Turing on (mma.sync).
//
//   row_delta  delta = rowsum(dO * O) - dlse, and lse in base 2
//   bwd_sm80   a block per tile of keys of a key/value head. dK and dV stay in registers, queries
//              stream past, and what they get from these keys is added to float32 dQ in memory
//   store_dq   a block per tile of queries: dQ times the scale, as 16-bit numbers
//
// Five products, for which the warps stand in a grid:
//   S^T = K Q^T, dP^T = V dO^T       keys x queries     WARPS_K x WARPS_Q
//   dV += P^T dO, dK += dS^T Q       keys x columns     WARPS_K x WARPS_Q
//   dQ += dS K                       queries x columns  whatever reads least
// P and dS go through shared memory. With WARPS_Q 1 a warp's P and dS are the A operands of its dV
// and dK as they lie, and stay in registers; only dQ needs dS from all warps.
//
// All blocks of a head add to the same dQ. They take turns, in the order of their keys, so that
// results repeat bit for bit: a turn is 2^turn_bits queries, and a counter for each turn and warp
// (the same warp has the same part of dQ in every block) says how many blocks have added. A block
// waits only for blocks with smaller indices; GPUs start blocks in the order of their indices,
// though CUDA does not promise it, so those have started. Blocks that run together belong to many
// heads (kTogether), and the few of one head follow each other at the distance of a turn, at which
// the fence that takes the next turn passes on the last one. Where heads are few all blocks of one
// run together, and a fence of its own passes on each turn at once (pass_at_once).
//
// STAGES, buffers for Q and dO:
//   1  copied in when needed
//   2  the next tile is copied in meanwhile; a barrier before S and one before the other products
//   3  as 2, with two buffers for P and dS, and the second barrier alone
// Options: as fwd_sm80.cu; BLOCK_K, BLOCK_Q, WARPS_K, WARPS_Q; STAGES.
// Source: Dao 2023, arXiv:2307.08691, algorithm 2.
#include "softmax.cuh"
#include "tile.cuh"

using Element = ELEMENT;
constexpr int kWarps = WARPS_K * WARPS_Q, kThreads = kWarps * 32;
constexpr bool kInRegisters = WARPS_Q == 1, kOneBarrier = STAGES == 3;
// What blocks that run together touch should stay in L2. At 256, 32 heads together reach 198
// TFLOP/s and 8 of them 248. At 128 more heads wait less under a causal mask.
constexpr int kTogether = HEAD_DIM > 128 ? 8 : 32;
static_assert(BLOCK_K % (16 * WARPS_K) == 0 && BLOCK_Q % (16 * WARPS_Q) == 0, "blocks of 16 x 16");
static_assert(HEAD_DIM % (16 * WARPS_Q) == 0 && VALUE_DIM % (16 * WARPS_Q) == 0, "the same");

using KTile = Tile<BLOCK_K, HEAD_DIM, kThreads>;
using VTile = Tile<BLOCK_K, VALUE_DIM, kThreads>;
using QTile = Tile<BLOCK_Q, HEAD_DIM, kThreads>;
using OTile = Tile<BLOCK_Q, VALUE_DIM, kThreads>;
using PTile = Tile<BLOCK_K, BLOCK_Q, kThreads>;  // P^T and dS^T

struct Stage {
  QTile::Storage q;
  OTile::Storage dout;
};

struct Shared {
  KTile::Storage k;
  VTile::Storage v;
  Stage stages[STAGES];
  PTile::Storage ds_p[1 + kOneBarrier][kInRegisters ? 1 : 2];
  float lse_log2[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

using KShare = Share<WARPS_K, WARPS_Q>;
// Rows of the grid of warps for dQ: with the smallest sum of sides of a warp's part.
DEVICE constexpr int q_rows() {
  int best = 0, least = BLOCK_Q + HEAD_DIM + 1;
  for (int rows = 1; rows <= kWarps; rows *= 2) {
    const int columns = kWarps / rows, sides = BLOCK_Q / rows + HEAD_DIM / columns;
    if (BLOCK_Q % (16 * rows) == 0 && HEAD_DIM % (16 * columns) == 0 && sides <= least)
      best = rows, least = sides;
  }
  return best;
}
static_assert(q_rows() > 0, "no grid of warps divides dQ");
using QShare = Share<q_rows(), kWarps / q_rows()>;
constexpr int kQm = BLOCK_Q / 16 / QShare::kRowWarps, kQn = HEAD_DIM / 8 / QShare::kColumnWarps;
// Columns of 8 of dQ at a time: beside dK and dV there is room for 32 numbers.
constexpr int kChunk = kQm <= 4 && kQn % (8 / kQm) == 0 ? 8 / kQm : 2;

// Where a warp's part of a tile of dQ begins in memory: fragments one after another.
DEVICE float* dq_part(const Params& p, int batch, int head, int q0) {
  const long long tiles = (p.sq + BLOCK_Q - 1) / BLOCK_Q;
  const long long part =
      ((static_cast<long long>(batch) * p.heads + head) * tiles + q0 / BLOCK_Q) * kWarps +
      threadIdx.x / 32;
  return p.dq_sum + part * (kQm * kQn * 128);
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<Element, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm80(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned k_tile = shared_address(&shared.k), v_tile = shared_address(&shared.v);

  // kTogether heads at a time: the first tile of each, then the second of each. Under a causal mask
  // the first keys have the most to do.
  const int heads = p.heads / p.group, tiles = (p.sk + BLOCK_K - 1) / BLOCK_K;
  const int before = blockIdx.x / (kTogether * tiles) * kTogether;
  const int together = min(kTogether, p.batch * heads - before);
  const int index = blockIdx.x - before * tiles;
  const int head = (before + index % together) % heads, batch = (before + index % together) / heads;
  const int tile = index / together, k0 = tile * BLOCK_K;
  const Scores scores(p.scale, p.softcap);

  // Queries that see any of these keys, and those that see all; the same for each head.
  const int lo_shift = 1 - p.hi_shift, hi_shift = 1 - p.lo_shift;
  const Bounds first = k_bounds(k0, p.sq, lo_shift, hi_shift);
  const Bounds last = k_bounds(min(k0 + BLOCK_K, p.sk) - 1, p.sq, lo_shift, hi_shift);
  // From the last tile of queries to the first: under a causal mask blocks of a head begin with the
  // same, and are a turn apart; in ascending order it would be two.
  const int q_first = first.lo / BLOCK_Q * BLOCK_Q;
  const int q_last = last.hi > q_first ? (last.hi - 1) / BLOCK_Q * BLOCK_Q : q_first - BLOCK_Q;
  const int total = (q_last - q_first + BLOCK_Q) / BLOCK_Q * p.group;

  // Of the tile to copy in next:
  int next_head = head * p.group, next = q_last;
  auto load = [&](int i) {
    Stage& stage = shared.stages[i % STAGES];
    QTile::load<VECTOR>(shared_address(&stage.q), Slice(p.q, batch, next_head), next, p.sq, p.d);
    OTile::load<VECTOR>(shared_address(&stage.dout), Slice(p.dout, batch, next_head), next, p.sq,
                        p.v_width);
    const long long stats = first_row(p, batch, next_head) + next;
    for (int j = threadIdx.x; j < BLOCK_Q; j += kThreads) {
      const bool inside = next + j < p.sq;
      copy4(shared_address(&shared.lse_log2[i % STAGES][j]),
            static_cast<float*>(p.lse_log2) + stats + j, inside);
      copy4(shared_address(&shared.delta[i % STAGES][j]), static_cast<float*>(p.delta) + stats + j,
            inside);
    }
    copies_commit();
    next -= BLOCK_Q;
    if (next < q_first) next = q_last, ++next_head;
  };

  const KShare k_share;
  const QShare q_share;
  constexpr int kM = BLOCK_K / 16 / WARPS_K;
  float dk[kM][HEAD_DIM / 8 / WARPS_Q][4], dv[kM][VALUE_DIM / 8 / WARPS_Q][4];
  clear(dk);
  clear(dv);
  int held = -1;  // the counter of this warp's turn, in lane 0
  auto pass_turn = [&] {
    if (held < 0) return;
    fence();
    count_up(p.counters + held);
    held = -1;
  };

  KTile::load<VECTOR>(k_tile, Slice(p.k, batch, head), k0, p.sk, p.d);
  VTile::load<VECTOR>(v_tile, Slice(p.v, batch, head), k0, p.sk, p.v_width);
  copies_commit();
  if (STAGES > 1 && total > 0) load(0);
  if constexpr (kOneBarrier) {
    copies_wait();
    __syncthreads();
    if (total > 1) load(1);
  }
  for (int i = 0, q0 = q_last, q_head = head * p.group; i < total; ++i) {
    if constexpr (!kOneBarrier) {
      if constexpr (STAGES == 1) {
        __syncthreads();  // all are done with the tiles before
        load(i);
      }
      copies_wait();
      __syncthreads();  // this stage is here, and all are done with the other, with P and with dS
      if (STAGES > 1 && i + 1 < total) load(i + 1);
    }
    Stage& stage = shared.stages[i % STAGES];
    const unsigned q_tile = shared_address(&stage.q), o_tile = shared_address(&stage.dout);
    const unsigned ds_tile = shared_address(&shared.ds_p[kOneBarrier ? i % 2 : 0][0]);
    const unsigned p_tile = shared_address(&shared.ds_p[kOneBarrier ? i % 2 : 0][!kInRegisters]);

    // The counter is asked early: once it is needed, the answer is there.
    const int q_turn = q0 >> p.turn_bits, turns = ((p.sq - 1) >> p.turn_bits) + 1;
    const bool enters = q0 == q_last || (q0 + BLOCK_Q) >> p.turn_bits != q_turn;
    if (p.pass_at_once && enters) {
      __syncwarp();
      pass_turn();
    }
    const int turn =
        tile - k_bounds(q_turn << p.turn_bits, p.sk, p.lo_shift, p.hi_shift).lo / BLOCK_K;
    const int counter =
        ((batch * p.heads + q_head) * turns + q_turn) * kWarps + static_cast<int>(threadIdx.x) / 32;
    const int count = enters && threadIdx.x % 32 == 0 ? load_relaxed(p.counters + counter) : 0;
    auto take_turn = [&] {
      if (enters && threadIdx.x % 32 == 0) {
        fence();  // between what was added and passing it on, and between count and adding
        if (held >= 0) count_up(p.counters + held);
        held = counter;
        if (count != turn)
          while (load_acquire(p.counters + counter) != turn) continue;
      }
      __syncwarp();
    };

    constexpr int kN = BLOCK_Q / 8 / WARPS_Q;
    float s[kM][kN][4], ds[kM][kN][4];
    clear(s);
    product<Element>(s, rows_of<KTile, WARPS_K>(k_tile, k_share.row),
                     columns_of<QTile, WARPS_Q>(q_tile, k_share.column));
    scores.transform(s);
    clear(ds);
    product<Element>(ds, rows_of<VTile, WARPS_K>(v_tile, k_share.row),
                     columns_of<OTile, WARPS_Q>(o_tile, k_share.column));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = k_share.fragment_column() + k_share.column_step(n) + e;
        const float lse_log2 = shared.lse_log2[i % STAGES][column];
        const float delta = shared.delta[i % STAGES][column];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            differentiate(s[m][n][2 * r + e], ds[m][n][2 * r + e], lse_log2, delta, scores);
      }
    }
    // Keys that do not exist must not reach dQ either: 0 times what they are may be NaN.
    if (q0 < last.lo || q0 + BLOCK_Q > first.hi || k0 + BLOCK_K > p.sk) {
      auto seen = [&](int key) {
        return key < p.sk ? k_bounds(key, p.sq, lo_shift, hi_shift) : Bounds{0, 0};
      };
      apply_mask(s, k_share, k0, q0, 0.0f, seen);
      apply_mask(ds, k_share, k0, q0, 0.0f, seen);
    }
    stage_rows<Element, PTile>(ds, k_share, ds_tile);
    if constexpr (kInRegisters) {
      accumulate<Element, OTile>(dv, s, o_tile);
      accumulate<Element, QTile>(dk, ds, q_tile);
    } else {
      stage_rows<Element, PTile>(s, k_share, p_tile);
    }
    if constexpr (kOneBarrier) copies_wait();
    __syncthreads();  // dS and P are here; STAGES 3: the next stage too, and all left the last one
    if (kOneBarrier && i + 2 < total) load(i + 2);

    // Of two warps that share a scheduler, one waits for its turn while the other multiplies.
    const bool waits_first = kInRegisters || threadIdx.x / 128 % 2;
    if (waits_first) take_turn();
    if constexpr (!kInRegisters)
      product<Element>(dv, rows_of<PTile, WARPS_K>(p_tile, k_share.row),
                       columns_of<OTile, WARPS_Q, true>(o_tile, k_share.column));
    if (!waits_first) take_turn();
    float* const part = dq_part(p, batch, q_head, q0);
#pragma unroll
    for (int c = 0; c < kQn; c += kChunk) {
      float dq[kQm][kChunk][4];
      clear(dq);
      product<Element>(dq, rows_of<PTile, QShare::kRowWarps, true>(ds_tile, q_share.row),
                       columns_of<KTile, QShare::kColumnWarps, true>(k_tile, q_share.column),
                       c / 2);
#pragma unroll
      for (int m = 0; m < kQm; ++m)
#pragma unroll
        for (int n = 0; n < kChunk; ++n) add_fragment(part + (m * kQn + c + n) * 128, dq[m][n]);
      if constexpr (!kInRegisters) {
        if (c == 0)  // between the chunks of dQ, which then reach memory one by one
          product<Element>(dk, rows_of<PTile, WARPS_K>(ds_tile, k_share.row),
                           columns_of<QTile, WARPS_Q, true>(q_tile, k_share.column));
      }
    }
    q0 -= BLOCK_Q;
    if (q0 < q_first) q0 = q_last, ++q_head;
  }
  copies_wait();
  __syncthreads();
  pass_turn();

  scale_by(dk, static_cast<float>(p.scale));
  stage_rows<Element, KTile>(dk, k_share, k_tile);
  stage_rows<Element, VTile>(dv, k_share, v_tile);
  __syncthreads();
  KTile::store<VECTOR>(Slice(p.dk, batch, head), k_tile, k0, p.sk, p.d);
  VTile::store<VECTOR>(Slice(p.dv, batch, head), v_tile, k0, p.sk, p.v_width);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) store_dq(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  const unsigned tile = shared_address(memory);
  const int tiles = (p.sq + BLOCK_Q - 1) / BLOCK_Q, q0 = blockIdx.x % tiles * BLOCK_Q;
  const int head = blockIdx.x / tiles % p.heads, batch = blockIdx.x / tiles / p.heads;
  const float* part = dq_part(p, batch, head, q0);
  float dq[kQm][kQn][4];
#pragma unroll
  for (int m = 0; m < kQm; ++m)
#pragma unroll
    for (int n = 0; n < kQn; ++n) load_fragment(dq[m][n], part + (m * kQn + n) * 128);
  scale_by(dq, static_cast<float>(p.scale));
  stage_rows<Element, QTile>(dq, QShare(), tile);
  __syncthreads();
  QTile::store<VECTOR>(Slice(p.dq, batch, head), tile, q0, p.sq, p.d);
}
