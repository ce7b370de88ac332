"""What the raw CUDA kernels promise: right numbers, little memory, good manners on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    ALL,
    DTYPES,
    EXTREMES,
    GRID,
    GROUPS,
    LAYOUTS,
    LENGTHS,
    Run,
    case,
    host,
    normal,
    on_hopper,
    peak,
    portable_config,
)

import cuflash
from cuflash import (
    attention_reference,
    attention_reference_grad,
    cuda_backend,
    cuda_tiles,
    cuda_variants,
    flash_attention,
    flash_attention_grad,
)
from cuflash.problem import Problem

pytestmark = pytest.mark.gpu


def configs():
    """Every row of the tile tables, with the width that it is for."""
    for dtype, capability in (("bfloat16", 80), ("float32", 80), ("float64", 75), ("float64", 80)):
        tables = cuda_tiles.tables(dtype, capability)
        for width in sorted(set().union(*tables)):
            lists = [next(rows for w, rows in table.items() if w >= width) for table in tables]
            for i in range(max(map(len, lists))):
                tiles = (rows[min(i, len(rows) - 1)] for rows in lists)
                # Some rows for all wide heads keep more than fits at 1,024.
                yield dtype, min(width, 512), cuda_backend.Config(*tiles)
    for forward, backward in (
        (cuda_tiles.FORWARD_HOPPER, cuda_tiles.BACKWARD_HOPPER),
        (cuda_tiles.FORWARD_HOPPER_SHORT, cuda_tiles.BACKWARD_HOPPER_LONG),
    ):
        for width, tiles in forward.items():
            for dtype in cuda_variants.ELEMENTS:
                yield dtype, width, cuda_backend.Config(tiles, backward[width])
    for width, tiles in cuda_tiles.FORWARD_HOPPER_32.items():
        backward = cuda_tiles.BACKWARD_HOPPER_32[width]
        yield "float32", width, cuda_backend.Config(tiles, backward)
    for width, tiles in cuda_tiles.FORWARD_HOPPER_64.items():
        backward = cuda_tiles.BACKWARD_HOPPER_64[width]
        yield "float64", width, cuda_backend.Config(tiles, backward)
    for dtype, parts in (("float16", 0), ("bfloat16", 0), ("float32", 2)):
        for width in (320, 512, 1024):
            wide = cuda_tiles.WIDE_HOPPER._replace(parts=parts)
            yield dtype, width, cuda_backend.Config(wide, wide)


def needs_hopper():
    if not on_hopper():
        pytest.skip("needs compute capability 9.0")


@pytest.fixture(params=["default", "portable"])
def tiles_for(request):
    """A function of dtype and width: on Hopper the tiles that it has by default, then others'."""
    if request.param == "default":
        return lambda dtype, d: None
    needs_hopper()
    return portable_config


@pytest.mark.parametrize(("dtype", "width", "config"), list(configs()))
def test_every_row_of_the_tables_is_right(dtype, width, config):
    import cupy

    if isinstance(config.forward, cuda_tiles.ForwardOnHopper):
        needs_hopper()
    elif isinstance(config.forward, cuda_tiles.Tiles) and config.forward.mma:
        capability, *_ = cuda_backend._limits(cupy.cuda.runtime.getDevice())
        if capability not in cuda_tiles.MMA_CAPABILITIES:
            pytest.skip("needs float64 tensor cores")
    run = Run(case(150, 170, d=width, dv=width, batch=1, heads=2, heads_kv=1, dtype=dtype,
                   layout="contiguous", causal=True), cupy)  # fmt: skip
    out, lse = run.forward(backend="cuda", config=config)
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, backend="cuda", config=config))


@pytest.mark.parametrize("case", [c for c in ALL if c.dtype != "float64"], ids=str)
def test_the_portable_kernels_on_hopper(case):
    # Where those for Hopper are the default, and the other cases run through them.
    import cupy

    needs_hopper()
    run = Run(case, cupy)
    options = {"backend": "cuda", "config": portable_config(case.dtype, case.d, case.dv)}
    out, lse = run.forward(**options)
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, **options))


DOUBLES = [replace(c, dtype="float64") for c in LENGTHS + GRID + GROUPS + LAYOUTS + EXTREMES]


@pytest.mark.parametrize(("i", "case"), list(enumerate(DOUBLES)), ids=str)
def test_float64_on_hopper(i, case):
    # Widths here are smaller than those that take these tiles by default.
    import cupy

    needs_hopper()
    run = Run(case, cupy)
    tables = cuda_tiles.FORWARD_HOPPER_64, cuda_tiles.BACKWARD_HOPPER_64
    config = cuda_backend.Config(*(list(table.values())[i % len(table)] for table in tables))
    out, lse = run.forward(backend="cuda", config=config)
    run.check_forward(out, lse)
    again, lse_again = run.forward(backend="cuda", config=config)
    assert bool((out == again).all()) and bool((lse == lse_again).all())
    run.check_backward(run.backward(out, lse, backend="cuda", config=config))


