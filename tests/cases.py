"""The cases every backend is held to, and what is right for them.

A case says shapes, dtype, options and how its arrays lie in memory. No size equals another, or is
1, unless that is the case's point. By default inputs are views into larger arrays full of NaN: a
kernel that reads beyond its array is caught by its own result.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash import (
    attention_reference,
    attention_reference_grad,
    cuda_backend,
    flash_attention,
    flash_attention_grad,
)
from cuflash.problem import Problem

DTYPES = ("float64", "float32", "float16", "bfloat16")


@functools.cache
def dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def eps(name: str) -> float:
    """Distance from 1 to the next number."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}[
        name
    ]


@dataclass(frozen=True)
class Case:
    sq: int
    sk: int
    d: int = 24
    dv: int = 40
    batch: int = 2
    heads: int = 6
    heads_kv: int = 3
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    layout: str = "poisoned"
    magnitude: float = 1.0
    dlse: bool = True
    note: str = field(default="", compare=False)

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options)
        extra = "" if self.magnitude == 1 else f"-x{self.magnitude:g}"
        sizes = f"{self.batch}x{self.heads}/{self.heads_kv}x{self.sq}x{self.sk}x{self.d}/{self.dv}"
        return f"{sizes}-{self.dtype}-{self.layout}{extra}-{options or 'full'}"


def case(sq, sk, *, layout="poisoned", **kw) -> Case:
    fields = {name: kw.pop(name) for name in list(kw) if name in Case.__dataclass_fields__}
    return Case(sq, sk, layout=layout, options=tuple(kw.items()), **fields)


OPTIONS = (
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"window": (9, 3)},
    {"window": (0, None)},
    {"window": (None, 5), "softcap": 1.5},
    {"causal": True, "window": (20, 7), "softcap": 3.0, "scale": 0.4},
    {"scale": 0.0},
    {"scale": -0.7, "causal": "top_left", "window": (12, 0)},
)

#: Small enough for the simulator: one or two tiles of 8 each way, every option and dtype.
SMALL = [
    case(sq, sk, d=d, dv=dv, batch=1, heads=heads, heads_kv=kv, dtype=dtype, **options)
    for (sq, sk, d, dv, heads, kv, dtype), options in zip(
        [
            (11, 13, 9, 5, 2, 1, "float64"),
            (13, 7, 3, 10, 1, 1, "float32"),
            (7, 14, 10, 3, 3, 3, "float16"),
            (9, 15, 5, 9, 2, 2, "bfloat16"),
            (15, 10, 8, 1, 1, 1, "float32"),
            (10, 17, 1, 8, 1, 1, "float64"),
            (17, 9, 7, 6, 2, 1, "float32"),
            (1, 9, 4, 5, 2, 2, "float32"),
            (9, 1, 4, 5, 1, 1, "float64"),
        ],
        OPTIONS,
        strict=True,
    )
]

#: Lengths around tile edges, both ways round, with every option in turn.
LENGTHS = [
    case(sq, sk, dtype=dtype, **options)
    for (sq, sk), dtype, options in zip(
        [(1, 1), (1, 7), (7, 1), (63, 65), (65, 63), (113, 203), (203, 113), (129, 193), (799, 3),
         (3, 799), (15, 1025), (127, 128), (192, 191), (600, 601), (40, 500), (500, 40)],
        DTYPES * 4,
        OPTIONS + OPTIONS[:7],
        strict=True,
    )
]  # fmt: skip

#: All options with all dtypes, Sq > Sk and Sq < Sk.
GRID = [
    case(*lengths, dtype=dtype, **options)
    for i, options in enumerate(OPTIONS)
    for dtype in DTYPES
    for lengths in [((70, 150), (150, 70))[i % 2]]
]

#: Widths that are no power of two or multiple of 8, and values wider or narrower than queries.
WIDTHS = [
    case(130, 90, d=d, dv=dv, batch=1, heads=2, heads_kv=1, dtype=dtype, causal=True)
    for (d, dv), dtype in zip(
        [(1, 1), (3, 7), (7, 3), (33, 63), (63, 33), (72, 72), (80, 96), (96, 80), (100, 160),
         (160, 100), (16, 40), (40, 16), (192, 128), (128, 192), (256, 256), (256, 64)],
        DTYPES * 4,
        strict=True,
    )
]  # fmt: skip

