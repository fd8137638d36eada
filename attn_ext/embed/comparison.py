"""The same weights in plain PyTorch: do the vectors agree, and which is faster?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.minilm import MiniLM, MiniLMConfig, read_weights
from .encode import Embedder, TokenBatch, embed_batches

#: Two vectors of one sentence agree if their cosine is at least this.
MIN_COSINE = 0.9999


class PlainBert:
    """MiniLM's forward in torch.nn.functional alone, with `F.scaled_dot_product_attention`.

    It shares no code with `MiniLM`, not even the mapping of the weights' names: it reads the published file
    itself.
    """

    def __init__(self, folder: str | Path) -> None:
        self.config = MiniLMConfig.from_folder(Path(folder))
        self.weights = read_weights(folder)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config.norm_eps)

    def __call__(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """(B, L) int64 token ids and (B,) int64 lengths to (B, hidden_size) unit vectors."""
        B, L = token_ids.shape
        real = torch.arange(L) < lengths[:, None]  # (B, L)
        mask = None if bool(real.all()) else real[:, None, None, :]  # no mask is torch's faster path
        x = F.embedding(token_ids, self.weights["embeddings.word_embeddings.weight"])
        x = x + self.weights["embeddings.position_embeddings.weight"][:L]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.config.num_layers):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(x, f"{at}.attention.self.{name}")
                .view(B, L, self.config.num_heads, -1)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, L, -1)
            x = self._norm(
                x + self._linear(out, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
            )
            out = self._linear(F.gelu(self._linear(x, f"{at}.intermediate.dense")), f"{at}.output.dense")
            x = self._norm(x + out, f"{at}.output.LayerNorm")
        kept = real[..., None].to(x.dtype)
        return F.normalize((x * kept).sum(dim=1) / kept.sum(dim=1), dim=-1)


@dataclass(frozen=True)
class Rate:
    """Sentences a second over several runs of the same batches."""

    median: float
    slowest: float
    fastest: float


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    sentences: int  # compared with the plain run
    min_cosine: float  # of our vector with the plain run's, the worst sentence
    alone: int  # sentences that were also embedded alone
    min_cosine_alone: float  # of a sentence's vector alone with the one from its padded batch, the worst
    timed_sentences: int
    rounds: int
    ours: Rate
    torch: Rate

    @property
    def ratio(self) -> float:
        """How many times as many sentences a second as the plain run (medians)."""
        return self.ours.median / self.torch.median

    @property
    def agrees(self) -> bool:
        """Whether every cosine reaches MIN_COSINE. A NaN does not."""
        return self.min_cosine >= MIN_COSINE and self.min_cosine_alone >= MIN_COSINE


def compare(
    model: MiniLM,
    plain: PlainBert,
    batches: Sequence[TokenBatch],
    embeddings: Tensor,
    *,
    rounds: int = 5,
    timed_sentences: int = 96,
    alone: int = 16,
    on_batch: Callable[[int], None] = lambda sentences: None,
) -> Comparison:
    """Compare `embeddings`, which `model` made of `batches`, with the plain run, then time both.

    `batches` may be a part of those that `embeddings` were made of; all of their sentences are compared. For
    `alone` of them, of all lengths, the vector made without company is compared with the one from the padded
    batch as well. Timed are whole batches of all lengths, about `timed_sentences`, `rounds` times; within a
    round both run each batch in turn, and who begins alternates, so that a machine that slows down slows
    both. `on_batch` is told of progress in sentences (see `comparison_work`).
    """
    # embed_batches returns vectors in the order of their rows.
    rows = sorted(row for batch in batches for row in batch.rows)
    min_cosine = _min_cosine(embeddings[rows], embed_batches(plain, batches, on_batch))

    lone = spread([sentence for batch in batches for sentence in _one_by_one(batch)], alone)
    lone_rows = sorted(sentence.rows[0] for sentence in lone)
    min_cosine_alone = _min_cosine(embeddings[lone_rows], embed_batches(model, lone, on_batch))

    timed = _timed_batches(batches, timed_sentences)
    count = sum(len(batch.rows) for batch in timed)
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    with torch.no_grad():
        for round_ in range(rounds):
            spent = {"ours": 0.0, "torch": 0.0}
            for i, batch in enumerate(timed):
                pair: list[tuple[str, Embedder]] = [("ours", model), ("torch", plain)]
                for name, embedder in pair if (round_ + i) % 2 == 0 else reversed(pair):
                    start = time.perf_counter()
                    embedder(batch.token_ids, batch.lengths)
                    spent[name] += time.perf_counter() - start
                    on_batch(len(batch.rows))
            for name, value in spent.items():
                seconds[name].append(value)
    return Comparison(
        sentences=len(rows),
        min_cosine=min_cosine,
        alone=len(lone),
        min_cosine_alone=min_cosine_alone,
        timed_sentences=count,
        rounds=rounds,
        ours=_rate(count, seconds["ours"]),
        torch=_rate(count, seconds["torch"]),
    )


def comparison_work(
    batches: Sequence[TokenBatch], *, rounds: int = 5, timed_sentences: int = 96, alone: int = 16
) -> int:
    """How many sentences `compare` will report to `on_batch` in all."""
    timed = sum(len(batch.rows) for batch in _timed_batches(batches, timed_sentences))
    sentences = sum(len(batch.rows) for batch in batches)
    return sentences + min(alone, sentences) + 2 * rounds * timed


def _timed_batches(batches: Sequence[TokenBatch], sentences: int) -> list[TokenBatch]:
    return spread(batches, sentences // len(batches[0].rows))


def spread(batches: Sequence[TokenBatch], count: int) -> list[TokenBatch]:
    """`count` of `batches` (at least one, at most all): the middle of each of `count` equal parts."""
    count = max(1, min(count, len(batches)))
    return [batches[(2 * i + 1) * len(batches) // (2 * count)] for i in range(count)]


def _one_by_one(batch: TokenBatch) -> list[TokenBatch]:
    """Every sentence of a batch in a batch of its own, without padding."""
    return [
        TokenBatch([row], batch.token_ids[i : i + 1, : int(batch.lengths[i])], batch.lengths[i : i + 1])
        for i, row in enumerate(batch.rows)
    ]


def _min_cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double(), b.double(), dim=-1).min())


def _rate(sentences: int, seconds: list[float]) -> Rate:
    return Rate(sentences / statistics.median(seconds), sentences / max(seconds), sentences / min(seconds))
