"""Output, lse and gradients of the CUDA kernels: options alone and in pairs, every dtype, odd sizes, any strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_support import PARTS, attention, check_forward, check_gradients, pairs, raw_backward, raw_forward
from device_support import DEVICE
from op_support import (
    DTYPES,
    LAYOUTS,
    OPTIONS,
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    make,
    reference_call,
)
from torch import Tensor

SMALL = Shape(2, 4, 2, 7, 37, 5, 3)  # one block of rows, two tiles of keys
SQUARE = Shape(2, 2, 1, 35, 35, 9)  # two blocks of rows


# ------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_in_every_dtype(dtype: torch.dtype, option: str) -> None:
    check_forward(*SMALL.qkv(dtype), OPTIONS[option](SMALL))


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_every_option_in_every_dtype(dtype: torch.dtype, option: str) -> None:
    s = Shape(2, 2, 1, 5, 34, 3, 2)
    check_gradients(*s.qkv(dtype), OPTIONS[option](s), with_lse=True)


@pytest.mark.parametrize(("first", "second"), list(pairs()))
def test_every_pair_of_options(first: str, second: str) -> None:
    s = Shape(2, 2, 1, 6, 35, 3)
    options = {**PARTS[first](s), **PARTS[second](s)}
    check_forward(*s.qkv(), options)
    check_gradients(*s.qkv(), options)


@pytest.mark.parametrize("part", PARTS)
def test_blocks_of_rows_that_see_different_tiles(part: str) -> None:
    options = PARTS[part](SQUARE)
    check_forward(*SQUARE.qkv(), options)
    check_gradients(*SQUARE.qkv(), options)


# --------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("d", [1, 2, 7, 16, 33, 63, 64, 65, 96, 127, 128, 129, 160, 200])
def test_head_dims(d: int) -> None:
    for dtype in DTYPES:
        check_forward(*Shape(1, 1, 1, 3, 33, d).qkv(dtype), {})
        check_forward(*Shape(1, 1, 1, 3, 5, 3, d).qkv(dtype), {})
    check_gradients(*Shape(1, 1, 1, 3, 5, d, max(1, 130 - d)).qkv(), {"bias": make((3, 5))})


@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_query_heads_that_share_a_key_head(group: int) -> None:
    s = Shape(1, 2 * group, 2, 5, 9, 4)
    check_forward(*s.qkv(), {"causal": "bottom_right"})
    check_gradients(*s.qkv(), {"causal": "bottom_right", "sinks": torch.linspace(-1, 1, s.hq)})


@pytest.mark.parametrize(
    ("lq", "lk"), [(1, 1), (1, 65), (31, 33), (32, 32), (33, 31), (64, 2), (65, 40), (70, 1)]
)
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_lengths_about_the_tiles_edges(lq: int, lk: int, causal: Any) -> None:
    s = Shape(1, 1, 1, lq, lk, 4)
    for dtype in (torch.float32, torch.float64):
        check_forward(*s.qkv(dtype), {"causal": causal})
    check_gradients(*s.qkv(), {"causal": causal})


@pytest.mark.parametrize("rank", [3, 5])
def test_three_and_five_dims(rank: int) -> None:
    lead = (2, 3) if rank == 5 else ()
    q, k, v = make((*lead, 2, 4, 5), seed=1), make((*lead, 1, 6, 5), seed=2), make((*lead, 1, 6, 3), seed=3)
    bias = make((*(n if i else 1 for i, n in enumerate(lead)), 2, 4, 6), seed=4)
    check_forward(q, k, v, {"bias": bias, "causal": "bottom_right"})
    check_gradients(q, k, v, {"bias": bias, "causal": "bottom_right"})


@pytest.mark.parametrize(
    "shape",
    [(0, 2, 1, 3, 4, 5, 0), (2, 0, 0, 3, 4, 5, 0), (2, 2, 1, 0, 4, 5, 0), (2, 2, 1, 3, 0, 5, 0)],
    ids=["batch", "heads", "queries", "keys"],
)
def test_nothing_to_do_along_one_dim(shape: tuple[int, ...]) -> None:
    q, k, v = Shape(*shape).qkv()
    out, lse = attention(q, k, v, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    check_gradients(q, k, v, {})


def test_without_keys_the_lse_is_the_sink_and_hands_its_gradient_on(dtype: torch.dtype) -> None:
    options = {"sinks": torch.tensor([0.5, -1.0])}
    grads = check_gradients(*Shape(2, 2, 1, 3, 0, 8).qkv(dtype), options, with_lse=True)
    assert (grads["sinks"] != 0).all()


def test_value_heads_without_columns_still_have_an_lse() -> None:
    q, k, _ = Shape(1, 1, 1, 3, 5, 4).qkv()
    v = torch.zeros(1, 1, 5, 0)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (1, 1, 3, 0)
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 2, -1))


# ------------------------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    s = Shape(2, 4, 2, 6, 35, 5)
    for dtype in DTYPES:
        q, k, v = s.qkv(dtype, layout)
        check_forward(q, k, v, {"causal": "bottom_right"})
    grad_out = make((2, 4, 6, 5), torch.float32, layout, seed=8)
    check_gradients(*s.qkv(torch.float32, layout), {}, grad_out=grad_out)


def test_masks_and_biases_with_strides_of_their_own() -> None:
    s = Shape(2, 2, 1, 5, 34, 4)
    mask = torch.rand(s.lk, s.lq, 2 * s.b, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = mask.permute(2, 1, 0)[::2].unsqueeze(1)  # (B, 1, Lq, Lk), no dim contiguous
    bias = make((s.lq, s.hq, 2 * s.lk)).transpose(0, 1)[..., ::2]
    check_forward(*s.qkv(), {"mask": mask, "bias": bias})
    check_gradients(*s.qkv(), {"mask": mask, "bias": bias})
    check_forward(*s.qkv(), {"mask": mask.expand(2, 2, 5, 34), "bias": bias[:1, :1].expand(2, 2, 5, 34)})


@pytest.mark.parametrize("varies", range(16))
def test_gradients_of_biases_that_broadcast(varies: int) -> None:
    s = Shape(2, 4, 2, 5, 34, 3)
    sizes = [n if varies >> d & 1 else 1 for d, n in enumerate((s.b, s.hq, s.lq, s.lk))]
    for dtype in (torch.float32, torch.bfloat16):
        bias = make(sizes, dtype, seed=6)
        check_gradients(*s.qkv(torch.float64), {"bias": bias, "softcap": 2.0}, wanted=["bias"])


def test_two_biases_have_a_gradient_each() -> None:
    s = Shape(2, 2, 1, 5, 34, 3)
    options = {"mask": make((s.b, 1, 1, s.lk), seed=5), "bias": make((s.hq, s.lq, s.lk), seed=6)}
    check_gradients(*s.qkv(), options)
    check_gradients(*s.qkv(), options, wanted=["mask"])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_one_gradient_alone(wanted: str) -> None:
    s = Shape(2, 4, 2, 5, 34, 3)
    options = {"bias": make((1, 4, 5, 34), seed=6), "sinks": torch.linspace(-1, 1, 4)}
    check_gradients(*s.qkv(), options, wanted=[wanted])


# ------------------------------------------------------------------------------------------- extremes and hidden keys


def test_huge_scores_and_huge_biases_stay_exact() -> None:
    s = Shape(1, 1, 1, 3, 40, 4)
    q, k, v = s.qkv()
    check_forward(q * 3e5, k * 3e5, v, {})
    check_gradients(q, k, v, {"bias": torch.full((3, 40), torch.finfo(torch.float32).min)})


def test_what_hidden_keys_hold_touches_nothing() -> None:
    s = Shape(1, 2, 1, 6, 37, 5)
    q, k, v = s.qkv()
    seen = torch.rand(6, 37, generator=torch.Generator().manual_seed(1)) < 0.6
    seen[:, ::4] = False  # nobody sees these
    options: dict[str, Any] = {"mask": seen, "bias": make((6, 37), seed=6)}
    tensors = [t.clone().requires_grad_(True) for t in (q, k, v)]
    clean = attention(*tensors, **options)
    clean_grads = torch.autograd.grad(clean.square().sum(), tensors)
    for filler in (math.nan, math.inf):
        k2, v2 = k.clone(), v.clone()
        k2[..., ::4, :], v2[..., ::4, :] = filler, filler
        tensors = [t.clone().requires_grad_(True) for t in (q, k2, v2)]
        out = attention(*tensors, **options)
        assert_same_bits(out, clean, f"output beside {filler}")
        for got, want, name in zip(
            torch.autograd.grad(out.square().sum(), tensors), clean_grads, "qkv", strict=True
        ):
            assert_same_bits(got, want, f"gradient of {name} beside {filler}")


def test_nan_in_what_a_row_sees_stays_in_that_row() -> None:
    q, k, v = Shape(1, 1, 1, 5, 9, 4).qkv()
    v[0, 0, 4, 1] = math.nan
    out = attention(q, k, v, causal="top_left")
    assert out[0, 0, 4:, 1].isnan().all()
    assert out.isnan().sum() == 1


def test_rows_that_see_no_key_take_no_part() -> None:
    s = Shape(1, 2, 1, 6, 9, 4)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[::2] = False
    q, k, v = (t.requires_grad_(True) for t in s.qkv())
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert not out[:, :, ::2].any()
    assert_same_bits(
        lse[:, :, ::2], sinks.detach()[:, None].expand(1, 2, 3), "lse of a row with a sink alone"
    )
    upstream = torch.ones_like(out)
    upstream[:, :, ::2] = math.nan
    grads = torch.autograd.grad(out, [q, k, v, sinks], upstream)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :, ::2].any()


# ------------------------------------------------------------------------------------------------------ statistics


def test_a_row_has_the_same_bits_in_every_batch_and_among_any_other_rows() -> None:
    s = Shape(3, 2, 1, 70, 70, 8)
    q, k, v = s.qkv()
    for options in ({"causal": "bottom_right"}, {"key_lengths": torch.tensor([70, 33, 64])}):
        out = attention(q, k, v, **options)
        mine = {n: t[1:2] if isinstance(t, Tensor) else t for n, t in options.items()}
        assert_same_bits(attention(q[1:2], k[1:2], v[1:2], **mine), out[1:2], "alone")
        assert_same_bits(attention(q[1:2, :, -3:], k[1:2], v[1:2], **mine), out[1:2, :, -3:], "few rows")


def test_gradients_are_the_same_bits_each_time() -> None:
    s = Shape(2, 4, 2, 40, 40, 6)
    q, k, v = s.qkv()
    bias, grad_out = make((1, 1, 40, 40), seed=6), make((2, 4, 40, 6), seed=8)
    out, _, row_max, row_sum = raw_forward(q, k, v, bias=bias)
    # The simulator takes blocks in another order each time.
    first, second = (
        raw_backward(grad_out, None, q, k, v, out, row_max, row_sum, grads=15, bias=bias) for _ in range(2)
    )
    for a, b, name in zip(first[:4], second[:4], ("q", "k", "v", "bias"), strict=True):
        assert_same_bits(a, b, f"gradient of {name}")


def test_second_derivatives_take_the_unfused_road() -> None:
    q, k, v = (t.double().requires_grad_(True) for t in Shape(1, 1, 1, 2, 3, 2).qkv())
    assert torch.autograd.gradcheck(attention, (q, k, v))
    assert torch.autograd.gradgradcheck(attention, (q, k, v))


def test_autocast_casts_and_biases_keep_their_dtype() -> None:
    q, k, v = Shape(1, 2, 1, 4, 6, 8).qkv()
    bias = make((4, 6))
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attention(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    half = [t.bfloat16() for t in (q, k, v)]
    assert_close_to_reference(
        out,
        reference_call(*half, {"bias": bias}, torch.float64),
        reference_call(*half, {"bias": bias}, torch.bfloat16),
    )
