"""The public functions: check, bring to four axes, allocate, hand to a backend."""

from __future__ import annotations

import contextlib
import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .problem import Problem, make_problem

#: The first that supports the problem is taken: fastest first on either device.
BACKENDS = ("numpy", "cuda", "numba")


class AttentionGrads(NamedTuple):
    """Gradients of a scalar loss, each with the shape and dtype of its input."""

    dq: Any
    dk: Any
    dv: Any


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Any:
    """Exact softmax(scale * q k^T) v, tiled: no array of size Sq x Sk is ever made.

    Parameters
    ----------
    q : array, shape (..., H, Sq, D)
        Queries: float16, bfloat16, float32 or float64. 2-D (Sq, D) and 3-D (H, Sq, D) work too.
        Any strides: (B, S, H, D) memory is passed as ``q.swapaxes(1, 2)``.
    k : array, shape (..., Hkv, Sk, D)
        Keys. H must be a multiple of Hkv; query head h reads head ``h // (H // Hkv)``.
    v : array, shape (..., Hkv, Sk, Dv)
        Values. Dv may differ from D.
    scale : float, optional
        Factor on the scores, 1/sqrt(D) by default.
    causal : bool or "top_left", optional
        True: query i sees key j iff ``j <= i + Sk - Sq`` (the last query sees every key);
        "top_left": iff ``j <= i``.
    window : (int or None, int or None), optional
        Keys seen to the left and right *besides* the diagonal one; None is unbounded.
        "The last W tokens" is ``(W - 1, 0)``. Holds together with `causal`, and has its anchor.
    softcap : float, optional
        Scores become ``softcap * tanh(scale * q k^T / softcap)``, before any mask.
    return_lse : bool, optional
        Also return the log-sum-exp of each row.
    out : array, shape (..., H, Sq, Dv), optional
        Where to put the result; it may be one of the inputs or share memory with them.
    backend : {"numpy", "cuda", "numba"}, optional
        By default the fastest one that supports the problem.
    config : optional
        A tile configuration of the chosen backend (its ``Config``), for measurements.

    Returns
    -------
    out : array, shape (..., H, Sq, Dv)
        In q's dtype, on q's device, with q's order of axes in memory. NumPy in, NumPy out; CuPy in,
        CuPy out, computed on the current stream; other libraries' device arrays give CuPy.
    lse : array, shape (..., H, Sq)
        Only with `return_lse`: natural logarithm of the sum of exponentials of a row's visible
        scores, float32 (float64 for float64 input).

    Raises
    ------
    TypeError, ValueError
        For an argument that cannot be meant, before anything is computed.
    NotImplementedError
        When no backend supports the problem; says why each refused.

    Notes
    -----
    A query that sees no key gives 0, with lse -inf. Non-finite numbers are data: a NaN in a query
    or a visible key gives NaN in the rows concerned. A mask hides scores; it does not shield from
    a non-finite *value* at a hidden key, which may turn rows of the same tile into NaN.

    The algorithm is FlashAttention-2's forward pass (Dao 2023, arXiv:2307.08691, algorithm 1).

    Examples
    --------
    >>> import numpy as np
    >>> q = np.array([[1., 0.], [0., 2.], [1., 1.]])
    >>> k = np.array([[1., 1.], [0., 1.], [2., 0.]])
    >>> v = np.array([[1., 0.], [0., 1.], [1., 1.]])
    >>> flash_attention(q, k, v, scale=1).round(3)
    array([[0.91 , 0.755],
           [0.532, 0.532],
           [0.845, 0.578]])
    """
    problem, q4, k4, v4 = canonical(q, k, v, scale, causal, window, softcap)
    shape = _shape(q)
    if out is not None:
        out = _writeable(out, (*shape[:-1], problem.dv), q4)
    with _on_device(q4):
        run, config = _choose(problem, backend, config, arrays.device_of(q4))
        out4: Any = None if out is None else _target(out, q4, k4, v4)
        aside = out4 is None  # new memory, to copy from where out cannot take the result
        if aside:
            out4 = arrays.empty_in_order(q4, (*q4.shape[:-1], problem.dv))
        lse3 = arrays.module_of(q4).empty(q4.shape[:-1], problem.compute)
        run.forward(problem, config, q4, k4, v4, out4, lse3)
        if out is None:
            out = arrays.shaped(out4, (*shape[:-1], problem.dv))
        elif aside:
            out[...] = arrays.shaped(out4, out.shape)
    return (out, arrays.shaped(lse3, shape[:-1])) if return_lse else out


