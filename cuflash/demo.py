"""What `python -m cuflash demo` does: a worked example, handwritten digits, and a comparison.

Runs on CuPy arrays where CuPy finds a GPU, and on NumPy arrays elsewhere. Only NumPy is imported
at import time: scikit-learn, Matplotlib and Rich are extras, and CuPy is never required.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import attention_reference, flash_attention, pictures
from .api import BACKENDS, load_backend, refusal
from .digits import Learned, learn_digits
from .numpy_backend import Step, trace
from .pictures import Measured
from .problem import Problem

SCHEDULES = ("q-resident", "kv-resident")

_VALUES = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
#: (q, k, v), to be taken with scale 1. The scores of "shifted" are row 0 of "worked" plus 100:
#: the softmax is the same, and the exponentials would overflow float32 without the maximum.
EXAMPLES = {
    "worked": (
        np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
        np.array([[1.0, 1.0], [0.0, 1.0], [2.0, 0.0]]),
        _VALUES,
    ),
    "shifted": (np.array([[1.0]]), np.array([[101.0], [100.0], [102.0]]), _VALUES),
}

STEP_COLUMNS = ("step", "query", "keys", "rescale", "m", "l", "o", "moved")


def step_rows(steps: Iterable[Step]) -> list[tuple[str, ...]]:
    """The text of `STEP_COLUMNS`, a row for each query of each step."""
    rows: list[tuple[str, ...]] = []
    for number, step in enumerate(steps, 1):
        for i, query in enumerate(range(step.queries.start, step.queries.stop)):
            once = (str(number), str(step.moved)) if i == 0 else ("", "")
            o = "[" + ", ".join(f"{x:.4f}" for x in step.o[i]) + "]"
            numbers = (f"{step.rescale[i]:.4f}", f"{step.m[i]:g}", f"{step.l[i]:.4f}", o)
            rows.append((once[0], str(query), pictures.span(step.keys), *numbers, once[1]))
    return rows


def find_gpu() -> tuple[Any, str]:
    """CuPy where it finds a GPU, or None; and why not."""
    try:
        import cupy
    except ImportError:
        return None, "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:  # no driver, or one that is too old
        return None, str(error)
    return (cupy, "") if count else (None, "CuPy finds no GPU")


def sample_problem(device: str, dtype: str, heads: int, length: int, width: int) -> Problem:
    """Self-attention without options, one batch entry."""
    return Problem(
        device=device,
        dtype=dtype,
        batch=1,
        heads=heads,
        heads_kv=heads,
        sq=length,
        sk=length,
        d=width,
        dv=width,
        scale=1 / math.sqrt(width),
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo; `args` has `picture`, a path, and `quick`."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    started = time.perf_counter()
    cupy, why_not = find_gpu()
    xp: Any = np
    if cupy is not None:
        problem = sample_problem("cuda", "float32", 4, 1024, 64)
        xp = cupy if _takers(problem) else np
        why_not = "no backend here takes CuPy arrays: python -m cuflash info says why"
    where = f"CuPy {xp.__version__}, on the GPU" if xp is not np else "NumPy, on the CPU"
    console.print(f"Arrays: {where}" + (f" ({why_not})" if xp is np else ""))
    traces = _replay(console)
    learned = _label_digits(xp, 20 if args.quick else 60, console)
    measured = _compare(xp, args.quick, console)
    pictures.save_demo(args.picture, traces, learned, measured)
    seconds = time.perf_counter() - started
    console.print(f"\nThe whole demo took {seconds:.1f} s.")
    console.print(f"Picture: {args.picture}", soft_wrap=True)
    return 0


def _title(console: Any, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Any:
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


# --- The worked example. ---


def _replay(console: Any) -> dict[str, list[Step]]:
    """Print the worked example score by score; return its trace under both timetables."""
    q, k, v = EXAMPLES["worked"]
    traces = {name: list(trace(q, k, v, 1, 1, name, scale=1)) for name in SCHEDULES}
    _title(console, "1. Three queries and three keys, one score at a time")
    console.print(_table(STEP_COLUMNS, step_rows(traces["q-resident"])))
    console.print("m: largest score so far. l: sum of exp(score - m). o: sum of exp(score - m) v.")
    console.print("rescale: what the older l and o were multiplied by when m rose.")
    out = np.concatenate([step.o / step.l[:, None] for step in traces["q-resident"][2::3]])
    console.print(f"O = o / l = {out.round(3).tolist()}")
    error = np.abs(out - attention_reference(q, k, v, scale=1)).max()
    console.print(f"Largest difference from the formula: {error:.1e}")
    return traces


# --- The digits. ---


def _label_digits(xp: Any, steps: int, console: Any) -> Learned:
    """Label held-out digits before and after learning the metric, and print how well."""
    learned = learn_digits(xp, steps, console)
    _title(console, "2. Handwritten digits: unknown images attend to known ones, values are labels")
    validated = learned.validation_loss
    by_attention = [
        ("attention, images as they are", learned.accuracy_before, f"{validated[0]:.3f}"),
        (
            f"attention, metric learned in {learned.chosen} steps",
            learned.accuracy,
            f"{min(validated):.3f}",
        ),
        ("scikit-learn's nearest neighbour", learned.accuracy_nearest, "-"),
    ]
    rows = [(way, f"{accuracy:.1%}", loss) for way, accuracy, loss in by_attention]
    console.print(_table(("", "test accuracy", "validation loss"), rows))
    train, validation, test = learned.sizes
    first, last = learned.train_loss[0], learned.train_loss[-1]
    console.print(f"Training loss {first:.3f} -> {last:.3f} in {steps} steps on {train} images;")
    console.print(f"{validation} others choose the step; {test} others, used in neither, test.")
    return learned


# --- Every backend against the formula. ---


def _compare(xp: Any, quick: bool, console: Any) -> list[Measured]:
    """Error, time and memory of the formula and of each backend that runs here."""
    from rich.progress import track

    lengths: tuple[int, ...]
    if xp is np:
        device, dtypes, heads, repeats = "cpu", ["float32"], 1, 5
        lengths = (256, 512) if quick else (1024, 2048, 4096)
    else:
        device, dtypes, heads, repeats = "cuda", ["float32", "float16"], 4, 10
        lengths = (256, 512) if quick else (2048, 4096, 8192)
    cases = [
        (dtype, length, way)
        for dtype in dtypes
        for length in lengths
        for way in ("formula", *_takers(sample_problem(device, dtype, heads, length, 64)))
    ]
    measured = []
    quiet = not console.is_terminal
    for dtype, length, way in track(
        cases, "Measuring", console=console, transient=True, disable=quiet
    ):
        random = np.random.default_rng(length)
        q, k, v = (xp.asarray(random.standard_normal((heads, length, 64)), dtype) for _ in range(3))
        measured.append(_measure(xp, way, q, k, v, repeats))
    rows = []
    for m in measured:
        numbers = f"{m.error:.1e}", f"{m.seconds * 1e3:.2f}", f"{m.peak_bytes / 2**20:.1f}"
        rows.append((m.way, m.dtype, str(m.length), *numbers))
    _title(console, f"3. The formula against the tiles: {heads} x S x 64, forward")
    columns = ("way", "dtype", "S", "error", "time (ms)", "peak memory (MiB)")
    console.print(_table(columns, rows))
    console.print("formula: attention_reference in the same dtype, S x S matrix and all.")
    console.print("error: largest difference from float64, over some 256 queries of each head.")
    console.print("peak memory: beyond the inputs, result included. nan: it did not fit.")
    return measured


def _measure(xp: Any, way: str, q: Any, k: Any, v: Any, repeats: int) -> Measured:
    def call() -> Any:
        if way == "formula":
            return attention_reference(q, k, v, dtype=q.dtype.name)
        return flash_attention(q, k, v, backend=way)

    # The rows of the result are independent: a sample of them bounds the reference's cost.
    rows = slice(None, None, max(1, q.shape[1] // 256))
    error = seconds = peak = math.nan
    # CuPy's error for lack of memory is a MemoryError too.
    with contextlib.suppress(MemoryError):
        expected = attention_reference(q[:, rows], k, v)
        error = float(abs(call()[:, rows].astype("float64") - expected).max())
        seconds, peak = _seconds(xp, call, repeats), _peak_bytes(xp, call)
    return Measured(way, q.dtype.name, q.shape[1], error, seconds, peak)


def _seconds(xp: Any, call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call that has run before, so that nothing is left to compile."""
    times = []
    for _ in range(repeats):
        if xp is np:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        else:
            begin, end = xp.cuda.Event(), xp.cuda.Event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(xp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def _peak_bytes(xp: Any, call: Callable[[], Any]) -> int:
    """The most memory held at once during a call; apart from the timing, which it slows."""
    if xp is np:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    pool = xp.cuda.MemoryPool()  # empty, so all that it holds at the end was needed at once
    with xp.cuda.using_allocator(pool.malloc):
        call()
    return pool.total_bytes()


def _takers(problem: Problem) -> list[str]:
    """Backends that run the problem here, Numba's simulator left out: it takes minutes."""
    names = [name for name in BACKENDS if refusal(name, problem) is None]
    return [name for name in names if not getattr(load_backend(name), "SIMULATED", False)]
