"""The record of the last run of the GPU suite, and whether it still matches the sources.

`make gpu-test` writes it; `make gpu-status` (python tests/gpu_record.py) compares.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
SOURCES = ("cuda_src/*.cu", "cuda_src/*.cuh", "cuflash/*_backend.py", "cuflash/cuda_tiles.py",
           "cuflash/cuda_variants.py", "cuflash/_compile.py", "cuflash/problem.py",
           "cuflash/api.py", "cuflash/arrays.py")  # fmt: skip


def digests() -> dict[str, str]:
    """SHA-256 of every file that decides what runs on a GPU."""
    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    return {str(f.relative_to(ROOT)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def write(path: str, counts: dict[str, int]) -> None:
    import cupy
    import numba
    import numba_cuda
    import numpy

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver, runtime = (
        f"{v // 1000}.{v % 1000 // 10}"
        for v in (cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion())
    )
    record = {
        "gpu": device["name"].decode(),
        "compute_capability": f"{device['major']}.{device['minor']}",
        "cuda_driver": driver,
        "cuda_runtime": runtime,
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (cupy, numba, numba_cuda, numpy)},
        },
        "date": datetime.date.today().isoformat(),
        "tests": counts,
        "sources": digests(),
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n")


def status() -> tuple[bool, str]:
    """Whether the record matches the sources, and a line that says so."""
    if not RECORD.exists():
        return False, "GPU record: none; `make gpu-test` on a GPU writes it"
    record = json.loads(RECORD.read_text())
    then, now = record["sources"], digests()
    changed = sorted(f for f in then.keys() | now.keys() if then.get(f) != now.get(f))
    what = f"{record['tests']['passed']} tests on {record['gpu']}, {record['date']}"
    if changed:
        return False, f"GPU record: STALE ({what}); changed since: {', '.join(changed)}"
    return True, f"GPU record: matches the sources ({what})"


if __name__ == "__main__":
    fresh, line = status()
    print(line)
    sys.exit(not fresh)
