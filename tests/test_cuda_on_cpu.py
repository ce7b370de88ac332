"""The CUDA kernels themselves, run on CPU threads: right numbers on a machine without a GPU.

`cuda_on_cpu.h` and `.cpp` stand for CUDA, and `common_on_cpu.cuh`, `hopper_on_cpu.cuh` and
`wgmma_on_cpu.cuh` for the PTX of those headers; all else is what NVRTC gets.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Run, case, close, dtype_of, eps, normal, peak

from cuflash import (
    _compile,
    api,
    attention_reference,
    attention_reference_grad,
    cuda_backend,
    cuda_variants,
)
from cuflash.cuda_backend import Config
from cuflash.cuda_tiles import (
    HopperBackward,
    HopperDouble,
    HopperDoubleBackward,
    HopperTiles,
    HopperTwoPass,
    SplitTiles,
    Tiles,
    WideHopper,
    WideTiles,
)
from cuflash.problem import Problem

HERE = Path(__file__).parent


# With multiplication and addition in one step, as on a GPU.
FLAGS = ["-O1", "-fexpensive-optimizations", "-ffp-contract=fast", "-march=native"]
FLAGS += ["-std=c++20", "-w", "-fPIC", "-pthread"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A function from variants to futures of their kernels; a skip without a C++20 compiler."""
    compiler = shutil.which("g++")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    program = folder / "probe.cpp"
    program.write_text("#include <barrier>\nint main() {}\n")
    probe = [compiler, "-std=c++20", program, "-o", folder / "probe"]
    if compiler is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs g++ with C++20 to run CUDA sources on the CPU")
    shutil.copytree(_compile.SOURCES, folder / "src")
    for name in ("common", "hopper", "wgmma"):
        shutil.copy(HERE / f"{name}_on_cpu.cuh", folder / "src" / f"{name}.cuh")
    # The header, which takes longer to read than most kernels to compile, is read once.
    for name in ("cuda_on_cpu.h", "cuda_on_cpu.cpp"):
        shutil.copy(HERE / name, folder)
        subprocess.run([compiler, *FLAGS, "-c", folder / name], check=True, cwd=folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compile, "SOURCES", folder / "src")
        yield functools.cache(lambda variant: pool.submit(compiled, compiler, folder, variant))


def compiled(compiler, folder, variant):
    """A function (grid, block, params) that runs the variant's kernel."""
    source = _compile._inlined(variant.file, set())
    source = re.sub(r"extern __shared__ __align__\(\d+\) char memory\[\];", "", source)
    program = folder / f"{abs(hash(variant))}.cpp"
    maps = ("const TensorMaps* maps", "*maps") if "sm90" in variant.entry else ()
    parameters = ", ".join(("int grid, int block, const Params* params", *maps[:1]))
    arguments = ", ".join(("*params", *maps[1:]))
    cluster = 1 if variant.entry == "row_delta" else dict(variant.macros).get("CLUSTER", 1)
    program.write_text(
        f'#include "cuda_on_cpu.h"\n{source}\n'
        f'extern "C" int run({parameters}) {{\n'
        f"  return launch(grid, {cluster}, block, [&] {{ {variant.entry}({arguments}); }});\n}}\n"
    )
    library = program.with_suffix(".so")
    macros = [f"-D{name}={value}" for name, value in variant.macros]
    command = [compiler, *FLAGS, *macros, "-shared", program, folder / "cuda_on_cpu.o"]
    subprocess.run([*command, "-o", library], check=True)
    return ctypes.CDLL(str(library)).run


class Driver:
    """Instead of CUDA's: writes a TensorMap as in hopper_on_cpu.cuh."""

    @staticmethod
    def cuTensorMapEncodeTiled(at, dtype, axes, pointer, sizes, strides, box, *rest):
        words = np.frombuffer((ctypes.c_char * 128).from_address(at.value), np.int64)
        words[:5] = pointer.value, 8 if dtype == 8 else 2, *strides
        words[5:8].view(np.int32)[:5] = *sizes, box[1]
        return 0


