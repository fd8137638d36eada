"""explain for tensors on a GPU: what the launchers themselves say, without a launch."""

from __future__ import annotations

import pytest
import torch
from cuda_support import attention
from device_support import SIMULATED, carried
from op_support import DTYPES, Shape

import attn_ext
from attn_ext.explain import CudaPlan

explain = carried(attn_ext.explain)
ELEMENT = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.float64: 8}


@pytest.mark.parametrize("d", [1, 64, 65, 128, 129, 256, 257])
def test_the_kernel_and_the_columns_it_is_compiled_for(dtype: torch.dtype, d: int) -> None:
    plan = explain(*Shape(2, 4, 2, 300, 70, d).qkv(dtype))
    (launch,) = plan.launches
    assert isinstance(plan, CudaPlan) and plan.kernel == launch.kernel and launch.threads == 128
    in_16_bits = dtype in (torch.bfloat16, torch.float16)
    if in_16_bits and d <= 256 and launch.kernel == "forward_mma":  # a GPU may have too little shared memory
        assert (plan.columns, plan.tile_rows, plan.tile_keys) == (
            (64, 128, 64) if d <= 64 else (128, 128, 32) if d <= 128 else (256, 64, 64)
        )
        assert "tensor cores" in plan.why
        column_blocks = 1
    else:
        assert launch.kernel == "forward_general" and "plain multiply-adds" in plan.why
        assert plan.columns == (128 if d > 64 and dtype != torch.float64 else 64)
        column_blocks = -(-d // plan.columns)
        assert not (SIMULATED and in_16_bits and d <= 256)
    assert launch.blocks == 2 * 2 * -(-2 * 300 // plan.tile_rows) * column_blocks
    assert 0 < launch.shared_bytes <= plan.shared_bytes_to_have
    assert plan.flops == 2 * 2 * 4 * 300 * 70 * 2 * d
    assert plan.bytes == ELEMENT[dtype] * (2 * (2 * 4 * 300 * d) + 2 * (2 * 2 * 70 * d))


def test_the_shared_memory_is_what_a_launch_asks_for() -> None:
    asked = {
        d: explain(*Shape(1, 1, 1, 3, 5, d).qkv(torch.bfloat16)).launches[0].shared_bytes for d in (64, 128)
    }
    assert asked == {64: 37120, 128: 53504}  # as csrc/cuda/README.md has them


def test_the_operator_and_its_reason() -> None:
    q, k, v = Shape(1, 2, 1, 5, 9, 8).qkv()
    assert explain(q, k, v, causal="top_left").operator.startswith("attention_inference: ")
    assert (
        explain(q, k, v, softcap=3.0).operator
        == "attention_forward: set beyond a corner and a scale: softcap"
    )
    assert "gradient" in explain(q.requires_grad_(), k, v).operator


def test_keys_that_blocks_share_out_and_their_merge() -> None:
    """Two key/value heads, three segments each; a row a block joins them."""
    for dtype, kernel in ((torch.float32, "forward_general"), (torch.bfloat16, "forward_mma")):
        launches = explain(*Shape(1, 4, 2, 1, 2100, 8).qkv(dtype)).launches
        assert [(launch.kernel, launch.blocks) for launch in launches] == [(kernel, 6), ("forward_merge", 4)]


def test_a_plan_launches_nothing_and_the_next_call_does() -> None:
    q, k, v = Shape(1, 2, 1, 5, 9, 8).qkv()
    before = attention(q, k, v)
    plan = explain(q, k, v)
    assert "forward_general, 1 block of 128 threads" in str(plan)
    assert torch.equal(attention(q, k, v), before)


def test_nothing_to_compute_launches_nothing() -> None:
    for dtype in DTYPES:
        plan = explain(*Shape(2, 2, 1, 0, 4, 5).qkv(dtype))
        assert plan.kernel == "none" and plan.launches == () and plan.flops == 0
        assert "none" in str(plan)


def test_transforms_are_computed_by_the_reference() -> None:
    q, k, v = Shape(2, 4, 2, 5, 7, 8, 6).qkv()
    plans = []

    def look(q: torch.Tensor) -> torch.Tensor:
        plans.append(attn_ext.explain(q, k[0].to(q.device), v[0].to(q.device)))
        return q.sum()

    carried(torch.func.vmap(look))(q)
    assert plans[0].kernel == "reference" and plans[0].launches == () and "PyTorch" in plans[0].why


def test_what_attention_refuses_explain_refuses() -> None:
    q, k, v = Shape(1, 2, 1, 5, 9, 8).qkv()
    with pytest.raises(ValueError, match=r"^attn_ext\.explain: .*head"):
        explain(q, k[..., :7], v)
