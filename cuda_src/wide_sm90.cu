// Wide heads on Hopper, forward and backward, by tensor copies (TMA) and wgmma: beyond 256 float16
// and bfloat16, beyond 192 float32 that split.cu has made float16 of (TF32 forward beyond 256).
//
// As in wide_sm80.cu a result is a sum over rows that stream past, by factors that come from
// scores:
//   PASS   result   own rows   streamed   factors   times
//   0      out      Q          K          P         V
//   1      dV       K          Q          P^T       dO
//   2      dK       K, V       Q, dO      dS^T      Q
//   3      dQ       Q, dO      K, V       dS        K
// Grid: one block per (64 rows, CHUNK columns of the result, head, batch entry), all on x. Blocks
// of other columns compute the same factors again. row_delta comes before passes 1 to 3.
//
// 64 rows of a result fill the registers of two warpgroups, each with half of its columns. They
// work on pairs of tiles of 64 streamed rows: each makes the factors of one, and both multiply with
// the factors of both, which pass through shared memory. What is multiplied with them, and what
// scores are made of, comes SLICE columns at a time through a ring, in this order:
//   S(0)  S(1) R(0)  S(2) R(1)  ..  R(last)    S: scores of a pair, and dP; R: products of a pair
// so that the factors of one pair are made while products of the one before run.
//
//   thread        waits for          then
//   copying (2-3) empty              copies, which complete own_full, full
//   computing     own_full, full     products; a lane of each warp arrives at empty
//   named barriers: 1, what warpgroups tell each other is there; 2, the factors are
//
// With SPLIT arrays are float32, as in fwd_sm90.cu and bwd_sm90_kv.cu: powers of two are those of
// rows, and of V those of the columns of a pair; a row of factors of a tile gets one of its own. A
// tile's product begins with 0 and is added to the result on CUDA cores, and R(i) comes before
// S(i + 1): there are no registers for both. Pass 3 comes first, and finds the weights of P.
//
// Options: as fwd_sm90.cu, with widths padded to SLICE; PASS, CHUNK, SLICE; WHOLE: own rows stay in
// shared memory (1), or pass with the others (0); STAGES: buffers of the ring. Source: Dao 2023,
// arXiv:2307.08691, algorithms 1 and 2.
#include "hopper.cuh"
#include "softmax.cuh"
#include "split.cuh"
#include "warpgroup.cuh"
#include "work.cuh"

constexpr int kRows = 64, kPair = 2 * kRows, kComputing = 256, kThreads = kComputing + 128;
constexpr bool kOut = PASS == 0, kOfKeys = PASS == 1 || PASS == 2, kOfDs = PASS >= 2;
constexpr bool kAhead = !SPLIT;  // S(i + 1) comes before R(i)
// 168 each to begin with.
constexpr int kCopyingRegisters = SPLIT == 2 ? 24 : 40,
              kComputingRegisters = SPLIT == 2 ? 240 : 232;
constexpr int kHead = HEAD_DIM / SLICE, kValue = kOfDs ? VALUE_DIM / SLICE : 0;  // of S and dP
constexpr int kKept = CHUNK / SLICE / 2;                                         // of a warpgroup
static_assert(CHUNK % (2 * SLICE) == 0 && SLICE % 64 == 0, "halves of whole slices");
static_assert(kHead + kValue + 2 * kKept >= STAGES, "numbers of a pair stay until they are used");
static_assert(SPLIT == 0 || SLICE == 64, "registers of a product");

#if SPLIT
using Stored = float;
#else
using Stored = ELEMENT;
#endif
// Where own rows stay, each computing warpgroup has a ring: with one for both forward took 9 %
// longer. Where not, one brings own slices for both.
constexpr int kRings = WHOLE ? 2 : 1, kTiles = WHOLE ? 1 : 2;  // tiles that a buffer is for
// Parts of a slice lie side by side.
constexpr int kParts = SPLIT == 2 ? 2 : 1;
using Part = Tile<kRows, SLICE, kComputing>;
using TheSlice = Tile<kRows, kParts * SLICE, kComputing>;
using Factors = Tile<kRows, kRows, kComputing>;
using Products = float[1][kRows / 8][4];

// Numbers of each streamed row. Passes 1 and 2: lse (in base 2 without SPLIT) and delta; with SPLIT
// then factors of Q and of dO, and the weight. Passes 0 and 3: factors of K and of V.
constexpr int kNumbers = kOfKeys ? (SPLIT ? 5 : 2) : SPLIT ? (kOut ? 1 : 2) : 0;