@pytest.fixture
def on_cpu(compiler, monkeypatch):
    """cuda_backend with its launches going to the CPU, for NumPy arrays."""

    def kernel(device, variant):
        run = compiler(variant)

        def launch(grid, block, args, shared_mem):
            left = run.result()(grid[0], block[0], *args)
            assert left == 0, f"{variant.entry} does not wait for {left} copies"

        return SimpleNamespace(kernel=launch)

    monkeypatch.setattr(cuda_backend, "_kernel", kernel)
    monkeypatch.setattr(cuda_backend, "_by_address", lambda: ctypes.c_void_p)
    monkeypatch.setattr(cuda_backend, "_driver", lambda: Driver)
    monkeypatch.setattr(cuda_backend, "_limits", lambda device: (90, 227 * 1024, 2))
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
    (case(150, 130, d=16, dv=24, batch=1, heads=2, heads_kv=1, layout="contiguous",
          window=(60, 10)), Tiles(16, 32, 1, slice=32)),
    (case(9, 3, d=8, dv=8, batch=1, heads=1, heads_kv=1, causal=True),
     Tiles(16, 32, 1, slice=32, whole=False)),
    (case(40, 37, d=24, dv=40, batch=1, heads=2, heads_kv=1, dtype="float16", causal=True),
     Tiles(32, 16, 1)),
    (case(37, 50, d=64, dv=96, batch=1, heads=2, heads_kv=1, dtype="bfloat16",
          layout="contiguous", softcap=2.0), Tiles(32, 32, 2, 2, 2)),
    (case(50, 33, d=32, dv=64, batch=2, heads=1, heads_kv=1, dtype="bfloat16", layout="bshd",
          window=(9, 3), scale=-0.4), Tiles(32, 16, 2, 1)),
    (case(20, 30, d=136, dv=24, batch=1, heads=1, heads_kv=1, dtype="float16",
          layout="contiguous"), Tiles(16, 16, 1)),
    (case(290, 130, d=64, dv=64, batch=1, heads=4, heads_kv=2, dtype="float16", causal=True,
          layout="contiguous", window=(90, None)), Tiles(64, 32, 4, 3, 2)),
    (case(17, 140, d=32, dv=32, batch=2, heads=17, heads_kv=17, dtype="float16", window=(5, 3),
          layout="contiguous"), Tiles(64, 32, 4)),
    (case(20, 70, d=264, dv=40, batch=1, heads=1, heads_kv=1, dtype="float16", causal=True),
     WideTiles(64, 64, chunk=192)),
    (case(30, 40, d=72, dv=264, batch=1, heads=2, heads_kv=1, dtype="bfloat16",
          layout="contiguous", softcap=2.0, window=(20, 3)), WideTiles(64, 128, whole=False)),
    (case(66, 40, d=64, dv=512, batch=1, heads=1, heads_kv=1, dtype="bfloat16", layout="bshd",
          causal="top_left", scale=-0.4), WideTiles(64, 64, whole=False, chunk=256)),
    (case(37, 25, d=264, dv=40, batch=1, heads=2, heads_kv=1, causal=True),
     Tiles(32, 32, 2, slice=32, whole=False, chunk=160)),
    (case(40, 66, d=40, dv=300, batch=1, heads=1, heads_kv=1, layout="contiguous",
          window=(30, 5)), Tiles(32, 64, 4, across=2, whole=False, chunk=192)),
    (case(15, 30, d=300, dv=264, batch=1, heads=1, heads_kv=1, dtype="float64", softcap=2.0),
     Tiles(16, 32, 2, slice=32, whole=False, chunk=160)),
]  # fmt: skip


def canonical(q, k, v, scale=None, causal=False, window=None, softcap=None):
    """The problem, and arrays of four axes."""
    return api.canonical(q, k, v, scale, causal, window, softcap)


def forward(backend, tiles, *qkv, **options):
    problem, q, k, v = canonical(*qkv, **options)
    config = Config(tiles, tiles)
    out = np.full((*q.shape[:-1], problem.dv), np.nan, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, problem.compute)
    backend.forward(problem, config, *map(Device, (q, k, v, out, lse)))
    return problem, config, out, lse


@pytest.mark.parametrize(("case", "tiles"), CASES, ids=str)
def test_kernels(case, tiles, on_cpu):
    run = Run(case, np)
    q, k, v = run.q, run.k, run.v
    problem, config, out, lse = forward(on_cpu, tiles, q, k, v, **run.options)
    run.check_forward(out, lse)
    run.check_backward(backward(on_cpu, problem, config.backward, run, out, lse))


