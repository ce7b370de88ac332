"""Streams and host threads, on each backend for a GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cases import Run, case, on_hopper, portable_config

from cuflash import flash_attention, flash_attention_grad


def test_current_stream_is_used(gpu_backend):
    check_current_stream(backend=gpu_backend)


@pytest.mark.gpu
def test_current_stream_is_used_by_the_portable_kernels():
    if not on_hopper():
        pytest.skip("elsewhere they are the default")
    check_current_stream(backend="cuda", config=portable_config("float16", 64))


def check_current_stream(**options):
    # cupy 7189: a backward that starts before dout is written corrupts its results.
    import cupy

    shape = (2, 4, 256, 64)
    q, k, v, dout = (
        cupy.asarray(np.random.default_rng(i).standard_normal(shape).astype("float16"))
        for i in range(4)
    )
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    want = flash_attention_grad(dout, q, k, v, out, lse, **options)
    slow = cupy.random.standard_normal((3000, 3000), dtype="float32")
    late = cupy.full_like(dout, cupy.nan)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(200):
        late.fill(cupy.nan)
        cupy.cuda.Device().synchronize()
        with stream:
            s = slow
            for _ in range(3):
                s = s @ slow * 1e-4
            late[...] = dout + 0 * cupy.nan_to_num(s[0, 0])
            got = flash_attention_grad(late, q, k, v, out, lse, **options)
        cupy.empty((64, 1024, 64), "float32").fill(cupy.nan)  # the default stream allocates too
        stream.synchronize()
        assert all(bool((g == w).all()) for g, w in zip(got, want, strict=True))


def test_two_host_threads(gpu_backend):
    import cupy

    runs = [Run(case(100, 120, dtype=d, causal=True), cupy, seed=i) for i, d in
            enumerate(("bfloat16", "float16") * 2)]  # fmt: skip

    def results(run):
        out, lse = run.forward(backend=gpu_backend)
        return (out, lse, *run.backward(out, lse, backend=gpu_backend))

    want = [results(run) for run in runs]
    cupy.cuda.Device().synchronize()  # the threads' streams do not wait for this one's
    failures = []

    def work(run, expected):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                got = results(run)
                stream.synchronize()
                if not all(bool((g == w).all()) for g, w in zip(got, expected, strict=True)):
                    failures.append(run.case)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, want, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_two_devices(gpu_backend):
    # Each has its own modules; the result is where the arrays are, whichever device is current.
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    run = Run(case(100, 120, dtype="float16", causal=True), cupy)
    arrays = run.q, run.k, run.v
    with cupy.cuda.Device(1):
        there = [cupy.asarray(x.get()) for x in arrays]
    for moved in (arrays, there, arrays):
        out, lse = flash_attention(*moved, causal=True, return_lse=True, backend=gpu_backend)
        grads = flash_attention_grad(out, *moved, out, lse, causal=True, backend=gpu_backend)
        device = moved[0].device
        assert all(x.device == device for x in (out, lse, *grads))
        run.check_forward(out, lse)
