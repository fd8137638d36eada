"""The reference is the truth for all other tests; torch, NumPy and hand-made values are the truth for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from attn_ext import masks, reference
from attn_ext.reference import attention

INF, NAN = math.inf, math.nan


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Random normal float64 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def qkv(
    B: int = 2, Hq: int = 4, Hkv: int = 2, Lq: int = 5, Lk: int = 7, D: int = 6, Dv: int = 3
) -> list[Tensor]:
    """Random q, k and v in float64."""
    return [rand(B, Hq, Lq, D, seed=1), rand(B, Hkv, Lk, D, seed=2), rand(B, Hkv, Lk, Dv, seed=3)]


def keep_mask(*shape: int) -> Tensor:
    """A random mask that lets every row see key 0."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.6
    return mask | (torch.arange(shape[-1]) == 0)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True)


# ---------------------------------------------------------------------- against torch and NumPy


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, {}),
        ({"mask": keep_mask(2, 4, 5, 7)}, {"attn_mask": keep_mask(2, 4, 5, 7)}),
        ({"mask": keep_mask(2, 1, 1, 7)}, {"attn_mask": keep_mask(2, 1, 1, 7)}),
        ({"mask": rand(4, 5, 7)}, {"attn_mask": rand(4, 5, 7)}),
        ({"bias": rand(2, 4, 5, 7)}, {"attn_mask": rand(2, 4, 5, 7)}),
        ({"causal": "top_left"}, {"is_causal": True}),
        ({"causal": "bottom_right"}, {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(2)}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"scale": -0.3}, {"scale": -0.3}),
    ],
)
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_output_and_gradients_equal_those_of_torch(
    ours: dict[str, Any], theirs: dict[str, Any], Hkv: int
) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Hkv=Hkv))
    out, expected = (
        attention(q, k, v, **ours),
        F.scaled_dot_product_attention(q, k, v, **theirs, enable_gqa=True),
    )
    close(out, expected)
    upstream = rand(*out.shape)
    for ours_grad, theirs_grad in zip(
        torch.autograd.grad(out, (q, k, v), upstream),
        torch.autograd.grad(expected, (q, k, v), upstream),
        strict=True,
    ):
        close(ours_grad, theirs_grad)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_the_numpy_twin_says_the_same(causal: Any) -> None:
    q, k, v = qkv(Hkv=4, Lq=6, Lk=4)
    mask, bias = keep_mask(2, 1, 6, 4), rand(4, 6, 4)
    mask[:, :, 5] = False
    bias[1, 2, 3] = -INF
    for options in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias, "scale": -0.4}):
        expected = attention(q, k, v, **options, causal=causal, return_weights=True)
        in_numpy = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
        found = reference.attention_numpy(
            q.numpy(), k.numpy(), v.numpy(), **in_numpy, causal=causal, return_weights=True
        )
        for actual, truth in zip(found, expected, strict=True):
            close(torch.from_numpy(actual), truth)


def test_attention_by_hand_of_a_seven_token_sentence() -> None:
    random = np.random.RandomState(42)
    x = random.randn(7, 4)
    q, k, v = (x @ random.randn(4, 4) for _ in range(3))
    out, weights = reference.attention_numpy(q, k, v, return_weights=True)
    expected = [0.04115936, 0.01223386, 0.17820851, 0.16625512, 0.21927912, 0.14523322, 0.23763083]
    np.testing.assert_allclose(weights[0], expected, atol=5e-9)
    np.testing.assert_allclose(out[0], [-0.32255094, -0.5214015, 1.30288417, -1.6175941], atol=5e-9)


# ---------------------------------------------------------------------- values made by hand


@pytest.mark.parametrize(
    "scale, expected",
    [
        (None, [[1, 2], [2.04946, 3.04946], [3.20659, 4.20659]]),
        (0.0, [[1, 2], [2, 3], [3, 4]]),
        (-0.70710678, [[1, 2], [1.95054, 2.95054], [2.79341, 3.79341]]),
    ],
)
def test_a_scale_of_zero_is_not_taken_for_none_and_a_negative_one_works(
    scale: float | None, expected: Any
) -> None:
    q = torch.tensor([[[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]])
    k = torch.tensor([[[0.7, 0.8], [0.9, 1.0], [1.1, 1.2]]])
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    close(
        attention(q, k, v, causal=True, scale=scale)[0],
        torch.tensor(expected, dtype=torch.float32),
        atol=1e-5,
    )


def test_key_heads_are_repeated_one_by_one_and_their_gradients_summed_over_the_group() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 2, 3, 2)
    v = torch.tensor([10.0, 20.0]).reshape(1, 2, 1, 1).repeat(1, 1, 3, 1).requires_grad_()
    out = attention(q, k, v)
    close(out.flatten(), torch.tensor([10.0, 10.0, 20.0, 20.0]), atol=1e-5)
    out.sum().backward()
    close(v.grad, torch.full((1, 2, 3, 1), 2 / 3), atol=1e-6)
    shared = v.detach()[:, :1].requires_grad_()
    attention(q, k[:, :1], shared).sum().backward()
    close(shared.grad, torch.full((1, 1, 3, 1), 4 / 3), atol=1e-6)


