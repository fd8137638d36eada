"""What the two tutorials behind this package do, with their names imported from here: it has to run and be right.

The first does attention by hand in NumPy. The second builds the modules in PyTorch, tests them, trains a toy
classifier, draws a heat map, and ends with five exercises for the reader.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attn_ext
from attn_ext.models import TinyTextClassifier
from attn_ext.nn import (
    MultiHeadAttention,
    PositionalEncoding,
    ScaledDotProductAttention,
    TransformerEncoderBlock,
    build_causal_mask,
    create_padding_mask,
    stable_softmax,
)

# ---------------------------------------------------------------------- the first: by hand in NumPy


def test_attention_by_hand_and_by_the_kernel() -> None:
    np.random.seed(42)
    X = np.random.randn(7, 4)
    W_Q, W_K, W_V = np.random.randn(4, 4), np.random.randn(4, 4), np.random.randn(4, 4)
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    scores = Q @ K.T
    scaled = scores / np.sqrt(4)
    exponentials = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=1, keepdims=True)
    output = weights @ V

    close = {"rtol": 0, "atol": 5e-9}
    np.testing.assert_allclose(X[0], [0.49671415, -0.1382643, 0.64768854, 1.52302986], **close)
    np.testing.assert_allclose(scores[0, :3], [-1.49844942, -3.92493737, 1.43255654], **close)
    first_weights = [0.04115936, 0.01223386, 0.17820851, 0.16625512, 0.21927912, 0.14523322, 0.23763083]
    np.testing.assert_allclose(weights[0], first_weights, **close)
    np.testing.assert_allclose(output[0], [-0.32255094, -0.5214015, 1.30288417, -1.6175941], **close)
    assert Q.shape == K.shape == V.shape == output.shape == X.shape and weights.shape == (7, 7)

    ours, our_weights = attn_ext.attention(
        *(torch.from_numpy(x)[None] for x in (Q, K, V)), return_weights=True
    )
    np.testing.assert_allclose(ours[0].numpy(), output, rtol=0, atol=1e-13)
    np.testing.assert_allclose(our_weights[0].numpy(), weights, rtol=0, atol=1e-13)


# ---------------------------------------------------------------------- the second: modules and their tests


def test_scaled_dot_product_attention_has_the_tutorials_shapes() -> None:
    x = torch.randn(2, 4, 8)
    attend = ScaledDotProductAttention(d_k=8)  # in train mode, dropout 0.1
    for _ in range(20):
        output, weights = attend(x, x, x)
        assert output.shape == (2, 4, 8) and weights.shape == (2, 4, 4)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4))


def test_multi_head_attention_has_the_tutorials_shapes() -> None:
    x = torch.randn(2, 6, 12)
    attend = MultiHeadAttention(d_model=12, h=4)
    output, weights = attend(x, x, x)
    assert output.shape == (2, 6, 12) and weights.shape == (2, 4, 6, 6)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 6))
    assert {name for name, _ in attend.named_children()} == {"w_q", "w_k", "w_v", "w_o"}
    assert all(tuple(linear.weight.shape) == (12, 12) for linear in attend.children())


def test_cross_attention_takes_another_length() -> None:
    attend = MultiHeadAttention(d_model=12, h=4)
    output, weights = attend(torch.randn(2, 6, 12), *[torch.randn(2, 9, 12)] * 2)
    assert output.shape == (2, 6, 12) and weights.shape == (2, 4, 6, 9)


def test_positional_encoding_is_a_buffer_that_is_added() -> None:
    encode = PositionalEncoding(d_model=16, max_len=50)
    assert encode.pe.shape == (1, 50, 16) and not list(encode.parameters())
    x = torch.randn(2, 10, 16)
    torch.testing.assert_close(encode(x), x + encode.pe[:, :10])


def test_masks_show_what_may_be_seen() -> None:
    assert build_causal_mask(4).dtype == torch.bool
    assert torch.equal(build_causal_mask(4), torch.tril(torch.ones(4, 4)).bool())
    seq = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 4]])
    mask = create_padding_mask(seq, pad_idx=0)
    assert mask.shape == (2, 1, 1, 4) and mask[0, 0, 0].tolist() == [True, True, False, False]
    assert mask[1].all()


def test_hidden_keys_get_no_weight() -> None:
    attend = ScaledDotProductAttention(d_k=8).eval()
    x = torch.randn(2, 4, 8)
    _, weights = attend(x, x, x, mask=build_causal_mask(4))
    assert torch.equal(weights, weights.tril()) and bool((weights.diagonal(dim1=-2, dim2=-1) > 0).all())
    seq = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 4]])
    _, weights = attend(x, x, x, mask=create_padding_mask(seq))
    assert bool((weights[0, :, 2:] == 0).all()) and bool((weights[1] > 0).all())


def test_stable_softmax_neither_overflows_nor_divides_by_zero() -> None:
    scores = torch.tensor([[1000.0, 1000.0, -1000.0]])
    assert stable_softmax(scores).tolist() == [[0.5, 0.5, 0.0]]
    hidden = torch.tensor([[False, False, False]])
    assert stable_softmax(scores, hidden).tolist() == [[0.0, 0.0, 0.0]]
    only = torch.tensor([[True, False, True]])
    torch.testing.assert_close(stable_softmax(torch.zeros(1, 3), only), torch.tensor([[0.5, 0.0, 0.5]]))


def test_an_encoder_block_keeps_the_shape() -> None:
    block = TransformerEncoderBlock(d_model=16, h=4, d_ff=32, dropout=0.1)
    x = torch.randn(2, 8, 16)
    assert (
        block(x).shape == x.shape and block(x, create_padding_mask(torch.ones(2, 8).long())).shape == x.shape
    )
    assert isinstance(block.norm1, nn.LayerNorm) and isinstance(block.ffn[1], nn.ReLU)
    normed = block.eval()(x)  # post-norm: each token leaves with mean 0 and variance 1
    torch.testing.assert_close(normed.mean(-1), torch.zeros(2, 8), rtol=0, atol=1e-5)


def test_a_decoder_block_sees_no_future_and_all_of_the_source() -> None:
    from attn_ext.nn import TransformerDecoderBlock

    block = TransformerDecoderBlock(d_model=16, h=4, d_ff=32, dropout=0.1).eval()
    x, encoder_output = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    source = torch.tensor([[4, 5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    masks = (build_causal_mask(6), create_padding_mask(source))
    output = block(x, encoder_output, causal_mask=masks[0], padding_mask=masks[1])
    assert output.shape == x.shape

    changed = x.clone()
    changed[:, 3:] = torch.randn(2, 3, 16)
    torch.testing.assert_close(block(changed, encoder_output, *masks)[:, :3], output[:, :3])
    block.causal = False  # without it and without a mask, the future is seen
    assert not torch.allclose(block(changed, encoder_output)[:, :3], block(x, encoder_output)[:, :3])
    torch.testing.assert_close(block(x, encoder_output, *masks), output)
    padding_changed, source_changed = encoder_output.clone(), encoder_output.clone()
    padding_changed[0, 6:] = 100.0
    source_changed[:, 0] += 1.0
    torch.testing.assert_close(block(x, padding_changed, *masks), output)
    assert not torch.allclose(block(x, source_changed, *masks)[0, 0], output[0, 0])


def test_the_training_loop_runs_and_stays_at_the_baseline_as_it_truly_does(one_thread: None) -> None:
    torch.manual_seed(42)

    def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(1, 20, (count, 8))
        return tokens, ((tokens == 3).any(dim=1) & (tokens == 7).any(dim=1)).long()

    tokens, labels = sentences(200)
    validation_tokens, validation_labels = sentences(50)
    model = TinyTextClassifier(
        vocab_size=20, d_model=16, h=4, d_ff=32, num_layers=2, num_classes=2, max_len=32
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(50):
        model.train()
        loss = nn.CrossEntropyLoss()(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 < 0.5 < losses[0]
    with torch.no_grad():
        train = (model(tokens).argmax(dim=1) == labels).float().mean()
        validation = (model(validation_tokens).argmax(dim=1) == validation_labels).float().mean()
    assert train.item() == pytest.approx(0.92) == 1 - labels.float().mean().item()
    assert validation.item() == pytest.approx(0.86) == 1 - validation_labels.float().mean().item()


def test_the_heat_map_of_one_block_and_head(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from attn_ext.teach.heatmap import collect_weights, draw, panels, save_figure

    model = TinyTextClassifier(vocab_size=20, d_model=16, h=4, d_ff=32)
    tokens = torch.tensor([[5, 3, 9, 7, 1, 2, 4, 6]])
    weights = collect_weights(model, tokens)
    grid = panels(list(weights.values()), blocks=[0], heads=[0])
    assert grid[0][0].weights.shape == (8, 8)
    save_figure(draw(grid, query_labels=[str(t) for t in tokens[0].tolist()]), tmp_path / "attention.png")
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- its exercises for the reader


def test_the_same_as_pytorchs_own_function() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    attend = ScaledDotProductAttention(d_k=8, dropout=0.0)
    torch.testing.assert_close(attend(q, k, v)[0], F.scaled_dot_product_attention(q, k, v))
    torch.testing.assert_close(
        attend(q, k, v, build_causal_mask(6))[0], F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_padding_and_causal_masks_in_one_batch() -> None:
    seq = torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    mask = create_padding_mask(seq) & build_causal_mask(5)
    assert mask.shape == (2, 1, 5, 5)
    attend = MultiHeadAttention(d_model=12, h=4).eval()
    x = torch.randn(2, 5, 12)
    output, weights = attend(x, x, x, mask)
    assert torch.equal(weights, weights.tril()) and bool((weights[0, ..., 3:] == 0).all())
    alone, _ = attend(x[:1, :3], x[:1, :3], x[:1, :3], build_causal_mask(3))
    torch.testing.assert_close(output[:1, :3], alone)
