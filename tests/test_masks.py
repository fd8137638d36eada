"""Masks: what each builder draws, their polarity, and that they do what they say inside attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_ext import masks
from attn_ext.reference import attention, visible


def draw(mask: Tensor) -> str:
    """A two-dimensional mask as the docstrings draw it."""
    return "\n".join(" ".join("x" if cell else "." for cell in row) for row in mask.tolist())


@pytest.mark.parametrize(
    "mask, expected",
    [
        (masks.causal(3), "x . .\nx x .\nx x x"),
        (masks.causal(2, 5), "x x x x .\nx x x x x"),
        (masks.causal(2, 5, "top_left"), "x . . . .\nx x . . ."),
        (masks.causal(4, 2), ". .\n. .\nx .\nx x"),
        (masks.causal(4, 2, "top_left"), "x .\nx x\nx x\nx x"),
        (masks.sliding_window(4, 4, 1, 0), "x . . .\nx x . .\n. x x .\n. . x x"),
        (masks.sliding_window(4, left=0, right=1), "x x . .\n. x x .\n. . x x\n. . . x"),
        (masks.sliding_window(2, 4, 1, 0), ". x x .\n. . x x"),
        (masks.sliding_window(2, 4, 1, 0, "top_left"), "x . . .\nx x . ."),
        (masks.sliding_window(2, 3), "x x x\nx x x"),
        (masks.padding([2, 0, 3])[:, 0, 0], "x x .\n. . .\nx x x"),
        (masks.padding(torch.tensor([2, 5]), 4)[:, 0, 0], "x x . .\nx x x x"),
        (masks.from_tokens(torch.tensor([[7, 0, 3], [0, 0, 1]]))[:, 0, 0], "x . x\n. . x"),
        (masks.from_tokens(torch.tensor([[7, 0, 3]]), pad_idx=3)[:, 0, 0], "x x ."),
        (masks.documents(torch.tensor([0, 0, 1])), "x x .\nx x .\n. . x"),
        (masks.documents(torch.tensor([1, 0]), torch.tensor([0, 1, 1])), ". x x\nx . ."),
        (masks.prefix_lm(4, 2), "x x . .\nx x . .\nx x x .\nx x x x"),
        (masks.prefix_lm(3, torch.tensor([0, 3]))[1, 0], "x x x\nx x x\nx x x"),
        (masks.prefix_lm(3, torch.tensor([0, 3]))[0, 0], "x . .\nx x .\nx x x"),
        (masks.build_causal_mask(3), "x . .\nx x .\nx x x"),
        (masks.create_padding_mask(torch.tensor([[5, 0]]))[:, 0, 0], "x ."),
        (masks.combine(masks.causal(3), masks.padding([2], 3))[0, 0], "x . .\nx x .\nx x ."),
    ],
)
def test_each_builder_draws_its_picture(mask: Tensor, expected: str) -> None:
    assert mask.dtype == torch.bool
    assert draw(mask) == expected


@pytest.mark.parametrize(
    "builder, calls",
    [
        (
            masks.causal,
            ["causal(2, 5)", 'causal(2, 5, "top_left")', "causal(4, 2)", 'causal(4, 2, "top_left")'],
        ),
        (
            masks.sliding_window,
            ["sliding_window(5, left=1, right=2)", "sliding_window(2, 5, left=2, right=0)"],
        ),
        (masks.prefix_lm, ["prefix_lm(5, 2)"]),
        (masks.documents, ["documents(tensor([0, 0, 1, 1, 1]))"]),
        (masks.combine, ["causal(3)", "combine(causal(3), padding([2], 3))"]),
        (masks.padding, ["padding([2, 4], 4)"]),
        (masks.from_tokens, ["from_tokens(tensor([[7, 3, 0, 0], [5, 1, 2, 9]]))"]),
    ],
)
def test_the_drawings_in_the_docstrings_are_what_the_calls_give(
    builder: Callable[..., Tensor], calls: list[str]
) -> None:
    lines = builder.__doc__.splitlines()
    for call in calls:
        top = next(n for n, line in enumerate(lines) if re.search(r"(?<!\w|\()" + re.escape(call), line))
        column = re.search(r"(?<!\w|\()" + re.escape(call), lines[top]).start()
        drawn = []
        for line in lines[top + 1 :]:
            row = re.match(r"[x.]( [x.])*(?=  |$)", line[column:])
            if row is None:
                break
            drawn.append(row.group())
        mask = eval(call, {**vars(masks), "tensor": torch.tensor})  # noqa: S307 - our own docstring
        assert drawn == draw(mask.reshape(-1, mask.shape[-1])).splitlines(), call


def test_shapes_broadcast_to_scores() -> None:
    assert masks.padding([1, 2, 3]).shape == (3, 1, 1, 3)
    assert masks.from_tokens(torch.ones(2, 5, dtype=torch.long)).shape == (2, 1, 1, 5)
    assert masks.documents(torch.zeros(2, 5), torch.zeros(2, 4)).shape == (2, 1, 5, 4)
    assert masks.prefix_lm(4, torch.tensor([1, 2])).shape == (2, 1, 4, 4)
    assert masks.padding(torch.zeros(0, dtype=torch.int64)).shape == (0, 1, 1, 0)
    assert masks.combine(masks.padding([1, 2]), masks.causal(2)).shape == (2, 1, 2, 2)


@pytest.mark.parametrize("Lq, Lk", [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("corner", ["top_left", "bottom_right"])
def test_masks_mean_what_the_options_of_attention_mean(Lq: int, Lk: int, corner: str) -> None:
    q, k, v = torch.randn(1, 1, Lq, 4), torch.randn(1, 1, Lk, 4), torch.randn(1, 1, Lk, 4)
    causal = masks.causal(Lq, Lk, corner)
    assert torch.equal(attention(q, k, v, mask=causal), attention(q, k, v, causal=corner))
    assert torch.equal(causal, visible(Lq, Lk, causal=corner))
    both = masks.combine(masks.sliding_window(Lq, Lk, 1, None, corner), causal, masks.padding([2], Lk))
    options = {"window": (1, None), "causal": corner, "key_lengths": torch.tensor([2])}
    assert torch.equal(attention(q, k, v, mask=both), attention(q, k, v, **options))


def test_true_attends_so_the_padded_key_of_100_is_not_counted() -> None:
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 3.0, 100.0]).reshape(1, 1, 4, 1)
    torchs_padding = torch.tensor([[False, False, False, True]])
    for mask in (
        masks.padding([3], 4),
        masks.from_tokens(torch.tensor([[9, 9, 9, 0]])),
        masks.from_torch_key_padding_mask(torchs_padding),
        masks.from_torch(torchs_padding),
        masks.to_bias(masks.padding([3], 4)),
    ):
        assert attention(q, k, v, mask=mask).item() == pytest.approx(
            2.0
        )  # 100 if inverted, 12.7 if added as 1 and 0


def test_conversions_to_and_from_the_modules_of_torch_are_inverse_and_agree_with_them() -> None:
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    keep, padding = masks.causal(4), masks.padding([3, 4])
    assert torch.equal(masks.from_torch(masks.to_torch(keep)), keep)
    assert torch.equal(masks.from_torch_key_padding_mask(masks.to_torch_key_padding_mask(padding)), padding)
    _, weights = module(
        x,
        x,
        x,
        attn_mask=masks.to_torch(keep),
        key_padding_mask=masks.to_torch_key_padding_mask(padding),
        average_attn_weights=False,
    )
    assert torch.equal(weights > 0, masks.combine(keep, padding).expand(2, 2, 4, 4))
    bools = F.scaled_dot_product_attention(x, x, x, attn_mask=keep)  # the function reads masks as we do
    torch.testing.assert_close(bools, attention(x, x, x, mask=keep))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_to_bias_is_zero_or_minus_infinity_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    bias = masks.to_bias(masks.causal(3), dtype)
    assert bias.dtype == dtype
    assert torch.equal(bias == -math.inf, ~masks.causal(3)) and (bias[masks.causal(3)] == 0).all()


@pytest.mark.parametrize("bad", [torch.ones(3, 3), torch.ones(3, 3, dtype=torch.uint8), [[True]], None])
@pytest.mark.parametrize(
    "function",
    [masks.combine, masks.to_bias, masks.from_torch, masks.to_torch, masks.from_torch_key_padding_mask],
)
def test_anything_but_bool_is_refused(function: Callable[..., Tensor], bad: object) -> None:
    with pytest.raises(TypeError, match="bool"):
        function(bad)


def test_errors_say_what_came() -> None:
    with pytest.raises(TypeError, match="bias="):
        masks.combine(masks.causal(3), torch.zeros(3, 3))
    with pytest.raises(TypeError, match=r"mask\.bool\(\)"):
        masks.combine(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="at least one"):
        masks.combine()
    with pytest.raises(ValueError, match=r"\(3, 3\), \(4, 4\)"):
        masks.combine(masks.causal(3), masks.causal(4))
    with pytest.raises(ValueError, match="'middle'"):
        masks.causal(3, 4, "middle")
    with pytest.raises(ValueError, match="left side.*-1"):
        masks.sliding_window(3, 3, -1, 0)
    with pytest.raises(TypeError, match="torch.bool"):
        masks.padding(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        masks.padding([[1, 2], [3, 4]])
    with pytest.raises(TypeError, match="torch.float32"):
        masks.from_tokens(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        masks.from_tokens(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(1, 2, 3\)"):
        masks.documents(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        masks.to_torch_key_padding_mask(masks.causal(3))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        masks.from_torch_key_padding_mask(torch.ones(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="floating point"):
        masks.to_bias(masks.causal(3), torch.int64)
