"""Positional encoding, the encoder block and the encoder."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_ext import masks
from attn_ext.nn import PositionalEncoding, TransformerEncoder, TransformerEncoderBlock


def from_torch(theirs: nn.TransformerEncoderLayer, **options: Any) -> TransformerEncoderBlock:
    """Our block with the weights of torch's layer, written out by hand."""
    attention = theirs.self_attn
    ours = TransformerEncoderBlock(
        attention.embed_dim, attention.num_heads, theirs.linear1.out_features, theirs.dropout.p, **options
    )
    with torch.no_grad():
        linears = (ours.self_attn.w_q, ours.self_attn.w_k, ours.self_attn.w_v)
        for linear, weight, bias in zip(
            linears, attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
        ):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
    for mine, yours in (
        (ours.self_attn.w_o, attention.out_proj),
        (ours.ffn[0], theirs.linear1),
        (ours.ffn[2], theirs.linear2),
        (ours.norm1, theirs.norm1),
        (ours.norm2, theirs.norm2),
    ):
        mine.load_state_dict(yours.state_dict())
    return ours.train(theirs.training)


def shake(module: nn.Module) -> None:
    """Random values for every parameter, so that norms and biases are no identities."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)


# ---------------------------------------------------------------------- positional encoding


def test_positional_encoding_adds_the_sinusoids_of_the_formula() -> None:
    d_model, max_len = 6, 32
    encoding = PositionalEncoding(d_model, max_len)
    assert encoding.pe.shape == (1, max_len, d_model)
    for position in (0, 1, 7, 31):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            assert encoding.pe[0, position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert encoding.pe[0, position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    x = torch.randn(3, 5, d_model)
    torch.testing.assert_close(encoding(x) - x, encoding.pe[:, :5].expand(3, 5, 6))


def test_positional_encoding_takes_odd_widths_and_other_dtypes_and_is_a_buffer() -> None:
    odd = PositionalEncoding(5, 8)
    assert torch.equal(odd.pe, PositionalEncoding(5, 16).pe[:, :8])
    assert odd.pe[0, 3, 4].item() == pytest.approx(math.sin(3 / 10000 ** (4 / 5)), abs=1e-6)
    assert list(odd.state_dict()) == ["pe"] and not list(odd.parameters())
    assert odd(torch.zeros(1, 8, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(2, 9, 5), (2, 8, 6), (8, 5)])
def test_positional_encoding_refuses_longer_or_wider_inputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"at most 8, 5\), got \(" + str(shape[0])):
        PositionalEncoding(5, 8)(torch.zeros(shape))


# ---------------------------------------------------------------------- the block


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_equals_torchs_layer_with_the_same_weights(norm_first: bool, activation: str) -> None:
    theirs = nn.TransformerEncoderLayer(
        24, 4, 48, 0.0, activation, layer_norm_eps=1e-12, batch_first=True, norm_first=norm_first
    )
    shake(theirs)
    ours = from_torch(theirs, norm_first=norm_first, activation=activation, norm_eps=1e-12)
    x = torch.randn(3, 6, 24)
    padding, keep, bias = masks.padding([6, 4, 1]), masks.causal(6), torch.randn(6, 6)
    for mine, yours in (
        ({}, {}),
        ({"mask": padding}, {"src_key_padding_mask": masks.to_torch_key_padding_mask(padding)}),
        ({"key_lengths": torch.tensor([6, 4, 1])}, {"src_key_padding_mask": ~padding[:, 0, 0]}),
        ({"mask": keep}, {"src_mask": masks.to_torch(keep)}),
        ({"causal": True}, {"src_mask": masks.to_torch(keep)}),
        ({"bias": bias}, {"src_mask": bias}),
    ):
        torch.testing.assert_close(ours(x, **mine), theirs(x, **yours), rtol=0, atol=1e-5)
    upstream = torch.randn(3, 6, 24)
    grads = [torch.autograd.grad(block(x), block.norm1.weight, upstream)[0] for block in (ours, theirs)]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name, function",
    [
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
    ],
)
def test_activations_are_the_functions_they_are_named_after(name: str, function: Any) -> None:
    block = TransformerEncoderBlock(8, 2, 16, activation=name)
    x = torch.linspace(-3, 3, 8)
    expected = F.linear(
        function(F.linear(x, block.ffn[0].weight, block.ffn[0].bias)), block.ffn[2].weight, block.ffn[2].bias
    )
    torch.testing.assert_close(block.ffn(x), expected)


def test_block_has_the_parts_and_parameter_names_that_checkpoints_use() -> None:
    block = TransformerEncoderBlock(8, 2, 16)
    assert set(block.state_dict()) == {
        f"{name}.{part}"
        for name in (*(f"self_attn.w_{x}" for x in "qkvo"), "ffn.0", "ffn.2", "norm1", "norm2")
        for part in ("weight", "bias")
    }
    assert isinstance(block.ffn[1], nn.ReLU)
    assert not any("bias" in name for name in TransformerEncoderBlock(8, 2, 16, bias=False).state_dict())
    assert TransformerEncoderBlock(8, 4, 16, num_kv_heads=2).self_attn.num_kv_heads == 2


def test_block_returns_weights_only_where_asked() -> None:
    block = TransformerEncoderBlock(8, 2, 16, dropout=0.5)
    x = torch.randn(3, 5, 8)
    assert isinstance(block(x), Tensor)
    output, weights = block(x, masks.causal(5), need_weights=True)
    assert output.shape == x.shape and weights.shape == (3, 2, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 5))  # before dropout
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_of_the_block_is_on_in_training_off_in_evaluation_and_back_again(norm_first: bool) -> None:
    block = TransformerEncoderBlock(8, 2, 16, dropout=0.8, norm_first=norm_first)
    without = TransformerEncoderBlock(8, 2, 16, dropout=0.0, norm_first=norm_first)
    without.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        block.train()
        assert not torch.equal(block(x), block(x))
        block.eval()
        assert torch.equal(block(x), block(x)) and torch.equal(block(x), without(x))


def test_attention_inside_the_block_trains_with_dropout_even_where_nothing_else_drops() -> None:
    block = TransformerEncoderBlock(8, 2, 16, dropout=0.8)
    block.dropout.p = 0.0
    x = torch.randn(2, 5, 8)
    assert not torch.equal(block(x), block(x))
    block.self_attn.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("silent", ["self_attn", "ffn"])
def test_what_each_part_adds_is_dropped_on_its_own(silent: str, norm_first: bool) -> None:
    block = TransformerEncoderBlock(8, 2, 16, dropout=0.5, norm_first=norm_first)
    block.self_attn.dropout = 0.0
    with torch.no_grad():  # the other part adds nothing, so only this one's dropout can show
        for parameter in getattr(block, silent).parameters():
            parameter.zero_()
    x = torch.randn(2, 5, 8)
    assert not torch.equal(block(x), block(x))
    block.dropout.eval()
    assert torch.equal(block(x), block(x))


# ---------------------------------------------------------------------- the encoder


def test_encoder_equals_torchs_with_the_same_weights() -> None:
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(24, 4, 48, 0.0, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(24) if norm_first else None
        theirs = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
        shake(theirs)
        ours = TransformerEncoder(3, 24, 4, 48, 0.0, norm_first=norm_first)
        for mine, yours in zip(ours.layers, theirs.layers, strict=True):
            mine.load_state_dict(from_torch(yours).state_dict())
        if norm is not None:
            ours.norm.load_state_dict(theirs.norm.state_dict())
        x = torch.randn(3, 6, 24)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(ours(x, causal=True), theirs(x, ~masks.causal(6)), rtol=0, atol=1e-5)


PADDINGS: dict[str, dict[str, Any]] = {
    "nothing hidden": {},
    "longest row is 15 of 20": {"mask": masks.padding([15, 3, 9, 1, 12, 15], 20)},
    "the same as key lengths": {"key_lengths": torch.tensor([15, 3, 9, 1, 12, 15])},
    "all but one token padded": {"mask": masks.padding([1] * 6, 20)},
    "one row all padding": {"mask": masks.padding([20, 0, 7, 20, 20, 1], 20)},
    "ALiBi as a float mask": {
        "bias": -(torch.arange(20)[:, None] - torch.arange(20)).abs()
        * torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]
    },
    "random float mask": {"mask": torch.randn(20, 20, generator=torch.Generator().manual_seed(0))},
    "causal": {"causal": True},
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_training_and_evaluation_with_and_without_grad_agree(padding: str, norm_first: bool) -> None:
    encoder = TransformerEncoder(3, 32, 4, 64, dropout=0.0, norm_first=norm_first)
    x = torch.randn(6, 20, 32)
    outputs = []
    for training in (True, False):
        for mode in (nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                outputs.append(encoder.train(training)(x, **PADDINGS[padding]).clone())
    for output in outputs:
        assert output.shape == (6, 20, 32) and output.isfinite().all()
        torch.testing.assert_close(output.detach(), outputs[0].detach(), rtol=0, atol=1e-6)
    by_hand = x
    for layer in encoder.layers:
        by_hand = layer(by_hand, **PADDINGS[padding])
    torch.testing.assert_close(encoder.norm(by_hand), outputs[0], rtol=0, atol=1e-6)
    assert torch.allclose(outputs[0], encoder(x)) == (padding == "nothing hidden")
    with_weights, weights = encoder(x, **PADDINGS[padding], need_weights=True)
    torch.testing.assert_close(with_weights, outputs[0], rtol=0, atol=1e-6)
    assert [w.shape for w in weights] == [(6, 4, 20, 20)] * 3


@pytest.mark.parametrize("filler", [1e-10, 1e10, math.nan])
@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_do_not_depend_on_the_padding_its_length_or_what_it_holds(
    side: str, filler: float
) -> None:
    encoder = TransformerEncoder(2, 16, 4, 32, dropout=0.0).eval()
    tokens = torch.randn(3, 5, 16)
    alone = encoder(tokens)
    for length in (5, 9, 64):
        x = torch.full((3, length, 16), filler)
        real = slice(0, 5) if side == "right" else slice(length - 5, length)
        x[:, real] = tokens
        keep = torch.zeros(3, 1, 1, length, dtype=torch.bool)
        keep[..., real] = True
        torch.testing.assert_close(encoder(x, keep)[:, real], alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(encoder(x[:1], keep[:1])[:, real], alone[:1], rtol=0, atol=1e-5)
        if side == "right":
            lengths = torch.full((3,), 5)
            torch.testing.assert_close(encoder(x, key_lengths=lengths)[:, real], alone, rtol=0, atol=1e-5)


def test_an_all_padding_row_stays_finite_with_finite_gradients() -> None:
    encoder = TransformerEncoder(2, 16, 4, 32, dropout=0.0)
    x = torch.randn(2, 4, 16, requires_grad=True)
    output = encoder(x, masks.padding([4, 0], 4))
    assert output.isfinite().all()
    output.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_causal_encoder_never_sees_the_future() -> None:
    encoder = TransformerEncoder(2, 16, 4, 32, dropout=0.0)
    x = torch.randn(2, 6, 16)
    changed = x.clone()
    changed[:, 4:] = 7.0
    for options in ({"causal": True}, {"mask": masks.causal(6)}):
        assert torch.equal(encoder(changed, **options)[:, :4], encoder(x, **options)[:, :4])
    assert not torch.allclose(encoder(changed)[:, :4], encoder(x)[:, :4])


def test_copies_and_pickles_of_the_encoder_are_equal_and_independent() -> None:
    encoder = TransformerEncoder(2, 16, 4, 32, num_kv_heads=2, norm_first=True, activation="gelu_tanh").eval()
    x = torch.randn(2, 5, 16)
    expected = encoder(x)
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.layers[0].ffn[0].weight.zero_()
        assert torch.equal(encoder(x), expected)
    loaded = TransformerEncoder(2, 16, 4, 32, num_kv_heads=2, norm_first=True, activation="gelu_tanh").eval()
    loaded.load_state_dict(encoder.state_dict())
    assert torch.equal(loaded(x), expected)
    assert encoder.layers[0].norm1.weight is not encoder.layers[1].norm1.weight


def test_compiled_encoder_equals_eager_without_graph_breaks() -> None:
    encoder = TransformerEncoder(2, 16, 4, 32, dropout=0.0)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 16)
    for options in ({"mask": masks.padding([5, 2])}, {"causal": True}):
        output, expected = compiled(x, **options), encoder(x, **options)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
        parameter = encoder.layers[0].self_attn.w_q.weight
        found, truth = (torch.autograd.grad(y.sin().sum(), parameter)[0] for y in (output, expected))
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


def test_encoder_learns_a_task_that_needs_attention() -> None:
    """Which of the tokens equals the first one? Without attention no token can know."""
    torch.manual_seed(0)
    embed, positions, head = nn.Embedding(8, 16), PositionalEncoding(16), nn.Linear(16, 1)
    encoder = TransformerEncoder(1, 16, 2, 32, dropout=0.0)
    parameters = [*embed.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    data = torch.randint(0, 8, (128, 6))
    labels = (data[:, 1:] == data[:, :1]).float()
    for _ in range(120):
        logits = head(encoder(positions(embed(data))))[:, 1:, 0]
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Saying "no" everywhere leaves a loss of 0.38.
    assert loss.item() < 0.15


# ---------------------------------------------------------------------- errors


def test_what_cannot_be_built_is_refused_with_its_numbers() -> None:
    for build, match in (
        (lambda: TransformerEncoderBlock(10, 3, 16), "10.*3"),
        (lambda: TransformerEncoderBlock(8, 2, 0), "d_ff.*0"),
        (lambda: TransformerEncoderBlock(8, 2, 16, activation="tanh"), "relu, gelu.*'tanh'"),
        (lambda: TransformerEncoder(0, 8, 2, 16), "num_layers.*0"),
        (lambda: PositionalEncoding(0), "got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            build()
    with pytest.raises(ValueError, match=r"\(2, 5, 7\)"):
        TransformerEncoderBlock(8, 2, 16)(torch.zeros(2, 5, 7))
    with pytest.raises(TypeError, match="bool"):
        TransformerEncoder(1, 8, 2, 16)(torch.zeros(2, 5, 8), torch.ones(5, 5, dtype=torch.uint8))
