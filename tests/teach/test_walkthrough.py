"""Attention by hand: the true numbers of the tutorial, and the kernel beside them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attn_ext import reference
from attn_ext.teach import walkthrough
from attn_ext.teach.walkthrough import Walk, attend, walk_through


@pytest.fixture(scope="module")
def walk() -> Walk:
    return walk_through()


def test_the_numbers_are_those_that_the_tutorials_code_gives(walk: Walk) -> None:
    close = {"rtol": 0, "atol": 5e-9}
    np.testing.assert_allclose(walk.X[0], [0.49671415, -0.1382643, 0.64768854, 1.52302986], **close)
    np.testing.assert_allclose(walk.plain.scores[0, :3], [-1.49844942, -3.92493737, 1.43255654], **close)
    assert walk.plain.scores.min() == pytest.approx(-17.447803, abs=5e-7)
    assert walk.plain.scores.max() == pytest.approx(14.764287, abs=5e-7)
    weights = [0.04115936, 0.01223386, 0.17820851, 0.16625512, 0.21927912, 0.14523322, 0.23763083]
    np.testing.assert_allclose(walk.plain.weights[0], weights, **close)
    output = [-0.32255094, -0.5214015, 1.30288417, -1.6175941]
    np.testing.assert_allclose(walk.plain.output[0], output, **close)


def test_drawing_leaves_numpys_random_state() -> None:
    np.random.seed(3)
    expected = np.random.randn(2)
    np.random.seed(3)
    walk_through()
    assert np.array_equal(np.random.randn(2), expected)


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_every_example_is_what_the_reference_computes(seed: int) -> None:
    walk = walk_through(seed)
    for steps, mask in (
        (walk.plain, None),
        (walk.heads, None),
        (walk.causal, walk.causal_mask),
        (walk.padding, walk.padding_mask),
    ):
        output, weights = reference.attention_numpy(steps.Q, steps.K, steps.V, mask=mask, return_weights=True)
        np.testing.assert_allclose(steps.output, output, rtol=0, atol=1e-12)
        np.testing.assert_allclose(steps.weights, weights, rtol=0, atol=1e-12)
        np.testing.assert_allclose(steps.weights.sum(-1), 1.0, rtol=0, atol=1e-12)
    heads = np.concatenate(
        [
            attend(*(x[:, 2 * h : 2 * h + 2] for x in (walk.plain.Q, walk.plain.K, walk.plain.V))).output
            for h in (0, 1)
        ],
        axis=1,
    )
    np.testing.assert_allclose(walk.merged, heads, rtol=0, atol=1e-12)
    assert walk.ok


def test_masks_hide(walk: Walk) -> None:
    assert np.array_equal(walk.causal.weights, np.tril(walk.causal.weights))
    assert (walk.padding.weights[:, -2:] == 0).all() and (walk.padding.weights[:, :-2] > 0).all()


def test_huge_scores_do_not_overflow() -> None:
    Q = np.full((2, 4), 1e4)
    assert np.isfinite(attend(Q, Q, Q).output).all()


def test_a_wrong_kernel_is_seen(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {(d.example, d.dtype) for d in walk.differences} == {
        (example, dtype)
        for example in ("plain", "heads", "causal", "padding")
        for dtype in ("float64", "float32")
    }
    right = walkthrough.attention

    def slightly_wrong(*args: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        output, weights = right(*args, **options)
        return output * 1.001, weights

    monkeypatch.setattr(walkthrough, "attention", slightly_wrong)
    wrong = walk_through()
    assert not wrong.ok and not any(difference.fine for difference in wrong.differences)
    for name in ("output", "weights"):
        assert not dataclasses.replace(walk.differences[0], **{name: float("nan")}).fine
