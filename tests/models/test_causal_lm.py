"""CausalLM: causal, padded, positioned; it learns; its config builds it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_ext import masks
from attn_ext.models import CausalLM, load, save

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {"positions": "learned", "activation": "gelu_tanh", "norm": "layer", "bias": True},
    "untied": {"tie_embeddings": False, "rotary_base": 500.0},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def model(layout: str, **options: Any) -> CausalLM:
    torch.manual_seed(5)
    return CausalLM(30, 32, 4, 48, 2, max_len=16, **LAYOUTS[layout], **options).eval()


@each_layout
def test_logits_depend_on_no_later_token(layout: str) -> None:
    lm = model(layout)
    tokens = torch.randint(30, (2, 9))
    logits = lm(tokens)
    assert logits.shape == (2, 9, 30)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 30
    torch.testing.assert_close(lm(changed)[:, :5], logits[:, :5])
    assert (lm(changed)[:, 5:] - logits[:, 5:]).abs().max() > 1e-3
    swapped = tokens[:, [1, 0, *range(2, 9)]]
    assert (lm(swapped)[:, -1] - logits[:, -1]).abs().max() > 1e-5  # positions matter


@each_layout
def test_padding_on_either_side_moves_nothing(layout: str) -> None:
    lm = model(layout)
    tokens = torch.randint(30, (1, 5))
    alone = lm(tokens)
    right = torch.cat([tokens, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    torch.testing.assert_close(lm(right, key_lengths=torch.tensor([5]))[:, :5], alone)
    left = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    real = torch.tensor([[False] * 3 + [True] * 5])[:, None, None]
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(lm(left, real, positions=positions)[:, 3:], alone)


@each_layout
def test_config_and_file_build_the_same_model_again(layout: str, tmp_path: Path) -> None:
    lm = model(layout, dropout=0.25)
    twin = CausalLM(**lm.config).eval()
    twin.load_state_dict(lm.state_dict())
    tokens = torch.randint(30, (2, 7))
    torch.testing.assert_close(twin(tokens), lm(tokens), rtol=0, atol=0)
    save(lm, tmp_path / "lm.safetensors")
    assert torch.equal(load(tmp_path / "lm.safetensors")(tokens), lm(tokens))
    tied = LAYOUTS[layout].get("tie_embeddings", True)
    assert (twin.output.weight is twin.embedding.weight) == tied


def test_weights_come_where_asked() -> None:
    lm = model("llama")
    tokens = torch.randint(30, (2, 7))
    logits, weights = lm(tokens, need_weights=True)
    torch.testing.assert_close(logits, lm(tokens))
    assert [w.shape for w in weights] == [(2, 4, 7, 7)] * 2
    assert all(w.triu(1).abs().max() == 0 for w in weights)


def test_an_untrained_model_predicts_about_uniformly() -> None:
    tokens = torch.randint(30, (8, 16))
    loss = F.cross_entropy(model("llama")(tokens).flatten(0, 1), torch.randint(30, (8 * 16,)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(30.0)).item(), abs=0.1)


@each_layout
def test_it_learns_to_copy_what_it_saw(layout: str, one_thread: None) -> None:
    """Second halves repeat the first ones: only attention to a fixed distance can predict them."""
    torch.manual_seed(5)
    options = LAYOUTS[layout] | {"tie_embeddings": False}  # tied ones need ten times the steps at this size
    lm = CausalLM(12, 32, 4, 48, 2, max_len=16, **options).train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)

    def batch() -> torch.Tensor:
        half = torch.randint(12, (64, 6), generator=generator)
        return torch.cat([half, half], dim=1)

    for _ in range(150):
        tokens = batch()
        loss = F.cross_entropy(lm(tokens)[:, 5:-1].flatten(0, 1), tokens[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = batch()
    accuracy = (lm.eval()(tokens)[:, 5:-1].argmax(-1) == tokens[:, 6:]).float().mean().item()
    assert accuracy > 0.9, f"accuracy {accuracy}, chance is 0.08"


def test_what_does_not_fit_is_refused() -> None:
    lm = model("gpt2")
    with pytest.raises(ValueError, match=r"expected tokens \(B, at most 16\), got \(2, 17\)"):
        lm(torch.zeros(2, 17, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected tokens \(B, at most 16\), got \(5,\)"):
        lm(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected positions \(7,\) or \(2, 7\), got \(3,\)"):
        lm(torch.zeros(2, 7, dtype=torch.long), positions=torch.arange(3))
    with pytest.raises(TypeError, match="bool"):
        lm(torch.zeros(2, 7, dtype=torch.long), torch.ones(7, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="positions must be one of rotary, learned, got 'none'"):
        CausalLM(30, 32, 4, 48, 2, positions="none")
    with pytest.raises(ValueError, match="d_model = 30 cannot be split into h = 4"):
        CausalLM(30, 30, 4, 48, 2)
    with pytest.raises(ValueError, match="vocab_size and max_len must be at least 1, got 0 and 1024"):
        CausalLM(0, 32, 4, 48, 2)
    assert masks.causal(3).dtype == torch.bool