# float64 on tensor cores: forward and backward tiles.
_MMA = Tiles(16, 32, 1, slice=16, mma=True)
MMA_CASES = [
    (case(20, 33, d=9, dv=5, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True), _MMA,
     _MMA),
    (case(70, 90, d=40, dv=70, batch=1, heads=2, heads_kv=2, dtype="float64", layout="bshd",
          causal="top_left"), Tiles(64, 32, 2, slice=32, mma=True),
     Tiles(32, 32, 2, slice=32, mma=True)),
    (case(50, 40, d=40, dv=6, batch=1, heads=2, heads_kv=1, dtype="float64", scale=-0.5,
          layout="contiguous", window=(9, None)), Tiles(32, 16, 2, slice=32, mma=True),
     Tiles(32, 32, 4, across=2, slice=32, mma=True)),
    (case(40, 70, d=64, dv=24, batch=1, heads=1, heads_kv=1, dtype="float64", softcap=2.0,
          layout="negative"), Tiles(32, 32, 4, across=2, slice=32, whole=False, mma=True),
     Tiles(32, 64, 4, across=2, slice=32, whole=False, mma=True)),
    (case(9, 3, d=8, dv=8, batch=1, heads=1, heads_kv=1, dtype="float64", causal=True), _MMA, _MMA),
    (case(50, 130, d=20, dv=60, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True,
          scale=3.0, layout="contiguous"), Tiles(16, 32, 2, across=2, slice=64, mma=True), _MMA),
    (case(20, 70, d=264, dv=300, batch=1, heads=1, heads_kv=1, dtype="float64", causal=True),
     Tiles(32, 64, 4, across=2, slice=32, whole=False, mma=True, chunk=160),
     Tiles(32, 64, 4, across=2, slice=64, whole=False, mma=True, chunk=192)),
    # More queries than are summed up in registers.
    (case(600, 20, d=9, dv=5, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True), _MMA,
     _MMA),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tiles", "backward_tiles"), MMA_CASES, ids=str)
def test_float64_on_tensor_cores(case, tiles, backward_tiles, on_cpu):
    run = Run(case, np)
    problem, _, out, lse = forward(on_cpu, tiles, run.q, run.k, run.v, **run.options)
    run.check_forward(out, lse)
    run.check_backward(backward(on_cpu, problem, backward_tiles, run, out, lse))


HOPPER_DOUBLE_CASES = [
    (case(150, 90, d=40, dv=24, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True,
          layout="contiguous"), HopperDouble(32, 32, 1),
     HopperDoubleBackward(2, turns=True)),
    (case(70, 200, d=64, dv=64, batch=1, heads=1, heads_kv=1, dtype="float64", layout="bshd",
          causal="top_left"), HopperDouble(64, 64, 1),
     HopperDoubleBackward(2)),
    (case(130, 100, d=128, dv=100, batch=1, heads=1, heads_kv=1, dtype="float64", scale=-0.5,
          layout="contiguous", window=(9, None)), HopperDouble(64, 32, 2),
     HopperDoubleBackward(2, turns=True)),
    (case(90, 70, d=200, dv=24, batch=1, heads=1, heads_kv=1, dtype="float64", softcap=2.0,
          layout="bshd"), HopperDouble(64, 32, 1, across=2),
     HopperDoubleBackward(4)),
    (case(9, 3, d=8, dv=8, batch=2, heads=1, heads_kv=1, dtype="float64", causal=True,
          layout="contiguous"), HopperDouble(64, 32, 1, across=2),
     HopperDoubleBackward(4, turns=True)),
    (case(50, 150, d=264, dv=300, batch=1, heads=1, heads_kv=1, dtype="float64",
          layout="contiguous", window=(20, 9)), HopperDouble(128, 32, 1, across=4, groups=2),
     HopperDoubleBackward(4)),
    # Clusters of blocks; all columns of v are those of the first of four.
    (case(70, 40, d=264, dv=40, batch=1, heads=2, heads_kv=1, dtype="float64", causal=True,
          layout="contiguous"), HopperDouble(32, 32, 2, across=2, cluster=2, groups=2),
     HopperDoubleBackward(4, turns=True, cluster=4)),
    (case(20, 150, d=520, dv=300, batch=1, heads=1, heads_kv=1, dtype="float64", layout="bshd",
          window=(20, 9), softcap=2.0), HopperDouble(64, 32, 1, across=4, cluster=2),
     HopperDoubleBackward(4, cluster=2)),
]  # fmt: skip


def backward(backend, problem, tiles, run, out, lse):
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (run.q, run.k, run.v))
    operands = [run.q, run.k, run.v, out, run.dout, dq, dk, dv]
    pointers, layout = backend._described([Device(x) for x in operands])
    plan = backend._backward_plan(0, problem, tiles, *layout)
    lse_log2, delta = np.full(
        (2, cuda_variants.stats_rows(problem, tiles)), np.nan, problem.compute
    )
    rows = [x.ctypes.data for x in (lse, run.dlse, lse_log2, delta)]
    sizes = cuda_variants.workspace(problem, tiles)
    sums, counters, tickets = (np.zeros(n, "f4") for n in sizes)
    if counters.size and tickets.size:
        sums[:] = np.nan  # the first block to add stores
    rows += [sums.ctypes.data, counters.size and counters.ctypes.data, tickets.ctypes.data]
    mapped = backend.backward_mapped(pointers)
    if isinstance(tiles, SplitTiles) and tiles.parts:
        _memory, split = split_memory(problem, tiles, False)
        rows, mapped = rows + split, split[4:8]
    backend._launch(plan, pointers, rows, mapped)
    return dq, dk, dv


