"""Gradients: first order against the fp64 reference and by gradcheck, second order, forward mode, torch.func."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from op_support import (
    LAYOUTS,
    OPTIONS,
    Shape,
    assert_same_bits,
    check_gradients,
    dead_row_mask,
    make,
    random_bool,
    reference_call,
    visible_keys,
)
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import attn_ext

# ------------------------------------------------------------------------------------------- the fixed matrix


@pytest.mark.isa_matrix
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("layout", ["contiguous", "fused_qkv", "features_first"])
def test_gradients_of_q_k_v_match_the_reference(
    isa: str, dtype: torch.dtype, layout: str, causal: Any, heads: tuple[int, int]
) -> None:
    for b, lq, lk, d, dv in ((1, 1, 1, 1, 1), (2, 5, 3, 8, 11), (1, 17, 33, 16, 16), (1, 65, 130, 64, 40)):
        q, k, v = Shape(b, *heads, lq, lk, d, dv).qkv(dtype, layout)
        check_gradients(q, k, v, {"causal": causal}, with_lse=lq % 2 == 0)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_under_every_option_match_the_reference(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in (Shape(2, 4, 2, 5, 7, 8), Shape(3, 2, 1, 37, 37, 16, 24), Shape(1, 3, 1, 50, 290, 33)):
        q, k, v = s.qkv(dtype)
        check_gradients(q, k, v, OPTIONS[option](s), with_lse=s.b == 2)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("d", [1, 3, 5, 7, 33, 46, 72, 80, 96, 112, 192, 256, 257, 512])
def test_gradients_at_unusual_head_dims_match_and_runs_agree(d: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for length in (1, 8, 65):
            q, k, v = Shape(1, 3, 3, length, length, d).qkv(dtype)
            first = check_gradients(q, k, v, {"causal": True})
            again = check_gradients(q, k, v, {"causal": True}) if length == 65 else first
            for name in first:
                assert_same_bits(again[name], first[name], f"second run, gradient of {name}")


@pytest.mark.isa_matrix
def test_gradients_of_long_rows_do_not_lose_precision(isa: str, dtype: torch.dtype) -> None:
    q, k, v = Shape(1, 4, 2, 300, 600, 64).qkv(dtype)
    check_gradients(q, k, v, {"causal": "bottom_right"})


@pytest.mark.isa_matrix
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sixteen_bit_gradients_are_off_by_about_one_rounding(isa: str, short: torch.dtype) -> None:
    for length in (32, 256, 700):
        q, k, v = Shape(1, 4, 1, length, length, 64).qkv(short)
        grad_out = make(q.shape, short, seed=8)
        tensors = [x.requires_grad_(True) for x in (q, k, v)]
        actual = torch.autograd.grad(attn_ext.attention(*tensors), tensors, grad_out)
        exact = [x.detach().double().requires_grad_(True) for x in tensors]
        truth = torch.autograd.grad(reference_call(*exact, {}, torch.float64), exact, grad_out.double())
        for name, grad, expected in zip("qkv", actual, truth, strict=True):
            error = (grad.double() - expected).abs().max() / expected.abs().max()
            assert error <= 2 * torch.finfo(short).eps, f"gradient of {name} at {length}: {error:.2g}"


@pytest.mark.isa_matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_the_layout_of_the_inputs(dtype: torch.dtype, layout: str) -> None:
    s = Shape(2, 4, 2, 13, 21, 16, 8)
    grad_out = make((2, 4, 13, 8), dtype, seed=8)
    expected = check_gradients(*s.qkv(dtype), {"causal": "bottom_right"}, grad_out=grad_out)
    actual = check_gradients(*s.qkv(dtype, layout), {"causal": "bottom_right"}, grad_out=grad_out)
    for name in expected:
        assert_same_bits(actual[name], expected[name], f"gradient of {name}")


def test_gradients_keep_the_stride_order_of_their_inputs() -> None:
    q, k, v = Shape(2, 3, 3, 5, 7, 8, 6).qkv(layout="tokens_first")
    grads = check_gradients(q, k, v, {})
    for name in ("q", "k", "v"):
        assert grads[name].transpose(1, 2).is_contiguous(), name


@pytest.mark.parametrize("length", [7, 62, 64])
def test_gradient_of_a_fused_projection_equals_that_of_contiguous_parts(length: int) -> None:
    found = []
    for change in (lambda x: x, Tensor.contiguous):
        qkv = make((2, length, 3, 4, 5)).requires_grad_(True)
        q, k, v = (change(x.transpose(1, 2)) for x in qkv.unbind(2))
        attn_ext.attention(q, k, v, causal=True).square().sum().backward()
        found.append(qkv.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


def test_value_gradients_sum_over_the_heads_of_a_group() -> None:
    for kv_heads, expected in ((2, 2 / 3), (1, 4 / 3)):
        q, k = torch.zeros(1, 4, 1, 2, requires_grad=True), torch.zeros(1, kv_heads, 3, 2, requires_grad=True)
        v = make((1, kv_heads, 3, 5)).requires_grad_(True)
        attn_ext.attention(q, k, v).sum().backward()
        assert k.grad.shape == k.shape and v.grad.shape == v.shape
        torch.testing.assert_close(v.grad, torch.full_like(v, expected))


def test_grouped_gradients_equal_those_of_repeated_heads_in_double_precision() -> None:
    q, k, v = Shape(1, 8, 2, 5, 12, 8).qkv(torch.float64)
    grad_out = make((1, 8, 5, 8), torch.float64, seed=8)
    k, v = k.requires_grad_(True), v.requires_grad_(True)
    grouped = torch.autograd.grad(attn_ext.attention(q, k, v, causal="bottom_right"), (k, v), grad_out)
    wide = attn_ext.attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), causal="bottom_right")
    for actual, expected in zip(grouped, torch.autograd.grad(wide, (k, v), grad_out), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [Shape(2, 3, 3, 4, 0, 8), Shape(0, 3, 3, 4, 5, 8), Shape(2, 3, 3, 0, 5, 8)])
def test_gradients_of_empty_calls_are_zeros_of_the_right_shape(shape: Shape) -> None:
    grads = check_gradients(*shape.qkv(), {"causal": "bottom_right"})
    for name, grad in grads.items():
        assert (grad == 0).all(), name


@pytest.mark.isa_matrix
def test_without_keys_the_lse_is_the_sink_and_hands_its_gradient_on(dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0])
    grads = check_gradients(*Shape(2, 3, 1, 4, 0, 8).qkv(dtype), {"sinks": sinks}, with_lse=True)
    assert (grads["sinks"] != 0).all()


# -------------------------------------------------------------------------------------------- which gradients


@pytest.mark.isa_matrix
@pytest.mark.parametrize("bits", range(1, 64))
def test_any_subset_of_gradients_is_the_same_as_all_of_them(bits: int) -> None:
    s = Shape(2, 3, 3, 4, 5, 8)
    q, k, v = s.qkv()
    names = ("q", "k", "v", "mask", "bias", "sinks")
    options = {
        "mask": make((s.b, 1, s.lq, s.lk), seed=5),
        "bias": make((s.hq, 1, s.lk), seed=6),
        "sinks": torch.tensor([0.5, -1.0, 0.0]),
        "causal": "bottom_right",
    }
    everything = check_gradients(q, k, v, options)
    wanted = [name for i, name in enumerate(names) if bits >> i & 1]
    some = check_gradients(q, k, v, options, wanted=wanted)
    assert list(some) == wanted
    for name in wanted:
        assert_same_bits(some[name], everything[name], f"gradient of {name} when only {wanted} are asked for")


def test_inputs_that_want_no_gradient_get_none() -> None:
    s = Shape(1, 2, 2, 3, 4, 8)
    q, k, v = s.qkv()
    bias = make((2, 3, 4), seed=6)
    v.requires_grad_(True)
    attn_ext.attention(q, k, v, bias=bias).sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None and bias.grad is None


BIAS = Shape(2, 3, 3, 4, 5, 4)
# name: shape of the learned tensor, and the view of it that goes into the call.
BIAS_FORMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "full": ((2, 3, 4, 5), lambda x: x),
    "for one batch entry": ((1, 3, 4, 5), lambda x: x),
    "for one head": ((2, 1, 4, 5), lambda x: x),
    "padding": ((2, 1, 1, 5), lambda x: x),
    "per row": ((2, 3, 4, 1), lambda x: x),
    "3-D": ((3, 4, 5), lambda x: x),
    "3-D with one row": ((3, 1, 5), lambda x: x),
    "2-D": ((4, 5), lambda x: x),
    "1-D": ((5,), lambda x: x),
    "a single number": ((1, 1, 1, 1), lambda x: x),
    "expanded": ((1, 3, 1, 5), lambda x: x.expand(2, 3, 4, 5)),
    "transposed": ((2, 3, 5, 4), lambda x: x.transpose(-1, -2)),
    "sliced": ((2, 3, 6, 10), lambda x: x[:, :, 1:-1, ::2]),
    "looked up by distance": (
        (9, 3),
        lambda x: x[torch.arange(4)[:, None] + torch.arange(5)].permute(2, 0, 1),
    ),
}


@pytest.mark.isa_matrix
@pytest.mark.parametrize("argument", ["bias", "mask"])
@pytest.mark.parametrize("form", BIAS_FORMS)
def test_a_bias_that_alone_needs_a_gradient_gets_it_in_its_own_shape(form: str, argument: str) -> None:
    q, k, v = BIAS.qkv(torch.float64)
    shape, view = BIAS_FORMS[form]
    keep = dead_row_mask(BIAS)
    hiding = keep if argument == "bias" else torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    other = "mask" if argument == "bias" else "bias"
    for more in ({}, {"causal": "bottom_right"}, {other: hiding}):
        leaf = make(shape, torch.float64, seed=6).requires_grad_(True)

        def call(leaf: Tensor, more: dict[str, Any] = more) -> Tensor:
            return attn_ext.attention(q, k, v, **{argument: view(leaf)}, **more)

        if more:
            assert gradcheck(call, (leaf,), fast_mode="causal" in more)
        grad_out = make((2, 3, 4, 4), torch.float64, seed=8)
        (actual,) = torch.autograd.grad(call(leaf), leaf, grad_out)
        truth = reference_call(q, k, v, {argument: view(leaf), **more}, torch.float64)
        (expected,) = torch.autograd.grad(truth, leaf, grad_out)
        assert actual.shape == leaf.shape and actual.dtype == leaf.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("form", BIAS_FORMS)
def test_bias_gradients_in_single_precision_match_the_reference(form: str, dtype: torch.dtype) -> None:
    q, k, v = BIAS.qkv(dtype)
    shape, view = BIAS_FORMS[form]
    for bias_dtype in (torch.float32, dtype):
        bias = view(make(shape, bias_dtype, seed=6))
        check_gradients(q, k, v, {"bias": bias, "causal": "bottom_right"}, wanted=["bias"])


@pytest.mark.isa_matrix
def test_bias_gradients_summed_over_many_rows_keep_their_precision(isa: str) -> None:
    s = Shape(3, 4, 2, 130, 300, 16)
    q, k, v = s.qkv()
    for shape in (
        (s.lk,),
        (s.lq, 1),
        (s.hq, 1, s.lk),
        (1, 1, s.lq, s.lk),
        (1, 1, 1, 1),
        (s.b, 1, s.lq, s.lk),
    ):
        check_gradients(q, k, v, {"bias": make(shape, seed=6)}, wanted=["bias"])


@pytest.mark.isa_matrix
def test_a_bias_that_all_scores_share_has_no_gradient_but_for_roundings(isa: str) -> None:
    # Every row's terms sum to 0, so what is left are the roundings of 786,432 terms: in a random walk √786,432 ≈ 900 of
    # half an ulp. (Summed one after the other in fp32 they came to 2,200.)
    q, k, v = Shape(3, 4, 2, 256, 256, 31, 33).qkv()
    for seed in range(4):
        bias = torch.tensor([0.6614], requires_grad=True)
        out = attn_ext.attention(q, k, v, bias=bias)
        out.backward(make(out.shape, seed=seed))
        assert bias.grad is not None
        assert bias.grad.abs().item() < 900 * 2.0**-24


@pytest.mark.isa_matrix
def test_hidden_cells_of_a_bias_get_a_gradient_of_exactly_zero(isa: str) -> None:
    s = Shape(2, 3, 3, 40, 70, 8)
    q, k, v = s.qkv()
    for options in ({"causal": "bottom_right"}, {"window": (5, 9)}, {"mask": dead_row_mask(s)}):
        bias = make((s.b, s.hq, s.lq, s.lk), seed=6)
        bias[:, :, :, 11] = -math.inf
        hidden = ~visible_keys(s, {**options, "bias": bias})
        grads = check_gradients(q, k, v, {**options, "bias": bias}, with_lse=True)
        assert (grads["bias"][hidden] == 0).all()
        assert (grads["bias"][~hidden] != 0).any()


# ----------------------------------------------------------------------------------------- upstream gradients


def upstream(shape: tuple[int, ...], form: str) -> Tensor:
    """An incoming gradient of a shape in an unfriendly memory layout."""
    b, h, length, width = shape
    return {
        "of a sum": lambda: torch.ones(()).expand(shape),
        "expanded over heads": lambda: make((b, 1, length, width), seed=8).expand(shape),
        "expanded over rows": lambda: make((b, h, 1, width), seed=8).expand(shape),
        "expanded over features": lambda: make((b, h, length, 1), seed=8).expand(shape),
        "transposed": lambda: make((b, length, h, width), seed=8).transpose(1, 2),
        "features first": lambda: make((b, h, width, length), seed=8).transpose(-1, -2),
        "every second feature": lambda: make((b, h, length, 2 * width), seed=8)[..., ::2],
        "part of a concatenation": lambda: make((b, h, length + 3, width), seed=8)[:, :, 3:],
        "odd offset": lambda: make((b * h * length * width + 1,), seed=8)[1:].view(shape),
    }[form]()


@pytest.mark.isa_matrix
@pytest.mark.parametrize(
    "form",
    [
        "of a sum",
        "expanded over heads",
        "expanded over rows",
        "expanded over features",
        "transposed",
        "features first",
        "every second feature",
        "part of a concatenation",
        "odd offset",
    ],
)
def test_upstream_gradients_of_any_layout_equal_their_contiguous_clone(form: str, dtype: torch.dtype) -> None:
    for s in (Shape(2, 4, 2, 5, 8, 8), Shape(1, 2, 2, 70, 40, 24, 17)):
        q, k, v = s.qkv(dtype)
        grad_out = upstream((s.b, s.hq, s.lq, s.dv or s.d), form).to(dtype)
        if form == "of a sum":
            grad_out = torch.ones((), dtype=dtype).expand(grad_out.shape)
        actual = check_gradients(q, k, v, {}, grad_out=grad_out)
        expected = check_gradients(
            q, k, v, {}, grad_out=grad_out.clone(memory_format=torch.contiguous_format)
        )
        for name in actual:
            assert_same_bits(actual[name], expected[name], f"gradient of {name}")


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "mean": lambda out: out.mean(),
    "merged heads times a matrix": lambda out: (
        out.transpose(1, 2).reshape(2, 5, 24) @ make((24, 7), seed=8)
    ).sum(),
    "concatenation": lambda out: torch.cat([out, out * 2], dim=2).square().sum(),
    "one row": lambda out: out[:, :, 2].sum(),
    "two uses": lambda out: out.sum() + (out * out).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_as_models_write_them_give_the_gradients_of_the_reference(loss: str) -> None:
    found = []
    for function in (attn_ext.attention, attn_ext.reference.attention):
        q = make((2, 3, 5, 16), seed=1)[..., ::2].requires_grad_(True)
        k, v = (
            make((2, 3, 5, 8), seed=2).requires_grad_(True),
            make((2, 5, 3, 8), seed=3).requires_grad_(True),
        )
        LOSSES[loss](function(q, k, v.transpose(1, 2))).backward()
        found.append((q.grad, k.grad, v.grad))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.isa_matrix
def test_the_lse_alone_can_be_the_loss(dtype: torch.dtype) -> None:
    s = Shape(2, 4, 2, 9, 13, 8)
    for option in ("plain", "softcap and bias", "sinks with dead rows", "float mask and bias"):
        options = OPTIONS[option](s)
        grads = []
        for function, work in ((attn_ext.attention, dtype), (attn_ext.reference.attention, torch.float64)):
            q, k, v = (x.to(work).requires_grad_(True) for x in s.qkv(dtype))
            _, lse = function(q, k, v, **options, return_lse=True)
            live = torch.where(lse == -math.inf, 0.0, lse)
            grads.append(torch.autograd.grad((live * make(lse.shape, lse.dtype, seed=9)).sum(), (q, k)))
        for actual, expected in zip(*grads, strict=True):
            limit = 1e-5 + 2 * (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0) * expected.abs().max()
            assert (actual.double() - expected).abs().max() <= limit, option


# ---------------------------------------------------------------------------------------- dead rows, extremes


@pytest.mark.isa_matrix
@pytest.mark.parametrize("by", ["bool mask", "float mask", "causal", "key lengths", "window and padding"])
def test_dead_rows_get_and_give_gradients_of_exactly_zero(isa: str, by: str, dtype: torch.dtype) -> None:
    s = Shape(2, 2, 1, 40, 30, 16)
    keep = dead_row_mask(s)
    options: dict[str, Any] = {
        "bool mask": {"mask": keep},
        "float mask": {"mask": torch.zeros(keep.shape).masked_fill(~keep, -math.inf)},
        "causal": {"causal": "bottom_right"},
        "key lengths": {"key_lengths": torch.tensor([0, 30])},
        "window and padding": {"window": (3, 0), "key_lengths": torch.tensor([12, 7])},
    }[by]
    q, k, v = s.qkv(dtype)
    dead = ~visible_keys(s, options).any(-1)
    assert dead.any() and not dead.all()
    bias = make((s.b, s.hq, s.lq, s.lk), seed=6)
    grads = check_gradients(q, k, v, {**options, "bias": bias}, with_lse=True)
    assert (grads["q"][dead] == 0).all() and (grads["bias"][dead] == 0).all()
    # What comes into a dead row from above changes nothing, were it infinite.
    plain = make((s.b, s.hq, s.lq, s.d), dtype, seed=8)
    wild = plain.clone()
    wild[dead] = math.nan
    outcome = []
    for grad_out in (plain, wild):
        tensors = [x.detach().requires_grad_(True) for x in (q, k, v)]
        outcome.append(torch.autograd.grad(attn_ext.attention(*tensors, **options), tensors, grad_out))
    for a, b in zip(*outcome, strict=True):
        assert_same_bits(b, a, "gradient with NaN coming into dead rows")


def test_one_dead_row_does_not_poison_shared_projection_weights() -> None:
    # Sequence-first self-attention of width one; only query 3 of sample 1 sees nothing, and the loss ignores it.
    hide = -math.inf
    rows = torch.tensor([[0, hide, hide, hide], [0, 0, hide, hide], [hide, 0, 0, hide], [hide, hide, 0, 0]])
    mask = rows[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, 2:] = hide
    x = make((4, 2, 1), seed=1)
    found = []
    for queries in (4, 3):
        weights = [torch.tensor([[w]], requires_grad=True) for w in (0.7, -1.1, 0.4)]
        q, k, v = (x @ w for w in weights)
        q, k, v = (y.permute(1, 0, 2)[:, None] for y in (q[:queries], k, v))
        out = attn_ext.attention(q, k, v, mask=mask[:, :, :queries])
        if queries == 4:
            assert out[1, 0, 3].item() == 0.0
        out[:, :, :2].sum().backward()
        found.append([w.grad for w in weights])
    for with_dead_row, without in zip(*found, strict=True):
        assert torch.isfinite(with_dead_row).all()
        torch.testing.assert_close(with_dead_row, without, rtol=0, atol=1e-6)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38], ids=["NaN", "infinity", "huge"])
@pytest.mark.parametrize("place", ["q", "k", "v", "upstream gradient"])
@pytest.mark.parametrize("option", ["causal", "window", "mask", "bias of -inf", "lengths and window"])
def test_what_is_hidden_stays_out_of_each_others_gradients(
    isa: str, option: str, place: str, poison: float
) -> None:
    for s in (Shape(1, 2, 1, 9, 11, 8), Shape(1, 2, 2, 90, 150, 20)):
        keep = random_bool(s.lq, s.lk, keep=0.5)
        keep[:, 0] = False
        options: dict[str, Any] = {
            "causal": {"causal": "top_left"},
            "window": {"window": (1, 1)},
            "mask": {"mask": keep},
            "bias of -inf": {"bias": torch.zeros(s.lq, s.lk).masked_fill(~keep, -math.inf)},
            "lengths and window": {"key_lengths": torch.tensor([s.lk - 3]), "window": (4, 1)},
        }[option]
        sees = visible_keys(s, options)[0, 0]
        at = (s.lq if place in ("q", "upstream gradient") else s.lk) // 2
        # Rows that the bad values reach, and the keys those rows see: everything else must keep its bits.
        touched_rows = torch.arange(s.lq) == at if place in ("q", "upstream gradient") else sees[:, at]
        touched_keys = sees[touched_rows].any(0)
        assert not touched_rows.all() and not touched_keys.all()
        results = []
        for spoil in (False, True):
            q, k, v = s.qkv()
            grad_out = make(q.shape, seed=8)
            if spoil:
                {"q": q, "k": k, "v": v, "upstream gradient": grad_out}[place][:, :, at] = poison
            q, k, v = (x.requires_grad_(True) for x in (q, k, v))
            results.append(torch.autograd.grad(attn_ext.attention(q, k, v, **options), (q, k, v), grad_out))
        (dq, dk, dv), (dq2, dk2, dv2) = results
        assert_same_bits(
            dq2[:, :, ~touched_rows], dq[:, :, ~touched_rows], "gradient of rows that do not see it"
        )
        assert_same_bits(dk2[:, :, ~touched_keys], dk[:, :, ~touched_keys], "gradient of k hidden from it")
        assert_same_bits(dv2[:, :, ~touched_keys], dv[:, :, ~touched_keys], "gradient of v hidden from it")


@pytest.mark.isa_matrix
def test_nan_in_a_visible_place_reaches_the_gradients(isa: str) -> None:
    for place in range(3):
        tensors = list(Shape(1, 1, 1, 4, 6, 8).qkv())
        tensors[place][0, 0, 2, 3] = math.nan
        tensors = [x.requires_grad_(True) for x in tensors]
        grads = torch.autograd.grad(attn_ext.attention(*tensors).sum(), tensors)
        assert torch.isnan(grads[0]).any() and torch.isnan(grads[1]).any()


@pytest.mark.isa_matrix
def test_a_row_of_the_smallest_finite_bias_has_the_gradients_of_plain_arithmetic(
    isa: str, dtype: torch.dtype
) -> None:
    # The lse of such a row has lost the sum of the weights: a backward that keeps nothing else is off by a factor.
    s = Shape(1, 2, 2, 4, 50, 16)
    q, k, v = s.qkv(dtype)
    for value in (torch.finfo(torch.float32).min, -1e30, 1e30):
        bias = torch.zeros(4, 50)
        bias[1] = value
        bias[2, 10:] = value
        grads = check_gradients(q, k, v, {"bias": bias})
        assert (grads["q"][:, :, 1] != 0).any()


@pytest.mark.isa_matrix
def test_keys_masked_by_a_finite_but_huge_number_get_gradients_of_exactly_zero(isa: str) -> None:
    q, k, v = Shape(1, 3, 3, 50, 441, 64).qkv()
    for value in (torch.finfo(torch.float32).min, -1e9, -1e4):
        mask = torch.zeros(441)
        mask[:128] = value
        grads = check_gradients(q, k, v, {"mask": mask}, wanted=("q", "k", "v"))
        assert (grads["k"][:, :, :128] == 0).all() and (grads["v"][:, :, :128] == 0).all()


@pytest.mark.isa_matrix
@pytest.mark.parametrize("scale", [None, -0.3])
def test_huge_scores_give_finite_gradients(isa: str, scale: float | None) -> None:
    for big, dtype in ((133120.0, torch.bfloat16), (256.0, torch.float16), (133120.0, torch.float32)):
        for length in (1, 3, 40):
            tensors = [torch.full((1, 1, length, 64), big, dtype=dtype, requires_grad=True) for _ in range(3)]
            out = attn_ext.attention(*tensors, causal=True, scale=scale)
            grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
            assert all(torch.isfinite(grad).all() for grad in grads)
            torch.testing.assert_close(grads[2].sum().item(), 64.0 * length, rtol=2e-2, atol=0)
    x = (-900 * torch.rand(2, 4, 128, 64)).to(torch.float16)
    tensors = [
        x.clone().requires_grad_(True),
        x.clone().requires_grad_(True),
        torch.rand_like(x).requires_grad_(True),
    ]
    for grad in torch.autograd.grad(attn_ext.attention(*tensors, scale=scale).sum(), tensors):
        assert torch.isfinite(grad).all()


# -------------------------------------------------------------------------------------------------- gradcheck


TINY = Shape(1, 2, 1, 3, 5, 4, 3)
# Dropping the options that bring nothing new for derivatives keeps this quick.
CHECKED = [name for name in OPTIONS if name not in ("float mask", "window left only", "window right only")]


def differentiable(s: Shape, option: str) -> tuple[list[Tensor], Callable[..., Any]]:
    """Leaves in fp64 for q, k, v and the float options, and a function of them that calls attention."""
    options = OPTIONS[option](s)
    learned = [n for n in ("mask", "bias", "sinks") if n in options and options[n].is_floating_point()]
    # -inf has no finite difference: such masks stay constants here.
    learned = [n for n in learned if torch.isfinite(options[n]).all()]
    rest = {n: x for n, x in options.items() if n not in learned}
    tensors = [*s.qkv(torch.float64), *(options[n].double() for n in learned)]

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor, **kwargs: Any) -> Any:
        return attn_ext.attention(q, k, v, **rest, **dict(zip(learned, more, strict=True)), **kwargs)

    return [x.requires_grad_(True) for x in tensors], call


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", CHECKED)
def test_gradcheck_passes_in_double_precision(option: str) -> None:
    tensors, call = differentiable(TINY, option)
    dead = (call(*tensors, return_lse=True)[1] == -math.inf).detach()

    def out_and_lse(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call(*tensors, return_lse=True)
        return out, torch.where(dead, 0.0, lse)

    assert gradcheck(out_and_lse, tensors)


@pytest.mark.parametrize("option", CHECKED)
def test_gradgradcheck_passes_in_double_precision(option: str) -> None:
    tensors, call = differentiable(Shape(1, 2, 1, 2, 3, 2, 2), option)
    assert gradgradcheck(call, tensors)


@pytest.mark.parametrize("option", CHECKED)
def test_forward_mode_gradcheck_passes_in_double_precision(option: str) -> None:
    tensors, call = differentiable(Shape(1, 2, 1, 2, 3, 2, 2), option)
    assert gradcheck(call, tensors, check_forward_ad=True, check_backward_ad=False)


def test_gradcheck_with_dropout_holds_the_mask_still() -> None:
    tensors, call = differentiable(TINY, "bias")

    def seeded(*tensors: Tensor) -> Tensor:
        torch.manual_seed(5)
        return call(*tensors, dropout_p=0.4)

    assert gradcheck(seeded, tensors)
    small, call = differentiable(Shape(1, 2, 1, 2, 3, 2, 2), "bias")
    assert gradgradcheck(seeded, small)


@pytest.mark.parametrize(
    "option", ["plain", "causal bottom-right", "bool mask with dead rows", "softcap and bias"]
)
def test_gradient_penalty_equals_the_reference(option: str) -> None:
    s = Shape(2, 4, 2, 5, 7, 4)
    found = []
    for function in (attn_ext.attention, attn_ext.reference.attention):
        q, k, v = (x.requires_grad_(True) for x in s.qkv(torch.float64))
        out = function(q, k, v, **OPTIONS[option](s), scale=0.7)
        (g,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        assert g.requires_grad
        g.square().sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for actual, expected in zip(*found, strict=True):
        assert (expected != 0).any()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_second_derivatives_work_in_every_dtype_and_through_the_lse(dtype: torch.dtype) -> None:
    found = []
    for function, work in ((attn_ext.attention, dtype), (attn_ext.reference.attention, torch.float64)):
        q, k, v = (x.to(work).requires_grad_(True) for x in Shape(1, 2, 1, 3, 4, 4).qkv(dtype))
        out, lse = function(q, k, v, return_lse=True)
        loss = out.double().square().sum() + lse.double().square().sum()
        (g,) = torch.autograd.grad(loss, k, create_graph=True)
        found.append(torch.autograd.grad(g.double().square().sum(), (q, k, v)))
    for actual, expected in zip(*found, strict=True):
        limit = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-4) * (1 + expected.abs().max())
        assert (actual.double() - expected).abs().max() <= limit


# ----------------------------------------------------------------------------------- forward mode, torch.func


def test_dual_tensors_get_a_tangent_although_they_need_no_gradient() -> None:
    q, k, v = Shape(1, 2, 1, 3, 5, 4).qkv(torch.float64)
    t = make(q.shape, torch.float64, seed=8)
    bias = make((3, 5), torch.float64, seed=6)
    eps = 1e-6
    for name, at in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        tangent = make(at.shape, torch.float64, seed=9)

        def call(changed: Tensor, name: str = name) -> Tensor:
            given = {"q": q, "k": k, "v": v, "bias": bias, name: changed}
            return attn_ext.attention(
                given["q"], given["k"], given["v"], bias=given["bias"], causal="bottom_right"
            )

        with forward_ad.dual_level():
            _, found = forward_ad.unpack_dual(call(forward_ad.make_dual(at, tangent)))
        assert found is not None, f"the tangent of {name} was lost"
        expected = (call(at + eps * tangent) - call(at - eps * tangent)) / (2 * eps)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    with forward_ad.dual_level(), torch.no_grad():
        _, found = forward_ad.unpack_dual(attn_ext.attention(forward_ad.make_dual(q, t), k, v))
    assert found is not None


def test_jvp_vjp_and_jacobian_agree_with_the_reference() -> None:
    q, k, v = Shape(1, 2, 1, 3, 5, 4).qkv(torch.float64)
    options = {"causal": "bottom_right", "softcap": 2.0}
    tangents = tuple(make(x.shape, torch.float64, seed=9) for x in (q, k, v))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_ext.attention(q, k, v, **options)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_ext.reference.attention(q, k, v, **options)

    for transform in (
        lambda f: torch.func.jvp(f, (q, k, v), tangents)[1],
        lambda f: torch.func.vjp(f, q, k, v)[1](tangents[0])[1],
        lambda f: torch.func.jacrev(f, argnums=2)(q, k, v),
        lambda f: torch.func.jacfwd(f, argnums=1)(q, k, v),
        lambda f: torch.func.hessian(lambda q: f(q, k, v).square().sum())(q),
        lambda f: torch.func.grad(
            lambda q: torch.func.grad(lambda k: f(q, k, v).sin().sum())(k).square().sum()
        )(q),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 2, None)])
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...]) -> None:
    n, tensors = 3, []
    for seed, (heads, length, dim) in enumerate(zip((4, 2, 2), (5, 7, 7), in_dims, strict=True)):
        shape = [2, heads, length, 8]
        if dim is not None:
            shape.insert(dim, n)
        tensors.append(make(shape, seed=seed))
    for options in (
        {},
        {"causal": "bottom_right", "bias": make((4, 5, 7), seed=6)},
        {"mask": random_bool(2, 1, 5, 7)},
    ):

        def call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] = options) -> Tensor:
            return attn_ext.attention(q, k, v, **options)

        actual = torch.func.vmap(call, in_dims=in_dims)(*tensors)
        for i in range(n):
            one = [x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)]
            torch.testing.assert_close(actual[i], call(*one), rtol=0, atol=1e-5)


def test_per_sample_gradients_by_vmap_of_grad_equal_a_loop() -> None:
    q, k, v = make((3, 2, 5, 4), seed=1), make((3, 2, 6, 4), seed=2), make((3, 2, 6, 4), seed=3)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_ext.attention(q, k, v, causal="bottom_right").square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        tensors = [x[i].clone().requires_grad_(True) for x in (q, k, v)]
        for actual, expected in zip(found, torch.autograd.grad(loss(*tensors), tensors), strict=True):
            torch.testing.assert_close(actual[i], expected, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------- autograd's own rules


def test_retain_graph_allows_a_second_backward_and_without_it_torch_complains() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(1, 2, 2, 3, 4, 8).qkv())
    loss = attn_ext.attention(q, k, v).sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    second = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(b, a, "second backward")
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize("changed", ["q", "k", "v", "bias", "mask", "output"])
def test_changing_a_saved_tensor_in_place_raises_instead_of_giving_wrong_gradients(changed: str) -> None:
    leaves = dict(zip("qkv", (x.requires_grad_(True) for x in Shape(1, 2, 2, 3, 4, 8).qkv()), strict=True))
    leaves["bias"] = make((2, 3, 4), seed=6).requires_grad_(True)
    used = {name: leaf * 1.0 for name, leaf in leaves.items()}
    used["mask"] = random_bool(3, 4)
    out = attn_ext.attention(used["q"], used["k"], used["v"], mask=used["mask"], bias=used["bias"])
    with torch.no_grad():
        if changed == "mask":
            used["mask"].logical_not_()
        elif changed == "output":
            out.mul_(2)
        else:
            used[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.isa_matrix
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for use in (False, True):
        q, k, v = (x.requires_grad_(True) for x in Shape(2, 4, 2, 33, 33, 16).qkv())
        if use:
            out = checkpoint(lambda *x: attn_ext.attention(*x, causal=True), q, k, v, use_reentrant=reentrant)
        else:
            out = attn_ext.attention(q, k, v, causal=True)
        found.append(
            torch.autograd.grad(out.square().sum(), (q, k, v)) if not reentrant else backward(out, q, k, v)
        )
    for a, b in zip(*found, strict=True):
        assert_same_bits(b, a, "checkpointed gradient")


def backward(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients through `.backward()`: reentrant checkpointing knows no `torch.autograd.grad`."""
    out.square().sum().backward()
    return tuple(leaf.grad for leaf in leaves)


def test_one_tensor_as_q_k_and_v_collects_all_three_gradients() -> None:
    x = make((2, 3, 5, 8)).requires_grad_(True)
    q, k, v = (make((2, 3, 5, 8)).requires_grad_(True) for _ in range(3))
    attn_ext.attention(x, x, x, causal=True).square().sum().backward()
    attn_ext.attention(q, k, v, causal=True).square().sum().backward()
    torch.testing.assert_close(x.grad, q.grad + k.grad + v.grad, rtol=0, atol=1e-5)


def test_hooks_and_accumulation_see_the_gradients_once_each() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(1, 2, 2, 3, 4, 8).qkv())
    seen: list[Tensor] = []
    q.register_hook(seen.append)
    for _ in range(2):
        attn_ext.attention(q, k, v).sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(q.grad, seen[0] + seen[1])
