"""The toy classifier: its data, that it fails as tutorials set it, that it learns when balanced."""

from __future__ import annotations

import math

import pytest
import torch

from attn_ext.teach import classifier
from attn_ext.teach.classifier import Score, wilson_interval


def test_the_label_says_whether_both_targets_occur() -> None:
    tokens = torch.tensor([[1, 3, 2, 7], [7, 7, 3, 3], [3, 3, 3, 1], [7, 1, 2, 4], [1, 2, 4, 5]])
    assert classifier.label(tokens).tolist() == [1, 1, 0, 0, 0]


def test_uniform_sentences_are_mostly_negative() -> None:
    tokens, labels = classifier.draw_uniform(20_000)
    assert tokens.shape == (20_000, 8) and tokens.min() == 1 and tokens.max() == 19
    assert torch.equal(labels, classifier.label(tokens))
    # Inclusion and exclusion: neither 3 nor 7 may be missing.
    expected = 1 - 2 * (18 / 19) ** 8 + (17 / 19) ** 8
    assert abs(labels.float().mean().item() - expected) < 5 * math.sqrt(expected * (1 - expected) / 20_000)


@pytest.mark.parametrize("samples", [0, 1, 2, 200, 3001])
def test_balanced_sentences_are_half_and_half_and_shuffled(samples: int) -> None:
    tokens, labels = classifier.draw_balanced(samples, torch.Generator().manual_seed(1))
    assert tokens.shape == (samples, 8) and torch.equal(labels, classifier.label(tokens))
    assert int(labels.sum()) == samples - samples // 2
    if samples >= 200:
        assert 0.3 < labels[: samples // 2].float().mean() < 0.7


def test_wilson_interval_has_the_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    for correct, samples, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(correct, samples) == pytest.approx((low, high), abs=5e-5)
    for correct, samples in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="is no proportion"):
            wilson_interval(correct, samples)


def test_a_score_knows_its_baseline() -> None:
    score = Score(samples=50, correct=43, positive=7)
    assert score.accuracy == score.baseline == 0.86 and score.interval[0] < 0.86 < score.interval[1]
    assert Score(10, 9, 8).baseline == 0.8


def test_as_tutorials_set_it_nothing_is_learned(one_thread: None) -> None:
    run = classifier.train_unbalanced()
    assert run.seed == 42 and [epoch.epoch for epoch in run.log] == [1, 10, 20, 30, 40, 50]
    assert (run.log[-1].train.positive, run.log[-1].validation.positive) == (16, 7)
    for epoch in run.log[1:]:
        assert epoch.train.accuracy == epoch.train.baseline == 0.92
        assert epoch.validation.accuracy == epoch.validation.baseline == 0.86
    assert run.log[1].loss == pytest.approx(0.34, abs=0.01) and 0.2 < run.log[-1].loss < 0.27
    assert not run.learned


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_balanced_it_learns(seed: int, one_thread: None) -> None:
    steps: list[int] = []
    before = torch.get_rng_state()
    model, run = classifier.train_balanced(seed, on_epoch=steps.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(run.losses) == sum(steps) == 300 and not model.training
    assert run.losses[0] > 0.5 and run.losses[-1] < 0.05
    assert run.train.samples == 200 and run.train.accuracy >= 0.99 and run.train.baseline == 0.5
    assert run.held_out.samples == 1000 and run.held_out.baseline == 0.5
    assert run.held_out.accuracy >= 0.99
    assert run.held_out.interval[0] > 0.98


def test_a_seed_gives_the_same_run(one_thread: None) -> None:
    first, again, other = (classifier.train_balanced(seed, epochs=3)[1] for seed in (5, 5, 6))
    assert first == again and first.losses != other.losses
