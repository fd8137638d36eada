"""Batches, the order that comes back, nearest neighbours, the comparison's bookkeeping; no weights needed."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch
from torch import Tensor

from attn_ext.embed import (
    MIN_COSINE,
    Comparison,
    PlainBert,
    TokenBatch,
    compare,
    comparison_work,
    embed_batches,
    make_batches,
    nearest,
    spread,
)
from attn_ext.models import MiniLM

SENTENCES = [[7] * n for n in (3, 9, 1, 9, 4, 2, 8)]


def counting_embedder(token_ids: Tensor, lengths: Tensor) -> Tensor:
    """A vector that tells length and sum of the ids, of norm 1."""
    real = torch.arange(token_ids.shape[1]) < lengths[:, None]
    vectors = torch.stack(
        [lengths.float(), (token_ids * real).sum(1).float(), torch.ones(len(lengths))], dim=1
    )
    return torch.nn.functional.normalize(vectors, dim=-1)


def test_batches_hold_every_sentence_once_longest_first() -> None:
    batches = make_batches(SENTENCES, 3)
    assert [len(batch.rows) for batch in batches] == [3, 3, 1]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(7))
    assert [batch.lengths.tolist() for batch in batches] == [[9, 9, 8], [4, 3, 2], [1]]
    for batch in batches:
        assert batch.token_ids.shape == (len(batch.rows), int(batch.lengths.max()))
        for row, ids, length in zip(batch.rows, batch.token_ids, batch.lengths.tolist(), strict=True):
            assert ids[:length].tolist() == SENTENCES[row]
            assert not ids[length:].any()


def test_padding_counts_positions_past_the_lengths() -> None:
    assert [batch.padding for batch in make_batches(SENTENCES, 3)] == [1, 3, 0]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_vectors_come_back_in_the_order_of_the_sentences(batch_size: int) -> None:
    told: list[int] = []
    vectors = embed_batches(counting_embedder, make_batches(SENTENCES, batch_size), told.append)
    lengths = torch.tensor([len(ids) for ids in SENTENCES])
    ids = torch.full((7, 9), 7)
    torch.testing.assert_close(vectors, counting_embedder(ids, lengths))
    assert sum(told) == 7


def test_nearest_is_best_first_and_never_more_than_there_are() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    assert nearest(rows, torch.tensor([0.0, 1.0]), 2) == [(1, 1.0), (2, pytest.approx(0.8))]
    assert [row for row, _ in nearest(rows, torch.tensor([1.0, 0.0]), 9)] == [0, 2, 1]


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (0, [3]),
        (1, [3]),
        (2, [1, 5]),
        (3, [1, 3, 5]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (99, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_spread_takes_the_middles_of_equal_parts(count: int, rows: list[int]) -> None:
    batches = [TokenBatch([row], torch.zeros(1, 1), torch.ones(1)) for row in range(7)]
    assert [batch.rows[0] for batch in spread(batches, count)] == rows


def run(plain: object, embeddings: Tensor | None = None, **options: int) -> tuple[Comparison, int]:
    batches = make_batches(SENTENCES, 3)
    if embeddings is None:
        embeddings = embed_batches(counting_embedder, batches)
    told: list[int] = []
    found = compare(
        cast(MiniLM, counting_embedder),
        cast(PlainBert, plain),
        batches,
        embeddings,
        on_batch=told.append,
        **options,
    )
    return found, sum(told)


def test_equal_embedders_agree_and_progress_ends_at_the_announced_work() -> None:
    for options in ({}, {"rounds": 2, "timed_sentences": 1, "alone": 4}):
        found, told = run(counting_embedder, **options)
        assert found.agrees and found.min_cosine == pytest.approx(1) == found.min_cosine_alone
        assert found.sentences == 7 and found.alone == options.get("alone", 7)
        assert told == comparison_work(make_batches(SENTENCES, 3), **options)
        assert 0 < found.torch.slowest <= found.torch.median <= found.torch.fastest
        assert found.ratio == found.ours.median / found.torch.median


def test_one_sentence_that_differs_is_seen() -> None:
    def differs_for_one(token_ids: Tensor, lengths: Tensor) -> Tensor:
        vectors = counting_embedder(token_ids, lengths)
        return torch.where((lengths == 4)[:, None], vectors.roll(1, dims=1), vectors)

    found, _ = run(differs_for_one)
    assert found.min_cosine < MIN_COSINE <= found.min_cosine_alone and not found.agrees
    (right,) = counting_embedder(torch.tensor([SENTENCES[4]]), torch.tensor([4])).double()
    assert found.min_cosine == pytest.approx(float(right @ right.roll(1)), abs=1e-6)  # the worst, no average


def test_a_vector_that_depends_on_its_company_is_seen() -> None:
    embeddings = embed_batches(counting_embedder, make_batches(SENTENCES, 3))
    embeddings[2] = embeddings[2].roll(1)

    def same_wrong(token_ids: Tensor, lengths: Tensor) -> Tensor:
        vectors = counting_embedder(token_ids, lengths)
        return torch.where((lengths == 1)[:, None], vectors.roll(1, dims=1), vectors)

    found, _ = run(same_wrong, embeddings)
    assert found.min_cosine >= MIN_COSINE > found.min_cosine_alone and not found.agrees


def test_nan_never_agrees() -> None:
    found, _ = run(counting_embedder)
    assert not dataclasses.replace(found, min_cosine=float("nan")).agrees
    assert not dataclasses.replace(found, min_cosine_alone=float("nan")).agrees
    nan, _ = run(lambda token_ids, lengths: counting_embedder(token_ids, lengths) * float("nan"))
    assert not nan.agrees
