// float32 arrays as float16 ones, for the tensor cores of Hopper: each array becomes PARTS for
// every row, of a padded width: the high parts, then the low parts, zeros beyond the width.
//
//   split        for fwd_sm90: q and k by rows, v by columns
//   split_rows   for bwd_sm90_kv and bwd_sm90_q: q, dout, k and v by rows
//
// Numbers are multiplied by powers of two: for each row, or where a product sums over rows, P V,
// for each column of a tile of BLOCK_K rows, that which brings the largest number to 2^14 .. 2^15.
// So high + low is off by 2^-24 of the number, or by 2^-40 of that largest number if that is more.
//
// Infinity has no low part. A row of Q or K with some becomes their signs, the factor infinity, and
// so its scores what they should be: infinite, or NaN. In V and dout infinity becomes NaN.
//
// Grid of split: blocks of 8 warps; first those for Q, a row a warp, then those for K, then those
// for V, each for 64 columns of a tile: a warp has every eighth row. Of split_rows: 8 warps, a row
// a warp. Options: PARTS (1 | 2), BLOCK_Q, BLOCK_K (rows of a head's factors are filled up to a
// multiple), HEAD_DIM, VALUE_DIM (widths padded to 64), VECTOR.
#include "split.cuh"

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr int kRows = BLOCK_K / 8;  // of V, a thread

DEVICE float2 pair_at(const Head<float>& x, int row, int column, int width) {
  if (VECTOR)
    return column < width ? *reinterpret_cast<const float2*>(x.data + row * x.row + column * 4ll)
                          : float2{0, 0};
  return {column < width ? x.at(row, column) : 0, column + 1 < width ? x.at(row, column + 1) : 0};
}

// The parts of two neighbours, in row `row` of all, which has so many columns a part.
DEVICE void put(void* parts, long long row, int columns, int column, float a, float b) {
  unsigned* words = static_cast<unsigned*>(parts) + (row * (PARTS * columns) + column) / 2;
  unsigned high, low;
  split_pair(high, low, a, b);
  words[0] = high;
  if (PARTS == 2) words[columns / 2] = low;
}

DEVICE float finite_size(float x) {
  const float size = fabsf(x);
  return size < kInfinity ? size : 0.0f;
}

// Row i of a head, by a warp, as row `row` of all. kSigns: of infinite numbers.
template <int kColumns, bool kSigns>
DEVICE void split_row(const Head<float>& from, int i, int width, void* parts, long long row,
                      float* factor) {
  constexpr int kSlabs = kColumns / 64;
  float2 x[kSlabs];
  float largest = 0;
  bool infinite = false;
#pragma unroll
  for (int n = 0; n < kSlabs; ++n) {
    x[n] = pair_at(from, i, 64 * n + threadIdx.x % 32 * 2, width);
    largest = fmaxf(largest, fmaxf(finite_size(x[n].x), finite_size(x[n].y)));
    infinite |= kSigns && (fabsf(x[n].x) == kInfinity || fabsf(x[n].y) == kInfinity);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  infinite = __any_sync(~0u, infinite);
  float undo;
  const float power = power_for(largest, undo);
  auto scaled = [&](float e) {
    if (!infinite || e != e) return e * power;
    return fabsf(e) == kInfinity ? copysignf(1.0f, e) : 0.0f;
  };
#pragma unroll
  for (int n = 0; n < kSlabs; ++n)
    put(parts, row, kColumns, 64 * n + threadIdx.x % 32 * 2, scaled(x[n].x), scaled(x[n].y));
  if (threadIdx.x % 32 == 0) *factor = infinite ? kInfinity : undo;
}

// Columns from column0 on of the rows from row0 on of a head, whose rows are those from `first` on.
DEVICE void split_columns(const Head<float>& from, void* parts, long long first, int row0, int rows,
                          int column0, int width, float* factors, float2 (&of_warps)[8][32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = column0 + 2 * lane;
  float2 x[kRows], largest = {0, 0}, undo;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * 8 + warp;
    x[i] = row < rows ? pair_at(from, row, column, width) : float2{0, 0};
    largest = {fmaxf(largest.x, finite_size(x[i].x)), fmaxf(largest.y, finite_size(x[i].y))};
  }
  of_warps[warp][lane] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const float2 other = of_warps[w][lane];
    largest = {fmaxf(largest.x, other.x), fmaxf(largest.y, other.y)};
  }
  const float2 power = {power_for(largest.x, undo.x), power_for(largest.y, undo.y)};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * 8 + warp;
    if (row < rows) put(parts, first + row, VALUE_DIM, column, x[i].x * power.x, x[i].y * power.y);
  }
  if (warp == 0)
    *reinterpret_cast<float2*>(factors + column) = {undo.x / kOfProbabilities,
                                                    undo.y / kOfProbabilities};
}

