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
PARAMS = struct.Struct("44q8i2d")
_PARAMS_DTYPE = np.dtype((np.void, PARAMS.size))  # CuPy passes an array of one element by value
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
KIB = 1024


class Tiles(NamedTuple):
    """Rows that stay in shared memory, rows that stream past at a time, warps, and buffers."""

    resident: int
    streamed: int
    warps: int
    stages: int = 2  # of the streamed tiles in a backward pass; a forward pass has one of each


@dataclass(frozen=True)
class Config:
    """Tiles of the forward kernel, of the pass for dK and dV, and of the pass for dQ."""

    forward: Tiles
    backward_kv: Tiles
    backward_q: Tiles


# By the larger of the two widths, padded: candidates, the first that fits the device is taken. The
# last of a table's row fits 48 KiB, so every GPU. TFLOP/s: bfloat16 on an H200, 2 x 16 heads,
# S = 8192, full, beside PyTorch's FlashAttention-2 in the same run; more in docs/kernels.md.
FORWARD = {
    64: [Tiles(128, 96, 4)],  # 316, FlashAttention-2 286; 301 with 64 keys at a time
    128: [Tiles(128, 48, 4), Tiles(64, 32, 4)],  # 372, FlashAttention-2 346; 358 with 64
    192: [Tiles(128, 64, 8), Tiles(64, 32, 4)],
    256: [Tiles(128, 64, 8), Tiles(64, 64, 4), Tiles(32, 16, 2)],  # 325, FlashAttention-2 329
}
# Both passes together: 228 at 64 (FlashAttention-2 262), 257 at 128 (288), 165 at 256 (251).
BACKWARD_KV = {
    64: [Tiles(128, 32, 4), Tiles(64, 32, 4)],
    128: [Tiles(64, 64, 4), Tiles(32, 32, 2), Tiles(32, 16, 2)],
    192: [Tiles(64, 32, 4), Tiles(32, 16, 2, 1)],
    256: [Tiles(64, 32, 4, 1), Tiles(16, 16, 1, 1)],
}
BACKWARD_Q = {
    64: [Tiles(128, 32, 4), Tiles(64, 32, 4)],
    128: [Tiles(128, 32, 4), Tiles(64, 32, 4), Tiles(32, 16, 2)],
    192: [Tiles(64, 32, 4), Tiles(32, 16, 2, 1)],
    256: [Tiles(128, 32, 8), Tiles(64, 32, 4, 1), Tiles(16, 16, 1, 1)],
}


class Variant(NamedTuple):
    """One compiled kernel: its file, entry point, macros and sizes of a block."""

    file: str
    entry: str
    macros: _compile.Macros
    threads: int
    shared_bytes: int


