"""Raw CUDA kernels: which one and which tiles a problem gets, and its launch.

A kernel's file name is its dispatch name: `fwd_sm80.cu` holds `fwd_sm80`. Every variant (dtype,
widths, tiles, whether 16-byte copies are possible) is a module of its own, compiled on first use.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _compile
from .problem import Problem

#: Params of params.cuh: eight arrays (pointer and four strides), six pointers, sizes, numbers.
PARAMS = struct.Struct("46q9i4x2d")
_PARAMS_DTYPE = np.dtype((np.void, PARAMS.size))  # CuPy passes an array of one element by value
KIB = 1024
#: The element type of the tensor-core kernels, and the arithmetic of the CUDA-core ones.
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
REALS = {"float32": "float", "float64": "double"}
WIDEST = 256


class Tiles(NamedTuple):
    """Rows that stay with a block, rows that stream past at a time, warps, and buffers."""

    resident: int
    streamed: int
    warps: int
    # Of a 16-bit backward pass; elsewhere there is one buffer, and warps share no rows.
    stages: int = 2
    across: int = 1  # how many of the warps divide streamed rows among them; the others, resident


@dataclass(frozen=True)
class Config:
    """Tiles of the forward and of the backward kernel."""

    forward: Tiles
    backward: Tiles


# By dtype, then by the larger of the two widths: candidates, the first that fits the device is
# taken. The last of a row fits 64 KiB (forward 48), so every GPU. TFLOP/s: bfloat16 on an H200,
# 2 x 16 heads, S = 8192, full, beside PyTorch's FlashAttention-2 in the same run; more in
# docs/kernels.md.
_FORWARD_16 = {
    64: [Tiles(128, 96, 4)],  # 316, FlashAttention-2 286; 301 with 64 keys at a time
    128: [Tiles(128, 48, 4), Tiles(64, 32, 4)],  # 372, FlashAttention-2 346; 358 with 64
    192: [Tiles(128, 64, 8), Tiles(64, 32, 4)],
    256: [Tiles(128, 64, 8), Tiles(64, 64, 4), Tiles(32, 16, 2)],  # 325, FlashAttention-2 329
}
_BACKWARD_16 = {
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
}  # fmt: skip
# On CUDA cores a thread has resident / (4 warps) rows, as many as registers allow; streamed is also
# the number of columns of a slice.
_FORWARD_32 = {
    64: [Tiles(128, 64, 4), Tiles(128, 32, 8)],
    256: [Tiles(128, 64, 8), Tiles(128, 32, 8)],
}
_BACKWARD_32 = {
    128: [Tiles(128, 64, 8), Tiles(128, 32, 8)],
    256: [Tiles(128, 32, 8)],
}
_64 = {64: [Tiles(64, 32, 4)], 256: [Tiles(64, 32, 8)]}

FORWARD = {
    "float16": _FORWARD_16, "bfloat16": _FORWARD_16, "float32": _FORWARD_32, "float64": _64,
}  # fmt: skip
BACKWARD = {
    "float16": _BACKWARD_16, "bfloat16": _BACKWARD_16, "float32": _BACKWARD_32, "float64": _64,
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
def forward_variant(problem: Problem, tiles: Tiles, vector: bool) -> Variant:
    if problem.dtype in REALS:
        return _simt_variant("fwd_simt", "fwd_simt", problem, tiles, vector, {})
    d, dv = _rounded_up(problem.d, 32), _rounded_up(problem.dv, 32)
    q_or_out = max(_tile_bytes(tiles.resident, d), _tile_bytes(tiles.resident, dv))
    shared = q_or_out + _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows = {"BLOCK_Q": tiles.resident, "BLOCK_K": tiles.streamed}
    return _sm80_variant("fwd_sm80", "fwd_sm80", problem, tiles, vector, rows, shared)


@functools.lru_cache(4096)
def backward_steps(problem: Problem, tiles: Tiles, vector: bool) -> list[tuple[Variant, int]]:
    """What a backward pass launches: kernels, and of how many blocks."""
    steps = _simt_steps if problem.dtype in REALS else _sm80_steps
    return steps(problem, tiles, vector)


def _simt_steps(problem, tiles, vector) -> list[tuple[Variant, int]]:
    def step(entry, keys=0, parts=1):
        macros = {"KEYS": keys, "PARTS": parts}
        return _simt_variant("bwd_simt", entry, problem, tiles, vector, macros)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    k_blocks, q_blocks = (-(-n // tiles.resident) for n in (problem.sk, problem.sq))
    # Of dK (1) and dV (2): wide ones do not fit at once.
    together = 64 if problem.dtype == "float32" else 0
    parts_of_kv = (3,) if max(problem.d, problem.dv) <= together else (1, 2)
    return [
        (step("row_delta"), -(-heads * problem.sq // 8)),
        *((step("bwd_simt", 1, parts), heads_kv * k_blocks) for parts in parts_of_kv),
        (step("bwd_simt"), heads * q_blocks),
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
        return _sm80_variant("bwd_sm80", entry, problem, tiles, vector, macros, shared)

    heads, heads_kv = problem.batch * problem.heads, problem.batch * problem.heads_kv
    store_dq = step("store_dq")._replace(shared_bytes=_tile_bytes(queries, d))
    return [
        (step("row_delta"), -(-heads * problem.sq // 8)),
        (step("bwd_sm80"), heads_kv * -(-problem.sk // keys)),
        (store_dq, heads * -(-problem.sq // queries)),
    ]


def _backward_width(width: int, tiles: Tiles) -> int:
    """Columns of a tile: warps divide them in blocks of 16."""
    return _rounded_up(width, 16 * max(2, tiles.across))


def _sm80_variant(file, entry, problem, tiles, vector, macros, shared) -> Variant:
    macros = {
        "ELEMENT": ELEMENTS[problem.dtype],
        "HEAD_DIM": _rounded_up(problem.d, 32),
        "VALUE_DIM": _rounded_up(problem.dv, 32),
        "TRANSFORM": int(problem.softcap is not None or problem.scale <= 0),
        **macros,
    }
    return _variant(file, entry, tiles, vector, macros, shared)


def _simt_variant(file, entry, problem, tiles, vector, macros) -> Variant:
    group = 16 // problem.itemsize
    macros = {
        "REAL": REALS[problem.dtype],
        "HEAD_DIM": _rounded_up(problem.d, tiles.streamed),
        "VALUE_DIM": _rounded_up(problem.dv, tiles.streamed),
        "SLICE": tiles.streamed,
        "ROWS_PER_THREAD": tiles.resident // (4 * tiles.warps),
        "SOFTCAP": int(problem.softcap is not None),
        **macros,
    }
    shared = tiles.streamed * (tiles.resident + tiles.streamed + 2 * group) * problem.itemsize
    return _variant(file, entry, tiles, vector, macros, shared)


def _variant(file, entry, tiles, vector, macros, shared) -> Variant:
    macros = {
        **macros,
        "WARPS": tiles.warps,
        "VECTOR": int(vector),
        "SHARED_BYTES": shared,
        "PARAMS_BYTES": PARAMS.size,
    }
    threads, shared = (256, 0) if entry == "row_delta" else (32 * tiles.warps, shared)
    return Variant(file + ".cu", entry, tuple(macros.items()), threads, shared)


def config_for(problem: Problem, capability: int, shared_limit: int) -> Config:
    """The first row of each table that fits in `shared_limit` bytes of shared memory a block."""
    # Larger forward tiles spill on Turing, where half the products need two steps.
    forward_limit = min(shared_limit, 48 * KIB) if capability < 80 else shared_limit

    def first(tables, shared_bytes, limit):
        table = tables[problem.dtype]
        width = next(w for w in table if w >= max(problem.d, problem.dv))
        return next(tiles for tiles in table[width] if shared_bytes(tiles) <= limit)

    def forward_bytes(tiles):
        return forward_variant(problem, tiles, True).shared_bytes

    def backward_bytes(tiles):
        return max(step.shared_bytes for step, _ in backward_steps(problem, tiles, True))

    return Config(
        first(FORWARD, forward_bytes, forward_limit),
        first(BACKWARD, backward_bytes, shared_limit),
    )


def default_config(problem: Problem) -> Config:
    import cupy

    return config_for(problem, *_limits(cupy.cuda.runtime.getDevice()))


@functools.cache
def _limits(device: int) -> tuple[int, int]:
    """Compute capability (major * 10 + minor) and shared memory that a block may opt in to."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    capability = properties["major"] * 10 + properties["minor"]
    return capability, properties["sharedMemPerBlockOptin"]