def flash_attention_grad(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    dlse: Any = None,
    deterministic: bool = False,
    backend: str | None = None,
    config: Any = None,
) -> AttentionGrads:
    """Gradients of `flash_attention`, recomputing the probabilities from `lse` tile by tile.

    Parameters
    ----------
    dout : array, shape (..., H, Sq, Dv)
        Gradient of the loss with respect to `out`; any strides, also broadcast.
    q, k, v : array
        As given to `flash_attention`, with the same options.
    out, lse : array, shapes (..., H, Sq, Dv) and (..., H, Sq)
        What `flash_attention` returned with ``return_lse=True``.
    scale, causal, window, softcap, backend, config : optional
        As in `flash_attention`; they must be the ones that `out` was computed with.
    dlse : array, shape (..., H, Sq), optional
        Gradient of the loss with respect to `lse`, in its dtype.
    deterministic : bool, optional
        Ask for bitwise repeatable gradients. All backends always give them.

    Returns
    -------
    AttentionGrads
        (dq, dk, dv), each like its input. Grouped heads are summed before rounding to the dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attention`.

    Notes
    -----
    With P = exp(S - lse), delta = rowsum(dout * out) - dlse and dS = P * (dout v^T - delta):
    dv = P^T dout, dq = scale * dS k, dk = scale * dS^T q (Dao 2023, arXiv:2307.08691,
    algorithm 2). A query that sees no key has gradient 0.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> out, lse = flash_attention(q, k, v, return_lse=True)
    >>> grads = flash_attention_grad(np.ones_like(out), q, k, v, out, lse)
    >>> bool(np.allclose(grads.dv.sum(0), 5))  # each of 5 rows of P sums to 1
    True
    """
    problem, q4, k4, v4 = canonical(q, k, v, scale, causal, window, softcap)
    rows = _shape(q)[:-1]
    dout = _companion("dout", dout, (*rows, problem.dv), problem.dtype, q4)
    out = _companion("out", out, (*rows, problem.dv), problem.dtype, q4)
    lse = _companion("lse", lse, rows, problem.compute, q4)
    if dlse is not None:
        dlse = arrays.three_axes(_companion("dlse", dlse, rows, problem.compute, q4))
    with _on_device(q4):
        dout4, out4, lse3 = arrays.four_axes(dout), arrays.four_axes(out), arrays.three_axes(lse)
        run, config = _choose(problem, backend, config, arrays.device_of(q4))
        grads = [arrays.empty_in_order(x, x.shape) for x in (q4, k4, v4)]
        run.backward(problem, config, dout4, q4, k4, v4, out4, lse3, dlse, *grads)
    return AttentionGrads(
        *(arrays.shaped(g, _shape(x)) for g, x in zip(grads, (q, k, v), strict=True))
    )


def warmup(
    dtype: str,
    d: int,
    dv: int | None = None,
    *,
    softcap: float | None = None,
    backward: bool = True,
    backend: str | None = None,
) -> None:
    """Compile ahead what calls with CuPy arrays of this dtype and width will need.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of the arrays to come.
    d, dv : int
        Widths of queries and keys, and of values (`d` by default).
    softcap : float, optional
        Whether a softcap will be used: any value compiles the same kernel.
    backward : bool, optional
        Whether to compile the backward pass too.
    backend : str, optional
        As in `flash_attention`.

    Raises
    ------
    ImportError
        Without CuPy.
    TypeError, ValueError, NotImplementedError
        As `flash_attention`.

    Notes
    -----
    Lengths, batch, heads, masks and a positive scale do not matter: a kernel serves all of them.
    """
    import cupy

    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  NumPy knows the name from here on
    q, k, v = (cupy.zeros((1, 1, 1, w), dtype) for w in (d, d, dv or d))
    out, lse = flash_attention(q, k, v, softcap=softcap, return_lse=True, backend=backend)
    if backward:
        flash_attention_grad(out, q, k, v, out, lse, softcap=softcap, backend=backend)


def merge_attention(outs: Any, lses: Any) -> tuple[Any, Any]:
    """Join attention over disjoint sets of keys into attention over all of them, exactly.

    Parameters
    ----------
    outs : sequence of arrays, each (..., Sq, Dv)
        Results of `flash_attention` for the same queries over different keys.
    lses : sequence of arrays, each (..., Sq)
        Their log-sum-exps.

    Returns
    -------
    out, lse : arrays
        As one call over all the keys would give them. A row that no part sees gives 0 and -inf.

    Raises
    ------
    TypeError, ValueError
        When there are no parts, or they differ in number, shape, dtype or device.

    Notes
    -----
    With lse = log(sum_i exp(lse_i)): out = sum_i exp(lse_i - lse) out_i. It is associative, so
    parts may be merged in any grouping (ring and chunked attention).

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> parts = [flash_attention(q, k[s], v[s], return_lse=True) for s in (np.s_[:2], np.s_[2:])]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(np.allclose(out, flash_attention(q, k, v)))
    True
    """
    outs = [arrays.as_array(f"outs[{i}]", x) for i, x in enumerate(outs)]
    lses = [arrays.as_array(f"lses[{i}]", x) for i, x in enumerate(lses)]
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must pair up, got {len(outs)} and {len(lses)}")
    named_outs = {f"outs[{i}]": x for i, x in enumerate(outs)}
    named_lses = {f"lses[{i}]": x for i, x in enumerate(lses)}
    arrays.same_dtype(**named_outs)
    arrays.same_dtype(**named_lses)
    arrays.same_device(**named_outs, **named_lses)
    shape = outs[0].shape
    for i, (o, e) in enumerate(zip(outs, lses, strict=True)):
        if o.shape != shape or e.shape != shape[:-1]:
            raise ValueError(f"part {i} has out {o.shape} and lse {e.shape}, but outs[0] {shape}")
    xp = arrays.module_of(outs[0])
    with _on_device(outs[0]), np.errstate(divide="ignore"):
        top = lses[0]
        for e in lses[1:]:
            top = xp.maximum(top, e)
        top = xp.where(xp.isneginf(top), 0, top)  # such rows: exp(-inf - 0) = 0, and no NaN
        weights = [xp.exp(e - top) for e in lses]
        total = sum(weights[1:], weights[0])
        shares = [w / xp.where(total == 0, 1, total) for w in weights]
        out = sum(w[..., None] * o.astype(w.dtype) for w, o in zip(shares, outs, strict=True))
        return out.astype(outs[0].dtype), top + xp.log(total)


