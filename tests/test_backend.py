"""Choosing the instruction set: what is offered and refused, and that a `with` block undoes its choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attn_ext import _load, backend
from attn_ext._load import _C


def test_the_active_set_is_one_of_those_offered_and_the_portable_one_is_always_there() -> None:
    names = backend.available()
    assert backend.active() in names
    assert names[-1] == "scalar"
    assert len(set(names)) == len(names)


def run(program: str, **variables: str) -> str:
    """What a program prints in a process of its own, where no instruction set is forced."""
    kept = {name: value for name, value in os.environ.items() if name != "ATTN_EXT_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_first_one_runs_where_nobody_asks_for_another() -> None:
    by_default = [isa["name"] for isa in _C.isas() if isa["by_default"]]
    assert by_default == [backend.available()[0]]
    assert run("from attn_ext import backend; print(backend.active())") == by_default[0]


tiles = next(isa for isa in _C.isas() if isa["name"] == "amx_bf16")
needs_tiles = pytest.mark.skipif(
    not tiles["supported"],
    reason="asks Linux for AMX's tiles (an Intel CPU since Sapphire Rapids, Linux since 5.16), which are not to be had "
    f"here: {tiles['why_not']}",
)

# A signal stack of 4 KB is enough without tiles and too small with them; then Linux grants none.
SMALL_SIGNAL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(SIZE)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, SIZE)), None) == 0
"""


@needs_tiles
def test_tiles_that_linux_refuses_are_not_there_and_the_reason_is_given() -> None:
    program = """
import sys
import attn_ext
from attn_ext._load import _C
amx = next(isa for isa in _C.isas() if isa["name"] == "amx_bf16")
assert amx["compiled"] and not amx["supported"], amx
assert "errno 28" in amx["why_not"] and "sigaltstack" in amx["why_not"], amx
assert "lacks" not in amx["why_not"], amx
assert "amx_bf16" not in attn_ext.backend.available() and "amx_bf16" not in _C.cpu_features()
assert _C.measure_bf16_peak(1, 0.01, "amx_bf16") is None
try:
    attn_ext.backend.use("amx_bf16")
except ValueError as error:
    assert "'amx_bf16' (Linux refuses AMX's tiles" in str(error), error
else:
    raise AssertionError("refused tiles were taken")
import torch
q = torch.randn(1, 2, 40, 64).bfloat16()
out = attn_ext.attention(q, q, q)
plain = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double())
assert (out - plain).abs().max() < 0.05
print(attn_ext.backend.active())
"""
    small = SMALL_SIGNAL_STACK.replace("SIZE", "4096")
    assert run(small + program) == next(name for name in backend.available() if name != "amx_bf16")
    # Where the variable asks for them, the error says why they are not there.
    refused = """
from attn_ext import backend
try:
    print(backend.active())
except ValueError as error:
    print(error)
"""
    said = run(small + refused, ATTN_EXT_ISA="amx_bf16")
    assert "ATTN_EXT_ISA names the ISA 'amx_bf16' (Linux refuses AMX's tiles" in said, said
    assert run(SMALL_SIGNAL_STACK.replace("SIZE", "65536") + refused) == backend.available()[0]


@needs_tiles
def test_who_forces_an_instruction_set_without_tiles_asks_linux_for_none() -> None:
    program = """
import torch
import attn_ext
q = torch.randn(1, 2, 40, 64)
attn_ext.attention(q, q, q)
"""  # the small stack comes after it: with the permission Linux would refuse that
    assert (
        run(program + SMALL_SIGNAL_STACK.replace("SIZE", "4096") + "print(1)", ATTN_EXT_ISA="avx512") == "1"
    )


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
    assert run(program, ATTN_EXT_ISA="sse9") == "scalar"


def test_where_there_are_no_cuda_kernels_nothing_can_be_asked_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_load, "cuda_device_type", None)
    monkeypatch.setattr(_load, "why_no_cuda", "this torch is a CPU build")
    with pytest.raises(RuntimeError, match="there are no CUDA kernels .this torch is a CPU build."):
        backend.check_cuda()