def test_bottom_right_is_a_chunk_behind_a_cache_and_top_left_is_not() -> None:
    q, k, v = torch.zeros(1, 2, 1), torch.zeros(1, 6, 1), torch.arange(1.0, 7.0).reshape(1, 6, 1)
    close(attention(q, k, v, causal="bottom_right").flatten(), torch.tensor([3.0, 3.5]), atol=1e-6)
    close(attention(q, k, v, causal="top_left").flatten(), torch.tensor([1.0, 1.5]), atol=1e-6)


def test_causal_true_needs_as_many_keys_as_queries() -> None:
    q, k, v = qkv(Lq=5, Lk=5)
    assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal="bottom_right"))
    with pytest.raises(ValueError, match='"top_left".*"bottom_right"'):
        attention(q[:, :, :4], k, v, causal=True)
    with pytest.raises(ValueError, match="'middle'"):
        attention(q, k, v, causal="middle")


def seen_keys(**options: Any) -> list[str]:
    """Which of five keys each of three queries sees, as drawn in masks.py."""
    q, k = torch.zeros(1, 3, 1), torch.zeros(1, 5, 1)
    weights = attention(q, k, k, **options, return_weights=True)[1][0]
    return ["".join("x" if w > 0 else "." for w in row) for row in weights.tolist()]


def test_windows_are_aligned_as_causal_is_and_all_rules_must_agree() -> None:
    assert seen_keys(window=(0, 0)) == ["..x..", "...x.", "....x"]
    assert seen_keys(window=(0, 0), causal="top_left") == ["x....", ".x...", "..x.."]
    assert seen_keys(window=(1, None)) == [".xxxx", "..xxx", "...xx"]
    assert seen_keys(window=(None, 1), causal="bottom_right") == ["xxx..", "xxxx.", "xxxxx"]
    assert seen_keys(key_lengths=torch.tensor([3]), causal="bottom_right") == ["xxx..", "xxx..", "xxx.."]
    mask = torch.tensor([True, False, True, True, True])
    assert seen_keys(mask=mask, window=(2, 0)) == ["x.x..", "..xx.", "..xxx"]


def test_alibi_softcap_and_sinks_do_what_their_formulas_say() -> None:
    q, k, v = qkv(Hq=2, Hkv=2)
    scores = q @ k.mT / math.sqrt(6)
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    close(
        attention(q, k, v, alibi_slopes=slopes), (scores - slopes[:, None, None] * distance).softmax(-1) @ v
    )
    # Where causal hides all later keys the corner moves every score of a row alike: only the lse can tell.
    lse = attention(q, k, v, alibi_slopes=slopes, causal="top_left", return_lse=True)[1]
    from_top_left = (torch.arange(5)[:, None] - torch.arange(7)).abs()
    biased = scores - slopes[:, None, None] * from_top_left
    close(lse, biased.masked_fill(torch.ones(5, 7).triu(1).bool(), -INF).logsumexp(-1))
    per_batch = torch.stack((slopes, 2 * slopes))
    close(
        attention(q, k, v, alibi_slopes=per_batch),
        (scores - per_batch[..., None, None] * distance).softmax(-1) @ v,
    )
    close(attention(q, k, v, softcap=0.7), (0.7 * (scores / 0.7).tanh()).softmax(-1) @ v)
    sinks = torch.tensor([1.5, -0.5], dtype=torch.float64)
    with_sink = torch.cat((scores, sinks[:, None, None].expand(2, 2, 5, 1)), dim=-1)
    out, lse, weights = attention(q, k, v, sinks=sinks, return_lse=True, return_weights=True)
    close(weights, with_sink.softmax(-1)[..., :7])
    close(lse, with_sink.logsumexp(-1))
    close(out, weights @ v)


@pytest.mark.parametrize("shape", [(4, 5, 6), (2, 4, 5, 6), (3, 2, 4, 5, 6)])
def test_ranks_three_to_five_are_the_same_computation(shape: tuple[int, ...]) -> None:
    *batch, Hq, Lq, D = shape
    q, k, v = rand(*shape), rand(*batch, 2, 7, D, seed=1), rand(*batch, 2, 7, 3, seed=2)
    lengths = torch.arange(1, math.prod(batch) + 1).reshape(batch)
    out = attention(q, k, v, key_lengths=lengths.flatten(), bias=(bias := rand(4, 1, 7)))
    for at in np.ndindex(*batch):
        mask = torch.arange(7) < lengths[at]
        one = attention(q[at][None], k[at][None], v[at][None], mask=mask, bias=bias)[0]
        close(out[at], one)


# ---------------------------------------------------------------------- rows that see nothing