struct TensorMaps {
  TensorMap q, k, v, dout;
};

using Work = WideWork<kOfKeys, kOfDs ? HEAD_DIM : VALUE_DIM, CHUNK, kRows, kPair>;
using Place = Work::Place;

struct Shared {
  TheSlice::Storage own[WHOLE ? kHead + kValue : STAGES], theirs[kRings][STAGES][kTiles];
  Factors::Storage factors[2][2][kParts];  // of two pairs, by turns; of two tiles
  float2 twins[kOut || SPLIT ? kComputing : 1];
  // Of two pairs and two tiles too.
  __align__(16) float numbers[2][2][kNumbers ? kNumbers : 1][kNumbers ? kRows : 1];
  float undo[2][2][SPLIT && !kOut ? kRows : 1];  // factors of rows of factors
  // Factors of the columns of a slice of V.
  __align__(16) float of_columns[kRings][SPLIT && kOut ? STAGES : 1][kTiles][64];
  Work work;
  unsigned long long own_full, full[kRings][STAGES], empty[kRings][STAGES];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

// Slice n of the rows from here on, of an array with so many columns a part.
DEVICE void load_slice(unsigned to, const TensorMap& map, unsigned barrier, int n, int columns,
                       int row, int head, int batch) {
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int slab = 0; slab < SLICE / 64; ++slab)
      tensor_load(to + part * sizeof(Part::Storage) + slab * Part::kSlabBytes, map, barrier,
                  part * columns + n * SLICE + slab * 64, row, head, batch);
}

// By a thread for each of the two streamed tiles, and where own rows pass too, by a third for them.
DEVICE void copy(const Params& p, const TensorMaps& maps, Shared& shared, const Work& work,
                 int which) {
  const TensorMap &own_s = kOfKeys ? maps.k : maps.q, &own_dp = kOfKeys ? maps.v : maps.dout;
  const TensorMap &theirs_s = kOfKeys ? maps.q : maps.k, &theirs_dp = kOfKeys ? maps.dout : maps.v;
  const TensorMap& times = kOfDs ? theirs_s : theirs_dp;
  const int ring = WHOLE ? which : 0;
  auto load_own = [&](unsigned to, unsigned barrier, bool of_dp, int n) {
    load_slice(to, of_dp ? own_dp : own_s, barrier, n, of_dp ? VALUE_DIM : HEAD_DIM, work.row0,
               work.head, work.batch);
  };
  if (WHOLE && which == 0 && work.start.head < work.end) {
    const unsigned own_full = shared_address(&shared.own_full);
    barrier_expect(own_full, sizeof(shared.own));
#pragma unroll 1
    for (int n = 0; n < kHead + kValue; ++n)
      load_own(shared_address(&shared.own[n]), own_full, n >= kHead, n < kHead ? n : n - kHead);
  }

  Turn<STAGES> turn;
  unsigned pair = 0;
  // The next buffer, when it is free; with so many bytes this thread's part of it is complete.
  auto begin = [&](int bytes) {
    const unsigned stage = turn.stage;
    barrier_wait(shared_address(&shared.empty[ring][stage]), turn.round ^ 1);
    barrier_expect(shared_address(&shared.full[ring][stage]), bytes);
    turn.next();
    return stage;
  };
  auto put_scores = [&](Place at, bool of_dp, int n) {
    const bool numbered = kNumbers > 0 && which < 2 && !of_dp && n == 0;
    constexpr int kBytes = kRows * sizeof(float);
    const unsigned stage = begin(sizeof(TheSlice::Storage) + (numbered ? kNumbers * kBytes : 0));
    const unsigned full = shared_address(&shared.full[ring][stage]);
    if (which == 2) {
      load_own(shared_address(&shared.own[stage]), full, of_dp, n);
      return;
    }
    const int row0 = at.row0 + which * kRows;
    load_slice(shared_address(&shared.theirs[ring][stage][which - ring]),
               of_dp ? theirs_dp : theirs_s, full, n, of_dp ? VALUE_DIM : HEAD_DIM, row0, at.head,
               work.batch);
    if (!numbered) return;
    const long long row = row0 + (kOfKeys ? first_row(p, work.batch, at.head, kPair)
                                          : first_kv_row<kPair>(p, work.batch, at.head));
    int number = 0;
    auto put = [&](const void* all) {
      bulk_load(shared_address(shared.numbers[pair % 2][which][number++]),
                static_cast<const float*>(all) + row, full, kBytes);
    };
    if (kOfKeys) put(p.lse_log2), put(p.delta);
    if (SPLIT && kOfKeys) put(p.q_factors), put(p.dout_factors), put(p.weights);
    if (SPLIT && !kOfKeys) put(p.k_factors);
    if (SPLIT && PASS == 3) put(p.v_factors);
  };
  // Here and below loops are unrolled: 335 instead of 319 TFLOP/s backward at 512, 196 instead of
  // 184 at 1,024.
  auto put_products = [&](Place at) {
    constexpr int kBytes = SPLIT && kOut ? 64 * sizeof(float) : 0;
#pragma unroll
    for (int n = 0; n < kKept; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned stage = begin(which < 2 ? sizeof(TheSlice::Storage) + kBytes : 0);
        if (which == 2) continue;
        const unsigned full = shared_address(&shared.full[ring][stage]);
        const int slice = work.column0 / SLICE + which * kKept + n;
        load_slice(shared_address(&shared.theirs[ring][stage][which - ring]), times, full, slice,
                   kOfDs ? HEAD_DIM : VALUE_DIM, at.row0 + (i ^ which) * kRows, at.head,
                   work.batch);
        if (kBytes > 0)
          bulk_load(shared_address(shared.of_columns[ring][stage][which - ring]),
                    p.v_factors +
                        (kv_tile<kPair>(p, work.batch, at.head) + at.row0 / kPair) * VALUE_DIM +
                        slice * SLICE,
                    full, kBytes);
      }
  };
  Place before{};
  for (Place at = work.start; at.head < work.end; before = at, at = work.after(at), ++pair) {
#pragma unroll
    for (int n = 0; n < kHead; ++n) put_scores(at, false, n);
#pragma unroll
    for (int n = 0; n < kValue; ++n) put_scores(at, true, n);
    if (!kAhead) put_products(at);
    if (kAhead && pair > 0) put_products(before);
  }
  if (kAhead && pair > 0) put_products(before);
}

