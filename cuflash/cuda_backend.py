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

#: Params of params.cuh: eight arrays (pointer and four strides), four rows, sizes, numbers.
PARAMS = struct.Struct("44q9i4x2d")
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
    stages: int = 2  # of the streamed tiles in a 16-bit backward pass; forward one of each
    slice: int = 64  # columns at a time, on CUDA cores
    whole: bool = True  # on CUDA cores: resident rows stay in shared memory and do not stream too


@dataclass(frozen=True)
class Config:
    """Tiles of the forward kernel, of the pass for dK and dV, and of the pass for dQ."""

    forward: Tiles
    backward_kv: Tiles
    backward_q: Tiles


# By dtype, then by the larger of the two widths: candidates, the first that fits the device is
# taken. The last of a row fits 48 KiB, so every GPU. TFLOP/s: bfloat16 on an H200, 2 x 16 heads,
# S = 8192, full, beside PyTorch's FlashAttention-2 in the same run; more in docs/kernels.md.
_FORWARD_16 = {
    64: [Tiles(128, 96, 4)],  # 316, FlashAttention-2 286; 301 with 64 keys at a time
    128: [Tiles(128, 48, 4), Tiles(64, 32, 4)],  # 372, FlashAttention-2 346; 358 with 64
    192: [Tiles(128, 64, 8), Tiles(64, 32, 4)],
    256: [Tiles(128, 64, 8), Tiles(64, 64, 4), Tiles(32, 16, 2)],  # 325, FlashAttention-2 329
}
# Both passes together: 228 at 64 (FlashAttention-2 262), 257 at 128 (288), 165 at 256 (251).
_BACKWARD_KV_16 = {
    64: [Tiles(128, 32, 4), Tiles(64, 32, 4)],
    128: [Tiles(64, 64, 4), Tiles(32, 32, 2), Tiles(32, 16, 2)],
    192: [Tiles(64, 32, 4), Tiles(32, 16, 2, 1)],
    256: [Tiles(64, 32, 4, 1), Tiles(16, 16, 1, 1)],
}
_BACKWARD_Q_16 = {
    64: [Tiles(128, 32, 4), Tiles(64, 32, 4)],
    128: [Tiles(128, 32, 4), Tiles(64, 32, 4), Tiles(32, 16, 2)],
    192: [Tiles(64, 32, 4), Tiles(32, 16, 2, 1)],
    256: [Tiles(128, 32, 8), Tiles(64, 32, 4, 1), Tiles(16, 16, 1, 1)],
}
# On CUDA cores a thread has resident / (4 warps) rows, as many as registers allow. A list's first
# is for 227 KiB, those between for GPUs with 163 or 99. TFLOP/s of a kernel, all its products
# counted, of 67 in float32 and 33 in float64: H200, 16 heads, S = 4096 (2048 at 256), full.
_SMALL = Tiles(64, 32, 4, slice=32, whole=False)
_FORWARD_32 = {
    64: [Tiles(128, 64, 4), Tiles(128, 32, 4), _SMALL],  # 43; 41; (256, 64, 8) 44
    128: [Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],  # 42; (128, 64, 8) 40
    256: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL],  # 38; 33
}
_BACKWARD_32 = {  # the pass for dK and dV / the pass for dQ
    # 44 / 43; 43 / 42; 35 / 36
    64: [Tiles(256, 32, 8), Tiles(128, 32, 4), Tiles(64, 32, 4), _SMALL],
    128: [Tiles(128, 32, 8), Tiles(64, 32, 4), _SMALL],  # 38 / 37; 36 / 35
    256: [Tiles(64, 32, 4), Tiles(64, 32, 4, whole=False), _SMALL],  # 27 / 27; 26 / 27
}
_SMALL_64 = Tiles(32, 32, 4, slice=32, whole=False)
_FORWARD_64 = {
    64: [Tiles(128, 64, 8), Tiles(64, 32, 4), _SMALL_64],  # 19.7; 17.4; (128, 32, 8) 19.2
    128: [Tiles(128, 32, 8), Tiles(64, 32, 4), Tiles(32, 32, 4), _SMALL_64],  # 19.7; 14.5
    256: [Tiles(64, 32, 8), Tiles(32, 32, 4, whole=False), _SMALL_64],  # 16.3
}
_BACKWARD_64 = {
    # 20.6 / 20.5; 15.8 / 15.7; 15.3 / 15.2
    64: [Tiles(128, 32, 8), Tiles(64, 32, 4), Tiles(32, 32, 2), _SMALL_64],
    128: [Tiles(64, 32, 8), _SMALL_64],  # 16.6 / 15.5
    # 14.4 / 14.5; 13.2 / 13.3
    256: [Tiles(64, 32, 8, whole=False), Tiles(32, 32, 4, whole=False), _SMALL_64],
}

