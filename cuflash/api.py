"""The public functions: check, bring to four axes, allocate, hand to a backend."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .arrays import check, empty_in_order, look, on_axes, shaped
from .problem import Problem, make_problem, window_sides

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
    precision: str = "float32",
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
    precision : {"float32", "ieee", "tf32"}, optional
        How float32 numbers are multiplied; other dtypes take no notice. "ieee": by float32
        multiply-adds. "float32": in the fastest way whose error is at most twice that of the
        formula in float32; raw CUDA on Hopper makes two float16 numbers of each. "tf32": rounded
        to 11 bits where that is faster (raw CUDA on Hopper), with errors of some 2**-11. CuPy's
        own switch, CUPY_TF32, is about its own products and changes nothing here.
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
    (q, q_facts), (k, k_facts), (v, v_facts) = look("q", q), look("k", k), look("v", v)
    out_facts = None
    if out is not None:
        if not hasattr(out, "shape"):
            raise TypeError(f"out must be an array, got {type(out)}")
        out, out_facts = look("out", out)
    facts = q_facts, k_facts, v_facts, None, out_facts, None, None
    options = scale, causal, window_sides(window), softcap, precision
    plan = _planned(facts, *options, backend, config)
    with _on_device(plan.xp, plan.device):
        q4, k4, v4 = on_axes(4, q), on_axes(4, k), on_axes(4, v)
        out4: Any = None if out is None else _target(out, q4, k4, v4)
        new = out4 is None
        if new:
            out4 = empty_in_order(q4, plan.out4)
        lse3 = plan.xp.ndarray(plan.out4[:-1], plan.problem.compute)
        plan.backend.forward(plan.problem, plan.config, q4, k4, v4, out4, lse3)
        if out is None:
            out = shaped(out4, plan.out)
        elif new:
            out[...] = shaped(out4, plan.out)
    return (out, shaped(lse3, plan.out[:-1])) if return_lse else out


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
    precision: str = "float32",
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
    scale, causal, window, softcap, precision, backend, config : optional
        As in `flash_attention`; they must be the ones that `out` was computed with.
    dlse : array, shape (..., H, Sq), optional
        Gradient of the loss with respect to `lse`, in its dtype.
    deterministic : bool, optional
        Ask for bitwise repeatable gradients. All backends give them without, except raw CUDA on
        Hopper, where blocks add to dq as they come: for 16-bit dtypes of widths up to 128 (up to
        11 % faster, 1.6 times with few heads), and for float64 of widths from 65 on (5 to 9 %).

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
    (q, q_facts), (k, k_facts), (v, v_facts) = look("q", q), look("k", k), look("v", v)
    (dout, dout_facts), (out, out_facts) = look("dout", dout), look("out", out)
    lse, lse_facts = look("lse", lse)
    dlse, dlse_facts = (None, None) if dlse is None else look("dlse", dlse)
    facts = q_facts, k_facts, v_facts, dout_facts, out_facts, lse_facts, dlse_facts
    options = scale, causal, window_sides(window), softcap, precision
    plan = _planned(facts, *options, backend, config)
    with _on_device(plan.xp, plan.device):
        q4, k4, v4 = on_axes(4, q), on_axes(4, k), on_axes(4, v)
        dq, dk, dv = [empty_in_order(x, x.shape) for x in (q4, k4, v4)]
        operands = on_axes(4, dout), q4, k4, v4, on_axes(4, out), on_axes(3, lse)
        dlse3 = None if dlse is None else on_axes(3, dlse)
        backward = plan.backend.backward
        backward(plan.problem, plan.config, deterministic, *operands, dlse3, dq, dk, dv)
        return AttentionGrads(shaped(dq, q.shape), shaped(dk, k.shape), shaped(dv, v.shape))


def warmup(
    dtype: str,
    d: int,
    dv: int | None = None,
    *,
    softcap: float | None = None,
    precision: str = "float32",
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
    precision : {"float32", "ieee", "tf32"}, optional
        As in `flash_attention`.
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
    options: dict[str, Any] = {"softcap": softcap, "precision": precision, "backend": backend}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    if backward:
        flash_attention_grad(out, q, k, v, out, lse, **options)


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
    outs, out_facts = _parts("outs", outs)
    lses, lse_facts = _parts("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must pair up, got {len(outs)} and {len(lses)}")
    arrays.same_dtype(**out_facts)
    arrays.same_dtype(**lse_facts)
    arrays.same_device(**out_facts, **lse_facts)
    shape = outs[0].shape
    for i, (o, e) in enumerate(zip(outs, lses, strict=True)):
        if o.shape != shape or e.shape != shape[:-1]:
            raise ValueError(f"part {i} has out {o.shape} and lse {e.shape}, but outs[0] {shape}")
    xp = arrays.module_of(outs[0])
    with _on_device(xp, out_facts["outs[0]"].device), np.errstate(divide="ignore"):
        top = lses[0]
        for e in lses[1:]:
            top = xp.maximum(top, e)
        top = xp.where(xp.isneginf(top), 0, top)  # such rows: exp(-inf - 0) = 0, and no NaN
        weights = [xp.exp(e - top) for e in lses]
        total = sum(weights[1:], weights[0])
        shares = [w / xp.where(total == 0, 1, total) for w in weights]
        out = sum(w[..., None] * o.astype(w.dtype) for w, o in zip(shares, outs, strict=True))
        return out.astype(outs[0].dtype), top + xp.log(total)


def _parts(name: str, parts: Any) -> tuple[list, dict[str, arrays.Facts]]:
    looks = {f"{name}[{i}]": look(f"{name}[{i}]", x) for i, x in enumerate(parts)}
    return [x for x, _ in looks.values()], {n: check(n, x) for n, (_, x) in looks.items()}


def canonical(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, softcap: Any
) -> tuple[Problem, Any, Any, Any]:
    """The Problem, and q, k, v as arrays of four axes."""
    (q, q_facts), (k, k_facts), (v, v_facts) = look("q", q), look("k", k), look("v", v)
    problem = _problem(q_facts, k_facts, v_facts, scale, causal, window, softcap)
    return problem, on_axes(4, q), on_axes(4, k), on_axes(4, v)


def _problem(q_facts: tuple, k_facts: tuple, v_facts: tuple, *options: Any) -> Problem:
    q, k, v = check("q", q_facts), check("k", k_facts), check("v", v_facts)
    arrays.same_device(q=q, k=k, v=v)
    arrays.same_dtype(q=q, k=k, v=v)
    device = "cpu" if q.device == "cpu" else "cuda"
    return make_problem(device, arrays.dtype_name(q.dtype), q.shape, k.shape, v.shape, *options)


class _Plan(NamedTuple):
    """What a call needs beyond its arrays."""

    problem: Problem
    backend: Any  # its module
    config: Any
    xp: Any  # NumPy or CuPy
    device: str | int
    out: tuple[int, ...]  # the shape that the caller sees
    out4: tuple[int, ...]  # and the one on four axes


@functools.lru_cache(4096, typed=True)  # typed: causal=1 is not causal=True
def _plan(facts: tuple, scale, causal, window, softcap, precision, backend, config) -> _Plan:
    """Check all arguments and choose the backend, once for calls that differ in numbers only.

    `facts` are those of q, k, v, dout, out, lse and dlse, None where an array is not given.
    """
    problem = _problem(*facts[:3], scale, causal, window, softcap, precision)
    q = arrays.Facts(*facts[0])
    out = *q.shape[:-1], problem.dv
    like_out, like_lse = (out, problem.dtype), (out[:-1], problem.compute)
    wanted = {"dout": like_out, "out": like_out, "lse": like_lse, "dlse": like_lse}
    for (name, (shape, dtype)), given in zip(wanted.items(), facts[3:], strict=True):
        if given is None:
            continue
        x = check(name, given)
        arrays.same_device(q=q, **{name: x})
        if (x.shape, x.dtype.name) != (shape, dtype):
            must = f"must have shape {shape} and dtype {dtype}"
            raise ValueError(f"{name} {must}, got {x.shape} and {x.dtype.name}")
    xp = np if q.device == "cpu" else sys.modules["cupy"]
    with _on_device(xp, q.device):
        module, config = _choose(problem, backend, config)
    out4 = problem.batch, problem.heads, problem.sq, problem.dv
    return _Plan(problem, module, config, xp, q.device, out, out4)


def _planned(*what: Any) -> _Plan:
    try:
        return _plan(*what)
    except TypeError:  # an option that cannot be hashed, or is wrong
        return _plan.__wrapped__(*what)


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


def _choose(problem: Problem, backend: str | None, config: Any) -> tuple[Any, Any]:
    """The backend's module and the tile configuration, for the current device."""
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


_STAY = contextlib.nullcontext()  # it has no state, so one does for all threads


def _on_device(xp: Any, device: str | int) -> contextlib.AbstractContextManager[Any]:
    if device == "cpu" or xp.cuda.runtime.getDevice() == device:
        return _STAY
    return xp.cuda.Device(device)


def _target(out: Any, *inputs: Any) -> Any:
    """`out` on four axes where the result can be written while the inputs are read, or None."""
    if arrays.overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got strides {out.strides}")
    if not getattr(out.flags, "writeable", True):  # CuPy has no read-only arrays
        raise ValueError("out must be writeable, got a read-only array")
    out4 = on_axes(4, out)
    share = arrays.module_of(out).may_share_memory
    if arrays.start_of(out4) != arrays.start_of(out) or any(share(out, x) for x in inputs):
        return None
    return out4