def split_memory(problem, tiles, forward):
    """Memory full of NaN for what split.cu writes, and pointers into it."""
    memory = np.full(cuda_variants.split_bytes(problem, tiles, forward), 255, np.uint8)
    return memory, cuda_variants.split_pointers(problem, tiles, forward, memory.ctypes.data)


def test_scores_whose_rounding_alone_overflows_an_exponential(on_cpu):
    # 1.4e11 in base-2 units, where floats lie 16,384 apart.
    x = np.full((1, 1, 1, 64), 133120, dtype_of("bfloat16"))
    _, _, out, lse = forward(on_cpu, Tiles(16, 16, 1), x, x, x)
    assert (out == x).all() and lse == np.float32(133120.0**2 * 8)


HOPPER_CASES = [
    (case(150, 190, d=24, dv=40, batch=1, heads=2, heads_kv=1, dtype="float16", layout="contiguous",
          causal=True), HopperTiles(192, 32)),
    (case(70, 100, d=72, dv=8, batch=2, heads=2, heads_kv=1, dtype="bfloat16", layout="bshd",
          softcap=2.0), HopperTiles(128, 48, 3)),
    (case(140, 90, d=64, dv=200, batch=1, heads=1, heads_kv=1, dtype="bfloat16",
          layout="contiguous", window=(40, 3)), HopperTiles(128, 16)),
    (case(80, 50, d=8, dv=9, batch=1, heads=1, heads_kv=1, dtype="float16", layout="contiguous",
          causal=True, scale=-0.4), HopperTiles(128, 32)),
    (case(64, 400, d=16, dv=16, batch=1, heads=1, heads_kv=1, dtype="bfloat16",
          layout="contiguous", scale=20.0), HopperTiles(64, 16)),  # maxima that rise and rise
    (case(150, 190, d=24, dv=40, batch=1, heads=2, heads_kv=1, causal=True),
     HopperTiles(128, 32, parts=2)),
    (case(70, 100, d=72, dv=8, batch=2, heads=2, heads_kv=1, layout="contiguous", window=(40, 3)),
     HopperTiles(128, 64, 3, parts=2)),
    (case(90, 150, d=128, dv=96, batch=1, heads=1, heads_kv=1, layout="bshd", scale=-0.4),
     HopperTiles(64, 48, parts=2)),
    (case(64, 400, d=16, dv=16, batch=1, heads=1, heads_kv=1, layout="contiguous", scale=20.0),
     HopperTiles(64, 16, parts=2)),
    (case(70, 90, d=40, dv=200, batch=1, heads=2, heads_kv=1, causal=True),
     HopperTiles(128, 32, 1, parts=2)),
    (case(70, 90, d=200, dv=136, batch=1, heads=1, heads_kv=1, layout="contiguous"),
     HopperTiles(64, 32, parts=2)),
]  # fmt: skip


