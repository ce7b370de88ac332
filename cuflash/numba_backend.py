"""The same tiles as Numba CUDA kernels, written to be read beside the papers.

A block of N x N threads works on square tiles of T x T numbers. Thread (x, y) has the rows y,
y + N, y + 2N ... and the columns x, x + N, x + 2N ... of a tile: R x R numbers, R = T / N. Two
tiles are in shared memory: `a` holds a slice of Q or dO, later P or dS; `b` a slice of K, V, dO or
Q. Widths beyond T are walked in slices of T columns, so any D and Dv fit in 48 KiB.
A tile has one column more than T, so that its rows start in different memory banks.

Forward is algorithm 1 of FlashAttention-2 (Dao 2023, arXiv:2307.08691). Backward is algorithm 2 as
one pass for dK and dV and one for dQ: nothing is added atomically, and results repeat bit for bit.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):
    # numba-cuda 0.30 asks for it on import; NumPy 2.5 dropped it.
    np.row_stack = np.vstack  # noqa: NPY201

from numba import config as numba_config
from numba import cuda, types

from . import arrays
from .problem import Problem, k_bounds, transposed

SIMULATED = bool(getattr(numba_config, "ENABLE_CUDASIM", False))
if SIMULATED:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray


@dataclass(frozen=True)
class Config:
    """Tile side T, and the side R of the part of a tile that one thread holds."""

    tile: int
    per_thread: int

    @property
    def side(self) -> int:
        """Threads along each side of a block."""
        return self.tile // self.per_thread

    def shared_bytes(self, itemsize: int) -> int:
        return (2 * self.tile * (self.tile + 1) + self.tile * self.side) * itemsize


def default_config(problem: Problem) -> Config:
    if SIMULATED:  # a simulated thread is a Python thread: few of them, and several tiles
        return Config(8, 4)
    # TFLOP/s forward and backward on an H200, 16 heads, S=4096, d=64: float64 3.7 and 2.4, float32
    # 6.2 and 5.1. Config(64, 8) reaches 8.3 forward, but compiles for 12 s and spills in backward.
    return Config(32, 2) if problem.compute == "float64" else Config(64, 4)


def unsupported(problem: Problem) -> str | None:
    if SIMULATED and problem.device != "cpu":
        return "Numba's CUDA simulator takes NumPy arrays"
    if not SIMULATED and problem.device == "cpu":
        return "it takes arrays on a GPU, and these are NumPy arrays; cupy.asarray copies them"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""
    blocks = problem.batch * problem.heads * math.ceil(problem.sq / config.tile)
    scalars = _scalars(problem, problem.band)
    _launch("forward", problem, config, blocks, (q, k, v, out, lse), scalars)


def backward(
    problem: Problem, config: Config, deterministic: bool, dout, q, k, v, out, lse, dlse, dq, dk, dv
) -> None:
    """Write `dq`, `dk` and `dv`."""
    xp = arrays.module_of(q)
    delta = xp.empty(q.shape[:-1], problem.compute)
    if dlse is None:
        dlse = xp.broadcast_to(xp.zeros((), problem.compute), delta.shape)
    blocks = math.ceil(delta.size / config.side**2)
    _launch("row_delta", problem, config, blocks, (dout, out, dlse, delta), ())
    saved = (dout, q, k, v, lse, delta)
    blocks = problem.batch * problem.heads_kv * math.ceil(problem.sk / config.tile)
    scalars = _scalars(problem, transposed(problem.band))
    _launch("backward_kv", problem, config, blocks, (*saved, dk, dv), scalars)
    blocks = problem.batch * problem.heads * math.ceil(problem.sq / config.tile)
    scalars = _scalars(problem, problem.band)
    _launch("backward_q", problem, config, blocks, (*saved, dq), scalars)


# --- The kernels. `real` is the dtype of all arithmetic; arrays keep theirs, with any strides. ---


def _forward(t: Tile, d_slices: int, dv_slices: int):
    T, R, N, pitch, real = t.size, t.per_thread, t.side, t.pitch, t.real
    minus_infinity = real(-math.inf)
    locate, load, store, product, accumulate = t.locate, t.load, t.store, t.product, t.accumulate

    def forward(q, k, v, out, lse, scale, softcap, lo_shift, hi_shift):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        a = cuda.shared.array((T, pitch), real)
        b = cuda.shared.array((T, pitch), real)
        by_column = cuda.shared.array((T, N), real)  # one number per row and column of threads
        s = cuda.local.array((R, R), real)
        o = cuda.local.array((dv_slices, R, R), real)
        m = cuda.local.array(R, real)
        l = cuda.local.array(R, real)
        batch, h, i0 = locate(q)
        hkv = h // (q.shape[1] // k.shape[1])
        qh, kh, vh = q[batch, h], k[batch, hkv], v[batch, hkv]
        sq, sk = qh.shape[0], kh.shape[0]

        # Line 5: O = 0, l = 0, m = -inf for this block of queries.
        for i in range(R):
            m[i] = minus_infinity
            l[i] = real(0)
        for c in range(dv_slices):
            for i in range(R):
                for j in range(R):
                    o[c, i, j] = real(0)

        # Line 6: for each block of keys that these queries see anything of.
        first, _ = k_bounds_on_gpu(i0, sk, lo_shift, hi_shift)
        _, last = k_bounds_on_gpu(min(i0 + T, sq) - 1, sk, lo_shift, hi_shift)
        for j0 in range(first // T * T, last, T):
            # Lines 7-8: S = Q K^T, then scale, softcap and mask.
            product(s, a, b, qh, i0, kh, j0, d_slices)
            for i in range(R):
                lo, hi = k_bounds_on_gpu(i0 + y + i * N, sk, lo_shift, hi_shift)
                top = minus_infinity
                for j in range(R):
                    key = j0 + x + j * N
                    s[i, j] = transform(s[i, j] * scale, softcap)
                    if key < lo or key >= hi:
                        s[i, j] = minus_infinity
                    top = max(top, s[i, j])
                by_column[y + i * N, x] = top
            cuda.syncthreads()
            for i in range(R):
                # Line 9: m = max(m, rowmax(S)); P = exp(S - m); l = exp(m_old - m) l + rowsum(P).
                new = m[i]
                for j in range(N):
                    new = max(new, by_column[y + i * N, j])
                # A row that has seen nothing yet: exp(-inf - 0) = 0 where exp(-inf + inf) is NaN.
                base = real(0) if new == minus_infinity else new
                rescale = math.exp(m[i] - base)
                m[i] = new
                l[i] *= rescale
                for j in range(R):
                    p = math.exp(s[i, j] - base)
                    l[i] += p  # of this thread's columns; summed over threads at the end
                    a[y + i * N, x + j * N] = p
                # Line 10, left half: O = exp(m_old - m) O ...
                for c in range(dv_slices):
                    for j in range(R):
                        o[c, i, j] *= rescale
            # Line 10, right half: ... + P V.
            for c in range(dv_slices):
                load(b, vh, j0, c * T)
                cuda.syncthreads()
                accumulate(o[c], a, b)
                cuda.syncthreads()

        # Lines 12-14: O = O / l, lse = m + log(l).
        for i in range(R):
            by_column[y + i * N, x] = l[i]
        cuda.syncthreads()
        for i in range(R):
            total = real(0)
            for j in range(N):
                total += by_column[y + i * N, j]
            empty = total == real(0)
            row = i0 + y + i * N
            if x == 0 and row < sq:
                lse[batch, h, row] = minus_infinity if empty else m[i] + math.log(total)
            inverse = real(0) if empty else real(1) / total
            for c in range(dv_slices):
                for j in range(R):
                    o[c, i, j] *= inverse
        for c in range(dv_slices):
            store(out[batch, h], i0, c * T, o[c], real(1))

    return forward


def _row_delta(t: Tile, d_slices: int, dv_slices: int):
    N, value = t.side, t.value

    def row_delta(dout, out, dlse, delta):
        """Algorithm 2, line 4: delta = rowsum(dO * O), less the gradient of lse; a thread a row."""
        row = (cuda.blockIdx.x * N + cuda.threadIdx.y) * N + cuda.threadIdx.x
        batch, heads, sq = delta.shape
        if row < batch * heads * sq:
            i, h = row % sq, row // sq % heads
            b = row // (sq * heads)
            total = -dlse[b, h, i]
            for c in range(out.shape[3]):
                total += value(dout[b, h, i, c]) * value(out[b, h, i, c])
            delta[b, h, i] = total

    return row_delta


def _backward_kv(t: Tile, d_slices: int, dv_slices: int):
    T, R, N, pitch, real = t.size, t.per_thread, t.side, t.pitch, t.real
    minus_infinity = real(-math.inf)
    locate, load, store, product, accumulate = t.locate, t.load, t.store, t.product, t.accumulate

    def backward_kv(dout, q, k, v, lse, delta, dk, dv, scale, softcap, lo_shift, hi_shift):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        a = cuda.shared.array((T, pitch), real)
        b = cuda.shared.array((T, pitch), real)
        p = cuda.local.array((R, R), real)
        ds = cuda.local.array((R, R), real)
        dk_tile = cuda.local.array((d_slices, R, R), real)
        dv_tile = cuda.local.array((dv_slices, R, R), real)
        batch, hkv, j0 = locate(k)
        kh, vh = k[batch, hkv], v[batch, hkv]
        sq, sk = q.shape[2], k.shape[2]
        group = q.shape[1] // k.shape[1]

        # Line 7: dK = 0, dV = 0 for this block of keys.
        for i in range(R):
            for j in range(R):
                for c in range(d_slices):
                    dk_tile[c, i, j] = real(0)
                for c in range(dv_slices):
                    dv_tile[c, i, j] = real(0)

        # Line 8: for each block of queries that sees any of these keys, in each head of the group.
        first, _ = k_bounds_on_gpu(j0, sq, lo_shift, hi_shift)
        _, last = k_bounds_on_gpu(min(j0 + T, sk) - 1, sq, lo_shift, hi_shift)
        for h in range(hkv * group, (hkv + 1) * group):
            qh, doh = q[batch, h], dout[batch, h]
            for i0 in range(first // T * T, last, T):
                # Lines 10-11, transposed: rows are keys. P^T = exp(S^T - lse).
                # Line 13: dP = dO V^T. Line 14: dS = P * (dP - delta).
                product(p, a, b, kh, j0, qh, i0, d_slices)
                product(ds, a, b, vh, j0, doh, i0, dv_slices)
                for i in range(R):
                    lo, hi = k_bounds_on_gpu(j0 + y + i * N, sq, lo_shift, hi_shift)
                    for j in range(R):
                        row = i0 + x + j * N
                        probability, gradient = real(0), real(0)
                        # A row whose every score is -inf has no gradient: -inf + inf is NaN.
                        if lo <= row < hi and lse[batch, h, row] != minus_infinity:
                            probability, gradient = differentiate(
                                p[i, j] * scale, ds[i, j], softcap, lse[batch, h, row],
                                delta[batch, h, row],
                            )  # fmt: skip
                        p[i, j], ds[i, j] = probability, gradient
                        a[y + i * N, x + j * N] = probability
                # Line 12: dV = dV + P^T dO.
                for c in range(dv_slices):
                    load(b, doh, i0, c * T)
                    cuda.syncthreads()
                    accumulate(dv_tile[c], a, b)
                    cuda.syncthreads()
                # Line 16: dK = dK + dS^T Q.
                for i in range(R):
                    for j in range(R):
                        a[y + i * N, x + j * N] = ds[i, j]
                for c in range(d_slices):
                    load(b, qh, i0, c * T)
                    cuda.syncthreads()
                    accumulate(dk_tile[c], a, b)
                    cuda.syncthreads()

        # Line 18: write dK and dV.
        for c in range(d_slices):
            store(dk[batch, hkv], j0, c * T, dk_tile[c], scale)
        for c in range(dv_slices):
            store(dv[batch, hkv], j0, c * T, dv_tile[c], real(1))

    return backward_kv


def _backward_q(t: Tile, d_slices: int, dv_slices: int):
    T, R, N, pitch, real = t.size, t.per_thread, t.side, t.pitch, t.real
    minus_infinity = real(-math.inf)
    locate, load, store, product, accumulate = t.locate, t.load, t.store, t.product, t.accumulate

    def backward_q(dout, q, k, v, lse, delta, dq, scale, softcap, lo_shift, hi_shift):
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        a = cuda.shared.array((T, pitch), real)
        b = cuda.shared.array((T, pitch), real)
        s = cuda.local.array((R, R), real)
        ds = cuda.local.array((R, R), real)
        dq_tile = cuda.local.array((d_slices, R, R), real)
        batch, h, i0 = locate(q)
        hkv = h // (q.shape[1] // k.shape[1])
        qh, kh, vh, doh = q[batch, h], k[batch, hkv], v[batch, hkv], dout[batch, h]
        sq, sk = qh.shape[0], kh.shape[0]
        for c in range(d_slices):
            for i in range(R):
                for j in range(R):
                    dq_tile[c, i, j] = real(0)
        first, _ = k_bounds_on_gpu(i0, sk, lo_shift, hi_shift)
        _, last = k_bounds_on_gpu(min(i0 + T, sq) - 1, sk, lo_shift, hi_shift)
        for j0 in range(first // T * T, last, T):
            # Lines 10-14 again, for the same tiles seen from the queries.
            product(s, a, b, qh, i0, kh, j0, d_slices)
            product(ds, a, b, doh, i0, vh, j0, dv_slices)
            for i in range(R):
                row = i0 + y + i * N
                lo, hi = k_bounds_on_gpu(row, sk, lo_shift, hi_shift)
                for j in range(R):
                    key = j0 + x + j * N
                    gradient = real(0)
                    if row < sq and lo <= key < hi and lse[batch, h, row] != minus_infinity:
                        _, gradient = differentiate(
                            s[i, j] * scale, ds[i, j], softcap, lse[batch, h, row],
                            delta[batch, h, row],
                        )  # fmt: skip
                    a[y + i * N, x + j * N] = gradient
            # Line 15: dQ = dQ + dS K.
            for c in range(d_slices):
                load(b, kh, j0, c * T)
                cuda.syncthreads()
                accumulate(dq_tile[c], a, b)
                cuda.syncthreads()
        for c in range(d_slices):
            store(dq[batch, h], i0, c * T, dq_tile[c], scale)

    return backward_q


_KERNELS = {
    "forward": _forward,
    "row_delta": _row_delta,
    "backward_kv": _backward_kv,
    "backward_q": _backward_q,
}


# --- What the kernels are made of. ---

k_bounds_on_gpu = cuda.jit(device=True)(k_bounds)


@cuda.jit(device=True)
def transform(s, softcap):
    """Softcap, where there is one."""
    if softcap > 0:
        return softcap * math.tanh(s / softcap)
    return s


@cuda.jit(device=True)
def differentiate(s, dp, softcap, lse, delta):
    """P = exp(S - lse) and dS = P * (dP - delta), times the slope of the softcap."""
    p = math.exp(transform(s, softcap) - lse)
    ds = p * (dp - delta)
    if softcap > 0:
        t = math.tanh(s / softcap)
        ds -= ds * t * t
    return p, ds


@cuda.jit(device=True)
def from_bfloat16(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@cuda.jit(device=True)
def to_bfloat16(x):
    """The upper half of a float32, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@cuda.jit(device=True)