@pytest.mark.parametrize("d", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("scale", [1, 30])
def test_float64_of_many_keys_is_as_exact_as_the_formula(scale, d):
    import cupy

    needs_hopper()
    q, k, v = (normal(cupy, 1, 1, n, d, dtype="float64", seed=n) for n in (32, 8192, 8193))
    v, q = v[:, :, 1:], scale * q
    out = flash_attention(q, k, v, backend="cuda")
    plain = attention_reference(q, k, v)
    want = attention_reference(*map(host, (q, k, v)), dtype="longdouble")
    assert root_mean_square(out, want) <= 2 * root_mean_square(plain, want)


def root_mean_square(x, want):
    return np.sqrt(np.mean(np.square(host(x) - want)))


@pytest.mark.parametrize("d", [64, 128, 256, 512, 1024])
@pytest.mark.parametrize("scale", [1, 30])
def test_float64_gradients_of_many_queries_are_as_exact_as_the_formula(scale, d, tiles_for):
    import cupy

    dout, q, k, v = (
        normal(cupy, 1, 1, n, d, dtype="float64", seed=seed)
        for seed, n in enumerate((4096, 4096, 32, 32))
    )
    q = scale * q
    options = {"backend": "cuda", "config": tiles_for("float64", d)}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = flash_attention_grad(dout, q, k, v, out, lse, **options)
    plain = attention_reference_grad(dout, q, k, v)
    want = attention_reference_grad(*map(host, (dout, q, k, v)), dtype="longdouble")
    for grad, by_formula, exact in zip(grads, plain, want, strict=True):
        assert root_mean_square(grad, exact) <= 2 * root_mean_square(by_formula, exact)


@pytest.mark.parametrize("d", [20, 64, 100, 256, 512, 1024])
def test_float64_scores_are_the_same_numbers_in_both_passes(d):
    # With one key lse is its score and P = exp(S - lse) is 1, if both are summed in one order.
    import cupy

    needs_hopper()
    q, k, dout = (normal(cupy, 1, 1, n, d, dtype="float64", seed=n) for n in (200, 1, 201))
    q, dout = 30 * q, cupy.rint(8 * dout[:, :, 1:])
    options = {"scale": 1.0, "backend": "cuda"}
    out, lse = flash_attention(q, k, k, return_lse=True, **options)
    dv = flash_attention_grad(dout, q, k, k, out, lse, **options).dv
    assert bool((dv == dout.sum(2, keepdims=True)).all())


@pytest.mark.parametrize(("n", "batch", "heads"), [(1100, 2, 24), (6000, 1, 2)])
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_repeat_fifty_times(causal, d, n, batch, heads, tiles_for):
    # Blocks that wait for their turns at dQ: with many heads some begin late, with few all wait.
    import cupy

    run = Run(case(n, n, d=d, dv=d, batch=batch, heads=heads, heads_kv=heads // 2,
                   dtype="bfloat16", layout="contiguous", causal=causal), cupy)  # fmt: skip
    check_that_gradients_repeat(run, {"backend": "cuda", "config": tiles_for("bfloat16", d)})


@pytest.mark.parametrize("d", [128, 320, 784])
@pytest.mark.parametrize("causal", [False, True])
def test_float64_gradients_repeat_fifty_times(causal, d):
    # In one block, and in clusters of two and four.
    import cupy

    run = Run(case(400, 300, d=d, dv=d, batch=1, heads=4, heads_kv=2, dtype="float64",
                   layout="contiguous", causal=causal), cupy)  # fmt: skip
    run.check_backward(check_that_gradients_repeat(run, {"backend": "cuda"}))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("keys", "window"), [(4200, None), (4200, (200, 4100)), (8200, (9, 8100)), (16400, None)]
)
def test_gradients_of_many_keys_repeat_fifty_times(keys, window, d):
    # 80 queries stream past at a time, or 64 in the second, and they add to zeros in the last.
    import cupy

    run = Run(case(170, keys, d=d, dv=d, batch=1, heads=4, heads_kv=2, dtype="bfloat16",
                   layout="contiguous", window=window), cupy)  # fmt: skip
    grads = check_that_gradients_repeat(run, {"backend": "cuda"})
    run.check_backward(grads)


