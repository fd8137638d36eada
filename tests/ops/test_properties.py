"""Random calls against the fp64 reference, and laws that attention obeys whatever the numbers."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from op_support import (
    DTYPES,
    LAYOUTS,
    Shape,
    assert_same_bits,
    check_forward,
    check_gradients,
    make,
    random_bool,
)
from torch import Tensor

import attn_ext

pytestmark = pytest.mark.isa_matrix


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any sizes, now and then on the edges of lanes, tiles and blocks."""
    length = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 65, 97, 128, 256, 257, 300]))
    width = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 40, 64, 65]))
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        draw(st.integers(1, 3)),
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(length),
        draw(length),
        draw(width),
        draw(width),
    )


@st.composite
def broadcastable(draw: st.DrawFn, s: Shape, kind: str) -> Tensor:
    """A mask or bias of any shape and memory order that broadcasts to the scores."""
    sizes = [draw(st.sampled_from([1, n])) for n in (s.b, s.hq, s.lq, s.lk)]
    rank = draw(st.integers(1, 4))
    shape = tuple(sizes[4 - rank :])
    order = draw(st.permutations(range(rank)))
    stored = tuple(shape[i] for i in order)
    step = draw(st.sampled_from([1, 2]))
    stored = (*stored[:-1], stored[-1] * step)
    seed = draw(st.integers(0, 5))
    if kind == "bool":
        tensor = torch.rand(stored, generator=torch.Generator().manual_seed(seed)) < draw(
            st.sampled_from([0.1, 0.5, 0.9])
        )
    else:
        tensor = make(
            stored, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])), seed=seed
        )
        if kind == "hiding":
            holes = torch.rand(stored, generator=torch.Generator().manual_seed(seed)) < 0.3
            tensor = tensor.masked_fill(holes, -math.inf)
    tensor = tensor[..., ::step]
    inverse = [order.index(i) for i in range(rank)]
    tensor = tensor.permute(inverse)
    assert tensor.shape == shape
    return tensor


@st.composite
def calls(draw: st.DrawFn) -> tuple[Shape, torch.dtype, str, dict[str, Any]]:
    """A shape, a dtype, a layout and any mixture of options."""
    s = draw(shapes())
    options: dict[str, Any] = {}
    mask_kind = draw(st.sampled_from([None, None, "bool", "float", "hiding"]))
    if mask_kind:
        options["mask"] = draw(broadcastable(s, mask_kind))
    if draw(st.booleans()):
        options["bias"] = draw(broadcastable(s, draw(st.sampled_from(["float", "hiding"]))))
    options["causal"] = draw(st.sampled_from([False, False, "top_left", "bottom_right"]))
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 40))
        options["window"] = (draw(side), draw(side))
    options["scale"] = draw(st.sampled_from([None, None, 0.0, -0.4, 1.3]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        slopes = torch.linspace(0.0, 0.5, s.b * s.hq).view(s.b, s.hq)
        options["alibi_slopes"] = slopes if draw(st.booleans()) else slopes[0].clone()
    if draw(st.booleans()):
        options["sinks"] = make((s.hq,), draw(st.sampled_from(DTYPES)), seed=1)
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, s.lk)) for _ in range(s.b)]
        options["key_lengths"] = torch.tensor(
            lengths, dtype=draw(st.sampled_from([torch.int64, torch.int32]))
        )
    return s, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)), options


@hypothesis.given(calls())
@hypothesis.settings(max_examples=250)
def test_any_mixture_of_options_matches_the_reference(
    call: tuple[Shape, torch.dtype, str, dict[str, Any]],
) -> None:
    s, dtype, layout, options = call
    check_forward(*s.qkv(dtype, layout), options)


@hypothesis.given(calls(), st.booleans())
@hypothesis.settings(max_examples=150)
def test_gradients_of_any_mixture_of_options_match_the_reference(
    call: tuple[Shape, torch.dtype, str, dict[str, Any]], with_lse: bool
) -> None:
    s, dtype, layout, options = call
    check_gradients(*s.qkv(dtype, layout), options, with_lse=with_lse)


