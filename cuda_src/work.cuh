// Which tiles a block of a Hopper kernel or of wide_sm80.cu works on. (bwd_sm80.cu counts as
// KeyWork does, by itself: with this struct it spilled up to 48 bytes, where it had 40.)
#pragma once
#include "mask.cuh"

// A tile of a head. Heads in sections whose keys and values stay in the L2 cache together; in a
// section tile 0 of all heads first, then tile 1 of all, ...: under a causal mask callers count
// from the one that has the most to do.
struct HeadTile {
  int tile, head, batch;  // tile < 0: there is none of this index
  DEVICE HeadTile(const Params& p, int index, int heads, int tiles, int section) {
    // Else their reciprocals are kept in registers.
    asm volatile("" : "+r"(tiles), "+r"(heads), "+r"(section));
    if (index >= p.batch * heads * tiles) {
      head = batch = 0, tile = -1;
      return;
    }
    const int before = index / (section * tiles) * section;
    const int together = min(section, p.batch * heads - before);
    index -= before * tiles;
    tile = index / together;
    head = (before + index % together) % heads, batch = (before + index % together) / heads;
  }
};

// A query tile and the key blocks that it sees.
template <int kQueries, int kKeys>
struct QueryWork {
  int head, batch, q0, k_begin, blocks;  // q0 < 0: none, the end

  QueryWork() = default;
  DEVICE QueryWork(const Params& p, int index) {
    const int tiles = (p.sq + kQueries - 1) / kQueries;
    const HeadTile at(p, index, p.heads, tiles, p.section);
    head = at.head, batch = at.batch;
    if (at.tile < 0) {
      k_begin = blocks = 0, q0 = -1;
      return;
    }
    q0 = (tiles - 1 - at.tile) * kQueries;
    k_begin = k_bounds(q0, p.sk, p.lo_shift, p.hi_shift).lo / kKeys;
    const int k_end = k_bounds(min(q0 + kQueries, p.sq) - 1, p.sk, p.lo_shift, p.hi_shift).hi;
    blocks = max(0, (k_end + kKeys - 1) / kKeys - k_begin);
  }
};

// A tile of keys of a key/value head, and the tiles of queries that see any of them: the
// same of each head of the group, from the last to the first. Under a causal mask blocks of a head
// then begin with the same, and are a turn apart; in ascending order it would be two.
template <int kKeys, int kQueries>
struct KeyWork {
  int head, batch, k0;
  int q_first, q_last;  // of the first and the last tile of queries
  int total;            // tiles of queries of all heads; -1: there is no such tile of keys

  KeyWork() = default;
  DEVICE KeyWork(const Params& p, int index) {
    const int heads = p.heads / p.group, tiles = (p.sk + kKeys - 1) / kKeys;
    const HeadTile at(p, index, heads, tiles, p.section);
    if (at.tile < 0) {
      total = -1;
      return;
    }
    head = at.head, batch = at.batch;
    k0 = at.tile * kKeys;
    const Bounds first = queries(p, k0), last = queries(p, min(k0 + kKeys, p.sk) - 1);
    q_first = first.lo / kQueries * kQueries;
    q_last = last.hi > q_first ? (last.hi - 1) / kQueries * kQueries : q_first - kQueries;
    total = (q_last - q_first + kQueries) / kQueries * p.group;
  }
  // Those that see a key.
  static DEVICE Bounds queries(const Params& p, int key) {
    return k_bounds(key, p.sq, 1 - p.hi_shift, 1 - p.lo_shift);
  }
  // From one tile of queries to the next.
  DEVICE void step(int& q0, int& q_head) const {
    q0 -= kQueries;
    if (q0 < q_first) q0 = q_last, ++q_head;
  }
  // How many blocks add to dQ of the turn that begins with this query before this one does.
  DEVICE int turn(const Params& p, int query) const {
    return k0 / kKeys - k_bounds(query, p.sk, p.lo_shift, p.hi_shift).lo / kKeys;
  }
};

// Of a result of wide heads: so many rows, kChunk of their kWidth columns, and what streams past
// them, kStreamed rows at a time, the same of each head of a group.
template <bool kOfKeys, int kWidth, int kChunk, int kRows, int kStreamed>
struct WideWork {
  // Streamed rows.
  struct Place {
    int head, row0;
  };
  int rows, others;  // all of a head, and all that stream past
  int row0, head, batch, column0;
  int lo_shift, hi_shift;
  Bounds first, last;  // streamed rows that the first and the last own row see
  Place start;
  int end;  // of heads

  WideWork() = default;
  DEVICE WideWork(const Params& p)
      : rows(kOfKeys ? p.sk : p.sq),
        others(kOfKeys ? p.sq : p.sk),
        lo_shift(kOfKeys ? 1 - p.hi_shift : p.lo_shift),
        hi_shift(kOfKeys ? 1 - p.lo_shift : p.hi_shift) {
    constexpr int kChunks = (kWidth + kChunk - 1) / kChunk;
    const int heads = kOfKeys ? p.heads / p.group : p.heads;
    const int tiles = (rows + kRows - 1) / kRows;
    column0 = blockIdx.x % kChunks * kChunk;
    const HeadTile at(p, blockIdx.x / kChunks, heads, tiles,
                      kOfKeys ? max(1, p.section / p.group) : p.section);
    row0 = (kOfKeys ? at.tile : tiles - 1 - at.tile) * kRows;
    head = again(at.head), batch = again(at.batch);
    first = seen(row0), last = seen(min(row0 + kRows, rows) - 1);
    start = {kOfKeys ? head * p.group : head / p.group, first.lo / kStreamed * kStreamed};
    end = start.head + (start.row0 < last.hi ? (kOfKeys ? p.group : 1) : 0);
  }
  // Streamed rows that an own row sees.
  DEVICE Bounds seen(int row) const { return k_bounds(row, others, lo_shift, hi_shift); }
  DEVICE Place after(Place at) const {
    at.row0 += kStreamed;
    return at.row0 < last.hi ? at : Place{at.head + 1, start.row0};
  }
};
