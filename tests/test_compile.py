"""The CUDA sources, compiled for every architecture on a machine that needs no GPU."""

from __future__ import annotations

import heapq
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cuflash import _compile, cuda_backend, cuda_tiles, cuda_variants
from cuflash.problem import Problem

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC; the `test` extra brings both")
nvidia = pytest.importorskip("nvidia", reason="needs nvdisasm; the `test` extra brings it")

KIB = 1024
#: Shared memory that a block may have, in KiB.
ARCHITECTURES = {
    "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99,
}  # fmt: skip
#: Bytes that may be spilled: a few loop-invariant values where 255 registers are all in use. The
#: tiles that spill nothing measured 5 to 10 % slower on an H200 (docs/kernels.md).
#: bwd_sm90: of the copying thread, once for each tile of keys. wide_sm90: float32, 76 in out, 12 in
#: dK, 96 in dQ; 28, 20 and 84 when addresses were in other than uniform registers, and 3 to 6 %
#: slower. bwd_simt: 12 in float64 on 7.5. wide_sm80: 20 in out.
#: fwd_simt/mma: float64 of 64 columns, where P V is summed tile by tile; bwd_simt/mma: with a
#: softcap, else 28. fwd_sm90_fp64, bwd_sm90_fp64: a width of 128; forward with slots of half the
#: size 196, and slower.
SPILLS = {
    "fwd_sm80": 0, "bwd_sm80": 40, "store_dq": 0, "fwd_simt": 0, "fwd_simt/mma": 32,
    "bwd_simt": 12, "bwd_simt/mma": 220, "fwd_sm90": 0, "bwd_sm90": 36, "bwd_sm90_kv": 0,
    "bwd_sm90_q": 0, "split": 0, "split_rows": 0, "wide_sm80": 20, "wide_sm90": 96,
    "fwd_sm90_fp64": 960, "bwd_sm90_fp64": 896,
}  # fmt: skip


def rows(arch: str, dtype: str) -> list[cuda_variants.Variant]:
    """Every variant of the tile tables that a device of this architecture may choose."""
    limit = ARCHITECTURES[arch] * KIB
    capability = int(arch.removeprefix("sm_").removesuffix("a"))
    forward_table, backward_table = cuda_tiles.tables(dtype, capability)

    def problem(width, softcap=None):
        return Problem("cuda", dtype, 1, 1, 1, 9, 9, width, width, 1.0, softcap=softcap)

    def with_widths(table):
        for row, candidates in table.items():
            for width in (512, 1024) if row == 1024 else (row,):
                for tiles in candidates:
                    yield width, tiles

    forward = [
        cuda_variants.forward_variant(problem(width), tiles, True)
        for width, tiles in with_widths(forward_table)
    ]

    def steps(problem, tiles, vector):
        variants = [v for v, _ in cuda_variants.backward_steps(problem, tiles, vector)]
        return [v for v in variants if v.entry != "row_delta"]

    backward = [steps(problem(width), tiles, True) for width, tiles in with_widths(backward_table)]
    if arch == "sm_90a":
        if dtype == "float64":
            forwards = (cuda_tiles.FORWARD_HOPPER_64,)
            backwards, all_parts, softcap = cuda_tiles.BACKWARD_HOPPER_64, (), 2.0
        elif dtype == "float32":
            forwards = cuda_tiles.FORWARD_HOPPER_32, cuda_tiles.FORWARD_HOPPER_TF32
            backwards, all_parts, softcap = cuda_tiles.BACKWARD_HOPPER_32, (2, 1), None
        else:
            forwards = cuda_tiles.FORWARD_HOPPER, cuda_tiles.FORWARD_HOPPER_SHORT
            backwards, all_parts, softcap = cuda_tiles.BACKWARD_HOPPER, (0,), 2.0
        wide = [
            [(width, cuda_tiles.WIDE_HOPPER._replace(parts=parts)) for width in (320, 512, 1024)]
            for parts in all_parts
        ]
        forward += [
            variant
            for rows in (*(table.items() for table in forwards), *wide)
            for width, tiles in rows
            for cap, vector in ((None, True), (softcap if dtype == "float64" else None, False))
            for variant, _ in cuda_variants.forward_steps(problem(width, cap), tiles, vector)
        ]
        backward += [
            steps(problem(width, cap), tiles, vector)
            for width, tiles in (*backwards.items(), *(wide[0] if wide else ()))
            for cap, vector in ((None, True), (softcap, False))
        ]
        if dtype in cuda_variants.ELEMENTS:
            long = cuda_tiles.BACKWARD_HOPPER_LONG.items()
            backward += [steps(problem(w), tiles, v) for w, tiles in long for v in (True, False)]
    forward_limit = 48 * KIB if arch == "sm_75" else limit
    return [v for v in forward if v.shared_bytes <= forward_limit] + [
        v for steps in backward if max(v.shared_bytes for v in steps) <= limit for v in steps
    ]


