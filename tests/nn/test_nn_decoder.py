"""The decoder block and stack: what they see, what they return, what they refuse."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from attn_ext import masks
from attn_ext.nn import TransformerDecoder, TransformerDecoderBlock


def block(**options: object) -> TransformerDecoderBlock:
    torch.manual_seed(1)
    return TransformerDecoderBlock(16, 4, 32, 0.0, **options).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_token_sees_nothing_of_those_behind_it(norm_first: bool) -> None:
    decoder = block(norm_first=norm_first)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    whole = decoder(x, memory)
    changed = x.clone()
    changed[:, 4:] = torch.nan
    torch.testing.assert_close(decoder(changed, memory)[:, :4], whole[:, :4], rtol=0, atol=0)
    open_block = block(norm_first=norm_first, causal=False)
    assert (open_block(x, memory)[:, 0] - whole[:, 0]).abs().max() > 1e-3
    torch.testing.assert_close(open_block(x, memory, masks.causal(6)), whole)


def test_padding_of_the_source_and_of_the_target_is_never_seen() -> None:
    decoder = block(causal=False)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    lengths, source_lengths = torch.tensor([6, 4]), torch.tensor([9, 5])
    expected = decoder(x[1:, :4], memory[1:, :5])[0]
    x[1, 4:], memory[1, 5:] = torch.inf, torch.nan
    by_lengths = decoder(x, memory, key_lengths=lengths, encoder_lengths=source_lengths)
    torch.testing.assert_close(by_lengths[1, :4], expected)
    by_masks = decoder(x, memory, masks.padding(lengths, 6), masks.padding(source_lengths, 9))
    torch.testing.assert_close(by_masks[1, :4], expected)


def test_weights_of_both_attentions_come_where_asked() -> None:
    decoder = block()
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    output, self_weights, cross_weights = decoder(x, memory, need_weights=True)
    torch.testing.assert_close(output, decoder(x, memory))
    assert self_weights.shape == (2, 4, 6, 6) and cross_weights.shape == (2, 4, 6, 9)
    assert self_weights.triu(1).abs().max() == 0
    for weights in (self_weights, cross_weights):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    stack = TransformerDecoder(3, 16, 4, 32, 0.0, norm_first=True).eval()
    output, weights = stack(x, memory, need_weights=True)
    torch.testing.assert_close(output, stack(x, memory))
    assert [(a.shape, b.shape) for a, b in weights] == [((2, 4, 6, 6), (2, 4, 6, 9))] * 3


@pytest.mark.parametrize("norm_first", [False, True])
def test_training_and_evaluation_with_and_without_grad_agree(norm_first: bool) -> None:
    stack = TransformerDecoder(2, 16, 4, 32, 0.0, norm_first=norm_first, activation="swiglu")
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    lengths = torch.tensor([9, 2])

    def run() -> Tensor:
        return stack(x, memory, encoder_lengths=lengths).detach().clone()

    expected = run()
    for training in (True, False):
        stack.train(training)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                torch.testing.assert_close(run(), expected, rtol=0, atol=1e-6)


def test_dropout_acts_in_training_on_every_part() -> None:
    """With a dropout of 1 nothing is added: what is left is x through the norms."""
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    decoder = TransformerDecoderBlock(16, 4, 32, 1.0, norm_first=True).train()
    torch.testing.assert_close(decoder(x, memory), x)
    decoder = TransformerDecoderBlock(16, 4, 32, 1.0)
    torch.testing.assert_close(decoder(x, memory), decoder.norm3(decoder.norm2(decoder.norm1(x))))
    inner = TransformerDecoderBlock(
        16, 4, 32, 0.0, ffn_dropout=1.0, norm_first=True, activation="geglu", bias=False
    )
    with torch.no_grad():
        inner.ffn.w_down.weight.fill_(1.0)
    assert not torch.equal(inner.eval()(x, memory), inner.train()(x, memory))


def test_copies_and_pickles_are_equal_and_independent() -> None:
    stack = TransformerDecoder(2, 16, 4, 32, 0.0).eval()
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    expected = stack(x, memory)
    for twin in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        torch.testing.assert_close(twin(x, memory), expected, rtol=0, atol=0)
        with torch.no_grad():
            next(twin.parameters()).zero_()
    torch.testing.assert_close(stack(x, memory), expected, rtol=0, atol=0)


def test_what_does_not_fit_is_refused_with_its_shapes() -> None:
    decoder = block()
    with pytest.raises(ValueError, match=r"k \(B, Lk, 16\).*got .*k \(2, 9, 15\)"):
        decoder(torch.randn(2, 6, 16), torch.randn(2, 9, 15))
    with pytest.raises(ValueError, match=r"got q \(2, 6, 16\), k \(3, 9, 16\)"):
        decoder(torch.randn(2, 6, 16), torch.randn(3, 9, 16))
    with pytest.raises(TypeError, match="bool"):
        decoder(torch.randn(2, 6, 16), torch.randn(2, 9, 16), torch.ones(6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        TransformerDecoder(0, 16, 4, 32)
    with pytest.raises(ValueError, match="norm must be 'layer' or 'rms', got 'batch'"):
        TransformerDecoderBlock(16, 4, 32, norm="batch")