@pytest.mark.parametrize("kind", ["bool", "float", "length", "causal"])
def test_a_row_that_sees_no_key_is_exactly_zero_and_so_are_its_gradients(kind: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    dead = torch.tensor([True, False, False, False, False])
    mask = ~dead[:, None].expand(5, 7)
    options: dict[str, Any] = {
        "bool": {"mask": mask},
        "float": {"bias": torch.zeros(5, 7).masked_fill(~mask, -INF)},
        "length": {"key_lengths": torch.tensor([0, 7])},
        "causal": {"causal": "bottom_right"},
    }[kind]
    if kind == "length":
        dead = torch.ones(5, dtype=torch.bool)
    if kind == "causal":
        k, v = k.detach()[:, :, :4].requires_grad_(), v.detach()[:, :, :4].requires_grad_()
    out, lse, weights = attention(q, k, v, **options, return_lse=True, return_weights=True)
    assert (
        (out[0, :, dead] == 0).all() and (lse[0, :, dead] == -INF).all() and (weights[0, :, dead] == 0).all()
    )
    grads = torch.autograd.grad(out.pow(2).sum() + weights.sum(), (q, k, v), create_graph=True)
    assert (grads[0][0, :, dead] == 0).all()
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), (q, k, v), retain_graph=True)
    assert (second[0][0, :, dead] == 0).all()
    for g in (*grads, *second):
        assert g.isfinite().all()
    # What the dead rows hold changes nothing, and removing them changes no gradient.
    alive = attention(q[:, :, 1:], k, v, **({"mask": mask[1:]} if kind == "bool" else {}))
    if kind == "bool":
        close(out[:, :, 1:], alive)
        g = rand(*out.shape)
        for whole, part in zip(
            torch.autograd.grad(out, (k, v), g, retain_graph=True),
            torch.autograd.grad(alive, (k, v), g[:, :, 1:]),
            strict=True,
        ):
            close(whole, part)


def test_a_dead_row_with_a_sink_has_the_logit_of_the_sink_as_its_lse() -> None:
    q, k, v = qkv(Hq=2, Hkv=2)
    sinks = torch.tensor([0.75, -INF], dtype=torch.float64, requires_grad=True)
    out, lse, weights = attention(
        q, k, v, sinks=sinks, mask=torch.zeros(7, dtype=torch.bool), return_lse=True, return_weights=True
    )
    assert (out == 0).all() and (weights == 0).all()
    assert (lse == sinks[:, None]).all()
    gradient = torch.autograd.grad(lse[:, 0].sum() + out.sum(), sinks)[0]
    assert torch.equal(gradient, torch.tensor([10.0, 0.0], dtype=torch.float64))  # 2 sequences of 5 rows


def test_no_keys_at_all_give_zeros_with_gradients_of_zero() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Lk=0))
    for options in ({}, {"mask": torch.ones(5, 0, dtype=torch.bool)}, {"causal": "bottom_right"}):
        out, lse = attention(q, k, v, **options, return_lse=True)
        assert out.shape == (2, 4, 5, 3) and (out == 0).all() and (lse == -INF).all()
        assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()
    sinks = rand(4)
    assert (attention(q, k, v, sinks=sinks, return_lse=True)[1] == sinks[:, None]).all()


@pytest.mark.parametrize("empty", ["B", "Hq", "Lq", "Dv"])
def test_empty_inputs_give_empty_outputs(empty: str) -> None:
    sizes = {empty: 0} | ({"Hkv": 0} if empty == "Hq" else {})
    q, k, v = qkv(**sizes)
    assert attention(q, k, v, mask=torch.ones(7, dtype=torch.bool)).shape == (*q.shape[:-1], v.shape[-1])


# ---------------------------------------------------------------------- NaN, infinity, huge numbers


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("hide", ["mask", "bias", "window", "causal", "key_lengths"])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_hidden_key_touches_neither_output_nor_gradients_whatever_it_holds(
    where: str, hide: str, junk: float
) -> None:
    """Keys 5 and 6 hold junk. Row 0 sees neither; with causal and key_lengths no row does."""
    q, k, v = qkv()
    partly = torch.ones(5, 7, dtype=torch.bool)
    partly[0, 5:] = False
    options = {
        "mask": {"mask": partly},
        "bias": {"bias": torch.zeros(5, 7).masked_fill(~partly, -INF)},
        "window": {"window": (None, 2)},
        "causal": {"causal": "top_left"},
        "key_lengths": {"key_lengths": torch.tensor([5, 5])},
    }[hide]
    hidden_from_all = hide in ("causal", "key_lengths")
    rows = slice(0, 5 if hidden_from_all else 1)

    def run(poison: bool) -> tuple[Tensor, list[Tensor]]:
        tensors = [x.clone() for x in (q, k, v)]
        if poison:
            tensors[1 if where == "k" else 2][:, :, 5:] = junk
        tensors = [x.requires_grad_() for x in tensors]
        out = attention(*tensors, **options)
        first = torch.autograd.grad(out[:, :, rows].pow(2).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(first[0][:, :, rows].sin().sum(), tensors)
        return out, [*first, *second]

    (clean_out, clean_grads), (out, grads) = run(poison=False), run(poison=True)
    assert torch.equal(out[:, :, rows], clean_out[:, :, rows])
    if not hidden_from_all and junk is NAN:
        assert out[:, :, 4].isnan().all(), "a row that sees the NaN must show it"
    for name, found, clean in zip("qkvqkv", grads, clean_grads, strict=True):
        if name == "q":
            close(found[:, :, rows], clean[:, :, rows])
        elif hidden_from_all:  # else these keys are also seen by rows that the junk has spoiled
            close(found, clean)


def test_a_bad_incoming_gradient_or_q_reaches_only_the_keys_that_the_row_sees() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Hkv=4))
    upstream = rand(2, 4, 5, 3)
    upstream[:, :, 0] = NAN  # row 0 of the five sees keys 0, 1, 2
    dq, dk, dv = torch.autograd.grad(attention(q, k, v, causal="bottom_right"), (q, k, v), upstream)
    assert dv[:, :, :3].isnan().all() and dk[:, :, :3].isnan().all() and dq[:, :, 0].isnan().all()
    assert dv[:, :, 3:].isfinite().all() and dk[:, :, 3:].isfinite().all() and dq[:, :, 1:].isfinite().all()

    bad_q = q.detach().clone()
    bad_q[:, :, 0] = NAN
    bad_q.requires_grad_()
    out = attention(bad_q, k, v, causal="bottom_right")
    assert out[:, :, 0].isnan().all() and out[:, :, 1:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out, (bad_q, k, v), torch.ones_like(out))
    assert dk[:, :, 3:].isfinite().all() and dv[:, :, 3:].isfinite().all() and dq[:, :, 1:].isfinite().all()


