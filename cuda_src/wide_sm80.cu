// Heads wider than 256, float16 and bfloat16, forward and backward, on the tensor cores of every
// GPU from Turing on (mma.sync).
//
// Each result is a sum over rows that stream past, by factors that come from scores:
//   PASS   result   own rows   streamed   factors   times
//   0      out      Q          K          P         V
//   1      dV       K          Q          P^T       dO
//   2      dK       K, V       Q, dO      dS^T      Q
//   3      dQ       Q, dO      K, V       dS        K
// Grid: one block per (64 rows, CHUNK columns of the result, head, batch entry), all on x. Its part
// of the result stays in registers; blocks of other columns compute the same factors again. Nothing
// is added up between blocks, so results repeat bit for bit. row_delta comes before passes 2 and 3.
//
// Rows pass through shared memory in slices of SLICE columns, in two buffers: the next slice is
// copied in while one is multiplied, with a barrier between. The warps stand in a grid of 4 x 2, so
// that two share rows: factors reach both through shared memory.
// Options: as fwd_sm80.cu, with widths padded to SLICE; STREAMED, rows that stream past at a time;
// WHOLE: own rows stay in shared memory (1), or pass with the others (0).
// Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2.
#include "softmax.cuh"
#include "tile.cuh"
#include "work.cuh"

using Element = ELEMENT;
constexpr int kRows = 64, kThreads = 32 * WARPS;
constexpr bool kOut = PASS == 0, kOfKeys = PASS == 1 || PASS == 2, kOfDs = PASS >= 2;
constexpr int kHead = HEAD_DIM / SLICE, kValue = kOfDs ? VALUE_DIM / SLICE : 0;  // of S and dP
constexpr int kKept = CHUNK / SLICE;

using Mine = Tile<kRows, SLICE, kThreads>;
using Theirs = Tile<STREAMED, SLICE, kThreads>;
using Factors = Tile<kRows, STREAMED, kThreads>;
using Warps = Share<4, 2>;
using Products = float[1][STREAMED / 16][4];
using Work = WideWork<kOfKeys, kOfDs ? HEAD_DIM : VALUE_DIM, CHUNK, kRows, STREAMED>;
using Place = Work::Place;
static_assert(WARPS == 8, "a grid of 4 x 2");

struct Shared {
  Mine::Storage mine[WHOLE ? kHead + kValue : 2];
  Theirs::Storage theirs[2];
  Factors::Storage factors;
  union {
    float2 twins[kThreads];
    float stats[2][STREAMED];  // lse in base 2 and delta, of streamed queries
  };
};
static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory here and in cuda_variants.py differ");

// Slice n of rows row0 .. of x.
template <class TheTile>
DEVICE void fetch(typename TheTile::Storage& tile, Slice x, int row0, int rows, int n, int width) {
  // Else what addresses are made of is kept in registers, and up to 100 bytes are spilled.
  row0 = again(row0), n = again(n);
  x.data += n * SLICE * x.column;
  TheTile::template load<VECTOR>(shared_address(&tile), x, row0, rows, width - n * SLICE);
}

// What was fetched is there, and all are done with what came before it.
DEVICE void arrived() {
  copies_wait();
  __syncthreads();
}

// What the thread has that holds the other columns of this one's rows.
DEVICE float2 of_twin(float2 (&twins)[kThreads], float2 mine) {
  twins[threadIdx.x] = mine;
  __syncthreads();
  return twins[threadIdx.x ^ 32];
}

extern "C" __global__ void row_delta(const Params p) { write_row_delta<Element, 1>(p); }

