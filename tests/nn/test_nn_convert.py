"""from_torch and to_torch: the same numbers, the same gradients, the same bits on the way back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_ext import masks
from attn_ext.nn import (
    MultiHeadAttention,
    RotaryEmbedding,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
    from_torch,
    to_torch,
)

D, H, FF = 24, 4, 40


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch's stacks warn where they cannot use nested tensors
        yield


def shaken(module: nn.Module) -> Any:
    """Random values for every parameter: norms and biases are no identities, and stacked layers differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def grads_close(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Compare the gradients of the inputs of two outputs."""
    weight = torch.randn_like(theirs)
    for mine, yours in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def lengths_and_their_mask(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequence lengths, and torch's key_padding_mask (True = hidden) for them."""
    lengths = torch.tensor([length, length - 3, 1][:batch])
    return lengths, masks.to_torch_key_padding_mask(masks.padding(lengths, length))


ATTENTIONS = {
    "packed": {},
    "without bias": {"bias": False},
    "kdim and vdim": {"kdim": 10, "vdim": 14},
    "kdim, vdim, no bias": {"kdim": 10, "vdim": 14, "bias": False},
    "sequence first": {"batch_first": False},
}
MODES = ("train", "eval")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_equals_torchs_with_masks_and_weights(kind: str, mode: str) -> None:
    options = {"batch_first": True} | ATTENTIONS[kind]
    theirs = shaken(nn.MultiheadAttention(D, H, dropout=0.0, **options)).train(mode == "train")
    ours = from_torch(theirs)
    assert ours.training == theirs.training
    q = torch.randn(3, 7, D, requires_grad=True)
    k = torch.randn(3, 9, options.get("kdim", D), requires_grad=True)
    v = torch.randn(3, 9, options.get("vdim", D), requires_grad=True)
    lengths, key_padding_mask = lengths_and_their_mask(3, 9)
    hidden = torch.rand(7, 9) < 0.3
    hidden[:, 0] = False
    bias = torch.randn(7, 9)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"key_lengths": lengths}, {"key_padding_mask": key_padding_mask}),
        ({"mask": masks.from_torch(hidden)}, {"attn_mask": hidden}),
        ({"mask": bias}, {"attn_mask": bias}),
        (
            {"mask": masks.from_torch(hidden), "key_lengths": lengths},
            {"attn_mask": hidden, "key_padding_mask": key_padding_mask},
        ),
    ]
    for mine, yours in cases:
        output, weights = ours(q, k, v, **mine)
        swapped = (q, k, v) if options["batch_first"] else tuple(x.transpose(0, 1) for x in (q, k, v))
        expected, expected_weights = theirs(*swapped, average_attn_weights=False, **yours)
        expected = expected if options["batch_first"] else expected.transpose(0, 1)
        close(output, expected)
        close(weights, expected_weights)
        grads_close(output, expected, [q, k, v])


LAYERS = {
    "post-norm relu": {},
    "pre-norm gelu": {"norm_first": True, "activation": "gelu"},
    "without bias": {"bias": False},
    "activations as modules": {"activation": nn.GELU(approximate="tanh"), "layer_norm_eps": 1e-3},
    "silu": {"activation": F.silu},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LAYERS)
def test_encoder_layer_equals_torchs(kind: str, mode: str) -> None:
    theirs = shaken(nn.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, **LAYERS[kind]))
    theirs.train(mode == "train")
    ours = from_torch(theirs)
    assert type(ours) is TransformerEncoderBlock and ours.training == theirs.training
    x = torch.randn(3, 8, D, requires_grad=True)
    lengths, key_padding_mask = lengths_and_their_mask(3, 8)
    future = nn.Transformer.generate_square_subsequent_mask(8)
    close(ours(x), theirs(x))
    expected = theirs(x, src_mask=future, src_key_padding_mask=key_padding_mask)
    actual = ours(x, causal=True, key_lengths=lengths)
    close(actual, expected)
    grads_close(actual, expected, [x])
    if kind == "activations as modules":
        return  # torch's fast path takes the exact GELU for its tanh approximation
    with torch.no_grad():  # torch's fast path in eval mode
        real = masks.padding(lengths, 8)[:, 0, 0, :, None]
        close(ours(x, key_lengths=lengths) * real, theirs(x, src_key_padding_mask=key_padding_mask) * real)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LAYERS)
def test_decoder_layer_equals_torchs(kind: str, mode: str) -> None:
    theirs = shaken(nn.TransformerDecoderLayer(D, H, FF, 0.0, batch_first=True, **LAYERS[kind]))
    theirs.train(mode == "train")
    ours = from_torch(theirs)
    assert type(ours) is TransformerDecoderBlock and not ours.causal and ours.training == theirs.training
    x = torch.randn(3, 6, D, requires_grad=True)
    memory = torch.randn(3, 9, D, requires_grad=True)
    lengths, memory_padding = lengths_and_their_mask(3, 9)
    close(ours(x, memory), theirs(x, memory))
    future = nn.Transformer.generate_square_subsequent_mask(6)
    expected = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=memory_padding)
    actual = ours(x, memory, masks.causal(6), masks.padding(lengths, 9))
    close(actual, expected)
    grads_close(actual, expected, [x, memory])
    close(ours(x, memory, masks.causal(6), encoder_lengths=lengths), expected)
    ours.causal = True
    close(ours(x, memory, encoder_lengths=lengths), expected)


