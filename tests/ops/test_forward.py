"""The forward pass: every option, dtype, layout and size against the fp64 reference, and hand-made values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_support import (
    DTYPE_IDS,
    DTYPES,
    LAYOUTS,
    OPTIONS,
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    check_forward,
    make,
    naive_attention,
    random_bool,
    reference_call,
    visible_keys,
)
from torch import Tensor

import attn_ext

# Lengths below, at and above a vector, a register tile, a row block and a key block; Dv different from D in some.
ODD_SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 1, 7, 5, 5),
    (2, 5, 3, 8, 11),
    (1, 17, 33, 16, 16),
    (2, 64, 65, 24, 24),
    (1, 65, 130, 64, 40),
    (1, 97, 97, 33, 33),
    (1, 13, 300, 40, 40),
    (1, 150, 530, 20, 36),
)


# ------------------------------------------------------------------------------------------- the fixed matrix


@pytest.mark.isa_matrix
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_lse_match_the_reference(
    isa: str, dtype: torch.dtype, layout: str, causal: Any, heads: tuple[int, int]
) -> None:
    for b, lq, lk, d, dv in ODD_SHAPES:
        q, k, v = Shape(b, *heads, lq, lk, d, dv).qkv(dtype, layout)
        check_forward(q, k, v, {"causal": causal}, what=f"output at {(b, lq, lk, d, dv)}")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_matches_the_reference(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in (Shape(2, 4, 2, 5, 7, 8), Shape(3, 2, 2, 37, 37, 16, 24), Shape(2, 3, 1, 70, 290, 33)):
        q, k, v = s.qkv(dtype)
        check_forward(q, k, v, OPTIONS[option](s), what=f"output at {s}")


@pytest.mark.parametrize("option", OPTIONS)
def test_reference_and_op_match_the_formula_written_out_in_loops(option: str) -> None:
    for s in (Shape(2, 4, 2, 6, 6, 5, 3), Shape(3, 2, 1, 4, 9, 3), Shape(2, 2, 2, 9, 4, 2)):
        q, k, v = s.qkv(torch.float64)
        options = OPTIONS[option](s)
        expected = naive_attention(s, q, k, v, options)
        for who, function in (("reference", attn_ext.reference.attention), ("op", attn_ext.attention)):
            found = function(q, k, v, **options, return_lse=True, return_weights=True)
            for name, actual, truth in zip(("output", "lse", "weights"), found, expected, strict=True):
                torch.testing.assert_close(
                    actual.double(), truth, rtol=0, atol=1e-9, msg=f"{who}: {name} at {s}"
                )


@pytest.mark.isa_matrix
@pytest.mark.parametrize("what_varies", ["queries", "keys", "head dim", "value dim"])
def test_every_length_from_zero_to_twice_the_lanes(isa: str, dtype: torch.dtype, what_varies: str) -> None:
    sizes = {"queries": 9, "keys": 9, "head dim": 9, "value dim": 9}
    for n in range(34):
        sizes[what_varies] = n
        if sizes["head dim"] == 0:
            continue
        s = Shape(1, 2, 1, sizes["queries"], sizes["keys"], sizes["head dim"])
        # Starts 0 to 3 elements into the storage, so that no vector load may count on alignment.
        offset = n % 4
        tensors = []
        for seed, shape in enumerate(
            ((1, 2, s.lq, s.d), (1, 1, s.lk, s.d), (1, 1, s.lk, sizes["value dim"])),
        ):
            values = make(shape, dtype, seed=seed)
            holder = torch.full((values.numel() + offset,), float("nan"), dtype=dtype)[offset:].view(shape)
            tensors.append(holder.copy_(values))
        check_forward(*tensors, {}, what=f"output with {n} {what_varies}")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("d", [1, 3, 5, 7, 33, 46, 72, 80, 96, 112, 192, 256, 257, 512])
def test_unusual_head_dims_match_the_reference_and_four_runs_agree(d: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for length in (1, 8, 65):
            q, k, v = Shape(2, 3, 3, length, length, d).qkv(dtype)
            first = check_forward(q, k, v, {"causal": True}, what=f"{dtype} output at L {length}")
            for _ in range(3):
                assert_same_bits(attn_ext.attention(q, k, v, causal=True), first, "repeated run")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_value_heads_of_another_width(dtype: torch.dtype, causal: Any) -> None:
    for s in (Shape(8, 4, 1, 1, 36, 32, 24), Shape(8, 2, 2, 64, 64, 128, 64), Shape(1, 2, 1, 9, 11, 16, 40)):
        q, k, v = s.qkv(dtype)
        assert check_forward(q, k, v, {"causal": causal}).shape == (s.b, s.hq, s.lq, s.dv)
        check_forward(q, k, v, {"causal": causal, "mask": random_bool(s.b, 1, s.lq, s.lk)})


def test_default_scale_comes_from_the_query_head_dim_not_from_the_value_dim() -> None:
    q, k, v = Shape(1, 1, 1, 3, 4, 16, 40).qkv()
    assert_same_bits(attn_ext.attention(q, k, v), attn_ext.attention(q, k, v, scale=0.25), "scale 1/sqrt(16)")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_ranks_three_to_five_are_the_same_computation(rank: int, dtype: torch.dtype) -> None:
    batch = {3: (), 4: (3,), 5: (2, 3)}[rank]
    q, k = make((*batch, 4, 7, 8), dtype, seed=1), make((*batch, 2, 9, 8), dtype, seed=2)
    v = make((*batch, 2, 9, 6), dtype, seed=3)
    mask, bias = random_bool(*batch, 1, 7, 9), make((*batch, 4, 7, 9), seed=5)
    options = {"mask": mask, "bias": bias, "causal": "bottom_right", "window": (6, None), "softcap": 3.0}
    out, lse = attn_ext.attention(q, k, v, **options, return_lse=True)
    assert out.shape == (*batch, 4, 7, 6) and lse.shape == (*batch, 4, 7)
    check_forward(q, k, v, options)
    flat = {**options, "mask": mask.reshape(-1, 1, 7, 9), "bias": bias.reshape(-1, 4, 7, 9)}
    as_four = attn_ext.attention(
        q.reshape(-1, 4, 7, 8), k.reshape(-1, 2, 9, 8), v.reshape(-1, 2, 9, 6), **flat
    )
    assert_same_bits(out, as_four.view(out.shape), "rank")


# ------------------------------------------------------------------------------------------- masks and biases


def broadcast_shapes(b: int, h: int, lq: int, lk: int) -> list[tuple[int, ...]]:
    """Every way of leaving dims out or at one, from the right, as torch broadcasts."""
    shapes = [(lk,), (1,), (lq, lk), (lq, 1), (1, lk), (h, lq, lk), (h, 1, lk), (1, lq, lk), (h, lq, 1)]
    for bits in range(16):
        shapes.append(tuple(size if bits >> i & 1 else 1 for i, size in enumerate((b, h, lq, lk))))
    return shapes


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", ["bool mask", "float mask", "bias", "bias of -inf"])
@pytest.mark.parametrize("lengths", [(16, 16), (5, 7), (1, 40), (33, 270)])
def test_every_broadcastable_mask_equals_its_expanded_copy(kind: str, lengths: tuple[int, int]) -> None:
    s = Shape(2, 3, 3, *lengths, 32)
    q, k, v = s.qkv()
    for shape in broadcast_shapes(s.b, s.hq, s.lq, s.lk):
        # Contents differ for every batch entry and head, so applying a mask to the wrong one shows.
        if kind in ("bool mask", "bias of -inf"):
            part = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.6
            if kind == "bias of -inf":
                part = torch.zeros(shape).masked_fill(~part, -math.inf)
        else:
            part = make(shape, seed=5)
        name = "mask" if kind.endswith("mask") else "bias"
        full = part.expand(s.b, s.hq, s.lq, s.lk).contiguous()
        expected = attn_ext.attention(q, k, v, **{name: full})
        assert_same_bits(attn_ext.attention(q, k, v, **{name: part}), expected, f"{kind} of shape {shape}")
    check_forward(q, k, v, {name: full})


def mask_views(kind: str) -> dict[str, Tensor]:
    """Masks of (2, 4, 5, 7) or broadcastable to it that are views in every way a view can be."""

    def base(*shape: int) -> Tensor:
        return random_bool(*shape) if kind == "bool" else make(shape, seed=7)

    flat = base(2 * 4 * 5 * 7 + 3)
    return {
        "cut from a large static mask": base(1, 1, 64, 64)[..., :5, :7],
        "cut from the far corner": base(1, 1, 64, 64)[..., -5:, -7:],
        "transposed": base(7, 5).transpose(0, 1),
        "expanded over heads and rows": base(2, 1, 1, 7).expand(2, 4, 5, 7),
        "expanded over keys": base(2, 4, 5, 1).expand(2, 4, 5, 7),
        "every second key": base(2, 4, 5, 14)[..., ::2],
        "every second row, from the third": base(2, 4, 13, 7)[..., 3::2, :],
        "starting three elements in": flat[3:].view(2, 4, 5, 7),
        "heads and batch swapped": base(4, 2, 5, 7).transpose(0, 1),
        "keys outermost": base(7, 2, 4, 5).permute(1, 2, 3, 0),
        "overlapping windows": torch.as_strided(flat, (5, 7), (1, 1)),
    }


@pytest.mark.isa_matrix
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("view", list(mask_views("bool")))
def test_masks_that_are_views_equal_their_contiguous_clone(view: str, kind: str, dtype: torch.dtype) -> None:
    q, k, v = Shape(2, 4, 4, 5, 7, 16).qkv(dtype)
    part = mask_views(kind)[view]
    clone = part.clone(memory_format=torch.contiguous_format)
    for name in ("mask", "bias") if kind == "float" else ("mask",):
        expected = attn_ext.attention(q, k, v, **{name: clone})
        assert_same_bits(attn_ext.attention(q, k, v, **{name: part}), expected, view)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=DTYPE_IDS)
def test_bias_of_any_float_dtype_is_used_in_its_own_precision(
    dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    s = Shape(2, 4, 2, 16, 16, 32)
    q, k, v = s.qkv(dtype)
    # 100.1 has no close bf16 neighbour: a bias rounded to q's dtype would be off by up to 0.4 in the exponent.
    bias = (make((s.b, s.hq, s.lq, s.lk), seed=6) + 100.1).to(bias_dtype)
    for name in ("mask", "bias"):
        out = check_forward(q, k, v, {name: bias})
        exact = reference_call(q, k, v, {name: bias.double()}, torch.float64)
        rounding = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4, torch.float64: 1e-4}[
            dtype
        ]
        assert (out.double() - exact).abs().max() < rounding


@pytest.mark.isa_matrix
def test_bool_mask_and_float_mask_of_minus_infinity_say_the_same(dtype: torch.dtype) -> None:
    s = Shape(2, 4, 2, 33, 65, 24)
    q, k, v = s.qkv(dtype)
    keep = random_bool(s.b, s.hq, s.lq, s.lk)
    keep[:, :, ::5] = False
    as_float = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    expected = reference_call(q, k, v, {"mask": keep}, torch.float64)
    plain = reference_call(q, k, v, {"mask": keep}, dtype)
    for options in ({"mask": keep}, {"mask": as_float}, {"bias": as_float}):
        assert_close_to_reference(attn_ext.attention(q, k, v, **options), expected, plain)
        assert (attn_ext.attention(q, k, v, **options)[:, :, ::5] == 0).all()


def test_true_means_attend_and_an_upside_down_mask_gives_zeros_not_nan() -> None:
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 100.0]).view(1, 1, 4, 1)
    keep = torch.tensor([True, True, True, False])
    # The mean of 1, 2, 3. An inverted mask would give 100, a mask added as 1/0 would give 12.70471.
    assert attn_ext.attention(q, k, v, mask=keep).item() == pytest.approx(2.0, abs=1e-6)
    assert attn_ext.attention(q, k, v, key_lengths=torch.tensor([3])).item() == pytest.approx(2.0, abs=1e-6)
    x = make((1, 1, 4, 4))
    wrong = torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1)
    out = attn_ext.attention(x, x, x, mask=wrong)
    assert torch.isfinite(out).all() and (out[0, 0, 3] == 0).all()


@pytest.mark.isa_matrix
def test_mask_causal_window_and_lengths_must_all_allow_a_key(isa: str) -> None:
    s = Shape(3, 2, 2, 40, 70, 8)
    q, k, v = s.qkv()
    options = {
        "mask": random_bool(s.b, 1, s.lq, s.lk),
        "causal": "bottom_right",
        "window": (25, 3),
        "key_lengths": torch.tensor([70, 41, 12]),
    }
    expected = attn_ext.attention(q, k, v, mask=visible_keys(s, options))
    torch.testing.assert_close(attn_ext.attention(q, k, v, **options), expected, rtol=0, atol=1e-6)
    check_forward(q, k, v, options)


def test_each_corner_of_causal_and_each_side_of_the_window_hides_the_keys_it_says() -> None:
    # The weights of equal scores show which keys a row sees: q = 0 makes them 1/n each.
    k = torch.zeros(1, 1, 5, 1)
    q = torch.zeros(1, 1, 3, 1)

    def seen(**options: Any) -> list[str]:
        weights = attn_ext.attention(q, k, k, **options, return_weights=True)[1]
        return ["".join("x" if w > 0 else "." for w in row) for row in weights[0, 0].tolist()]

    assert seen() == ["xxxxx", "xxxxx", "xxxxx"]
    assert seen(causal="top_left") == ["x....", "xx...", "xxx.."]
    assert seen(causal="bottom_right") == ["xxx..", "xxxx.", "xxxxx"]
    assert seen(window=(0, 0)) == ["..x..", "...x.", "....x"]
    assert seen(window=(1, 1)) == [".xxx.", "..xxx", "...xx"]
    assert seen(window=(None, 0)) == ["xxx..", "xxxx.", "xxxxx"]
    assert seen(window=(1, None)) == [".xxxx", "..xxx", "...xx"]
    assert seen(window=(None, None)) == ["xxxxx", "xxxxx", "xxxxx"]
    assert seen(window=(1, 2), causal="top_left") == ["x....", "xx...", ".xx.."]
    assert seen(window=(1, 2), causal="bottom_right") == [".xx..", "..xx.", "...xx"]
    assert seen(key_lengths=torch.tensor([4]), causal="bottom_right") == ["xxx..", "xxxx.", "xxxx."]


def test_more_queries_than_keys_leaves_rows_dead_only_under_the_bottom_right_corner() -> None:
    q, k, v = Shape(1, 1, 1, 5, 2, 4).qkv()
    top = attn_ext.attention(q, k, v, causal="top_left")
    bottom, lse = attn_ext.attention(q, k, v, causal="bottom_right", return_lse=True)
    torch.testing.assert_close(top[0, 0, 0], v[0, 0, 0])
    assert (bottom[0, 0, :3] == 0).all() and (lse[0, 0, :3] == -math.inf).all()
    torch.testing.assert_close(bottom[0, 0, 3], v[0, 0, 0])
    assert torch.isfinite(lse[0, 0, 3:]).all()


# ------------------------------------------------------------------------------------------- hand-made values


def test_output_for_scores_that_can_be_checked_with_a_pocket_calculator() -> None:
    q = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]).view(1, 1, 3, 2)
    k = torch.tensor([[0.7, 0.8], [0.9, 1.0], [1.1, 1.2]]).view(1, 1, 3, 2)
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).view(1, 1, 3, 2)
    for scale, expected in (
        (None, [[1, 2], [2.04946, 3.04946], [3.20659, 4.20659]]),
        (0.0, [[1, 2], [2, 3], [3, 4]]),
        (-0.70710678, [[1, 2], [1.95054, 2.95054], [2.79341, 3.79341]]),
    ):
        for function in (attn_ext.attention, attn_ext.reference.attention):
            out = function(q, k, v, causal=True, scale=scale)
            torch.testing.assert_close(
                out[0, 0], torch.tensor(expected, dtype=torch.float32), rtol=0, atol=2e-5
            )


def test_the_lse_is_the_natural_logarithm_of_the_sum_of_the_scaled_scores() -> None:
    q = torch.tensor([2.0]).view(1, 1, 1, 1)
    k = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    _, lse = attn_ext.attention(q, k, k, scale=0.5, return_lse=True)
    assert lse.item() == pytest.approx(math.log(math.exp(1.0) + math.exp(3.0)), abs=1e-6)
    _, lse = attn_ext.attention(q, k, k, scale=0.5, sinks=torch.tensor([2.0]), return_lse=True)
    assert lse.item() == pytest.approx(math.log(math.exp(1.0) + math.exp(3.0) + math.exp(2.0)), abs=1e-6)


def test_softcap_bends_scores_before_the_bias_is_added() -> None:
    q, k = torch.full((1, 1, 1, 1), 3.0), torch.tensor([1.0, -2.0]).view(1, 1, 2, 1)
    bias = torch.tensor([0.25, 5.0])
    weights = attn_ext.attention(q, k, k, scale=1.0, softcap=2.0, bias=bias, return_weights=True)[1].flatten()
    x = [2 * math.tanh(3 / 2) + 0.25, 2 * math.tanh(-6 / 2) + 5.0]
    assert weights[0].item() == pytest.approx(1 / (1 + math.exp(x[1] - x[0])), abs=1e-6)


def test_alibi_takes_slope_times_distance_from_the_aligned_position() -> None:
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 3, 4)
    lse = attn_ext.attention(q, k, k, alibi_slopes=torch.tensor([0.5, 2.0]), return_lse=True)[1]
    # The only query is aligned with the last key: distances 2, 1, 0.
    for head, slope in enumerate((0.5, 2.0)):
        expected = math.log(1 + math.exp(-slope) + math.exp(-2 * slope))
        assert lse[0, head, 0].item() == pytest.approx(expected, abs=1e-6)
    lse = attn_ext.attention(
        q, k, k, alibi_slopes=torch.tensor([0.5, 2.0]), causal="top_left", return_lse=True
    )[1]
    torch.testing.assert_close(
        lse, torch.zeros(1, 2, 1), rtol=0, atol=1e-6
    )  # sees key 0 alone, at distance 0


def test_grouped_heads_are_repeated_not_tiled() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 3, 2)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 3, 2)
    out = attn_ext.attention(q, k, v)[0, :, 0, 0]
    torch.testing.assert_close(out, torch.tensor([10.0, 10.0, 20.0, 20.0]))
    prefix = Shape(1, 8, 2, 5, 12, 8)
    q, k, v = prefix.qkv(torch.float64)
    repeated = attn_ext.attention(
        q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), causal="bottom_right"
    )
    torch.testing.assert_close(
        attn_ext.attention(q, k, v, causal="bottom_right"), repeated, rtol=0, atol=1e-12
    )


def test_second_chunk_of_a_prompt_sees_the_prefix_and_not_its_own_future() -> None:
    v = torch.arange(1.0, 7.0).view(1, 1, 6, 1)
    out = attn_ext.attention(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 6, 1), v, causal="bottom_right")
    torch.testing.assert_close(
        out.flatten(), torch.tensor([3.0, 3.5])
    )  # a top-left mask would give 1 and 1.5


# ----------------------------------------------------------------------------------- dead rows, NaN, extremes


@pytest.mark.isa_matrix
def test_rows_that_see_no_key_are_exactly_zero_and_their_lse_is_minus_infinity(dtype: torch.dtype) -> None:
    q, k, v = Shape(1, 1, 1, 2, 2, 4).qkv(dtype)
    keep = torch.tensor([[False, False], [True, True]])
    as_float = torch.tensor([[-math.inf, -math.inf], [0.0, 0.0]])
    visible = attn_ext.attention(q[:, :, 1:], k, v)
    for mask in (keep, as_float):
        out, lse, weights = attn_ext.attention(q, k, v, mask=mask, return_lse=True, return_weights=True)
        assert (out[0, 0, 0] == 0).all() and lse[0, 0, 0] == -math.inf and (weights[0, 0, 0] == 0).all()
        torch.testing.assert_close(out[:, :, 1:], visible)
    one = attn_ext.attention(q[:, :, :1], k, v, mask=torch.tensor([False, False]))
    assert (one == 0).all()


@pytest.mark.isa_matrix
def test_window_that_lies_wholly_in_the_padding_leaves_rows_dead_not_nan(
    isa: str, dtype: torch.dtype
) -> None:
    q, k, v = Shape(1, 2, 2, 16, 16, 8).qkv(dtype)
    for options in (
        {"mask": torch.arange(16) < 4},
        {"key_lengths": torch.tensor([4])},
    ):
        # Each row sees itself and three keys before it; keys from the fourth on are padding.
        out, lse = attn_ext.attention(q, k, v, window=(3, 0), **options, return_lse=True)
        assert torch.isfinite(out).all()
        assert (out[:, :, 7:] == 0).all() and (lse[:, :, 7:] == -math.inf).all()
        assert (out[:, :, :7] != 0).any(-1).all() and torch.isfinite(lse[:, :, :7]).all()


def test_a_dead_row_with_a_sink_is_zero_and_its_lse_is_the_logit_of_the_sink(dtype: torch.dtype) -> None:
    q, k, v = Shape(1, 2, 2, 3, 4, 8).qkv(dtype)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    sinks = torch.tensor([0.75, -3.0])
    out, lse, weights = attn_ext.attention(
        q, k, v, mask=mask, sinks=sinks, return_lse=True, return_weights=True
    )
    assert (out[:, :, 1] == 0).all() and (weights[:, :, 1] == 0).all()
    torch.testing.assert_close(lse[0, :, 1].float(), sinks)
    assert (weights[:, :, 0].sum(-1) < 1).all()


POISON = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf, "huge": 3e38}


@pytest.mark.isa_matrix
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    "hidden_by", ["bool mask", "float mask", "bias", "causal", "window", "key lengths", "mixture"]
)
def test_a_hidden_key_touches_nothing_whatever_it_holds(isa: str, hidden_by: str, poison: str) -> None:
    for s in (Shape(2, 2, 1, 9, 11, 8), Shape(1, 2, 2, 100, 150, 20), Shape(1, 4, 2, 1, 300, 16)):
        dead = torch.arange(s.lk) % 3 == 1
        options: dict[str, Any] = {
            "bool mask": {"mask": ~dead},
            "float mask": {"mask": torch.zeros(s.lk).masked_fill(dead, -math.inf)},
            "bias": {"bias": make((s.lq, s.lk)).masked_fill(dead, -math.inf)},
            "causal": {"causal": "top_left"},
            "window": {"window": (1, 1)},
            "key lengths": {"key_lengths": torch.full((s.b,), s.lk // 2)},
            "mixture": {"mask": ~dead, "window": (30, None), "causal": "bottom_right", "softcap": 4.0},
        }[hidden_by]
        q, k, v = s.qkv()
        nobody_sees = ~visible_keys(s, options)[0, 0].any(0)
        assert nobody_sees.any()
        clean, clean_lse = attn_ext.attention(q, k, v, **options, return_lse=True)
        for spoiled in ("k", "v", "both"):
            k2, v2 = k.clone(), v.clone()
            if spoiled != "v":
                k2[:, :, nobody_sees] = POISON[poison]
            if spoiled != "k":
                v2[:, :, nobody_sees] = POISON[poison]
            out, lse = attn_ext.attention(q, k2, v2, **options, return_lse=True)
            assert_same_bits(out, clean, f"{poison} in hidden {spoiled} at {s}")
            assert_same_bits(lse, clean_lse, f"lse with {poison} in hidden {spoiled}")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("poison", ["NaN", "infinity"])
@pytest.mark.parametrize("option", ["causal", "window", "mask per row"])
def test_a_key_with_nan_spoils_only_the_rows_that_see_it(
    isa: str, dtype: torch.dtype, option: str, poison: str
) -> None:
    s = Shape(1, 2, 1, 70, 140, 24)
    options: dict[str, Any] = {
        "causal": {"causal": "bottom_right"},
        "window": {"window": (20, 7)},
        "mask per row": {"mask": random_bool(s.lq, s.lk)},
    }[option]
    q, k, v = s.qkv(dtype)
    clean = attn_ext.attention(q, k, v, **options)
    for j in (3, 69, 72, 100, 139):
        sees = visible_keys(s, options)[0, 0, :, j]
        spoiled = v.clone()
        spoiled[:, :, j, 5] = POISON[poison]
        out = attn_ext.attention(q, k, spoiled, **options)
        assert_same_bits(out[:, :, ~sees], clean[:, :, ~sees], f"rows that do not see key {j}")
        assert not torch.isfinite(out[:, :, sees, 5]).any(), f"{poison} in key {j} was swallowed"
        others = [c for c in range(s.d) if c != 5]
        assert_same_bits(out[:, :, sees][..., others], clean[:, :, sees][..., others], "other columns")


@pytest.mark.isa_matrix
def test_nan_in_what_a_row_sees_stays_nan(isa: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.full((2, 4, 16, 8), math.nan, dtype=dtype) for _ in range(3))
    assert torch.isnan(attn_ext.attention(q, k, v)).all()
    q, k, v = (
        make((1, 1, 4, 64), dtype, seed=1),
        make((1, 1, 16, 64), dtype, seed=2),
        make((1, 1, 16, 64), dtype),
    )
    q[0, 0, 0, 0] = math.nan
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    assert torch.isnan(out[0, 0, 0]).all() and torch.isfinite(out[0, 0, 1:]).all()
    assert torch.isnan(lse[0, 0, 0]) and torch.isfinite(lse[0, 0, 1:]).all()
    q, k = make((1, 1, 4, 64), dtype, seed=1), k.clone()
    k[0, 0, 15, 63] = math.nan
    assert torch.isnan(attn_ext.attention(q, k, v)).all()
    bias = torch.zeros(4, 16)
    bias[2, 9] = math.nan
    out = attn_ext.attention(q, make((1, 1, 16, 64), dtype, seed=2), v, bias=bias)
    assert torch.isnan(out[0, 0, 2]).all() and torch.isfinite(out[0, 0, [0, 1, 3]]).all()


def test_hidden_key_in_the_small_example_gives_the_visible_value_exactly() -> None:
    q = k = v = torch.arange(8.0).view(1, 2, 4)
    keep = torch.tensor([[True, False], [True, False]])
    for spoil in (math.nan, math.inf):
        k2, v2 = k.clone(), v.clone()
        k2[0, 1, 0] = spoil
        v2[0, 1] = spoil
        out = attn_ext.attention(q, k2, v2, mask=keep)
        assert out.tolist() == [[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]]


@pytest.mark.isa_matrix
@pytest.mark.parametrize("minus_huge", [torch.finfo(torch.float32).min, -1e9, -1e4])
def test_finite_but_huge_negative_masks_hide_keys_and_never_give_nan(isa: str, minus_huge: float) -> None:
    q, k, v = Shape(2, 3, 3, 70, 441, 64).qkv()
    mask = torch.zeros(441)
    mask[:128] = minus_huge
    expected = attn_ext.attention(q, k[:, :, 128:], v[:, :, 128:])
    for name in ("mask", "bias"):
        out = attn_ext.attention(q, k, v, **{name: mask})
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.isa_matrix
def test_a_row_of_the_smallest_finite_bias_is_the_plain_mean(isa: str, dtype: torch.dtype) -> None:
    s = Shape(1, 2, 2, 3, 50, 16)
    q, k, v = s.qkv(dtype)
    # fp16's own lowest, -65504, is no such case: fp32 scores next to it still tell keys apart.
    for mask_dtype in {torch.float32, dtype} - {torch.float16}:
        bias = torch.zeros(3, 50, dtype=mask_dtype)
        bias[1] = torch.finfo(torch.float32 if mask_dtype == torch.float64 else mask_dtype).min
        out = check_forward(q, k, v, {"bias": bias})
        mean = v.double().mean(-2)
        assert (out[:, :, 1].double() - mean).abs().max() < {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(
            dtype, 1e-5
        )
    # Two of them added, as a causal and a padding plane would be: still no -inf surprise.
    lowest = torch.full((3, 50), torch.finfo(torch.float32).min)
    both = attn_ext.attention(q, k, v, mask=lowest, bias=lowest)
    assert not torch.isnan(both).any()


@pytest.mark.isa_matrix
def test_half_precision_scores_beyond_65504_do_not_overflow(isa: str) -> None:
    q = torch.full((1, 1, 4, 64), 256.0, dtype=torch.float16)
    v = torch.arange(1.0, 5.0).to(torch.float16).view(1, 1, 4, 1)
    assert (attn_ext.attention(q, q, v) == 2.5).all()
    rand = -900 * torch.rand(2, 4, 128, 64)
    x, v = rand.to(torch.float16), torch.rand(2, 4, 128, 64).to(torch.float16)
    out = attn_ext.attention(x, x, v)
    assert torch.isfinite(out).all() and (out >= v.min()).all() and (out <= v.max()).all()


@pytest.mark.isa_matrix
@pytest.mark.parametrize("how", ["plain", "causal", "bias", "negative scale", "alibi", "lengths"])
def test_scores_of_ten_to_the_eleventh_leave_equal_keys_equal(isa: str, dtype: torch.dtype, how: str) -> None:
    big = 133120.0 if dtype != torch.float16 else 60000.0
    for length in (1, 3, 40, 300):
        x = torch.full((1, 1, length, 64), big, dtype=dtype)
        options: dict[str, Any] = {
            "plain": {},
            "causal": {"causal": True},
            "bias": {"bias": torch.zeros(length)},
            "negative scale": {"scale": -0.125},
            "alibi": {"alibi_slopes": torch.zeros(1)},
            "lengths": {"key_lengths": torch.tensor([(length + 1) // 2])},
        }[how]
        out = attn_ext.attention(x, x, x, **options).double()
        # bf16 and fp16 round back to the exact value; fp32 may miss it by the rounding of a sum of equal terms.
        tolerance = 0.0 if dtype in (torch.bfloat16, torch.float16) else 1e-6 * big
        assert (out - big).abs().max() <= tolerance, f"length {length}"
        if length == 1:
            assert (out == big).all()


@pytest.mark.isa_matrix
@pytest.mark.parametrize("scale", [None, -0.3])
def test_huge_and_different_scores_pick_the_largest_key(isa: str, scale: float | None) -> None:
    q = torch.full((1, 1, 5, 8), 1e5)
    k = torch.arange(1.0, 38.0).view(1, 1, 37, 1).expand(1, 1, 37, 8) * 1e3
    v = torch.arange(37.0).view(1, 1, 37, 1)
    out = attn_ext.attention(q, k, v, scale=scale)
    assert (out == (36.0 if scale is None else 0.0)).all()


@pytest.mark.isa_matrix
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sums_over_long_rows_are_not_kept_in_sixteen_bits(isa: str, short: torch.dtype) -> None:
    q = torch.zeros(1, 1, 2, 8, dtype=short)
    k, v = make((1, 1, 4096, 8), short), torch.ones(1, 1, 4096, 8, dtype=short)
    assert (attn_ext.attention(q, k, v) == 1.0).all()  # a bf16 running sum of ones stops at 256
    for length in (32, 1024):
        # The error does not grow with the length: one rounding of the result, and of the weights at most.
        q, k, v = Shape(1, 2, 2, 16, length, 64).qkv(short)
        truth = reference_call(q, k, v, {}, torch.float64)
        error = (attn_ext.attention(q, k, v).double() - truth).abs().max()
        assert error <= 1.5 * torch.finfo(short).eps * truth.abs().max(), f"length {length}"


@pytest.mark.isa_matrix
def test_a_single_key_returns_its_value_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    q, k, v = Shape(2, 3, 3, 1, 1, 64).qkv(dtype)
    assert_same_bits(attn_ext.attention(q, k, v), v, "single key")
    q, k, v = Shape(2, 3, 3, 40, 40, 20).qkv(dtype)
    assert_same_bits(attn_ext.attention(q, k, v, window=(0, 0)), v, "diagonal")


@pytest.mark.isa_matrix
def test_scale_zero_is_not_taken_for_no_scale(dtype: torch.dtype) -> None:
    q, k, v = Shape(2, 2, 1, 9, 33, 16).qkv(dtype)
    out = check_forward(q, k, v, {"scale": 0.0})
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 1e-6)
    mean = v.double().mean(-2, keepdim=True).expand(2, 2, 9, 16)
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------ strides and sizes


@pytest.mark.isa_matrix
@pytest.mark.parametrize("length", [7, 62, 64])
@pytest.mark.parametrize("heads", [1, 3])
def test_q_k_v_cut_from_one_fused_projection_equal_contiguous_ones(
    dtype: torch.dtype, length: int, heads: int
) -> None:
    qkv = make((2, length, 3, heads, 5), dtype)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected = attn_ext.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    for _ in range(2):
        assert_same_bits(attn_ext.attention(q, k, v, causal=True), expected, "fused views")
    q, k = make((1, 16, length, 16), dtype, seed=1), make((1, 16, length, 16), dtype, seed=2)
    v = make((1, 16, length, 12), dtype, "tokens_first", seed=3)
    assert_same_bits(attn_ext.attention(q, k, v), attn_ext.attention(q, k, v.contiguous()), "only v strided")


@pytest.mark.isa_matrix
def test_expanded_inputs_with_stride_zero_are_read_right(dtype: torch.dtype) -> None:
    q = make((1, 1, 7, 8), dtype, seed=1).expand(2, 4, 7, 8)
    k = make((1, 2, 1, 8), dtype, seed=2).expand(2, 2, 9, 8)
    v = make((2, 1, 9, 1), dtype, seed=3).expand(2, 2, 9, 6)
    out = check_forward(q, k, v, {})
    assert_same_bits(out, attn_ext.attention(q.contiguous(), k.contiguous(), v.contiguous()), "expanded")


@pytest.mark.parametrize("grad", [False, True])
def test_output_keeps_the_stride_order_of_q(grad: bool) -> None:
    s = Shape(2, 3, 3, 5, 7, 8, 6)
    q, k, v = s.qkv(layout="tokens_first")
    q.requires_grad_(grad)
    out = attn_ext.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    out.transpose(1, 2).view(2, 5, 18)  # the merge of heads that follows in every model is free
    q, k, v = s.qkv()
    assert attn_ext.attention(q.requires_grad_(grad), k, v).is_contiguous()
    q, k, v = s.qkv(layout="fused_qkv")
    assert attn_ext.attention(q, k, v).transpose(1, 2).is_contiguous()


def test_no_keys_gives_zeros_and_empty_dims_give_empty_outputs(dtype: torch.dtype) -> None:
    q, k, v = Shape(2, 3, 3, 4, 0, 8).qkv(dtype)
    for options in ({}, {"causal": "bottom_right"}, {"window": (1, 1)}, {"bias": torch.zeros(4, 0)}):
        out, lse, weights = attn_ext.attention(q, k, v, **options, return_lse=True, return_weights=True)
        assert out.shape == (2, 3, 4, 8) and (out == 0).all()
        assert lse.shape == (2, 3, 4) and (lse == -math.inf).all()
        assert weights.shape == (2, 3, 4, 0)
        lean = attn_ext.attention(q, k, v, **options)
        assert lean.shape == out.shape and (lean == 0).all()
    for s, shape in (
        (Shape(0, 3, 3, 4, 5, 8), (0, 3, 4, 8)),
        (Shape(2, 3, 3, 0, 5, 8), (2, 3, 0, 8)),
        (Shape(2, 0, 0, 4, 5, 8), (2, 0, 4, 8)),
    ):
        q, k, v = s.qkv(dtype)
        out, lse = attn_ext.attention(q, k, v, return_lse=True)
        assert out.shape == shape and lse.shape == shape[:-1] and out.dtype == dtype
        assert attn_ext.attention(q, k, v).shape == shape
    out = attn_ext.attention(make((2, 3, 4, 8), dtype), make((2, 3, 5, 8), dtype), make((2, 3, 5, 0), dtype))
    assert out.shape == (2, 3, 4, 0)


@pytest.mark.isa_matrix
def test_more_than_65535_heads_or_batch_entries() -> None:
    for s in (Shape(1, 65537, 65537, 1, 2, 8), Shape(65537, 1, 1, 1, 2, 8)):
        q, k, v = s.qkv()
        out = attn_ext.attention(q, k, v)
        for at in (0, 65535, 65536):
            pick = (lambda x, at=at: x[:, at : at + 1]) if s.b == 1 else (lambda x, at=at: x[at : at + 1])
            assert_same_bits(pick(out), attn_ext.attention(pick(q), pick(k), pick(v)), f"entry {at}")


@pytest.mark.isa_matrix
def test_strides_that_reach_past_two_to_the_31_elements() -> None:
    # Five rows 2**29 elements apart; the pages in between are never touched, so this costs no memory.
    try:
        base = torch.empty(2**31 + 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine does not hand out 4 GB of untouched address space")
    small = make((1, 1, 5, 8), torch.float16, seed=1)
    far = torch.as_strided(base, (1, 1, 5, 8), (1, 1, 2**29, 1)).copy_(small)
    a, b = make((1, 1, 5, 8), torch.float16, seed=2), make((1, 1, 5, 8), torch.float16, seed=3)
    for place in range(3):
        near = [a, b]
        near.insert(place, small)
        tensors = list(near)
        tensors[place] = far
        assert_same_bits(
            attn_ext.attention(*tensors), attn_ext.attention(*near), f"argument {place} far apart"
        )
    q = small.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(attn_ext.attention(q, a, b), q, small)
    (actual,) = torch.autograd.grad(attn_ext.attention(q, a, b), q, far)
    assert_same_bits(actual, expected, "upstream gradient far apart")


# ------------------------------------------------------------------------------------ one truth on every path


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
def test_training_no_grad_and_inference_mode_give_the_same_bits(option: str) -> None:
    s = Shape(2, 4, 2, 20, 35, 16)
    q, k, v = s.qkv()
    options = OPTIONS[option](s)
    trained = attn_ext.attention(
        q.requires_grad_(True), k.requires_grad_(True), v.requires_grad_(True), **options
    )
    assert trained.requires_grad
    with torch.no_grad():
        assert_same_bits(attn_ext.attention(q, k, v, **options), trained, "no_grad")
    with torch.inference_mode():
        out = attn_ext.attention(q, k, v, **options)
        assert_same_bits(out, trained, "inference mode")
        asked = attn_ext.attention(q, k, v, **options, return_lse=True, return_weights=True)
        assert_same_bits(asked[0], trained, "with lse and weights")
        assert_same_bits(
            attn_ext.attention(q, k, v, **options, return_weights=True)[1],
            asked[2],
            "weights with and without lse",
        )


def test_inputs_are_left_untouched_and_the_output_shares_no_memory() -> None:
    s = Shape(1, 2, 2, 1, 1, 8)
    q, k, v = s.qkv()
    before = [x.clone() for x in (q, k, v)]
    out = attn_ext.attention(q, k, v)
    out.add_(1)
    for now, then in zip((q, k, v), before, strict=True):
        assert_same_bits(now, then, "input")


@pytest.mark.isa_matrix
def test_every_isa_agrees_with_every_other_within_rounding(dtype: torch.dtype) -> None:
    s = Shape(2, 4, 2, 70, 290, 33)
    q, k, v = s.qkv(dtype)
    options = OPTIONS["everything at once"](s)
    names = attn_ext.backend.available()
    before = attn_ext.backend.active()
    try:
        outs = []
        for name in names:
            attn_ext.backend.use(name)
            outs.append(attn_ext.attention(q, k, v, **options).double())
    finally:
        attn_ext.backend.use(before)
    limit = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for name, out in zip(names, outs, strict=True):
        assert (out - outs[0]).abs().max() <= limit, f"{name} against {names[0]}"
