"""The check that stands before every timing: right rows pass, and wrong ones are caught wherever they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench_support  # noqa: F401  makes `bench` importable
import pytest
import torch
from torch import Tensor

import attn_ext
from bench import attention
from bench.cases import Case, make_inputs
from bench.peers import torch_forward

EVERYTHING = 2**30

CASES = [
    Case("fp32", "forward", 2, 4, 33, 16, Hkv=2, causal=True),
    Case("bf16", "backward", 1, 2, 40, 16),
    Case("fp16", "forward", 1, 2, 40, 16, Lk=50, causal="bottom_right"),
    Case("fp64", "backward", 1, 2, 20, 8),
    Case("fp32", "forward+backward", 2, 2, 24, 8, bias="learned"),
    Case("fp32", "forward+backward", 2, 2, 24, 8, dropout_p=0.3),
    Case("fp32", "backward", 2, 4, 24, 8, Hkv=2, key_lengths=(24, 11), alibi=True, sinks=True, softcap=5.0),
    Case("fp32", "forward", 2, 2, 40, 8, mask="padding", bias="fixed"),
    Case("fp32", "forward", 1, 2, 40, 8, mask="documents", window=(9, 0), layout="tokens"),
]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """Replaces `attn_ext.attention` by one whose output is changed."""
    honest = attn_ext.attention

    def spoil_with(change: Callable[[Tensor], Tensor]) -> None:
        def spoiled(*args: Any, **kwargs: Any) -> Tensor:
            return change(honest(*args, **kwargs))

        monkeypatch.setattr(attn_ext, "attention", spoiled)

    return spoil_with


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_right_row_passes(case: Case) -> None:
    found = attention.check(case, make_inputs(case), EVERYTHING)
    assert found["ok"], found
    assert found["checked"] == "all heads"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_row_that_is_two_percent_off_fails(case: Case, spoil: Callable) -> None:
    spoil(lambda out: out * 1.02)
    assert not attention.check(case, make_inputs(case), EVERYTHING)["ok"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_nan_fails(direction: str, spoil: Callable) -> None:
    def one_nan(out: Tensor) -> Tensor:
        spots = torch.zeros_like(out)
        spots[..., -1, -1] = torch.nan
        return out + spots

    spoil(one_nan)
    case = Case("fp32", direction, 1, 2, 16, 8)
    assert not attention.check(case, make_inputs(case), EVERYTHING)["ok"]


def test_a_wrong_gradient_alone_fails(spoil: Callable) -> None:
    class DoubledGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    spoil(DoubledGradient.apply)
    case = Case("fp32", "backward", 1, 2, 16, 8)
    found = attention.check(case, make_inputs(case), EVERYTHING)
    assert not found["ok"]
    assert found["worst"].startswith(("dq", "dk", "dv"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_row_cut_into_heads_is_checked_piece_by_piece(
    direction: str, spoil: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LARGEST_PIECE", 1)
    case = Case(
        *("fp32", direction, 2, 4, 24, 8), Hkv=2, mask="padding", key_lengths=(24, 20), alibi=True, sinks=True
    )
    inputs = make_inputs(case)
    assert attention.check(case, inputs, EVERYTHING) | {"worst": ""} == {
        "ok": True,
        "worst": "",
        "checked": "all heads",
    }
    assert attention.check(case, inputs, 1)["checked"] == "1 of 4 key/value heads"

    def last_head_wrong(out: Tensor) -> Tensor:
        factor = torch.ones(2, 4, 1, 1)
        factor[-1, -1] = 1.1
        return out * factor

    spoil(last_head_wrong)
    found = attention.check(case, inputs, EVERYTHING)
    assert not found["ok"]
    assert "sequence 1, key/value head 1" in found["worst"]


@pytest.mark.parametrize("case", [c for c in CASES if not c.dropout_p], ids=lambda c: c.id)
def test_torch_computes_the_same_row(case: Case) -> None:
    inputs = make_inputs(case)
    ours, theirs = (
        attn_ext.attention(inputs.q, inputs.k, inputs.v, **inputs.options),
        torch_forward(case, inputs)[0](),
    )
    tolerance = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3, "fp64": 1e-6}[
        case.dtype
    ]  # ALiBi's slopes are fp32
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
