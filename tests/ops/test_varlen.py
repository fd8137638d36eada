"""Packed sequences of different lengths without padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_support import (
    DTYPES,
    assert_close_to_reference,
    assert_grads_close_to_reference,
    assert_same_bits,
    make,
)
from torch import Tensor

import attn_ext

LENGTHS = {
    "self-attention": ([5, 1, 17, 3], [5, 1, 17, 3]),
    "cross-attention": ([5, 1, 33, 3], [7, 40, 2, 9]),
    "an empty sequence": ([4, 0, 3, 6], [5, 2, 0, 6]),
    "one sequence": ([70], [290]),
    "one token each": ([1, 1, 1], [9, 300, 33]),
}
OPTIONS: dict[str, Any] = {
    "plain": lambda b, h: {},
    "causal top-left": lambda b, h: {"causal": "top_left"},
    "causal bottom-right": lambda b, h: {"causal": "bottom_right"},
    "window": lambda b, h: {"window": (3, 1)},
    "window and causal": lambda b, h: {"window": (3, None), "causal": "bottom_right"},
    "softcap and scale": lambda b, h: {"softcap": 1.5, "scale": 0.4},
    "ALiBi": lambda b, h: {"alibi_slopes": torch.linspace(0.1, 0.7, h)},
    "ALiBi per sequence": lambda b, h: {"alibi_slopes": torch.linspace(0.1, 0.7, b * h).view(b, h)},
    "sinks": lambda b, h: {"sinks": torch.linspace(-1.0, 1.0, h)},
    "all of them": lambda b, h: {
        "window": (6, 2),
        "causal": "bottom_right",
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.7, h),
        "sinks": torch.linspace(-1.0, 1.0, h),
    },
}


def cumulative(lengths: list[int]) -> Tensor:
    """0 and the running totals, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(
    lengths: tuple[list[int], list[int]],
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    d: int = 16,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v (total, H, D) and the two cumulative lengths."""
    lq, lk = lengths
    q = make((sum(lq), heads[0], d), dtype, seed=1)
    k, v = make((sum(lk), heads[1], d), dtype, seed=2), make((sum(lk), heads[1], d), dtype, seed=3)
    return q, k, v, cumulative(lq), cumulative(lk)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences_match_the_reference(
    isa: str, dtype: torch.dtype, lengths: str, option: str
) -> None:
    q, k, v, cu_q, cu_k = packed(LENGTHS[lengths], dtype)
    options = OPTIONS[option](len(cu_q) - 1, 4)
    out, lse = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True)
    assert out.shape == q.shape and out.dtype == dtype
    found = [
        attn_ext.reference.attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, dtype=work)
        for work in (torch.float64, dtype)
    ]
    assert_close_to_reference(out, found[0][0], found[1][0])
    assert_close_to_reference(lse, found[0][1], found[1][1], what="lse")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_packed_sequence_has_the_bits_it_has_alone(isa: str, lengths: str, option: str) -> None:
    lq, lk = LENGTHS[lengths]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, cu_q, cu_k = packed((lq, lk), dtype)
        options = OPTIONS[option](len(lq), 4)
        out, lse = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True)
        for b in range(len(lq)):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            mine = dict(options)
            if "alibi_slopes" in mine and mine["alibi_slopes"].dim() == 2:
                mine["alibi_slopes"] = mine["alibi_slopes"][b]
            alone, alone_lse = attn_ext.attention(
                q[rows].transpose(0, 1),
                k[keys].transpose(0, 1),
                v[keys].transpose(0, 1),
                **mine,
                return_lse=True,
            )
            assert_same_bits(out[rows].transpose(0, 1), alone, f"sequence {b}")
            assert_same_bits(lse[:, rows], alone_lse, f"lse of sequence {b}")


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_gradients_match_the_reference(isa: str, lengths: str, option: str) -> None:
    for dtype in DTYPES:
        q, k, v, cu_q, cu_k = packed(LENGTHS[lengths], dtype)
        options = OPTIONS[option](len(cu_q) - 1, 4)
        grad_out, grad_lse = make(q.shape, dtype, seed=8), make((q.shape[1], q.shape[0]), seed=9)
        outcome = []
        for function, work, extra in (
            (attn_ext.attention_varlen, dtype, {}),
            (attn_ext.reference.attention_varlen, torch.float64, {"dtype": torch.float64}),
            (attn_ext.reference.attention_varlen, dtype, {"dtype": dtype}),
        ):
            tensors = {"q": q.to(work), "k": k.to(work), "v": v.to(work)}
            more = dict(options)
            if "sinks" in more:
                # In float64 where the work is: a float32 sink's gradient would be rounded once a sequence.
                tensors["sinks"] = options["sinks"].double() if work == torch.float64 else options["sinks"]
            tensors = {name: x.detach().requires_grad_(True) for name, x in tensors.items()}
            more.update({name: x for name, x in tensors.items() if name == "sinks"})
            out, lse = function(
                tensors["q"], tensors["k"], tensors["v"], cu_q, cu_k, **more, **extra, return_lse=True
            )
            roots = torch.autograd.grad(
                [out, lse], list(tensors.values()), [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]
            )
            outcome.append(dict(zip(tensors, roots, strict=True)))
        assert_grads_close_to_reference(*outcome, dtype)


def test_a_padded_batch_says_the_same_as_the_packed_one() -> None:
    lengths = [5, 2, 9]
    q, k, v, cu_q, cu_k = packed((lengths, lengths))
    out = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    padded = [torch.zeros(3, x.shape[1], 9, 16) for x in (q, k, v)]
    for b, n in enumerate(lengths):
        for holder, x in zip(padded, (q, k, v), strict=True):
            holder[b, :, :n] = x[cu_q[b] : cu_q[b + 1]].transpose(0, 1)
    batch = attn_ext.attention(*padded, causal=True, key_lengths=torch.tensor(lengths))
    for b, n in enumerate(lengths):
        assert_same_bits(out[cu_q[b] : cu_q[b + 1]].transpose(0, 1), batch[b, :, :n], f"sequence {b}")


def test_the_bottom_right_corner_is_that_of_each_sequence() -> None:
    # q = 0: outputs are the means of 1, 2, 3 ... over the keys that a row sees.
    v = torch.tensor([1.0, 2, 3, 4, 5, 6, 1, 2, 3]).view(9, 1, 1)
    out = attn_ext.attention_varlen(
        torch.zeros(5, 1, 1),
        torch.zeros(9, 1, 1),
        v,
        cumulative([2, 3]),
        cumulative([6, 3]),
        causal="bottom_right",
    )
    torch.testing.assert_close(out.flatten(), torch.tensor([3.0, 3.5, 1.0, 1.5, 2.0]))


def test_queries_of_a_sequence_without_keys_are_dead_rows() -> None:
    q, k, v, cu_q, cu_k = packed(([4, 3], [0, 6]))
    q = q.requires_grad_(True)
    out, lse = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert (out[:4] == 0).all() and (lse[:, :4] == -math.inf).all()
    out.square().sum().backward()
    assert (q.grad[:4] == 0).all() and (q.grad[4:] != 0).any()


def test_a_neighbour_with_nan_does_not_leak_into_a_packed_sequence() -> None:
    lengths = [5, 7, 6]
    q, k, v, cu, _ = packed((lengths, lengths))
    tensors = [x.requires_grad_(True) for x in (q, k, v)]
    clean = attn_ext.attention_varlen(*tensors, cu, cu, causal=True)
    clean_grads = torch.autograd.grad(clean.square().sum(), tensors)
    spoiled = [x.detach().clone() for x in tensors]
    for x in spoiled:
        x[5:12] = math.nan
        x.requires_grad_(True)
    out = attn_ext.attention_varlen(*spoiled, cu, cu, causal=True)
    grads = torch.autograd.grad(out.square().sum(), spoiled)
    others = torch.tensor([i for i in range(18) if not 5 <= i < 12])
    for a, b in zip((out, *grads), (clean, *clean_grads), strict=True):
        assert_same_bits(a[others], b[others], "neighbours of the bad sequence")
    assert torch.isnan(out[5:12]).all()


@pytest.mark.isa_matrix
def test_packed_views_and_strided_inputs_equal_contiguous_ones() -> None:
    qkv = make((18, 3, 4, 16))
    q, k, v = qkv.unbind(1)
    cu = cumulative([5, 7, 6])
    expected = attn_ext.attention_varlen(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, causal=True)
    assert_same_bits(
        attn_ext.attention_varlen(q, k, v, cu, cu, causal=True), expected, "views of one projection"
    )
    cu2 = torch.stack([cu, cu], dim=1)[:, 0]  # stride 2
    assert_same_bits(attn_ext.attention_varlen(q, k, v, cu2, cu2, causal=True), expected, "strided lengths")


def test_cumulative_lengths_may_be_int32_or_int64() -> None:
    q, k, v, cu_q, cu_k = packed(LENGTHS["cross-attention"])
    expected = attn_ext.attention_varlen(q, k, v, cu_q, cu_k)
    assert_same_bits(attn_ext.attention_varlen(q, k, v, cu_q.long(), cu_k.long()), expected, "int64")


def test_packed_gradcheck_passes() -> None:
    q, k, v, cu_q, cu_k = packed(([2, 1, 3], [3, 2, 3]), torch.float64, heads=(2, 1), d=3)
    tensors = [x.requires_grad_(True) for x in (q, k, v)]
    sinks = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attn_ext.attention_varlen(q, k, v, cu_q, cu_k, causal="bottom_right", sinks=sinks, softcap=2.0)

    assert torch.autograd.gradcheck(call, (*tensors, sinks))


def test_packed_dropout_numbers_the_sequences() -> None:
    q, k, v, cu_q, cu_k = packed(([6, 6], [6, 6]), torch.float64)
    k, q = torch.zeros_like(k), torch.zeros_like(q)
    v = torch.eye(6, dtype=torch.float64).repeat(2, 1)[:, None].expand(12, 2, 6).contiguous()
    q, k = q[..., :6].contiguous(), k[..., :6].contiguous()
    torch.manual_seed(3)
    packed_out = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, dropout_p=0.5)
    torch.manual_seed(3)
    batch = attn_ext.attention(
        *(x.view(2, 6, x.shape[1], 6).transpose(1, 2) for x in (q, k, v)), dropout_p=0.5
    )
    assert_same_bits(packed_out.view(2, 6, 4, 6).transpose(1, 2), batch, "dropout")
    assert not torch.equal(batch[0], batch[1])


def test_no_sequences_at_all_give_an_empty_output() -> None:
    q, k, v, cu_q, cu_k = packed(([], []))
    assert attn_ext.attention_varlen(q, k, v, cu_q, cu_k).shape == (0, 4, 16)
