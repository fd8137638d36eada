"""Dropout: a pure function of a seed and a place, the same forward, backward, per ISA and at any thread count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_support import (
    DTYPE_IDS,
    DTYPES,
    OPTIONS,
    Shape,
    assert_close_to_reference,
    assert_same_bits,
    make,
    raw_forward,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attn_ext

MASK32 = 0xFFFFFFFF


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32 with ten rounds in Python integers, from the paper (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK32, (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def keeps(seed: int, b: int, h: int, i: int, j: int, p: float) -> bool:
    """Whether dropout keeps key j of row i: element j % 8 of the eight 16-bit halves of one Philox block."""
    seed &= (1 << 64) - 1
    words = philox_words((b, h, i, j // 8), (seed & MASK32, seed >> 32))
    number = words[(j % 8) // 2] >> (16 * (j % 2)) & 0xFFFF
    return number >= round(p * 65536)


def kept_by_forward(seed: int | Tensor, b: int, h: int, lq: int, lk: int, p: float, **more: Any) -> Tensor:
    """What the raw op keeps, read off its output: equal scores and an identity as v show each weight."""
    q, k = torch.zeros(b, h, lq, 4), torch.zeros(b, h, lk, 4)
    v = torch.eye(lk).expand(b, h, lk, lk)
    seed = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64)
    out = raw_forward(q, k, v, dropout_seed=seed, dropout_p=p, **more)[0]
    kept = out != 0
    scale = 65536 / (65536 - round(p * 65536))
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], scale / lk))
    return kept


def test_philox_here_and_in_the_reference_gives_the_published_numbers() -> None:
    # The known-answer vectors that come with Random123.
    known = (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    )
    for counter, key, words in known:
        assert philox_words(counter, key) == words
    for seed in (0, 1, -1, 2**63 - 1, 123456789012345):
        keep = attn_ext.reference.dropout_keep(seed, 2, 3, 4, 19, 0.3)
        for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 18), (0, 1, 2, 7), (1, 0, 3, 8), (0, 2, 1, 13)):
            assert bool(keep[b, h, i, j]) == keeps(seed, b, h, i, j, 0.3)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 987654321987654321])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_the_op_keeps_exactly_the_weights_philox_says(isa: str, seed: int, p: float) -> None:
    for b, h, lq, lk in ((2, 3, 5, 19), (1, 2, 40, 270)):
        expected = attn_ext.reference.dropout_keep(seed, b, h, lq, lk, p)
        assert torch.equal(kept_by_forward(seed, b, h, lq, lk, p), expected)
        assert torch.equal(kept_by_forward(torch.tensor([seed]), b, h, lq, lk, p), expected), (
            "seed of shape (1,)"
        )


@pytest.mark.isa_matrix
def test_hiding_keys_does_not_move_the_random_numbers_of_the_others(isa: str) -> None:
    b, h, lq, lk = 2, 2, 70, 300
    expected = attn_ext.reference.dropout_keep(11, b, h, lq, lk, 0.4)
    q, k = torch.zeros(b, h, lq, 4), torch.zeros(b, h, lk, 4)
    v = torch.eye(lk).expand(b, h, lk, lk)
    mask = torch.ones(lq, lk, dtype=torch.bool)
    mask[:, 100:290] = False
    for more, seen in (
        ({"mask": mask}, mask),
        ({"causal": 1}, torch.ones(lq, lk).tril() > 0),
        ({"window_left": 20, "window_right": 0}, None),
    ):
        if seen is None:
            at, j = torch.arange(lq)[:, None] + lk - lq, torch.arange(lk)
            seen = (j >= at - 20) & (j <= at)
        out = raw_forward(q, k, v, dropout_seed=torch.tensor(11), dropout_p=0.4, **more)[0]
        assert torch.equal(out != 0, expected & seen)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", ["plain", "causal bottom-right", "everything at once"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_output_under_dropout_matches_the_reference(isa: str, dtype: torch.dtype, option: str) -> None:
    s = Shape(2, 4, 2, 37, 290, 16)
    q, k, v = s.qkv(dtype)
    options = dict(OPTIONS[option](s))
    raw = dict(options)
    raw["causal"] = {False: 0, "top_left": 1, "bottom_right": 2}[raw.pop("causal", False)]
    raw["window_left"], raw["window_right"] = raw.pop("window", (None, None))
    out, lse, _, _ = raw_forward(q, k, v, dropout_seed=torch.tensor(77), dropout_p=0.3, **raw)
    truth, plain = (
        attn_ext.reference.attention(
            q, k, v, **options, dropout_p=0.3, dropout_seed=77, return_lse=True, dtype=work
        )
        for work in (torch.float64, dtype)
    )
    assert_close_to_reference(out, truth[0], plain[0])
    assert_close_to_reference(lse, truth[1], plain[1], what="lse, which dropout leaves alone")


def seeded(function: Any, *args: Any, seed: int = 5, **kwargs: Any) -> Any:
    """Call after `torch.manual_seed`, so that the op draws the same seed each time."""
    torch.manual_seed(seed)
    return function(*args, **kwargs)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("option", ["plain", "bias", "sinks with dead rows", "everything at once"])
def test_backward_drops_the_weights_that_forward_dropped(isa: str, option: str) -> None:
    # The output is linear in v, so <grad, out(v)> = <dv, v>: it fails where backward regenerates another mask.
    s = Shape(2, 4, 2, 37, 290, 16, 8)
    q, k, v = (x.requires_grad_(True) for x in s.qkv(torch.float64))
    out = seeded(attn_ext.attention, q, k, v, **OPTIONS[option](s), dropout_p=0.4)
    grad_out = make(out.shape, torch.float64, seed=8)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    assert (dv * v).sum().item() == pytest.approx((grad_out * out).sum().item(), rel=1e-9)
    # q and k: a finite difference along a random direction, with the seed held.
    eps, at_q, at_k = 1e-5, make(q.shape, torch.float64, seed=11), make(k.shape, torch.float64, seed=12)
    with torch.no_grad():
        up, down = (
            seeded(attn_ext.attention, q + e * at_q, k + e * at_k, v, **OPTIONS[option](s), dropout_p=0.4)
            for e in (eps, -eps)
        )
    slope = ((up - down) * grad_out).sum().item() / (2 * eps)
    assert (dq * at_q).sum().item() + (dk * at_k).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_manual_seed_repeats_the_mask_and_the_next_call_draws_another(grad: bool) -> None:
    q, k, v = (x.requires_grad_(grad) for x in Shape(2, 4, 2, 20, 37, 16).qkv())
    first = seeded(attn_ext.attention, q, k, v, dropout_p=0.5)
    second = attn_ext.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, second)
    assert_same_bits(seeded(attn_ext.attention, q, k, v, dropout_p=0.5), first, "same seed")
    assert_same_bits(attn_ext.attention(q, k, v, dropout_p=0.5), second, "second call after the same seed")
    assert not torch.equal(seeded(attn_ext.attention, q, k, v, seed=6, dropout_p=0.5), first)
    with torch.no_grad():
        assert_same_bits(
            seeded(attn_ext.attention, q, k, v, dropout_p=0.5), first, "same seed without gradients"
        )


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}], ids=["plain", "causal"])
def test_dropped_is_not_hidden_what_a_row_sees_stays_nan(isa: str, p: float, options: dict[str, Any]) -> None:
    q, k, v = make((1, 2, 12, 8), seed=1), make((1, 2, 12, 8), seed=2), make((1, 2, 12, 3), seed=3)
    v[:, :, 5], v[:, :, 7, 0] = math.nan, math.inf
    actual = seeded(attn_ext.attention, q, k, v, dropout_p=p, **options)
    expected = seeded(attn_ext.reference.attention, q, k, v, dropout_p=p, **options)
    sees = torch.ones(12, dtype=torch.bool) if not options else torch.arange(12) >= 5
    assert torch.equal(actual.isnan()[..., 1], sees.expand(1, 2, 12))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_calls_without_dropout_leave_the_generator_alone() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(1, 2, 2, 5, 5, 8).qkv())
    before = torch.get_rng_state()
    attn_ext.attention(q, k, v).sum().backward()
    attn_ext.attention(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    attn_ext.attention(q, k, v, dropout_p=0.1)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.isa_matrix
def test_probability_zero_is_no_dropout_and_one_gives_zeros_with_zero_gradients() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(2, 4, 2, 20, 37, 16).qkv())
    assert_same_bits(attn_ext.attention(q, k, v, dropout_p=0.0), attn_ext.attention(q, k, v), "p = 0")
    out, lse = attn_ext.attention(q, k, v, dropout_p=1.0, return_lse=True)
    assert (out == 0).all() and torch.isfinite(lse).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (grad == 0).all()
    with torch.no_grad():
        assert (attn_ext.attention(q, k, v, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize("p", [-0.1, 1.0001, 2.0, math.nan, math.inf])
def test_probabilities_outside_zero_to_one_are_refused(p: float) -> None:
    q, k, v = Shape(1, 2, 2, 5, 5, 8).qkv()
    with pytest.raises(ValueError, match="dropout_p"):
        attn_ext.attention(q, k, v, dropout_p=p)
    with pytest.raises(ValueError, match="dropout_p"):
        raw_forward(q, k, v, dropout_seed=torch.tensor(1), dropout_p=p)


@pytest.mark.isa_matrix
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_weights_is_the_probability(p: float) -> None:
    b, h, lq, lk = 2, 4, 100, 500
    q, k = torch.zeros(b, h, lq, 4), torch.zeros(b, h, lk, 4)
    out = attn_ext.attention(q, k, torch.eye(lk).expand(b, h, lk, lk), dropout_p=p)
    dropped = (out == 0).double()
    n = dropped.numel()
    sigma = math.sqrt(p * (1 - p) / n)
    assert abs(dropped.mean().item() - p) < 5 * sigma + 1 / 65536
    # No head, batch entry, row or key stands out, and neighbours are independent.
    for dim, size in ((0, b), (1, h), (2, lq), (3, lk)):
        others = [d for d in range(4) if d != dim]
        assert (dropped.mean(others) - p).abs().max() < 6 * math.sqrt(p * (1 - p) * size / n) + 1 / 65536
    for dim in range(4):
        a, c = dropped.narrow(dim, 0, dropped.shape[dim] - 1), dropped.narrow(dim, 1, dropped.shape[dim] - 1)
        both = (a * c).mean().item()
        assert abs(both - p * p) < 6 * math.sqrt(p * p / a.numel()) + 1e-4


def test_the_mean_over_many_seeds_is_the_output_without_dropout() -> None:
    q, k, v = Shape(1, 2, 2, 4, 9, 8).qkv(torch.float64)
    outs = torch.stack([seeded(attn_ext.attention, q, k, v, seed=i, dropout_p=0.3) for i in range(800)])
    standard_error = outs.std(0) / math.sqrt(len(outs))
    assert ((outs.mean(0) - attn_ext.attention(q, k, v)).abs() < 5 * standard_error + 1e-9).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_same_mask(reentrant: bool) -> None:
    found = []
    for use in (False, True):
        q, k, v = (x.requires_grad_(True) for x in Shape(2, 4, 2, 33, 33, 16).qkv())

        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attn_ext.attention(q, k, v, causal=True, dropout_p=0.5)

        torch.manual_seed(9)
        out = checkpoint(block, q, k, v, use_reentrant=reentrant) if use else block(q, k, v)
        torch.rand(3)  # moves the generator between forward and backward
        out.square().sum().backward()
        found.append((out.detach(), q.grad, k.grad, v.grad))
    for plain, checkpointed in zip(*found, strict=True):
        assert_same_bits(checkpointed, plain, "checkpointed result")


@pytest.mark.isa_matrix
def test_the_mask_is_the_same_at_any_thread_count() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(3, 4, 2, 70, 290, 16).qkv())
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        out = seeded(attn_ext.attention, q, k, v, dropout_p=0.4)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for results in found[1:]:
        for actual, expected in zip(results, found[0], strict=True):
            assert_same_bits(actual, expected, "dropout at another thread count")


def test_second_derivatives_see_the_same_mask() -> None:
    q, k, v = (x.requires_grad_(True) for x in Shape(1, 2, 1, 3, 9, 4).qkv(torch.float64))

    def gradient(q: Tensor, create: bool = False) -> Tensor:
        out = seeded(attn_ext.attention, q, k, v, dropout_p=0.5)
        return torch.autograd.grad(out.sin().sum(), q, create_graph=create)[0]

    first_order = gradient(q)
    twice = gradient(q, create=True)
    torch.testing.assert_close(twice, first_order, rtol=0, atol=1e-9)
    direction, eps = make(q.shape, torch.float64, seed=8), 1e-5
    (second,) = torch.autograd.grad((twice * direction).sum(), q)
    up, down = (gradient((q + e * direction).detach().requires_grad_(True)) for e in (eps, -eps))
    torch.testing.assert_close(second, (up - down) / (2 * eps), rtol=0, atol=1e-6)


def test_dropout_of_the_drop_in_function_repeats_with_the_seed_and_scales_what_is_left() -> None:
    q, k = torch.zeros(1, 2, 30, 4), torch.zeros(1, 2, 40, 4)
    v = torch.eye(40).expand(1, 2, 40, 40)
    out = seeded(attn_ext.scaled_dot_product_attention, q, k, v, dropout_p=0.25)
    again = seeded(attn_ext.scaled_dot_product_attention, q, k, v, None, 0.25)
    assert_same_bits(again, out, "same seed")
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.75 / 40))
    assert 0.15 < (out == 0).float().mean() < 0.35