@hypothesis.given(calls(), st.sampled_from([2, 3, 5]))
@hypothesis.settings(max_examples=100)
def test_any_call_has_the_same_bits_at_another_thread_count(
    call: tuple[Shape, torch.dtype, str, dict[str, Any]], threads: int
) -> None:
    s, dtype, layout, options = call
    q, k, v = s.qkv(dtype, layout)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = attn_ext.attention(q, k, v, **options)
        torch.set_num_threads(threads)
        assert_same_bits(attn_ext.attention(q, k, v, **options), expected, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@hypothesis.given(calls(), st.data())
@hypothesis.settings(max_examples=100)
def test_any_batch_entry_has_the_same_bits_alone(
    call: tuple[Shape, torch.dtype, str, dict[str, Any]], data: st.DataObject
) -> None:
    s, dtype, layout, options = call
    q, k, v = s.qkv(dtype, layout)
    b = data.draw(st.integers(0, s.b - 1))
    mine = dict(options)
    for name in ("mask", "bias"):
        if name in mine and mine[name].dim() == 4 and mine[name].shape[0] == s.b:
            mine[name] = mine[name][b : b + 1]
    if "key_lengths" in mine:
        mine["key_lengths"] = mine["key_lengths"][b : b + 1]
    if "alibi_slopes" in mine and mine["alibi_slopes"].dim() == 2:
        mine["alibi_slopes"] = mine["alibi_slopes"][b : b + 1]
    expected = attn_ext.attention(q, k, v, **options)[b : b + 1]
    actual = attn_ext.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], **mine)
    assert_same_bits(actual, expected, f"entry {b} alone")


SOME = st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(1, 40))


@hypothesis.given(SOME)
@hypothesis.settings(max_examples=40)
def test_outputs_lie_between_the_smallest_and_the_largest_value(sizes: tuple[int, int, int]) -> None:
    q, k, v = Shape(1, 2, 1, *sizes).qkv()
    out = attn_ext.attention(q * 5, k, v)
    low, high = v.amin(-2, keepdim=True), v.amax(-2, keepdim=True)
    assert (out >= low - 1e-5).all() and (out <= high + 1e-5).all()


@hypothesis.given(SOME, st.integers(0, 1000))
@hypothesis.settings(max_examples=40)
def test_shuffling_the_keys_together_with_the_values_changes_nothing(
    sizes: tuple[int, int, int], seed: int
) -> None:
    q, k, v = Shape(1, 2, 1, *sizes).qkv(torch.float64)
    order = torch.randperm(sizes[1], generator=torch.Generator().manual_seed(seed))
    mask = random_bool(sizes[0], sizes[1])
    expected = attn_ext.attention(q, k, v, mask=mask)
    actual = attn_ext.attention(q, k[:, :, order], v[:, :, order], mask=mask[:, order])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@hypothesis.given(SOME, st.integers(0, 1000))
@hypothesis.settings(max_examples=40)
def test_shuffling_the_queries_shuffles_the_rows_bit_for_bit(sizes: tuple[int, int, int], seed: int) -> None:
    q, k, v = Shape(1, 2, 1, *sizes).qkv()
    order = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(seed))
    expected = attn_ext.attention(q, k, v)[:, :, order]
    assert_same_bits(attn_ext.attention(q[:, :, order], k, v), expected, "shuffled rows")


@hypothesis.given(SOME, st.floats(-50, 50))
@hypothesis.settings(max_examples=40)
def test_adding_a_constant_to_all_scores_of_a_row_moves_only_its_lse(
    sizes: tuple[int, int, int], by: float
) -> None:
    q, k, v = Shape(1, 2, 1, *sizes).qkv(torch.float64)
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    moved, moved_lse = attn_ext.attention(
        q, k, v, bias=torch.full((1,), by, dtype=torch.float64), return_lse=True
    )
    torch.testing.assert_close(moved, out, rtol=0, atol=1e-10)
    torch.testing.assert_close(moved_lse, lse + by, rtol=0, atol=1e-10)


@hypothesis.given(SOME, st.data())
@hypothesis.settings(max_examples=40)
def test_two_halves_of_the_keys_merge_by_their_lse_into_the_whole(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    q, k, v = Shape(1, 2, 1, *sizes).qkv(torch.float64)
    cut = data.draw(st.integers(0, sizes[1]))
    whole, whole_lse = attn_ext.attention(q, k, v, return_lse=True)
    left, left_lse = attn_ext.attention(q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
    right, right_lse = attn_ext.attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
    torch.testing.assert_close(torch.logaddexp(left_lse, right_lse), whole_lse, rtol=0, atol=1e-11)
    merged = left * (left_lse - whole_lse).exp()[..., None] + right * (right_lse - whole_lse).exp()[..., None]
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-11)
