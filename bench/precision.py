"""python -m bench.precision: how far attention is off, by size of scores and number of keys.

A few queries over many keys, one head, normal numbers; queries times a scale, so that scores have
about that standard deviation. Largest error of out, and of the gradients, over the largest exact
number of its array. Exact is the formula in float64, and for float64 in NumPy's longdouble.
Beside each mode is the plain formula in its dtype (cuBLAS, or NumPy's BLAS).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import (
    attention_reference,
    attention_reference_grad,
    flash_attention,
    flash_attention_grad,
)

from . import report as reporting
from .measure import Cpu, Gpu

#: Name: dtype and what `flash_attention` is told besides.
MODES: dict[str, tuple[str, dict[str, str]]] = {
    "float64": ("float64", {}),
    "float32": ("float32", {}),
    "float32, ieee": ("float32", {"precision": "ieee"}),
    "float32, tf32": ("float32", {"precision": "tf32"}),
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
}
QUERIES = {"float64": 16}  # longdouble products are slow
ARRAYS = "out", "dq", "dk", "dv"


def errors(xp: Any, mode: str, d: int, keys: int, scale: float, seed: int) -> dict[str, Any]:
    """One point: errors of "cuflash" and of the "formula", each (out, dq, dk, dv)."""
    dtype, options = MODES[mode]
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  NumPy knows the name from here on
    queries = QUERIES.get(dtype, 64)
    rng = np.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((n, d)) for n in (queries, keys, keys, queries))
    q, k, v, dout = (xp.asarray(x).astype(dtype) for x in (q * scale, k, v, dout))

    def formula(arithmetic: str, *x: Any) -> list[Any]:
        dout, *qkv = x
        out = attention_reference(*qkv, dtype=arithmetic)
        return [out, *attention_reference_grad(dout, *qkv, dtype=arithmetic)]

    inputs = dout, q, k, v
    if dtype == "float64":
        exact = formula("longdouble", *(_host(x) for x in inputs))
    else:
        exact = [_host(x) for x in formula("float64", *inputs)]
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = flash_attention_grad(dout, q, k, v, out, lse, **options)

    def off(results: list[Any]) -> list[float]:
        pairs = zip(results, exact, strict=True)
        return [float(abs(_host(a).astype(e.dtype) - e).max() / abs(e).max()) for a, e in pairs]

    point = {"mode": mode, "keys": keys, "scale": scale}
    return point | {"cuflash": off([out, *grads]), "formula": off(formula(dtype, *inputs))}


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def show(data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    for name, value in data["header"].items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode", no_wrap=True)
    for column in ("S", "scale", *(f"{a}, formula" for a in ARRAYS)):
        table.add_column(column, justify="right", no_wrap=True)
    for point in data["points"]:
        pairs = zip(point["cuflash"], point["formula"], strict=True)
        numbers = [f"{ours:.1e}, {plain:.1e}" for ours, plain in pairs]
        table.add_row(point["mode"], str(point["keys"]), f"{point['scale']:g}", *numbers)
    console.print(table)


def plot(data: dict[str, Any], path: Path) -> None:
    """A column for each number of keys; above out, below the worst of the gradients."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    keys = sorted({point["keys"] for point in data["points"]})
    modes = list(dict.fromkeys(point["mode"] for point in data["points"]))
    size = 4 * len(keys) + 1, 7.5
    figure, axes = pyplot.subplots(2, len(keys), figsize=size, sharey="row", squeeze=False)
    for row, (title, part) in zip(
        axes, (("out", slice(1)), ("gradients", slice(1, 4))), strict=True
    ):
        for axis, n in zip(row, keys, strict=True):
            for i, mode in enumerate(modes):
                here = [p for p in data["points"] if (p["mode"], p["keys"]) == (mode, n)]
                for who, style in (("cuflash", "o-"), ("formula", "x--")):
                    line = [max(p[who][part]) for p in here]
                    label = mode if who == "cuflash" else f"{mode}, plain formula"
                    axis.loglog([p["scale"] for p in here], line, f"C{i}{style}", label=label, ms=4)
            axis.set_title(f"{title}, {n:,} keys")
            axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=5, loc="upper center", fontsize=8)
    figure.supxlabel(
        f"scale of the queries   ({data['header']['machine']}, {data['header']['date']})"
    )
    figure.supylabel("largest error / largest number")
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.precision",
        description="How far attention is off, by the size of scores and the number of keys.",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), default="gpu")
    add("--mode", choices=MODES, action="append", help="default: all; repeats")
    add("--width", type=int, default=64)
    add("--keys", type=int, nargs="+", default=[512, 4096, 65536])
    add("--scale", type=float, nargs="+", default=[1, 10, 100, 1000])
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="keep the numbers")
    add("--load", type=Path, metavar="FILE", help="show what --json kept instead of measuring")
    add("--plot", type=Path, metavar="FILE", help="a picture, as PNG, SVG or PDF")
    options = parser.parse_args(arguments)
    if options.load:
        data = json.loads(options.load.read_text())
    else:
        device = Cpu() if options.device == "cpu" else Gpu()
        points = [
            errors(device.xp, mode, options.width, keys, scale, options.seed)
            for mode in options.mode or MODES
            for keys in options.keys
            for scale in options.scale
        ]
        data = {"header": reporting.header(device, "bench.precision"), "points": points}
    show(data)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.plot:
        plot(data, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