def test_hidden_junk_leaves_the_values_of_the_issue_it_was_reported_in() -> None:
    x = torch.arange(8.0).reshape(1, 2, 4)
    mask = torch.tensor([[True, False], [True, False]])
    for junk in (NAN, INF):
        k, v = x.clone(), x.clone()
        k[0, 1, 0] = junk
        assert torch.equal(attention(x, k, x, mask=mask), x[:, :1].expand(1, 2, 4))
        v[0, 1, :] = junk
        assert torch.equal(attention(x, k, v, mask=mask), x[:, :1].expand(1, 2, 4))


def test_nan_in_what_a_row_sees_stays_nan_and_stays_in_its_row() -> None:
    q = torch.full((2, 4, 16, 8), NAN)
    assert attention(q, q, q).isnan().all()
    assert attention(q, q, q, causal=True).isnan().all()
    q, k, v = torch.randn(1, 1, 4, 64), torch.randn(1, 1, 16, 64), torch.randn(1, 1, 16, 64)
    q[0, 0, 0, 0] = NAN
    for mask in (None, torch.ones(16, dtype=torch.bool)):
        out = attention(q, k, v, mask=mask)
        assert out[0, 0, 0].isnan().all() and out[0, 0, 1:].isfinite().all()
    weights = attention(q, k, v, mask=torch.arange(16) < 9, return_weights=True)[1]
    assert weights[0, 0, 0, :9].isnan().all() and (weights[..., 9:] == 0).all()


@pytest.mark.parametrize("mask", [None, torch.ones(3, dtype=torch.bool)], ids=["no mask", "mask of True"])
def test_visible_infinities_in_v_add_up_as_plain_sums_do(mask: Tensor | None) -> None:
    q, k = torch.zeros(1, 1, 1), torch.zeros(1, 3, 1)
    v = torch.tensor([[INF, -INF, INF, 1.0, NAN], [1.0, 2.0, -INF, 1.0, INF], [INF, 2.0, 1.0, 1.0, 1.0]])[
        None
    ]
    expected = torch.tensor([[[INF, -INF, NAN, 1.0, NAN]]])
    close(attention(q, k, v, mask=mask), expected, atol=1e-6)


def test_minus_huge_biases_are_plain_arithmetic() -> None:
    lowest = torch.finfo(torch.float32).min
    q, k, v = (torch.randn(2, 3, 441, 64).requires_grad_() for _ in range(3))
    for huge in (lowest, -1e9):
        bias = torch.zeros(441).index_fill(0, torch.arange(128), huge)
        out = attention(q, k, v, bias=bias)
        expected = attention(q, k[:, :, 128:], v[:, :, 128:])
        close(out, expected, atol=1e-5)
        upstream = torch.randn_like(out)
        _, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
        assert (dk[:, :, :128] == 0).all() and (dv[:, :, :128] == 0).all()
        close(dv, torch.autograd.grad(expected, v, upstream)[0], atol=1e-5)
    everywhere = torch.full((441, 441), lowest)
    out = attention(q, k, v, bias=everywhere)
    close(out, v.mean(-2, keepdim=True).expand_as(out), atol=1e-5)
    dv = torch.autograd.grad(out.sum(), v)[0]
    close(dv, torch.ones_like(dv), atol=1e-5)


def test_hidden_cells_of_a_bias_have_a_gradient_of_zero_whatever_they_and_their_row_hold() -> None:
    q, k, v = qkv()
    mask = torch.arange(7) < 5
    for hidden, seen in ((NAN, 0.5), (INF, 0.5), (0.5, torch.finfo(torch.float64).min)):
        bias = torch.full((5, 7), seen, dtype=torch.float64).masked_fill(~mask, hidden).requires_grad_()
        out = attention(q, k, v, mask=mask, bias=bias)
        first = torch.autograd.grad(out.sin().sum(), bias, create_graph=True)[0]
        second = torch.autograd.grad(first.sin().sum(), bias)[0]
        for found in (first, second):
            assert (found[:, 5:] == 0).all() and found.isfinite().all()


