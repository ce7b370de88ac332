// float32 numbers as sums of two float16, times powers of two that keep them in float16's range.
#pragma once
#include "tile.cuh"

// Probabilities, at most 1, are multiplied by this, so that small ones keep their low parts.
constexpr float kOfProbabilities = 32768.0f;

// The nearest float16 numbers, and those of what is left: 11 bits and 11 more, a sign between them.
DEVICE void split_pair(unsigned& high, unsigned& low, float a, float b) {
  high = pack<Half>(a, b);
  low = pack<Half>(a - to_float<Half>(high), b - to_float<Half>(high >> 16));
}

// The power of two for numbers of which the largest is this; the factor that undoes it.
DEVICE float power_for(float largest, float& factor) {
  // 268 - exponent has largest * power in 2^14 .. 2^15; 2^111 at most, so that factors, also those
  // of V divided by kOfProbabilities, are normal numbers.
  const unsigned biased = min(268 - (__builtin_bit_cast(unsigned, largest) >> 23), 238u);
  factor = __builtin_bit_cast(float, 254 - biased << 23);
  return __builtin_bit_cast(float, biased << 23);
}

template <bool kFirst, class First, class Second>
DEVICE auto& first_if(First& first, Second& second) {
  if constexpr (kFirst)
    return first;
  else
    return second;
}

// Factors undo the powers of two: a row of Q or K has one, a tile of V one for each column. They
// lie in the order of the tiles of all heads: this is the number of a tile.
template <int kRows>
DEVICE int q_tile(const Params& p, int batch, int head, int q0) {
  return (batch * p.heads + head) * (filled_up(p.sq, kRows) / kRows) + q0 / kRows;
}
// The first one of a key/value head, and its first row.
template <int kRows>
DEVICE int kv_tile(const Params& p, int batch, int kv_head) {
  return (batch * (p.heads / p.group) + kv_head) * (filled_up(p.sk, kRows) / kRows);
}
template <int kRows>
DEVICE long long first_kv_row(const Params& p, int batch, int kv_head) {
  return 1ll * kRows * kv_tile<kRows>(p, batch, kv_head);
}

// --- fragments of a warpgroup

// Of two neighbours, that of element e.
DEVICE float element(float2 two, int e) { return e % 2 ? two.y : two.x; }

// Scores from products of scaled rows. (One factor after the other: their product may overflow.)
template <int kN>
DEVICE void scale_scores(float (&s)[kN][4], const float* rows, const float* columns) {
  const int thread = thread_again();
  rows += thread / 32 * 16 + thread % 32 / 4, columns += thread % 4 * 2;
  const float row[2] = {rows[0], rows[8]};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 column = *reinterpret_cast<const float2*>(columns + 8 * n);
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = s[n][e] * row[e / 2] * element(column, e);
  }
}

// Backward, S - lse or dP - delta from such products: lse and delta are those of columns, or else
// of rows. One function for all passes, since weights of P are right for the bits of one S.
template <bool kOfColumns, int kN, class Columns, class Less>
DEVICE void undo_and_subtract(float (&c)[kN][4], const float (&row)[2], Columns columns,
                              Less less) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 column = columns(n), number = less(n);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      c[n][e] =
          fmaf(c[n][e] * element(column, e), row[e / 2], -element(number, kOfColumns ? e : e / 2));
  }
}

// o += c, times a factor for each column; from this column of o on.
template <int kN, int kAll>
DEVICE void add_scaled(float (&o)[kAll][4], const float (&c)[kN][4], int column0,
                       const float* columns) {
  columns += column0 + thread_again() % 4 * 2;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 column = *reinterpret_cast<const float2*>(columns + 8 * n);
#pragma unroll
    for (int e = 0; e < 4; ++e) o[column0 / 8 + n][e] += c[n][e] * element(column, e);
  }
}

// Accumulators, each of a thread's two rows times a factor, as left operands: one part, or both.
template <int kParts, int kN>
DEVICE void split_to_operands(unsigned (&parts)[kParts][kN / 2][4], const float (&c)[kN][4],
                              const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float (&two)[4] = c[2 * i + r / 2];
      const float a = two[r % 2 * 2] * factor[r % 2], b = two[r % 2 * 2 + 1] * factor[r % 2];
      if constexpr (kParts == 2)
        split_pair(parts[0][i][r], parts[1][i][r], a, b);
      else
        parts[0][i][r] = pack<Half>(a, b);
    }
}

// A power of two for each of a thread's two rows of accumulators, and the factors that undo them.
template <int kN>
DEVICE void powers_for(const float (&c)[kN][4], float (&power)[2], float (&undo)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n)
      largest = fmaxf(largest, fmaxf(fabsf(c[n][2 * r]), fabsf(c[n][2 * r + 1])));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    power[r] = power_for(largest, undo[r]);
  }
}

// sum += c, times a factor for each of a thread's two rows; from this column of sum on.
template <int kN, int kAll>
DEVICE void add_rows(float (&sum)[kAll][4], const float (&c)[kN][4], int column0,
                     const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[column0 / 8 + n][e] += c[n][e] * factor[e / 2];
}

// P of a row sums to 1, but for what its lse, in float32, is off by: the factor that undoes that.
// (More is missing where lse is that of more keys.)
DEVICE float weight_for(float sum, float lse) {
  const float rounding = 0x1p-20f * fmaxf(fabsf(lse), 1.0f);
  return fabsf(sum - 1) <= fminf(rounding, 0.5f) ? 1 / sum : 1.0f;
}

// A factor that makes 0 of 0, also where it is infinite.
DEVICE float finite(float factor) { return fminf(factor, 0x1.fffffep127f); }

// Row `row` of an array, half r of a fragment times a factor.
template <bool kVector, int kN>
DEVICE void store_floats(const Head<float>& to, const float (&c)[kN][4], int r, float factor,
                         int row, const int& width) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int column = 8 * n + fragment_column();
    const float2 two = {c[n][2 * r] * factor, c[n][2 * r + 1] * factor};
    if constexpr (kVector) {
      if (column < width)
        *reinterpret_cast<float2*>(to.data + row * to.row + column * sizeof(float)) = two;
    } else {
      if (column < width) to.at(row, column) = two.x;
      if (column + 1 < width) to.at(row, column + 1) = two.y;
    }
  }
}