def of_sources(function, variants: list[cuda_variants.Variant]) -> list:
    """For each variant, the function of its file and macros: several at once, none twice."""
    sources = list(dict.fromkeys((v.file, v.macros) for v in variants))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(sources, pool.map(lambda s: function(*s), sources), strict=True))
    return [results[v.file, v.macros] for v in variants]


def compiled(file: str, macros: _compile.Macros, arch: str) -> tuple[str, str]:
    """The compiler's log, and what Hopper is to run."""
    code, log = _compile.cubin(file, macros, arch)
    return log, disassembled(code) if "sm90" in file else ""


def report(entry: str, log: str) -> tuple[int, int, list[str]]:
    """Registers, spilled bytes and serialisation warnings of ptxas."""
    (part,) = (b for b in log.split("Compiling entry function")[1:] if f"'{entry}'" in b)
    registers = int(re.search(r"Used (\d+) registers", part)[1])
    spilled = int(re.search(r"(\d+) bytes spill stores", part)[1])
    return registers, spilled, re.findall(r"C75\d\d.*", log)


def disassembled(code: bytes) -> str:
    wheels = [str(p) for n in nvidia.__path__ for p in Path(n).glob("cu*/bin/nvdisasm")]
    nvdisasm = shutil.which("nvdisasm") or wheels[0]
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        return subprocess.run(
            [nvdisasm, "--no-dataflow", file.name], capture_output=True, text=True, check=True
        ).stdout


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_row_compiles_within_its_budget(arch):
    # Of the two 16-bit dtypes one: registers, spills, warnings, products and waits of all 102
    # variants were the same for both, and the gate is half of the suite's time.
    dtypes = "bfloat16" if arch == "sm_90a" else "float16", "float32", "float64"
    variants = [v for dtype in dtypes for v in rows(arch, dtype)]
    assert len(variants) >= 20
    results = of_sources(lambda file, macros: compiled(file, macros, arch), variants)
    for variant, (log, assembled) in zip(variants, results, strict=True):
        registers, spilled, warnings = report(variant.entry, log)
        assert registers * variant.threads <= 65536, variant
        on_tensor_cores = f"{variant.entry}/mma" if dict(variant.macros).get("MMA") else ""
        assert spilled <= SPILLS.get(on_tensor_cores, SPILLS[variant.entry]), variant
        assert not warnings, (variant, warnings)
        # Products are waited for in batches: ptxas may serialise them without a warning.
        products, waits = map(assembled.count, ("HGMMA", "WARPGROUP.DEPBAR"))
        assert 3 * waits <= products, (variant, products, waits)


@pytest.mark.parametrize("dtype", cuda_tiles.FORWARD)
@pytest.mark.parametrize(("capability", "limit"), [(75, 64), (80, 163), (86, 99), (90, 227)])
@pytest.mark.parametrize("d", [1, 32, 64, 65, 128, 160, 192, 224, 256, 264, 512, 784, 1024])
def test_every_device_and_width_has_tiles(d, capability, limit, dtype):
    p = Problem("cuda", dtype, 1, 1, 1, 9, 9, d, max(257 - d, 16), 1.0)
    config = cuda_backend.config_for(p, capability, limit * KIB)
    forward = cuda_variants.forward_steps(p, config.forward, True)
    for variant, _ in (*forward, *cuda_variants.backward_steps(p, config.backward, True)):
        assert variant.shared_bytes <= limit * KIB


@pytest.mark.parametrize(
    ("heads", "s", "d"),
    [(512, 512, 128), (128, 2048, 128), (64, 2048, 256), (16, 8192, 256), (17, 8192, 128)],
)
def test_the_tiles_of_a_causal_call_end_together(heads, s, d):
    # As QueryWork of work.cuh orders them, each to the multiprocessor that is free first.
    multiprocessors, queries = 132, 128
    tiles = s // queries
    problem = Problem("cuda", "bfloat16", 1, heads, heads, s, s, d, d, 1.0, right=0)
    section = cuda_backend._section(problem, 2 * multiprocessors / tiles)
    sections = [min(section, heads - first) for first in range(0, heads, section)]
    lengths = [n for together in sections for n in range(tiles, 0, -1) for _ in range(together)]
    ends = [0] * multiprocessors
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    assert max(ends) <= 1.05 * sum(lengths) / multiprocessors


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("s", [128, 1024, 4096, 8192, 65536])
@pytest.mark.parametrize("right", [None, 0])
def test_heads_of_a_backward_pass_fill_the_gpu_together(right, s, d, group, turns):
    problem = Problem("cuda", "bfloat16", 1, 96 * group, 96, s, s, d, d, 1.0, right=right)
    tiles = cuda_backend.config_for(problem, 90, 227 * KIB).backward._replace(turns=turns)
    heads = cuda_backend._together(problem, tiles, 132)
    assert 96 % heads == 0  # no rest
    of_each = heads * s / 128 / 132  # tiles of keys, of a multiprocessor
    wanted = (2 if right is None else 4) if turns and d == 64 else 1
    assert heads == 96 or of_each > wanted / 1.5
    assert heads == 1 or of_each < wanted * 1.5