@pytest.mark.parametrize("norm", [None, "last"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_stacks_equal_torchs(norm: str | None, norm_first: bool) -> None:
    last = None if norm is None else nn.LayerNorm(D)
    layer = nn.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, norm_first=norm_first)
    encoder = shaken(nn.TransformerEncoder(layer, 3, last))
    last = None if norm is None else nn.LayerNorm(D)
    layer = nn.TransformerDecoderLayer(D, H, FF, 0.0, batch_first=True, norm_first=norm_first)
    decoder = shaken(nn.TransformerDecoder(layer, 2, last))
    ours_encoder, ours_decoder = from_torch(encoder), from_torch(decoder)
    assert type(ours_encoder) is TransformerEncoder and type(ours_decoder) is TransformerDecoder
    source, target = torch.randn(2, 9, D), torch.randn(2, 5, D)
    lengths, padding = lengths_and_their_mask(2, 9)
    memory = encoder(source, src_key_padding_mask=padding)
    real = masks.padding(lengths, 9)[:, 0, 0, :, None]
    close(ours_encoder(source, key_lengths=lengths) * real, memory * real)
    close(
        ours_decoder(target, memory, encoder_lengths=lengths),
        decoder(target, memory, memory_key_padding_mask=padding),
    )


def test_a_layer_that_was_given_to_torch_in_parts_keeps_every_dropout() -> None:
    theirs = nn.TransformerEncoderLayer(D, H, FF, 0.25, batch_first=True)
    theirs.dropout.p, theirs.self_attn.dropout = 0.5, 0.125
    ours = from_torch(theirs)
    assert ours.dropout.p == 0.25 and ours.ffn[1][1].p == 0.5 and ours.self_attn.dropout == 0.125
    back = to_torch(ours)
    assert [back.dropout.p, back.dropout1.p, back.dropout2.p] == [0.5, 0.25, 0.25]
    assert back.self_attn.dropout == 0.125


CONVERTIBLE = {
    **{f"attention, {name}": lambda o=o: nn.MultiheadAttention(D, H, **o) for name, o in ATTENTIONS.items()},
    **{
        f"encoder, {name}": lambda o=o: nn.TransformerEncoderLayer(D, H, FF, **o)
        for name, o in LAYERS.items()
    },
    **{
        f"decoder, {name}": lambda o=o: nn.TransformerDecoderLayer(D, H, FF, **o)
        for name, o in LAYERS.items()
    },
    "encoder stack": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, FF), 2, nn.LayerNorm(D)),
    "decoder stack": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, FF), 2),
    "fp64": lambda: nn.TransformerEncoderLayer(D, H, FF, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", CONVERTIBLE)
def test_there_and_back_is_bit_equal_and_shares_nothing(kind: str) -> None:
    theirs = shaken(CONVERTIBLE[kind]()).eval()
    first = next(theirs.parameters())
    first.requires_grad_(False)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    ours = from_torch(theirs)
    back = to_torch(ours)
    assert type(back) is type(theirs) and not back.training
    after = back.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    flags = {name: parameter.requires_grad for name, parameter in theirs.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in back.named_parameters()} == flags
    with torch.no_grad():
        for parameter in [*ours.parameters(), *back.parameters()]:
            parameter.fill_(7.0)
    assert all(torch.equal(theirs.state_dict()[name], value) for name, value in before.items())


def test_what_ours_lack_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="add_bias_kv"):
        from_torch(nn.MultiheadAttention(D, H, add_bias_kv=True))
    with pytest.raises(ValueError, match="add_zero_attn"):
        from_torch(nn.MultiheadAttention(D, H, add_zero_attn=True))
    with pytest.raises(TypeError, match=r"nn\.MultiheadAttention.*got torch\.nn\.modules\.linear\.Linear"):
        from_torch(nn.Linear(3, 3))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="convert its encoder and decoder"):
        from_torch(nn.Transformer(D, H, 1, 1, FF))  # type: ignore[call-overload]

    class Own(nn.TransformerEncoderLayer):
        pass

    with pytest.raises(TypeError, match="Own"):
        from_torch(Own(D, H, FF))
    with pytest.raises(TypeError, match="activation must be ReLU, GELU or SiLU"):
        from_torch(nn.TransformerEncoderLayer(D, H, FF, activation=torch.tanh))
    layer = nn.TransformerEncoderLayer(D, H, FF)
    layer.norm2 = nn.RMSNorm(D)
    with pytest.raises(TypeError, match=r"norm2 must be nn\.LayerNorm, got .*RMSNorm"):
        from_torch(layer)
    layer = nn.TransformerEncoderLayer(D, H, FF)
    layer.dropout2.p = 0.7
    with pytest.raises(ValueError, match=r"dropouts differ.*0\.7"):
        from_torch(layer)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: MultiHeadAttention(D, H, num_kv_heads=2), "num_kv_heads = 2 for h = 4"),
        (lambda: MultiHeadAttention(D, H, rotary=RotaryEmbedding(D // H)), "rotary"),
        (lambda: TransformerEncoderBlock(D, H, FF, activation="swiglu"), "swiglu"),
        (lambda: TransformerEncoderBlock(D, H, FF, norm="rms"), "RMSNorm"),
    ],
)
def test_what_torchs_lack_is_refused_by_name(module: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_torch(module())


def test_parameters_of_one_packed_projection_are_trained_together_or_refused() -> None:
    ours = MultiHeadAttention(D, H)
    ours.w_k.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="either all of w_q, w_k and w_v require grad or none"):
        to_torch(ours)
    with pytest.raises(TypeError, match="expected one of MultiHeadAttention.*Linear"):
        to_torch(nn.Linear(2, 2))  # type: ignore[arg-type]