// What the thread says that has the other half of this one's rows.
DEVICE float2 of_twin(Shared& shared, float2 mine) {
  shared.twins[threadIdx.x] = mine;
  named_sync(1, kComputing);
  return shared.twins[threadIdx.x ^ 128];
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<Stored, kPair>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    wide_sm90(const Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int group = warpgroup();
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&shared.own_full), 1);
    for (int i = 0; i < kRings * STAGES; ++i) {
      barrier_init(shared_address(&shared.full[0][i]), WHOLE ? 1 : 3);
      barrier_init(shared_address(&shared.empty[0][i]), kComputing / 32 / kRings);
    }
    barrier_init_fence();
    shared.work = Work(p);
  }
  __syncthreads();
  const Work& work = shared.work;  // there, and not in registers
  if (group == 2) {
    registers_lower<kCopyingRegisters>();
    const int which = threadIdx.x % 128 / 32;
    if (threadIdx.x % 32 == 0 && which < (WHOLE ? 2 : 3)) copy(p, maps, shared, work, which);
    return;
  }
  registers_raise<kComputingRegisters>();

  // The first of this thread's two rows of a tile. (Fragments of the second warpgroup begin at 64.)
  const int local_row = fragment_row<1>(0, 0) - group * kRows;
  const Scores scores(p.scale, p.softcap);
  OnlineSoftmax<1, SPLIT != 0> softmax;
  float sum[kKept][1][SLICE / 8][4];
