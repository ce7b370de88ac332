"""python -m bench.power: what a GPU delivers at first, for a second, and on constants.

A GPU that has idled runs at its highest clock; at its limit of power the clock falls within some
100 ms, for all that is repeated. How far depends on the numbers too: constants change few bits.
The clock and the power are nvidia-smi's, so this needs it; the other columns are of wall time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

from . import check
from .cases import Case, Inputs, add_options, select
from .contenders import Contender, contenders
from .measure import Gpu
from .run import Device, Result, recorded, verify

_QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "-lms", "50"]
_QUERY += ["--format=csv,noheader,nounits"]
_TOGETHER = 10  # calls between two looks at the clock on the wall


class Course(NamedTuple):
    """TFLOP/s of the first calls and of the last half; MHz and watts of that half."""

    first: float
    last: float
    clock: float
    power: float


def parsed(text: str) -> list[tuple[float, float]]:
    """Of nvidia-smi's lines, MHz and watts; the last may be cut short."""
    lines = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return [(float(clock), float(power)) for clock, power in lines[:-1]]


@contextmanager
def _sampled(samples: list[tuple[float, float]]) -> Iterator[None]:
    with subprocess.Popen(_QUERY, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield
        finally:
            process.terminate()
            samples += parsed(process.communicate()[0])


def repeated(call: Callable[[], Any], flops: float, seconds: float) -> Course:
    """What `call`, warm, reaches when it is repeated for so many seconds."""
    import cupy

    device = cupy.cuda.Device()
    call()
    device.synchronize()
    time.sleep(0.5)  # the clock is up again
    rates: list[float] = []
    samples: list[tuple[float, float]] = []
    with _sampled(samples):
        begin = end = time.perf_counter()
        while end - begin < seconds:
            start = end
            for _ in range(_TOGETHER):
                call()
            device.synchronize()
            end = time.perf_counter()
            rates.append(_TOGETHER * flops / (end - start) / 1e12)
    late, seen = rates[len(rates) // 2 :], samples[len(samples) // 2 :]
    clocks, powers = zip(*seen, strict=True)
    return Course(rates[0], median(late), median(clocks), median(powers))


def courses(
    device: Device, case: Case, who: list[Contender], seconds: float
) -> Iterator[tuple[Result, list[Course]]]:
    """Of each that is right: on random numbers, and on constants."""
    flops = case.problem("cpu").flops(case.backward)
    random = case.inputs(device.xp, 0)
    constant = Inputs(*(device.xp.full_like(x, 0.5) for x in random))
    parts = check.expected(case, random)
    for contender in who:
        device.free()
        result, found = Result(case, contender.name), []
        with recorded(result), contender.around():
            verify(result, contender, random, parts)
            if result.status == "ok":
                calls = [contender.prepare(case, x) for x in (random, constant)]
                found = [repeated(call, flops, seconds) for call in calls]
        yield result, found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.power",
        description="What a GPU delivers at first, when a call is repeated, and on constants.",
    )
    add = parser.add_argument
    add_options(parser, "tokens16k")
    add("--only", action="append", default=[], metavar="TEXT", help="contenders with TEXT; repeats")
    add("--seconds", type=float, default=1.0, help="of each course")
    options = parser.parse_args(arguments)
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("case", "who"):
        table.add_column(column, no_wrap=True)
    for column in ("first TFLOP/s", "last", "MHz", "W", "constants: first", "last", "MHz", "W"):
        table.add_column(column, justify="right", no_wrap=True)
    device, who = Gpu(), contenders("cuda", options.only or ["cuflash cuda"])
    results = []
    for case in select(options.set or ["tokens16k"], options.case):
        table.add_section()
        for result, found in courses(device, case, who, options.seconds):
            cells = [f"{x:.4g}" for c in found for x in (c.first, c.last, c.clock, c.power)]
            table.add_row(case.name, result.contender, *(cells or [result.status, result.note]))
            results.append(result)
    Console(width=160).print(table)
    return any(result.status in ("wrong", "failed") for result in results)


if __name__ == "__main__":
    sys.exit(main())
