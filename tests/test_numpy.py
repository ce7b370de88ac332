"""What the tiled NumPy backend promises beyond right numbers: memory, threads, its trace."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from cases import Run, case
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import flash_attention, flash_attention_grad, numpy_backend, trace
from cuflash.problem import Problem, blocks, k_bounds, transposed


def peak_bytes(f) -> int:
    """Bytes allocated at the most while f runs, its results included."""
    tracemalloc.start()
    try:
        f()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_small_where_the_matrix_would_not():
    # One head of S = 8,192: the score matrix would be 268 MB in float32, four would be a GB.
    q = np.random.default_rng(0).standard_normal((1, 1, 8192, 64), dtype="float32")
    out, lse = flash_attention(q, q, q, return_lse=True)
    assert peak_bytes(lambda: flash_attention(q, q, q)) < 16e6
    assert peak_bytes(lambda: flash_attention_grad(out, q, q, q, out, lse)) < 64e6


def test_threads_do_not_change_the_forward_and_repeat_the_backward():
    run = Run(case(90, 110, dtype="float32", causal=True), np)
    config = [numpy_backend.Config(16, 16, threads) for threads in (1, 2, 5)]
    outs = [run.forward(config=c) for c in config]
    assert all((o == outs[0][0]).all() and (e == outs[0][1]).all() for o, e in outs)
    for c in config:
        first, again = (run.backward(*outs[0], config=c) for _ in range(2))
        assert all((a == b).all() for a, b in zip(first, again, strict=True))


def test_calls_from_several_threads_at_once_leave_blas_as_it_was():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    run = Run(case(120, 130), np)
    want = run.forward()
    before = [lib["num_threads"] for lib in threadpoolctl.threadpool_info()]
    results = []
    threads = [threading.Thread(target=lambda: results.append(run.forward())) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 8
    assert all((o == want[0]).all() for o, _ in results)
    assert [lib["num_threads"] for lib in threadpoolctl.threadpool_info()] == before


@pytest.mark.parametrize("schedule", ["q-resident", "kv-resident"])
def test_trace_ends_at_the_result(schedule):
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((11, 4)),
        rng.standard_normal((13, 4)),
        rng.standard_normal((13, 3)),
    )
    want, want_lse = flash_attention(q, k, v, return_lse=True)
    last = {}
    steps = list(trace(q, k, v, 4, 5, schedule))
    for step in steps:
        last[step.queries.start] = step
    assert len(steps) == 3 * 3
    for step in last.values():
        np.testing.assert_allclose(step.o / step.l[:, None], want[step.queries], atol=1e-14)
        np.testing.assert_allclose(step.m + np.log(step.l), want_lse[step.queries], atol=1e-14)


def test_elements_moved_by_either_timetable():
    n, d, b_q, b_k = 64, 8, 16, 32
    x = np.ones((n, d))
    q_resident = list(trace(x, x, x, b_q, b_k))[-1].moved
    kv_resident = list(trace(x, x, x, b_q, b_k, "kv-resident"))[-1].moved
    # Q in and O out once, K and V once per query block; K and V once, Q, O in and O out per visit.
    assert q_resident == 2 * n * d + (n // b_q) * 2 * n * d
    assert kv_resident == 2 * n * d + (n // b_k) * 3 * n * d


def test_a_row_streamed_one_score_at_a_time():
    steps = list(trace([[1.0]], [[101.0], [100], [102]], [[1.0, 0], [0, 1], [1, 1]], 1, 1, scale=1))
    assert [float(s.m[0]) for s in steps] == [101, 101, 102]
    assert steps[-1].l[0] == pytest.approx(1.5032, abs=5e-5)
    np.testing.assert_allclose(steps[-1].o[0] / steps[-1].l[0], [0.910, 0.755], atol=5e-4)
    assert float(steps[1].rescale[0]) == 1  # no new maximum: nothing changes but the sum


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schedule": "random"}, "schedule must be"),
        ({"block_q": 0}, "block_q must be at least 1"),
        ({"block_k": -2}, "block_k must be at least 1"),
        ({"q": np.ones((2, 3, 4))}, "number of axes"),
        ({"scale": float("nan")}, "scale"),
    ],
    ids=str,
)
def test_wrong_traces(change, match):
    good = {"q": np.ones((3, 4)), "k": np.ones((3, 4)), "v": np.ones((3, 4))}
    with pytest.raises(ValueError, match=match):
        trace(**({**good, "block_q": 1, "block_k": 1} | change))


lengths = st.integers(0, 40)
sides = st.one_of(st.none(), st.integers(0, 50))


@settings(max_examples=200, deadline=None)
@given(lengths, lengths, sides, sides, st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_block_bounds_cover_what_is_visible(sq, sk, left, right, bottom_right, bq, bk):
    problem = Problem("cpu", "float32", 1, 1, 1, sq, sk, 1, 1, 1.0, left, right, bottom_right)
    i, j = np.indices((sq, sk))
    diagonal = i + (sk - sq if bottom_right else 0)
    visible = np.ones((sq, sk), bool)
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    assert problem.pairs() == visible.sum()
    for n, m, band, seen, b_rows, b_columns in (
        (sq, sk, problem.band, visible, bq, bk),
        (sk, sq, transposed(problem.band), visible.T, bk, bq),
    ):
        lo, hi = k_bounds(np.arange(n)[:, None], m, *band)
        assert ((np.arange(m) >= lo) & (np.arange(m) < hi) == seen).all()
        for q0 in range(0, n, b_rows):
            q1, covered = min(q0 + b_rows, n), np.zeros(m, bool)
            for k0, k1, whole in blocks(q0, q1, m, b_columns, band):
                covered[k0:k1] = True
                assert whole == seen[q0:q1, k0:k1].all()
            assert covered[seen[q0:q1].any(0)].all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_problems(data):
    draw = data.draw
    group, heads_kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options = {
        "causal": draw(st.sampled_from([False, True, "top_left"])),
        "window": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "softcap": draw(st.sampled_from([None, 0.5, 20.0])),
        "scale": draw(st.sampled_from([None, 0.0, -1.0, 0.3])),
    }
    options = {name: value for name, value in options.items() if value is not None}
    problem = case(
        draw(st.integers(1, 40)), draw(st.integers(1, 40)), d=draw(st.integers(1, 9)),
        dv=draw(st.integers(1, 9)), batch=1, heads=group * heads_kv, heads_kv=heads_kv,
        dtype=draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"])),
        layout=draw(st.sampled_from(["poisoned", "negative", "step", "bshd", "fortran"])),
        dlse=draw(st.booleans()), **options,
    )  # fmt: skip
    run = Run(problem, np, seed=draw(st.integers(0, 5)))
    config = numpy_backend.Config(draw(st.integers(1, 50)), draw(st.integers(1, 50)), 2)
    out, lse = run.forward(config=config)
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, config=config))


def test_import_needs_numpy_only():
    import subprocess
    import sys

    code = "import sys, cuflash; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for name in ("cupy", "numba", "scipy", "matplotlib", "rich", "ml_dtypes"):
        assert f"'{name}'" not in loaded.stdout, f"import cuflash imports {name}"


def test_reference_gives_probability_rows_that_sum_to_one():
    q = np.random.default_rng(0).standard_normal((2, 5, 4))
    ones = np.ones((2, 5, 1))
    np.testing.assert_allclose(cuflash.attention_reference(q, q, ones, causal=True), 1, rtol=1e-15)
    with pytest.raises(ValueError, match="dtype must be"):
        cuflash.attention_reference(q, q, ones, dtype="int8")