#pragma unroll
  for (int n = 0; n < kKept; ++n) clear(sum[n]);
  Products s, dp;

  const int ring = WHOLE ? group : 0;
  Turn<STAGES> turn;     // the next buffer
  unsigned last = 0;     // the one before
  bool running = false;  // products with that
  auto release_last = [&] {
    __syncwarp();  // all lanes have seen a phase before the next may begin
    release(shared_address(&shared.empty[ring][last]), SPLIT && kOut);
  };
  // Start products with the next buffer; those with the one before are done.
  auto with_next = [&](auto products) {
    barrier_wait(shared_address(&shared.full[ring][turn.stage]), turn.round);
    wgmma_fence();
    products(turn.stage);
    wgmma_commit();
    if (running) {
      wgmma_wait<1>();
      release_last();
    }
    running = true, last = turn.stage;
    turn.next();
  };
  auto finish = [&] {
    wgmma_wait<0>();
    if (running) release_last();
    running = false;
  };
  // With the next buffers c = a b^T of so many slices.
  auto multiply = [&](Products& c, int own, int slices) {
    // Else what c was is kept from pair to pair, and up to 250 bytes are spilled.
    if (SPLIT && !kOut) clear(c);
#pragma unroll 1
    for (int n = 0; n < slices; ++n)
      with_next([&](unsigned stage) {
        const unsigned a = operand(shared_address(&shared.own[WHOLE ? own + n : stage]));
        const unsigned b = operand(shared_address(&shared.theirs[ring][stage][group - ring]));
        constexpr int kLow = sizeof(Part::Storage) >> 4;
#pragma unroll
        for (int term = first_term(kParts); term < 3; ++term)
#pragma unroll
          for (int i = 0; i < SLICE / 16; ++i)
            wgmma<false>(c[0], a + (term == kOfKeys) * kLow + columns_at<Part>(i),
                         b + (term == !kOfKeys) * kLow + columns_at<Part>(i),
                         n > 0 || term > first_term(kParts) || i > 0);
      });
  };
  // Sums over more than 256 columns are cut too often for lse, and with SPLIT those of 64: so many
  // slices, each from 0 on, are added on CUDA cores.
  constexpr int kPiece = SPLIT ? 1 : kOut ? 256 / SLICE : kHead;
  constexpr int kPiecesAtOnce = SPLIT ? 1 : 4;  // 4: all; a loop serialises products
  Products piece;
  auto add_piece = [&] {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] += piece[0][n][e];
  };
  auto multiply_factors = [&](unsigned pair) {
    named_sync(2, kComputing);
    float part[SLICE / 8][4];                        // with SPLIT
    constexpr int kAtOnce = SPLIT && !kOut ? 1 : 2;  // else several have registers
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
#pragma unroll kAtOnce
      for (int i = 0; i < 2; ++i) {
        const int tile = i ^ group;
        const bool first = SPLIT && (!kOut || i == 0);  // of a sum
        with_next([&](unsigned stage) {
          const unsigned a = operand(shared_address(&shared.factors[pair % 2][tile]));
          const unsigned b =
              operand(shared_address(&shared.theirs[ring][stage][group - ring]), Part::kSlabBytes);
          constexpr int kLowA = sizeof(Factors::Storage) >> 4, kLowB = sizeof(Part::Storage) >> 4;
#pragma unroll
          for (int term = first_term(kParts); term < 3; ++term)
#pragma unroll
            for (int k = 0; k < kRows / 16; ++k)
              wgmma<true>(first_if<SPLIT != 0>(part, sum[n][0]),
                          a + (term == 0) * kLowA + columns_at<Factors>(k),
                          b + (term == 1) * kLowB + rows_at(k),
                          !first || term > first_term(kParts) || k > 0);
        });
        if constexpr (SPLIT) {
          if (kOut && i == 0) continue;
          if constexpr (kOut) {
            wgmma_wait<0>();
            add_scaled(sum[n][0], part, 0, shared.of_columns[ring][last][group - ring]);
            release_last();  // its factors have been read
            running = false;
          } else {
            finish();
            const float undo[2] = {shared.undo[pair % 2][tile][local_row],
                                   shared.undo[pair % 2][tile][local_row + 8]};
            add_rows(sum[n][0], part, 0, undo);
          }
        }
      }
    }
  };

  // Of this thread's own row r: lse and delta of a query, and with SPLIT factors of S and dP.
  // A row that does not exist has those of the last. (They are loaded where they are used:
  // registers are few.)
  const int row0 = work.row0 + local_row;
  auto of_own = [&](const void* all, int r) -> float {
    const long long head = kOfKeys ? first_kv_row<kPair>(p, work.batch, work.head)
                                   : first_row(p, work.batch, work.head, kPair);
    return load_4(static_cast<const float*>(all) + head + min(row0 + 8 * r, work.rows - 1));
  };
  auto of_s = [&](int r) {
    return of_own(kOfKeys ? p.k_factors : p.q_factors, r) *
           (kOut ? 1.0f : static_cast<float>(p.scale));
  };
  // Of pass 3 with SPLIT: sums of P, and what rounding took from them.
  float total[2] = {}, missed[2] = {};

  // Of columns 8 n .., which are streamed rows, number `which` of this thread's two.
  auto numbers = [&](unsigned pair, int which, int n) {
    const float* all = shared.numbers[pair % 2][group][which];
    return load_shared8(shared_address(all) + 4 * (8 * n + fragment_column()));
  };
  auto hide = [&](Products& c, Place at, float hidden) {
    const int other0 = at.row0 + group * kRows;
    if (other0 >= work.last.lo && other0 + kRows <= work.first.hi) return;
    apply_mask(c, AllColumns<1>(), work.row0 - group * kRows, other0, hidden, [&](int row) {
      return kOfKeys && row >= work.rows ? Bounds{0, 0} : work.seen(row);
    });
  };
  // Where these are among the numbers, and the factor of what a factor is multiplied with.
  constexpr int kOfS = kOfKeys ? 2 : 0, kOfDp = kOfS + 1, kOfTimes = PASS == 1 ? kOfDp : kOfS;

  // With SPLIT, but for pass 0: S becomes P.
  auto exponentiate = [&](Place at, unsigned pair) {
    const float row[2] = {of_s(0), of_s(1)};
    float2 lse{};
    if (!kOfKeys) lse = {of_own(p.lse_log2, 0), of_own(p.lse_log2, 1)};
    undo_and_subtract<kOfKeys>(
        s[0], row, [&](int n) { return numbers(pair, kOfS, n); },
        [&](int n) { return kOfKeys ? numbers(pair, 0, n) : lse; });
    hide(s, at, -kInfinity);
    float more[2] = {missed[0], missed[1]};
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 weight = kOfKeys ? numbers(pair, 4, n) : float2{1, 1};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[0][n][e] = exp2_approx(s[0][n][e] * kLog2e) * element(weight, e);
        if (PASS == 3) more[e / 2] += s[0][n][e];
      }
    }