@pytest.fixture
def hopper(on_cpu):
    """The forward of a Hopper GPU."""

    def forward(tiles, *qkv, **options):
        problem, q, k, v = canonical(*qkv, **options)
        out = np.full((*q.shape[:-1], problem.dv), np.nan, q.dtype)
        lse = np.full(q.shape[:-1], np.nan, problem.compute)
        counter = np.zeros(1, np.int32)
        rows = [lse.ctypes.data, 0, 0, 0, 0, 0]
        rows += [0 if on_cpu._uniform(problem) else counter.ctypes.data]
        pointers, layout = on_cpu._described([Device(x) for x in (q, k, v, out)])
        plan, mapped = on_cpu._forward_plan(0, problem, tiles, *layout), pointers
        if isinstance(tiles, SplitTiles) and tiles.parts:
            _memory, split = split_memory(problem, tiles, True)
            rows, mapped = rows + split, split[4:7]
        on_cpu._launch(plan, pointers, rows, mapped)
        return out, lse

    return forward


@pytest.mark.parametrize(("case", "tiles"), HOPPER_CASES, ids=str)
def test_hopper(case, tiles, hopper):
    run = Run(case, np)
    run.check_forward(*hopper(tiles, run.q, run.k, run.v, **run.options))


@pytest.mark.parametrize(("case", "tiles", "backward_tiles"), HOPPER_DOUBLE_CASES, ids=str)
def test_float64_on_hopper(case, tiles, backward_tiles, hopper, on_cpu):
    run = Run(case, np)
    out, lse = hopper(tiles, run.q, run.k, run.v, **run.options)
    run.check_forward(out, lse)
    problem, *_ = canonical(run.q, run.k, run.v, **run.options)
    run.check_backward(backward(on_cpu, problem, backward_tiles, run, out, lse))


@pytest.mark.parametrize(
    ("d", "tiles", "backward_tiles"),
    [(64, HopperDouble(64, 64, 2), Tiles(128, 32, 8, mma=True)),
     (100, HopperDouble(32, 32, 2), HopperDoubleBackward(2))],
)  # fmt: skip
def test_float64_scores_are_the_same_numbers_in_both_passes(
    d, tiles, backward_tiles, hopper, on_cpu
):
    # With one key lse is its score and P = exp(S - lse) is 1, if both are summed in one order.
    one = case(70, 1, d=d, dv=8, batch=1, heads=1, heads_kv=1, dtype="float64",
               layout="contiguous", magnitude=30, scale=1.0)  # fmt: skip
    run = Run(one, np)
    run.dout[:] = np.rint(8 * run.dout)
    out, lse = hopper(tiles, run.q, run.k, run.v, **run.options)
    problem, *_ = canonical(run.q, run.k, run.v, **run.options)
    *_, dv = backward(on_cpu, problem, backward_tiles, run, out, lse)
    np.testing.assert_array_equal(dv, run.dout.sum(2, keepdims=True))


def test_hopper_gives_a_head_the_same_bits_whatever_else_a_block_computes(hopper):
    # Whether maxima are looked for depends on the tiles that a block had before.
    q, k, v = (normal(np, 1, 6, n, 16, dtype="float16", seed=n) for n in (130, 200, 200))
    q[:, ::2] *= 30
    options = {"causal": True, "scale": 1.0}
    out, lse = hopper(HopperTiles(64, 16), q, k, v, **options)
    for h in range(6):
        one = (x[:, h : h + 1] for x in (q, k, v))
        alone, alone_lse = hopper(HopperTiles(64, 16), *one, **options)
        assert (alone == out[:, h : h + 1]).all() and (alone_lse == lse[:, h : h + 1]).all()


@pytest.mark.parametrize("tiles", [HopperTiles(64, 16, parts=2), WideHopper(parts=2)], ids=str)
def test_float32_on_hopper_keeps_what_is_not_finite_where_it_is(tiles, hopper):
    q, k, v = (normal(np, 1, 1, n, 24, seed=n) for n in (70, 90, 90))
    clean, clean_lse = hopper(tiles, q, k, v, causal=True)

    def changed(x, row, column, value):
        other = [a.copy() for a in (q, k, v)]
        other["qkv".index(x)][0, 0, row, column] = value
        out, lse = hopper(tiles, *other, causal=True)
        same = (out == clean)[0, 0]
        return np.isnan(out)[0, 0], same, np.isnan(lse)[0, 0], (lse == clean_lse)[0, 0]

    i, sees = np.arange(70), np.arange(70) >= 40 - 20  # key 40
    for x, row, rows in (("q", 30, i == 30), ("k", 40, sees)):
        nan, same, nan_lse, same_lse = changed(x, row, 5, np.nan)
        assert (nan == rows[:, None]).all() and (same == ~rows[:, None]).all()
        assert (nan_lse == rows).all() and (same_lse == ~rows).all()
    nan, same, *_ = changed("q", 30, 5, np.inf)  # some scores are infinite
    assert nan[30].all() and same[i != 30].all()
    for value in (np.nan, np.inf):
        nan, same, *_ = changed("v", 40, 5, value)
        assert (nan[:, 5] >= sees).all() and same[:, np.arange(24) != 5].all()
    # An infinite key: those that it scores -inf for do not see it, the others get NaN.
    nan, _, nan_lse, _ = changed("k", 40, 5, np.inf)
    want = sees & (q[0, 0, :, 5] > 0)
    assert (nan == want[:, None]).all() and (nan_lse == want).all()


