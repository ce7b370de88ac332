"""python -m bench.counters: what an NVIDIA GPU counted in cuflash's kernels, by Nsight Compute.

The bytes that a call cannot do without (Problem.nbytes) stand beside those that memory moved.
Needs `ncu` on the PATH, and leave to read counters. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys

from .cases import Case, add_options, select
from .contenders import cuflash

#: Column: counter, and what to divide by.
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e3),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "exp %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "fma %": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", 1),
    "alu %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", 1),
    "fp64 %": ("sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active", 1),
    "lsu shared %": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
        1,
    ),
    "L2 GB": ("lts__t_bytes.sum", 1e9),
    "read GB": ("dram__bytes_read.sum", 1e9),
    "written GB": ("dram__bytes_write.sum", 1e9),
}


def profiled(name: str) -> None:
    """One warm call of the case between the marks that Nsight Compute waits for."""
    import cupy

    case = Case.parse(name)
    assert case is not None
    call = cuflash("cuda", "cupy").prepare(case, case.inputs(cupy, 0))
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStop()


def counted(name: str) -> dict[str, dict[str, float]]:
    """For each kernel of a call, in order: counter and value."""
    metrics = ",".join(counter for counter, _ in COUNTERS.values())
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--metrics", metrics]
    command += [sys.executable, "-m", "bench.counters", "--profiled", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return parsed(done.stdout)


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Of Nsight Compute's CSV, which is preceded by lines about its progress."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        kernel = f"{int(row['ID']) + 1}. {row['Kernel Name'].split('(')[0]}"
        value = row["Metric Value"].replace(",", "")
        kernels.setdefault(kernel, {})[row["Metric Name"]] = float(value)
    return kernels


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.counters",
        description="What an NVIDIA GPU counted in cuflash's kernels, by Nsight Compute.",
    )
    add_options(parser, "tokens16k")
    parser.add_argument("--profiled", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.profiled:
        profiled(options.profiled)
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", no_wrap=True)
    for column in COUNTERS:
        table.add_column(column, justify="right", no_wrap=True)
    for case in select(options.set or ["tokens16k"], options.case):
        table.add_section()
        needed = case.problem("cuda").nbytes(case.backward) / 1e9
        table.add_row(f"{case.name}: {needed:.3g} GB at least", style="bold")
        for kernel, values in counted(case.name).items():
            cells = [f"{values[counter] / unit:.3g}" for counter, unit in COUNTERS.values()]
            table.add_row(kernel, *cells)
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
