"""Streams and host threads, on each backend for a GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cases import Run, case

from cuflash import flash_attention, flash_attention_grad


def test_current_stream_is_used(gpu_backend):
    # cupy 7189: a backward that starts before dout is written corrupts its results.
    import cupy

    shape = (2, 4, 256, 64)
    q, k, v, dout = (
        cupy.asarray(np.random.default_rng(i).standard_normal(shape).astype("float16"))
        for i in range(4)
    )
    out, lse = flash_attention(q, k, v, return_lse=True, backend=gpu_backend)
    want = flash_attention_grad(dout, q, k, v, out, lse, backend=gpu_backend)
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
            got = flash_attention_grad(late, q, k, v, out, lse, backend=gpu_backend)
        cupy.empty((64, 1024, 64), "float32").fill(cupy.nan)  # the default stream allocates too
        stream.synchronize()
        assert all(bool((g == w).all()) for g, w in zip(got, want, strict=True))


def test_two_host_threads(gpu_backend):
    import cupy

    runs = [Run(case(100, 120, dtype=d, causal=True), cupy, seed=i) for i, d in
            enumerate(("bfloat16", "float16") * 2)]  # fmt: skip
    want = [run.forward(backend=gpu_backend) for run in runs]
    cupy.cuda.Device().synchronize()  # the threads' streams do not wait for this one's
    failures = []

    def work(run, expected):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                out, _ = run.forward(backend=gpu_backend)
                stream.synchronize()
                if not bool((out == expected[0]).all()):
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