def to_float32(x):
    return np.float32(x)


@cuda.jit(device=True)
def unchanged(x):
    """For float64; and assignment to an element of float32 or float16 converts by itself."""
    return x


class Tile:
    """Functions on tiles of one size and dtype; every thread of the block calls them together."""

    def __init__(self, config: Config, dtype: str) -> None:
        self.size, self.per_thread, self.side = config.tile, config.per_thread, config.side
        self.pitch = config.tile + 1  # of rows in shared memory
        self.real = np.float64 if dtype == "float64" else np.float32
        self.value = {"bfloat16": from_bfloat16, "float64": unchanged}.get(dtype, to_float32)
        self.element = to_bfloat16 if dtype == "bfloat16" else unchanged
        self.locate, self.load, self.store = self._locate(), self._load(), self._store()
        self.accumulate, self.product = self._accumulate(), self._product()

    def _locate(self):
        T = self.size

        @cuda.jit(device=True)
        def locate(x):
            """Batch entry, head and first row of this block's tile of x (batch, head, row, ...)."""
            tiles = (x.shape[2] + T - 1) // T
            head = cuda.blockIdx.x // tiles
            return head // x.shape[1], head % x.shape[1], cuda.blockIdx.x % tiles * T

        return locate

    def _load(self):
        T, N, real, value = self.size, self.side, self.real, self.value

        @cuda.jit(device=True)
        def load(tile, x, row0, column0):
            """tile = x[row0 : row0 + T, column0 : column0 + T], zero beyond the ends of x."""
            for i in range(cuda.threadIdx.y, T, N):
                for j in range(cuda.threadIdx.x, T, N):
                    tile[i, j] = real(0)
                    if row0 + i < x.shape[0] and column0 + j < x.shape[1]:
                        tile[i, j] = value(x[row0 + i, column0 + j])

        return load

    def _store(self):
        R, N, element = self.per_thread, self.side, self.element

        @cuda.jit(device=True)
        def store(x, row0, column0, part, factor):
            """x[row0 : row0 + T, column0 : column0 + T] = factor * tile, each thread its part."""
            for i in range(R):
                row = row0 + cuda.threadIdx.y + i * N
                for j in range(R):
                    column = column0 + cuda.threadIdx.x + j * N
                    if row < x.shape[0] and column < x.shape[1]:
                        x[row, column] = element(part[i, j] * factor)

        return store

    def _accumulate(self):
        T, R, N, real = self.size, self.per_thread, self.side, self.real

        @cuda.jit(device=True)
        def accumulate(total, a, b):
            """total += a b. The sum over T is kept apart, in registers: `total` may be too wide."""
            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            part = cuda.local.array((R, R), real)
            for i in range(R):
                for j in range(R):
                    part[i, j] = real(0)
            for n in range(T):
                for i in range(R):
                    for j in range(R):
                        part[i, j] += a[y + i * N, n] * b[n, x + j * N]
            for i in range(R):
                for j in range(R):
                    total[i, j] += part[i, j]

        return accumulate

    def _product(self):
        T, R, N, real, load = self.size, self.per_thread, self.side, self.real, self.load

        @cuda.jit(device=True)
        def product(s, a, b, left, i0, right, j0, slices):
            """s = left[i0 : i0 + T] right[j0 : j0 + T]^T, T columns at a time through a and b.

            Sums over T are added up: of 1,024 columns one chain of additions would be less exact.
            """
            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            part = cuda.local.array((R, R), real)
            for i in range(R):
                for j in range(R):
                    s[i, j] = real(0)
            for c in range(slices):
                load(a, left, i0, c * T)
                load(b, right, j0, c * T)
                cuda.syncthreads()
                for i in range(R):
                    for j in range(R):
                        part[i, j] = real(0)
                for n in range(T):
                    for i in range(R):
                        for j in range(R):
                            part[i, j] += a[y + i * N, n] * b[x + j * N, n]
                for i in range(R):
                    for j in range(R):
                        s[i, j] += part[i, j]
                cuda.syncthreads()

        return product