def test_the_two_products_leave_out_what_is_not_seen_and_nothing_else() -> None:
    seen = torch.tensor([[True, False], [False, False], [True, True]])
    a = torch.tensor([[1.0, 2.0], [NAN, 3.0], [4.0, 5.0]])
    b = torch.tensor([[6.0, NAN], [7.0, INF]])
    close(reference._visible_dot(a, b, seen), torch.tensor([[20.0, 0.0], [0.0, 0.0], [59.0, NAN]]))
    w = torch.tensor([[2.0, NAN], [NAN, 3.0], [-1.0, 4.0]])
    x = torch.tensor([[1.0, INF], [NAN, INF]])
    close(reference._visible_sum(w, x, seen), torch.tensor([[2.0, INF], [0.0, 0.0], [NAN, NAN]]))


def test_half_precision_scores_live_in_fp32_and_are_rounded_once() -> None:
    q = torch.full((1, 4, 64), 256.0, dtype=torch.float16)
    v = torch.arange(1.0, 5.0, dtype=torch.float16).reshape(1, 4, 1)
    assert (attention(q, q, v) == 2.5).all()
    big = torch.full((1, 3, 64), 133120.0, dtype=torch.bfloat16)
    assert (attention(big, big, big, causal=True) == 133120.0).all()
    ones = torch.ones(1, 4096, 4, dtype=torch.bfloat16)
    assert (attention(torch.zeros_like(ones)[:, :1], ones, ones) == 1.0).all()
    q, k, v = (x.bfloat16() for x in qkv())
    out, lse, weights = attention(q, k, v, return_lse=True, return_weights=True)
    full, full_lse, full_weights = attention(
        q.float(), k.float(), v.float(), return_lse=True, return_weights=True
    )
    assert torch.equal(out, full.bfloat16()) and torch.equal(weights, full_weights.bfloat16())
    assert lse.dtype == torch.float32 and torch.equal(lse, full_lse)


def test_dtype_chooses_what_is_computed_in_and_returned() -> None:
    q, k, v = (x.float() for x in qkv())
    bias = rand(7) * 1e-9 + 1.0
    out, lse, weights = attention(
        q, k, v, bias=bias, dtype=torch.float64, return_lse=True, return_weights=True
    )
    assert out.dtype == lse.dtype == weights.dtype == torch.float64
    close(out, attention(q.double(), k.double(), v.double(), bias=bias))


def test_autocast_rounds_nothing_in_the_reference() -> None:
    q, k, v = (x.float() for x in qkv())
    mask = keep_mask(5, 7)
    for options in ({}, {"mask": mask}, {"bias": torch.randn(5, 7)}):
        expected = attention(q, k, v, **options)
        with torch.autocast("cpu"):
            assert torch.equal(attention(q, k, v, **options), expected)


# ---------------------------------------------------------------------- derivatives

DIFFERENTIABLE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "mask with a dead row": lambda: {"mask": torch.tensor([[False] * 3, [True, False, True]])},
    "causal": lambda: {"causal": "bottom_right", "window": (1, None)},
    "scale": lambda: {"scale": -0.7, "softcap": 0.8},
    "bias": lambda: {"bias": rand(2, 1, 3).requires_grad_()},
    "bias that hides": lambda: {"bias": torch.tensor([0.3, -INF, 0.1], dtype=torch.float64)},
    "sinks": lambda: {"sinks": rand(2).requires_grad_(), "mask": torch.tensor([[False] * 3, [True] * 3])},
    "lengths and alibi": lambda: {"key_lengths": torch.tensor([2]), "alibi_slopes": torch.tensor([0.5, 0.2])},
    "dropout": lambda: {"dropout_p": 0.4, "dropout_seed": 5, "mask": torch.tensor([True, True, False])},
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives_are_right_in_both_modes(name: str) -> None:
    options = DIFFERENTIABLE[name]()
    learned = [n for n, x in options.items() if isinstance(x, Tensor) and x.requires_grad]
    inputs = [x.requires_grad_() for x in qkv(B=1, Hq=2, Hkv=1, Lq=2, Lk=3, D=3, Dv=2)]

    def function(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        extra = options | dict(zip(learned, rest, strict=True))
        out, lse, weights = attention(q, k, v, **extra, return_lse=True, return_weights=True)
        return out, torch.where(lse == -INF, 0.0, lse), weights

    arguments = (*inputs, *(options[n] for n in learned))
    assert gradcheck(function, arguments, check_forward_ad=True)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True)


def test_a_bias_that_alone_needs_a_gradient_gets_one_of_its_own_shape() -> None:
    q, k, v = qkv()
    for shape in ((2, 4, 5, 7), (1, 4, 5, 7), (4, 1, 7), (5, 7), (7,), (1,)):
        bias = rand(*shape).float().requires_grad_()
        attention(q, k, v, bias=bias, causal="bottom_right").pow(2).sum().backward()
        full = bias.detach().double().expand(2, 4, 5, 7).clone().requires_grad_()
        attention(q, k, v, bias=full, causal="bottom_right").pow(2).sum().backward()
        assert bias.grad.dtype == torch.float32
        close(bias.grad.double(), full.grad.sum_to_size(shape), atol=1e-5)
        assert (full.grad[..., 0, 3:] == 0).all()


