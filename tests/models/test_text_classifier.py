"""The text classifier: its shapes, what padding may change (nothing), and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from attn_ext.models import TextClassifier, TinyTextClassifier
from attn_ext.nn import create_padding_mask
from attn_ext.reference import attention as reference_attention


@pytest.fixture
def model() -> TextClassifier:
    return TextClassifier(20, 16, 4, 32, num_classes=3, max_len=64).eval()


def in_plain_pytorch(model: TextClassifier, tokens: Tensor) -> Tensor:
    """The same forward pass with torch's own operators and the reference attention (post-norm, ReLU)."""
    x = model.embedding(tokens) + model.position.pe[:, : tokens.shape[1]]
    for block in model.encoder.layers:
        attend = block.self_attn
        q, k, v = (
            linear(x).unflatten(-1, (attend.h, attend.d_k)).transpose(1, 2)
            for linear in (attend.w_q, attend.w_k, attend.w_v)
        )
        attended = attend.w_o(reference_attention(q, k, v).transpose(1, 2).flatten(-2))
        x = block.norm1(x + attended)
        x = block.norm2(x + block.ffn[2](torch.relu(block.ffn[0](x))))
    return model.classify(x[:, 0])


def test_logits_are_those_of_plain_pytorch(model: TextClassifier) -> None:
    tokens = torch.randint(0, 20, (5, 9))
    logits = model(tokens)
    assert logits.shape == (5, 3)
    torch.testing.assert_close(logits, in_plain_pytorch(model, tokens))


def test_weights_come_on_demand_one_tensor_a_block(model: TextClassifier) -> None:
    tokens = torch.randint(0, 20, (2, 7))
    logits, weights = model(tokens, need_weights=True)
    torch.testing.assert_close(logits, model(tokens))
    assert [tuple(w.shape) for w in weights] == [(2, 4, 7, 7)] * 2
    for w in weights:
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 7))


def test_padding_on_either_side_changes_nothing(model: TextClassifier) -> None:
    sentence = torch.tensor([[5, 3, 9, 7, 1]])
    expected = model(sentence)
    for length in (5, 9, 64):
        for left in (False, True):
            padded = torch.zeros(1, length, dtype=torch.int64)
            padded[:, length - 5 :] = sentence if left else padded[:, length - 5 :]
            padded[:, :5] = padded[:, :5] if left else sentence
            for pad_value in (1e-10, 1e10):
                with torch.no_grad():
                    model.embedding.weight[0] = pad_value
                logits = model(padded, create_padding_mask(padded))
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_sequence_of_padding_alone_is_finite_and_leaves_the_others(model: TextClassifier) -> None:
    tokens = torch.tensor([[0, 0, 0], [4, 0, 0], [0, 0, 4]])
    logits = model(tokens, create_padding_mask(tokens))
    assert logits.isfinite().all()
    for row in (1, 2):
        torch.testing.assert_close(logits[row], model(torch.tensor([[4]]))[0], rtol=0, atol=1e-5)


def test_a_batch_of_one_and_a_sequence_of_one(model: TextClassifier) -> None:
    tokens = torch.randint(0, 20, (8, 6))
    assert model(tokens[:1]).shape == (1, 3) and model(tokens[:, :1]).shape == (8, 3)
    torch.testing.assert_close(model(tokens)[:1], model(tokens[:1]), rtol=0, atol=1e-5)


def test_any_mask_of_attention_is_taken(model: TextClassifier) -> None:
    tokens = torch.randint(0, 20, (2, 6))
    alone = torch.eye(6, dtype=torch.bool)  # nobody sees another: the first token decides by itself
    changed = tokens.clone()
    changed[:, 1:] = (changed[:, 1:] + 1) % 20
    torch.testing.assert_close(model(tokens, alone), model(changed, alone))
    assert not torch.allclose(model(tokens), model(changed))


def test_every_parameter_gets_a_gradient(model: TextClassifier) -> None:
    model.train()
    nn.functional.cross_entropy(model(torch.randint(0, 20, (4, 6))), torch.tensor([0, 1, 2, 0])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_copies_are_independent_models(model: TextClassifier) -> None:
    tokens = torch.randint(0, 20, (2, 6))
    expected = model(tokens)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), TextClassifier(**model.config)):
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin.eval()(tokens), expected) and twin.config == model.config
        nn.init.zeros_(twin.classify.weight)
    assert torch.equal(model(tokens), expected)


def test_the_tutorials_name_is_the_same_class() -> None:
    model = TinyTextClassifier(
        vocab_size=20, d_model=16, h=4, d_ff=32, num_layers=2, num_classes=2, max_len=32
    )
    assert isinstance(model, TextClassifier) and model(torch.ones(1, 32, dtype=torch.int64)).shape == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        (torch.zeros(2, 65, dtype=torch.int64), ValueError, r"max_len = 64, got \(2, 65\)"),
        (torch.zeros(2, 0, dtype=torch.int64), ValueError, r"L from 1 .* got \(2, 0\)"),
        (torch.zeros(5, dtype=torch.int64), ValueError, r"got \(5,\)"),
        (torch.zeros(2, 5), TypeError, "integer ids, got torch.float32"),
        (torch.ones(2, 5, dtype=torch.bool), TypeError, "integer ids, got torch.bool"),
    ],
)
def test_bad_tokens_are_refused(
    model: TextClassifier, tokens: Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model(tokens)


def test_bad_sizes_are_refused() -> None:
    for sizes in (
        {"vocab_size": 0},
        {"num_classes": 0},
        {"h": 3},
        {"d_ff": 0},
        {"num_layers": 0},
        {"max_len": 0},
    ):
        with pytest.raises(ValueError):
            TextClassifier(**{"vocab_size": 20, "d_model": 16, "h": 4, "d_ff": 32, **sizes})
