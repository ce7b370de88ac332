"""What a run shows: a header, tables for the terminal and for Markdown, JSON, a picture."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Case
from .run import Device, Result

_VERSIONS = ("cuflash", "numpy", "cupy", "numba_cuda", "torch", "jax", "flash_attn3_jax")
#: Settings that change what is measured; they belong to the command.
_SETTINGS = (
    "CUPY_TF32",
    "NVIDIA_TF32_OVERRIDE",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


@dataclass
class Report:
    """A whole run. `ceilings` are FLOP/s by dtype, and bytes/s as "copy"."""

    header: dict[str, str]
    unit: str
    per_second: float
    ceilings: dict[str, float]
    results: list[Result]

    def save(self, path: Path) -> None:
        data = vars(self) | {"results": [result.to_json() for result in self.results]}
        path.write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        data = json.loads(path.read_text())
        results = [Result.from_json(result) for result in data.pop("results")]
        return cls(**data, results=results)

    def cases(self) -> dict[Case, list[Result]]:
        """Results by case; refusals are left out, as they are told apart by `remarks`."""
        found: dict[Case, list[Result]] = {}
        for result in self.results:
            if result.status != "refused":
                found.setdefault(result.case, []).append(result)
        return found

    def rate(self, result: Result) -> float:
        return result.flops_per_second / self.per_second

    def share(self, result: Result) -> str:
        """Percent of the measured matrix product."""
        return f"{100 * result.flops_per_second / self.ceilings[result.case.dtype]:.0f} %"

    def ceiling_lines(self) -> list[str]:
        lines = [
            f"ceiling {dtype}: matrix product {flops / self.per_second:.3g} {self.unit}"
            for dtype, flops in self.ceilings.items()
            if dtype != "copy"
        ]
        return [*lines, f"ceiling memory: copy {self.ceilings['copy'] / 1e9:.3g} GB/s"]

    def remarks(self) -> list[str]:
        """Why contenders refused, failed or were wrong, each reason once."""
        said: dict[tuple[str, str, str], list[str]] = {}
        for r in self.results:
            note = f"error {r.error:.1e}" if r.status == "wrong" else r.note
            if r.status != "ok":
                said.setdefault((r.contender, r.status, note), []).append(r.case.dtype)
        return [
            f"{who}: {what} in {len(dtypes)} cases of {', '.join(dict.fromkeys(dtypes))}: {note}"
            for (who, what, note), dtypes in said.items()
        ]


def header(device: Device, module: str = "bench") -> dict[str, str]:
    """Machine, date and command, and the versions of what has been imported so far."""
    set_here = [name for name in _SETTINGS if name in os.environ]
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in set_here]
    return device.describe() | {
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join([*settings, shlex.join(["python", "-m", module, *sys.argv[1:]])]),
    }


def versions() -> str:
    found = [f"python {platform.python_version()}"]
    for name in _VERSIONS:
        if name in sys.modules:
            found.append(f"{name} {sys.modules[name].__version__}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.backends.cudnn.is_available():
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(found)


# --- The terminal. ---


def show(report: Report, console: Any) -> None:
    """Header, one row for each case and contender, and remarks, on a rich Console."""
    from rich.table import Table

    _lines(console, [f"{name}: {value}" for name, value in report.header.items()])
    _lines(console, report.ceiling_lines())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("dtype", "B x H", "S", "d", "mask", "pass", "who"):
        table.add_column(column, no_wrap=True)
    numbers = (report.unit, "spread", "ceiling", "GB/s", "time", "extra mem.", "host", "error")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for case, results in report.cases().items():
        table.add_section()
        best = max((report.rate(r) for r in results if r.seconds), default=None)
        for i, r in enumerate(results):
            cells = _case_cells(case) if i == 0 else [""] * 6
            bold = "bold" if r.seconds and report.rate(r) == best else None
            table.add_row(*cells, r.contender, *_number_cells(report, r), style=bold)
    console.print(table)
    _lines(console, report.remarks())


def show_sweep(report: Report, console: Any) -> None:
    """For each case the configurations, fastest first."""
    from rich.table import Table

    for case, results in report.cases().items():
        table = Table(title=case.name, box=None, title_justify="left")
        table.add_column("configuration", no_wrap=True)
        for column in (report.unit, "spread", "ceiling", "time", "error"):
            table.add_column(column, justify="right")
        for r in sorted(results, key=lambda r: r.median or float("inf")):
            speed, spread, share, _, time, _, _, off = _number_cells(report, r)
            table.add_row(r.contender, speed, spread, share, time, off)
        console.print(table)
    _lines(console, report.remarks())


def _lines(console: Any, lines: list[str]) -> None:
    """As they are: not folded, so that a command can be copied."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _case_cells(case: Case) -> list[str]:
    (h, hkv), (sq, sk), (d, dv) = case.sizes()
    heads = f"{case.batch} x {h}" + (f":{hkv}" if h != hkv else "")
    length = f"{sq}" if sq == sk else f"{sq}:{sk}"
    width = f"{d}" if d == dv else f"{d}:{dv}"
    return [case.dtype, heads, length, width, case.mask, case.direction]


