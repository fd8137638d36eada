"""explain: the plan of a call, without running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

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


TILES_OF_BF16 = {"amx_bf16": "32 x 32", "avx512_bf16": "12 x 32"}


def test_the_plan_tells_what_is_multiplied_and_by_which_tile(isa: str) -> None:
    plans = {
        dtype: attn_ext.explain(*(x.to(dtype) for x in qkv(1, 2, 2, 5, 5, 8, 8)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    of_bf16, of_fp32 = plans[torch.bfloat16], plans[torch.float32]
    if isa in TILES_OF_BF16:
        assert of_bf16.register_tile == TILES_OF_BF16[isa]
        assert (
            "pairs of bfloat16, sums in float32" in str(of_bf16) and "weights rounded" in of_bf16.arithmetic
        )
    else:
        assert of_bf16.register_tile == of_fp32.register_tile and of_bf16.arithmetic == "float32"
    assert of_fp32.arithmetic == plans[torch.float16].arithmetic == "float32"
    assert plans[torch.float64].arithmetic == "float64"


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


REFUSED: dict[str, dict[str, Any]] = {
    "scale": {"scale": float("nan")},
    "scale as a tensor": {"scale": torch.tensor(0.5)},
    "softcap": {"softcap": -1.0},
    "slopes": {"alibi_slopes": torch.ones(9)},
    "slopes that want a gradient": {"alibi_slopes": torch.ones(4, requires_grad=True)},
    "sinks": {"sinks": torch.ones(7)},
    "lengths": {"key_lengths": torch.tensor([1, 99])},
    "shape of lengths": {"key_lengths": torch.tensor([1])},
    "lengths in a list": {"key_lengths": [1, 2]},
    "window": {"window": (-1, 0)},
    "dropout": {"dropout_p": 2.0},
    "mask": {"mask": torch.ones(4, 7, dtype=torch.bool)},
    "mask elsewhere": {"mask": torch.ones(5, 7, dtype=torch.bool, device="meta")},
    "mask in NumPy": {"mask": torch.ones(5, 7).numpy()},
    "heads of q": {"q": torch.ones(2, 3, 5, 8)},
    "more heads in k": {"q": torch.ones(2, 1, 5, 8)},
    "no heads in k": {"k": torch.ones(2, 0, 7, 8), "v": torch.ones(2, 0, 7, 6)},
    "batch": {"q": torch.ones(1, 4, 5, 8)},
    "head dim": {"q": torch.ones(2, 4, 5, 0), "k": torch.ones(2, 2, 7, 0)},
    "dtype": {"q": torch.ones(2, 4, 5, 8).double()},
    "device": {"k": torch.ones(2, 2, 7, 8, device="meta")},
    "list": {"v": [1]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_explain_raises_what_attention_raises(case: str) -> None:
    q, k, v = qkv(2, 4, 2, 5, 7, 8, 6)
    call = {"q": q, "k": k, "v": v, **REFUSED[case]}
    with pytest.raises((TypeError, ValueError)) as of_attention:
        attn_ext.attention(**call)
    with pytest.raises(of_attention.type, match="^attn_ext.explain: "):
        attn_ext.explain(**call)


def test_explain_names_the_reference_where_plain_pytorch_computes() -> None:
    q, k, v = qkv(2, 4, 2, 5, 7, 8, 6)
    plans = []

    def look(q: torch.Tensor) -> torch.Tensor:
        plans.append(attn_ext.explain(q, k[0], v[0], key_lengths=torch.tensor([3])))
        return attn_ext.attention(q, k[0], v[0]).sum()

    torch.func.vmap(look)(q)
    torch.func.grad(look)(q[0])
    with forward_ad.dual_level():
        look(forward_ad.make_dual(q[0], q[0]))
        look(q[0])
    assert [p.kernel for p in plans] == ["reference"] * 3 + ["attention_forward"]
    assert all(p.flops == 2 * 4 * 5 * 3 * (8 + 6) for p in plans)
    assert plans[0].tasks == 0 and "PyTorch" in plans[0].why and "reference" in str(plans[0])


def test_explain_under_autocast_plans_for_the_dtype_that_runs() -> None:
    q, k, v = qkv(2, 4, 2, 5, 7, 8, 6)
    full = attn_ext.explain(q, k, v).bytes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn_ext.explain(q, k, v).bytes == full / 2


def test_explain_leaves_the_generator_alone() -> None:
    inputs = qkv(1, 2, 2, 5, 7, 8, 8)
    state = torch.get_rng_state()
    attn_ext.explain(*inputs, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


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
