"""Sizes, scales and biases at the end of what numbers can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ext import attention, attention_weights, reference


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("exponent", [46, 53, 60, 61, 62])
def test_tensors_that_claim_more_than_any_memory_are_refused(exponent: int) -> None:
    wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, 2**exponent)
    narrow = torch.zeros(1, 1, 1, 1)
    for dtype in (torch.float32, torch.float64):
        t, v = narrow.to(dtype).expand_as(wide), narrow.to(dtype)
        with pytest.raises(ValueError, match=r"q \(1, 1, 1, \d+\) has more than 2\^45 elements"):
            attention(t, t, v)
        with pytest.raises(ValueError, match=r"v \(1, 1, 1, \d+\) has more than 2\^45 elements"):
            attention(v, v, t)
        with pytest.raises(ValueError, match=r"has more than 2\^45 elements"):
            attention(t.detach().requires_grad_(), t, v)
        with pytest.raises(ValueError, match=r"has more than 2\^45 elements"):
            attention_weights(t, t)
    empty = torch.zeros(0, 1, 1, 2**exponent)
    with pytest.raises(ValueError, match=r"has more than 2\^45 elements"):
        attention(empty, empty, torch.zeros(0, 1, 1, 1))
    rows, off = torch.zeros(1, 1, 1), [None] * 9
    with pytest.raises(ValueError, match=r"has more than 2\^45 elements"):
        torch.ops.attn_ext.attention_backward(
            wide, None, narrow, narrow, wide, wide, rows, rows, *off, 0, None, None, None, 0.0, 0.0, 1
        )  # fmt: skip


def test_weights_that_no_memory_holds_are_refused() -> None:
    long = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**33, 1)
    with pytest.raises(
        ValueError, match=r"the weights would have more than 2\^45 elements: q \(1, 1, 8589934592, 1\)"
    ):
        attention_weights(long, long)


def test_memory_that_runs_out_on_any_thread_is_a_memory_error() -> None:
    """The scratch of such rows is larger than an address space; afterwards the threads work on."""
    threads = torch.get_num_threads()
    narrow = torch.zeros(1, 8, 4, 1, dtype=torch.float64)
    wide = narrow.expand(1, 8, 4, 2**40)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with pytest.raises(MemoryError):
                attention(wide, wide, narrow)
            q, k, v = inputs()
            torch.testing.assert_close(attention(q, k, v), reference.attention(q, k, v))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1e-46, -1e-46, 5e-324, -1e-300, 1e-38])
def test_a_scale_too_small_for_the_scores_is_as_good_as_zero(
    isa: str, dtype: torch.dtype, scale: float
) -> None:
    q, k, v = inputs(dtype)
    out, lse = attention(q, k, v, scale=scale, return_lse=True)
    truth = reference.attention(*(t.double() for t in (q, k, v)), scale=scale)
    assert (out.double() - truth).abs().max() < 4 * torch.finfo(dtype).eps
    assert torch.isfinite(lse).all()
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[:, 4] = False
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attention(*leaves, scale=scale, mask=mask).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in leaves)  # type: ignore[arg-type]


def test_numbers_that_the_scores_cannot_hold_are_refused() -> None:
    q, k, v = inputs()
    for options in ({"scale": 1e39}, {"scale": -3e38}, {"softcap": 1e39}, {"softcap": 1e-39}):
        with pytest.raises(ValueError, match="fit the dtype of the scores"):
            attention(q, k, v, **options)
        doubles = [t.double() for t in (q, k, v)]
        torch.testing.assert_close(attention(*doubles, **options), reference.attention(*doubles, **options))


@pytest.mark.parametrize("other", [torch.nan, torch.inf])
def test_a_bias_of_minus_infinity_hides_whatever_else_is_added(isa: str, other: float) -> None:
    q, k, v = inputs()
    hides, adds = torch.zeros(5, 6), torch.zeros(5, 6)
    hides[:, 2] = -torch.inf
    adds[:, 2] = other
    seen = hides == 0
    expected = attention(q, k, v, mask=seen)
    for options in ({"bias": hides, "mask": adds}, {"bias": adds, "mask": hides}):
        torch.testing.assert_close(attention(q, k, v, **options), expected, rtol=1e-6, atol=1e-6)
    slopes = torch.full((4,), torch.inf)
    one_row: dict[str, Any] = {"alibi_slopes": slopes, "window": (0, 0)}
    close = torch.zeros(5, 6)
    close[4, 5] = -torch.inf  # the only key that row 4 sees
    assert torch.equal(attention(q, k, v, bias=close, **one_row)[:, :, 4], torch.zeros(2, 4, 3))


def test_a_float64_bias_stays_finite_beside_float32(isa: str) -> None:
    q, k, v = inputs()
    bias = torch.full((5, 6), torch.finfo(torch.float64).min, dtype=torch.float64)
    mean = v.mean(dim=2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 5, 3)
    torch.testing.assert_close(attention(q, k, v, bias=bias), mean)
    torch.testing.assert_close(reference.attention(q, k, v, bias=bias), mean)
    bias[:, 0] = -torch.inf
    rest = v[:, :, 1:].mean(dim=2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 5, 3)
    torch.testing.assert_close(attention(q, k, v, bias=bias), rest)
    torch.testing.assert_close(reference.attention(q, k, v, bias=bias), rest)


def test_a_row_without_a_key_is_zero_whatever_its_sink(isa: str) -> None:
    q, k, v = inputs()
    for sink in (torch.nan, torch.inf, -torch.inf, 3.0):
        sinks = torch.full((4,), sink)
        out = attention(q, k, v, sinks=sinks, mask=torch.zeros(5, 6, dtype=torch.bool))
        assert torch.equal(out, torch.zeros(2, 4, 5, 3)), sink