#: Widths beyond what a block of the CUDA kernels makes of a result: beyond 256, and beyond 512.
#: (Of such widths a scale of 0.4 makes logits of 60 in magnitude. What their rounding does to `out`
#: is luck then: of float64 on one CPU, 5 times as much as to that of the plain formula, though the
#: logits were off by half as much.)
WIDE_OPTIONS = [dict(options) for options in OPTIONS[:8]]
del WIDE_OPTIONS[6]["scale"]
WIDE = [
    case(150, 90, d=d, dv=dv, batch=1, heads=2, heads_kv=1, dtype=dtype,
         layout=("poisoned", "contiguous", "bshd")[(i + j) % 3], **WIDE_OPTIONS[(2 * i + j) % 8])
    for i, (d, dv) in enumerate([(264, 300), (512, 512), (1024, 1024), (784, 40), (512, 64),
                                 (64, 512)])
    for j, dtype in enumerate(DTYPES)
]  # fmt: skip

GROUPS = [
    case(5, 35, d=64, dv=56, heads=9, heads_kv=3),
    case(1, 300, d=32, dv=48, heads=12, heads_kv=2, causal=True),
    case(33, 20, heads=6, heads_kv=1, dtype="bfloat16"),
    case(33, 20, heads=5, heads_kv=5, dtype="float16", causal=True),
]

#: How q, k, v, dout may lie in memory; see `laid_out`.
LAYOUTS = [
    case(37, 50, dtype=dtype, layout=layout, causal=True)
    for layout in ("contiguous", "bshd", "negative", "step", "inner_step", "broadcast", "fortran")
    for dtype in ("float32", "bfloat16")
]

EXTREMES = [
    case(60, 90, dtype=dtype, magnitude=30, causal=True, note="logits near 1e4") for dtype in DTYPES
] + [case(70, 130, dtype=dtype, scale=30.0, note="one key takes all") for dtype in DTYPES]

ALL = SMALL + LENGTHS + GRID + WIDTHS + WIDE + GROUPS + LAYOUTS + EXTREMES


def laid_out(xp: Any, values: np.ndarray, layout: str) -> Any:
    """`values` (4 axes) as an array of xp that lies in memory as the layout says."""
    b, h, s, d = values.shape
    values = xp.asarray(values)
    nan = functools.partial(xp.full, fill_value=xp.nan, dtype=values.dtype)
    if layout == "contiguous":
        return values
    if layout == "poisoned":  # and one element off any vector's alignment
        base = nan((b, h, s + 2, d + 2))
        view = base[:, :, 1:-1, 1:-1]
    elif layout == "bshd":
        view = nan((b, s, h, d)).swapaxes(1, 2)
    elif layout == "negative":
        view = nan((b, h, s, d))[::-1, :, ::-1, ::-1]
    elif layout == "step":
        view = nan((b, 2 * h, 3 * s, d))[:, ::2, ::3]
    elif layout == "inner_step":
        view = nan((b, h, s, 2 * d))[..., ::2]
    elif layout == "fortran":
        view = nan((d, s, h, b)).transpose(3, 2, 1, 0)
    elif layout == "broadcast":
        return xp.broadcast_to(values[:1, :1], values.shape)
    else:
        raise ValueError(layout)
    view[...] = values
    return view


