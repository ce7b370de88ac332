"""The CUDA kernels themselves, run on CPU threads: right numbers on a machine without a GPU.

`cuda_on_cpu.h` stands for CUDA, and `common_on_cpu.cuh` for the PTX of `common.cuh`; all else is
what NVRTC gets.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cases import Run, case, dtype_of

from cuflash import _compile, api, cuda_backend
from cuflash.cuda_backend import Config, Tiles

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C++20 compiler and a folder with the sources for it, or a skip."""
    compiler = shutil.which("g++")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    program = folder / "probe.cpp"
    program.write_text("#include <barrier>\nint main() {}\n")
    probe = [compiler, "-std=c++20", program, "-o", folder / "probe"]
    if compiler is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs g++ with C++20 to run CUDA sources on the CPU")
    shutil.copytree(_compile.SOURCES, folder / "src")
    shutil.copy(HERE / "common_on_cpu.cuh", folder / "src" / "common.cuh")
    return compiler, folder


def compiled(compiler, variant):
    """A function (grid, block, params) that runs the variant's kernel."""
    compiler, folder = compiler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compile, "SOURCES", folder / "src")
        source = _compile._inlined(variant.file, set())
    source = re.sub(r"extern __shared__ __align__\(\d+\) char memory\[\];", "", source)
    program = folder / f"{abs(hash(variant))}.cpp"
    program.write_text(
        f'#include "{HERE / "cuda_on_cpu.h"}"\n{source}\n'
        'extern "C" void run(int grid, int block, const Params* params) '
        f"{{ launch({variant.entry}, grid, block, *params); }}\n"
    )
    library = program.with_suffix(".so")
    # With multiplication and addition in one step, as on a GPU.
    flags = ["-O1", "-fexpensive-optimizations", "-ffp-contract=fast", "-march=native"]
    flags += ["-std=c++20", "-w", "-fPIC", "-shared", "-pthread"]
    macros = [f"-D{name}={value}" for name, value in variant.macros]
    subprocess.run([compiler, *flags, *macros, program, "-o", library], check=True)
    return ctypes.CDLL(str(library)).run


@pytest.fixture
def on_cpu(compiler, monkeypatch):
    """cuda_backend with its launches going to the CPU, for NumPy arrays."""

    def kernel(device, variant):
        run = compiled(compiler, variant)
        return lambda grid, block, args, shared_mem: run(
            grid[0], block[0], args[0].ctypes.data_as(ctypes.c_void_p)
        )

    monkeypatch.setattr(cuda_backend, "_kernel", kernel)
    for cached in (cuda_backend._forward_plan, cuda_backend._backward_plan):
        cached.cache_clear()
    yield cuda_backend
    for cached in (cuda_backend._forward_plan, cuda_backend._backward_plan):
        cached.cache_clear()


class Device:
    """A NumPy array as cuda_backend sees a CuPy one."""

    def __init__(self, array):
        self.strides, self.shape = array.strides, array.shape
        self.data = self
        self.ptr, self.device_id = array.ctypes.data, 0


CASES = [
    (case(21, 37, d=24, dv=40, batch=1, heads=2, heads_kv=1), Tiles(16, 32, 1, slice=32)),
    (case(37, 21, batch=1, heads=2, heads_kv=1, causal=True, softcap=2.0), Tiles(32, 32, 2)),
    (case(37, 70, d=64, dv=32, heads=2, heads_kv=2, layout="contiguous", window=(9, 3)),
     Tiles(32, 64, 1)),
    (case(70, 50, d=100, dv=40, batch=1, heads=4, heads_kv=2, layout="contiguous",
          causal="top_left"), Tiles(32, 32, 2, slice=32, whole=False)),
    (case(20, 33, d=9, dv=5, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True),
     Tiles(16, 32, 1, slice=16)),
    (case(20, 33, d=40, dv=6, batch=1, heads=1, heads_kv=1, dtype="float64", scale=-0.5,
          layout="contiguous", window=(3, None)), Tiles(16, 32, 2, slice=32)),
    (case(35, 33, d=40, dv=70, batch=1, heads=1, heads_kv=1, dtype="float64", layout="bshd",
          causal="top_left"), Tiles(16, 32, 1, slice=32)),
    (case(20, 33, d=10, dv=40, batch=1, heads=2, heads_kv=1, dtype="float64", softcap=2.0),
     Tiles(16, 32, 1, slice=16, whole=False)),
    (case(9, 3, d=8, dv=8, batch=1, heads=1, heads_kv=1, causal=True),
     Tiles(16, 32, 1, slice=32, whole=False)),
    (case(40, 37, d=24, dv=40, batch=1, heads=2, heads_kv=1, dtype="float16", causal=True),
     Tiles(32, 16, 1)),
    (case(37, 50, d=64, dv=96, batch=1, heads=2, heads_kv=1, dtype="bfloat16",
          layout="contiguous", softcap=2.0), Tiles(32, 32, 2)),
    (case(50, 33, d=32, dv=64, batch=2, heads=1, heads_kv=1, dtype="bfloat16", layout="bshd",
          window=(9, 3), scale=-0.4), Tiles(32, 16, 2, 1)),
    (case(20, 30, d=136, dv=24, batch=1, heads=1, heads_kv=1, dtype="float16",
          layout="contiguous"), Tiles(16, 16, 1)),
]  # fmt: skip


def forward(backend, tiles, q, k, v, *options):
    problem, q, k, v = api.canonical(q, k, v, *options)
    config = Config(tiles, tiles, tiles)
    out = np.full((*q.shape[:-1], problem.dv), np.nan, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, problem.compute)
    pointers, strides, aligned = backend._described([Device(x) for x in (q, k, v, out)])
    plan = backend._forward_plan(0, problem, config, strides, aligned)
    backend._launch(plan, pointers, (lse.ctypes.data,))
    return problem, config, out, lse


@pytest.mark.parametrize(("case", "tiles"), CASES, ids=str)
def test_kernels(case, tiles, on_cpu):
    run = Run(case, np)
    scale, causal, window, softcap = (
        run.options.get(name) for name in ("scale", "causal", "window", "softcap")
    )
    q, k, v = run.q, run.k, run.v
    problem, config, out, lse = forward(
        on_cpu, tiles, q, k, v, scale, causal or False, window, softcap
    )
    run.check_forward(out, lse)
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    lse_log2, delta = np.full((2, *lse.shape), np.nan, problem.compute)
    operands = [Device(x) for x in (q, k, v, out, run.dout, dq, dk, dv)]
    pointers, strides, aligned = on_cpu._described(operands)
    plan = on_cpu._backward_plan(0, problem, config, strides, aligned)
    on_cpu._launch(plan, pointers, [x.ctypes.data for x in (lse, run.dlse, lse_log2, delta)])
    run.check_backward((dq, dk, dv))


def test_scores_whose_rounding_alone_overflows_an_exponential(on_cpu):
    # 1.4e11 in base-2 units, where floats lie 16,384 apart.
    x = np.full((1, 1, 1, 64), 133120, dtype_of("bfloat16"))
    _, _, out, lse = forward(on_cpu, Tiles(16, 16, 1), x, x, x, None, False, None, None)
    assert (out == x).all() and lse == np.float32(133120.0**2 * 8)
