"""Where the suite runs: with a GPU on CuPy arrays, without one on NumPy and Numba's simulator."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))


def _gpu() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver, no device: any of them means no GPU here
        return False


GPU = _gpu()
if not GPU:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before anything imports numba

#: What runs here. Numba's simulator is thousands of times slower and gets the small cases.
BACKENDS = ("numpy", "cuda", "numba") if GPU else ("numpy", "numba")


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="FILE", help="write what passed on this GPU")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_collection_modifyitems(config, items):
    def on_gpu(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return "gpu" in item.keywords or params.get("backend", "numpy") != "numpy"

    if config.getoption("--gpu-record"):
        items[:] = [item for item in items if on_gpu(item)]
    if not GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


COUNTS = {"passed": 0, "skipped": 0}


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        COUNTS["passed"] += 1
    if report.skipped:
        COUNTS["skipped"] += 1


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--gpu-record")
    worker = hasattr(session.config, "workerinput")  # of pytest-xdist: it saw its share only
    if path and GPU and exitstatus == 0 and not worker:
        import gpu_record

        gpu_record.write(path, COUNTS)


def pytest_terminal_summary(terminalreporter):
    import gpu_record

    terminalreporter.write_line(gpu_record.status()[1])


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each backend that can run here, by name."""
    return request.param


@pytest.fixture
def xp(backend):
    """The array module whose arrays that backend takes here."""
    if GPU and backend != "numpy":
        import cupy

        return cupy
    import numpy

    return numpy


@pytest.fixture
def small(backend):
    """Whether only small cases are affordable: the simulator."""
    return backend == "numba" and not GPU


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "numba")])
def gpu_backend(request):
    """Each backend for CuPy arrays, by name: what is tested runs in float16."""
    return request.param