#pragma unroll
    for (int r = 0; r < 2 && PASS == 3; ++r) {
      const float both = total[r] + more[r];
      missed[r] = more[r] - (both - total[r]);
      total[r] = both;
    }
  };
  auto multiply_scores = [&](Place at, unsigned pair) {
    multiply(s, 0, min(kPiece, kHead));
#pragma unroll kPiecesAtOnce
    for (int n = kPiece; n < kHead; n += kPiece) {
      if (SPLIT || n > kPiece) finish();
      if (n > kPiece) add_piece();
      multiply(piece, n, min(kPiece, kHead - n));
    }
    if constexpr (SPLIT && !kOut) {
      finish();
      if (kPiece < kHead) add_piece();
      exponentiate(at, pair);
    }
    if (kOfDs) multiply(dp, kHead, kValue);
  };

  // From scores of this warpgroup's tile to factors, in shared memory.
  auto make_factors = [&](Place at, unsigned pair) {
    float2 lse{}, delta{};
    if (PASS == 3 && !SPLIT) lse = {of_own(p.lse_log2, 0), of_own(p.lse_log2, 1)};
    if (PASS == 3) delta = {of_own(p.delta, 0), of_own(p.delta, 1)};
    if constexpr (kOut) {
      if (kPiece < kHead) add_piece();
      if constexpr (SPLIT) {
        const float row[2] = {of_s(0), of_s(1)};
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) {
          const float2 of_column = numbers(pair, kOfS, n);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[0][n][e] = s[0][n][e] * row[e / 2] * element(of_column, e);
        }
      }
      scores.transform(s);
      hide(s, at, -kInfinity);
      float top[2] = {-kInfinity, -kInfinity};  // of this thread's two rows
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[0][n][e]);
      const float2 other = of_twin(shared, {top[0], top[1]});
      const float tops[1][1][4] = {{{top[0], other.x, top[1], other.y}}};
      softmax.raise(tops, scores.unit);
      softmax.template exponentiate<true>(s, scores.unit);
      softmax.add();
    } else if constexpr (SPLIT) {
      if constexpr (kOfDs) {
        const float* all = kOfKeys ? p.v_factors : p.dout_factors;
        const float row[2] = {of_own(all, 0), of_own(all, 1)};
        undo_and_subtract<kOfKeys>(
            dp[0], row, [&](int n) { return numbers(pair, kOfDp, n); },
            [&](int n) { return kOfKeys ? numbers(pair, 1, n) : delta; });
        hide(dp, at, 0.0f);  // 0 times what is hidden may be NaN
      }
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const float2 of_times = numbers(pair, kOfTimes, n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[0][n][e] = s[0][n][e] * (kOfDs ? dp[0][n][e] : 1.0f) * finite(element(of_times, e));
      }
    } else {
      scores.transform(s);
      if (!kOfDs) clear(dp);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
        const float2 of_query = kOfKeys ? numbers(pair, 0, n) : lse;
        const float2 less = kOfKeys ? numbers(pair, 1, n) : delta;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          differentiate(s[0][n][e], dp[0][n][e], element(of_query, kOfKeys ? e : e / 2),
                        element(less, kOfKeys ? e : e / 2), scores);
      }
      hide(kOfDs ? dp : s, at, 0.0f);
    }

    Products& made = !SPLIT && kOfDs ? dp : s;
    const unsigned tile = shared_address(&shared.factors[pair % 2][group]);
    const unsigned origin = stored_origin<Factors>(tile);
    float power[2] = {1, 1};
    if constexpr (SPLIT && kOut) {
      power[0] = power[1] = kOfProbabilities;
    } else if constexpr (SPLIT) {
      float undo[2];
      powers_for(made[0], power, undo);
      if (fragment_column() == 0) {
        shared.undo[pair % 2][group][local_row] = undo[0];
        shared.undo[pair % 2][group][local_row + 8] = undo[1];
      }
    }
    if constexpr (SPLIT) {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        unsigned parts[kParts][1][4];
        split_to_operands(parts, reinterpret_cast<const float (&)[2][4]>(made[0][2 * i]), power);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          store_matrices(Factors::part(origin + part * sizeof(Factors::Storage), 0, i),
                         parts[part][0]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) store_columns<Factors>(origin, i, made[0], i, power);
    }
    fence_async();
    finish();
    if constexpr (kOut) {
#pragma unroll
      for (int n = 0; n < kKept; ++n) softmax.rescale(sum[n]);
    }
  };

  Place at = work.start;
  if (at.head < work.end) {
    if (WHOLE) barrier_wait(shared_address(&shared.own_full), 0);
    unsigned pair = 0;
    if constexpr (kAhead) {
      multiply_scores(at, pair);
      finish();
      make_factors(at, pair);
      while ((at = work.after(at)).head < work.end) {
        multiply_scores(at, pair + 1);
        multiply_factors(pair);
        make_factors(at, ++pair);
      }
      multiply_factors(pair);
      finish();
    } else {
      do {
        multiply_scores(at, pair);
        finish();
        make_factors(at, pair);
        multiply_factors(pair++);
      } while ((at = work.after(at)).head < work.end);
    }
  }

  float factor[2] = {1.0f, 1.0f};
  if constexpr (kOfDs) factor[0] = factor[1] = static_cast<float>(p.scale);
  if constexpr (kOut) {
    const float2 other = of_twin(shared, {softmax.sum[0][0], softmax.sum[0][1]});
    softmax.sum[0][0] += other.x, softmax.sum[0][1] += other.y;
  } else if constexpr (SPLIT && PASS == 3) {
    const float2 other = of_twin(shared, {total[0], total[1]});
    total[0] += other.x, total[1] += other.y;
  }
  const Array& result = kOut ? p.out : PASS == 1 ? p.dv : PASS == 2 ? p.dk : p.dq;
  const int& width = kOfDs ? p.d : p.v_width;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + 8 * r;
    const bool writes =
        group == 0 && fragment_column() == 0 && work.column0 == 0 && row < work.rows;
    if constexpr (kOut) {
      float row_lse;
      factor[r] = softmax.finish(0, r, scores.unit, row_lse);
      if (writes) static_cast<float*>(p.lse)[first_row(p, work.batch, work.head) + row] = row_lse;
    } else if constexpr (SPLIT && PASS == 3) {
      const float weight = weight_for(quad_sum(total[r]), of_own(p.lse_log2, r));
      if (writes) p.weights[first_row(p, work.batch, work.head, kPair) + row] = weight;
      factor[r] *= weight;
    }
#pragma unroll
    for (int n = 0; n < kKept; ++n) {
      const int column0 = work.column0 + (group * kKept + n) * SLICE;
      Head<unsigned short> to(result, work.batch, work.head);
      to.data += column0 * to.column;
      if constexpr (SPLIT) {
        const Head<float>& floats = reinterpret_cast<const Head<float>&>(to);
        if (row < work.rows)
          store_floats<VECTOR>(floats, sum[n][0], r, factor[r], row, width - column0);
      } else {
        store_row<VECTOR>(to, sum[n][0], r, factor[r], row, work.rows, width - column0);
      }
    }
  }
}
