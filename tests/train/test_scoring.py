"""Bits per byte against a computation by hand; gzip and xz against the programs of that name."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attn_ext.models import CausalLM
from attn_ext.train import bits_per_byte, compressed_sizes, python_documentation

TEXT, BEFORE = b"what is scored: each byte once", b"what stands before it"


def model(context: int = 8) -> CausalLM:
    torch.manual_seed(3)
    lm = CausalLM(256, 16, 2, 32, 1, max_len=context)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(8)  # so that its predictions are far from uniform
    return lm.eval()


def by_hand(lm: CausalLM, text: bytes, before: bytes, context_of: list[int]) -> float:
    """Each byte by itself, from the last `context_of[i]` bytes before it."""
    whole, bits = list(before + text), 0.0
    for i, byte in enumerate(text):
        end = len(before) + i
        seen = whole[end - context_of[i] : end]
        probabilities = torch.softmax(lm(torch.tensor([seen]))[0, -1].double(), dim=0)
        bits -= math.log2(probabilities[byte].item())
    return bits / len(text)


def test_stride_one_sees_all_the_context_there_is() -> None:
    lm = model()
    expected = by_hand(lm, TEXT, BEFORE, [8] * len(TEXT))
    assert bits_per_byte(lm, TEXT, BEFORE, stride=1) == pytest.approx(expected, rel=1e-5)
    assert abs(expected - 8) > 0.1


@pytest.mark.parametrize("stride", [2, 3, 8])
def test_each_byte_is_predicted_once_from_the_context_that_is_promised(stride: int) -> None:
    lm = model()
    # Windows end after `stride`, 2·`stride` … bytes of the text, the last one at its end, and hold 8 predictions.
    ends = [min((i // stride + 1) * stride, len(TEXT)) for i in range(len(TEXT))]
    context_of = [8 - (end - 1 - i) for i, end in enumerate(ends)]
    assert min(context_of) == 8 - stride + 1
    expected = by_hand(lm, TEXT, BEFORE, context_of)
    assert bits_per_byte(lm, TEXT, BEFORE, stride=stride) == pytest.approx(expected, rel=1e-5)
    assert bits_per_byte(lm, TEXT, BEFORE, stride=1) != pytest.approx(expected, rel=1e-5)


def test_with_nothing_before_the_first_byte_costs_eight_bits() -> None:
    lm = model(context=64)
    rest = by_hand(lm, TEXT[1:], TEXT[:1], list(range(1, len(TEXT))))
    expected = (8 + rest * (len(TEXT) - 1)) / len(TEXT)
    assert bits_per_byte(lm, TEXT, stride=64) == pytest.approx(expected, rel=1e-5)
    assert bits_per_byte(lm, b"x") == 8.0


class CountsUp(nn.Module):
    """Certain that each byte is one above the last; in train mode it knows nothing."""

    max_len = 16

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot((tokens + 1) % 256, 256) * (0.0 if self.training else 100.0)


@pytest.mark.parametrize("length", [1, 7, 16, 17, 200])
def test_right_predictions_cost_nothing_and_the_mode_comes_back(length: int) -> None:
    counted: list[int] = []
    teacher = CountsUp().train()
    text = bytes(range(50, 50 + length))
    bits = bits_per_byte(teacher, text, bytes(range(30, 50)), on_bytes=counted.append)  # type: ignore[arg-type]
    assert bits == pytest.approx(0.0, abs=1e-6) and sum(counted) == length and teacher.training
    wrong = bits_per_byte(teacher, text[::-1], bytes(20))  # type: ignore[arg-type]
    assert wrong > 100


def test_each_module_gets_its_own_mode_back() -> None:
    lm = model().train()
    lm.blocks.eval()
    before = [module.training for module in lm.modules()]
    bits_per_byte(lm, TEXT)
    assert [module.training for module in lm.modules()] == before and len(set(before)) == 2


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte, got an empty text"):
        bits_per_byte(model(), b"")
    for stride in (0, 9):
        with pytest.raises(ValueError, match=f"stride must be from 1 to max_len = 8, got {stride}"):
            bits_per_byte(model(), TEXT, stride=stride)


@pytest.mark.parametrize("program", ["gzip", "xz"])
def test_compressed_sizes_are_those_of_the_programs(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    text = python_documentation().encode()[:60_000]
    stored = subprocess.run([program, "-9", "-c"], input=text, capture_output=True, check=True).stdout
    assert compressed_sizes(text)[f"{program} -9"] == pytest.approx(len(stored), rel=0.005)
