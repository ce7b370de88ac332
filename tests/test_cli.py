"""The command line: what it prints, draws and refuses."""

from __future__ import annotations

import re
import sys

import pytest

from cuflash import demo
from cuflash.__main__ import main
from cuflash.api import BACKENDS, refusal
from cuflash.problem import DTYPES

PNG = b"\x89PNG\r\n\x1a\n"
EXTRAS = ("matplotlib", "rich", "sklearn")


@pytest.fixture
def numpy_only(monkeypatch):
    """As after a plain install: importing any of these raises ImportError."""
    for name in (*EXTRAS, "cupy", "numba", "threadpoolctl"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cuflash.numba_backend", raising=False)


@pytest.mark.parametrize("command", [[], ["demo"], ["info"], ["trace"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: python -m cuflash", *command]))


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "NumPy" in out and "CPU" in out and "CUPY_CACHE_DIR" in out
    table = out[out.index("NumPy arrays:") :].partition("CuPy arrays:")[0]
    problems = [demo.sample_problem("cpu", d, 8, 4096, w) for d in DTYPES for w in (64, 128, 256)]
    for p in problems:
        assert re.search(rf"^  {p.dtype} +{p.d} +(numpy|numba) +Config\(", table, re.MULTILINE)
    for name in BACKENDS:  # a reason that holds for several rows is given once
        reasons = {refusal(name, p) for p in problems} - {None}
        assert table.count(f"not {name}") == len(reasons)


def test_info_and_trace_need_numpy_only(numpy_only, capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^CuPy +not installed$", out, re.MULTILINE)
    assert "not numba: " in out and "pip install 'cuflash[numba]'" in out
    assert main(["trace"]) == 0


WORKED_O = ["[[0.910 0.755]", " [0.532 0.532]", " [0.845 0.578]]"]
WORKED_P = ["[[0.245 0.090 0.665]", " [0.468 0.468 0.063]", " [0.422 0.155 0.422]]"]


@pytest.mark.parametrize("schedule", demo.SCHEDULES)
@pytest.mark.parametrize("block_q", ["1", "2", "3"])
@pytest.mark.parametrize("block_k", ["1", "2", "3"])
def test_trace_of_the_worked_example(schedule, block_q, block_k, capsys):
    blocks = ["--block-q", block_q, "--block-k", block_k]
    assert main(["trace", "--schedule", schedule, *blocks]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == list(demo.STEP_COLUMNS)
    at = lines.index("O = o / l:")
    assert lines[at + 1 : at + 4] == WORKED_O
    assert lines[at + 5 : at + 8] == WORKED_P


@pytest.mark.parametrize(("schedule", "moved"), [("q-resident", "12"), ("kv-resident", "24")])
def test_trace_of_the_shifted_row(schedule, moved, capsys):
    assert main(["trace", "--example", "shifted", "--schedule", schedule]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines[3:6]]
    assert [step[4] for step in steps] == ["101", "101", "102"]
    assert [step[3] for step in steps] == ["0.0000", "1.0000", "0.3679"]
    assert steps[-1][5] == "1.5032" and steps[-1][-1] == moved
    assert "[[0.910 0.755]]" in lines and "[[0.245 0.090 0.665]]" in lines


def test_trace_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.png"
    assert main(["trace", "--block-q", "2", "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(PNG)
    assert str(path) in capsys.readouterr().out


def test_demo(tmp_path, capsys):
    for name in EXTRAS:
        pytest.importorskip(name)
    path = tmp_path / "demo.png"
    assert main(["demo", "--quick", "--picture", str(path)]) == 0
    out = capsys.readouterr().out
    assert "[[0.91, 0.755], [0.532, 0.532], [0.845, 0.578]]" in out
    before, after, _ = (float(x) for x in re.findall(r"(\d+\.\d)% +│", out))
    assert 90 < before < after
    first, last = map(float, re.search(r"Training loss (\S+) -> (\S+) in", out).groups())
    assert last < first
    errors = [float(x) for x in re.findall(r"(\d\.\de-\d\d) +│", out)]
    assert len(errors) >= 4 and max(errors) < 1e-2
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (["demo", "--quick"], "scikit-learn, matplotlib, rich"),
        (["trace", "--picture", "trace.png"], "matplotlib"),
    ],
)
def test_missing_packages_are_named(numpy_only, command, needed):
    with pytest.raises(SystemExit) as stop:
        main(command)
    message = str(stop.value.code)
    assert f"needs {needed}, not installed here" in message
    assert "pip install 'cuflash[demo]'" in message


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["trace", "--block-q", "0"], "from 1 up"),
        (["trace", "--block-k", "-1"], "from 1 up"),
        (["trace", "--picture", "trace.jpg"], ".png, .pdf or .svg"),
        (["demo", "--picture", "nowhere/demo.png"], "no folder 'nowhere'"),
        (["trace", "--example", "other"], "invalid choice"),
        ([], "required"),
    ],
)
def test_bad_arguments(command, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err
