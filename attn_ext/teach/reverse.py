"""The first task for an encoder with a decoder: write a word backwards.

Words are 4 to 12 letters, drawn uniformly, padded to one length. The decoder is trained with the right letters
before it (teacher forcing) and scored on words that training never saw, writing letter by letter what it finds most
likely. Nothing but attention to the place that mirrors its own can tell it which letter comes next.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import Seq2SeqTransformer
from .classifier import wilson_interval

__all__ = [
    "END",
    "PAD",
    "START",
    "VOCAB_SIZE",
    "ReverseRun",
    "draw_words",
    "exact_matches",
    "greedy",
    "new_model",
    "read_back",
    "reverse",
    "spell",
    "train",
]

PAD, START, END = range(3)
LETTERS = string.ascii_lowercase
VOCAB_SIZE = 3 + len(LETTERS)
SHORTEST, LONGEST = 4, 12
MAX_LEN = LONGEST + 1  # START and the word, or the word and END

_HELD_OUT = 1000
_BATCH = 64


@dataclass(frozen=True)
class ReverseRun:
    """What `train` saw."""

    seed: int
    losses: list[float]  # one a step, nats per token
    held_out: int  # words that were scored
    exact: int  # those that came out right from the first letter to the end

    @property
    def exact_match(self) -> float:
        return self.exact / self.held_out

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the exact match."""
        return wilson_interval(self.exact, self.held_out)


def draw_words(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Words of uniform letters and uniform length: (count, LONGEST) int64, padded on the right."""
    letters = torch.randint(3, VOCAB_SIZE, (count, LONGEST), generator=generator)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    return letters.masked_fill(torch.arange(LONGEST) >= lengths, PAD)


def reverse(words: Tensor) -> Tensor:
    """Each word backwards between START and END: (B, LONGEST) → (B, LONGEST + 2), padded on the right."""
    lengths = (words != PAD).sum(dim=1, keepdim=True)  # (B, 1)
    mirrored = (lengths - 1 - torch.arange(LONGEST)).clamp(min=0)  # the place each letter comes from
    backwards = words.gather(1, mirrored).masked_fill(torch.arange(LONGEST) >= lengths, PAD)
    target = F.pad(backwards, (1, 1), value=PAD)
    target[:, 0] = START
    return target.scatter(1, lengths + 1, END)


def spell(word: str) -> Tensor:
    """A word as tokens: (1, LONGEST).

    Raises:
        ValueError: other signs than a to z, or none or more than LONGEST of them.
    """
    if not 1 <= len(word) <= LONGEST or not set(word) <= set(LETTERS):
        raise ValueError(f"spell: expected 1 to {LONGEST} letters from a to z, got {word!r}")
    tokens = torch.tensor([[3 + LETTERS.index(letter) for letter in word]])
    return F.pad(tokens, (0, LONGEST - len(word)), value=PAD)


def read_back(tokens: Tensor) -> str:
    """The letters among `tokens` (L,) up to END."""
    written = []
    for token in tokens.tolist():
        if token == END:
            break
        if token >= 3:
            written.append(LETTERS[token - 3])
    return "".join(written)


def new_model() -> Seq2SeqTransformer:
    """The model of this lesson: width 64, 4 heads, 2 blocks on either side, some 240,000 parameters."""
    return Seq2SeqTransformer(
        VOCAB_SIZE, VOCAB_SIZE, 64, 4, 128, 2, 2, dropout=0.0, max_len=MAX_LEN, pad_idx=PAD
    )


def greedy(model: Seq2SeqTransformer, source: Tensor) -> Tensor:
    """What the model writes for `source` (B, Ls), the likeliest token each time: (B, MAX_LEN), without START.

    A row that has written END goes on with PAD.
    """
    written = model.generate(source, MAX_LEN, bos=START, eos=END)[:, 1:]
    return F.pad(written, (0, MAX_LEN - written.shape[1]), value=PAD)


def exact_matches(model: Seq2SeqTransformer, words: Tensor) -> int:
    """How many words (B, LONGEST) the model writes backwards without a fault, END included."""
    return int((greedy(model, words) == reverse(words)[:, 1:]).all(dim=1).sum())


def train(
    seed: int = 0, *, steps: int = 1500, on_step: Callable[[int], None] = lambda steps: None
) -> tuple[Seq2SeqTransformer, ReverseRun]:
    """AdamW up to 2e-3, falling linearly to 0, 64 new words a step; scored on 1,000 words that were kept out.

    Returns the model, in eval mode, and what was seen. torch's random state is the same afterwards as before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        held_out = draw_words(_HELD_OUT)
        kept_out = set(map(tuple, held_out.tolist()))
        model = new_model().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for step in range(steps):
            words = torch.tensor(
                [word for word in draw_words(_BATCH).tolist() if tuple(word) not in kept_out]
            )
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * min((step + 1) / 100, 1 - step / steps)
            losses.append(_step(model, optimizer, words))
            on_step(1)
    model.eval()
    return model, ReverseRun(seed, losses, len(held_out), exact_matches(model, held_out))


def _step(model: Seq2SeqTransformer, optimizer: torch.optim.Optimizer, words: Tensor) -> float:
    """One step with teacher forcing; returns the loss before it."""
    target = reverse(words)
    logits = model(words, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