def test_gradient_penalty_is_the_one_that_plain_operators_give() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(Hkv=4))
    mask = keep_mask(5, 7)

    def penalty(out: Tensor) -> tuple[Tensor, ...]:
        g = torch.autograd.grad(out.sin().sum(), q, create_graph=True)[0]
        return torch.autograd.grad(g.pow(2).sum(), (q, k, v))

    plain = (q @ k.mT / math.sqrt(6)).masked_fill(~mask, -INF).softmax(-1) @ v
    for found, expected in zip(penalty(attention(q, k, v, mask=mask)), penalty(plain), strict=True):
        close(found, expected)


def test_functorch_transforms_agree_with_loops_and_with_each_other() -> None:
    q, k, v = qkv(B=3, Hq=2, Hkv=1, Lq=3, Lk=4, D=3, Dv=2)
    mask, lengths = keep_mask(3, 1, 3, 4), torch.tensor([4, 0, 2])
    sinks = rand(2)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, length: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, key_lengths=length, sinks=sinks, causal="bottom_right")

    whole = attention(q, k, v, mask=mask, key_lengths=lengths, sinks=sinks, causal="bottom_right")
    close(vmap(one)(q, k, v, mask, lengths), whole)
    close(vmap(one, in_dims=(0, None, None, 0, 0))(q, k[0], v[0], mask, lengths)[0], whole[0])

    def scalar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, causal="bottom_right").sin().sum()

    leaf = q.clone().requires_grad_()
    close(grad(scalar)(q, k, v), torch.autograd.grad(scalar(leaf, k, v), leaf)[0])
    args = (q[0], k[0], v[0])

    def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return one(q, k, v, mask[0], lengths[0])

    for i in range(3):
        close(jacfwd(first, argnums=i)(*args), jacrev(first, argnums=i)(*args))
    direction = tuple(rand(*x.shape, seed=9) for x in args)
    step = 1e-6
    moved = (first(*(x + s * step * d for x, d in zip(args, direction, strict=True))) for s in (1, -1))
    close(jvp(first, args, direction)[1], (next(moved) - next(moved)) / (2 * step), atol=1e-8)
    close(
        hessian(lambda q: first(q, *args[1:]).sin().sum())(q[0]),
        jacrev(jacrev(lambda q: first(q, *args[1:]).sin().sum()))(q[0]),
    )
    per_sample = vmap(grad(lambda q, k, v: attention(q, k, v, causal="bottom_right").sum()))(q, k, v)
    leaf = q.clone().requires_grad_()
    close(per_sample, torch.autograd.grad(attention(leaf, k, v, causal="bottom_right").sum(), leaf)[0])


def test_hidden_junk_stays_hidden_from_forward_mode_and_from_vmap() -> None:
    q, k, v = qkv(B=1, Hq=2, Hkv=2)
    k[:, :, 6], v[:, :, 6] = NAN, INF
    mask = torch.arange(7) < 6
    out, tangent = jvp(lambda *x: attention(*x, mask=mask), (q, k, v), (q, k, v))
    assert out.isfinite().all() and tangent.isfinite().all()
    jacobian = vmap(jacrev(lambda *x: attention(*x, mask=mask), argnums=0))(q, k, v)
    assert jacobian.isfinite().all()


def test_compiled_equals_eager_without_graph_breaks() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = rand(4, 5, 7).requires_grad_()
    mask = keep_mask(2, 1, 1, 7)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, bias=bias, causal="bottom_right", softcap=2.0)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    upstream = rand(2, 4, 5, 3)
    out, expected = compiled(q, k, v, bias), function(q, k, v, bias)
    close(out, expected)
    tensors = (q, k, v, bias)
    for found, truth in zip(
        torch.autograd.grad(out, tensors, upstream),
        torch.autograd.grad(expected, tensors, upstream),
        strict=True,
    ):
        close(found, truth)
    same = torch.compile(lambda x: attention(x, x, x, causal=True), fullgraph=True, backend="aot_eager")
    close(same(q), attention(q, q, q, causal=True))


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    "counter, key, words",
    [  # the known answers that Random123 ships
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: Any, key: Any, words: Any) -> None:
    found = reference.philox_4x32_10([torch.tensor(c) for c in counter], [torch.tensor(c) for c in key])
    assert tuple(int(word) for word in found) == words
    assert philox_numpy(counter, key) == words