extern "C" __global__ void __launch_bounds__(256) split(const Params p) {
  extern __shared__ __align__(16) char memory[];
  static_assert(sizeof(float2[8][32]) == SHARED_BYTES, "here and in cuda_variants.py");
  const int heads_kv = p.heads / p.group;
  const int q_blocks = (p.sq + 7) / 8, k_blocks = (p.sk + 7) / 8;
  long long block = blockIdx.x;
  if (block < static_cast<long long>(p.batch) * p.heads * q_blocks) {
    const int row = block % q_blocks * 8 + threadIdx.x / 32;
    const int head = block / q_blocks % p.heads, batch = block / q_blocks / p.heads;
    if (row >= p.sq) return;
    split_row<HEAD_DIM, true>(Head<float>(p.q, batch, head), row, p.d, p.q_parts,
                              (batch * 1ll * p.heads + head) * p.sq + row,
                              p.q_factors + first_row(p, batch, head, BLOCK_Q) + row);
    return;
  }
  block -= static_cast<long long>(p.batch) * p.heads * q_blocks;
  if (block < static_cast<long long>(p.batch) * heads_kv * k_blocks) {
    const int row = block % k_blocks * 8 + threadIdx.x / 32;
    const int head = block / k_blocks % heads_kv, batch = block / k_blocks / heads_kv;
    if (row >= p.sk) return;
    split_row<HEAD_DIM, true>(Head<float>(p.k, batch, head), row, p.d, p.k_parts,
                              (batch * 1ll * heads_kv + head) * p.sk + row,
                              p.k_factors + first_kv_row<BLOCK_K>(p, batch, head) + row);
    return;
  }
  block -= static_cast<long long>(p.batch) * heads_kv * k_blocks;
  constexpr int kSlabs = VALUE_DIM / 64;
  const int tiles = filled_up(p.sk, BLOCK_K) / BLOCK_K;
  const int slab = block % kSlabs, tile = block / kSlabs % tiles;
  const int head = block / kSlabs / tiles % heads_kv, batch = block / kSlabs / tiles / heads_kv;
  split_columns(Head<float>(p.v, batch, head), p.v_parts, (batch * 1ll * heads_kv + head) * p.sk,
                tile * BLOCK_K, p.sk, 64 * slab, p.v_width,
                p.v_factors + (kv_tile<BLOCK_K>(p, batch, head) + tile) * 1ll * VALUE_DIM,
                *reinterpret_cast<float2(*)[8][32]>(memory));
}

// Of an array of so many heads a batch entry and rows a head, by the warp with this number.
template <int kColumns, bool kSigns, int kMultiple>
DEVICE void split_row_of(const Array& array, int heads, int rows, int width, void* parts,
                         float* factors, long long number) {
  const int filled = filled_up(rows, kMultiple);
  const int i = number % filled, head = number / filled % heads, batch = number / filled / heads;
  if (i < rows)
    split_row<kColumns, kSigns>(Head<float>(array, batch, head), i, width, parts,
                                number / filled * rows + i, factors + number);
  else if (threadIdx.x % 32 == 0)
    factors[number] = 1;  // of zeros
}

extern "C" __global__ void __launch_bounds__(256) split_rows(const Params p) {
  const int heads_kv = p.heads / p.group;
  const long long queries = p.batch * 1ll * p.heads * filled_up(p.sq, BLOCK_Q);
  const long long keys = p.batch * 1ll * heads_kv * filled_up(p.sk, BLOCK_K);
  const long long number = blockIdx.x * 8ll + threadIdx.x / 32;
  if (number < queries)
    split_row_of<HEAD_DIM, true, BLOCK_Q>(p.q, p.heads, p.sq, p.d, p.q_parts, p.q_factors, number);
  else if (number < 2 * queries)
    split_row_of<VALUE_DIM, false, BLOCK_Q>(p.dout, p.heads, p.sq, p.v_width, p.dout_parts,
                                            p.dout_factors, number - queries);
  else if (number < 2 * queries + keys)
    split_row_of<HEAD_DIM, true, BLOCK_K>(p.k, heads_kv, p.sk, p.d, p.k_parts, p.k_factors,
                                          number - 2 * queries);
  else if (number < 2 * (queries + keys))
    split_row_of<VALUE_DIM, false, BLOCK_K>(p.v, heads_kv, p.sk, p.v_width, p.v_parts, p.v_factors,
                                            number - 2 * queries - keys);
}
