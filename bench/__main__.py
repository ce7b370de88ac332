"""python -m bench: time attention here, beside the formula in plain arrays and PyTorch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import report as reporting
from .cases import Case, add_options, select
from .contenders import Contender, contenders
from .measure import Cpu, Gpu, ceilings
from .run import Device, run_case
from .sweep import candidates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Times attention on the same inputs, in turn, after checking every result "
        "against the float64 formula. Needs rich, and matplotlib for --plot.",
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), help="default: gpu if CuPy finds one")
    add_options(parser, "the device's")
    add("--only", action="append", default=[], metavar="TEXT", help="contenders with TEXT; repeats")
    add("--skip", action="append", default=[], metavar="TEXT", help="none with TEXT; repeats")
    add("--seconds", type=float, default=0.2, help="of each measurement, about")
    add("--seed", type=int, default=0, help="of the random inputs")
    add("--sweep", metavar="BACKEND", help="time configurations of one backend of cuflash")
    add("--grid", nargs="+", default=[], metavar="FIELD=V,V", help="configurations for --sweep")
    add("--json", type=Path, metavar="FILE", help="everything, raw times too; kept case by case")
    add("--markdown", type=Path, metavar="FILE", help="the tables for a README")
    add("--plot", type=Path, metavar="FILE", help="TFLOP/s against length, as PNG, SVG or PDF")
    add("--load", type=Path, metavar="FILE", help="show what --json kept instead of measuring")
    add("--list", action="store_true", help="print the names of the cases and stop")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.load:
        _show(reporting.Report.load(options.load), options)
        return 0
    gpu = options.device == "gpu" or (options.device is None and _gpu_is_here())
    cases = select(options.set or ["gpu" if gpu else "cpu"], options.case)
    if not cases:
        parser.error(f"no case has these words: {options.case}; --list shows the names")
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    device = Gpu() if gpu else Cpu()
    try:
        plan = {case: _contenders(case, device, options) for case in cases}
    except ValueError as unusable:
        parser.error(str(unusable))
    report = _measured(device, plan, options)
    _show(report, options)
    ours = [r for r in report.results if r.contender.startswith("cuflash") and not options.sweep]
    return any(r.status in ("wrong", "failed") for r in ours)


def _gpu_is_here() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def _contenders(case: Case, device: Device, options: argparse.Namespace) -> list[Contender]:
    if options.sweep:
        return candidates(options.sweep, case, device.kind, options.grid)
    return contenders(device.kind, options.only, options.skip)


def _measured(
    device: Device, plan: dict[Case, list[Contender]], options: argparse.Namespace
) -> reporting.Report:
    from rich.console import Console
    from rich.progress import Progress

    report = reporting.Report(reporting.header(device), device.unit, device.per_second, {}, [])
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("ceilings", total=len(plan))
        dtypes = list(dict.fromkeys(case.dtype for case in plan))
        report.ceilings |= ceilings(device, dtypes, options.seconds)
        for case, who in plan.items():
            progress.update(task, description=case.name)
            report.results += run_case(device, case, who, options.seconds, options.seed)
            report.header["versions"] = reporting.versions()  # some are imported on first use
            if options.json:
                report.save(options.json)
            progress.advance(task)
        # Clocks and neighbours change: a ceiling is the higher one of before and after.
        for name, rate in ceilings(device, dtypes, options.seconds).items():
            report.ceilings[name] = max(rate, report.ceilings[name])
    if options.json:
        report.save(options.json)
    return report


def _show(report: reporting.Report, options: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console(width=max(150, Console().width))  # a folded row beats a row cut short
    show = reporting.show_sweep if options.sweep else reporting.show
    show(report, console)
    if options.markdown:
        options.markdown.write_text(reporting.markdown(report))
    if options.plot:
        reporting.plot(report, options.plot)


if __name__ == "__main__":
    sys.exit(main())
