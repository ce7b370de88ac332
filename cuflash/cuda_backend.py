"""Raw CUDA kernels: which one and which tiles a problem gets, and its launch.

A kernel's file name is its dispatch name: `fwd_sm80.cu` holds `fwd_sm80`. Every variant (dtype,
widths, tiles, whether 16-byte copies are possible) is a module of its own, compiled on first use.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import functools
import itertools
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import _compile
from .problem import Problem

#: Params of params.cuh: eight arrays (pointer and four strides), 16 pointers, sizes, numbers.
PARAMS = struct.Struct("56q12i2d")
KIB = 1024
#: The element type of the tensor-core kernels, and the arithmetic of the CUDA-core ones.
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
REALS = {"float32": "float", "float64": "double"}
WIDEST = 1024
DELTA_ROWS = 32  # of a block of row_delta


class Tiles(NamedTuple):
    """Rows that stay with a block, rows that stream past at a time, warps, and buffers."""

    resident: int
    streamed: int
    warps: int
    # Of a 16-bit backward pass; elsewhere there is one buffer.
    stages: int = 2
    # Of that and with mma: how many of the warps divide streamed rows among them; the others,
    # resident.
    across: int = 1
    # In float32 and float64: columns at a time; resident rows stay in shared memory and do not
    # stream too; products on tensor cores; columns of a result that a block makes.
    slice: int = 64
    whole: bool = True
    mma: bool = False
    chunk: int = 256


class WideTiles(NamedTuple):
    """The same of wide_sm80.cu, for 16-bit heads wider than 256: 64 rows stay, with 8 warps."""

    streamed: int
    slice: int  # columns at a time
    whole: bool = True
    chunk: int = 512
    resident: int = 64


class HopperTiles(NamedTuple):
    """Queries that stay with a block, 64 a computing warpgroup, and keys that stream past."""

    resident: int
    streamed: int
    stages: int = 2  # buffers for K, and for V
    # float16 numbers that a float32 becomes: two are as accurate as float32; one, as TF32.
    parts: int = 0


class HopperBackward(NamedTuple):
    """Of a backward pass on Hopper, where 128 keys stay with a block: queries that stream past."""

    streamed: int
    dq_stages: int  # buffers for dQ
    # Heads that are worked on at a time. 16 are 1 to 4 % faster than 32, at S = 512 and 8192.
    together: int = 16
    # From so many heads on blocks take turns at dQ though nobody asked for `deterministic`: they
    # cost 1 to 6 % there, and 30 % with 2 heads.
    turns_from: int = 16


class HopperTwoPass(NamedTuple):
    """The same where dK and dV are too wide for that, or float32: two passes, of seven products.

    Queries that stream past 64 keys in the pass for dK and dV, and keys that stream past `queries`
    in the pass for dQ.
    """

    streamed: int
    keys: int
    p_stages: int = 2  # buffers for P between the warpgroups
    together: int = 8  # heads that are worked on at a time
    parts: int = 0  # as in HopperTiles
    queries: int = 128  # of the pass for dQ, 64 a computing warpgroup


OnHopper = HopperBackward | HopperTwoPass
SplitTiles = HopperTiles | HopperTwoPass
Portable = Tiles | WideTiles
Table = Mapping[int, Sequence[Portable]]


@dataclass(frozen=True)
class Config:
    """Tiles of the forward and of the backward kernel."""

    forward: Portable | HopperTiles
    backward: Portable | OnHopper


# Beyond a width of 256, float16 and bfloat16.
_WIDE_16 = [
    WideTiles(128, 64), WideTiles(64, 64), WideTiles(128, 64, whole=False),
    WideTiles(64, 64, whole=False, chunk=256),
]  # fmt: skip
# By dtype, then by the larger of the two widths: candidates, the first that fits the device is
# taken. The last of a row fits 64 KiB (forward 48), so every GPU. TFLOP/s: bfloat16 on an H200,
# 2 x 16 heads, S = 8192, full, beside PyTorch's FlashAttention-2 in the same run; more in
# docs/kernels.md.
_FORWARD_16: Table = {
    64: [Tiles(128, 96, 4)],  # 316, FlashAttention-2 286; 301 with 64 keys at a time
    128: [Tiles(128, 48, 4), Tiles(64, 32, 4)],  # 372, FlashAttention-2 346; 358 with 64
    192: [Tiles(128, 64, 8), Tiles(64, 32, 4)],
    256: [Tiles(128, 64, 8), Tiles(64, 64, 4), Tiles(32, 16, 2)],  # 325, FlashAttention-2 329
    1024: _WIDE_16,
}
# On compute capability 9.0. TFLOP/s: bfloat16 on an H200, 16,384 tokens, hidden 2048, S = 8192,
# full / causal, beside cuDNN in the same run; other rows in docs/kernels.md.
FORWARD_HOPPER = {
    64: HopperTiles(192, 128, 4),  # 598 / 558, cuDNN 492 / 458
    128: HopperTiles(128, 128),  # 746 / 713, cuDNN 680 / 611
    192: HopperTiles(128, 80),
    256: HopperTiles(128, 64),  # 817 / 710, cuDNN 739 / 633
}
# Under a mask with up to 1,024 keys smaller blocks of them compute less for nothing.
FORWARD_HOPPER_SHORT = {128: HopperTiles(128, 64, 4)}  # S = 512: 359; 344 with the row above
# float32, of which split.cu makes two float16 each: three products of four. TFLOP/s: batch 1, 16
# heads, S = 8192 (above 128: 4096), full / causal, beside CUDA cores.
FORWARD_HOPPER_32 = {
    64: HopperTiles(128, 112, parts=2),  # 158 / 140, CUDA cores 43 / 43
    128: HopperTiles(128, 64, parts=2),  # 201 / 172, CUDA cores 40 / 41
    192: HopperTiles(128, 32, parts=2),  # 169 / 120, CUDA cores 36 / 36
    256: HopperTiles(128, 32, 1, parts=2),  # 175 / 128, CUDA cores 35 / 36
}
FORWARD_HOPPER_TF32 = {
    64: HopperTiles(128, 128, 4, parts=1),  # 254 / 207
    128: HopperTiles(128, 80, parts=1),  # 393 / 305
    192: HopperTiles(128, 64, parts=1),  # 370 / 238
    256: HopperTiles(128, 32, 3, parts=1),  # 298 / 213
}
BACKWARD_HOPPER: dict[int, OnHopper] = {
    64: HopperBackward(128, 1),  # 470 / 442, cuDNN 450 / 392
    128: HopperBackward(64, 2),  # 536 / 522, cuDNN 521 / 494
    192: HopperTwoPass(80, 64),  # 456 / 444, cuDNN 344 / 336
    256: HopperTwoPass(64, 48),  # 452 / 436, cuDNN 368 / 375
}
# float32, as forward.
BACKWARD_HOPPER_32: dict[int, OnHopper] = {
    64: HopperTwoPass(96, 128, 1, parts=2),  # 130 / 120, CUDA cores 36 / 36
    128: HopperTwoPass(64, 48, 1, parts=2),  # 138 / 135, CUDA cores 32 / 31
    192: HopperTwoPass(32, 32, 1, parts=2, queries=64),  # 112 / 108, CUDA cores 23 / 23
    256: HopperTwoPass(16, 16, 1, parts=2, queries=64),
}
_BACKWARD_16: Table = {
    64: [Tiles(128, 32, 4, 3), Tiles(64, 32, 4, 3)],  # 292, FlashAttention-2 264; and 214
    128: [
        Tiles(128, 64, 8, 3, 2),  # 319, FlashAttention-2 290
        Tiles(128, 64, 8, 2, 2),  # 307
        Tiles(64, 32, 4, 3, 2), Tiles(32, 32, 4, 1, 2),  # 200, 123
    ],
    192: [Tiles(64, 64, 8, 2, 4), Tiles(32, 32, 4, 2, 2), Tiles(32, 32, 4, 1, 2)],  # 231, 105
    256: [
        Tiles(64, 64, 8, 2, 4),  # 260, FlashAttention-2 250
        Tiles(64, 64, 8, 1, 4),  # 226
        Tiles(32, 32, 4, 1, 2), Tiles(16, 32, 2, 1, 2),  # 98
    ],
    1024: _WIDE_16,
}  # fmt: skip
# On CUDA cores a thread has resident * across / (4 warps) rows, as many as registers allow. A
# list's first is for 227 KiB, those between for GPUs with 163 or 99. TFLOP/s, of 67 in float32 and
# 33 in float64: H200, 16 heads, S = 4096 (2048 at 256), full.
_SMALL = Tiles(64, 32, 4, slice=32, whole=False)
_WIDE_32 = [
    Tiles(64, 64, 8, across=2, slice=128, whole=False, chunk=512),
    Tiles(64, 64, 8, across=2, whole=False, chunk=512),
    _SMALL._replace(chunk=128),
]
_FORWARD_32 = {
    64: [Tiles(128, 64, 4), Tiles(128, 32, 4), _SMALL],  # 43; 41; (256, 64, 8) 44
    128: [Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],  # 42; (128, 64, 8) 40
    256: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL],  # 38; 33
    1024: [Tiles(64, 64, 8, across=2, slice=128, chunk=512), *_WIDE_32],
}
_BACKWARD_32 = {
    64: [Tiles(256, 32, 8), Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],  # 37.8
    128: [Tiles(128, 32, 8), Tiles(64, 32, 4), _SMALL],  # 33.5
    256: [Tiles(64, 32, 4), Tiles(64, 32, 4, whole=False), _SMALL],  # 22.3
    1024: _WIDE_32,
}
_SMALL_64 = Tiles(32, 32, 4, slice=32, whole=False)
_WIDE_64 = [Tiles(64, 32, 8, whole=False), _SMALL_64._replace(chunk=128)]
_FORWARD_64 = {
    64: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL_64],  # 19.7; 17.4; (128, 32, 8) 19.2
    128: [Tiles(128, 32, 8), Tiles(32, 32, 4), _SMALL_64],  # 19.7
    256: [Tiles(64, 32, 8), _SMALL_64],  # 16.3
    1024: _WIDE_64,
}
_BACKWARD_64 = {
    64: [Tiles(128, 32, 8), Tiles(64, 32, 4), _SMALL_64],  # 18.9
    128: [Tiles(64, 32, 8), _SMALL_64],
    256: [Tiles(64, 32, 8, whole=False), _SMALL_64],
    1024: _WIDE_64,
}

# float64 on tensor cores, where they are twice as fast as CUDA cores: compute capability 8.0, which
# has 163 KiB, and 9.0. A thread has resident * across / (8 warps) rows.
MMA_CAPABILITIES = 80, 90
_WIDE_MMA = Tiles(32, 64, 8, across=4, whole=False, mma=True, chunk=512)
FORWARD_MMA = {
    64: [Tiles(128, 64, 8, mma=True)],  # 40.2
    128: [Tiles(128, 32, 8, mma=True), Tiles(64, 32, 8, across=2, mma=True)],  # 36.5 (S = 4096)
    256: [Tiles(64, 32, 8, across=2, mma=True), Tiles(32, 32, 4, across=2, mma=True)],
    1024: [_WIDE_MMA],
}
BACKWARD_MMA = {
    64: [Tiles(128, 32, 8, mma=True), Tiles(64, 32, 8, across=2, mma=True)],  # 36.0
    128: [Tiles(64, 32, 8, across=2, mma=True), Tiles(32, 64, 8, across=4, mma=True)],  # 29.4
    256: [Tiles(32, 64, 8, across=4, whole=False, mma=True)],
    1024: [_WIDE_MMA],
}

FORWARD: dict[str, Table] = {
    "float16": _FORWARD_16, "bfloat16": _FORWARD_16, "float32": _FORWARD_32, "float64": _FORWARD_64,
}  # fmt: skip
BACKWARD: dict[str, Table] = {
    "float16": _BACKWARD_16, "bfloat16": _BACKWARD_16,
    "float32": _BACKWARD_32, "float64": _BACKWARD_64,
}  # fmt: skip


class Variant(NamedTuple):
    """One compiled kernel: its file, entry point, macros and sizes of a block."""

    file: str
    entry: str
    macros: _compile.Macros
    threads: int
    shared_bytes: int


def _rounded_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _tile_bytes(rows: int, width: int) -> int:
    return _rounded_up(2 * rows * width, 1024)


@functools.lru_cache(4096)
def forward_variant(problem: Problem, tiles: Portable | HopperTiles, vector: bool) -> Variant:
    if isinstance(tiles, HopperTiles):
        return _hopper_variant(problem, tiles, vector)
    if isinstance(tiles, WideTiles):
        return _wide_variant(problem, tiles, vector, 0)
    if problem.dtype in REALS:
        chunk = _chunks(problem.dv, tiles)[0]
        macros = {"TRANSFORM": _transform(problem), "CHUNK": chunk}
        maxima = tiles.across * tiles.resident
        return _simt_variant(
            "fwd_simt", "fwd_simt", problem, tiles, vector, macros, (problem.d,), maxima
        )
    d, dv = _rounded_up(problem.d, 32), _rounded_up(problem.dv, 32)
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
        return _sm90_steps(problem, tiles, vector)
    if isinstance(tiles, HopperTwoPass):
        steps = _sm90_two_pass_steps(problem, tiles, vector)
        return [split_step(problem, tiles, vector), *steps] if tiles.parts else steps
    if isinstance(tiles, WideTiles):
        return _wide_steps(problem, tiles, vector)
    portable = _simt_steps if problem.dtype in REALS else _sm80_steps
    return portable(problem, tiles, vector)


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
    shared += _rounded_up(tiles.stages * 2 * 4 * queries, 1024)  # lse and delta
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
    keys, queries = 128, tiles.streamed
    d, dv = _rounded_up(problem.d, 32), _rounded_up(problem.dv, 32)
    if queries == 64:
        d = max(d, 96)  # two slabs
    shared = _slab_bytes(keys, d) + _slab_bytes(keys, dv) + _rings_bytes(queries, d, dv)
    shared += 2 * _slab_bytes(queries, keys)  # dS
    shared += tiles.dq_stages * 4 * queries * _dq_width(d, tiles) + KIB  # which tiles, and barriers
    macros = {
        "HEAD_DIM": d,
        "VALUE_DIM": dv,
        "BLOCK_Q": queries,
        "DQ_STAGES": tiles.dq_stages,
    }

    def step(entry):
        return _16_bit_variant("bwd_sm90", entry, problem, 12, vector, macros, shared)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    q_tiles = heads * -(-problem.sq // queries)
    return [
        (step("row_delta"), -(-stats_rows(problem, tiles) // DELTA_ROWS)),
        (step("bwd_sm90"), heads_kv * -(-problem.sk // keys)),
        (step("store_dq")._replace(threads=256, shared_bytes=0), q_tiles),
    ]


def _sm90_two_pass_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    parts = max(tiles.parts, 1)
    d, dv = (parts * _rounded_up(width, 64) for width in (problem.d, problem.dv))
    queries, keys = tiles.streamed, tiles.keys  # of the passes for dK and dV, and for dQ

    def step(file, entry, macros, shared, warps=12):
        macros = {"SPLIT": tiles.parts, **macros}
        for name, width in (("HEAD_DIM", problem.d), ("VALUE_DIM", problem.dv)):
            if tiles.parts and width > 128:  # whole slices
                macros[name] = _rounded_up(width, 64)
        return _16_bit_variant(file, entry, problem, warps, vector, macros, shared)

    shared = _slab_bytes(64, d) + _slab_bytes(64, dv)
    shared += _rings_bytes(queries, d, dv, (3, 2) if tiles.parts else (1, 1))
    shared += tiles.p_stages * 4 * queries * 64 + KIB
    of_kv = {"BLOCK_Q": queries, "P_STAGES": tiles.p_stages, "STATS_KEYS": keys}, shared
    shared = sum(_slab_bytes(tiles.queries + 2 * keys, width) for width in (d, dv))
    shared += _rounded_up(104 + 16 * (keys if tiles.parts else 4), KIB)  # barriers, and factors
    macros = {"BLOCK_Q": tiles.queries, "BLOCK_K": keys, "STATS_ROWS": queries}
    of_q = macros, shared, 4 + tiles.queries // 16
    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    return [
        (step("bwd_sm90_kv", "row_delta", *of_kv), -(-stats_rows(problem, tiles) // DELTA_ROWS)),
        (step("bwd_sm90_q", "bwd_sm90_q", *of_q), heads * -(-problem.sq // tiles.queries)),
        (step("bwd_sm90_kv", "bwd_sm90_kv", *of_kv), heads_kv * -(-problem.sk // 64)),
    ]


def _wide_variant(problem: Problem, tiles: WideTiles, vector: bool, number: int) -> Variant:
    """`number`: the pass, as wide_sm80.cu counts them."""
    of_ds = number >= 2
    d, dv = _rounded_up(problem.d, tiles.slice), _rounded_up(problem.dv, tiles.slice)
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


def _chunks(width: int, tiles: Portable) -> tuple[int, int]:
    """Columns of a result of this width that a block makes, and how many blocks share a row."""
    slices = -(-width // tiles.slice)
    blocks = -(-slices * tiles.slice // tiles.chunk)
    return -(-slices // blocks) * tiles.slice, blocks


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
    return [(row_delta, -(-heads * problem.sq // DELTA_ROWS)), dv, dk, dq]


def _slab_bytes(rows: int, width: int) -> int:
    """Of a tile as a tensor copy writes it."""
    return 2 * rows * _rounded_up(width, 64)


def _rings_bytes(queries: int, d: int, dv: int, numbers: tuple[int, int] = (1, 1)) -> int:
    """Of two struct Ring: two tiles of q or dout, with numbers of each row, and barriers."""
    return sum(
        _rounded_up(2 * _slab_bytes(queries, width) + 2 * 4 * queries * n + 4 * 8, KIB)
        for width, n in zip((d, dv), numbers, strict=True)
    )


def _dq_width(width: int, tiles: HopperBackward) -> int:
    """Of dQ in float32: two warpgroups share 128 queries, and of 64 queries two slabs."""
    return _rounded_up(width, 32 if tiles.streamed == 128 else 128)


def _backward_width(width: int, tiles: Tiles) -> int:
    """Columns of a tile: warps divide them in blocks of 16."""
    return _rounded_up(width, 16 * max(2, tiles.across))


def _hopper_variant(problem: Problem, tiles: HopperTiles, vector: bool) -> Variant:
    d, dv = _rounded_up(problem.d, 64), _rounded_up(problem.dv, 64)
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
        n: _rounded_up(n * q + tiles.stages * k_and_v + out + 4 * groups, KIB) for n in (1, 2)
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


def split_step(p: Problem, tiles: SplitTiles, vector: bool) -> tuple[Variant, int]:
    """What comes before the kernels for float32, and of how many blocks."""
    queries, keys = _split_rows(tiles)
    macros = {
        "PARTS": tiles.parts,
        "BLOCK_Q": queries,
        "BLOCK_K": keys,
        "HEAD_DIM": _rounded_up(p.d, 64),
        "VALUE_DIM": _rounded_up(p.dv, 64),
    }
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    entry = "split" if isinstance(tiles, HopperTiles) else "split_rows"
    variant = _variant("split", entry, 8, vector, macros, 8 * 32 * 8)
    if entry == "split_rows":
        rows = heads * _rounded_up(p.sq, queries) + heads_kv * _rounded_up(p.sk, keys)
        return variant, -(-2 * rows // 8)
    of_v = -(-p.sk // keys) * -(-p.dv // 64)  # a block for 64 columns of a tile
    return variant, heads * -(-p.sq // 8) + heads_kv * (-(-p.sk // 8) + of_v)


def _split_rows(tiles: SplitTiles) -> tuple[int, int]:
    """Factors of a head's queries, and of its keys, are filled up to multiples of these."""
    if isinstance(tiles, HopperTiles):
        return tiles.resident, tiles.streamed
    return tiles.streamed, tiles.keys