def philox_numpy(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize("seed", [0, 1, 123456789012345, -1, -(2**63), 2**63 - 1])
def test_the_dropout_mask_is_the_documented_function_of_seed_and_place(seed: int) -> None:
    B, H, Lq, Lk, p = 2, 3, 4, 19, 0.3
    expected = np.zeros((B, H, Lq, Lk), dtype=bool)
    for b, h, i, j in np.ndindex(B, H, Lq, Lk):
        word = philox_numpy((b, h, i, j // 8), (seed % 2**32, seed // 2**32 % 2**32))[j % 8 // 2]
        expected[b, h, i, j] = (word >> 16 * (j % 2)) & 0xFFFF >= round(p * 65536)
    assert torch.equal(reference.dropout_keep(seed, B, H, Lq, Lk, p), torch.from_numpy(expected))
    assert torch.equal(
        reference.dropout_keep(torch.tensor([seed]), B, H, Lq, Lk, p), torch.from_numpy(expected)
    )
    assert torch.equal(
        reference.dropout_keep(seed, range(1, 2), H, Lq, Lk, p), torch.from_numpy(expected)[1:]
    )


def test_dropout_drops_the_share_asked_for_and_scales_the_rest() -> None:
    keep = reference.dropout_keep(7, 2, 4, 64, 250, 0.25)
    assert abs(keep.float().mean().item() - 0.75) < 0.005  # 128,000 draws: five standard deviations are 0.006
    q, k, v = qkv()
    out, weights = attention(q, k, v, dropout_p=0.3, dropout_seed=3, return_weights=True)
    close(weights, reference.attention_weights(q, k))  # before dropout
    p = round(0.3 * 65536) / 65536  # what 16 bits make of 0.3
    dropped = weights * reference.dropout_keep(3, 2, 4, 5, 7, 0.3) / (1 - p)
    close(out, dropped @ v.repeat_interleave(2, 1))
    assert not reference.dropout_keep(7, 2, 4, 64, 1000, 1.0).any()
    assert reference.dropout_keep(7, 2, 4, 64, 1000, 0.0).all()
    assert (attention(q, k, v, dropout_p=1.0) == 0).all()
    v[:, :, 0] = NAN  # dropped is not hidden: 0·NaN stays NaN, as in a plain product
    assert attention(q, k, v, dropout_p=1.0).isnan().all()


def test_the_dropout_seed_comes_from_the_generator_of_torch() -> None:
    q, k, v = qkv()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attention(q, k, v, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("p", [-0.1, 1.1, NAN])
def test_a_dropout_outside_zero_to_one_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        attention(*qkv(), dropout_p=p)


# ---------------------------------------------------------------------- the other functions


def test_weights_and_lse_are_those_of_attention_and_rows_and_heads_select() -> None:
    q, k, v = qkv()
    options = {"bias": rand(4, 5, 7), "causal": "bottom_right", "sinks": rand(4)}
    _, lse, weights = attention(q, k, v, **options, return_lse=True, return_weights=True)
    close(reference.attention_weights(q, k, **options), weights)
    close(reference.attention_weights(q, k, rows=[3, 1], heads=[2], **options), weights[:, 2:3][:, :, [3, 1]])
    close(reference.lse(q, k, **options), lse)
    assert reference.attention_weights(q, k, rows=[], **options).shape == (2, 4, 0, 7)


def test_some_rows_of_q_keep_their_places_among_all_queries() -> None:
    q, k, _ = qkv()
    rows = torch.tensor([4, 0, 3, 3])
    for options in (
        {"causal": "bottom_right"},
        {"causal": "top_left", "window": (1, None)},
        {"window": (2, 1), "alibi_slopes": rand(4).abs(), "sinks": rand(4)},
        {"key_lengths": torch.tensor([3, 7])},
    ):
        whole = reference.attention_weights(q, k, **options)
        some = reference.attention_weights(q[:, :, rows], k, row_positions=rows, num_queries=5, **options)
        close(some, whole[:, :, rows])


def test_packed_sequences_equal_each_sequence_alone() -> None:
    lengths_q, lengths_k = [3, 0, 5, 2], [4, 2, 5, 0]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)]) for n in (lengths_q, lengths_k))
    q, k, v = rand(10, 4, 6), rand(11, 2, 6, seed=1), rand(11, 2, 3, seed=2)
    slopes = rand(4, 4).abs()
    options = {
        "causal": "bottom_right",
        "window": (2, None),
        "sinks": rand(4),
        "dropout_p": 0.3,
        "dropout_seed": 11,
    }
    out, lse = reference.attention_varlen(
        q, k, v, cu_q, cu_k, alibi_slopes=slopes, return_lse=True, **options
    )
    assert out.shape == (10, 4, 3) and lse.shape == (4, 10)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        # The mask of dropout depends on b: a padded batch of b + 1 copies has it in its last place.
        batch = [x.transpose(0, 1).expand(b + 1, -1, -1, -1) for x in (q[rows], k[keys], v[keys])]
        one, one_lse = attention(*batch, alibi_slopes=slopes[b], return_lse=True, **options)
        close(out[rows], one[-1].transpose(0, 1))
        close(lse[:, rows], one_lse[-1])
    assert reference.attention_varlen(q[:0], k[:0], v[:0], cu_q[:1], cu_k[:1]).shape == (0, 4, 3)


def test_stable_softmax_neither_overflows_nor_divides_by_zero() -> None:
    scores = torch.tensor([[1e30, 1e30, -1e30], [NAN, 1.0, 1.0], [5.0, INF, NAN]])
    mask = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    close(reference.stable_softmax(scores, mask), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0] * 3]))
    x = rand(2, 3, 4)
    close(reference.stable_softmax(x), x.softmax(-1))
    close(
        reference.stable_softmax(x, torch.tensor([True, True, False, True]))[..., 2],
        torch.zeros(2, 3).double(),
    )
    with pytest.raises(TypeError, match="bool"):
        reference.stable_softmax(x, torch.ones(4))