def unsupported(problem: Problem) -> str | None:
    if problem.device == "cpu":
        return "it takes arrays on a GPU, and these are NumPy arrays; cupy.asarray copies them"
    if max(problem.d, problem.dv) > WIDEST:
        return f"its widths end at {WIDEST}, and these are {problem.d} and {problem.dv}"
    import cupy

    capability, _ = _limits(cupy.cuda.runtime.getDevice())
    needed = 80 if problem.dtype == "bfloat16" else 75
    if capability < needed:
        return f"{problem.dtype} needs compute capability {needed / 10}, and not {capability / 10}"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""
    pointers, strides, aligned = _described((q, k, v, out))
    plan = _forward_plan(q.data.device_id, problem, config, strides, aligned)
    _launch(plan, pointers, (lse.data.ptr,))


def backward(problem: Problem, config: Config, dout, q, k, v, out, lse, dlse, dq, dk, dv) -> None:
    """Write `dq`, `dk` and `dv`."""
    import cupy

    lse = cupy.ascontiguousarray(lse)
    dlse = None if dlse is None else cupy.ascontiguousarray(dlse)
    lse_log2, delta = cupy.empty((2, *lse.shape), problem.compute)
    dq_sum, turns = (cupy.zeros(n, "f4") for n in sums_and_turns(problem, config.backward))
    pointers, strides, aligned = _described((q, k, v, out, dout, dq, dk, dv))
    plan = _backward_plan(q.data.device_id, problem, config, strides, aligned)
    rest = (lse, dlse, lse_log2, delta, dq_sum, turns)
    _launch(plan, pointers, [0 if x is None else x.data.ptr for x in rest])


