"""From a problem and its tiles to what is compiled, of how many blocks, and the memory it takes.

A kernel's file name is its dispatch name: `fwd_sm80.cu` holds `fwd_sm80`. Every variant (dtype,
widths, tiles, whether 16-byte copies are possible) is a module of its own, compiled on first use.
"""

from __future__ import annotations

import functools
import itertools
import struct
from typing import NamedTuple

from . import _compile
from .cuda_tiles import (
    ForwardOnHopper,
    HopperBackward,
    HopperDouble,
    HopperDoubleBackward,
    HopperTiles,
    HopperTwoPass,
    OnHopper,
    Portable,
    SplitTiles,
    Tiles,
    WideHopper,
    WideTiles,
)
from .problem import Problem

#: Params of params.cuh: eight arrays (pointer and four strides), 16 pointers, sizes, numbers.
PARAMS = struct.Struct("56q13i2d")
KIB = 1024
#: The element type of the tensor-core kernels, and the arithmetic of the CUDA-core ones.
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
REALS = {"float32": "float", "float64": "double"}
DELTA_ROWS = 64  # of a block of row_delta


class Variant(NamedTuple):
    """One compiled kernel: its file, entry point, macros and sizes of a block."""

    file: str
    entry: str
    macros: _compile.Macros
    threads: int
    shared_bytes: int


def rounded_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _tile_bytes(rows: int, width: int) -> int:
    return rounded_up(2 * rows * width, 1024)


