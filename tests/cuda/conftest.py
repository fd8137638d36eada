"""The CUDA kernels through the package's own functions: on a GPU, or run on the CPU by their simulator.

    python -m pytest tests/cuda                                  where torch has a GPU, and attn_ext its kernels for it
    python setup.py build_cuda_sim && ATTN_EXT_CUDA_SIM=1 python -m pytest tests/cuda       (make cuda-sim-python)

Sizes are small, for a simulated call takes a thousand times as long as a real one. Where there is neither there is
nothing to test here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_support import DEVICE, SIMULATED, OnlyOnTheDevice
from op_support import DTYPE_IDS, DTYPES

if DEVICE is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    if SIMULATED:
        how = "run by the simulator"
    elif DEVICE is not None:
        how = f"run by {torch.cuda.get_device_name()}"
    else:
        how = "not tested: there is no GPU that serves, and ATTN_EXT_CUDA_SIM=1 asks for the simulator"
    return f"CUDA kernels: {how}"


@pytest.fixture(params=DTYPES, ids=DTYPE_IDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each supported dtype."""
    return request.param


@pytest.fixture(autouse=True)
def the_cuda_kernels_run() -> Iterator[None]:
    """Everything below would pass on the CPU's own kernels as well."""
    import attn_ext

    assert not SIMULATED or attn_ext.backend.active() == "cuda_sim"
    with OnlyOnTheDevice():
        yield
