"""Tiled attention on the CPU, in NumPy: FlashAttention-2's loops, and a window into them.

Forward: a task is one block of queries of one head. It stays in cache while blocks of keys and
values stream past (`_forward_block`). Backward: a task is a share of the key blocks of one
key/value head; each stays while the blocks of queries stream past (`_backward_share`).
Tasks run on threads: NumPy releases the GIL inside products and element-wise loops.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .problem import Problem, blocks, k_bounds, transposed

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # NumPy is the only thing we require
    _blas = None
else:
    _blas = functools.cache(ThreadpoolController)  # it searches the loaded libraries: once


@dataclass(frozen=True)
class Config:
    """Block sizes and threads. A score tile is block_q x block_k elements of the compute dtype."""

    block_q: int
    block_k: int
    threads: int


def default_config(problem: Problem) -> Config:
    # GFLOP/s forward and backward on 2 cores with 1 MB of L2 each, float32, S=4096, d=64: 149 and
    # 192; 512 x 512 gives 155 and 188 and half the tasks, 256 x 256 133 and 189: docs/kernels.md.
    if problem.flops() < 50_000_000:
        return Config(256, 512, 1)  # half a millisecond of work; starting threads takes 0.3
    return Config(256, 512, cores())


def cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def unsupported(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return "it takes NumPy arrays, and these are on a GPU; cupy.asnumpy copies them"
    return None


def forward(problem: Problem, config: Config, q, k, v, out, lse) -> None:
    """Write `out` and `lse`; all arrays on (batch, heads, length[, width]) axes."""

    def one_block(task: tuple[int, int, int]) -> None:
        b, h, q0 = task
        q1 = min(q0 + config.block_q, problem.sq)
        hkv = h // problem.group
        o, e = _forward_block(problem, config, q[b, h, q0:q1], k[b, hkv], v[b, hkv], q0)
        out[b, h, q0:q1], lse[b, h, q0:q1] = o, e

    # Under a causal mask the last block is the longest, so it goes first.
    starts = reversed(range(0, problem.sq, config.block_q))
    tasks = itertools.product(range(problem.batch), range(problem.heads), starts)
    _run(one_block, list(tasks), config.threads)


def _forward_block(problem: Problem, config: Config, q, k, v, q0: int):
    """Output and lse of the queries [q0, q0 + len(q)) of one head; k and v are whole."""
    state = _State.empty(len(q), problem.dv, problem.compute)
    q = _loaded(problem, q)
    for k0, k1, whole in blocks(q0, q0 + len(q), problem.sk, config.block_k, problem.band):
        s, _ = _scores(problem, q, _loaded(problem, k[k0:k1]))
        if not whole:
            _hide(problem, s, q0, k0)
        state.add(s, _loaded(problem, v[k0:k1]))
    return state.output(), state.lse()


class _State(NamedTuple):
    """Online softmax of a block of rows: maximum, sum of exponentials, unnormalised output."""

    m: np.ndarray
    l: np.ndarray
    o: np.ndarray

    @classmethod
    def empty(cls, rows: int, width: int, dtype: Any) -> _State:
        m, l = np.full(rows, -np.inf, dtype), np.zeros(rows, dtype)
        return cls(m, l, np.zeros((rows, width), dtype))

    def add(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Take in scores (overwritten by exponentials) and values; return the rescale factor."""
        m = np.maximum(self.m, s.max(-1))
        base = np.where(np.isneginf(m), 0, m)  # nothing visible yet: exp(-inf - 0) = 0, not NaN
        rescale = np.exp(self.m - base)
        s -= base[:, None]
        np.exp(s, out=s)
        self.l[:] = self.l * rescale + s.sum(-1)
        self.o[:] = self.o * rescale[:, None] + s @ v
        self.m[:] = m
        return rescale

    def output(self) -> np.ndarray:
        return self.o / np.where(self.l == 0, 1, self.l)[:, None]

    def lse(self) -> np.ndarray:
        return self.m + np.log(self.l)