# --- Launching. ---


def _scalars(problem: Problem, band: tuple[int, int]) -> tuple[Any, ...]:
    real = np.dtype(problem.compute).type
    return real(problem.scale), real(problem.softcap or 0), *band


def _launch(name: str, problem: Problem, config: Config, blocks: int, operands, scalars) -> None:
    if not blocks:
        return
    d_slices, dv_slices = (math.ceil(width / config.tile) for width in (problem.d, problem.dv))
    ranks = tuple(x.ndim for x in operands)
    compiled = (name, config, problem.dtype, d_slices, dv_slices, ranks, len(scalars))
    threads = (config.side, config.side)
    if SIMULATED:
        # Wrapped by hand: the simulator would copy each array in and out, and refuse strided ones.
        bits = (x.view(np.uint16) if x.dtype.name == "bfloat16" else x for x in operands)
        _compiled(*compiled)[blocks, threads](*map(FakeCUDAArray, bits), *scalars)
        return
    import cupy

    device = operands[0].data.device_id
    stream = _stream(device, cupy.cuda.get_current_stream(device).ptr)
    wrapped = [
        _wrapped(device, x.data.ptr, x.shape, x.strides, arrays.dtype_name(x.dtype))
        for x in operands
    ]
    with cuda.gpus[device]:
        _configured(compiled, blocks, threads, stream)(*wrapped, *scalars)


