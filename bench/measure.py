"""Clocks, memory and ceilings of the two kinds of machine; nothing here knows attention."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.numpy_backend import cores

Call = Callable[[], Any]


class Cpu:
    """NumPy on the cores that this process may use."""

    kind = "cpu"
    unit, per_second = "GFLOP/s", 1e9
    matmul_side = 2048
    rounds = 4
    copied_bytes = 2**28

    def __init__(self) -> None:
        self.xp = np

    def describe(self) -> dict[str, str]:
        shown = {"machine": f"{_cpu_model()}, {cores()} cores", **_blas()}
        if hasattr(os, "getloadavg"):  # others at work here make every number noise
            shown["load before"] = f"{os.getloadavg()[0]:.1f} processes in the last minute"
        return shown

    def free(self) -> None:
        gc.collect()

    def settle(self) -> None:
        """A library's threads spin for some 30 ms after a call, on cores that the next needs."""
        time.sleep(0.04)

    def time(self, call: Call, repeats: int) -> list[float]:
        """Seconds of each call."""
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds

    def host_time(self, call: Call, repeats: int) -> list[float]:
        """Nothing: on the CPU it is the time itself."""
        return []

    def memory_limit(self) -> float:
        """Bytes beyond which a contender is timed with no other one prepared."""
        return float("inf")


class Gpu:
    """CuPy's current device, on its current stream."""

    kind = "cuda"
    unit, per_second = "TFLOP/s", 1e12
    matmul_side = 8192
    rounds = 10
    copied_bytes = 2**30

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._device = cupy.cuda.Device()
        self._properties = cupy.cuda.runtime.getDeviceProperties(self._device.id)
        # Written between repeats, so that none finds its inputs in L2. It takes longer than L2
        # needs on purpose: while the GPU writes, the host gets the next call into the queue, and
        # its own time stays out of the measurement.
        self._flushed = cupy.empty(max(2**28, 4 * self._properties["l2CacheSize"]), np.uint8)

    def describe(self) -> dict[str, str]:
        runtime = self.xp.cuda.runtime
        version = runtime.runtimeGetVersion()
        cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
        name = self._properties["name"].decode()
        return {"machine": f"{name}, driver {_driver()}, {cuda}", "host": _cpu_model()}

    def free(self) -> None:
        """Give cached memory back to the device, where the other library can have it."""
        gc.collect()
        self.xp.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def settle(self) -> None:
        """A stream has nothing to wait for: calls run one after the other."""

    def time(self, call: Call, repeats: int) -> list[float]:
        """Seconds between events around each call, L2 flushed before it."""
        event = self.xp.cuda.Event
        pairs = [(event(), event()) for _ in range(repeats)]
        for start, end in pairs:
            self._flushed.fill(0)
            start.record()
            call()
            end.record()
        self._device.synchronize()
        return [self.xp.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairs]

    def host_time(self, call: Call, repeats: int) -> list[float]:
        """Seconds that each call takes to return, with nothing in the queue before it."""
        seconds = []
        for _ in range(repeats):
            self._device.synchronize()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        self._device.synchronize()
        return seconds

    def memory_limit(self) -> float:
        return self._properties["totalGlobalMem"] / 8


def repeats_within(seconds: float, one: float, least: int, most: int) -> int:
    """How many calls of `one` second each fit in `seconds`, within bounds."""
    return max(least, min(most, int(seconds / one)))


def ceilings(device: Cpu | Gpu, dtypes: list[str], seconds: float) -> dict[str, float]:
    """FLOP/s of a large square matrix product by dtype, and bytes/s of a copy as "copy"."""
    found = {dtype: _matrix_product(device, dtype, seconds) for dtype in dtypes}
    found["copy"] = _copy(device, seconds)
    device.free()
    return found


def _matrix_product(device: Cpu | Gpu, dtype: str, seconds: float) -> float:
    if device.kind == "cpu" and dtype in ("float16", "bfloat16"):
        dtype = "float32"  # what cuflash computes in there: NumPy's 16-bit product has no BLAS
    n = device.matmul_side
    a, b = device.xp.random.default_rng(0).standard_normal((2, n, n), dtype=np.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    return 2 * n**3 / _typical(device, lambda: a @ b, seconds)


def _copy(device: Cpu | Gpu, seconds: float) -> float:
    source = device.xp.ones(device.copied_bytes, np.uint8)
    target = device.xp.empty_like(source)
    once = _typical(device, lambda: device.xp.copyto(target, source), seconds)
    return 2 * source.nbytes / once  # read and written


def _typical(device: Cpu | Gpu, call: Call, seconds: float) -> float:
    device.time(call, 2)
    (one,) = device.time(call, 1)
    return float(np.median(device.time(call, repeats_within(seconds, one, 3, 50))))


def extra_memory(memory: str, prepare: Callable[[], Call]) -> int | None:
    """Bytes in use at the peak of one call, beyond those in use before `prepare`.

    That is results, work space, and for a backward pass what was kept from the forward pass.
    """
    peak = {"numpy": _numpy_peak, "cupy": _cupy_peak, "torch": _torch_peak}.get(memory)
    return peak(prepare) if peak else None


def _numpy_peak(prepare: Callable[[], Call]) -> int:
    tracemalloc.start()
    try:
        call = prepare()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _cupy_peak(prepare: Callable[[], Call]) -> int:
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        def __init__(self) -> None:
            self.sizes: dict[int, int] = {}
            self.used = self.peak = 0

        def malloc_postprocess(self, **event: int) -> None:
            if event["mem_ptr"]:  # 0: nothing was had
                self.sizes[event["mem_ptr"]] = event["mem_size"]
                self.used += event["mem_size"]
                self.peak = max(self.peak, self.used)

        def free_postprocess(self, **event: int) -> None:
            self.used -= self.sizes.pop(event["mem_ptr"], 0)  # older memory is not ours

    with Hook() as hook:
        call = prepare()
        hook.peak = hook.used
        call()
        return hook.peak


def _torch_peak(prepare: Callable[[], Call]) -> int:
    import torch

    before = torch.cuda.memory_allocated()
    call = prepare()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _blas() -> dict[str, str]:
    """Which kernels NumPy's matrix product runs: a CPU taken for an older one is far slower."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return {}
    found = [x for x in threadpool_info() if x["user_api"] == "blas"]
    described = (f"{x['internal_api']} {x['version']} ({x.get('architecture')})" for x in found)
    return {"BLAS": ", ".join(described)} if found else {}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]):
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.splitlines()[0].strip()
    return "of unknown version"
