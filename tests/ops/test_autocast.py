"""Autocast: q, k and v are cast as for torch's attention, biases never."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_support import assert_same_bits, make, random_bool

import attn_ext

FUNCTIONS = {"attention": attn_ext.attention, "drop-in": attn_ext.scaled_dot_product_attention}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def short(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype autocast casts to."""
    return request.param


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32", "float32"),
        ("float32", "float32", "bfloat16"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float64", "float64", "float64"),
    ],
    ids=lambda d: " ".join(d),
)
def test_dtypes_under_autocast_are_those_of_torchs_attention(
    function: str, dtypes: tuple[str, str, str], short: torch.dtype
) -> None:
    q, k, v = (make((2, 4, 7, 8), getattr(torch, d), seed=i) for i, d in enumerate(dtypes))
    with torch.autocast("cpu", dtype=short):
        expected = F.scaled_dot_product_attention(q, k, v)
        actual = FUNCTIONS[function](q, k, v)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_autocast_casts_the_inputs_and_does_nothing_else(short: torch.dtype, grad: bool) -> None:
    q, k, v = (make((2, 4, 7, 8), seed=i).requires_grad_(grad) for i in range(3))
    bias = make((4, 7, 7), seed=6)
    for options in ({}, {"causal": True}, {"bias": bias}, {"mask": random_bool(7, 7), "sinks": make((4,))}):
        with torch.autocast("cpu", dtype=short):
            actual = attn_ext.attention(q, k, v, **options)
        expected = attn_ext.attention(*(x.detach().to(short) for x in (q, k, v)), **options)
        assert_same_bits(actual, expected, "autocast against cast by hand")


def test_a_bias_in_single_precision_is_not_rounded_by_autocast(short: torch.dtype) -> None:
    q, k, v = (make((1, 2, 4, 8), seed=i) for i in range(3))
    bias = make((4, 4), seed=6) + 1000.3  # bf16 would round it to a multiple of 4
    slopes, sinks = torch.tensor([1.003, 0.251]), torch.tensor([1000.7, 999.9])
    with torch.autocast("cpu", dtype=short):
        out, lse = attn_ext.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True)
    rounded = [x.to(short) for x in (q, k, v)]
    truth, truth_lse = attn_ext.reference.attention(
        *rounded, bias=bias, alibi_slopes=slopes, sinks=sinks, return_lse=True, dtype=torch.float64
    )
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=2e-4)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=2e-2)


def test_gradients_come_back_in_the_dtypes_of_the_leaves(short: torch.dtype) -> None:
    q, k, v = (make((2, 4, 7, 8), seed=i).requires_grad_(True) for i in range(3))
    v = v.detach().bfloat16().requires_grad_(True)
    bias = make((4, 7, 7), seed=6).requires_grad_(True)
    with torch.autocast("cpu", dtype=short):
        out = attn_ext.attention(q, k, v, bias=bias, causal=True)
    out.float().square().sum().backward()
    for leaf, dtype in ((q, torch.float32), (k, torch.float32), (v, torch.bfloat16), (bias, torch.float32)):
        assert leaf.grad.dtype == dtype and torch.isfinite(leaf.grad).all()
    exact = [x.detach().double().requires_grad_(True) for x in (q, k, v, bias)]
    attn_ext.reference.attention(*exact[:3], bias=exact[3], causal=True).square().sum().backward()
    for leaf, truth in zip((q, k, v, bias), exact, strict=True):
        assert (leaf.grad.double() - truth.grad).abs().max() <= 0.05 * truth.grad.abs().max()


def test_mixed_dtypes_work_inside_autocast_and_are_refused_outside() -> None:
    q, k, v = (
        make((2, 4, 7, 8), seed=1),
        make((2, 4, 7, 8), seed=2),
        make((2, 4, 7, 8), torch.bfloat16, seed=3),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn_ext.attention(q, k, v).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False), pytest.raises(TypeError, match="bfloat16"):
            attn_ext.attention(q, k, v)
    with pytest.raises(TypeError, match="bfloat16"):
        attn_ext.attention(q, k, v)


def test_the_other_functions_follow_autocast_too() -> None:
    q, k = make((2, 4, 7, 8), seed=1), make((2, 2, 9, 8), torch.bfloat16, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attn_ext.attention_weights(q, k)
        packed = attn_ext.attention_varlen(
            q[0].transpose(0, 1),
            k[0].transpose(0, 1),
            k[0].transpose(0, 1),
            torch.tensor([0, 7]),
            torch.tensor([0, 9]),
        )
    expected = attn_ext.attention_weights(q.bfloat16(), k)
    assert_same_bits(weights, expected, "weights")
    assert packed.dtype == torch.bfloat16


def test_second_derivatives_and_forward_mode_work_under_autocast() -> None:
    q, k, v = (make((1, 2, 4, 8), seed=i).requires_grad_(True) for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attn_ext.attention(q, k, v)
        (g,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(g.square().sum(), k)
        _, tangent = torch.func.jvp(lambda q: attn_ext.attention(q, k, v), (q,), (torch.ones_like(q),))
    assert torch.isfinite(second).all() and (second != 0).any()
    assert tangent.shape == out.shape and (tangent != 0).any()
