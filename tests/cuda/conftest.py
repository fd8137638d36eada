"""The CUDA kernels through the package's own functions: run on the CPU by their simulator.

    python setup.py build_cuda_sim && ATTN_EXT_CUDA_SIM=1 python -m pytest tests/cuda       (make cuda-sim-python)

Sizes are small, for a simulated call takes a thousand times as long as a real one. Without the variable there is
nothing to test here.
"""

from __future__ import annotations

import os

import pytest
import torch
from op_support import DTYPE_IDS, DTYPES

SIMULATED = os.environ.get("ATTN_EXT_CUDA_SIM") == "1"
if not SIMULATED:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    how = "run by the simulator" if SIMULATED else "not tested: ATTN_EXT_CUDA_SIM=1 asks for the simulator"
    return f"CUDA kernels: {how}"


@pytest.fixture(params=DTYPES, ids=DTYPE_IDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each supported dtype."""
    return request.param


@pytest.fixture(autouse=True, scope="session")
def the_cuda_kernels_run() -> None:
    """Everything below would pass on the CPU's own kernels as well."""
    import attn_ext

    assert attn_ext.backend.active() == "cuda_sim"