FORWARD = {
    "float16": _FORWARD_16, "bfloat16": _FORWARD_16, "float32": _FORWARD_32, "float64": _FORWARD_64,
}  # fmt: skip
BACKWARD_KV = {
    "float16": _BACKWARD_KV_16, "bfloat16": _BACKWARD_KV_16,
    "float32": _BACKWARD_32, "float64": _BACKWARD_64,
}  # fmt: skip
BACKWARD_Q = {
    "float16": _BACKWARD_Q_16, "bfloat16": _BACKWARD_Q_16,
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
def forward_variant(problem: Problem, tiles: Tiles, vector: bool) -> Variant:
    if problem.dtype in REALS:
        macros = {"TRANSFORM": int(problem.softcap is not None or problem.scale <= 0)}
        return _simt_variant(
            "fwd_simt", "fwd_simt", problem, tiles, vector, macros, (problem.d,), 0
        )
    d, dv = _rounded_up(problem.d, 32), _rounded_up(problem.dv, 32)
    q_or_out = max(_tile_bytes(tiles.resident, d), _tile_bytes(tiles.resident, dv))
    shared = q_or_out + _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows = {"BLOCK_Q": tiles.resident, "BLOCK_K": tiles.streamed}
    return _sm80_variant("fwd_sm80", "fwd_sm80", problem, tiles, vector, rows, shared)


@functools.lru_cache(4096)
def backward_variant(
    step: str, problem: Problem, tiles: Tiles, vector: bool, parts: int = 1
) -> Variant:
    """`step`: "delta", "kv" (its `parts`: dK 1, dV 2, both 3) or "q"."""
    file = "bwd_simt" if problem.dtype in REALS else "bwd_sm80"
    entry = "row_delta" if step == "delta" else file
    macros = {"KEYS": int(step == "kv"), "PARTS": parts}
    if problem.dtype in REALS:
        kept = (problem.d, problem.dv) if parts & 1 else (problem.d,)
        stats = 2 * (tiles.streamed if step == "kv" else tiles.resident)  # lse and delta
        return _simt_variant(file, entry, problem, tiles, vector, macros, kept, stats)
    d, dv = _rounded_up(problem.d, 32), _rounded_up(problem.dv, 32)
    resident = _tile_bytes(tiles.resident, d) + _tile_bytes(tiles.resident, dv)
    stage = _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows_bytes = 2 * 4 * tiles.streamed  # lse and delta of the streamed rows
    shared = resident + tiles.stages * stage + _rounded_up(tiles.stages * rows_bytes, 1024)
    rows = {"BLOCK_R": tiles.resident, "BLOCK_S": tiles.streamed, "STAGES": tiles.stages}
    return _sm80_variant(file, entry, problem, tiles, vector, macros | rows, shared)


def _sm80_variant(file, entry, problem, tiles, vector, macros, shared) -> Variant:
    macros = {
        "ELEMENT": ELEMENTS[problem.dtype],
        "HEAD_DIM": _rounded_up(problem.d, 32),
        "VALUE_DIM": _rounded_up(problem.dv, 32),
        "TRANSFORM": int(problem.softcap is not None or problem.scale <= 0),
        **macros,
    }
    return _variant(file, entry, tiles, vector, macros, shared)


def _simt_variant(file, entry, problem, tiles, vector, macros, kept, stats) -> Variant:
    """`kept`: widths of the block's own rows; `stats`: numbers of lse and delta in its memory."""
    macros = {
        "REAL": REALS[problem.dtype],
        "HEAD_DIM": _rounded_up(problem.d, tiles.slice),
        "VALUE_DIM": _rounded_up(problem.dv, tiles.slice),
        "SLICE": tiles.slice,
        "STREAMED": tiles.streamed,
        "ROWS_PER_THREAD": tiles.resident // (4 * tiles.warps),
        "WHOLE": int(tiles.whole),
        "SOFTCAP": int(problem.softcap is not None),
        **macros,
    }
    slices = sum(-(-width // tiles.slice) for width in kept) if tiles.whole else 2
    pad = 16 // problem.itemsize  # of every row
    own_row = tiles.resident + pad
    theirs = max(  # columns first, or as they lie
        tiles.slice * (tiles.streamed + pad), tiles.streamed * (tiles.slice + pad)
    )
    numbers = (slices * tiles.slice + tiles.streamed) * own_row + 2 * theirs + stats
    return _variant(file, entry, tiles, vector, macros, numbers * problem.itemsize)


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


def parts_of(problem: Problem) -> tuple[int, ...]:
    """What each launch of the kv pass computes, dK (1) and dV (2): wide ones do not fit at once."""
    return (3,) if max(problem.d, problem.dv) <= 128 else (1, 2)


def config_for(problem: Problem, capability: int, shared_limit: int) -> Config:
    """The first row of each table that fits in `shared_limit` bytes of shared memory a block."""
    if capability < 80:
        shared_limit = 48 * KIB  # the larger tiles spill there, as half the products need two steps

    def first(tables, variant):
        table = tables[problem.dtype]
        width = next(w for w in table if w >= max(problem.d, problem.dv))
        return next(t for t in table[width] if variant(t).shared_bytes <= shared_limit)

    return Config(
        first(FORWARD, lambda t: forward_variant(problem, t, True)),
        first(BACKWARD_KV, lambda t: backward_variant("kv", problem, t, True)),
        first(BACKWARD_Q, lambda t: backward_variant("q", problem, t, True)),
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
    pointers, strides, aligned = _described((q, k, v, out, dout, dq, dk, dv))
    plan = _backward_plan(q.data.device_id, problem, config, strides, aligned)
    rows = (lse, dlse, lse_log2, delta)
    _launch(plan, pointers, [0 if x is None else x.data.ptr for x in rows])


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
    rows = problem.batch * problem.heads * problem.sq
    variants = [(backward_variant("delta", problem, config.backward_q, vector), -(-rows // 8))]
    tiles = -(-problem.sk // config.backward_kv.resident)
    for parts in parts_of(problem):
        kv = backward_variant("kv", problem, config.backward_kv, vector, parts)
        variants.append((kv, problem.batch * problem.heads_kv * tiles))
    tiles = -(-problem.sq // config.backward_q.resident)
    q = backward_variant("q", problem, config.backward_q, vector)
    variants.append((q, problem.batch * problem.heads * tiles))
    return Plan(_template(problem, strides), _loaded(device, variants))


def _whole_groups(problem: Problem, strides: tuple) -> bool:
    """Whether rows are 16-byte groups that lie 16 bytes apart, so that such copies are possible."""
    group = 16 // problem.itemsize
    return problem.d % group == problem.dv % group == 0 and all(
        array[-1] == problem.itemsize and not any(stride % 16 for stride in array[:-1])
        for array in strides
    )


def _template(p: Problem, strides: tuple) -> np.ndarray:
    words = [word for array in strides for word in (0, *array)]
    words += [0] * (44 - len(words))
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