def check_that_gradients_repeat(run, options):
    import cupy

    out, lse = run.forward(**options)
    first = run.backward(out, lse, deterministic=True, **options)
    for _ in range(50):
        cupy.full(1 << 20, cupy.nan, "float32")
        again = run.backward(out, lse, deterministic=True, **options)
        assert all(bool((a == b).all()) for a, b in zip(again, first, strict=True))
    # Where nobody asks for that, blocks add to dQ in any order, which may show.
    want = first.dq.astype(run.compute)
    eps = {"bfloat16": 2**-8, "float64": 2**-53}[run.case.dtype]
    rounding = 2 * eps * abs(want) + 84 * np.finfo(run.compute).eps * abs(want).max()
    for _ in range(50):
        dq, *others = run.backward(out, lse, **options)
        assert bool((abs(dq.astype(run.compute) - want) <= rounding).all())
        assert all(bool((a == b).all()) for a, b in zip(others, first[1:], strict=True))
    return first


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("scale", [1, 30, 1000])
def test_float32_gradients_on_hopper(scale, d):
    # As accurate as the formula in float32, which subtracts maxima, and repeatable.
    import cupy

    needs_hopper()
    operands = [normal(cupy, 1, 4, 2000, d, seed=i) for i in range(4)]
    operands[1] *= scale
    forward = flash_attention(*operands[1:], return_lse=True, backend="cuda")
    grads = flash_attention_grad(*operands, *forward, backend="cuda")
    want, plain = (attention_reference_grad(*operands, dtype=x) for x in ("float64", "float32"))
    for g, w, p in zip(grads, want, plain, strict=True):
        errors = [float(cupy.sqrt(cupy.square(x - w).mean())) for x in (g, p)]
        assert errors[0] <= 2 * errors[1]
    for _ in range(20):
        again = flash_attention_grad(*operands, *forward, backend="cuda")
        assert all(bool((a == b).all()) for a, b in zip(again, grads, strict=True))


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
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_a_block_repeat_bitwise(causal, d, dtype):
    # One tile's results are written, and the next one's operands copied, while the last products
    # run; 288 tiles are more than there are multiprocessors. A head alone has a block for each.
    import cupy

    heads, options = 24, {"causal": causal, "return_lse": True, "backend": "cuda"}
    qkv = [normal(cupy, 1, heads, 1500, d, dtype=dtype, seed=i) for i in range(3)]
    alone = [flash_attention(*(x[:, h : h + 1] for x in qkv), **options) for h in range(heads)]
    for _ in range(10):
        out, lse = flash_attention(*qkv, **options)
        for h, (one, one_lse) in enumerate(alone):
            assert bool((out[:, h] == one[:, 0]).all() and (lse[:, h] == one_lse[:, 0]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 63, 64, 65, 127, 129, 193, 1025])
