"""What the raw CUDA kernels promise: right numbers, little memory, good manners on the device."""

from __future__ import annotations

import numpy as np
import pytest
from cases import ALL, DTYPES, Run, case, host, normal, peak

import cuflash
from cuflash import cuda_backend, flash_attention, flash_attention_grad
from cuflash.problem import Problem

pytestmark = pytest.mark.gpu


TABLES = (cuda_backend.FORWARD, cuda_backend.BACKWARD)


def configs():
    """Every row of the tile tables, with the width that it is for."""
    for dtype in ("bfloat16", "float32", "float64"):
        widths = sorted(set().union(*(table[dtype] for table in TABLES)))
        for width in widths:
            lists = [
                next(rows for w, rows in table[dtype].items() if w >= width) for table in TABLES
            ]
            for i in range(max(map(len, lists))):
                tiles = (rows[min(i, len(rows) - 1)] for rows in lists)
                yield dtype, width, cuda_backend.Config(*tiles)
    for width, tiles in cuda_backend.FORWARD_HOPPER.items():
        rows = next(rows for w, rows in cuda_backend.BACKWARD["float16"].items() if w >= width)
        yield "float16", width, cuda_backend.Config(tiles, rows[-1])
        for backward in cuda_backend.BACKWARD_HOPPER[width]:
            yield "bfloat16", width, cuda_backend.Config(tiles, backward)


def needs_hopper():
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(("dtype", "width", "config"), list(configs()))
def test_every_row_of_the_tables_is_right(dtype, width, config):
    import cupy

    if isinstance(config.forward, cuda_backend.HopperTiles):
        needs_hopper()
    run = Run(case(150, 170, d=width, dv=width, batch=1, heads=2, heads_kv=1, dtype=dtype,
                   layout="contiguous", causal=True), cupy)  # fmt: skip
    out, lse = run.forward(backend="cuda", config=config)
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, backend="cuda", config=config))


@pytest.mark.parametrize("case", [c for c in ALL if c.dtype in cuda_backend.ELEMENTS], ids=str)
def test_the_portable_forward_on_hopper(case):
    # Where the kernel for Hopper is the default, and the other cases run through that one.
    import cupy

    needs_hopper()
    run = Run(case, cupy)
    p = Problem("cuda", case.dtype, 1, 1, 1, 9, 9, case.d, case.dv, 1.0)
    out, lse = run.forward(backend="cuda", config=cuda_backend.config_for(p, 80, 163 * 1024))
    run.check_forward(out, lse)


def on_hopper(d, dv=None, row=0):
    """A config whose backward pass is one for Hopper, where that is not the default."""
    width = next(w for w in cuda_backend.BACKWARD_HOPPER if w >= max(d, dv or d))
    tiles = cuda_backend.BACKWARD_HOPPER[width][row]
    return cuda_backend.Config(cuda_backend.FORWARD_HOPPER[width], tiles)


@pytest.mark.parametrize("case", [c for c in ALL if c.dtype in cuda_backend.ELEMENTS], ids=str)
def test_the_backward_for_hopper(case):
    import cupy

    needs_hopper()
    run = Run(case, cupy)
    config = on_hopper(case.d, case.dv)
    out, lse = run.forward(backend="cuda", config=config)
    run.check_backward(run.backward(out, lse, backend="cuda", config=config))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_for_hopper_repeats_bitwise(causal, d):
    # Heads enough to fill the device some times over, so that blocks do wait for their turns.
    import cupy

    needs_hopper()
    run = Run(case(1100, 1100, d=d, dv=d, batch=2, heads=12, heads_kv=6, dtype="bfloat16",
                   layout="contiguous", causal=causal), cupy)  # fmt: skip
    config = on_hopper(d)
    out, lse = run.forward(backend="cuda", config=config)
    grads = run.backward(out, lse, backend="cuda", config=config)
    for _ in range(20):
        again = run.backward(out, lse, backend="cuda", config=config)
        assert all(bool((a == b).all()) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1, 30])
def test_a_head_has_the_same_bits_whatever_else_is_computed(scale, dtype):
    # A block that computes many tiles may look at maxima more or less often, as the tiles before
    # had it; with the larger scale they rise again and again.
    import cupy

    q, k, v = (normal(cupy, 2, 40, 700, 64, dtype=dtype, seed=i) for i in range(3))
    options = {"causal": True, "scale": scale / 8, "return_lse": True, "backend": "cuda"}
    out, lse = flash_attention(q, k, v, **options)
    for b, h in ((0, 0), (0, 17), (1, 39)):
        one = np.s_[b : b + 1, h : h + 1]
        alone, alone_lse = flash_attention(q[one], k[one], v[one], **options)
        assert bool((alone == out[one]).all() and (alone_lse == lse[one]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 63, 64, 65, 127, 129, 193, 1025])