class Run:
    """A case's inputs for one array module, and what the reference says about them."""

    def __init__(self, case: Case, xp: Any, seed: int = 0) -> None:
        self.case, self.xp, self.options = case, xp, dict(case.options)
        rng = np.random.default_rng([seed, case.sq, case.sk, case.d])
        dtype = dtype_of(case.dtype)

        def draw(*shape, magnitude=1.0):
            return laid_out(xp, (magnitude * rng.standard_normal(shape)).astype(dtype), case.layout)

        kv = case.batch, case.heads_kv, case.sk
        self.q = draw(case.batch, case.heads, case.sq, case.d, magnitude=case.magnitude)
        self.k = draw(*kv, case.d, magnitude=case.magnitude)
        self.v = draw(*kv, case.dv)
        self.dout = draw(case.batch, case.heads, case.sq, case.dv)
        rows = rng.standard_normal((case.batch, case.heads, case.sq))
        self.compute = "float64" if case.dtype == "float64" else "float32"
        self.dlse = xp.asarray(rows.astype(self.compute)) if case.dlse else None

    def forward(self, **kw):
        return flash_attention(self.q, self.k, self.v, return_lse=True, **self.options, **kw)

    def backward(self, out, lse, **kw):
        return flash_attention_grad(
            self.dout, self.q, self.k, self.v, out, lse, dlse=self.dlse, **self.options, **kw
        )

    @property
    def exact(self) -> str:
        """The dtype of the reference: wider than the case's own."""
        return "longdouble" if self.case.dtype == "float64" else "float64"

    def reference(self, dtype=None):
        q, k, v = map(host, (self.q, self.k, self.v))
        return attention_reference(
            q, k, v, return_lse=True, dtype=dtype or self.exact, **self.options
        )

    def reference_grad(self, dtype=None):
        dout, q, k, v = map(host, (self.dout, self.q, self.k, self.v))
        dlse = None if self.dlse is None else host(self.dlse)
        return attention_reference_grad(
            dout, q, k, v, dlse=dlse, dtype=dtype or self.exact, **self.options
        )

    def check_forward(self, out, lse) -> None:
        out, lse = host(out), host(lse)
        want, want_lse = self.reference()
        plain, plain_lse = self.reference(self.case.dtype)
        close("out", out, want, plain, rounding=eps(self.case.dtype) * peak(want))
        seen = ~np.isneginf(want_lse)
        assert (np.isneginf(lse) == ~seen).all(), "lse is -inf on the wrong rows"
        assert not out[~seen].astype("float32").any(), "rows that see nothing are not 0"
        rounding = 2 * eps(self.compute) * max(1, peak(want_lse[seen]))
        close("lse", lse[seen], want_lse[seen], plain_lse[seen], rounding=rounding)

    def check_backward(self, grads) -> None:
        want, plain = self.reference_grad(), self.reference_grad(self.case.dtype)
        # Rounding the plain formula does not have, relative to the terms that are summed: that of
        # the saved lse, an absolute error in the exponent; and dS = P (dP - delta) cancels.
        relative = eps(self.compute) * (2 + peak(self.reference()[1], finite=True) / 2)
        dp = self.case.dv**0.5 * peak(self.v) * peak(self.dout)
        scale = abs(self.options.get("scale", self.case.d**-0.5))
        columns = self.column_sums()
        terms = {
            "dq": scale * dp * peak(self.k),
            "dk": scale * dp * peak(self.q) * columns,
            "dv": peak(self.dout) * columns,
        }
        for name, g, w, p in zip(("dq", "dk", "dv"), grads, want, plain, strict=True):
            rounding = eps(self.case.dtype) * peak(w) + relative * terms[name]
            close(name, host(g), w, p, rounding=rounding)

    def column_sums(self) -> float:
        """The largest sum of a column of P, over the heads of a group: dv for dout = 1."""
        q, k, v = map(host, (self.q, self.k, self.v))
        ones = np.ones((*q.shape[:-1], v.shape[-1]), q.dtype)
        return peak(attention_reference_grad(ones, q, k, v, **self.options).dv)


def on_hopper() -> bool:
    """Whether the current device has kernels of its own for 16-bit dtypes."""
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def portable_config(dtype: str, d: int, dv: int | None = None) -> cuda_backend.Config:
    """The tiles of a GPU of compute capability 8.0, for `config=` on Hopper."""
    return config_on(80, 163, dtype, d, dv)


def config_on(
    capability: int, shared_kib: int, dtype: str, d: int, dv: int | None = None
) -> cuda_backend.Config:
    """The tiles that a GPU with so much shared memory a block has by default."""
    problem = Problem("cuda", dtype, 1, 1, 1, 9, 9, d, dv or d, 1.0)
    return cuda_backend.config_for(problem, capability, shared_kib * 1024)


def normal(xp, *shape, dtype="float32", seed=0, scale=1.0):
    """Normally distributed numbers as an array of xp."""
    values = scale * np.random.default_rng(seed).standard_normal(shape)
    return xp.asarray(values.astype(dtype_of(dtype)))


def host(x) -> np.ndarray:
    """`x` as a NumPy array."""
    return x.get() if hasattr(x, "get") else x


def peak(x, finite: bool = False) -> float:
    """Largest absolute value, 0 for an empty array; `finite`: of those that are."""
    x = host(x)
    x = x[np.isfinite(x)] if finite else x
    return float(abs(x.astype(np.longdouble)).max()) if x.size else 0.0


def close(name, got, want, plain, rounding) -> None:
    """At most twice the error of the plain computation in the same dtype, plus rounding."""
    assert got.shape == want.shape, f"{name} has shape {got.shape}, not {want.shape}"
    error, bound = peak(got - want), 2 * peak(plain - want) + rounding
    assert error <= bound, f"{name} is off by {error:.3g}, more than {bound:.3g}"
