"""Pictures of the trace and of the demo, in Matplotlib, which is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .digits import Learned
    from .numpy_backend import Step

_TIMETABLES = {
    "q-resident": "Queries stay, keys stream past",
    "kv-resident": "Keys stay, queries stream past",
}
_SHOWN = 8  # digits in a row


class Measured(NamedTuple):
    """One way of computing one problem; seconds and bytes are NaN where it did not fit."""

    way: str
    dtype: str
    length: int
    error: float
    seconds: float
    peak_bytes: float


def span(s: slice) -> str:
    """'3' for one row, '2-3' for more."""
    return str(s.start) if s.stop == s.start + 1 else f"{s.start}-{s.stop - 1}"


def save_trace(path: str | Path, traces: dict[str, list[Step]], title: str) -> None:
    """Draw the traces (by schedule) of one problem to a file."""
    figure = _figure(15, 4.2)
    figure.suptitle(title)
    draw_trace(figure, traces)
    figure.savefig(path)


def save_demo(
    path: str | Path,
    traces: dict[str, list[Step]],
    learned: Learned,
    measured: list[Measured],
) -> None:
    """Draw what the demo did to a file, a row of panels for each of its parts."""
    figure = _figure(15, 13)
    top, middle, bottom = figure.subfigures(3, 1, hspace=0.06)
    top.suptitle("1. The worked example: three queries, three keys, one score at a time")
    draw_trace(top, traces)
    middle.suptitle(
        "2. Handwritten digits labelled by attention: "
        f"{learned.accuracy_before:.1%} right before learning the metric, {learned.accuracy:.1%} "
        f"after, on {len(learned.labels)} held-out images"
    )
    left, right = middle.subfigures(1, 2, width_ratios=[1.7, 1])
    _draw_digits(left, learned)
    _draw_losses(right.subplots(), learned)
    bottom.suptitle("3. The formula, which holds the S x S matrix, against the tiles")
    _draw_bars(bottom, measured)
    figure.savefig(path)


def draw_trace(figure: Any, traces: dict[str, list[Step]], row: int = 0) -> None:
    """Draw into a Figure or SubFigure: tiles in order, elements moved, one row's maximum.

    Parameters
    ----------
    figure : matplotlib Figure or SubFigure
    traces : dict
        Steps of `cuflash.trace` by the name of their schedule.
    row : int, optional
        The query whose maximum is followed.
    """
    axes = figure.subplots(1, len(traces) + 2)
    for ax, (schedule, steps) in zip(axes, traces.items(), strict=False):
        _draw_order(ax, steps, f"{_TIMETABLES[schedule]}\n({schedule})")
    ax = axes[-2]
    for schedule, steps in traces.items():
        ax.plot(range(1, len(steps) + 1), [step.moved for step in steps], ".-", label=schedule)
    ax.set(title="Elements moved between\nmemory and chip so far", xlabel="step", ylim=(0, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend()
    ax.grid(alpha=0.3)
    _draw_row(axes[-1], next(iter(traces.values())), row)


def _figure(width: float, height: float) -> Any:
    # Not through pyplot: a Figure of its own needs no display and changes no global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _draw_order(ax: Any, steps: Sequence[Step], title: str) -> None:
    """The queries x keys plane, each tile coloured and numbered by when it is visited."""
    edges = [
        sorted({edge for s in spans for edge in (s.start, s.stop)})
        for spans in ([step.queries for step in steps], [step.keys for step in steps])
    ]
    order = np.zeros([len(e) - 1 for e in edges])
    centres = []
    for n, step in enumerate(steps, 1):
        order[edges[0].index(step.queries.start), edges[1].index(step.keys.start)] = n
        centre = [(s.start + s.stop - 1) / 2 for s in (step.keys, step.queries)]
        centres.append(centre)
        if len(steps) <= 64:
            circle = {"boxstyle": "circle", "facecolor": "white", "edgecolor": "none"}
            ax.text(*centre, str(n), ha="center", va="center", bbox=circle)
    # Row i covers i - 0.5 to i + 0.5, so that ticks sit in the middle; the scale ends above the
    # last step, where the colours are still light.
    x, y = (np.array(e) - 0.5 for e in (edges[1], edges[0]))
    shading = {"cmap": "Blues", "vmin": 0, "vmax": 1.6 * len(steps), "edgecolors": "white", "lw": 2}
    ax.pcolormesh(x, y, order, **shading)
    ax.plot(*zip(*centres, strict=True), color="tab:orange", lw=1.5)
    ax.set(title=title, xlabel="key", ylabel="query", aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    ax.invert_yaxis()


def _draw_row(ax: Any, steps: Sequence[Step], row: int) -> None:
    """Running maximum of one query, with the factor that each visit rescales older sums by."""
    visits = [step for step in steps if step.queries.start <= row < step.queries.stop]
    m = [step.m[row - step.queries.start] for step in visits]
    factors = [step.rescale[row - step.queries.start] for step in visits]
    ax.step(range(len(m)), m, "o-", where="mid", color="tab:green")
    for i, factor in enumerate(factors):
        text = "start" if i == 0 else f"$\\times$ {factor:.3g}"
        offset = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        ax.annotate(text, (i, m[i]), **offset)
    title = f"Largest score of query {row} so far,\nand the factor on its older sums"
    ax.set(title=title, xlabel="keys taken in", xlim=(-0.6, len(m) - 0.4))
    ax.set_xticks(range(len(m)), [span(step.keys) for step in visits])
    ax.margins(y=0.3)
    ax.grid(alpha=0.3)


def _draw_digits(figure: Any, learned: Learned) -> None:
    """Held-out images: the first ones, and those whose right label got the least weight."""
    rows = np.arange(len(learned.labels))
    hardest = np.argsort(learned.probabilities[rows, learned.labels])[:_SHOWN]
    axes = figure.subplots(2, _SHOWN)
    for ax, i in zip(axes.flat, (*rows[:_SHOWN], *hardest), strict=True):
        p, label = learned.probabilities[i], learned.labels[i]
        guess = p.argmax()
        ax.imshow(learned.images[i].reshape(8, 8), cmap="gray_r")
        ax.set(xticks=[], yticks=[])
        text = f"{guess}\n{p[guess]:.0%} sure"
        if guess == label:
            ax.set_xlabel(text, color="tab:green")
        else:
            ax.set_xlabel(f"{text}\nit is {label}", color="tab:red")
    for ax, text in zip(axes[:, 0], ("first ones", "hardest ones"), strict=True):
        ax.set_ylabel(text)


def _draw_losses(ax: Any, learned: Learned) -> None:
    ax.plot(learned.train_loss, label="training: half by the other half")
    ax.plot(learned.validation_loss, label="validation")
    kept = learned.validation_loss[learned.chosen]
    ax.plot(learned.chosen, kept, "o", color="tab:orange", label=f"kept: step {learned.chosen}")
    ax.set(yscale="log", xlabel="gradient steps", ylabel="loss, -log p(right label)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend()
    ax.grid(alpha=0.3)


def _draw_bars(figure: Any, measured: Sequence[Measured]) -> None:
    """Error, time and memory by length, on logarithmic scales: a bar for each way and dtype."""
    series = list(dict.fromkeys((m.way, m.dtype) for m in measured))
    ways, dtypes = (list(dict.fromkeys(column)) for column in zip(*series, strict=True))
    lengths = list(dict.fromkeys(m.length for m in measured))
    panels = {
        "Largest error against float64": lambda m: m.error,
        "Time (ms)": lambda m: m.seconds * 1e3,
        "Peak memory beyond the inputs (MiB)": lambda m: m.peak_bytes / 2**20,
    }
    width = 0.8 / len(series)
    axes = figure.subplots(1, len(panels))
    for ax, (title, number) in zip(axes, panels.items(), strict=True):
        for n, (way, dtype) in enumerate(series):
            mine = [m for m in measured if (m.way, m.dtype) == (way, dtype)]
            x = [lengths.index(m.length) + (n + 0.5) * width - 0.4 for m in mine]
            paint = {"color": f"C{ways.index(way)}", "alpha": 1 / (1 + dtypes.index(dtype))}
            label = f"{way}, {dtype}"
            bars = ax.bar(x, [number(m) for m in mine], width, label=label, **paint)
            rotation = 90 if len(series) > 3 else 0
            ax.bar_label(bars, fmt=_short, fontsize=8, padding=2, rotation=rotation)
        numbers = [number(m) for m in measured]
        top = np.nanmax(numbers)
        floor = 10 ** np.floor(np.log10(np.nanmin(numbers)) - 0.1)  # bars start at a power of 10
        ax.set(title=title, xlabel="queries and keys, S")
        ax.set(yscale="log", ylim=(floor, top * (top / floor) ** 0.2))  # room for the labels
        ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)


def _short(x: float) -> str:
    return f"{x:.1e}" if x < 1e-3 else f"{x:.2g}" if x < 10 else f"{x:.0f}"