def test_lengths_around_tiles_repeat_bitwise(n, dtype):
    import cupy

    run = Run(case(n, n, d=32, dv=32, batch=1, heads=3, heads_kv=3, dtype=dtype), cupy)
    first, lse = run.forward(backend="cuda")
    run.check_forward(first, lse)
    grads = run.backward(first, lse, backend="cuda")
    for _ in range(20):
        cupy.full(1 << 20, cupy.nan, "float32")
        out, lse = run.forward(backend="cuda")
        assert bool((out == first).all())
        again = run.backward(out, lse, backend="cuda")
        assert all(bool((a == b).all()) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("shape", [(70000, 1, 16, 32), (1, 70000, 16, 32)], ids=str)
def test_more_batch_entries_or_heads_than_a_grid_axis_holds(shape):
    import cupy

    q, k, v = (normal(cupy, *shape, dtype="float16", seed=i) for i in range(3))
    out, lse = flash_attention(q, k, v, return_lse=True, backend="cuda")
    grads = flash_attention_grad(out, q, k, v, out, lse, backend="cuda")
    some = np.s_[69990:]
    parts = [x.reshape(70000, 16, 32)[some] for x in (q, k, v, out)]
    want, want_lse = flash_attention(*parts[:3], return_lse=True, backend="cuda")
    assert bool((parts[3] == want).all())
    wanted = flash_attention_grad(want, *parts[:3], want, want_lse, backend="cuda")
    for got, want in zip(grads, wanted, strict=True):
        assert bool((got.reshape(70000, 16, 32)[some] == want).all())


def test_extra_memory():
    # Forward: lse. Backward: lse in base 2, delta and dQ in float32; nothing of size S x S.
    import cupy

    s, d = 32768, 64
    q = normal(cupy, 1, 2, s, d, dtype="float16")
    rows, matrix = 2 * s * 4, 2 * s * d * 2
    cuflash.warmup("float16", d)

    def peak_bytes(f):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            f()
        return pool.total_bytes()

    slack = 1 << 16  # the pool rounds up
    assert peak_bytes(lambda: flash_attention(q, q, q)) <= matrix + rows + slack
    out, lse = flash_attention(q, q, q, return_lse=True)
    grad = peak_bytes(lambda: flash_attention_grad(q, q, q, q, out, lse))
    assert grad <= 3 * matrix + 2 * rows + 2 * matrix + slack


@pytest.mark.parametrize("causal", [False, True])
def test_graph_capture(causal):
    import cupy

    options = {"causal": causal, "backend": "cuda"}
    q, k, v = (normal(cupy, 1, 4, 300, 64, dtype="float16", seed=i) for i in range(3))
    out, lse = flash_attention(q, k, v, return_lse=True, **options)  # compiles outside of it
    flash_attention_grad(out, q, k, v, out, lse, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        got, got_lse = flash_attention(q, k, v, return_lse=True, **options)
        got_grads = flash_attention_grad(got, q, k, v, got, got_lse, **options)
        graph = stream.end_capture()
        for scale in (1.0, 0.5):
            v *= scale
            graph.launch()
            stream.synchronize()
            want, want_lse = flash_attention(q, k, v, return_lse=True, **options)
            wanted = flash_attention_grad(want, q, k, v, want, want_lse, **options)
            stream.synchronize()
            assert bool((got == want).all())
            assert all(bool((g == w).all()) for g, w in zip(got_grads, wanted, strict=True))


def test_out_of_memory_leaves_everything_as_it_was():
    import cupy

    q = normal(cupy, 1, 2, 4096, 64, dtype="float16")
    want = flash_attention(q, q, q)
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=1 << 18)
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        flash_attention(q, q, q)
    assert bool((flash_attention(q, q, q) == want).all())


def test_resources():
    p = Problem("cuda", "float16", 1, 1, 1, 9, 9, 64, 64, 1.0)
    entries, threads, registers, local, shared = zip(*cuda_backend.resources(p), strict=True)
    assert entries[0].startswith("fwd_sm") and entries[1:] == ("row_delta", "bwd_sm80", "store_dq")
    assert all(32 <= t <= 1024 for t in threads) and all(16 <= r <= 255 for r in registers)
    assert max(local) <= 64 and max(shared) <= 227 * 1024


def test_refusals():
    import cupy

    def refusal(dtype, d):
        return cuda_backend.unsupported(Problem("cuda", dtype, 1, 1, 1, 9, 9, d, d, 1.0))

    assert all(refusal(dtype, 256) is None for dtype in DTYPES)
    assert "257" in refusal("bfloat16", 257)
    q = normal(cupy, 1, 1, 9, 257, dtype="float16")
    want = cuflash.attention_reference(host(q), host(q), host(q))
    assert peak(host(flash_attention(q, q, q)) - want) < 2e-2
    with pytest.raises(NotImplementedError, match="256"):
        flash_attention(q, q, q, backend="cuda")