@functools.lru_cache(4096)
def _configured(compiled: tuple, blocks: int, threads: tuple, stream: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Grid size 3 will ...": a small problem is no mistake
        return _compiled(*compiled)[blocks, threads, stream]


@functools.lru_cache(4096)
def _wrapped(device: int, pointer: int, shape: tuple, strides: tuple, dtype: str) -> Any:
    """Memory as Numba sees it, kept because wrapping an array costs more than a launch.

    It owns nothing: the CuPy array does, for as long as the call lasts.
    """
    # bfloat16 goes as its bits: the interface has no name for it.
    typestr = np.dtype("uint16" if dtype == "bfloat16" else dtype).str
    data = (pointer, False)
    interface = {"shape": shape, "strides": strides, "typestr": typestr, "data": data, "version": 3}
    with cuda.gpus[device]:
        return cuda.as_cuda_array(SimpleNamespace(__cuda_array_interface__=interface), sync=False)


@functools.cache
def _stream(device: int, pointer: int) -> Any:
    with cuda.gpus[device]:
        return cuda.external_stream(pointer) if pointer else cuda.default_stream()


@functools.cache
def _compiled(
    name: str, config: Config, dtype: str, d_slices: int, dv_slices: int, ranks: tuple, scalars: int
) -> Any:
    """One kernel for all lengths, options and strides ("A": known at run time)."""
    function = _KERNELS[name](Tile(config, dtype), d_slices, dv_slices)
    real = types.float64 if dtype == "float64" else types.float32
    data = {"bfloat16": types.uint16, "float16": types.float16}.get(dtype, real)
    signature = [types.Array(data if rank == 4 else real, rank, "A") for rank in ranks]
    signature += [real, real, types.int64, types.int64][:scalars]
    return cuda.jit(tuple(signature))(function)
