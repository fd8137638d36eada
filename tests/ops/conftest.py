"""Fixtures that the op tests share, beside those of tests/conftest.py."""

from __future__ import annotations

import pytest
import torch
from op_support import DTYPE_IDS, DTYPES


@pytest.fixture(params=DTYPES, ids=DTYPE_IDS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each supported dtype."""
    return request.param