@functools.lru_cache(4096)
def forward_steps(
    problem: Problem, tiles: Portable | ForwardOnHopper, vector: bool
) -> list[tuple[Variant, int]]:
    """What a forward pass launches: kernels, and of how many blocks."""
    variant = forward_variant(problem, tiles, vector)
    blocks = problem.batch * problem.heads * -(-problem.sq // tiles.resident)
    if isinstance(tiles, HopperDouble):
        blocks *= tiles.cluster
    elif not isinstance(tiles, HopperTiles):
        blocks *= _chunks(problem.dv, tiles)[1]
    if isinstance(tiles, SplitTiles) and tiles.parts:
        return [split_step(problem, tiles, True, vector), (variant, blocks)]
    return [(variant, blocks)]


def forward_variant(problem: Problem, tiles: Portable | ForwardOnHopper, vector: bool) -> Variant:
    if isinstance(tiles, HopperTiles):
        return _hopper_variant(problem, tiles, vector)
    if isinstance(tiles, HopperDouble):
        return _fp64_variant(problem, tiles)
    if isinstance(tiles, WideTiles | WideHopper):
        return _wide_variant(problem, tiles, vector, 0)
    if problem.dtype in REALS:
        chunk = _chunks(problem.dv, tiles)[0]
        macros = {"TRANSFORM": transform(problem), "CHUNK": chunk}
        maxima = tiles.across * tiles.resident
        return _simt_variant(
            "fwd_simt", "fwd_simt", problem, tiles, vector, macros, (problem.d,), maxima
        )
    d, dv = rounded_up(problem.d, 32), rounded_up(problem.dv, 32)
    q_or_out = max(_tile_bytes(tiles.resident, d), _tile_bytes(tiles.resident, dv))
    shared = q_or_out + _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows = {"BLOCK_Q": tiles.resident, "BLOCK_K": tiles.streamed}
    return _16_bit_variant("fwd_sm80", "fwd_sm80", problem, tiles.warps, vector, rows, shared)


@functools.lru_cache(4096)
def backward_steps(
    problem: Problem, tiles: Portable | OnHopper, vector: bool
) -> list[tuple[Variant, int]]:
    """What a backward pass launches: kernels, and of how many blocks."""
    if isinstance(tiles, HopperBackward):
        steps = _sm90_steps
    elif isinstance(tiles, HopperTwoPass):
        steps = _sm90_two_pass_steps
    elif isinstance(tiles, HopperDoubleBackward):
        steps = _fp64_steps
    elif isinstance(tiles, WideTiles | WideHopper):
        steps = _wide_steps
    else:
        steps = _simt_steps if problem.dtype in REALS else _sm80_steps
    before = []
    if isinstance(tiles, SplitTiles) and tiles.parts:
        before = [split_step(problem, tiles, False, vector)]
    return [*before, *steps(problem, tiles, vector)]


def _simt_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    def width(parts):
        return {1: problem.d, 2: problem.dv, 3: max(problem.d, problem.dv)}[parts]

    def step(entry, parts):
        kept = (problem.d, problem.dv) if parts & 1 else (problem.d,)
        stats = 2 * tiles.streamed  # lse and delta
        macros = {"PARTS": parts, "CHUNK": _chunks(width(parts), tiles)[0]}
        return _simt_variant("bwd_simt", entry, problem, tiles, vector, macros, kept, stats)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    blocks = heads_kv * -(-problem.sk // tiles.resident)
    # dK with dQ (1), and dV (2): wide ones do not fit at once.
    parts = (3,) if max(problem.d, problem.dv) <= 128 else (1, 2)
    return [
        (step("row_delta", parts[0]), -(-heads * problem.sq // DELTA_ROWS)),
        *((step("bwd_simt", n), blocks * _chunks(width(n), tiles)[1]) for n in parts),
    ]


def _sm80_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    keys, queries = tiles.resident, tiles.streamed
    d, dv = _backward_width(problem.d, tiles), _backward_width(problem.dv, tiles)
    stage = _tile_bytes(queries, d) + _tile_bytes(queries, dv)
    ds_and_p = (1 if tiles.across == 1 else 2) * _tile_bytes(queries, keys)
    shared = _tile_bytes(keys, d) + _tile_bytes(keys, dv) + tiles.stages * stage
    shared += (2 if tiles.stages == 3 else 1) * ds_and_p
    shared += rounded_up(tiles.stages * 2 * 4 * queries, 1024)  # lse and delta
    macros = {
        "HEAD_DIM": d,
        "VALUE_DIM": dv,
        "BLOCK_K": keys,
        "BLOCK_Q": queries,
        "WARPS_K": tiles.warps // tiles.across,
        "WARPS_Q": tiles.across,
        "STAGES": tiles.stages,
    }

    def step(entry):
        return _16_bit_variant("bwd_sm80", entry, problem, tiles.warps, vector, macros, shared)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    store_dq = step("store_dq")._replace(shared_bytes=_tile_bytes(queries, d))
    return [
        (step("row_delta"), -(-heads * problem.sq // DELTA_ROWS)),
        (step("bwd_sm80"), heads_kv * -(-problem.sk // keys)),
        (store_dq, heads * -(-problem.sq // queries)),
    ]


def _sm90_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    keys, queries = tiles.resident, tiles.streamed
    d, dv = rounded_up(problem.d, 32), rounded_up(problem.dv, 32)
    if queries != 128:
        d = max(d, 96)  # two slabs
    shared = _slab_bytes(keys, d) + _slab_bytes(keys, dv) + _rings_bytes(queries, d, dv)
    shared += 2 * _slab_bytes(queries, keys)  # dS
    shared += tiles.dq_stages * 4 * queries * _dq_width(tiles) + KIB  # which tiles, and barriers
    macros = {
        "HEAD_DIM": d,
        "VALUE_DIM": dv,
        "BLOCK_Q": queries,
        "DQ_STAGES": tiles.dq_stages,
    }

    def step(entry):
        return _16_bit_variant("bwd_sm90", entry, problem, 12, vector, macros, shared)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    q_tiles, store_dq = heads * -(-problem.sq // queries), step("store_dq")
    return [
        (step("row_delta"), -(-stats_rows(problem, tiles) // DELTA_ROWS)),
        (step("bwd_sm90"), heads_kv * -(-problem.sk // keys)),
        (store_dq._replace(threads=256, shared_bytes=_slab_bytes(queries, d)), q_tiles),
    ]


def _sm90_two_pass_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    parts = max(tiles.parts, 1)
    d, dv = (parts * rounded_up(width, 64) for width in (problem.d, problem.dv))
    queries, keys = tiles.streamed, tiles.keys  # of the passes for dK and dV, and for dQ

    def step(file, entry, macros, shared, warps=12):
        macros = {"SPLIT": tiles.parts, **macros}
        for name, width in (("HEAD_DIM", problem.d), ("VALUE_DIM", problem.dv)):
            if tiles.parts and width > 128:  # whole slices
                macros[name] = rounded_up(width, 64)
        return _16_bit_variant(file, entry, problem, warps, vector, macros, shared)

    shared = _slab_bytes(64, d) + _slab_bytes(64, dv)
    shared += _rings_bytes(queries, d, dv, (3, 2) if tiles.parts else (1, 1))
    shared += tiles.p_stages * 4 * queries * 64 + KIB
    of_kv = {"BLOCK_Q": queries, "P_STAGES": tiles.p_stages, "STATS_KEYS": keys}, shared
    shared = sum(_slab_bytes(tiles.queries + 2 * keys, width) for width in (d, dv))
    shared += rounded_up(104 + 16 * (keys if tiles.parts else 4), KIB)  # barriers, and factors
    macros = {"BLOCK_Q": tiles.queries, "BLOCK_K": keys, "STATS_ROWS": queries}
    of_q = macros, shared, 4 + tiles.queries // 16
    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    return [
        (step("bwd_sm90_kv", "row_delta", *of_kv), -(-stats_rows(problem, tiles) // DELTA_ROWS)),
        (step("bwd_sm90_q", "bwd_sm90_q", *of_q), heads * -(-problem.sq // tiles.queries)),
        (step("bwd_sm90_kv", "bwd_sm90_kv", *of_kv), heads_kv * -(-problem.sk // 64)),
    ]


def _wide_variant(
    problem: Problem, tiles: WideTiles | WideHopper, vector: bool, number: int
) -> Variant:
    """`number`: the pass, as wide_sm80.cu counts them."""
    if isinstance(tiles, WideHopper):
        return _wide_hopper_variant(problem, tiles, vector, number)
    of_ds = number >= 2
    d, dv = rounded_up(problem.d, tiles.slice), rounded_up(problem.dv, tiles.slice)
    own_slices = (d + of_ds * dv) // tiles.slice if tiles.whole else 2
    shared = own_slices * _tile_bytes(64, tiles.slice) + _tile_bytes(64, tiles.streamed)
    shared += 2 * _tile_bytes(tiles.streamed, tiles.slice) + 2 * KIB  # what threads tell each other
    macros = {
        "HEAD_DIM": d,
        "VALUE_DIM": dv,
        "PASS": number,
        "CHUNK": _chunks(d if of_ds else dv, tiles)[0],
        "STREAMED": tiles.streamed,
        "SLICE": tiles.slice,
        "WHOLE": int(tiles.whole),
    }
    return _16_bit_variant("wide_sm80", "wide_sm80", problem, 8, vector, macros, shared)


def _wide_hopper_variant(problem: Problem, tiles: WideHopper, vector: bool, number: int) -> Variant:
    """`number`: the pass, as above."""
    of_ds, parts = number >= 2, max(tiles.parts, 1)
    # Factors of four tiles; numbers, barriers and what warpgroups tell each other.
    fixed = 4 * parts * _slab_bytes(64, 64) + (11 if tiles.parts else 3) * KIB

    def fitted(columns: int, whole: bool) -> tuple[int, int, int, int, int]:
        d, dv = rounded_up(problem.d, columns), rounded_up(problem.dv, columns)
        chunk = _chunks(d if of_ds else dv, tiles._replace(slice=columns))[0]
        own = _slab_bytes(64, parts * (d + of_ds * dv))
        slices = (2 if whole else 3) * parts * _slab_bytes(64, columns)
        room = 227 * KIB - fixed - (own if whole else 0)
        stages = min(8, room // slices, (d + of_ds * dv + chunk) // columns)
        return d, dv, chunk, stages, fixed + (own if whole else 0) + stages * slices

    # Slices as wide as may be, but not padded for it; own rows stay where four fit beside them.
    padded = any(rounded_up(width, 64) % tiles.slice for width in (problem.d, problem.dv))
    wide = not (tiles.parts or padded or fitted(tiles.slice, True)[3] < 4)
    columns = tiles.slice if wide else 64
    whole = fitted(columns, True)[3] >= 4
    d, dv, chunk, stages, shared = fitted(columns, whole)
    macros = {
        "SPLIT": tiles.parts,
        "HEAD_DIM": d,
        "VALUE_DIM": dv,
        "PASS": number,
        "CHUNK": chunk,
        "SLICE": columns,
        "WHOLE": int(whole),
        "STAGES": stages,
    }
    return _16_bit_variant("wide_sm90", "wide_sm90", problem, 12, vector, macros, shared)


def _chunks(width: int, tiles: Portable | WideHopper) -> tuple[int, int]:
    """Columns of a result of this width that a block makes, and how many blocks share a row."""
    step = 2 * tiles.slice if isinstance(tiles, WideHopper) else tiles.slice  # two warpgroups
    steps = -(-width // step)
    blocks = -(-steps * step // tiles.chunk)
    return -(-steps // blocks) * step, blocks


def _wide_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv

    def step(number, rows, width):
        blocks = rows[0] * -(-rows[1] // tiles.resident) * _chunks(width, tiles)[1]
        return _wide_variant(problem, tiles, vector, number), blocks

    dv, dk, dq = (
        step(1, (heads_kv, problem.sk), problem.dv),
        step(2, (heads_kv, problem.sk), problem.d),
        step(3, (heads, problem.sq), problem.d),
    )
    row_delta = dv[0]._replace(entry="row_delta", threads=256, shared_bytes=0)
    return [(row_delta, -(-stats_rows(problem, tiles) // DELTA_ROWS)), dq, dv, dk]


def _slab_bytes(rows: int, width: int) -> int:
    """Of a tile as a tensor copy writes it."""
    return 2 * rows * rounded_up(width, 64)


def _rings_bytes(queries: int, d: int, dv: int, numbers: tuple[int, int] = (1, 1)) -> int:
    """Of two struct Ring: two tiles of q or dout, with numbers of each row, and barriers."""
    return sum(
        rounded_up(2 * _slab_bytes(queries, width) + 2 * 4 * queries * n + 4 * 8, KIB)
        for width, n in zip((d, dv), numbers, strict=True)
    )


def _dq_width(tiles: HopperBackward) -> int:
    """Of dQ in float32: two warpgroups share 128 queries, and of fewer two slabs."""
    return 64 if tiles.streamed == 128 else 128


def _backward_width(width: int, tiles: Tiles) -> int:
    """Columns of a tile: warps divide them in blocks of 16."""
    return rounded_up(width, 16 * max(2, tiles.across))


def _hopper_variant(problem: Problem, tiles: HopperTiles, vector: bool) -> Variant:
    d, dv = rounded_up(problem.d, 64), rounded_up(problem.dv, 64)
    groups, parts = tiles.resident // 64, max(tiles.parts, 1)
    if tiles.parts:
        out = groups * KIB
        q_factors, kv_factors = 4 * tiles.resident, 4 * (tiles.streamed + dv)
    else:
        out = 2 * tiles.resident * min(dv, 128)
        q_factors, kv_factors = 16, 32
    k_and_v = 2 * parts * tiles.streamed * (d + dv) + kv_factors + 4 * 8  # and barriers
    q = 2 * parts * tiles.resident * d + q_factors + 40
    shared = {  # by the number of buffers for Q
        n: rounded_up(n * q + tiles.stages * k_and_v + out + 4 * groups, KIB) for n in (1, 2)
    }
    q_stages = 2 if shared[2] <= 227 * KIB else 1
    macros = {
        "SPLIT": tiles.parts,
        **({"VALUE_DIM": dv} if tiles.parts and dv > 128 else {}),  # whole slices
        "BLOCK_Q": tiles.resident,
        "BLOCK_K": tiles.streamed,
        "STAGES": tiles.stages,
        "Q_STAGES": q_stages,
    }
    warps = 4 * groups + 4
    return _16_bit_variant("fwd_sm90", "fwd_sm90", problem, warps, vector, macros, shared[q_stages])


def _fp64_variant(problem: Problem, tiles: HopperDouble) -> Variant:
    group = rounded_up(-(-problem.d // (tiles.cluster * tiles.groups)), 64)
    d = min(rounded_up(problem.d, 64), tiles.groups * group)
    dv = _block_columns(problem.dv, tiles)
    # Q; numbers of rows, exponentials that warps share, the table of powers and barriers.
    fixed = 8 * tiles.resident * d + _told_bytes(tiles) + 3 * KIB
    fixed += 8 * tiles.resident * tiles.streamed if tiles.across > 1 else 0
    macros = {
        "BLOCK_K": tiles.streamed,
        "PART_K": tiles.part,
        "BOXES": tiles.boxes,
        "GROUP": group,
        "TRANSFORM": transform(problem),
    }
    return _fp64_ring(
        "fwd_sm90_fp64", "fwd_sm90_fp64", problem, tiles, True, (d, dv), macros, fixed
    )


def _fp64_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    d, dv = (_block_columns(width, tiles) for width in (problem.d, problem.dv))
    # K and V; P or dS; work, the table of powers and barriers.
    fixed = 8 * tiles.resident * (d + dv + tiles.streamed) + _told_bytes(tiles) + KIB
    macros = {"PART_Q": tiles.part, "ROUNDS": tiles.rounds}

    def step(entry):
        return _fp64_ring("bwd_sm90_fp64", entry, problem, tiles, vector, (d, dv), macros, fixed)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    return [
        (step("row_delta"), -(-heads * problem.sq // DELTA_ROWS)),
        (step("bwd_sm90_fp64"), heads_kv * -(-problem.sk // tiles.resident) * tiles.cluster),
    ]


def _block_columns(width: int, tiles: HopperDouble | HopperDoubleBackward) -> int:
    """Of a block, in whole slots."""
    return rounded_up(-(-width // tiles.cluster), 64)


def _told_bytes(tiles: HopperDouble | HopperDoubleBackward) -> int:
    """What blocks of a cluster tell each other about scores: parts, and sums, of all others."""
    scores = tiles.resident * tiles.streamed // tiles.rounds
    return 2 * 8 * scores * (tiles.cluster - 1) // tiles.cluster


def _fp64_ring(file, entry, problem, tiles, vector, widths, macros, fixed) -> Variant:
    """With as many slots as fit beside `fixed` bytes of shared memory."""
    slot = 16 * KIB
    stages = (227 * KIB - fixed) // slot
    macros = {
        "REAL": "double",
        "HEAD_DIM": widths[0],
        "VALUE_DIM": widths[1],
        "ACROSS": tiles.across,
        "CLUSTER": tiles.cluster,
        "STAGES": stages,
        "LAG": min(3, (stages + 1) // 2),
        "SOFTCAP": int(problem.softcap is not None),
        **macros,
    }
    return _variant(file, entry, 8, vector, macros, fixed + stages * slot)


def split_step(p: Problem, tiles: SplitTiles, forward: bool, vector: bool) -> tuple[Variant, int]:
    """What comes before the kernels for float32, and of how many blocks."""
    queries, keys = _split_rows(tiles)
    macros = {
        "PARTS": tiles.parts,
        "BLOCK_Q": queries,
        "BLOCK_K": keys,
        "HEAD_DIM": rounded_up(p.d, 64),
        "VALUE_DIM": rounded_up(p.dv, 64),
    }
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    entry = "split" if forward else "split_rows"
    variant = _variant("split", entry, 8, vector, macros, 8 * 32 * 8)
    if not forward:
        rows = heads * rounded_up(p.sq, queries) + heads_kv * rounded_up(p.sk, keys)
        return variant, -(-2 * rows // 8)
    of_v = -(-p.sk // keys) * -(-p.dv // 64)  # a block for 64 columns of a tile
    return variant, heads * -(-p.sq // 8) + heads_kv * (-(-p.sk // 8) + of_v)


def _split_rows(tiles: SplitTiles) -> tuple[int, int]:
    """Factors of a head's queries, and of its keys, are filled up to multiples of these."""
    if isinstance(tiles, HopperTiles):
        return tiles.resident, tiles.streamed
    return tiles.streamed, tiles.keys


def transform(problem: Problem) -> int:
    """Whether scores are not just products with a positive factor."""
    return int(problem.softcap is not None or problem.scale <= 0)


def _16_bit_variant(file, entry, problem, warps, vector, macros, shared) -> Variant:
    macros = {
        "ELEMENT": ELEMENTS.get(problem.dtype, "Half"),  # of float32, parts
        "HEAD_DIM": rounded_up(problem.d, 32),
        "VALUE_DIM": rounded_up(problem.dv, 32),
        "TRANSFORM": transform(problem),
        **macros,
    }
    return _variant(file, entry, warps, vector, macros, shared)


def _simt_variant(file, entry, problem, tiles, vector, macros, kept, rows) -> Variant:
    """`kept`: widths of the block's own rows; `rows`: numbers about rows in its memory."""
    macros = {
        "REAL": REALS[problem.dtype],
        "HEAD_DIM": rounded_up(problem.d, tiles.slice),
        "VALUE_DIM": rounded_up(problem.dv, tiles.slice),
        "SLICE": tiles.slice,
        "STREAMED": tiles.streamed,
        "ROWS_PER_THREAD": tiles.resident * tiles.across // ((8 if tiles.mma else 4) * tiles.warps),
        "ACROSS": tiles.across,
        "MMA": int(tiles.mma),
        "WHOLE": int(tiles.whole),
        "SOFTCAP": int(problem.softcap is not None),
        **macros,
    }
    slices = sum(-(-width // tiles.slice) for width in kept) if tiles.whole else 2
    pad = 4 if tiles.mma else 16 // problem.itemsize  # of every row
    stay = tiles.mma and tiles.across == 1 and file == "fwd_simt"
    scores = 1 if stay else tiles.streamed
    own_row = tiles.resident + pad
    theirs = max(  # columns first, or as they lie
        tiles.slice * (tiles.streamed + pad), tiles.streamed * (tiles.slice + pad)
    )
    powers = 128 // problem.itemsize  # 16 doubles
    numbers = (slices * tiles.slice + scores) * own_row + 2 * theirs + powers + rows
    return _variant(file, entry, tiles.warps, vector, macros, numbers * problem.itemsize)


def _variant(file, entry, warps, vector, macros, shared) -> Variant:
    macros = {
        **macros,
        "WARPS": warps,
        "VECTOR": int(vector),
        "SHARED_BYTES": shared,
        "PARAMS_BYTES": PARAMS.size,
    }
    threads, shared = (256, 0) if entry == "row_delta" else (32 * warps, shared)
    return Variant(file + ".cu", entry, tuple(macros.items()), threads, shared)


def stats_rows(p: Problem, tiles: Portable | OnHopper) -> int:
    """Rows of lse in base 2 and of delta: Hopper copies whole tiles of them."""
    whole = isinstance(tiles, OnHopper) and p.dtype != "float64"
    queries = tiles.streamed if whole else 1
    return p.batch * p.heads * rounded_up(p.sq, queries)


def workspace(problem: Problem, tiles: Portable | OnHopper) -> tuple[int, int, int]:
    """Sizes: dQ as float32 tiles, counters of those that add to it, and that of tiles given out."""
    if isinstance(tiles, HopperTwoPass | WideTiles | WideHopper):
        return 0, 0, 0
    heads = problem.batch * problem.heads
    q_tiles = heads * -(-problem.sq // tiles.streamed)
    if isinstance(tiles, HopperBackward):
        counters = 0 if tiles.zeros and not tiles.turns else q_tiles
        return q_tiles * tiles.streamed * _dq_width(tiles), counters, 1
    if isinstance(tiles, HopperDoubleBackward):
        return 0, q_tiles * 8 * tiles.cluster if tiles.turns else 0, 0
    turns = q_tiles * tiles.warps  # a turn is a tile or more
    if problem.dtype in REALS:  # blocks add to the result itself
        return 0, turns * _chunks(problem.d, tiles)[1], 0
    return q_tiles * tiles.streamed * _backward_width(problem.d, tiles), turns, 0


def split_bytes(p: Problem, tiles: SplitTiles, forward: bool) -> int:
    """Of what split.cu writes."""
    return _split_memory(p, tiles, forward)[0]


def split_pointers(p: Problem, tiles: SplitTiles, forward: bool, start: int) -> list[int]:
    """To factors of q, k, v and dout, to their parts, and to weights, in this memory."""
    return [start + offset for offset in _split_memory(p, tiles, forward)[1]]


@functools.lru_cache(4096)
def _split_memory(p: Problem, tiles: SplitTiles, forward: bool) -> tuple[int, list[int]]:
    """Bytes, and where in them what split_pointers names begins."""
    queries, keys = _split_rows(tiles)
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    all_rows = [heads * p.sq, heads_kv * p.sk, heads_kv * p.sk, heads * p.sq]
    of_q, of_k = heads * rounded_up(p.sq, queries), heads_kv * rounded_up(p.sk, keys)
    factors, weights = [of_q, of_k, of_k, of_q], of_q
    if forward:  # v has a factor for each column of a tile
        all_rows[3] = factors[3] = weights = 0
        factors[2] = of_k // keys * rounded_up(p.dv, 64)
    widths = split_widths(p, tiles)
    sizes = [4 * n for n in factors]
    sizes += [2 * rows * width for rows, width in zip(all_rows, widths, strict=True)]
    sizes += [4 * weights]
    offsets = [0, *itertools.accumulate(rounded_up(size, KIB) for size in sizes)]
    return offsets[-1], offsets[:-1]


def split_widths(p: Problem, tiles: SplitTiles) -> list[int]:
    """Of q, k, v and dout as float16 arrays: of all parts."""
    return [tiles.parts * rounded_up(width, 64) for width in (p.d, p.d, p.dv, p.dv)]
