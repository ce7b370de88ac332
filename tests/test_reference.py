"""Every backend against the float64 formula, over the whole list of cases."""

from __future__ import annotations

import numpy as np
import pytest
from cases import ALL, SMALL, Run, case

import cuflash
from cuflash import numpy_backend


def tiles(backend: str):
    """Small blocks on the CPU, so that small cases have several; the GPU's own tiles there."""
    return numpy_backend.Config(16, 24, threads=2) if backend == "numpy" else None


@pytest.mark.parametrize("case", ALL, ids=str)
def test_case(case, backend, xp, small):
    if small and case not in SMALL:
        pytest.skip("too slow in the simulator; runs on a GPU")
    run = Run(case, xp)
    out, lse = run.forward(backend=backend, config=tiles(backend))
    assert out.dtype == run.q.dtype
    run.check_forward(out, lse)
    grads = run.backward(out, lse, backend=backend, config=tiles(backend))
    assert all(g.dtype == run.q.dtype for g in grads)
    run.check_backward(grads)


@pytest.mark.parametrize("config", [(1, 1), (5, 7), (64, 3), (1000, 1000)], ids=str)
def test_numpy_blocks_of_any_size(config):
    run = Run(case(33, 50, causal=True, window=(20, 3)), np)
    config = numpy_backend.Config(*config, threads=3)
    out, lse = run.forward(backend="numpy", config=config)
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, backend="numpy", config=config))


def numeric_gradient(f, x, step=1e-6):
    grad = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        old = x[i]
        x[i] = old + step
        up = f()
        x[i] = old - step
        grad[i] = (up - f()) / (2 * step)
        x[i] = old
    return grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softcap": 1.3},
        {"causal": "top_left", "window": (2, None)},
        {"softcap": 15.0, "scale": 0.9},
        {"window": (1, 2), "scale": -0.5},
    ],
    ids=str,
)
def test_gradients_against_finite_differences(options):
    run = Run(case(5, 7, d=3, dv=2, batch=1, heads=2, heads_kv=1, dtype="float64", **options), np)

    def loss():
        out, lse = run.forward()
        lse = np.where(np.isneginf(lse), 0, lse)
        return float((out * run.dout).sum() + (lse * run.dlse).sum())

    grads = run.backward(*run.forward())
    reference = run.reference_grad()
    for name in ("q", "k", "v"):
        want = numeric_gradient(loss, getattr(run, name))
        got = getattr(grads, "d" + name)
        # Central differences are good to step^2 and to rounding / step.
        np.testing.assert_allclose(got, want, atol=2e-8, rtol=0)
        np.testing.assert_allclose(getattr(reference, "d" + name), want, atol=2e-8, rtol=0)


def test_worked_example_of_the_papers():
    q = np.array([[1.0, 0], [0, 2], [1, 1]])
    k = np.array([[1.0, 1], [0, 1], [2, 0]])
    v = np.array([[1.0, 0], [0, 1], [1, 1]])
    want = [[0.910, 0.755], [0.532, 0.532], [0.845, 0.578]]
    np.testing.assert_allclose(cuflash.flash_attention(q, k, v, scale=1), want, atol=5e-4)
    np.testing.assert_allclose(cuflash.attention_reference(q, k, v, scale=1), want, atol=5e-4)
