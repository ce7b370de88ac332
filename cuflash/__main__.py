"""The command line: python -m cuflash demo | info | trace."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, demo, pictures
from .api import BACKENDS, load_backend, refusal
from .numpy_backend import cores, trace
from .problem import DTYPES

_WIDTHS = (64, 128, 256)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; returns the exit status."""
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m cuflash", description="Exact tiled attention.")
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="demo | info | trace")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("demo", _demo, "Watch the algorithm, label digits with it, compare backends.")
    command.add_argument(
        "--picture", type=_picture, default=Path("cuflash-demo.png"), metavar="FILE",
        help="where to draw it all, .png, .pdf or .svg (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--quick", action="store_true", help="smaller sizes, a few seconds")

    command = add(
        "info", _info, "Show versions, devices, and which backend takes what, with which tiles."
    )
    command.add_argument(
        "--kernels", action="store_true",
        help="also compile the raw CUDA kernels: their registers and shared memory",
    )  # fmt: skip

    command = add("trace", _trace, "Print the online softmax of a small example, tile by tile.")
    command.add_argument(
        "--schedule", choices=demo.SCHEDULES, default=demo.SCHEDULES[0],
        help="which operand stays on chip (default: %(default)s)",
    )  # fmt: skip
    for name in ("--block-q", "--block-k"):
        command.add_argument(name, type=_size, default=1, metavar="N", help="default: 1")
    command.add_argument(
        "--example", choices=demo.EXAMPLES, default="worked",
        help="3 queries x 3 keys, or its first row with 100 added to the scores "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw both schedules, .png, .pdf or .svg"
    )
    return parser


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .png, .pdf or .svg, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def _need(what: str, **modules: str) -> None:
    """Exit with a hint unless the modules (by the names of their packages) are installed."""
    missing = [name for name, module in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        sys.exit(f"{what} needs {names}, not installed here: pip install 'cuflash[demo]'")


def _demo(args: argparse.Namespace) -> int:
    _need("the demo", scikit_learn="sklearn", matplotlib="matplotlib", rich="rich")
    return demo.main(args)


def _trace(args: argparse.Namespace) -> int:
    if args.picture:
        _need("--picture", matplotlib="matplotlib")
    q, k, v = demo.EXAMPLES[args.example]
    traces = {
        name: list(trace(q, k, v, args.block_q, args.block_k, name, scale=1))
        for name in demo.SCHEDULES
    }
    steps = traces[args.schedule]
    blocks = f"blocks of {args.block_q} x {args.block_k}"
    print(f"The {args.example} example, {args.schedule}, {blocks}\n")
    _print_table(demo.STEP_COLUMNS, demo.step_rows(steps))
    # The last visit of a query block leaves its final state; blocks come in the order of queries.
    last = list({step.queries.start: step for step in steps}.values())
    m, l, o = (np.concatenate([getattr(step, name) for step in last]) for name in "mlo")
    with np.printoptions(precision=3, floatmode="fixed", suppress=True):
        print("\nO = o / l:", o / l[:, None], sep="\n")
        print("P = exp(S - m) / l, as the backward pass recomputes it from two numbers a row:")
        print(np.exp(q @ k.T - m[:, None]) / l[:, None])
    if args.picture:
        title = f"The {args.example} example, {blocks} (queries x keys)"
        pictures.save_trace(args.picture, traces, title)
        print(f"\nPicture: {args.picture}")
    return 0


def _info(args: argparse.Namespace) -> int:
    cupy, why_not = demo.find_gpu()
    print(f"cuflash       {__version__}")
    print(f"Python        {platform.python_version()}, {platform.platform()}")
    for name in ("NumPy", "CuPy", "Numba", "numba-cuda", "ml_dtypes", "threadpoolctl"):
        print(f"{name:13} {_version(name)}")
    print(f"{'BLAS':13} {_blas()}")
    print(f"{'CPU':13} {cores()} cores")
    for line in [f"none: {why_not}"] if cupy is None else _gpus(cupy):
        print(f"{'GPU':13} {line}")
    _print_backends("cpu", "NumPy arrays")
    if cupy is not None:
        _print_backends("cuda", "CuPy arrays")
        if args.kernels:
            _print_kernels()
    cache = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    print("\nCompiled kernels")
    print(f"  through CuPy   {cache} (CUPY_CACHE_DIR moves it)")
    print("  through Numba  in memory: each process compiles its own")
    return 0


def _version(name: str) -> str:
    if name == "CuPy":  # its distribution is named after the CUDA version
        try:
            import cupy
        except ImportError:
            return "not installed"
        return cupy.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _blas() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown: threadpoolctl is not installed, which also holds BLAS to one thread a core"
    return "; ".join(
        f"{lib['internal_api']} {lib['version']} ({lib.get('architecture')}), "
        f"{lib['num_threads']} threads"
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    )


def _gpus(cupy: Any) -> Iterable[str]:
    for i in range(cupy.cuda.runtime.getDeviceCount()):
        p = cupy.cuda.runtime.getDeviceProperties(i)
        yield (
            f"{i}: {p['name'].decode()}, compute capability {p['major']}.{p['minor']}, "
            f"{p['totalGlobalMem'] / 2**30:.1f} GiB, "
            f"{p['sharedMemPerBlockOptin'] / 2**10:.0f} KiB of shared memory a block"
        )


def _print_backends(device: str, title: str) -> None:
    """Who takes which dtype and width, with which tiles, and why the others do not."""
    rows = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for dtype in DTYPES:
        for width in _WIDTHS:
            problem = demo.sample_problem(device, dtype, 8, 4096, width)
            takers = []
            for name in BACKENDS:
                reason = refusal(name, problem)
                if reason is None:
                    takers.append(name)
                else:
                    reasons.setdefault((name, reason), []).append(f"{dtype} {width}")
            tiles = ""
            if takers:
                module: Any = load_backend(takers[0])
                tiles = repr(module.default_config(problem))
            first, *others = takers or ["none"]
            rows.append((dtype, str(width), first, tiles, ", ".join(others) or "-"))
    print(f"\n{title}: 8 heads, 4096 queries and keys")
    _print_table(("dtype", "width", "backend", "tiles", "others that could"), rows, indent=2)
    for (name, reason), cases in reasons.items():
        which = "" if len(cases) == len(rows) else f" ({', '.join(cases)})"
        print(f"  not {name}{which}: {reason}")


def _print_kernels() -> None:
    """What ptxas made of the raw CUDA kernels on this device."""
    from . import cuda_backend

    rows = []
    for dtype in DTYPES:
        for width in _WIDTHS:
            problem = demo.sample_problem("cuda", dtype, 8, 4096, width)
            if cuda_backend.unsupported(problem) is None:
                for entry, *numbers in cuda_backend.resources(problem):
                    rows.append((dtype, str(width), entry, *(f"{n:,}" for n in numbers)))
    print("\nRaw CUDA kernels: registers and local memory a thread, shared memory a block")
    columns = ("dtype", "width", "kernel", "threads", "registers", "local", "shared")
    _print_table(columns, rows, indent=2)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 0) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(" " * indent + "  ".join(cells).rstrip())


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
    sys.exit(main())