def backward(
    problem: Problem, config: Config, deterministic: bool, dout, q, k, v, out, lse, dlse, dq, dk, dv
) -> None:
    """Write `dq`, `dk` and `dv`.

    A task walks every `shares`-th key block of one key/value head and returns its part of that
    head's dq; parts are added in a fixed order, so the result does not depend on timing.
    """
    shares = math.ceil(2 * config.threads / max(1, problem.batch * problem.heads_kv))
    shares = max(1, min(shares, math.ceil(problem.sk / config.block_k)))

    def heads(hkv: int) -> slice:
        return slice(hkv * problem.group, (hkv + 1) * problem.group)

    def one_share(task: tuple[int, int, int]) -> np.ndarray:
        b, hkv, share = task
        queries = [x[b, heads(hkv)] for x in (dout, q, out, lse)]
        queries.append(0 if dlse is None else dlse[b, heads(hkv)])
        keys = [x[b, hkv] for x in (k, v, dk, dv)]
        starts = range(share * config.block_k, problem.sk, shares * config.block_k)
        return _backward_share(problem, config, starts, *queries, *keys)

    tasks = itertools.product(range(problem.batch), range(problem.heads_kv), range(shares))
    parts = _run(one_share, list(tasks), config.threads)
    for b, hkv in itertools.product(range(problem.batch), range(problem.heads_kv)):
        first, *others = (next(parts) for _ in range(shares))
        dq[b, heads(hkv)] = sum(others, first)


def _backward_share(problem, config, starts, dout, q, out, lse, dlse, k, v, dk, dv) -> np.ndarray:
    """Gradients of the key blocks at `starts`; returns their part of dq, (group, sq, d).

    dout, q, out, lse, dlse hold the query heads that share this key/value head.
    """
    dtype = problem.compute
    dq = np.zeros(q.shape, dtype)
    delta = np.einsum("hij,hij->hi", dout, out, dtype=dtype) - dlse
    lse = np.where(np.isneginf(lse), np.inf, lse)  # a row that saw nothing: exp(s - inf) = 0
    for k0 in starts:
        k1 = min(k0 + config.block_k, problem.sk)
        kj, vj = _loaded(problem, k[k0:k1]), _loaded(problem, v[k0:k1])
        dkj, dvj = np.zeros(kj.shape, dtype), np.zeros(vj.shape, dtype)
        for q0, q1, whole in blocks(k0, k1, problem.sq, config.block_q, transposed(problem.band)):
            for g in range(len(q)):
                qi, doi = _loaded(problem, q[g, q0:q1]), _loaded(problem, dout[g, q0:q1])
                p, slope = _scores(problem, qi, kj)
                if not whole:
                    _hide(problem, p, q0, k0)
                p -= lse[g, q0:q1, None]
                np.exp(p, out=p)
                dvj += p.T @ doi
                ds = doi @ vj.T
                ds -= delta[g, q0:q1, None]
                ds *= p
                if slope is not None:
                    ds *= slope
                dkj += ds.T @ qi
                dq[g, q0:q1] += ds @ kj
        dk[k0:k1], dv[k0:k1] = problem.scale * dkj, dvj
    dq *= problem.scale
    return dq


def _loaded(problem: Problem, x: np.ndarray) -> np.ndarray:
    """A block as the products want it: in the compute dtype, contiguous."""
    return np.ascontiguousarray(x, dtype=problem.compute)


def _scores(problem: Problem, q: np.ndarray, k: np.ndarray):
    """Scores of a tile and, with a softcap, their slope 1 - tanh^2."""
    s = q @ k.T
    s *= problem.scale  # folded into q it is quicker, but doubled the error for logits near 50
    if problem.softcap is None:
        return s, None
    s /= problem.softcap
    np.tanh(s, out=s)
    slope = 1 - s * s
    s *= problem.softcap
    return s, slope


def _hide(problem: Problem, s: np.ndarray, q0: int, k0: int) -> None:
    """Put -inf where a query of the tile does not see a key."""
    lo, hi = k_bounds(np.arange(q0, q0 + s.shape[0])[:, None], problem.sk, *problem.band)
    key = np.arange(k0, k0 + s.shape[1])
    np.copyto(s, -np.inf, where=(key < lo) | (key >= hi))


def _run(work: Callable[[Any], Any], tasks: list, threads: int) -> Iterator[Any]:
    """`work` on every task, over threads; then the results in the order of the tasks."""

    def quiet(task):
        # Non-finite data is data: inf - inf is NaN without a warning.
        with np.errstate(all="ignore"):
            return work(task)

    with _ONE_CALL_AT_A_TIME, _one_blas_thread():
        if min(threads, len(tasks)) <= 1:
            return iter([quiet(task) for task in tasks])
        with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
            return iter(list(pool.map(quiet, tasks)))


#: A call takes every core, so two at once gain nothing; and the limit below is the process's.
_ONE_CALL_AT_A_TIME = threading.Lock()