def padded(width: int) -> int:
    return -(-width // 32) * 32


@functools.lru_cache(4096)
def forward_variant(problem: Problem, tiles: Tiles, vector: bool) -> Variant:
    d, dv = padded(problem.d), padded(problem.dv)
    q_or_out = max(_tile_bytes(tiles.resident, d), _tile_bytes(tiles.resident, dv))
    shared = q_or_out + _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows = {"BLOCK_Q": tiles.resident, "BLOCK_K": tiles.streamed}
    return _variant("fwd_sm80.cu", "fwd_sm80", problem, tiles, vector, shared, rows)


@functools.lru_cache(4096)
def backward_variant(
    entry: str, problem: Problem, tiles: Tiles, vector: bool, parts: int
) -> Variant:
    d, dv = padded(problem.d), padded(problem.dv)
    resident = _tile_bytes(tiles.resident, d) + _tile_bytes(tiles.resident, dv)
    stage = _tile_bytes(tiles.streamed, d) + _tile_bytes(tiles.streamed, dv)
    rows_bytes = 2 * 4 * tiles.streamed  # lse and delta of the streamed rows
    shared = resident + tiles.stages * stage + _rounded(tiles.stages * rows_bytes)
    rows = {
        "BLOCK_R": tiles.resident,
        "BLOCK_S": tiles.streamed,
        "STAGES": tiles.stages,
        "PARTS": parts,
    }
    return _variant("bwd_sm80.cu", entry, problem, tiles, vector, shared, rows)


def _variant(file, entry, problem, tiles, vector, shared, rows) -> Variant:
    macros = {
        "ELEMENT": ELEMENTS[problem.dtype],
        "HEAD_DIM": padded(problem.d),
        "VALUE_DIM": padded(problem.dv),
        **rows,
        "WARPS": tiles.warps,
        "TRANSFORM": int(problem.softcap is not None or problem.scale <= 0),
        "VECTOR": int(vector),
        "SHARED_BYTES": shared,
        "PARAMS_BYTES": PARAMS.size,
    }
    return Variant(file, entry, tuple(macros.items()), 32 * tiles.warps, shared)


def _rounded(size: int) -> int:
    return -(-size // 1024) * 1024


def _tile_bytes(rows: int, width: int) -> int:
    return _rounded(2 * rows * width)


def parts_of(problem: Problem) -> tuple[int, ...]:
    """What each launch of the kv pass computes, dK (1) and dV (2): wide ones do not fit at once."""
    return (3,) if max(problem.d, problem.dv) <= 128 else (1, 2)


def config_for(problem: Problem, capability: int, shared_limit: int) -> Config:
    """The first row of each table that fits in `shared_limit` bytes of shared memory a block."""
    if capability < 80:
        shared_limit = 48 * KIB  # the larger tiles spill there, as half the products need two steps
    width = next(w for w in FORWARD if w >= max(problem.d, problem.dv))

    def first(table, variant):
        return next(t for t in table[width] if variant(t).shared_bytes <= shared_limit)

    return Config(
        first(FORWARD, lambda t: forward_variant(problem, t, True)),
        first(BACKWARD_KV, lambda t: backward_variant("bwd_sm80_kv", problem, t, True, 3)),
        first(BACKWARD_Q, lambda t: backward_variant("bwd_sm80_q", problem, t, True, 3)),
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
    if problem.dtype not in ELEMENTS:
        return f"it has no kernels for {problem.dtype}"
    if max(problem.d, problem.dv) > 256:
        return f"its widths end at 256, and these are {problem.d} and {problem.dv}"
    import cupy

    capability, _ = _limits(cupy.cuda.runtime.getDevice())
    needed = 75 if problem.dtype == "float16" else 80
    if capability < needed:
        return f"{problem.dtype} needs compute capability {needed / 10}, and not {capability / 10}"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""
    params, vector = _params(problem, (q, k, v, out), (lse,))
    blocks = problem.batch * problem.heads * -(-problem.sq // config.forward.resident)
    _launch(forward_variant(problem, config.forward, vector), blocks, params)


def backward(problem: Problem, config: Config, dout, q, k, v, out, lse, dlse, dq, dk, dv) -> None:
    """Write `dq`, `dk` and `dv`."""
    import cupy

    lse = cupy.ascontiguousarray(lse)
    dlse = None if dlse is None else cupy.ascontiguousarray(dlse)
    lse_log2, delta = cupy.empty((2, *lse.shape), "float32")
    rows = lse, dlse, lse_log2, delta
    params, vector = _params(problem, (q, k, v, out, dout, dq, dk, dv), rows)
    row_delta = backward_variant("row_delta", problem, config.backward_q, vector, 3)
    row_delta = row_delta._replace(threads=256, shared_bytes=0)
    _launch(row_delta, -(-delta.size // 8), params, np.int64(delta.size))
    blocks = problem.batch * problem.heads_kv * -(-problem.sk // config.backward_kv.resident)
    for parts in parts_of(problem):
        kv = backward_variant("bwd_sm80_kv", problem, config.backward_kv, vector, parts)
        _launch(kv, blocks, params)
    blocks = problem.batch * problem.heads * -(-problem.sq // config.backward_q.resident)
    _launch(backward_variant("bwd_sm80_q", problem, config.backward_q, vector, 3), blocks, params)


def _params(problem: Problem, operands: tuple, rows: tuple) -> tuple[np.ndarray, bool]:
    """Params for a launch, and whether 16-byte copies are possible on all operands."""
    template, vector = _template(problem, tuple(x.strides for x in operands))
    params = template.copy()
    pointers = [x.data.ptr for x in operands]
    params[0 : 5 * len(pointers) : 5] = pointers
    params[40 : 40 + len(rows)] = [0 if x is None else x.data.ptr for x in rows]
    return params.view(_PARAMS_DTYPE), vector and not any(p % 16 for p in pointers)


@functools.lru_cache(4096)
def _template(problem: Problem, strides: tuple) -> tuple[np.ndarray, bool]:
    """Params without pointers, as 8-byte words; whether rows are aligned groups of 8 elements."""
    p, itemsize = problem, np.dtype("float16").itemsize
    words = []
    for array in strides:
        words += [0, *array]
    words += [0] * (44 - len(words))
    packed = PARAMS.pack(
        *words, p.heads, p.group, p.sq, p.sk, p.d, p.dv, *p.band, p.scale, p.softcap or 0.0
    )
    vector = p.d % 8 == p.dv % 8 == 0 and all(
        array[-1] == itemsize and not any(stride % 16 for stride in array[:-1]) for array in strides
    )
    return np.frombuffer(packed, np.int64), vector


def _launch(variant: Variant, blocks: int, *args: Any) -> None:
    if blocks:
        import cupy

        kernel = _kernel(cupy.cuda.runtime.getDevice(), variant)
        kernel((blocks,), (variant.threads,), args, shared_mem=variant.shared_bytes)


@functools.cache
def _kernel(device: int, variant: Variant) -> Any:
    return _compile.kernel(variant.file, variant.entry, variant.macros, variant.shared_bytes)
