"""Batches of similar length, embeddings, nearest neighbours. N sentences, B of them in a batch, L tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: A model that turns (B, L) int64 token ids and (B,) int64 lengths into (B, features) unit vectors.
Embedder = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TokenBatch:
    """A padded batch. `rows` says which sentence of the whole each row is."""

    rows: list[int]
    token_ids: Tensor  # (B, L) int64, 0 past a sentence's length
    lengths: Tensor  # (B,) int64

    @property
    def padding(self) -> int:
        """How many of the B·L positions are padding."""
        return self.token_ids.numel() - int(self.lengths.sum())


def make_batches(sentences: Sequence[Sequence[int]], batch_size: int) -> list[TokenBatch]:
    """Sort token lists by length, longest first, and pad `batch_size` at a time to the longest of them.

    Sorted, they need little padding; longest first, the memory peak and the slowest batch come at the start,
    where a progress bar's estimate errs on the safe side.
    """
    order = sorted(range(len(sentences)), key=lambda row: -len(sentences[row]))
    batches = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = torch.tensor([len(sentences[row]) for row in rows])
        token_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            token_ids[i, : lengths[i]] = torch.tensor(sentences[row])
        batches.append(TokenBatch(rows, token_ids, lengths))
    return batches


def embed_batches(
    embedder: Embedder,
    batches: Iterable[TokenBatch],
    on_batch: Callable[[int], None] = lambda sentences: None,
) -> Tensor:
    """Run every batch and put the vectors back into the order of the sentences.

    `on_batch` is told how many sentences each finished batch held. Returns (N, features), without gradients.
    """
    vectors: dict[int, Tensor] = {}
    with torch.no_grad():
        for batch in batches:
            vectors.update(zip(batch.rows, embedder(batch.token_ids, batch.lengths), strict=True))
            on_batch(len(batch.rows))
        return torch.stack([vectors[row] for row in sorted(vectors)])


def nearest(embeddings: Tensor, query: Tensor, top: int) -> list[tuple[int, float]]:
    """The `top` rows of `embeddings` (N, features) closest to `query` (features,), best first, with cosines.

    All vectors are of norm 1, so the cosine is their product.
    """
    cosines = embeddings @ query
    best = torch.topk(cosines, min(top, len(cosines)))
    return [(int(row), float(cosine)) for row, cosine in zip(best.indices, best.values, strict=True)]
