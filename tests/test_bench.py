"""The benchmark: it runs, it refuses wrong results, and its sampled reference is the reference."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash import attention_reference, attention_reference_grad, flash_attention

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(monkeypatch):
    """The folder `bench` is in the checkout and not in the package."""
    monkeypatch.syspath_prepend(ROOT)
    return pytest.importorskip("bench.run")


def _cases(*names):
    from bench.cases import Case

    return [Case.parse(name) for name in names]


def test_command_end_to_end(tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "markdown", "png")}
    names = ("float32-b1-h2-s64-d8-causal-forward", "float32-b2-h4:2-s33:47-d8:16-full-backward")
    command = [sys.executable, "-m", "bench", "--device", "cpu", "--seconds", "0.01"]
    command += ["--only", "numpy", "--only", "materialised"]
    command += [word for name in names for word in ("--case", name)]
    command += ["--json", str(files["json"]), "--markdown", str(files["markdown"])]
    command += ["--plot", str(files["png"])]
    environment = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cuflash numpy" in done.stdout
    data = json.loads(files["json"].read_text())
    assert {result["name"] for result in data["results"]} == set(names)
    assert {result["contender"] for result in data["results"]} == {"cuflash numpy", "materialised"}
    for result in data["results"]:
        assert result["status"] == "ok", result
        assert result["error"] < result["tolerance"]
        assert len(result["seconds"]) >= 3 and min(result["seconds"]) > 0
        assert result["extra_bytes"] > 0
    assert data["ceilings"]["float32"] > 0 and data["ceilings"]["copy"] > 0
    assert "| float32 | 1 x 2 | 64 | 8 | causal | forward |" in files["markdown"].read_text()
    assert files["png"].stat().st_size > 10_000
    shown = subprocess.run(
        [sys.executable, "-m", "bench", "--load", str(files["json"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == done.stdout


@pytest.mark.parametrize("over", ["length", "width"])
def test_the_picture_is_over_what_the_cases_differ_in(over, bench, tmp_path):
    pytest.importorskip("matplotlib")
    from bench.report import Report, plot

    sizes = [(n, 8) for n in (16, 32)] if over == "length" else [(16, n) for n in (8, 24)]
    names = [
        f"float32-b1-h1-s{s}-d{d}-full-{way}" for s, d in sizes for way in ("forward", "backward")
    ]
    results = [bench.Result(case, "one", seconds=[1.0]) for case in _cases(*names)]
    header = {"machine": "M", "date": "D"}
    picture = tmp_path / "picture.svg"
    plot(Report(header, "FLOP/s", 1.0, {"float32": 9.0}, results), picture)
    text = picture.read_text()
    assert f"<!-- {over} " in text
    assert f"<!-- float32, {'d = 8' if over == 'length' else 'S = 16'}, backward -->" in text


def test_precision_end_to_end(tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    json_file, picture = tmp_path / "errors.json", tmp_path / "errors.png"
    command = [sys.executable, "-m", "bench.precision"]
    measure = ["--device", "cpu", "--width", "8", "--keys", "40", "90", "--scale", "1", "4"]
    measure += ["--mode", "float64", "--mode", "float16", "--json", str(json_file)]
    environment = os.environ | {"MPLBACKEND": "Agg"}
    run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, *measure], **run)
    assert done.returncode == 0, done.stderr
    points = json.loads(json_file.read_text())["points"]
    assert len(points) == 8
    for point in points:
        unit, most = (2**-53, 1e-13) if point["mode"] == "float64" else (2**-11, 1e-2)
        for ours, plain in zip(point["cuflash"], point["formula"], strict=True):
            assert 0 < plain < most and 0 < ours < 4 * plain + unit, point
    shown = subprocess.run([*command, "--load", str(json_file), "--plot", str(picture)], **run)
    assert shown.stdout == done.stdout, shown.stderr
    assert picture.stat().st_size > 10_000


def test_counters_are_read_from_csv(bench):
    from bench.counters import parsed

    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [(0, "row_delta", "a.sum", "1,234"), (0, "row_delta", "b.avg", "5.5"),
            (1, "bwd_sm90(Params)", "a.sum", "7")]  # fmt: skip
    lines = [f'"{i}","{kernel}","{metric}","","{value}"' for i, kernel, metric, value in rows]
    text = "\n".join(["==PROF== Connected", head, *lines])
    assert parsed(text) == {
        "1. row_delta": {"a.sum": 1234, "b.avg": 5.5},
        "2. bwd_sm90": {"a.sum": 7},
    }


def test_clock_and_power_are_sampled_while_a_call_is_repeated(bench, monkeypatch):
    from bench import power

    device = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    )
    talk = "import time\nwhile True: print('1700, 699.5', flush=True); time.sleep(0.01)"
    monkeypatch.setattr(power, "_QUERY", [sys.executable, "-c", talk])
    course = power.repeated(lambda: time.sleep(0.001), 1e9, 0.5)
    assert (course.clock, course.power) == (1700, 699.5)
    assert 0 < course.first <= 1 and 0 < course.last <= 1
    assert power.parsed("1980, 465.19\n1710, 738.0\n17") == [(1980, 465.19)]


def test_only_right_results_are_repeated(bench, monkeypatch):
    from bench import power
    from bench.contenders import Contender

    def right(case, x):
        return lambda: flash_attention(*x[1:])

    def half(case, x):
        return lambda: flash_attention(*x[1:]) / 2

    course = power.Course(2, 1, 1700, 700)
    seen = []
    monkeypatch.setattr(power, "repeated", lambda call, *_: seen.append(call()) or course)
    (case,) = _cases("float32-b1-h2-s40-d8-full-forward")
    who = [Contender(f.__name__, f, "numpy") for f in (half, right)]
    found = list(power.courses(bench.measure.Cpu(), case, who, 1.0))
    assert [(r.status, c) for r, c in found] == [("wrong", []), ("ok", [course, course])]
    assert len(seen) == 2 and (seen[1] == 0.5).all()


def test_only_right_results_are_timed(bench):
    from bench.contenders import Contender, Refused

    def slightly_off(case, x):
        return lambda: flash_attention(*x[1:]) * np.float32(1 + 3e-5)

    def one_row_forgotten(case, x):
        out = flash_attention(*x[1:])
        out[-1, -1, 100] = 0
        return lambda: out

    def not_a_number(case, x):
        return lambda: np.full_like(x.q, np.nan)

    def too_large(case, x):
        raise MemoryError("no room")

    def unwilling(case, x):
        raise Refused("not this one")

    def right(case, x):
        return lambda: flash_attention(*x[1:])

    (case,) = _cases("float32-b2-h3-s257-d8-full-forward")
    prepared = (slightly_off, one_row_forgotten, not_a_number, too_large, unwilling, right)
    contenders = [Contender(f.__name__, f, "numpy") for f in prepared]
    results = bench.run_case(bench.measure.Cpu(), case, contenders, seconds=0.01)
    said = [(r.status, bool(r.seconds)) for r in results]
    wrong, memory = ("wrong", False), ("out of memory", False)
    assert said == [wrong, wrong, wrong, memory, ("refused", False), ("ok", True)]


@pytest.mark.parametrize("which", ["float32-b1-h2-s64-d128", "bfloat16-b1-h2-s64-d128:64"])
def test_flash_attention_3_refuses_what_the_wheel_lacks(bench, which):
    from bench.contenders import Refused, _flash_attention_3

    (case,) = _cases(f"{which}-full-forward")
    with pytest.raises(Refused):
        _flash_attention_3(case, None)


@pytest.mark.parametrize(
    "name",
    [
        "float64-b3-h6:2-s65:40-d5:7-causal-forward",
        "float64-b3-h6:2-s65:40-d5:7-causal-backward",
        "float64-b1-h2-s17:50-d4-causal-backward",
        "float64-b2-h2-s20:33-d4-full-backward",
        "float64-b2-h4:1-s1:9-d4-causal-forward",
    ],
)
def test_sampled_reference_is_the_reference(bench, name):
    from bench.check import error, expected

    (case,) = _cases(name)
    x = case.inputs(np, seed=1)
    reference = attention_reference_grad if case.backward else attention_reference
    whole = reference(*(x if case.backward else x[1:]), causal=case.causal)
    assert error(case, whole, expected(case, x, block=6)) < 1e-14


def test_every_case_has_its_name():
    """Without the fixture's import of the timing code: the sets alone."""
    names = subprocess.run(
        [sys.executable, "-m", "bench", "--device", "cpu", "--set", "gpu", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(names) == len(set(names)) == 32 + 72
    assert "bfloat16-b16-h32-s1024-d64-causal-backward" in names


def test_case_by_name_and_by_words(bench):
    from bench.cases import SETS, Case, select

    for cases in SETS.values():
        assert [Case.parse(case.name) for case in cases] == cases
    picked = select(["cpu"], ["float32 s4096 d64 causal"])
    assert [case.direction for case in picked] == ["forward", "backward"]
    (case,) = _cases("float32-b1-h8:2-s3:5-d4:6-full-forward")
    assert (case.heads_kv, case.sk, case.dv) == (2, 5, 6)
    assert case.problem("cpu").flops() == 2 * 8 * 3 * 5 * (4 + 6)


def test_sweep_varies_the_default(bench):
    from bench.sweep import candidates

    (case,) = _cases("float32-b1-h1-s64-d8-full-forward")
    grid = candidates("numpy", case, "cpu", ["block_q=16,32", "block_k=64"])
    assert len(grid) == 3
    assert len(candidates("numpy", case, "cpu", [])) > 10
    with pytest.raises(ValueError, match="FIELD"):
        candidates("numpy", case, "cpu", ["blocks=1"])
