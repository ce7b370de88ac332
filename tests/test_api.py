"""What the public functions promise around the numbers: arguments, memory, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import Run, case, host

import cuflash
from cuflash import flash_attention, flash_attention_grad, merge_attention, numpy_backend


def qkv(xp=np, dtype="float32", sq=5, sk=7, d=4, dv=6, heads=4, heads_kv=2):
    rng = np.random.default_rng(1)
    shapes = (2, heads, sq, d), (2, heads_kv, sk, d), (2, heads_kv, sk, dv)
    return [xp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes]


# --- Wrong arguments: the message names the argument, what came and what was expected.

WRONG_OPTIONS = [
    ({"scale": float("nan")}, ValueError, r"scale .*finite.*nan"),
    ({"scale": float("inf")}, ValueError, r"scale .*finite.*inf"),
    ({"scale": "big"}, TypeError, r"scale .*number.*'big'"),
    ({"scale": 1j}, TypeError, r"scale .*number.*1j"),
    ({"causal": "bottom"}, ValueError, r"causal .*top_left.*'bottom'"),
    ({"causal": 1}, ValueError, r"causal .*got 1"),
    ({"window": 3}, ValueError, r"window .*pair.*3"),
    ({"window": (1, 2, 3)}, ValueError, r"window .*pair"),
    ({"window": (-1, 0)}, ValueError, r"window .*negative.*-1"),
    ({"window": (0.5, 0)}, TypeError, r"window .*whole.*0.5"),
    ({"window": (True, 0)}, TypeError, r"window .*whole"),
    ({"softcap": 0}, ValueError, r"softcap .*positive.*0"),
    ({"softcap": -1.0}, ValueError, r"softcap .*positive.*-1"),
    ({"softcap": float("nan")}, ValueError, r"softcap .*positive.*nan"),
    ({"backend": "magic"}, ValueError, r"backend .*numpy.*'magic'"),
    ({"config": 7}, TypeError, r"config .*Config.*7"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG_OPTIONS, ids=str)
def test_wrong_options(options, error, match):
    q, k, v = qkv()
    with pytest.raises(error, match=match):
        flash_attention(q, k, v, **options)
    if set(options) <= {"scale", "causal", "window", "softcap"}:
        with pytest.raises(error, match=match):
            cuflash.attention_reference(q, k, v, **options)


def test_wrong_shapes_and_dtypes():
    q, k, v = qkv()
    for bad, match in [
        ((q[0, 0, 0], k, v), "same number of axes"),
        ((q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), "at least 2 axes"),
        ((q, k[0], v[0]), "same number of axes"),
        ((q, k[:1], v[:1]), r"leading axes of k \(1,\)"),
        ((q, k, v[:, :, :3]), "k and v must agree"),
        ((q, k[..., :3], v), "same width D, got 4 and 3"),
        ((q[..., :0], k[..., :0], v), "at least 1"),
        ((q, k, v[..., :0]), "at least 1"),
        ((q[:, :3], k, v), "3 heads must be a multiple of k's 2"),
        ((q, k[:, :0], v[:, :0]), "multiple of k's 0"),
        ((q, k.astype("float64"), v), "k has dtype float64, but q has float32"),
    ]:
        with pytest.raises(ValueError, match=match):
            flash_attention(*bad)
    for dtype in (int, complex, bool, object, ">f4", "longdouble"):
        with pytest.raises(TypeError, match="q must "):
            flash_attention(q.astype(dtype), k, v)
    with pytest.raises(TypeError, match="masked"):
        flash_attention(np.ma.masked_array(q), k, v)
    with pytest.raises(TypeError, match="q must be a NumPy or CuPy array"):
        flash_attention("text", k, v)


def test_wrong_companions_of_the_gradient():
    q, k, v = qkv()
    out, lse = flash_attention(q, k, v, return_lse=True)
    for change, match in [
        ({"dout": out[..., :3]}, "dout must have shape"),
        ({"out": out.astype("float64")}, "out must have shape .* dtype float32"),
        ({"lse": lse[..., None]}, "lse must have shape"),
        ({"lse": lse.astype("float64")}, "lse must have .*float32"),
        ({"dlse": lse[:1]}, "dlse must have shape"),
    ]:
        arguments = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse} | change
        with pytest.raises(ValueError, match=match):
            flash_attention_grad(**arguments)


def test_refusals_name_every_backend_and_its_reason(monkeypatch):
    cuflash.api._plan.cache_clear()
    monkeypatch.setattr(numpy_backend, "unsupported", lambda problem: "not on Sundays")
    monkeypatch.setattr(cuflash.api, "BACKENDS", ("numpy",))
    with pytest.raises(NotImplementedError, match="numpy: not on Sundays"):
        flash_attention(*qkv())


def test_a_missing_library_is_a_reason(monkeypatch):
    cuflash.api._plan.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cuflash.numba_backend", None)
    with pytest.raises(NotImplementedError, match=r"pip install 'cuflash\[numba\]'"):
        flash_attention(*qkv(), backend="numba")


@pytest.mark.gpu
def test_mixed_devices():
    import cupy

    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"k is on cuda:0, but q is on cpu"):
        flash_attention(q, cupy.asarray(k), v)
    out, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="dout is on cuda:0"):
        flash_attention_grad(cupy.asarray(out), q, k, v, out, lse)
    with pytest.raises(NotImplementedError, match="NumPy arrays"):
        flash_attention(*qkv(cupy), backend="numpy")
    with pytest.raises(NotImplementedError, match="GPU"):
        flash_attention(*qkv(), backend="numba")


# --- Shapes and memory.


@pytest.mark.parametrize("axes", [2, 3, 4, 5, 6])
def test_any_number_of_axes(axes):
    q, k, v = qkv(heads=2, heads_kv=2, dtype="float64")
    lead = {2: (0, 0), 3: (0,), 4: ()}.get(axes)
    if lead is None:  # the same two batch entries along more axes, in an order that cannot collapse
        views = [np.stack([x] * 3)[(None,) * (axes - 5)].swapaxes(-5, -4) for x in (q, k, v)]
    else:
        views = [x[lead] for x in (q, k, v)]
    out, lse = flash_attention(*views, return_lse=True)
    assert out.shape == (*views[0].shape[:-1], 6)
    assert lse.shape == views[0].shape[:-1]
    want = cuflash.attention_reference(*views)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-14)
    grads = flash_attention_grad(out, *views, out, lse)
    assert [g.shape for g in grads] == [x.shape for x in views]
    wanted = cuflash.attention_reference_grad(out, *views)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def test_results_lie_in_memory_as_the_inputs_do(backend, xp):
    run = Run(case(5, 9, d=4, dv=3, layout="bshd"), xp)
    out, lse = run.forward(backend=backend)
    assert out.swapaxes(1, 2).flags.c_contiguous
    dq, dk, dv = run.backward(out, lse, backend=backend)
    assert all(x.swapaxes(1, 2).flags.c_contiguous for x in (dq, dk, dv))


def test_gradients_of_broadcast_arrays_are_plain_arrays(backend, xp):
    run = Run(case(5, 9, d=4, dv=3, heads=2, layout="broadcast", heads_kv=2), xp)
    out, lse = run.forward(backend=backend)
    grads = run.backward(out, lse, backend=backend)
    assert all(x.flags.c_contiguous for x in (out, *grads))


def test_precision(backend, xp):
    q, k, v = qkv(xp)
    want = host(flash_attention(q, k, v, backend=backend))
    got = host(flash_attention(q, k, v, precision="tf32", backend=backend))
    np.testing.assert_allclose(got, want, atol=2.0**-9 * abs(want).max())
    ieee = host(flash_attention(q, k, v, precision="ieee", backend=backend))
    np.testing.assert_allclose(ieee, want, atol=1e-6 * abs(want).max())
    with pytest.raises(ValueError, match="precision must be one of"):
        flash_attention(q, k, v, precision="fp8", backend=backend)


def test_out(backend, xp):
    q, k, v = qkv(xp)
    want = flash_attention(q, k, v, backend=backend)
    base = xp.full((2, 4, 9, 8), xp.nan, "float32")
    view = base[:, :, 2:7, 1:7]
    assert flash_attention(q, k, v, out=view, backend=backend) is view
    assert bool((view == want).all())
    base[:, :, 2:7, 1:7] = xp.nan
    assert bool(xp.isnan(base).all()), "wrote beyond out"
    stacked = xp.zeros((3, 2, 2, 4, 5, 6), "float32").transpose(1, 0, 2, 3, 4, 5)[0]
    inputs = [xp.stack([x] * 3) for x in (q, k, v)]
    flash_attention(*inputs, out=stacked, backend=backend)
    assert bool((stacked == want).all())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_out_of_negative_strides(axis, backend, xp):
    q, k, v = qkv(xp, "float16", d=8, dv=8)
    want = flash_attention(q, k, v, backend=backend)
    out = xp.flip(xp.zeros_like(want), axis)
    assert out.strides[axis] < 0
    flash_attention(q, k, v, out=out, backend=backend)
    assert bool((out == want).all())


def test_out_may_be_an_input(backend, xp):
    q, k, v = qkv(xp, d=6, dv=6, sq=7, heads=2)
    want = flash_attention(q, k, v, backend=backend)
    for x in (q, k, v):
        kept = x.copy()
        got = flash_attention(q, k, v, out=x, backend=backend)
        assert got is x
        assert bool((got == want).all())
        x[...] = kept


def test_wrong_out():
    q, k, v = qkv()
    good = np.empty((2, 4, 5, 6), "float32")
    frozen = good.copy()
    frozen.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(good, good.shape, (0, *good.strides[1:]))
    for out, error, match in [
        (good[..., :5], ValueError, "out must have shape"),
        (good.astype("float64"), ValueError, "out must have .*float32"),
        (frozen, ValueError, "read-only"),
        (overlapping, ValueError, "overlap"),
        ([[1.0]], TypeError, "out must be an array"),
    ]:
        with pytest.raises(error, match=match):
            flash_attention(q, k, v, out=out)


def test_element_misaligned_memory_on_the_cpu():
    run = Run(case(9, 11), np)
    raw = np.empty(run.q.size * 4 + 1, "uint8")[1:].view("float32").reshape(run.q.shape)
    raw[...] = run.q
    assert not raw.flags.aligned
    run.q = raw
    run.check_forward(*run.forward())


@pytest.mark.gpu
def test_element_misaligned_memory_on_a_gpu():
    import cupy

    q, k, v = qkv(cupy)
    raw = cupy.empty(q.size * 4 + 1, "uint8")[1:].view("float32").reshape(q.shape)
    with pytest.raises(ValueError, match=r"q .*aligned"):
        flash_attention(raw, k, v)


class Foreign:
    """An array of another library, known by its DLPack methods alone."""

    def __init__(self, array):
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **kw):
        return self._array.__dlpack__(**kw)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_arrays_of_other_libraries(backend, xp):
    arrays = qkv(xp)
    want = flash_attention(*arrays, backend=backend)
    got = flash_attention(*map(Foreign, arrays), backend=backend)
    assert type(got) is type(want)
    assert bool((got == want).all())


def test_lists_are_arrays():
    assert flash_attention([[1.0]], [[2.0]], [[3.0]]).tolist() == [[3.0]]


# --- merge_attention


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_merging_uneven_chunks_is_one_call(dtype, backend, xp):
    q, k, v = qkv(xp, dtype, sk=23)
    want, want_lse = flash_attention(q, k, v, return_lse=True, backend=backend)
    cuts = (0, 1, 6, 6, 15, 23)
    parts = [
        flash_attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, backend=backend)
        for a, b in itertools.pairwise(cuts)
    ]
    out, lse = merge_attention(*zip(*parts, strict=True))
    assert out.dtype == want.dtype
    tolerance = {"float64": 1e-15, "float32": 1e-6, "float16": 2e-3}[dtype]  # a few roundings
    np.testing.assert_allclose(host(out), host(want), rtol=0, atol=tolerance)
    np.testing.assert_allclose(host(lse), host(want_lse), rtol=0, atol=min(tolerance, 1e-6))


def test_merging_where_a_part_sees_nothing():
    q, k, v = qkv(dtype="float64", sq=5, sk=8)
    options = {"causal": "top_left"}
    want, want_lse = flash_attention(q, k, v, return_lse=True, **options)
    left = flash_attention(q, k[:, :, :3], v[:, :, :3], return_lse=True, **options)
    # Keys 3 .. 8 seen from query 3 on: the first three rows see none of them.
    right = flash_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], return_lse=True, **options)
    padded = np.zeros_like(want), np.full_like(want_lse, -np.inf)
    padded[0][:, :, 3:], padded[1][:, :, 3:] = right
    out, lse = merge_attention((left[0], padded[0]), (left[1], padded[1]))
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-15)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-15)
    nothing = merge_attention((padded[0][:, :, :3],) * 2, (padded[1][:, :, :3],) * 2)
    assert not nothing[0].any()
    assert np.isneginf(nothing[1]).all()


def test_wrong_merges():
    q, k, v = qkv()
    out, lse = flash_attention(q, k, v, return_lse=True)
    for outs, lses, match in [
        ([], [], "pair up, got 0 and 0"),
        ([out], [lse, lse], "pair up, got 1 and 2"),
        ([out, out[:1]], [lse, lse[:1]], "part 1"),
        ([out], [lse[:1]], "part 0"),
        ([out, out.astype("float64")], [lse, lse], "dtype float64"),
    ]:
        with pytest.raises(ValueError, match=match):
            merge_attention(outs, lses)