def _one_blas_thread() -> contextlib.AbstractContextManager[Any]:
    """Keep BLAS to one thread, ours being threads already: speed, and the same bits each time.

    Without threadpoolctl nothing is limited, and both depend on the BLAS.
    """
    return _blas().limit(limits=1, user_api="blas") if _blas else contextlib.nullcontext()


class Step(NamedTuple):
    """One visit of a tile, as `trace` shows it; slices into queries and keys, arrays by row."""

    queries: slice
    keys: slice
    m: np.ndarray
    l: np.ndarray
    o: np.ndarray
    rescale: np.ndarray
    moved: int


def trace(
    q: Any,
    k: Any,
    v: Any,
    block_q: int,
    block_k: int,
    schedule: str = "q-resident",
    scale: float | None = None,
) -> Iterator[Step]:
    """Watch the forward pass of one head, tile by tile.

    Parameters
    ----------
    q, k, v : arrays, shapes (Sq, D), (Sk, D), (Sk, Dv)
        One head.
    block_q, block_k : int
        Rows of a query block and of a key block.
    schedule : {"q-resident", "kv-resident"}, optional
        "q-resident" is FlashAttention-2's timetable: a query block stays on chip while keys and
        values stream past. "kv-resident" is FlashAttention-1's: a key/value block stays, and each
        visit of a query block moves Q in, O in and O out.
    scale : float, optional
        1/sqrt(D) by default.

    Yields
    ------
    Step
        ``queries`` and ``keys`` (slices) of the tile; the state after it: row maximum ``m``, sum
        of exponentials ``l``, unnormalised output ``o`` (so far, out = o / l); ``rescale``, the
        factor exp(m_before - m_after) that older contributions were multiplied by; ``moved``,
        the elements of Q, K, V and O moved between memory and chip so far (the two numbers a row
        that kv-resident also carries are left out, as in the papers' counts).

    Raises
    ------
    ValueError, TypeError
        As `flash_attention`; also for more than one head, block sizes below 1 or an unknown
        schedule.

    Notes
    -----
    Dao et al. 2022 (arXiv:2205.14135), algorithm 1, and Dao 2023 (arXiv:2307.08691), algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> k = np.array([[101.], [100.], [102.]])
    >>> v = np.array([[1., 0.], [0., 1.], [1., 1.]])
    >>> for step in trace([[1.]], k, v, 1, 1, scale=1):
    ...     print(step.m, step.l.round(4), step.rescale.round(4), step.moved)
    [101.] [1.] [0.] 4
    [101.] [1.3679] [1.] 7
    [102.] [1.5032] [0.3679] 12
    """
    from .api import canonical

    problem, q4, k4, v4 = canonical(q, k, v, scale, False, None, None)
    if np.ndim(q) != 2 or problem.device != "cpu":
        raise ValueError(f"q must be one head in NumPy, (Sq, D), got shape {np.shape(q)}")
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if schedule not in ("q-resident", "kv-resident"):
        raise ValueError(f"schedule must be 'q-resident' or 'kv-resident', got {schedule!r}")
    return _steps(problem, q4[0, 0], k4[0, 0], v4[0, 0], block_q, block_k, schedule)


def _steps(problem: Problem, q, k, v, block_q: int, block_k: int, schedule: str) -> Iterator[Step]:
    q_blocks = [slice(i, min(i + block_q, problem.sq)) for i in range(0, problem.sq, block_q)]
    k_blocks = [slice(j, min(j + block_k, problem.sk)) for j in range(0, problem.sk, block_k)]
    q_resident = schedule == "q-resident"
    visits: Iterable[tuple[slice, slice]] = (
        ((i, j) for i in q_blocks for j in k_blocks)
        if q_resident
        else ((i, j) for j in k_blocks for i in q_blocks)
    )
    states = [_State.empty(i.stop - i.start, problem.dv, problem.compute) for i in q_blocks]
    moved = 0
    for i, j in visits:
        q_size, o_size = q[i].size, len(q[i]) * problem.dv
        kv_size = k[j].size + v[j].size
        if q_resident:
            first, last = j is k_blocks[0], j is k_blocks[-1]
            moved += q_size * first + kv_size + o_size * last
        else:
            moved += kv_size * (i is q_blocks[0]) + q_size + 2 * o_size
        state = states[i.start // block_q]
        with np.errstate(all="ignore"):
            s, _ = _scores(problem, _loaded(problem, q[i]), _loaded(problem, k[j]))
            rescale = state.add(s, _loaded(problem, v[j]))
        yield Step(i, j, state.m.copy(), state.l.copy(), state.o.copy(), rescale, moved)
