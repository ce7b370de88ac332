"""The definition of "right": attention by its formula, S x S matrix and all, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .api import AttentionGrads, canonical
from .problem import DTYPES, k_bounds


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    dtype: str = "float64",
) -> Any:
    """Attention by its formula, holding the whole S x S matrix.

    Parameters
    ----------
    q, k, v, scale, causal, window, softcap, return_lse
        As in `flash_attention`.
    dtype : {"float64", "longdouble", "float32", "float16", "bfloat16"}, optional
        The arithmetic. float64 is the definition ("longdouble", NumPy only, for float64 inputs);
        the others are the plain computation that the tests' error bounds compare with. In the
        16-bit dtypes products accumulate in float32, and probabilities and results are rounded,
        as a kernel on matrix units does.

    Returns
    -------
    out : array, shape (..., H, Sq, Dv)
        In the dtype of the arithmetic: `dtype`, or float32 for the 16-bit ones.
    lse : array, shape (..., H, Sq)
        Only with `return_lse`.

    Examples
    --------
    >>> import numpy as np
    >>> out, lse = attention_reference(np.zeros((2, 3)), np.zeros((7, 3)), np.ones((7, 1)),
    ...                                return_lse=True)
    >>> out.ravel(), bool(np.allclose(lse, np.log(7)))
    (array([1., 1.]), True)
    """
    f = _Formula(q, k, v, (scale, causal, window, softcap), dtype)
    out = f.rounded(f.rounded(f.p) @ f.v).reshape(*f.rows, f.problem.dv)
    return (out, f.lse.reshape(f.rows)) if return_lse else out


def attention_reference_grad(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    dlse: Any = None,
    dtype: str = "float64",
) -> AttentionGrads:
    """Gradients by the formula, holding the whole S x S matrix.

    Parameters
    ----------
    dout, q, k, v, scale, causal, window, softcap, dlse
        As in `flash_attention_grad`.
    dtype : {"float64", "longdouble", "float32", "float16", "bfloat16"}, optional
        As in `attention_reference`.

    Returns
    -------
    AttentionGrads
        (dq, dk, dv) in the dtype of the arithmetic.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> grads = attention_reference_grad(np.ones((5, 4)), q, k, v)
    >>> grads.dv.sum(0).round(6)  # each of the 5 rows of P sums to 1
    array([5., 5., 5., 5.])
    """
    f = _Formula(q, k, v, (scale, causal, window, softcap), dtype)
    dout = arrays.on_axes(4, arrays.as_array("dout", dout)).astype(f.compute)
    p = f.rounded(f.p)
    delta = (dout * f.rounded(p @ f.v)).sum(-1)
    if dlse is not None:
        delta -= arrays.on_axes(3, dlse)
    ds = f.p * (dout @ f.v.swapaxes(-1, -2) - delta[..., None]) * f.slope
    ds = f.rounded(ds)
    dq = f.problem.scale * ds @ f.k
    dk = f.summed(f.problem.scale * ds.swapaxes(-1, -2) @ f.q)
    dv = f.summed(p.swapaxes(-1, -2) @ dout)
    shapes = (np.shape(x) for x in (q, k, v))
    return AttentionGrads(
        *(f.rounded(g).reshape(shape) for g, shape in zip((dq, dk, dv), shapes, strict=True))
    )


class _Formula:
    """Scores, probabilities and lse of a problem; keys and values repeated for grouped heads."""

    def __init__(self, q, k, v, options, dtype):
        self.problem, *qkv = canonical(q, k, v, *options)
        problem, self.rows = self.problem, tuple(np.shape(q)[:-1])
        xp = arrays.module_of(qkv[0])
        if dtype not in (*DTYPES, "longdouble"):
            raise ValueError(f"dtype must be one of {DTYPES} or 'longdouble', got {dtype!r}")
        self.dtype, self.compute = dtype, "float32" if dtype in ("float16", "bfloat16") else dtype
        self.q, self.k, self.v = (x.astype(self.compute) for x in qkv)
        if problem.heads != problem.heads_kv:
            self.k, self.v = (xp.repeat(x, problem.group, axis=1) for x in (self.k, self.v))
        s = (self.q @ self.k.swapaxes(-1, -2)) * xp.asarray(problem.scale, self.compute)
        self.slope = 1
        if problem.softcap is not None:
            t = xp.tanh(s / problem.softcap)
            s, self.slope = problem.softcap * t, 1 - t * t
        lo, hi = k_bounds(xp.arange(problem.sq)[:, None], problem.sk, *problem.band)
        key = xp.arange(problem.sk)
        s = xp.where((lo <= key) & (key < hi), s, -xp.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            top = s.max(-1, keepdims=True) if problem.sk else xp.zeros((*s.shape[:-1], 1), s.dtype)
            top = xp.where(xp.isneginf(top), 0, top)  # a row that sees no key: exp(-inf - 0) = 0
            p = xp.exp(s - top)
            total = p.sum(-1, keepdims=True)
            self.p = p / xp.where(total == 0, 1, total)
            self.lse = (top + xp.log(total))[..., 0]

    def rounded(self, x):
        """`x` as stored in a 16-bit matrix, where the dtype is one; as it is otherwise."""
        return x if self.dtype == self.compute else x.astype(self.dtype).astype(self.compute)

    def summed(self, x):
        """Gradients of repeated keys or values, summed over each group of query heads."""
        p = self.problem
        if p.heads == p.heads_kv:
            return x
        return x.reshape(p.batch, p.heads_kv, p.group, *x.shape[2:]).sum(2)