def canonical(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, softcap: Any
) -> tuple[Problem, Any, Any, Any]:
    """The Problem, and q, k, v as arrays of four axes."""
    q, k, v = arrays.as_array("q", q), arrays.as_array("k", k), arrays.as_array("v", v)
    device = arrays.device_of(q)
    if not device == arrays.device_of(k) == arrays.device_of(v):
        arrays.same_device(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        arrays.same_dtype(q=q, k=k, v=v)
    what = (device.partition(":")[0], arrays.dtype_name(q.dtype), q.shape, k.shape, v.shape)
    try:
        # A window's own types are not told apart by the cache: (True, 0) would pass for (1, 0).
        make = _cached_problem if window is None else make_problem
        problem = make(*what, scale, causal, window, softcap)
    except TypeError:  # an option that cannot be hashed, or is wrong
        problem = make_problem(*what, scale, causal, window, softcap)
    return problem, arrays.four_axes(q), arrays.four_axes(k), arrays.four_axes(v)


_cached_problem = functools.lru_cache(4096, typed=True)(make_problem)


def load_backend(name: str) -> ModuleType | str:
    """The backend's module, or why it cannot be imported."""
    try:
        return importlib.import_module(f"cuflash.{name}_backend")
    except ImportError as error:
        return f"{error}; pip install 'cuflash[{name}]'"


def refusal(name: str, problem: Problem) -> str | None:
    """Why the backend cannot do the problem, or None."""
    module = load_backend(name)
    return module if isinstance(module, str) else module.unsupported(problem)


@functools.lru_cache(4096)
def _choose(problem: Problem, backend: str | None, config: Any, device: str) -> tuple[Any, Any]:
    """The backend's module and the tile configuration, for the current device (`device`)."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {BACKENDS}, got {backend!r}")
    refused = {}
    for name in BACKENDS if backend is None else (backend,):
        reason = refusal(name, problem)
        if reason is not None:
            refused[name] = reason
            continue
        module: Any = load_backend(name)
        if config is not None and not isinstance(config, module.Config):
            raise TypeError(f"config must be a {module.__name__}.Config, got {config!r}")
        return module, config or module.default_config(problem)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise NotImplementedError(f"no backend takes this problem ({reasons}): {problem}")


def _on_device(x: Any) -> contextlib.AbstractContextManager[Any]:
    xp = arrays.module_of(x)
    if xp is np or xp.cuda.runtime.getDevice() == x.data.device_id:
        return contextlib.nullcontext()
    return x.device


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)  # a list has none


def _companion(name: str, x: Any, shape: tuple[int, ...], dtype: str, q: Any) -> Any:
    """An argument that goes with q: on its device, of this shape and dtype."""
    x = arrays.as_array(name, x)
    arrays.same_device(q=q, **{name: x})
    if x.shape != shape or arrays.dtype_name(x.dtype) != dtype:
        raise ValueError(
            f"{name} must have shape {shape} and dtype {dtype}, got {x.shape} and {x.dtype.name}"
        )
    return x


def _writeable(out: Any, shape: tuple[int, ...], q: Any) -> Any:
    if not hasattr(out, "shape"):
        raise TypeError(f"out must be an array, got {type(out)}")
    out = _companion("out", out, shape, q.dtype.name, q)
    if arrays.overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.strides}")
    if not getattr(out.flags, "writeable", True):  # CuPy has no read-only arrays
        raise ValueError("out must be writeable, got a read-only array")
    return out


def _target(out: Any, *inputs: Any) -> Any:
    """`out` on four axes where the result can be written while the inputs are read, or None."""
    out4 = arrays.four_axes(out)
    share = arrays.module_of(out).may_share_memory
    if arrays.start_of(out4) != arrays.start_of(out) or any(share(out, x) for x in inputs):
        return None
    return out4
