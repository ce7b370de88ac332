// Online softmax over the fragments of mma.sync: a thread holds two rows of each 16-row tile, and
// the four threads of a quad share them. Scores are in units of which `unit` makes base-2
// exponents.
#pragma once
#include "backward.cuh"
#include "common.cuh"

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2e = 1.44269504088896341f;

// The maximum may lag behind by this factor of 2: exponentials stay below 2^15, which float16
// holds, sums and output carry the same factor, so out and lse are what they would be, and most
// rescaling of the output is saved.
constexpr float kLag = 15.0f;

// Where a thread's exponentials of a row sum to no more than this, no maximum rose beyond kLag, and
// none need have been looked for. (Half of 2^kLag: so no rounding can make the two disagree.)
constexpr float kCalm = 16384.0f;

// Exponents are s * unit - base in one step, of which only base = max * unit is rounded: the same
// factor for a whole row, and so harmless until it overflows. Beyond this the maximum is subtracted
// first.
constexpr float kFar = 4194304.0f;  // 2^22, where the rounding is 2^-2

// How products become base-2 exponents: times `unit`, inside the exponential, except where that
// would not do: with a softcap, and where the scale is not positive (the largest score must be the
// largest exponent, and -inf * 0 is NaN). Then TRANSFORM is 1: `transform` comes first, `unit`
// is 1.
struct Scores {
  float scale_log2, softcap, unit;

  DEVICE Scores(double scale, double cap)
      : scale_log2(static_cast<float>(scale) * kLog2e),
        softcap(cap),
        unit(TRANSFORM ? 1.0f : scale_log2) {}

  template <int kM, int kN>
  DEVICE void transform(float (&s)[kM][kN][4]) const {
    if constexpr (!TRANSFORM) return;
    const float cap = softcap * kLog2e, to_tanh = 2.0f / softcap;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float x = s[m][n][e] * scale_log2;
          // tanh(y) = 1 - 2 / (e^2y + 1): right to the rounding of 1, and it saturates.
          if (softcap > 0) x = cap * (1.0f - __fdividef(2.0f, exp2_approx(x * to_tanh) + 1.0f));
          s[m][n][e] = x;
        }
  }

  // 1 - tanh^2 for a score with this base-2 exponent; 1 without a softcap.
  DEVICE float slope(float x) const {
    if (!TRANSFORM || softcap <= 0) return 1.0f;
    const float t = __fdividef(x, softcap * kLog2e);
    return 1.0f - t * t;
  }
};

// s: products to P. dp to dS = P (dP - delta), times the softcap's slope.
DEVICE void differentiate(float& s, float& dp, float lse_log2, float delta, const Scores& scores) {
  const float x = s * scores.unit;
  s = exp2_approx(x - lse_log2);
  dp = s * (dp - delta) * scores.slope(x);
}

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// kExact: maxima do not lag, and are always subtracted first.
template <int kMTiles, bool kExact = false>
struct OnlineSoftmax {
  float max[kMTiles][2], sum[kMTiles][2];  // sum: of this thread's columns only
  float factor[kMTiles][2];                // of what was summed so far, after a maximum rose
  bool rose = false;                       // one of the warp did
  float part[kMTiles][2];                  // as sum, of the last block alone

  DEVICE OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) max[m][r] = -kInfinity, sum[m][r] = 0;
  }

  // Let the maxima rise to those of s, where they would lag too far behind.
  template <int kS>
  DEVICE void raise(const float (&s)[kMTiles][kS][4], float unit) {
    rose = false;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < kS; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        top = quad_max(top);
        // False where both are -inf.
        const bool rises = (top - max[m][r]) * unit > (kExact ? 0.0f : kLag);
        factor[m][r] = rises ? exp2_approx((max[m][r] - top) * unit) : 1.0f;
        max[m][r] = rises ? top : max[m][r];
        sum[m][r] *= factor[m][r];
        rose |= rises;
      }
    }
    rose = __any_sync(~0u, rose);
  }

  // Whether some maximum of the warp lies beyond kFar.
  DEVICE bool far(float unit) const {
    bool some = false;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) some |= fabsf(seen(m, r) * unit) > kFar;
    return __any_sync(~0u, some);
  }

  // Whether this thread's rows have seen something, and no maximum of the warp is far: where that
  // holds for all, exponentials may be tried without `raise`, and where they are `calm` they are
  // what they would be with it.
  DEVICE bool settled(float unit) const {
    bool all = !far(unit);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) all &= max[m][r] != -kInfinity;
    return all;
  }
  DEVICE bool calm() const {  // this thread's rows
    bool all = true;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) all &= part[m][r] <= kCalm;
    return all;
  }

  // The output so far, after `raise`.
  template <int kO>
  DEVICE void rescale(float (&o)[kMTiles][kO][4]) const {
    if (!rose) return;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kO; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][n][e] *= factor[m][e / 2];
  }

  // s becomes exponentials; `add` adds their sums. kMayBeFar false: `settled` is known.
  template <bool kMayBeFar, int kS>
  DEVICE void exponentiate(float (&s)[kMTiles][kS][4], float unit) {
    const bool far = kExact || (kMayBeFar && this->far(unit));
    if (far) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kS; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] -= seen(m, e / 2);
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = far ? 0.0f : (kMayBeFar ? seen(m, r) : max[m][r]) * unit;
        part[m][r] = 0;
#pragma unroll
        for (int n = 0; n < kS; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[m][n][e] = exp2_approx(s[m][n][e] * unit - base);
            part[m][r] += s[m][n][e];
          }
        }
      }
    }
  }
  DEVICE void add() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[m][r] += part[m][r];
  }

  // The maximum; 0 for a row that has seen nothing: exp2(-inf - 0) = 0, where -inf + inf is NaN.
  DEVICE float seen(int m, int r) const { return max[m][r] == -kInfinity ? 0.0f : max[m][r]; }

  // 1 / (sum of the row), 0 where nothing was seen; and the row's lse.
  DEVICE float finish(int m, int r, float unit, float& lse) {
    const float total = quad_sum(sum[m][r]);
    lse = total == 0 ? -kInfinity
                     : (max[m][r] * unit + (kExact ? log2f(total) : log2_approx(total))) * kLn2;
    return total == 0 ? 0.0f : __fdividef(1.0f, total);
  }
};

// What the backward passes begin with: delta, and lse in base 2, or of float32 as it is. Rows of a
// head are filled up to a multiple of kMultiple, and those get P = 0.
template <class Element, int kMultiple>
DEVICE void write_row_delta(const Params& p) {
  constexpr bool kFloat = sizeof(Element) == sizeof(float);
  auto also = [&](long long row, int batch, int head, int i, int lane, int) {
    if (lane) return;
    // A row that saw nothing has lse -inf, and must get P = exp2(s - inf) = 0; so must one that
    // does not exist.
    const float* lse = static_cast<const float*>(p.lse) + first_row(p, batch, head);
    const float of_row = i < p.sq ? lse[i] : -kInfinity;
    if (kFloat) p.weights[row] = 1;
    static_cast<float*>(p.lse_log2)[row] =
        of_row == -kInfinity ? kInfinity : of_row * (kFloat ? 1.0f : kLog2e);
  };
  if constexpr (kFloat)
    write_delta<float, float, kMultiple>(p, [](float x) { return x; }, also);
  else
    write_delta<float, unsigned short, kMultiple>(p, to_float<Element>, also);
}
