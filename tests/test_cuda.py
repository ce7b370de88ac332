"""What the raw CUDA kernels promise: right numbers for their dtypes, and what a launch is told."""

from __future__ import annotations

import pytest
from cases import ALL, Run

from cuflash import cuda_backend


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in ALL if c.dtype in cuda_backend.ELEMENTS], ids=str)
def test_case(case):
    import cupy

    run = Run(case, cupy)
    out, lse = run.forward(backend="cuda")
    run.check_forward(out, lse)
    run.check_backward(run.backward(out, lse, backend="cuda"))
