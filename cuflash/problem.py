"""What is asked of a kernel: sizes, dtype, scale, mask and score options, checked once.

A mask here is never an array: causal, window and their anchors all say "query q sees the keys
[lo, hi)", two integers that grow with q. `k_bounds` is that rule, and the only copy of it in
Python: the reference and the NumPy tiles call it with arrays, the Numba kernels compile it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
PRECISIONS = ("float32", "ieee", "tf32")


def k_bounds(q, sk, lo_shift, hi_shift):
    """Keys [lo, hi) that query `q` sees; none where hi <= lo.

    Works on ints, on integer arrays and inside a Numba kernel, hence the products by a
    comparison where one would write max(lo, 0) and min(hi, sk).
    The queries that see key `k` follow by symmetry: ``k_bounds(k, sq, *transposed(band))``.
    """
    lo = q + lo_shift
    hi = q + hi_shift
    return lo * (lo > 0), hi - (hi - sk) * (hi > sk)


def transposed(band: tuple[int, int]) -> tuple[int, int]:
    """The band seen from the keys: q + lo <= k < q + hi  <=>  k + 1 - hi <= q < k + 1 - lo."""
    return 1 - band[1], 1 - band[0]


def blocks(q0: int, q1: int, sk: int, block_k: int, band: tuple[int, int]):
    """Yield (k0, k1, whole) for the key blocks that queries [q0, q1) see anything of.

    `whole` says that every one of these queries sees every one of these keys: no mask needed.
    """
    first_lo, first_hi = k_bounds(q0, sk, *band)
    last_lo, last_hi = k_bounds(q1 - 1, sk, *band)
    for k0 in range(first_lo // block_k * block_k, last_hi, block_k):
        k1 = min(k0 + block_k, sk)
        yield k0, k1, last_lo <= k0 and k1 <= first_hi


@dataclass(frozen=True)
class Problem:
    """Everything that the choice of a kernel may depend on; hashable.

    Sizes are those of the canonical four axes: q (batch, heads, sq, d), k (batch, heads_kv, sk, d),
    v (batch, heads_kv, sk, dv). `left` and `right` count the keys seen besides the diagonal one on
    each side, None for all; the diagonal joins the last query to the last key (`bottom_right`) or
    the first to the first.
    """

    device: str  # "cpu" or "cuda"
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    sq: int
    sk: int
    d: int
    dv: int
    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = True
    softcap: float | None = None
    precision: str = "float32"  # of products of float32 numbers: one of PRECISIONS

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Computed once: a problem is the key of several caches on the way of every call.
        return hash(tuple(vars(self).values()))

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @property
    def compute(self) -> str:
        """The dtype of scores, sums and lse: float32 at least."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def band(self) -> tuple[int, int]:
        """(lo_shift, hi_shift) of `k_bounds`, kept within the lengths so that 32 bits hold them."""
        offset = self.sk - self.sq if self.bottom_right else 0
        lo = -self.sq if self.left is None else max(offset - self.left, -self.sq)
        hi = self.sk if self.right is None else min(offset + self.right + 1, self.sk)
        return lo, hi

    def pairs(self) -> int:
        """(query, key) pairs that see each other, over all batch entries and heads."""
        lo, hi = k_bounds(np.arange(self.sq), self.sk, *self.band)
        return int(np.maximum(hi - lo, 0).sum()) * self.batch * self.heads

    def flops(self, backward: bool = False) -> int:
        """Multiplications and additions of the matrix products: two forward, five backward."""
        return 2 * self.pairs() * (3 * self.d + 2 * self.dv if backward else self.d + self.dv)

    def nbytes(self, backward: bool = False) -> int:
        """Fewest bytes through device memory: each input read once, each output written once."""
        rows = self.batch * self.heads * self.sq
        q, out = rows * self.d, rows * self.dv
        kv = self.batch * self.heads_kv * self.sk * (self.d + self.dv)
        lse = rows * np.dtype(self.compute).itemsize
        return (2 * q + 2 * out + 2 * kv if backward else q + out + kv) * self.itemsize + lse


def make_problem(
    device, dtype, q, k, v, scale, causal, window, softcap, precision="float32"
) -> Problem:
    """Check shapes and options and build the Problem; `q`, `k`, `v` are shapes of any rank >= 2."""
    if not len(q) == len(k) == len(v):
        raise ValueError(f"q, k and v must have the same number of axes, got shapes {q}, {k}, {v}")
    if len(q) < 2:
        raise ValueError(f"q must be (..., heads, Sq, D) with at least 2 axes, got shape {q}")
    for name, shape in (("k", k), ("v", v)):
        if shape[:-3] != q[:-3]:
            raise ValueError(
                f"leading axes of {name} {shape[:-3]} must equal those of q {q[:-3]} "
                f"(shapes {shape} and {q}); np.broadcast_to makes them so without a copy"
            )
    if k[:-1] != v[:-1]:
        raise ValueError(f"k and v must agree in all but the last axis, got shapes {k} and {v}")
    if q[-1] != k[-1]:
        raise ValueError(f"q and k must have the same width D, got {q[-1]} and {k[-1]}")
    if q[-1] < 1 or v[-1] < 1:
        raise ValueError(f"widths D and Dv must be at least 1, got {q[-1]} and {v[-1]}")
    heads, heads_kv = (q[-3], k[-3]) if len(q) > 2 else (1, 1)
    if heads and (not heads_kv or heads % heads_kv):
        raise ValueError(f"q's {heads} heads must be a multiple of k's {heads_kv} heads")
    if not (isinstance(causal, (bool, np.bool_)) or causal == "top_left"):
        raise ValueError(f"causal must be True, False or 'top_left', got {causal!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    left, right = window_sides(window)
    return Problem(
        device=device,
        dtype=dtype,
        batch=math.prod(q[:-3]),
        heads=heads,
        heads_kv=heads_kv,
        sq=q[-2],
        sk=k[-2],
        d=q[-1],
        dv=v[-1],
        scale=1 / math.sqrt(q[-1]) if scale is None else _finite("scale", scale),
        left=left,
        right=0 if causal else right,  # causal and window both hold, and right is never below 0
        bottom_right=not isinstance(causal, str),
        softcap=None if softcap is None else _finite("softcap", softcap, positive=True),
        precision=precision,
    )


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """The keys seen to the left and right of the diagonal one, checked."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be None or a pair (left, right), got {window!r}")
    for side in window:
        if side is None:
            continue
        if not isinstance(side, Integral) or isinstance(side, bool):
            raise TypeError(f"window must hold whole numbers or None, got {window!r}")
        if side < 0:
            raise ValueError(f"window must not be negative, got {window!r}; None is unbounded")
    left, right = (None if side is None else int(side) for side in window)
    return left, right


def _finite(name: str, value: Any, positive: bool = False) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a real number or None, got {value!r}")
    if not math.isfinite(value) or (positive and value <= 0):
        wanted = "a positive finite number" if positive else "a finite number"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return float(value)