extern "C" __global__ void __launch_bounds__(kThreads, 1) wide_sm80(const Params p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Work work(p);
  const int slice0 = work.column0 / SLICE;

  // Both sides of S and of dP.
  const Slice mine_s(kOfKeys ? p.k : p.q, work.batch, work.head),
      mine_dp(kOfKeys ? p.v : p.dout, work.batch, work.head);
  const Array &theirs_s = kOfKeys ? p.q : p.k, &theirs_dp = kOfKeys ? p.dout : p.v;

  int turn = 0;  // the buffer of the slice that is worked on; the next one goes to the other
  const auto fetch_s = [&](int buffer, Place at, int n) {
    if (!WHOLE) fetch<Mine>(shared.mine[buffer], mine_s, work.row0, work.rows, n, p.d);
    fetch<Theirs>(shared.theirs[buffer], Slice(theirs_s, work.batch, at.head), at.row0, work.others,
                  n, p.d);
    copies_commit();
  };
  const auto fetch_dp = [&](int buffer, Place at, int n) {
    if (!WHOLE) fetch<Mine>(shared.mine[buffer], mine_dp, work.row0, work.rows, n, p.v_width);
    fetch<Theirs>(shared.theirs[buffer], Slice(theirs_dp, work.batch, at.head), at.row0,
                  work.others, n, p.v_width);
    copies_commit();
  };
  const auto fetch_times = [&](int buffer, Place at, int n) {
    fetch<Theirs>(shared.theirs[buffer], Slice(kOfDs ? theirs_s : theirs_dp, work.batch, at.head),
                  at.row0, work.others, slice0 + n, kOfDs ? p.d : p.v_width);
    copies_commit();
  };
  const auto fetch_tile = [&](int buffer, Place at) {
    if (kOfKeys) {
      const long long row = first_row(p, work.batch, at.head) + at.row0;
      for (int i = threadIdx.x; i < STREAMED; i += kThreads) {
        const bool inside = at.row0 + i < work.others;
        copy4(shared_address(&shared.stats[0][i]), static_cast<float*>(p.lse_log2) + row + i,
              inside);
        copy4(shared_address(&shared.stats[1][i]), static_cast<float*>(p.delta) + row + i, inside);
      }
    }
    fetch_s(buffer, at, 0);
  };

  const Warps warps;
  const Scores scores(p.scale, p.softcap);
  const auto multiply = [&](Products& c, int own) {
    // Tensor cores cut off what float has no room for. In one sum over 1,024 columns that costs a
    // score up to 6e-6, in sums of slices 8e-7. Only lse shows it.
    Products slice;
    Products& into = kOut ? slice : c;
    if (kOut) clear(slice);
    product<Element>(into, rows_of<Mine, 4>(shared_address(&shared.mine[own]), warps.row),
                     columns_of<Theirs, 2>(shared_address(&shared.theirs[turn]), warps.column));
    if (!kOut) return;
#pragma unroll
    for (int n = 0; n < STREAMED / 16; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[0][n][e] += slice[0][n][e];
  };
  const unsigned factors = shared_address(&shared.factors);

  OnlineSoftmax<1> softmax;
  float lse_log2[2], delta[2];  // of own queries
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = work.row0 + warps.fragment_row(0, r);
    const bool exists = PASS == 3 && row < work.rows;
    const long long i = first_row(p, work.batch, work.head) + row;
    lse_log2[r] = exists ? static_cast<float*>(p.lse_log2)[i] : 0;
    delta[r] = exists ? static_cast<float*>(p.delta)[i] : 0;
  }
  float sum[kKept][1][SLICE / 16][4];
#pragma unroll
  for (int n = 0; n < kKept; ++n) clear(sum[n]);

  if (WHOLE) {
    for (int n = 0; n < kHead; ++n)
      fetch<Mine>(shared.mine[n], mine_s, work.row0, work.rows, n, p.d);
    for (int n = 0; n < kValue; ++n)
      fetch<Mine>(shared.mine[kHead + n], mine_dp, work.row0, work.rows, n, p.v_width);
    copies_commit();
  }
  if (work.start.head < work.end) fetch_tile(turn, work.start);
  for (Place at = work.start, next; at.head < work.end; at = next) {
    next = work.after(at);
    const auto hide = [&](Products& c, float hidden) {
      if (at.row0 >= work.last.lo && at.row0 + STREAMED <= work.first.hi) return;
      apply_mask(c, warps, work.row0, at.row0, hidden, [&](int row) { return work.seen(row); });
    };

    Products s, dp;
    clear(s);
#pragma unroll 1
    for (int n = 0; n < kHead; ++n, turn ^= 1) {
      arrived();
      if (n + 1 < kHead)
        fetch_s(turn ^ 1, at, n + 1);
      else if (kOfDs)
        fetch_dp(turn ^ 1, at, 0);
      else
        fetch_times(turn ^ 1, at, 0);
      multiply(s, WHOLE ? n : turn);
    }
    scores.transform(s);
    if constexpr (kOut) {
      hide(s, -kInfinity);
      float top[2] = {-kInfinity, -kInfinity};  // of this thread's two rows
#pragma unroll
      for (int n = 0; n < STREAMED / 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[0][n][e]);
      const float2 other = of_twin(shared.twins, {top[0], top[1]});
      const float tops[1][1][4] = {{{top[0], other.x, top[1], other.y}}};
      softmax.raise(tops, scores.unit);
#pragma unroll
      for (int n = 0; n < kKept; ++n) softmax.rescale(sum[n]);
      softmax.exponentiate<true>(s, scores.unit);
      softmax.add();
    } else {
      clear(dp);
#pragma unroll 1
      for (int n = 0; n < kValue; ++n, turn ^= 1) {
        arrived();
        if (n + 1 < kValue)
          fetch_dp(turn ^ 1, at, n + 1);
        else
          fetch_times(turn ^ 1, at, 0);
        multiply(dp, WHOLE ? kHead + n : turn);
      }
#pragma unroll
      for (int n = 0; n < STREAMED / 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = warps.fragment_column() + warps.column_step(n) + e % 2;
          differentiate(s[0][n][e], dp[0][n][e],
                        kOfKeys ? shared.stats[0][column] : lse_log2[e / 2],
                        kOfKeys ? shared.stats[1][column] : delta[e / 2], scores);
        }
      hide(kOfDs ? dp : s, 0.0f);
    }
    stage_rows<Element, Factors>(kOfDs ? dp : s, warps, factors);
#pragma unroll
    for (int n = 0; n < kKept; ++n, turn ^= 1) {
      if (kOut) turn = again(turn);  // else up to 12 bytes are spilled
      arrived();
      if (n + 1 < kKept)
        fetch_times(turn ^ 1, at, n + 1);
      else if (next.head < work.end)
        fetch_tile(turn ^ 1, next);
      product<Element>(
          sum[n], rows_of<Factors, 4>(factors, warps.row),
          columns_of<Theirs, 2, true>(shared_address(&shared.theirs[turn]), warps.column));
    }
  }
  arrived();

  float factor[2] = {1.0f, 1.0f};
  if constexpr (kOut) {
    const float2 other = of_twin(shared.twins, {softmax.sum[0][0], softmax.sum[0][1]});
    softmax.sum[0][0] += other.x, softmax.sum[0][1] += other.y;
    float* lse = static_cast<float*>(p.lse) + first_row(p, work.batch, work.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_lse;
      factor[r] = softmax.finish(0, r, scores.unit, row_lse);
      const int row = work.row0 + warps.fragment_row(0, r);
      if (slice0 == 0 && warps.fragment_column() == 0 && row < work.rows) lse[row] = row_lse;
    }
  } else if (kOfDs) {
    factor[0] = factor[1] = static_cast<float>(p.scale);
  }
  const Array& to = kOut ? p.out : PASS == 1 ? p.dv : PASS == 2 ? p.dk : p.dq;
  const Slice result(to, work.batch, work.head);
  const unsigned tile = shared_address(&shared.mine[0]);
#pragma unroll
  for (int n = 0; n < kKept; ++n) {
#pragma unroll
    for (int j = 0; j < SLICE / 16; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][0][j][e] *= factor[e / 2];
    stage_rows<Element, Mine>(sum[n], warps, tile);
    __syncthreads();
    const int column0 = (slice0 + n) * SLICE;
    Slice part = result;
    part.data += column0 * part.column;
    Mine::store<VECTOR>(part, tile, work.row0, work.rows, (kOfDs ? p.d : p.v_width) - column0);
    __syncthreads();
  }
}
