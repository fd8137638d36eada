"""Rotary embedding and feed-forward nets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_ext.nn import GatedFeedForward, MultiHeadAttention, RotaryEmbedding, TransformerEncoder


def turned_by_hand(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """Every pair as a complex number times e^(i·angle), one after the other."""
    result = x.double().clone()
    width = x.shape[-1]
    for b in range(x.shape[0]):
        for i, position in enumerate(positions[b].tolist()):
            for n in range(width // 2):
                one, two = (2 * n, 2 * n + 1) if interleaved else (n, n + width // 2)
                angle = position * base ** (-2 * n / width)
                pair = torch.complex(x[b, :, i, one].double(), x[b, :, i, two].double())
                pair = pair * complex(math.cos(angle), math.sin(angle))
                result[b, :, i, one], result[b, :, i, two] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rotary_turns_pairs_by_the_formula(interleaved: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 8).to(dtype)
    rotary = RotaryEmbedding(8, base=500.0, interleaved=interleaved)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 100, 4000, 2, 2]])
    exact = turned_by_hand(x, positions, 500.0, interleaved)
    assert rotary(x, positions).dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(rotary(x, positions).double(), exact, rtol=tolerance, atol=tolerance)
    counted = torch.arange(5).expand(2, 5)
    exact = turned_by_hand(x, counted, 500.0, interleaved)
    torch.testing.assert_close(rotary(x).double(), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(rotary(x), rotary(x, torch.arange(5)))


def test_rotary_turns_only_the_first_features_where_told_and_keeps_no_state() -> None:
    x = torch.randn(1, 2, 4, 12)
    rotary = RotaryEmbedding(12, rotary_dim=4)
    turned = rotary(x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], RotaryEmbedding(4)(x[..., :4]))
    assert not list(rotary.parameters()) and not rotary.state_dict() and not list(rotary.buffers())
    assert torch.equal(rotary.to(torch.bfloat16)(x), turned)  # a cast of the model spoils no angle


def test_scores_after_rotary_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(16)
    q, k = torch.randn(1, 1, 1, 16).expand(1, 1, 9, 16), torch.randn(1, 1, 1, 16).expand(1, 1, 9, 16)
    scores = (rotary(q) @ rotary(k).mT)[0, 0]
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_attention_with_rotary_is_attention_of_the_turned_heads() -> None:
    rotary = RotaryEmbedding(8)
    attend = MultiHeadAttention(32, 4, 0.0, num_kv_heads=2, rotary=rotary).eval()
    x, positions = torch.randn(2, 6, 32), torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 1, 2, 3, 4]])
    q = attend.w_q(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k = attend.w_k(x).unflatten(-1, (2, 8)).transpose(1, 2)
    v = attend.w_v(x).unflatten(-1, (2, 8)).transpose(1, 2)
    heads = F.scaled_dot_product_attention(
        rotary(q, positions), rotary(k, positions), v, is_causal=True, enable_gqa=True
    )
    expected = attend.w_o(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attend(x, x, x, causal=True, positions=positions)[0], expected)


def test_left_padded_rows_are_right_with_their_positions() -> None:
    encoder = TransformerEncoder(
        2, 16, 2, 32, 0.0, norm_first=True, norm="rms", activation="swiglu", rotary=RotaryEmbedding(8)
    ).eval()
    x = torch.randn(1, 5, 16)
    alone = encoder(x, causal=True)
    padded = torch.cat([torch.full((1, 3, 16), torch.nan), x], dim=1)
    real = torch.tensor([False] * 3 + [True] * 5)
    positions = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4])
    shifted = encoder(padded, real[None, None, None], causal=True, positions=positions)
    torch.testing.assert_close(shifted[:, 3:], alone)


def test_rotary_and_positions_that_do_not_fit_are_refused() -> None:
    for width in (3, 0, 10):
        with pytest.raises(ValueError, match=f"rotary_dim must be even and 2 to head_dim = 8, got {width}"):
            RotaryEmbedding(8, rotary_dim=width)
    with pytest.raises(ValueError, match="base must be above 0, got -1"):
        RotaryEmbedding(8, base=-1.0)
    rotary = RotaryEmbedding(8)
    with pytest.raises(ValueError, match=r"expected x \(B, H, L, 8\), got \(2, 4, 6\)"):
        rotary(torch.randn(2, 4, 6))
    with pytest.raises(ValueError, match=r"expected positions \(5,\) or \(2, 5\), got \(4,\)"):
        rotary(torch.randn(2, 3, 5, 8), torch.arange(4))
    with pytest.raises(TypeError, match=r"integers, got torch\.float32"):
        rotary(torch.randn(2, 3, 5, 8), torch.arange(5.0))
    with pytest.raises(ValueError, match="rotary turns heads of width 8, but d_model / h is 4"):
        MultiHeadAttention(16, 4, rotary=rotary)
    x = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match="positions need a module that was built with rotary"):
        MultiHeadAttention(32, 4)(x, x, x, positions=torch.arange(5))
    with pytest.raises(ValueError, match="got 5 queries and 7 keys"):
        MultiHeadAttention(32, 4, rotary=rotary)(x, torch.randn(2, 7, 32), torch.randn(2, 7, 32))


@pytest.mark.parametrize(("name", "gate"), [("swiglu", F.silu), ("geglu", F.gelu)])
def test_gated_nets_are_the_product_of_gate_and_value(name: str, gate: object) -> None:
    net = GatedFeedForward(6, 10, name)
    x = torch.randn(2, 3, 6)
    expected = net.w_down(gate(net.w_gate(x)) * net.w_up(x))  # type: ignore[operator]
    torch.testing.assert_close(net(x), expected)
    assert sorted(net.state_dict()) == sorted(
        f"{linear}.{kind}" for linear in ("w_gate", "w_up", "w_down") for kind in ("weight", "bias")
    )
    with pytest.raises(ValueError, match="activation must be one of swiglu, geglu, got 'relu'"):
        GatedFeedForward(6, 10, "relu")


def test_inner_dropout_changes_no_parameter_name() -> None:
    plain = TransformerEncoder(1, 8, 2, 16)
    dropping = TransformerEncoder(1, 8, 2, 16, ffn_dropout=0.5)
    assert list(plain.state_dict()) == list(dropping.state_dict())
    assert isinstance(dropping.layers[0].ffn[1][1], nn.Dropout)
