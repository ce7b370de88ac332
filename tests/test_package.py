"""The package as a newcomer gets it: a wheel, in an empty environment."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RUN = """
import time, numpy as np
start = time.perf_counter()
import cuflash
seconds = time.perf_counter() - start
import importlib.resources
sources = importlib.resources.files("cuflash") / "cuda_src"
assert (sources / "mask.cuh").is_file(), list(sources.iterdir())
assert (importlib.resources.files("cuflash") / "py.typed").is_file()
q = np.random.default_rng(0).standard_normal((2, 5, 4))
out, lse = cuflash.flash_attention(q, q, q, return_lse=True)
assert np.allclose(out, cuflash.attention_reference(q, q, q))
cuflash.flash_attention_grad(out, q, q, q, out, lse)
print(cuflash.__file__, seconds)
"""


def test_wheel_in_an_empty_environment(tmp_path):
    pytest.importorskip("build")  # absent on the GPU machine, where nothing can be installed
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", wheel], check=True)
    runs = [
        subprocess.run(
            [python, "-c", RUN], check=True, capture_output=True, text=True, cwd=tmp_path
        )
        for _ in range(3)
    ]
    file, _ = runs[0].stdout.split()
    assert str(tmp_path) in file
    fastest = min(float(run.stdout.split()[1]) for run in runs)
    # It loads nothing but NumPy, which takes 0.1 s by itself; SciPy would be 0.2 s more.
    assert fastest <= 0.05, f"import cuflash takes {fastest:.3f} s beyond NumPy"