@pytest.mark.parametrize("width", [65, 128, 200, 256, 257, 320, 512, 520, 784, 1024])
def test_float64_scores_are_summed_in_the_order_of_lse(width):
    # Else P = exp(S - lse) is off by the rounding of two sums.
    p = Problem("cuda", "float64", 1, 1, 1, 9, 9, width, width, 1.0)
    tiles = cuda_backend.config_for(p, 90, 227 * KIB)
    (forward, _), *_ = cuda_variants.forward_steps(p, tiles.forward, True)
    *_, (backward, _) = cuda_variants.backward_steps(p, tiles.backward, True)
    forward, backward = dict(forward.macros), dict(backward.macros)
    assert forward["GROUP"] == backward["HEAD_DIM"]
    groups = -(-forward["HEAD_DIM"] // forward["GROUP"])
    assert backward["CLUSTER"] == forward["CLUSTER"] * groups


@pytest.mark.parametrize("heads", [0, 1, 7, 37])
def test_any_number_of_heads_is_worked_on(heads):
    problem = Problem("cuda", "bfloat16", 1, heads, heads, 9, 9, 64, 64, 1.0)
    together = cuda_backend._together(problem, cuda_tiles.BACKWARD_HOPPER[64], 132)
    assert together == max(1, heads)


@pytest.mark.parametrize(
    ("keys", "d", "options", "queries", "dq"),
    [(512, 64, {}, 128, "turns"), (512, 128, {"softcap": 2.0}, 64, "turns"),
     (512, 64, {"right": 0}, 128, "first"), (512, 128, {"left": 9}, 64, "first"),
     (513, 128, {}, 64, "first"), (4095, 128, {}, 64, "first"), (4096, 128, {}, 80, "first"),
     (4096, 128, {"softcap": 2.0}, 64, "first"), (4096, 128, {"scale": -1.0}, 64, "first"),
     (8191, 128, {"right": 0}, 64, "first"), (8192, 128, {"right": 0}, 80, "first"),
     (16384, 128, {}, 80, "zeros"), (16384, 128, {"softcap": 2.0}, 64, "first"),
     (16384, 64, {"right": 0}, 128, "first")],
)  # fmt: skip
def test_backward_tiles_of_few_and_of_many_keys(keys, d, options, queries, dq):
    p = Problem("cuda", "bfloat16", 1, 1, 1, 9, keys, d, d, **{"scale": 1.0} | options)
    tiles = cuda_backend.config_for(p, 90, 227 * KIB).backward
    assert tiles.streamed == queries
    assert dq == ("turns" if tiles.turns else "zeros" if tiles.zeros else "first")


@pytest.mark.parametrize("dtype", cuda_tiles.FORWARD)
@pytest.mark.parametrize(("d", "dv"), [(72, 40), (264, 40)])
def test_other_variants_compile(d, dv, dtype):
    # No 16-byte copies, a softcap, unequal widths, not a multiple of 64.
    p = Problem("cuda", dtype, 1, 1, 1, 9, 9, d, dv, 1.0, softcap=2.0)
    config = cuda_backend.config_for(p, 90, 227 * KIB)
    forward = cuda_variants.forward_steps(p, config.forward, False)
    steps = (*forward, *cuda_variants.backward_steps(p, config.backward, False))
    variants = [variant for variant, _ in steps]
    for code, _ in of_sources(lambda *source: _compile.cubin(*source, "sm_90a"), variants):
        assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("wrong", ["PARAMS_BYTES", "SHARED_BYTES"])
def test_sizes_that_drift_apart_do_not_compile(wrong, dtype):
    p = Problem("cuda", dtype, 1, 1, 1, 9, 9, 64, 64, 1.0)
    variant = cuda_variants.forward_variant(p, cuda_tiles.FORWARD[dtype][64][0], True)
    macros = {**dict(variant.macros), wrong: dict(variant.macros)[wrong] + 8}
    with pytest.raises(Exception, match=r"cuda_variants\.py differ"):
        _compile.cubin(variant.file, tuple(macros.items()), "sm_90a")


def test_a_changed_header_changes_the_source(tmp_path, monkeypatch):
    # CuPy's cache is keyed by the source string: a header's text must be in it, once.
    shutil.copytree(_compile.SOURCES, tmp_path / "src")
    monkeypatch.setattr(_compile, "SOURCES", tmp_path / "src")
    before = _compile._inlined("fwd_sm80.cu", set())
    assert before.count("struct Bounds") == 1
    assert '#line 1 "mask.cuh"' in before
    header = tmp_path / "src" / "mask.cuh"
    header.write_text(header.read_text().replace("struct Bounds", "// changed\nstruct Bounds"))
    assert _compile._inlined("fwd_sm80.cu", set()) != before
