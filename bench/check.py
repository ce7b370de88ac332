"""What a result must equal before its time counts.

The reference is cuflash's float64 formula, on a sample that stays small: the last queries of every
head of two batch entries, and the first and the last head whole. A whole head is walked in
blocks of queries, each with the keys that it sees, so no array is of size Sq x Sk.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash import arrays, attention_reference, attention_reference_grad

from .cases import Case, Inputs

#: Largest relative error (norm of the difference over norm of the reference). Each bound is some
#: 20 to 100 times the rounding that right results were seen to have, and well under the error of
#: the next coarser arithmetic, so that a hidden conversion cannot pass as speed:
TOLERANCE = {
    "float64": 1e-12,  # rounding gives 1e-15; one step in float32 gives 1e-8 and more
    "float32": 1e-5,  # rounding gives 2e-7 to 1e-6; TF32 gives 3e-4
    "float16": 1e-2,  # P, dS and results rounded to 11 bits give 5e-4, rounded scores 2e-3
    "bfloat16": 4e-2,  # the same with 8 bits: 4e-3, and 1e-2
}

#: A single row may be this many times worse: one row averages over few numbers, and where terms
#: cancel (dq of the first query under a causal mask is 0) rounding is all there is. A row or tile
#: that was forgotten or masked wrongly is wrong by about its own size, and does not pass.
ROW = 10

_LAST_QUERIES = 16
_BLOCK_ELEMENTS = 2**23


class Part(NamedTuple):
    """`value` is what ``results[which][index]`` must be; results are (out,) or (dq, dk, dv)."""

    which: int
    index: tuple[slice, slice, slice]
    value: Any


def expected(case: Case, x: Inputs, block: int | None = None) -> list[Part]:
    """The sample of the reference; `block` is the number of queries taken at a time."""
    everything = slice(None)
    two = slice(None, None, max(1, case.batch - 1))
    last = slice(max(0, case.sq - _LAST_QUERIES), case.sq)
    rows = _reference(case, x, (two, everything), (two, everything), last)[0]
    parts = [Part(0, (two, everything, last), rows)]
    group = case.heads // case.heads_kv
    block = block or max(1, _BLOCK_ELEMENTS // (case.sk * group))
    for b, h in sorted({(0, 0), (case.batch - 1, case.heads_kv - 1)}):
        entry = slice(b, b + 1)
        queries = (entry, slice(h * group, (h + 1) * group))
        keys = (entry, slice(h, h + 1))
        for which, value in enumerate(_whole_head(case, x, queries, keys, block)):
            index = queries if which == 0 else keys
            parts.append(Part(which, (*index, everything), value))
    return parts


def _whole_head(case: Case, x: Inputs, queries: tuple, keys: tuple, block: int) -> list[Any]:
    """Output, or gradients, of the query heads that share one key/value head."""
    xp = arrays.module_of(x.q)
    slices = [slice(i, min(i + block, case.sq)) for i in range(0, case.sq, block)]
    blocks = [_reference(case, x, queries, keys, rows) for rows in slices]
    whole = [xp.concatenate([results[0] for results in blocks], axis=2)]
    if case.backward:
        for which, like in ((1, x.k[keys]), (2, x.v[keys])):
            total = xp.zeros(like.shape, "float64")
            for results in blocks:  # keys that the block does not see have no gradient from it
                total[:, :, : results[which].shape[2]] += results[which]
            whole.append(total)
    return whole


def _reference(case: Case, x: Inputs, queries: tuple, keys: tuple, rows: slice) -> tuple:
    """(out,) or (dq, dk, dv) for the queries `rows` alone.

    Keys past the last one that these queries see are cut off. That also keeps a causal mask
    right: it joins the last query to the last key, and cutting both moves them together.
    """
    seen = rows.stop + case.sk - case.sq if case.causal else case.sk
    seen = max(0, min(seen, case.sk))
    q, k, v = x.q[queries][:, :, rows], x.k[keys][:, :, :seen], x.v[keys][:, :, :seen]
    if case.backward:
        dout = x.dout[queries][:, :, rows]
        return attention_reference_grad(dout, q, k, v, causal=case.causal)
    return (attention_reference(q, k, v, causal=case.causal),)


def error(case: Case, result: Any, parts: list[Part]) -> float:
    """The relative error, to compare with TOLERANCE; NaN or inf for a result that has any."""
    results = result if case.backward else (result,)
    worst = 0.0
    for part in parts:
        xp = arrays.module_of(part.value)
        got = _float64(xp, results[part.which][part.index])
        if got.shape != part.value.shape:
            return math.inf
        off, size = (xp.linalg.norm(a, axis=-1) for a in (got - part.value, part.value))
        total = float(xp.linalg.norm(size.ravel()))
        typical = total / math.sqrt(size.size) or 1.0
        overall = float(xp.linalg.norm(off.ravel())) / (total or 1.0)
        if not math.isfinite(overall):
            return overall
        row = float((off / xp.maximum(size, typical)).max())
        worst = max(worst, overall, row / ROW)
    return worst


def _float64(xp: ModuleType, x: Any) -> Any:
    """Part of a result as a float64 array of NumPy or CuPy; it may be a PyTorch tensor."""
    if isinstance(x, (np.ndarray, xp.ndarray)):
        return x.astype("float64")
    return xp.from_dlpack(x.detach().double())
