"""Weights on demand, the dropout's mask, packed sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cuda_support import (
    PARTS,
    attention,
    attention_varlen,
    attention_weights,
    drawn_seed,
    raw_forward,
    raw_weights,
)
from op_support import (
    DTYPES,
    OPTIONS,
    Shape,
    assert_close_to_reference,
    assert_grads_close_to_reference,
    assert_same_bits,
    make,
)
from torch import Tensor

import attn_ext

# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("option", OPTIONS)
def test_weights_of_every_option(option: str) -> None:
    s = Shape(2, 4, 2, 7, 37, 5)
    for dtype in DTYPES:
        q, k, _ = s.qkv(dtype)
        options = OPTIONS[option](s)
        found = attention_weights(q, k, **options)
        truth, plain = (
            attn_ext.reference.attention_weights(q, k, **options, dtype=work)
            for work in (torch.float64, dtype)
        )
        assert_close_to_reference(found, truth, plain, what="weights")


def test_weights_of_chosen_rows_and_heads() -> None:
    s = Shape(2, 4, 2, 70, 70, 5)
    q, k, _ = s.qkv()
    options = {"causal": "bottom_right", "window": (20, 0), "alibi_slopes": torch.linspace(0.1, 0.4, 4)}
    whole = attention_weights(q, k, **options)
    some = attention_weights(q, k, rows=[69, 3, 3, -70], heads=[2, 0], **options)
    assert_same_bits(some, whole[:, [2, 0]][:, :, [69, 3, 3, 0]].contiguous(), "chosen rows")


def test_weights_that_come_with_the_output() -> None:
    s = Shape(1, 2, 1, 6, 40, 5)
    q, k, v = s.qkv()
    mask = PARTS["mask"](s)["mask"]
    out, lse, weights = attention(q, k, v, mask=mask, return_lse=True, return_weights=True)
    torch.testing.assert_close(weights @ v, out)
    rows = weights.sum(-1)
    torch.testing.assert_close(rows, (lse > -math.inf).float())


# ------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 987654321987654321])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_the_dropout_mask_is_the_cpus(seed: int, p: float) -> None:
    q, k = torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 43, 4)
    v = torch.eye(43).expand(2, 2, 43, 43)  # shows each weight
    out = raw_forward(q, k, v, dropout_seed=torch.tensor(seed), dropout_p=p)[0]
    keep = attn_ext.reference.dropout_keep(seed, 2, 2, 3, 43, p)
    assert torch.equal(out != 0, keep)
    scale = 65536 / (65536 - round(p * 65536))
    torch.testing.assert_close(out[keep], torch.full_like(out[keep], scale / 43))


def test_dropout_of_everything_gives_zeros_and_no_gradient() -> None:
    q, k, v = (t.requires_grad_(True) for t in Shape(1, 2, 1, 3, 5, 4).qkv())
    out = attention(q, k, v, dropout_p=1.0)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), [q, k, v]))


def test_the_seed_is_drawn_from_torchs_generator() -> None:
    q, k, v = Shape(1, 1, 1, 4, 16, 4).qkv()
    torch.manual_seed(5)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert_same_bits(attention(q, k, v, dropout_p=0.5), first, "the same seed")
    assert not torch.equal(first, second)


# -------------------------------------------------------------------------------------------------------- varlen

LENGTHS = {
    "as many keys as queries": ([5, 1, 33, 3], [5, 1, 33, 3]),
    "other numbers of keys": ([5, 1, 66, 3], [7, 40, 2, 33]),
    "empty sequences": ([4, 0, 3, 6, 0], [5, 2, 0, 6, 0]),
    "empty ones at the start": ([0, 0, 3, 34], [2, 0, 5, 34]),
    "one sequence": ([70], [40]),
    "all empty": ([0, 0, 0], [0, 4, 0]),
}
VARLEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-left": {"causal": "top_left"},
    "bottom-right": {"causal": "bottom_right"},
    "window": {"window": (3, 1)},
    "dropout": {"dropout_p": 0.3},
    "many": {
        "window": (6, 2),
        "causal": "bottom_right",
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.7, 4),
        "sinks": torch.linspace(-1.0, 1.0, 4),
    },
}


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("option", VARLEN)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences_and_their_gradients(lengths: str, option: str) -> None:
    check_packed(*LENGTHS[lengths], option)


def test_many_packed_sequences() -> None:
    """Far more of them than blocks of rows: most are short, some empty, few long."""
    lq = [0, *(n * 7 % 5 for n in range(67)), 0, 0]
    lk = [3, *(n * 5 % 7 for n in range(67)), 0, 2]
    lq[20] = lk[20] = 75
    lq[40], lk[50] = 40, 70
    check_packed(lq, lk, "many")


def check_packed(lq: list[int], lk: list[int], option: str) -> None:
    """Outputs and gradients of sequences of those lengths, in every dtype, beside the reference's."""
    cu_q, cu_k = cumulative(lq), cumulative(lk).long()
    seed = torch.tensor(12345)
    for dtype in DTYPES:
        given = {
            "q": make((sum(lq), 4, 6), dtype, seed=1),
            "k": make((sum(lk), 2, 6), dtype, seed=2),
            "v": make((sum(lk), 2, 5), dtype, seed=3),
        }
        options = dict(VARLEN[option])
        sinks = options.pop("sinks", None)
        if sinks is not None:
            given["sinks"] = sinks
        grad_out, grad_lse = make((sum(lq), 4, 5), dtype, seed=8), make((4, sum(lq)), seed=9)
        outputs, grads = [], []
        for work in (None, torch.float64, dtype):
            # The reference's sinks in float64 where its work is: theirs would be rounded once a sequence.
            tensors = {
                name: (t.double() if work == torch.float64 else t).detach().requires_grad_(True)
                for name, t in given.items()
            }
            q, k, v = tensors["q"], tensors["k"], tensors["v"]
            more = {**options, "sinks": tensors.get("sinks"), "return_lse": True}
            if work is None:
                with drawn_seed(seed):
                    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **more)
            else:
                out, lse = attn_ext.reference.attention_varlen(
                    q, k, v, cu_q, cu_k, **more, dropout_seed=seed, dtype=work
                )
            outputs.append((out, lse))
            found = torch.autograd.grad(
                [out, lse], list(tensors.values()), [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]
            )
            grads.append(dict(zip(tensors, found, strict=True)))
        for n, what in enumerate(("output", "lse")):
            assert_close_to_reference(outputs[0][n], outputs[1][n], outputs[2][n], what=what)
        assert_grads_close_to_reference(grads[0], grads[1], grads[2], dtype)