def _transform(problem: Problem) -> int:
    """Whether scores are not just products with a positive factor."""
    return int(problem.softcap is not None or problem.scale <= 0)


def _16_bit_variant(file, entry, problem, warps, vector, macros, shared) -> Variant:
    macros = {
        "ELEMENT": ELEMENTS.get(problem.dtype, "Half"),  # of float32, parts
        "HEAD_DIM": _rounded_up(problem.d, 32),
        "VALUE_DIM": _rounded_up(problem.dv, 32),
        "TRANSFORM": _transform(problem),
        **macros,
    }
    return _variant(file, entry, warps, vector, macros, shared)


def _simt_variant(file, entry, problem, tiles, vector, macros, kept, rows) -> Variant:
    """`kept`: widths of the block's own rows; `rows`: numbers about rows in its memory."""
    macros = {
        "REAL": REALS[problem.dtype],
        "HEAD_DIM": _rounded_up(problem.d, tiles.slice),
        "VALUE_DIM": _rounded_up(problem.dv, tiles.slice),
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


def tables(dtype: str, capability: int) -> tuple[Table, Table]:
    """Of the forward and of the backward kernel, without Hopper's own."""
    if dtype == "float64" and capability in MMA_CAPABILITIES:
        return FORWARD_MMA, BACKWARD_MMA
    return FORWARD[dtype], BACKWARD[dtype]


def config_for(problem: Problem, capability: int, shared_limit: int) -> Config:
    """The first row of each table that fits in `shared_limit` bytes of shared memory a block."""
    width = max(problem.d, problem.dv)
    # Larger forward tiles spill on Turing, where half the products need two steps.
    forward_limit = min(shared_limit, 48 * KIB) if capability < 80 else shared_limit

    def first(table, shared_bytes, limit):
        rows = next(rows for w, rows in table.items() if w >= width)
        return next(tiles for tiles in rows if shared_bytes(tiles) <= limit)

    def forward_bytes(tiles):
        return forward_variant(problem, tiles, True).shared_bytes

    def backward_bytes(tiles):
        return max(step.shared_bytes for step, _ in backward_steps(problem, tiles, True))

    on_hopper = capability == 90 and width <= max(FORWARD_HOPPER)
    if on_hopper and problem.dtype in ELEMENTS:
        row = next(w for w in FORWARD_HOPPER if w >= width)
        short = not _uniform(problem) and problem.sk <= 1024
        forward = FORWARD_HOPPER | FORWARD_HOPPER_SHORT if short else FORWARD_HOPPER
        return Config(forward[row], BACKWARD_HOPPER[row])
    split = problem.dtype == "float32" and problem.precision != "ieee" and not problem.softcap
    if on_hopper and split:
        forward = FORWARD_HOPPER_TF32 if problem.precision == "tf32" else FORWARD_HOPPER_32
        row = next(w for w in forward if w >= width)
        return Config(forward[row], BACKWARD_HOPPER_32[row])
    forward_table, backward_table = tables(problem.dtype, capability)
    return Config(
        first(forward_table, forward_bytes, forward_limit),
        first(backward_table, backward_bytes, shared_limit),
    )


def default_config(problem: Problem) -> Config:
    import cupy

    return config_for(problem, *_limits(cupy.cuda.runtime.getDevice())[:2])


def resources(problem: Problem) -> list[tuple[str, int, int, int, int]]:
    """What forward and backward launch on this device, compiled where they were not.

    Entry point, threads, registers a thread, bytes of local memory a thread and of shared memory a
    block.
    """
    import cupy

    device, config = cupy.cuda.runtime.getDevice(), default_config(problem)
    variants = [forward_variant(problem, config.forward, True)]
    if isinstance(config.forward, HopperTiles) and config.forward.parts:
        variants.insert(0, split_step(problem, config.forward, True)[0])
    variants += [variant for variant, _ in backward_steps(problem, config.backward, True)]
    kernels = [(v, _kernel(device, v)) for v in variants]
    return [
        (v.entry, v.threads, kernel.num_regs, kernel.local_size_bytes, v.shared_bytes)
        for v, kernel in kernels
    ]


@functools.cache
def _limits(device: int) -> tuple[int, int, int]:
    """Compute capability (major * 10 + minor), shared memory that a block may opt in to, and
    multiprocessors."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = properties["major"] * 10 + properties["minor"]
    return capability, properties["sharedMemPerBlockOptin"], properties["multiProcessorCount"]


def unsupported(problem: Problem) -> str | None:
    if problem.device == "cpu":
        return "it takes arrays on a GPU, and these are NumPy arrays; cupy.asarray copies them"
    if max(problem.d, problem.dv) > WIDEST:
        return f"its widths end at {WIDEST}, and these are {problem.d} and {problem.dv}"
    import cupy

    capability, *_ = _limits(cupy.cuda.runtime.getDevice())
    needed = 80 if problem.dtype == "bfloat16" else 75
    if capability < needed:
        return f"{problem.dtype} needs compute capability {needed / 10}, and not {capability / 10}"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""
    tiles = config.forward
    if isinstance(tiles, HopperTiles):
        on_hopper = _forward_split if tiles.parts else _forward_hopper
        on_hopper(problem, tiles, q, k, v, out, lse)
        return
    pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    _launch(plan, pointers, [lse.data.ptr])


def _forward_hopper(problem: Problem, tiles: HopperTiles, q, k, v, out, lse) -> None:
    if _nothing_seen(problem, out, lse):
        return
    pointers, layout = _described([q, k, v, out])
    if not _fit_for_tensor_maps(layout[0][:3], layout[1]):
        q, k, v = _aligned_copy(q), _aligned_copy(k), _aligned_copy(v)
        pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    counter = _counter(plan)
    _launch(plan, pointers, [lse.data.ptr, *[0] * 5, counter and counter.ptr], pointers)


def _nothing_seen(problem: Problem, out, lse) -> bool:
    """Whether there is nothing to launch: there is no tensor map of an empty array."""
    if out.size and problem.sk:
        return False
    out.fill(0)
    lse.fill(-float("inf"))
    return True


def _counter(plan: Plan) -> Any:
    """Memory holding 0, where tiles are given out by a counter; else 0."""
    if not plan.counts:
        return 0
    import cupy

    counter = cupy.ndarray(1, cupy.int32).data
    counter.memset_async(0, 4)
    return counter


def _forward_split(problem: Problem, tiles: HopperTiles, q, k, v, out, lse) -> None:
    """float32: split.cu writes its parts as float16 arrays, which fwd_sm90 takes."""
    import cupy

    if _nothing_seen(problem, out, lse):
        return
    memory = cupy.ndarray(split_bytes(problem, tiles), cupy.uint8).data
    split = split_pointers(problem, tiles, memory.ptr)
    pointers, layout = _described([q, k, v, out])
    plan = _forward_plan(q.data.device_id, problem, tiles, *layout)
    counter = _counter(plan)
    rows = [lse.data.ptr, *[0] * 5, counter and counter.ptr, *split]
    _launch(plan, pointers, rows, split[4:7])


def split_bytes(p: Problem, tiles: SplitTiles) -> int:
    """Of what split.cu writes."""
    return _split_memory(p, tiles)[0]


def split_pointers(p: Problem, tiles: SplitTiles, start: int) -> list[int]:
    """To factors of q, k, v and dout, to their parts, and to weights, in this memory."""
    return [start + offset for offset in _split_memory(p, tiles)[1]]


@functools.lru_cache(4096)
def _split_memory(p: Problem, tiles: SplitTiles) -> tuple[int, list[int]]:
    """Bytes, and where in them what split_pointers names begins."""
    queries, keys = _split_rows(tiles)
    heads, heads_kv = p.batch * p.heads, p.batch * p.heads_kv
    all_rows = [heads * p.sq, heads_kv * p.sk, heads_kv * p.sk, heads * p.sq]
    of_q, of_k = heads * _rounded_up(p.sq, queries), heads_kv * _rounded_up(p.sk, keys)
    factors, weights = [of_q, of_k, of_k, of_q], of_q
    if isinstance(tiles, HopperTiles):  # v has a factor for each column of a tile
        all_rows[3] = factors[3] = weights = 0
        factors[2] = of_k // keys * _rounded_up(p.dv, 64)
    widths = split_widths(p, tiles)
    sizes = [4 * n for n in factors]
    sizes += [2 * rows * width for rows, width in zip(all_rows, widths, strict=True)]
    sizes += [4 * weights]
    offsets = [0, *itertools.accumulate(_rounded_up(size, KIB) for size in sizes)]
    return offsets[-1], offsets[:-1]


def split_widths(p: Problem, tiles: SplitTiles) -> list[int]:
    """Of q, k, v and dout as float16 arrays: of all parts."""
    return [tiles.parts * _rounded_up(width, 64) for width in (p.d, p.d, p.dv, p.dv)]


def _parts_encoder(p: Problem, tiles: SplitTiles, rows: tuple[int, ...]) -> Callable:
    """As `_encoder`, for the parts, which are contiguous."""
    widths = split_widths(p, tiles)
    of_q, of_kv = (p.heads, p.sq), (p.heads_kv, p.sk)
    shapes = zip((of_q, of_kv, of_kv, of_q), widths, strict=True)
    strides = tuple([(2 * h * s * w, 2 * s * w, 2 * w, 2) for (h, s), w in shapes])
    d, _, dv, _ = widths
    return _encoder(dataclasses.replace(p, dtype="float16", d=d, dv=dv), rows, strides)


def _uniform(problem: Problem) -> bool:
    """Whether all queries see all keys, so that all tiles take the same time."""
    return problem.left is None and problem.right is None


@functools.lru_cache(4096)
def _fit_for_tensor_maps(strides: tuple, aligned: bool) -> bool:
    """Whether tensor maps of arrays with these strides are possible."""
    return aligned and _rows_of_groups(2, strides) and all(min(array) >= 0 for array in strides)


def _aligned_copy(x: Any) -> Any:
    """For a tensor map. From some 500 keys on a copy costs less than the portable kernel would."""
    import cupy

    *lengths, width = x.shape
    copy = cupy.ndarray((*lengths, _rounded_up(width, 8)), x.dtype)[..., :width]
    copy[...] = x
    return copy


def _encoder(p: Problem, rows: tuple[int, ...], strides: tuple) -> Callable[..., tuple[Any, int]]:
    """From the arrays' pointers to their tensor maps; pointers come again and again."""
    return functools.lru_cache(1024)(functools.partial(_tensor_maps, p, rows, strides))


def _tensor_maps(
    p: Problem, rows: tuple[int, ...], strides: tuple, *pointers: int
) -> tuple[Any, int]:
    """The CUtensorMap of q, k, v, of out or dout, dk and dv, in a row, as kernels take them.

    Memory, and where in it they begin. Boxes are 64 columns wide, of 128 bytes, swizzled, and of so
    many rows; what lies outside of an array is 0. Source: CUDA driver API, cuTensorMapEncodeTiled.
    """
    encode = _driver().cuTensorMapEncodeTiled
    memory = ctypes.create_string_buffer(64 + 6 * 128)
    start = _rounded_up(ctypes.addressof(memory), 64)  # as the driver wants it
    of_q, of_k, of_v = (p.d, p.sq, p.heads), (p.d, p.sk, p.heads_kv), (p.dv, p.sk, p.heads_kv)
    sizes = of_q, of_k, of_v, (p.dv, p.sq, p.heads), of_k, of_v
    float16, bfloat16, interleave_none, swizzle_128, promote_l2_128, fill_zeros = 6, 9, 0, 3, 2, 0
    for i, box in enumerate(rows):
        batch_stride, head_stride, row_stride, _ = strides[i]
        error = encode(
            ctypes.c_void_p(start + 128 * i),
            float16 if p.dtype == "float16" else bfloat16,
            4,
            ctypes.c_void_p(pointers[i]),
            (ctypes.c_uint64 * 4)(*sizes[i], p.batch),
            (ctypes.c_uint64 * 3)(row_stride, head_stride, batch_stride),
            (ctypes.c_uint32 * 4)(64, box, 1, 1),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            interleave_none,
            swizzle_128,
            promote_l2_128,
            fill_zeros,
        )
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed: CUDA error {error}")
    return memory, start


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def backward(
    problem: Problem, config: Config, deterministic: bool, dout, q, k, v, out, lse, dlse, dq, dk, dv
) -> None:
    """Write `dq`, `dk` and `dv`."""
    import cupy

    tiles = config.backward
    if isinstance(tiles, OnHopper) and not q.size * k.size:
        for grad in (dq, dk, dv):  # there is no tensor map of an empty array
            grad.fill(0)
        return
    lse = cupy.ascontiguousarray(lse)
    dlse = None if dlse is None else cupy.ascontiguousarray(dlse)
    pointers, layout = _described([q, k, v, out, dout, dq, dk, dv])
    inputs = [q, k, v, dout]
    on_16_bits = isinstance(tiles, OnHopper) and problem.dtype in ELEMENTS
    if on_16_bits and not _fit_for_tensor_maps(*_described(inputs)[1]):
        q, k, v, dout = [_aligned_copy(x) for x in inputs]
        pointers, layout = _described([q, k, v, out, dout, dq, dk, dv])
    stats = cupy.ndarray((2, stats_rows(problem, tiles)), problem.compute)
    plan = _backward_plan(q.data.device_id, problem, tiles, *layout)
    rows = [lse.data.ptr, 0 if dlse is None else dlse.data.ptr]
    rows += [stats.data.ptr, stats.data.ptr + stats.nbytes // 2]  # lse in base 2, and delta
    sums, turns, tickets = workspace(problem, tiles, deterministic)
    if sums + turns:
        numbers = cupy.ndarray(sums + turns + tickets, cupy.float32).data
        start = 4 * sums if turns and tickets else 0  # see bwd_sm90.cu
        (numbers + start).memset_async(0, 4 * (sums + turns + tickets) - start)
        counters = numbers.ptr + 4 * sums
        rows += [numbers.ptr, counters if turns else 0, counters + 4 * turns]
    mapped: Sequence[int] = backward_mapped(pointers)
    if isinstance(tiles, HopperTwoPass) and tiles.parts:
        memory = cupy.ndarray(split_bytes(problem, tiles), cupy.uint8).data
        split = split_pointers(problem, tiles, memory.ptr)
        rows += [0, 0, 0, *split]
        mapped = split[4:8]
    _launch(plan, pointers, rows, mapped)


def backward_mapped(all_arrays: Sequence) -> tuple:
    """Of q, k, v, out, dout, dq, dk and dv, those that may have tensor maps."""
    q, k, v, _, dout, _, dk, dv = all_arrays
    return q, k, v, dout, dk, dv


def backward_boxes(tiles: OnHopper, vector: bool) -> list[tuple[int, ...]]:
    """For each kernel that copies by tensor maps: rows of a copy of q, k, v, dout, dk and dv."""
    if isinstance(tiles, HopperBackward):
        return [(tiles.streamed, 128, 128, tiles.streamed, *([64, 64] if vector else []))]
    of_q = tiles.queries, tiles.keys, tiles.keys, tiles.queries
    return [of_q, (tiles.streamed, 64, 64, tiles.streamed)]


def stats_rows(p: Problem, tiles: Portable | OnHopper) -> int:
    """Rows of lse in base 2 and of delta: Hopper copies whole tiles of them."""
    queries = tiles.streamed if isinstance(tiles, OnHopper) else 1
    return p.batch * p.heads * _rounded_up(p.sq, queries)


def workspace(
    problem: Problem, tiles: Portable | OnHopper, deterministic: bool
) -> tuple[int, int, int]:
    """Sizes: dQ as float32 tiles, counters of turns at it, and that of tiles given out."""
    heads = problem.batch * problem.heads
    q_tiles = heads * -(-problem.sq // tiles.streamed)
    if isinstance(tiles, HopperTwoPass | WideTiles):
        return 0, 0, 0
    if isinstance(tiles, HopperBackward):
        turns = q_tiles if deterministic or heads >= tiles.turns_from else 0
        return q_tiles * tiles.streamed * _dq_width(problem.d, tiles), turns, 1
    turns = q_tiles * tiles.warps  # a turn is a tile or more
    if problem.dtype in REALS:  # blocks add to the result itself
        return 0, turns * _chunks(problem.d, tiles)[1], 0
    return q_tiles * tiles.streamed * _backward_width(problem.d, tiles), turns, 0


def _described(operands: list) -> tuple[list[int], tuple[tuple, bool]]:
    """Pointers; strides, and whether all pointers are aligned to 16 bytes."""
    pointers = [x.data.ptr for x in operands]
    strides = tuple([x.strides for x in operands])
    return pointers, (strides, functools.reduce(operator.or_, pointers) % 16 == 0)


class Plan(NamedTuple):
    """What launches need: Params but for the pointers, as 8-byte words; and the launches."""

    template: array.array
    # Kernel, grid, block, shared memory, and the encoder of the tensor maps that it takes.
    launches: list[tuple[Any, tuple, tuple, int, Callable[..., tuple[Any, int]] | None]]
    counts: bool = False  # forward: more tiles than blocks, of unlike work


@functools.lru_cache(4096)
def _forward_plan(
    device, problem: Problem, tiles: Portable | HopperTiles, strides, aligned: bool
) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    blocks = q_tiles = problem.batch * problem.heads * -(-problem.sq // tiles.resident)
    encoders = []
    if isinstance(tiles, HopperTiles):
        blocks = min(blocks, _limits(device)[2])  # each takes many tiles
        boxes = tiles.resident, tiles.streamed, tiles.streamed, 64
        if tiles.parts:
            encoders = [_parts_encoder(problem, tiles, boxes[:3])]
        else:
            vector = vector and min(strides[3]) >= 0  # then `out` has a tensor map too
            encoders = [_encoder(problem, boxes if vector else boxes[:3], strides)]
    else:
        blocks *= _chunks(problem.dv, tiles)[1]
    variants = [(forward_variant(problem, tiles, vector), blocks)]
    if isinstance(tiles, HopperTiles) and tiles.parts:
        variants.insert(0, split_step(problem, tiles, vector))
    template = _template(problem, strides, _section(problem))
    counts = q_tiles > blocks and not _uniform(problem)
    return Plan(template, _loaded(device, variants, encoders), counts)


@functools.lru_cache(4096)
def _backward_plan(
    device, problem: Problem, tiles: Portable | OnHopper, strides, aligned: bool
) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    steps = backward_steps(problem, tiles, vector)
    section, encoders = 0, []
    if isinstance(tiles, HopperBackward):
        most = _limits(device)[2]  # blocks that stay
        steps = [(v, min(n, most) if v.entry == "bwd_sm90" else n) for v, n in steps]
    if isinstance(tiles, OnHopper):
        section, all_boxes = tiles.together, backward_boxes(tiles, vector)
        if isinstance(tiles, HopperTwoPass) and tiles.parts:
            encoders = [_parts_encoder(problem, tiles, boxes) for boxes in all_boxes]
        else:
            mapped = backward_mapped(strides)
            encoders = [_encoder(problem, boxes, mapped) for boxes in all_boxes]
    return Plan(_template(problem, strides, section), _loaded(device, steps, encoders))


def _whole_groups(problem: Problem, strides: tuple) -> bool:
    """Whether rows are whole 16-byte groups, so that copies of 16 bytes are possible."""
    group = 16 // problem.itemsize
    whole = problem.d % group == problem.dv % group == 0
    return whole and _rows_of_groups(problem.itemsize, strides)


def _rows_of_groups(itemsize: int, strides: tuple) -> bool:
    """Whether elements of a row are neighbours, and rows begin a multiple of 16 bytes apart."""
    return all(
        array[-1] == itemsize and not any(stride % 16 for stride in array[:-1]) for array in strides
    )


def _section(p: Problem) -> int:
    """Heads that a Hopper launch works on at a time.

    One after the other where all tiles are alike, so that its keys and values are read from the L2
    cache; else the longest tiles of as many heads as have theirs in 32 MB of it, first.
    """
    if _uniform(p):
        return 1
    heads_kv = 32e6 // max(1, p.sk * (p.d + p.dv) * p.itemsize)
    return max(1, min(int(heads_kv) * p.group, p.batch * p.heads))


def _turns(p: Problem) -> tuple[int, int]:
    """Of bwd_sm80: 2^this queries are a turn at dQ, and whether it is passed on at once.

    Turns of 64 cost 5 % at a width of 128, and turns of 128 cost 8 % at 256. Where heads are few,
    all blocks of one wait for each other.
    """
    few = p.batch * p.heads < 16
    return 6 if few or p.d > 128 else 7, int(few)


def _template(p: Problem, strides: tuple, section: int) -> array.array:
    words = [word for array in strides for word in (0, *array)]
    words += [0] * (56 - len(words))
    sizes = p.batch, p.heads, p.group, p.sq, p.sk, p.d, p.dv, *p.band, section
    packed = PARAMS.pack(*words, *sizes, *_turns(p), p.scale, p.softcap or 0.0)
    return array.array("q", packed)


def _loaded(device: int, variants: list[tuple[Variant, int]], encoders: list) -> list[tuple]:
    # The function behind a RawKernel, which itself looks for the device at every launch.
    left = iter(encoders)
    return [
        (
            _kernel(device, v).kernel, (blocks,), (v.threads,), v.shared_bytes,
            next(left) if "sm90" in v.entry else None,
        )
        for v, blocks in variants
        if blocks
    ]  # fmt: skip


@functools.cache
def _kernel(device: int, variant: Variant) -> Any:
    return _compile.kernel(variant.file, variant.entry, variant.macros, variant.shared_bytes)


@functools.cache
def _by_address() -> Any:
    """CuPy's type of an argument found at an address.

    A NumPy array of one element is passed by value too, but looking into it takes CuPy 0.7 us a
    launch, and NumPy scalars of this size need CuPy 14.2.
    """
    from cupy.cuda.function import CPointer

    return CPointer


def _launch(plan: Plan, pointers: list[int], rows: list[int], mapped: Sequence[int] = ()) -> None:
    """`mapped`: pointers of the arrays that have tensor maps."""
    params = plan.template[:]
    for i, pointer in enumerate(pointers):
        params[5 * i] = pointer
    for i, pointer in enumerate(rows, 40):
        params[i] = pointer
    by_address = _by_address()
    args = (by_address(params.buffer_info()[0]),)
    for kernel, grid, block, shared_bytes, encode in plan.launches:
        more = (by_address(encode(*mapped)[1]),) if encode else ()
        kernel(grid, block, args + more, shared_bytes)