def _number_cells(report: Report, r: Result) -> list[str]:
    error = "" if r.error is None else f"{r.error:.0e}"
    if not r.seconds:
        return [r.status, "", "", "", "", _bytes(r.extra_bytes), "", error]
    return [
        f"{report.rate(r):.3g}",
        f"{100 * r.spread:.0f} %",
        report.share(r),
        f"{r.bytes_per_second / 1e9:.3g}",
        _seconds(r.median),
        _bytes(r.extra_bytes),
        _seconds(r.host),
        error,
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    unit, factor = ("ms", 1e3) if value >= 1e-3 else ("us", 1e6)
    return f"{value * factor:.3g} {unit}" if value < 1 else f"{value:.3g} s"


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.3g} MB"


# --- Markdown: a row for each case, a column for each contender. ---


def markdown(report: Report) -> str:
    """Speeds, then memory, then host times where there are any, under one header."""
    lines = [f"- {name}: {value}" for name, value in report.header.items()]
    lines += [f"- {line}" for line in report.ceiling_lines()]
    lines += ["", f"{report.unit} (percent of the matrix product of that dtype); the best is bold:"]
    lines += _pivot(report, lambda r: f"{report.rate(r):.3g} ({report.share(r)})", bold=True)
    lines += ["", "Most memory in use during a call, beyond the inputs:"]
    lines += _pivot(report, lambda r: _bytes(r.extra_bytes))
    if any(result.host_seconds for result in report.results):
        lines += ["", "Host time of a warm call:"]
        lines += _pivot(report, lambda r: _seconds(r.host))
    return "\n".join(lines) + "\n"


def _pivot(report: Report, cell: Callable[[Result], str], bold: bool = False) -> list[str]:
    cases = report.cases()
    names = list(dict.fromkeys(r.contender for results in cases.values() for r in results))
    head = ["dtype", "B x H", "S", "d", "mask", "pass", *names]
    lines = ["", _row(head), _row(["---"] * 6 + ["---:"] * len(names))]
    for case, results in cases.items():
        by_name = {r.contender: r for r in results}
        best = min((r.median for r in results if r.seconds), default=None)
        cells = []
        for name in names:
            r = by_name.get(name)
            text = "" if r is None else cell(r) if r.seconds else r.status
            cells.append(f"**{text}**" if bold and r and r.seconds and r.median == best else text)
        lines.append(_row(_case_cells(case) + cells))
    return lines


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# --- The picture. ---


_WORDS = {"sk": "length", "d": "width"}
_SYMBOLS = {"sk": "S", "d": "d"}


def plot(report: Report, path: Path) -> None:
    """Speed against length, or where all are of one length, width; panels for all that differs."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    timed = [r for r in report.results if r.seconds]
    lengths, widths = ({getattr(r.case, axis) for r in timed} for axis in ("sk", "d"))
    over, fixed = ("d", "sk") if len(lengths) == 1 < len(widths) else ("sk", "d")
    panels = list(dict.fromkeys((r.case.dtype, getattr(r.case, fixed)) for r in timed))
    names = list(dict.fromkeys(r.contender for r in timed))
    size = (11, 1 + 3 * len(panels))
    figure, axes = pyplot.subplots(len(panels), 2, figsize=size, squeeze=False)
    for row, panel in zip(axes, panels, strict=True):
        for axis, direction in zip(row, ("forward", "backward"), strict=True):
            here = [
                r
                for r in timed
                if (r.case.dtype, getattr(r.case, fixed), r.case.direction) == (*panel, direction)
            ]
            _panel(report, axis, here, names, over)
            axis.set_title(f"{panel[0]}, {_SYMBOLS[fixed]} = {panel[1]}, {direction}")
    used = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(used.values(), used.keys(), ncols=4, loc="upper center", fontsize="small")
    figure.supxlabel(f"{_WORDS[over]}   ({report.header['machine']}, {report.header['date']})")
    figure.supylabel(report.unit)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / size[1]))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(report: Report, axis: Any, results: list[Result], names: list[str], over: str) -> None:
    for i, name in enumerate(names):
        for causal, style in ((False, "-"), (True, "--")):
            mine = [r for r in results if r.contender == name and r.case.causal == causal]
            # Where cases differ in batch alone, the one with more work is drawn.
            mine.sort(key=lambda r: (getattr(r.case, over), r.case.problem("cpu").flops()))
            points = {getattr(r.case, over): report.rate(r) for r in mine}
            if points:
                label = name + (", causal" if causal else "")
                axis.plot(points.keys(), points.values(), f"C{i}o{style}", label=label, ms=4)
    if results:
        ceiling = report.ceilings[results[0].case.dtype] / report.per_second
        axis.axhline(ceiling, color="gray", ls=":", label="matrix product")
    ticks = sorted({getattr(r.case, over) for r in results})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(x) for x in ticks])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
