"""Attention weights: returned beside the output, and the op that computes some rows and heads alone."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from op_support import (
    OPTIONS,
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    dead_row_mask,
    make,
    random_bool,
    visible_keys,
)
from torch import Tensor

import attn_ext

SOME = Shape(2, 4, 2, 20, 37, 16)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
def test_weights_match_the_reference_under_every_option(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in (SOME, Shape(3, 2, 1, 7, 290, 24)):
        q, k, v = s.qkv(dtype)
        options = OPTIONS[option](s)
        truth = attn_ext.reference.attention_weights(q, k, **options, dtype=torch.float64)
        plain = attn_ext.reference.attention_weights(q, k, **options, dtype=dtype)
        beside = attn_ext.attention(q, k, v, **options, return_weights=True)[1]
        alone = attn_ext.attention_weights(q, k, **options)
        for name, weights in (("returned beside the output", beside), ("computed alone", alone)):
            assert weights.dtype == dtype or weights.dtype == torch.float32
            assert_close_to_reference(weights, truth, plain, what=f"weights {name} at {s}")


@pytest.mark.isa_matrix
def test_rows_sum_to_one_unless_a_sink_or_a_dead_row_takes_the_rest(isa: str, dtype: torch.dtype) -> None:
    q, k, v = SOME.qkv(dtype)
    close = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
    sums = attn_ext.attention(q, k, v, return_weights=True)[1].double().sum(-1)
    assert (sums - 1).abs().max() <= close
    mask = dead_row_mask(SOME)
    weights = attn_ext.attention(q, k, v, mask=mask, return_weights=True)[1]
    dead = ~mask.any(-1)
    assert (weights[dead] == 0).all() and (weights[~mask] == 0).all()
    assert (weights[~dead].double().sum(-1) - 1).abs().max() <= close
    sinks = torch.full((SOME.hq,), 1.0)
    assert (attn_ext.attention(q, k, v, sinks=sinks, return_weights=True)[1].double().sum(-1) < 0.99).all()


@pytest.mark.isa_matrix
@pytest.mark.parametrize(
    "option", ["plain", "causal bottom-right", "window both sides", "everything at once"]
)
def test_some_rows_and_heads_equal_the_same_rows_and_heads_of_all(isa: str, option: str) -> None:
    q, k, _ = SOME.qkv()
    options = OPTIONS[option](SOME)
    everything = attn_ext.attention_weights(q, k, **options)
    assert everything.shape == (2, 4, 20, 37)
    for rows in ([0], [19], [3, 3, 0, 17], list(range(20)), torch.tensor([5, 1]), range(2, 9)):
        some = attn_ext.attention_weights(q, k, rows=rows, **options)
        assert_same_bits(some, everything[:, :, list(rows)], f"rows {rows}")
    for heads in ([0], [3, 1], torch.tensor([2]), range(1, 3)):
        some = attn_ext.attention_weights(q, k, heads=heads, **options)
        assert_same_bits(some, everything[:, list(heads)], f"heads {heads}")
    both = attn_ext.attention_weights(q, k, rows=[7, 2], heads=[3, 0], **options)
    assert_same_bits(both, everything[:, [3, 0]][:, :, [7, 2]], "rows and heads")
    assert attn_ext.attention_weights(q, k, rows=[], **options).shape == (2, 4, 0, 37)


def test_rows_outside_the_queries_and_heads_outside_the_heads_are_refused() -> None:
    q, k, _ = SOME.qkv()
    for wrong in ({"rows": [20]}, {"rows": [-21]}, {"heads": [4]}, {"heads": [0, 99]}):
        with pytest.raises((IndexError, ValueError), match="attention_weights"):
            attn_ext.attention_weights(q, k, **wrong)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_weights_of_every_rank(batch: tuple[int, ...]) -> None:
    q, k, v = (
        make((*batch, 4, 5, 8), seed=1),
        make((*batch, 2, 7, 8), seed=2),
        make((*batch, 2, 7, 8), seed=3),
    )
    for options in ({}, {"mask": random_bool(*batch, 1, 5, 7), "bias": make((5, 7), seed=6)}):
        weights = attn_ext.attention(q, k, v, **options, return_weights=True)[1]
        assert weights.shape == (*batch, 4, 5, 7)
        expected = attn_ext.reference.attention_weights(q, k, **options)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            attn_ext.attention_weights(q, k, rows=[4], **options), expected[..., 4:, :]
        )


@pytest.mark.isa_matrix
def test_weights_times_values_is_the_output(isa: str) -> None:
    q, k, v = SOME.qkv(torch.float64)
    options = OPTIONS["everything at once"](SOME)
    out, weights = attn_ext.attention(q, k, v, **options, return_weights=True)
    expected = weights.double() @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.isa_matrix
def test_equal_scores_give_exactly_equal_weights_and_one_key_gets_weight_one(isa: str) -> None:
    weights = attn_ext.attention_weights(torch.zeros(1, 1, 2, 8), make((1, 1, 64, 8)))
    assert (weights == 1 / 64).all()
    q, k, _ = Shape(2, 3, 3, 9, 9, 8).qkv()
    weights = attn_ext.attention_weights(q, k, window=(0, 0))
    assert_same_bits(weights, torch.eye(9).expand(2, 3, 9, 9), "diagonal weights")


@pytest.mark.isa_matrix
def test_hidden_keys_have_weight_exactly_zero_whatever_they_hold(isa: str) -> None:
    s = Shape(2, 2, 1, 11, 40, 8)
    q, k, _ = s.qkv()
    for options in (
        {"mask": random_bool(s.lk)},
        {"causal": "top_left"},
        {"key_lengths": torch.tensor([13, 22])},
    ):
        hidden = ~visible_keys(s, options)
        clean = attn_ext.attention_weights(q, k, **options)
        assert (clean[hidden] == 0).all()
        unseen = hidden.all(dim=(0, 1, 2))
        for poison in (math.nan, math.inf):
            spoiled = k.clone()
            spoiled[:, :, unseen] = poison
            assert_same_bits(
                attn_ext.attention_weights(q, spoiled, **options), clean, f"{poison} in hidden keys"
            )


def test_weights_are_those_before_dropout() -> None:
    q, k, v = SOME.qkv()
    without = attn_ext.attention(q, k, v, return_weights=True)[1]
    out, weights = attn_ext.attention(q, k, v, dropout_p=0.5, return_weights=True)
    assert_same_bits(weights, without, "weights under dropout")
    assert not torch.equal(out, attn_ext.attention(q, k, v))


def test_results_come_in_the_order_output_lse_weights() -> None:
    q, k, v = SOME.qkv()
    assert isinstance(attn_ext.attention(q, k, v), Tensor)
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 20)
    out2, weights = attn_ext.attention(q, k, v, return_weights=True)
    assert weights.shape == (2, 4, 20, 37)
    out3, lse3, weights3 = attn_ext.attention(q, k, v, return_lse=True, return_weights=True)
    for actual, expected in ((out2, out), (out3, out), (lse3, lse), (weights3, weights)):
        assert_same_bits(actual, expected, "the same result asked for in another way")


@pytest.mark.parametrize(
    "option", ["plain", "float mask and bias", "sinks with dead rows", "softcap and bias"]
)
def test_weights_are_differentiable_or_raise_but_are_never_silently_cut(option: str) -> None:
    s = Shape(2, 4, 2, 5, 7, 8)
    found = []
    for function in (attn_ext.attention, attn_ext.reference.attention):
        q, k, v = (x.requires_grad_(True) for x in s.qkv(torch.float64))
        options = {
            name: x.requires_grad_(True) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in OPTIONS[option](s).items()
        }
        learned = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
        try:
            weights = function(q, k, v, **options, return_weights=True)[1]
        except (RuntimeError, NotImplementedError, ValueError):
            assert function is attn_ext.attention
            return
        assert weights.requires_grad, "weights that need a gradient came back without one"
        loss = (weights * make(weights.shape, torch.float64, seed=8)).sum()
        found.append(torch.autograd.grad(loss, [q, k, *learned]))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=1e-5)


def test_gradients_through_output_lse_and_weights_add_up() -> None:
    s = Shape(2, 4, 2, 5, 7, 8)
    found = []
    for function in (attn_ext.attention, attn_ext.reference.attention):
        q, k, v = (x.requires_grad_(True) for x in s.qkv(torch.float64))
        try:
            out, lse, weights = function(q, k, v, causal="bottom_right", return_lse=True, return_weights=True)
        except (RuntimeError, NotImplementedError):
            pytest.skip("weights that need a gradient are refused here")
        loss = out.square().sum() + lse.square().sum() + weights.square().sum()
        found.append(torch.autograd.grad(loss, (q, k, v)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_weights_op_is_differentiable_or_raises() -> None:
    q, k, _ = Shape(1, 2, 1, 4, 6, 8).qkv(torch.float64)
    expected_q = q.clone().requires_grad_(True)
    upstream = make((1, 2, 2, 6), torch.float64, seed=8)
    truth = attn_ext.reference.attention_weights(expected_q, k, rows=[3, 1], causal="bottom_right")
    (expected,) = torch.autograd.grad(truth, expected_q, upstream)
    q.requires_grad_(True)
    try:
        weights = attn_ext.attention_weights(q, k, rows=[3, 1], causal="bottom_right")
    except (RuntimeError, NotImplementedError, ValueError):
        return
    assert weights.requires_grad, "weights that need a gradient came back without one"
    (actual,) = torch.autograd.grad(weights, q, upstream)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_what_does_not_fit_the_whole_is_refused_also_where_only_a_part_is_asked_for() -> None:
    q, k, _ = Shape(2, 4, 2, 5, 6, 8).qkv()
    for name, value in (
        ("mask", random_bool(9, 6)),
        ("mask", random_bool(9, 1, 6)),
        ("bias", make((9, 6))),
        ("bias", make((3, 6))),
        ("sinks", make((9,))),
        ("sinks", make((2,))),
        ("alibi_slopes", make((9,))),
        ("key_lengths", torch.tensor([6])),
    ):
        for part in ({"rows": [4]}, {"heads": [3]}, {"rows": [0], "heads": [0]}):
            with pytest.raises(
                ValueError, match=rf"attention_weights: .*{re.escape(str(tuple(value.shape)))}"
            ):
                attn_ext.attention_weights(q, k, **part, **{name: value})
    with pytest.raises(ValueError, match="the 4 heads of q must be a multiple"):
        attn_ext.attention_weights(q, k[:, :0], heads=[1])


def test_rows_and_heads_may_be_any_sequence_of_integers() -> None:
    q, k, _ = Shape(2, 4, 2, 5, 6, 8).qkv()
    options = {"mask": random_bool(4, 5, 6), "sinks": make((4,)), "alibi_slopes": make((2, 4)).abs()}
    everything = attn_ext.attention_weights(q, k, **options)
    for index in (
        [3, 0, 3],
        (1, -1),
        range(3),
        np.array([2, -1]),
        [np.int64(2), 1],
        torch.tensor([1, 2], dtype=torch.int16),
        torch.tensor([3, -4]),
        [],
        np.array([], dtype=np.int64),
    ):
        numbers = [int(n) for n in index]
        rows = attn_ext.attention_weights(q, k, rows=index, **options)
        heads = attn_ext.attention_weights(q, k, heads=index, **options)
        torch.testing.assert_close(rows, everything[:, :, numbers], rtol=0, atol=1e-6)
        torch.testing.assert_close(heads, everything[:, numbers], rtol=0, atol=1e-6)
    assert attn_ext.attention_weights(q[:, :0], k[:, :0], heads=[]).shape == (2, 0, 5, 6)
    one = Shape(1, 1, 1, 3, 4, 8).qkv()
    twice = attn_ext.attention_weights(one[0], one[1], heads=[0, 0], sinks=make((1,)))
    assert twice.shape == (1, 2, 3, 4) and torch.equal(twice[:, 0], twice[:, 1])


@pytest.mark.parametrize(
    "wrong",
    [
        1,
        slice(1),
        "12",
        [1.5],
        [True],
        [[1]],
        torch.tensor(1),
        torch.tensor([1.0]),
        torch.tensor([True]),
        np.array([[1]]),
    ],
    ids=repr,
)
def test_rows_and_heads_that_are_no_sequence_of_integers_are_refused(wrong: Any) -> None:
    q, k, _ = Shape(2, 4, 2, 5, 6, 8).qkv()
    for name in ("rows", "heads"):
        with pytest.raises(TypeError, match=f"attention_weights: {name} must be .*integers"):
            attn_ext.attention_weights(q, k, **{name: wrong})


def test_weights_of_no_keys_and_of_no_queries_are_empty() -> None:
    for s in (Shape(2, 3, 3, 4, 0, 8), Shape(2, 3, 3, 0, 5, 8), Shape(0, 3, 3, 4, 5, 8)):
        q, k, v = s.qkv()
        assert attn_ext.attention(q, k, v, return_weights=True)[1].shape == (s.b, s.hq, s.lq, s.lk)
        assert attn_ext.attention_weights(q, k).shape == (s.b, s.hq, s.lq, s.lk)


def test_one_row_of_a_long_sequence_never_builds_the_whole_matrix() -> None:
    # All rows would need 2**18 * 2**18 floats, 256 GB: this only passes where rows alone are computed.
    length = 2**18
    q, k = make((1, 1, length, 8), seed=1), make((1, 1, length, 8), seed=2)
    options: dict[str, Any] = {"causal": "top_left"}
    weights = attn_ext.attention_weights(q, k, rows=[1000, length - 1], **options)
    assert weights.shape == (1, 1, 2, length)
    assert (weights[0, 0, 0, 1001:] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 2), rtol=0, atol=1e-4)