@pytest.mark.parametrize("tiles", [HopperTiles(64, 32, parts=2), WideHopper(parts=2)], ids=str)
def test_float32_on_hopper_takes_numbers_of_any_size(tiles, hopper):
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, n, 40)) for n in (50, 70, 70))
    sizes = 10.0 ** rng.integers(-15, 15, (3, 70, 1))
    q, v = q * sizes[0][:50], v * sizes[1].T[:, :40]  # of rows, and of columns
    k[0, 0, 1::2] *= 1e-12
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scale = 1e-14
    out, lse = hopper(tiles, q, k, v, scale=scale)
    want, want_lse = attention_reference(q, k, v, scale=scale, return_lse=True)
    plain, plain_lse = attention_reference(q, k, v, scale=scale, return_lse=True, dtype="float32")
    columns = abs(v).max(2, keepdims=True)
    close("out", out / columns, want / columns, plain / columns, rounding=eps("float32"))
    close("lse", lse, want_lse, plain_lse, rounding=2 * eps("float32") * peak(want_lse))


def to_11_bits(x):
    """To the nearest number of the format TF32."""
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + 0xFFF + (bits >> 13 & 1) >> 13 << 13).view(np.float32)


@pytest.mark.parametrize("tiles", [HopperTiles(128, 80, parts=1), WideHopper(parts=1)], ids=str)
def test_tf32_on_hopper(tiles, hopper):
    q, k, v = (normal(np, 2, 2, n, 72, seed=n) for n in (130, 300, 300))
    out, lse = hopper(tiles, q, k, v)
    want, want_lse = attention_reference(q, k, v, return_lse=True)
    s = to_11_bits(q) @ to_11_bits(k).swapaxes(-1, -2) * np.float32(72**-0.5)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    close("out", out, want, to_11_bits(p) @ to_11_bits(v) / total, rounding=0)
    close("lse", lse, want_lse, (top + np.log(total))[..., 0], rounding=0)


@pytest.mark.parametrize("d", [64, 512])
def test_precision_chooses_the_kernel(d):
    def forward_tiles(precision):
        problem = Problem("cuda", "float32", 1, 1, 1, 9, 9, d, d, 1.0, precision=precision)
        return cuda_backend.config_for(problem, 90, 227 * 1024).forward

    assert isinstance(forward_tiles("ieee"), Tiles)
    assert [forward_tiles(p).parts for p in ("float32", "tf32")] == [2, 1]


