"""explain: the plan of a call, without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_ext
from attn_ext import reference


def qkv(B: int, Hq: int, Hkv: int, Lq: int, Lk: int, D: int, Dv: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(B, Hq, Lq, D), torch.randn(B, Hkv, Lk, D), torch.randn(B, Hkv, Lk, Dv)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"window": (3, 2)},
        {"window": (None, 0), "causal": "top_left"},
        {"key_lengths": torch.tensor([4, 11])},
        {"key_lengths": torch.tensor([0, 7]), "causal": "bottom_right", "window": (5, None)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_flops_count_the_scores_that_position_lets_a_query_see(options: dict[str, Any]) -> None:
    q, k, v = qkv(2, 4, 2, 9, 11, 8, 6)
    everything = torch.zeros(2, 4, 9, 11, dtype=torch.bool)
    seen = reference.visible(9, 11, **options)
    pairs = everything.numel() if seen is None else int((everything | seen).sum())
    assert attn_ext.explain(q, k, v, **options).flops == 2 * pairs * (8 + 6)


def test_the_plan_names_the_road_and_the_instruction_set() -> None:
    q, k, v = qkv(1, 2, 2, 5, 5, 8, 8)
    plain = attn_ext.explain(q, k, v, causal=True)
    assert plain.kernel == "attention_inference" and plain.isa == attn_ext.backend.active()
    assert attn_ext.explain(q, k, v, softcap=3.0).kernel == "attention_forward"
    assert "gradient" in attn_ext.explain(q.requires_grad_(), k, v).why
    assert "attention_inference" in str(plain) and "register_tile" in str(plain)


def test_few_rows_over_many_keys_are_split_over_the_keys() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        few = attn_ext.explain(*qkv(1, 1, 1, 1, 8192, 64, 64))
        many = attn_ext.explain(*qkv(1, 2, 2, 2048, 2048, 64, 64))
    finally:
        torch.set_num_threads(threads)
    assert few.segments > 1 and few.threads == 2
    assert many.segments == 1 and many.tasks * many.rows_per_task >= 2 * 2048


def test_explain_refuses_what_attention_refuses() -> None:
    q, k, v = qkv(1, 2, 2, 5, 7, 8, 8)
    with pytest.raises(ValueError, match="causal=True"):
        attn_ext.explain(q, k, v, causal=True)
    with pytest.raises(TypeError, match="colour"):
        attn_ext.explain(q, k, v, colour=3)
    with pytest.raises(ValueError, match="mask"):
        attn_ext.explain(q, k, v, mask=torch.ones(4, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="bool"):
        attn_ext.explain(q, k, v, mask=torch.ones(5, 7, dtype=torch.int32))