def test_a_packed_sequence_has_the_bits_it_has_alone() -> None:
    lengths = [5, 40, 33]
    cu = cumulative(lengths)
    q, k, v = make((78, 4, 6), seed=1), make((78, 2, 6), seed=2), make((78, 2, 6), seed=3)
    out = attention_varlen(q, k, v, cu, cu, causal=True)
    for b in range(3):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        alone = attention(*(x[rows].transpose(0, 1) for x in (q, k, v)), causal=True)
        assert_same_bits(out[rows].transpose(0, 1), alone, f"sequence {b}")


def test_boundaries_and_tensors_with_strides() -> None:
    q, k, v = make((18, 3, 4, 8)).unbind(1)
    cu = cumulative([5, 7, 6])
    expected = attention_varlen(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu)
    strided = torch.stack([cu, cu], dim=1)[:, 0]
    assert_same_bits(attention_varlen(q, k, v, strided, strided), expected, "strided")


def test_a_neighbour_with_nan_does_not_reach_a_packed_sequence() -> None:
    cu = cumulative([5, 7, 6])
    tensors = [make((18, 2, 4), seed=n) for n in range(3)]
    clean = attention_varlen(*tensors, cu, cu)
    for t in tensors:
        t[5:12] = math.nan
    out = attention_varlen(*tensors, cu, cu)
    assert out[5:12].isnan().all()
    assert_same_bits(out[:5], clean[:5], "sequence 0")
    assert_same_bits(out[12:], clean[12:], "sequence 2")


# ------------------------------------------------------------------------------------------------ direct calls


def test_weights_of_rows_that_stand_elsewhere() -> None:
    q, k, _ = Shape(1, 1, 1, 3, 9, 4).qkv()
    at = torch.tensor([8, 0, 4], dtype=torch.int32)
    found = raw_weights(q, k, row_positions=at, num_queries=9, causal=1)
    truth = attn_ext.reference.attention_weights(
        q, k, causal="top_left", row_positions=at.long(), num_queries=9, dtype=torch.float64
    )
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=1e-6)