# Forward and backward; own rows stay in shared memory or pass with the others.
WIDE_HOPPER_CASES = [
    (case(30, 150, d=264, dv=40, batch=1, heads=2, heads_kv=1, dtype="bfloat16", causal=True),
     WideHopper()),
    (case(30, 140, d=800, dv=264, batch=1, heads=1, heads_kv=1, dtype="float16",
          layout="contiguous"), WideHopper()),
    (case(70, 90, d=72, dv=384, batch=1, heads=1, heads_kv=1, dtype="bfloat16", layout="bshd",
          causal="top_left", scale=-0.4, softcap=2.0), WideHopper(chunk=256)),
    (case(20, 150, d=264, dv=40, batch=1, heads=2, heads_kv=1, causal=True), WideHopper(parts=2)),
    (case(70, 140, d=40, dv=264, batch=1, heads=1, heads_kv=1, window=(100, 3), scale=-0.4,
          layout="contiguous"), WideHopper(parts=2, chunk=256)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tiles"), WIDE_HOPPER_CASES, ids=str)
def test_wide_heads_on_hopper(case, tiles, hopper, on_cpu):
    run = Run(case, np)
    out, lse = hopper(tiles, run.q, run.k, run.v, **run.options)
    run.check_forward(out, lse)
    problem, *_ = canonical(run.q, run.k, run.v, **run.options)
    run.check_backward(backward(on_cpu, problem, tiles, run, out, lse))


HOPPER_BACKWARD_CASES = [
    (case(150, 190, d=24, dv=40, batch=1, heads=2, heads_kv=1, dtype="float16", layout="contiguous",
          causal=True), HopperBackward(128, 1, turns=True)),
    (case(90, 140, d=128, dv=72, batch=1, heads=2, heads_kv=2, dtype="bfloat16", layout="bshd",
          softcap=2.0), HopperBackward(64, 2, turns=True)),
    (case(200, 130, d=72, dv=128, batch=1, heads=1, heads_kv=1, dtype="bfloat16",
          layout="contiguous", window=(40, 3)), HopperBackward(80, 1, turns=True)),
    (case(260, 129, d=64, dv=64, batch=1, heads=2, heads_kv=2, dtype="float16", layout="contiguous",
          causal=True, scale=-0.4, softcap=3.0), HopperBackward(128, 1)),
    (case(300, 260, d=40, dv=24, batch=2, heads=3, heads_kv=3, dtype="bfloat16",
          layout="contiguous", window=(5, 40)), HopperBackward(80, 1, zeros=True)),
    (case(130, 5, d=8, dv=9, batch=1, heads=2, heads_kv=1, dtype="float16", layout="contiguous",
          causal="top_left", scale=0.0), HopperBackward(64, 1)),
    (case(150, 100, d=136, dv=72, batch=1, heads=2, heads_kv=1, dtype="bfloat16",
          layout="contiguous", causal=True), HopperTwoPass(64, 48)),
    (case(70, 140, d=40, dv=160, batch=1, heads=2, heads_kv=2, dtype="float16", layout="bshd",
          softcap=2.0, window=(60, 9)), HopperTwoPass(80, 64, 1)),
    (case(140, 70, d=24, dv=40, batch=2, heads=2, heads_kv=1, dtype="bfloat16",
          layout="contiguous", window=(5, None), scale=-0.4), HopperTwoPass(32, 32)),
    (case(150, 100, d=24, dv=40, batch=1, heads=2, heads_kv=1, causal=True),
     HopperTwoPass(64, 32, 1, parts=2)),
    (case(90, 140, d=72, dv=128, batch=1, heads=1, heads_kv=1, layout="contiguous", window=(60, 9)),
     HopperTwoPass(32, 48, 2, parts=2)),
    (case(140, 70, d=64, dv=32, batch=2, heads=2, heads_kv=1, layout="bshd", scale=-0.4,
          window=(5, None)), HopperTwoPass(128, 64, 1, parts=2)),
    (case(70, 90, d=40, dv=8, batch=1, heads=1, heads_kv=1, layout="negative", scale=20.0),
     HopperTwoPass(48, 16, parts=2)),
    (case(70, 90, d=200, dv=136, batch=1, heads=2, heads_kv=1, causal=True),
     HopperTwoPass(16, 16, 1, parts=2, queries=64)),
    (case(50, 40, d=40, dv=160, batch=1, heads=1, heads_kv=1, layout="contiguous"),
     HopperTwoPass(32, 32, 1, parts=2, queries=64)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "tiles"), HOPPER_BACKWARD_CASES, ids=str)
def test_hopper_backward(case, tiles, on_cpu):
    run = Run(case, np)
    problem, _, out, lse = forward(on_cpu, Tiles(32, 32, 2), run.q, run.k, run.v, **run.options)
    run.check_backward(backward(on_cpu, problem, tiles, run, out, lse))


def float32_gradients(backend, tiles, dout, q, k, v, forward=None, **options):
    """By the two passes for float32; `forward`: out and lse, else those of the reference."""
    problem, *_ = canonical(q, k, v, **options)
    out, lse = forward or attention_reference(q, k, v, return_lse=True, **options)
    run = SimpleNamespace(q=q, k=k, v=v, dout=dout, dlse=np.zeros(q.shape[:-1], "f4"))
    return backward(backend, problem, tiles, run, out.astype("f4"), lse.astype("f4"))


@pytest.mark.parametrize("scale", [1, 30, 1000])
def test_float32_gradients_are_as_accurate_as_the_formula_in_float32(scale, on_cpu):
    # Also where lse is large: what float32 leaves of it shows in no P.
    q, dout = (normal(np, 1, 1, 150, 64, seed=n) for n in range(2))
    k, v = (normal(np, 1, 1, 200, 64, seed=n) for n in range(2, 4))
    operands = dout, scale * q, k, v
    grads = float32_gradients(on_cpu, HopperTwoPass(64, 64, 1, parts=2), *operands)
    want, plain = (attention_reference_grad(*operands, dtype=x) for x in ("float64", "float32"))
    for name, got, w, p in zip(("dq", "dk", "dv"), grads, want, plain, strict=True):
        close(name, got, w, p, rounding=eps("float32") * peak(w))


def test_float32_gradients_of_shares_of_the_keys_add_up(on_cpu):
    # With lse of all keys P of a share do not sum to 1, and shall not.
    tiles = HopperTwoPass(64, 32, 1, parts=2)
    q, dout = (normal(np, 1, 1, 70, 40, seed=n) for n in range(2))
    k, v = (normal(np, 1, 1, 90, 40, seed=n) for n in range(2, 4))
    forward = attention_reference(q, k, v, return_lse=True)
    shares = [
        float32_gradients(on_cpu, tiles, dout, q, k[:, :, i], v[:, :, i], forward=forward)
        for i in (np.s_[:37], np.s_[37:])
    ]
    want = attention_reference_grad(dout, q, k, v)
    (dq, *first), (other_dq, *second) = shares
    got = (dq + other_dq, *(np.concatenate(x, 2) for x in zip(first, second, strict=True)))
    for g, w in zip(got, want, strict=True):
        assert peak(g - w) <= 8 * eps("float32") * peak(w)


@pytest.mark.parametrize("tiles", [HopperTwoPass(64, 32, 1, parts=2), WideHopper(parts=2)], ids=str)
def test_float32_gradients_of_numbers_of_any_size(tiles, on_cpu):
    rng = np.random.default_rng(5)
    q, dout = (rng.standard_normal((1, 1, 70, 40)) for _ in range(2))
    k, v = (rng.standard_normal((1, 1, 90, 40)) for _ in range(2))
    sizes = 10.0 ** rng.integers(-9, 9, (2, 70, 1))
    q, dout = q * sizes[0], dout * sizes[1]
    k[0, 0, 1::2] *= 1e-12
    v *= 1e6
    operands = [x.astype(np.float32) for x in (dout, q, k, v)]
    options = {"scale": 1e-8}
    grads = float32_gradients(on_cpu, tiles, *operands, **options)
    want, plain = (
        attention_reference_grad(*operands, dtype=x, **options) for x in ("float64", "float32")
    )
    for name, got, w, p in zip(("dq", "dk", "dv"), grads, want, plain, strict=True):
        rows = sizes[1] if name == "dq" else 1  # those of dq are as large as those of dout
        close(name, got / rows, w / rows, p / rows, rounding=eps("float32") * peak(w / rows))


@pytest.mark.parametrize("tiles", [HopperTwoPass(32, 16, 1, parts=2), WideHopper(parts=2)], ids=str)
def test_float32_gradients_keep_what_is_not_finite_where_it_is(tiles, on_cpu):
    # No element is NaN or infinite that the formula in float32 has finite.
    q, dout = (normal(np, 1, 1, 70, 24, seed=n) for n in range(2))
    k, v = (normal(np, 1, 1, 90, 24, seed=n) for n in range(2, 4))

    def gradients(operands):
        with np.errstate(all="ignore"):
            forward = attention_reference(*operands[1:], causal=True, return_lse=True)
            plain = attention_reference_grad(*operands, causal=True, dtype="float32")
        return float32_gradients(on_cpu, tiles, *operands, causal=True, forward=forward), plain

    for n, row in enumerate((30, 40, 50, 50)):
        for value in (np.nan, np.inf):
            operands = [x.copy() for x in (dout, q, k, v)]
            operands[n][0, 0, row, 5] = value
            for got, plain in zip(*gradients(operands), strict=True):
                finite = np.isfinite(plain)
                assert (abs(got - plain)[finite] <= 1e-5).all(), (n, value)