def sums_and_turns(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """Sizes of dQ as float32 tiles and of the counters of turns at it; both begin as zeros."""
    if problem.dtype in REALS:
        return 0, 0
    q_tiles = problem.batch * problem.heads * -(-problem.sq // tiles.streamed)
    width = _backward_width(problem.d, tiles)
    return q_tiles * tiles.streamed * width, q_tiles * tiles.warps  # a turn is a tile or more


def _described(operands: tuple) -> tuple[list[int], tuple, bool]:
    """Pointers, strides, and whether all pointers are aligned to 16 bytes."""
    pointers = [x.data.ptr for x in operands]
    return pointers, tuple(x.strides for x in operands), not any(p % 16 for p in pointers)


class Plan(NamedTuple):
    """What launches need: Params but for the pointers, as 8-byte words; and the launches."""

    template: np.ndarray
    launches: list[tuple[Any, tuple, tuple, int]]  # kernel, grid, block, shared memory


@functools.lru_cache(4096)
def _forward_plan(device, problem: Problem, config: Config, strides, aligned: bool) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    tiles = -(-problem.sq // config.forward.resident)
    blocks = problem.batch * problem.heads * tiles
    variants = [(forward_variant(problem, config.forward, vector), blocks)]
    return Plan(_template(problem, strides), _loaded(device, variants))


@functools.lru_cache(4096)
def _backward_plan(device, problem: Problem, config: Config, strides, aligned: bool) -> Plan:
    vector = aligned and _whole_groups(problem, strides)
    steps = backward_steps(problem, config.backward, vector)
    return Plan(_template(problem, strides), _loaded(device, steps))


def _whole_groups(problem: Problem, strides: tuple) -> bool:
    """Whether rows are 16-byte groups that lie 16 bytes apart, so that such copies are possible."""
    group = 16 // problem.itemsize
    return problem.d % group == problem.dv % group == 0 and all(
        array[-1] == problem.itemsize and not any(stride % 16 for stride in array[:-1])
        for array in strides
    )


def _template(p: Problem, strides: tuple) -> np.ndarray:
    words = [word for array in strides for word in (0, *array)]
    words += [0] * (46 - len(words))
    sizes = p.batch, p.heads, p.group, p.sq, p.sk, p.d, p.dv, *p.band
    return np.frombuffer(PARAMS.pack(*words, *sizes, p.scale, p.softcap or 0.0), np.int64)


def _loaded(
    device: int, variants: list[tuple[Variant, int]]
) -> list[tuple[Any, tuple, tuple, int]]:
    return [
        (_kernel(device, v), (blocks,), (v.threads,), v.shared_bytes)
        for v, blocks in variants
        if blocks
    ]


@functools.cache
def _kernel(device: int, variant: Variant) -> Any:
    return _compile.kernel(variant.file, variant.entry, variant.macros, variant.shared_bytes)


def _launch(plan: Plan, pointers: list[int], rows: Any) -> None:
    params = plan.template.copy()
    params[0 : 5 * len(pointers) : 5] = pointers
    params[40 : 40 + len(rows)] = rows
    args = (params.view(_PARAMS_DTYPE),)
    for kernel, grid, block, shared_bytes in plan.launches:
        kernel(grid, block, args, shared_mem=shared_bytes)
