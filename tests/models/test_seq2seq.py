"""Seq2SeqTransformer: what hides what; it learns; its config builds it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attn_ext.models import Seq2SeqTransformer, load, save


def model(**options: object) -> Seq2SeqTransformer:
    torch.manual_seed(5)
    return Seq2SeqTransformer(20, 25, 32, 4, 48, **options).eval()  # type: ignore[arg-type]


def test_padding_of_the_source_and_later_targets_move_nothing() -> None:
    translate = model()
    source, target = torch.randint(1, 20, (2, 9)), torch.randint(1, 25, (2, 6))
    source[1, 5:] = 0
    logits = translate(source, target)
    assert logits.shape == (2, 6, 25)
    torch.testing.assert_close(translate(source[1:, :5], target[1:])[0], logits[1])
    torch.testing.assert_close(translate(source, target[:, :3]), logits[:, :3])
    padded = target.clone()
    padded[1, 4:] = 0
    torch.testing.assert_close(translate(source, padded)[1, :4], logits[1, :4])
    assert (translate(source.flip(1), target) - logits).abs().max() > 1e-3


def test_forward_is_encode_then_decode() -> None:
    translate = model()
    source, target = torch.randint(1, 20, (2, 9)), torch.randint(1, 25, (2, 6))
    encoded = translate.encode(source)
    assert encoded.shape == (2, 9, 32)
    torch.testing.assert_close(translate.decode(target, encoded), translate(source, target))


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False, "norm_first": False, "activation": "gelu"}]
)
def test_config_and_file_build_the_same_model_again(options: dict[str, object], tmp_path: Path) -> None:
    translate = model(**options)
    twin = Seq2SeqTransformer(**translate.config).eval()
    twin.load_state_dict(translate.state_dict())
    source, target = torch.randint(1, 20, (2, 9)), torch.randint(1, 25, (2, 6))
    assert torch.equal(twin(source, target), translate(source, target))
    save(translate, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path / "model.safetensors")(source, target), translate(source, target))


def test_it_learns_to_reverse(one_thread: None) -> None:
    translate = model(dropout=0.0).train()
    optimizer = torch.optim.AdamW(translate.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.randint(2, 20, (size, 6), generator=generator)
        start = torch.ones(size, 1, dtype=torch.long)
        return source, torch.cat([start, source.flip(1)], dim=1)

    for _ in range(250):
        source, target = batch(64)
        loss = F.cross_entropy(translate(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source, target = batch(64)
    guess = translate.eval()(source, target[:, :-1]).argmax(-1)
    accuracy = (guess == target[:, 1:]).float().mean().item()
    assert accuracy > 0.9, f"accuracy {accuracy}, chance is 0.06"


def test_what_does_not_fit_is_refused() -> None:
    translate = model(max_len=8)
    tokens = torch.ones(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match=r"expected source tokens \(B, at most 8\), got \(2, 9\)"):
        translate(tokens, tokens[:, :3])
    with pytest.raises(ValueError, match=r"expected target tokens \(B, at most 8\), got \(2, 9\)"):
        translate(tokens[:, :3], tokens)
    with pytest.raises(ValueError, match=r"got q \(2, 3, 32\), k \(1, 4, 32\)"):
        translate.decode(tokens[:, :3], translate.encode(tokens[:1, :4]))
    with pytest.raises(
        ValueError, match=r"pad_idx must be a token of both vocabularies \(20 and 25 tokens\), got 22"
    ):
        model(pad_idx=22)