def test_visible_is_none_where_nothing_hides_and_the_rules_together_otherwise() -> None:
    assert reference.visible(3, 4) is None and reference.visible(3, 4, window=(None, None)) is None
    seen = reference.visible(3, 4, causal="bottom_right", window=(1, None), key_lengths=torch.tensor([3, 4]))
    assert torch.equal(seen, masks.causal(3, 4) & masks.sliding_window(3, 4, 1, None) & masks.padding([3, 4]))


# ---------------------------------------------------------------------- errors


def test_inputs_that_do_not_fit_are_refused_with_what_came() -> None:
    q, k, v = qkv()
    for bad, match in (
        ((q[0, 0], k, v), r"\(H, L, D\)"),
        ((q, k[..., :5], v), r"k \(2, 2, 7, 5\)"),
        ((q, k[:1], v[:1]), r"k \(1, 2, 7, 6\)"),
        ((q, k, v[:, :, :6]), r"v \(2, 2, 6, 3\)"),
        ((q[:, :3], k, v), "the 3 heads of q must be a multiple of .* which are 2"),
        ((q, k[:, :0], v[:, :0]), "the 4 heads of q must be a multiple of .* which are 0"),
        ((q[..., :0], k[..., :0], v), "head dim of q and k must be at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            attention(*bad)
    for options, match in (
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, r"mask \(5, 6\) must broadcast to \(2, 4, 5, 7\)"),
        ({"bias": torch.ones(3, 5, 7)}, r"bias \(3, 5, 7\)"),
        ({"bias": torch.ones(1, 1, 1, 5, 7)}, "bias"),
        ({"sinks": torch.ones(2)}, "sinks"),
        ({"key_lengths": torch.tensor([1])}, "key_lengths"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no gradient"),
        ({"window": (-1, 0)}, r"\(-1, 0\)"),
        ({"window": (None, -2)}, r"\(None, -2\)"),
        ({"scale": NAN}, "scale must be finite"),
        ({"scale": INF}, "scale must be finite"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": NAN}, "softcap"),
        ({"key_lengths": torch.tensor([3, 8])}, r"key_lengths\[1\] must lie between 0 and the 7 keys"),
        ({"key_lengths": torch.tensor([-1, 7])}, r"key_lengths\[0\]"),
        ({"alibi_slopes": torch.ones(2, 2)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(1, 4, 1)}, "alibi_slopes"),
        ({"causal": None}, "causal"),
    ):
        with pytest.raises(ValueError, match=match):
            attention(q, k, v, **options)
    for options, match in (
        ({"scale": torch.tensor(0.5)}, "scale must be a plain number"),
        ({"softcap": "a"}, "softcap must be a number"),
        ({"dropout_p": None}, "dropout_p must be a number"),
        ({"sinks": torch.ones(4, dtype=torch.int64)}, "sinks"),
        ({"key_lengths": [3, 7]}, "key_lengths must be a tensor"),
        ({"key_lengths": torch.tensor([3.0, 7.0])}, "key_lengths must be a tensor"),
    ):
        with pytest.raises(TypeError, match=match):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match="float64.*float32"):
        attention(q, k.float(), v)
    with pytest.raises(TypeError, match="bool"):
        attention(q, k, v, mask=torch.ones(5, 7, dtype=torch.uint8))
    with pytest.raises(TypeError, match="bias"):
        attention(q, k, v, bias=torch.ones(5, 7, dtype=torch.bool))


def test_packed_sequences_that_do_not_fit_are_refused() -> None:
    q, k, v = rand(9, 4, 6), rand(12, 2, 6), rand(12, 2, 3)
    good = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12])
    reference.attention_varlen(q, k, v, *good)
    for n, wrong, match in (
        (0, [0, 4, 8], "cu_seqlens_q must end with the 9 rows of q, not with 8"),
        (1, [0, 5, 13], "cu_seqlens_k must end with the 12 rows of k, not with 13"),
        (0, [1, 4, 9], "start with 0"),
        (1, [0, 13, 12], "must not fall"),
        (1, [0, 12], "as many sequences"),
        (0, [[0, 4, 9]], "one dimension"),
    ):
        pair = list(good)
        pair[n] = torch.tensor(wrong)
        with pytest.raises(ValueError, match=match):
            reference.attention_varlen(q, k, v, *pair)
    for wrong in (None, [0, 4, 9], torch.tensor([0.0, 4.0, 9.0])):
        with pytest.raises(TypeError, match="cu_seqlens_q must be a tensor of int32 or int64"):
            reference.attention_varlen(q, k, v, wrong, good[1])
    with pytest.raises(ValueError, match="total, H, D"):
        reference.attention_varlen(q[None], k[None], v[None], *good)


def test_a_window_that_reaches_further_than_any_sequence_has_no_bound() -> None:
    assert reference.visible(5, 7, window=(2**70, 2**63 - 1)) is None
    close(reference.visible(5, 7, window=(2**64, 0)), reference.visible(5, 7, window=(None, 0)))


def test_a_sink_of_infinity_takes_everything() -> None:
    q, k, v = qkv()
    out, lse, weights = attention(
        q, k, v, sinks=torch.tensor([INF, 0.0, 1.0, 2.0]), return_lse=True, return_weights=True
    )
    assert (out[:, 0] == 0).all() and (weights[:, 0] == 0).all() and (lse[:, 0] == INF).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, 1:]).all() and (weights[:, 1:] > 0).all()
