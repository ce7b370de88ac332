// What kernels in float or double (REAL) share: sums in registers, scores and exponentials at those
// dtypes' accuracy.
#pragma once
#include "common.cuh"

using Real = REAL;
constexpr Real kInfinity = static_cast<Real>(__builtin_bit_cast(float, 0x7f800000));

DEVICE Real larger(Real x, Real y) {
  if constexpr (sizeof(Real) == 4) return max(x, y);  // one instruction
  return x > y ? x : y;
}

template <int kM, int kN>
DEVICE void clear(Real (&c)[kM][kN]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) c[i][j] = 0;
}
// c[first + i][j] += part[i][j]
template <int kM, int kN, int kPart>
DEVICE void add(Real (&c)[kM][kN], const Real (&part)[kPart][kN], int first = 0) {
#pragma unroll
  for (int i = 0; i < kPart; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j) c[first + i][j] += part[i][j];
}

// 2^(i / 16). Sixteen doubles are one row of banks: lanes read any of them at once.
using Powers = double[16];
DEVICE void write(Powers& powers) {
  constexpr double kPowers[] = {
      0x1.0000000000000p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
      0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0, 0x1.5ab07dd485429p+0,
      0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0, 0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0,
      0x1.ae89f995ad3adp+0, 0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};
  if (sizeof(Real) == sizeof(double) && threadIdx.x < 16)
    powers[threadIdx.x] = kPowers[threadIdx.x];
}

// exp(x) for x at most little more than 0: ten steps in double, and no branch, so that a thread's
// exponentials overlap; CUDA's own has 15 and a branch each. The error is 1.2e-16, relative
// to 1 and not to a small result. Below exp(-708) it is 0.
DEVICE double exp_branchless(double x, const double* powers) {
  constexpr double kToInteger = 0x1.8p52;  // added, leaves a whole number in the low bits
  const double shifted = fma(x, 16 * 1.4426950408889634, kToInteger);
  const double r = fma(shifted - kToInteger, -0.6931471805599453 / 16, x);  // |r| <= log(2) / 32
  // (e^r - 1 - r) / r^2, so that the error of e^r is least at its largest: 1.2e-17.
  constexpr double kTerms[] = {0x1.6c185e0bd8290p-10, 0x1.11123abf06b87p-7, 0x1.555555545e879p-5,
                               0x1.555555548f728p-3, 0x1.0000000000005p-1};
  double rest = kTerms[0];
#pragma unroll
  for (int n = 1; n < 5; ++n) rest = fma(rest, r, kTerms[n]);
  const double more = fma(r * r, rest, r);  // e^r - 1
  // Whole powers of 2 go to the exponent. What is too small, -inf too and NaN not, is so by its
  // upper half.
  const int sixteenths = static_cast<int>(__builtin_bit_cast(long long, shifted));
  const long long power = __builtin_bit_cast(long long, powers[sixteenths & 15]) +
                          (static_cast<long long>(sixteenths & ~15) << 48);
  const double p = __builtin_bit_cast(double, power);
  const unsigned upper = __builtin_bit_cast(unsigned long long, x) >> 32;
  constexpr unsigned kSmall = 0xc0862000, kInfinite = 0xfff00000;  // -708 and -inf
  const double e = fma(p, more, p);
  return upper - kSmall <= kInfinite - kSmall ? 0 : e;
}

// exp(x * factor - shift), where x and shift are in units of the exponent: of 2 in float.
struct Exponential {
  static constexpr Real kNatural = sizeof(Real) == 4 ? Real(0.6931471805599453) : Real(1);
  Real unit;
  const double* powers;
  DEVICE Exponential(Real factor, const Powers& powers)
      : unit(sizeof(Real) == 4 ? factor * Real(1.4426950408889634) : factor), powers(powers) {}
  DEVICE Real of(Real x) const {
    if constexpr (sizeof(Real) == 4)
      return exp2_approx(x);
    else
      return exp_branchless(x, powers);
  }
  DEVICE Real operator()(Real x, Real shift) const { return of(fma(x, unit, -shift)); }
};

// Scores from products: scale, then softcap.
struct Score {
  Real scale, softcap;
  DEVICE explicit Score(const Params& p) : scale(p.scale), softcap(p.softcap) {}
  DEVICE Real operator()(Real product) const {
    const Real s = product * scale;
    return SOFTCAP ? softcap * tanh(s / softcap) : s;
  }
  // 1 - tanh^2 at a score; 1 without a softcap.
  DEVICE Real slope(Real s) const {
    const Real t = SOFTCAP ? s / softcap : Real(0);
    return 1 - t * t;
  }
};
