"""Choosing the instruction set: what is offered and refused, and that a `with` block undoes its choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attn_ext import _load, backend


def test_the_active_set_is_one_of_those_offered_and_the_portable_one_is_always_there() -> None:
    names = backend.available()
    assert backend.active() in names
    assert names[-1] == "scalar"
    assert len(set(names)) == len(names)


def test_use_lasts_as_a_call_and_ends_with_its_block() -> None:
    before = backend.active()
    try:
        for name in backend.available():
            backend.use(name)
            assert backend.active() == name
        with backend.use("scalar"):
            assert backend.active() == "scalar"
            with pytest.raises(RuntimeError), backend.use(backend.available()[0]):
                raise RuntimeError
            assert backend.active() == "scalar"
        assert backend.active() == name
    finally:
        backend.use(before)
    assert backend.active() == before


@pytest.mark.parametrize("name", ["sse9", "", "AVX2", "avx2 "])
def test_unknown_names_are_refused_with_the_choices_and_change_nothing(name: str) -> None:
    before = backend.active()
    with pytest.raises(ValueError) as error:
        backend.use(name)
    assert repr(name) in str(error.value)
    assert all(choice in str(error.value) for choice in backend.available())
    assert backend.active() == before


def test_use_is_the_way_out_where_the_variable_names_no_instruction_set() -> None:
    program = """
from attn_ext import backend
try:
    backend.active()
except ValueError as error:
    assert "sse9" in str(error), error
else:
    raise AssertionError("sse9 was taken")
with backend.use("scalar"):
    assert backend.active() == "scalar"
print(backend.active())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ATTN_EXT_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "scalar", done.stderr


def test_where_there_are_no_cuda_kernels_nothing_can_be_asked_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_load, "cuda_device_type", None)
    monkeypatch.setattr(_load, "why_no_cuda", "this torch is a CPU build")
    with pytest.raises(RuntimeError, match="there are no CUDA kernels .this torch is a CPU build."):
        backend.check_cuda()