def test_lengths_around_tiles_repeat_bitwise(n, dtype, tiles_for):
    import cupy

    run = Run(case(n, n, d=32, dv=32, batch=1, heads=3, heads_kv=3, dtype=dtype), cupy)
    options = {"backend": "cuda", "config": tiles_for(dtype, 32)}
    first, lse = run.forward(**options)
    run.check_forward(first, lse)
    grads = run.backward(first, lse, deterministic=True, **options)
    for _ in range(20):
        cupy.full(1 << 20, cupy.nan, "float32")
        out, lse = run.forward(**options)
        assert bool((out == first).all())
        again = run.backward(out, lse, deterministic=True, **options)
        assert all(bool((a == b).all()) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize(("n", "d"), [(16, 32), (2, 192)])
@pytest.mark.parametrize("batch_heads", [(70000, 1), (1, 70000)], ids=str)
def test_more_batch_entries_or_heads_than_a_grid_axis_holds(batch_heads, n, d, tiles_for):
    import cupy

    options = {"backend": "cuda", "config": tiles_for("float16", d)}
    q, k, v = (normal(cupy, *batch_heads, n, d, dtype="float16", seed=i) for i in range(3))
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = flash_attention_grad(out, q, k, v, out, lse, **options)
    some = np.s_[69990:]
    parts = [x.reshape(70000, n, d)[some] for x in (q, k, v, out)]
    want, want_lse = flash_attention(*parts[:3], return_lse=True, **options)
    assert bool((parts[3] == want).all())
    wanted = flash_attention_grad(want, *parts[:3], want, want_lse, **options)
    for got, want in zip(grads, wanted, strict=True):
        assert bool((got.reshape(70000, n, d)[some] == want).all())


@pytest.mark.parametrize("d", [64, 128, 256])
def test_extra_memory(d, tiles_for):
    # Forward: lse. Backward: lse in base 2, delta, and at most dQ in float32; nothing of size
    # S x S.
    import cupy

    s = 32768
    q = normal(cupy, 1, 2, s, d, dtype="float16")
    rows, matrix = 2 * s * 4, 2 * s * d * 2
    config = tiles_for("float16", d)
    cuflash.warmup("float16", d)

    def peak_bytes(f):
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            f()
        return pool.total_bytes()

    slack = 1 << 16  # the pool rounds up
    assert peak_bytes(lambda: flash_attention(q, q, q, config=config)) <= matrix + rows + slack
    out, lse = flash_attention(q, q, q, return_lse=True)
    grad = peak_bytes(lambda: flash_attention_grad(q, q, q, q, out, lse, config=config))
    assert grad <= 3 * matrix + 2 * rows + 2 * matrix + slack


@pytest.mark.parametrize("d", [64, 128, 256])
def test_extra_memory_of_float32(d):
    # On Hopper at most as much as the inputs, and some numbers for each row and for columns of
    # tiles.
    import cupy

    s = 16384
    q = normal(cupy, 1, 2, s, d)
    cuflash.warmup("float32", d)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        flash_attention(q, q, q)
    parts = 3 * q.nbytes + q.nbytes // 16 if on_hopper() else 0
    assert pool.total_bytes() <= q.nbytes + 2 * s * 4 + parts + (1 << 16)
    out, lse = flash_attention(q, q, q, return_lse=True)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        flash_attention_grad(q, q, q, q, out, lse)
    parts = 4 * q.nbytes + 4 * 2 * s * 4 if on_hopper() else 2 * s * 4
    assert pool.total_bytes() <= 3 * q.nbytes + 3 * 2 * s * 4 + parts + (1 << 16)


@pytest.mark.parametrize("d", [64, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_graph_capture(causal, d, tiles_for):
    import cupy

    q, k, v = (normal(cupy, 1, 4, 300, d, dtype="float16", seed=i) for i in range(3))

    def call():
        options = {"causal": causal, "backend": "cuda", "config": tiles_for("float16", d)}
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        grads = flash_attention_grad(out, q, k, v, out, lse, deterministic=True, **options)
        return (out, lse, *grads)

    cupy.cuda.Device().synchronize()
    pool = cupy.cuda.MemoryPool()  # of its own, as docs/api.md says
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy.cuda.using_allocator(pool.malloc):
            call()  # kernels and memory exist before the capture
            stream.begin_capture()
            got = call()
            graph = stream.end_capture()
        others = [cupy.full(1 << n, 7, "float32") for n in range(8, 20)]
        for scale in (1.0, 0.5):
            v *= scale
            graph.launch()
            assert all(bool((g == w).all()) for g, w in zip(got, call(), strict=True))
            assert all(bool((x == 7).all()) for x in others)


def test_out_of_memory_leaves_everything_as_it_was():
    import cupy

    q = normal(cupy, 1, 2, 4096, 64, dtype="float16")
    want = flash_attention(q, q, q)
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=1 << 18)
    with cupy.cuda.using_allocator(pool.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        flash_attention(q, q, q)
    assert bool((flash_attention(q, q, q) == want).all())


@pytest.mark.parametrize("d", [64, 256, 512])
def test_resources(d):
    p = Problem("cuda", "float16", 1, 1, 1, 9, 9, d, d, 1.0)
    entries, threads, registers, local, shared = zip(*cuda_backend.resources(p), strict=True)
    hopper = {
        64: ("fwd_sm90", "row_delta", "bwd_sm90", "store_dq"),
        256: ("fwd_sm90", "row_delta", "bwd_sm90_q", "bwd_sm90_kv"),
    }
    portable = ("fwd_sm80", "row_delta", "bwd_sm80", "store_dq")
    kernel = "wide_sm90" if on_hopper() else "wide_sm80"
    wide = (kernel, "row_delta", kernel, kernel, kernel)
    assert entries == (wide if d > 256 else hopper[d] if on_hopper() else portable)
    assert all(32 <= t <= 1024 for t in threads) and all(16 <= r <= 255 for r in registers)
    assert max(local) <= 64 and max(shared) <= 227 * 1024


def test_refusals():
    import cupy

    def refusal(dtype, d):
        return cuda_backend.unsupported(Problem("cuda", dtype, 1, 1, 1, 9, 9, d, d, 1.0))

    assert all(refusal(dtype, 1024) is None for dtype in DTYPES)
    assert "1025" in refusal("bfloat16", 1025)
    q = normal(cupy, 1, 1, 9, 1025, dtype="float16")
    want = cuflash.attention_reference(host(q), host(q), host(q))
    assert peak(host(flash_attention(q, q, q)) - want) < 2e-2
    with pytest.raises(NotImplementedError, match="1024"):
        flash_attention(q, q, q, backend="cuda")
