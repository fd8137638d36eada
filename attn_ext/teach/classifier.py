"""The first model that a learner trains: does a sentence of eight tokens hold both a 3 and a 7?

Tokens are 1 to 19, drawn uniformly; the label is 1 where 3 and 7 both occur, in any order. The classifier reads
the first token only, so it can answer only what attention carries there.

Drawn like that about one sentence in ten is positive, and 200 of them teach a classifier to say "no" to
everything: `train_unbalanced` shows it, with the majority baseline beside every accuracy. `train_balanced` is
the recipe that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import TextClassifier

__all__ = [
    "SENTENCE_LENGTH",
    "TARGETS",
    "VOCAB_SIZE",
    "BalancedRun",
    "Epoch",
    "Score",
    "UnbalancedRun",
    "draw_balanced",
    "draw_uniform",
    "label",
    "new_model",
    "score",
    "train_balanced",
    "train_unbalanced",
    "wilson_interval",
]

VOCAB_SIZE = 20  # id 0 is left free for padding
SENTENCE_LENGTH = 8
TARGETS = (3, 7)

OnEpoch = Callable[[int], None]


@dataclass(frozen=True)
class Score:
    """How many sentences were classified right, beside what always naming the larger class would reach."""

    samples: int
    correct: int
    positive: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def baseline(self) -> float:
        """The accuracy of always naming the class that most of these sentences are of."""
        return max(self.positive, self.samples - self.positive) / self.samples

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the accuracy."""
        return wilson_interval(self.correct, self.samples)


@dataclass(frozen=True)
class Epoch:
    """One line of the unbalanced run's log."""

    epoch: int  # counted from 1
    loss: float
    train: Score
    validation: Score


@dataclass(frozen=True)
class UnbalancedRun:
    """What `train_unbalanced` saw."""

    seed: int
    log: list[Epoch]

    @property
    def learned(self) -> bool:
        """Whether the last validation accuracy is above the majority baseline by more than chance."""
        validation = self.log[-1].validation
        return validation.interval[0] > validation.baseline


@dataclass(frozen=True)
class BalancedRun:
    """What `train_balanced` saw."""

    seed: int
    losses: list[float]  # one an epoch
    train: Score
    held_out: Score


def label(tokens: Tensor) -> Tensor:
    """1 where a sentence holds every one of TARGETS, else 0: (B, L) → (B,) int64."""
    return torch.stack([(tokens == target).any(dim=1) for target in TARGETS]).all(dim=0).long()


def draw_uniform(samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Sentences of uniform tokens, and their labels: (samples, 8) and (samples,) int64."""
    tokens = torch.randint(1, VOCAB_SIZE, (samples, SENTENCE_LENGTH), generator=generator)
    return tokens, label(tokens)


def draw_balanced(samples: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """The same, shuffled, with as many positive sentences as negative ones (one more where odd).

    Uniform sentences are drawn until there are enough of either class, so that within a class they are
    distributed as `draw_uniform` has them.
    """
    wanted = {0: samples // 2, 1: samples - samples // 2}
    found: dict[int, list[Tensor]] = {
        kind: [torch.empty(0, SENTENCE_LENGTH, dtype=torch.int64)] for kind in wanted
    }
    while any(sum(map(len, found[kind])) < count for kind, count in wanted.items()):
        tokens, labels = draw_uniform(1024, generator)
        for kind in found:
            found[kind].append(tokens[labels == kind])
    tokens = torch.cat([torch.cat(found[kind])[:count] for kind, count in wanted.items()])
    tokens = tokens[torch.randperm(samples, generator=generator)]
    return tokens, label(tokens)


def new_model() -> TextClassifier:
    """The classifier of this lesson: width 16, 4 heads, 2 blocks, some 5,000 parameters."""
    return TextClassifier(
        vocab_size=VOCAB_SIZE, d_model=16, h=4, d_ff=32, num_layers=2, num_classes=2, max_len=32
    )


def score(model: TextClassifier, tokens: Tensor, labels: Tensor) -> Score:
    """Classify `tokens` in the mode that the model is in (`model.eval()` switches dropout off)."""
    with torch.no_grad():
        predicted = model(tokens).argmax(dim=1)
    return Score(len(labels), int((predicted == labels).sum()), int(labels.sum()))


def train_unbalanced(
    seed: int = 42, *, epochs: int = 50, log_every: int = 10, on_epoch: OnEpoch = lambda steps: None
) -> UnbalancedRun:
    """The setting of many a first tutorial: 200 uniform sentences, Adam at 1e-3, 50 full-batch epochs.

    It scores 50 more sentences in train mode, dropout and all. Everything here is as such a tutorial has it;
    only the baseline is added, and shows that nothing was learned.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens, labels = draw_uniform(200)
        validation_tokens, validation_labels = draw_uniform(50)
        model = new_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        log = []
        for epoch in range(1, epochs + 1):
            loss = _step(model, optimizer, tokens, labels)
            if epoch == 1 or epoch % log_every == 0:
                log.append(
                    Epoch(
                        epoch,
                        loss,
                        score(model, tokens, labels),
                        score(model, validation_tokens, validation_labels),
                    )
                )
            on_epoch(1)
    return UnbalancedRun(seed, log)


def train_balanced(
    seed: int = 0, *, epochs: int = 300, on_epoch: OnEpoch = lambda steps: None
) -> tuple[TextClassifier, BalancedRun]:
    """Balanced classes, 200 sentences, AdamW at 3e-3, 300 full-batch epochs, scored in eval mode.

    The 1,000 held-out sentences are balanced as well, and drawn after the training ones. Most seeds end above
    0.99; now and then one ends at 0.98. Returns the model, in eval mode, and what was seen. torch's random state
    is the same afterwards as before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_model()
        tokens, labels = draw_balanced(200)
        held_out_tokens, held_out_labels = draw_balanced(1000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(epochs):
            losses.append(_step(model, optimizer, tokens, labels))
            on_epoch(1)
    model.eval()
    run = BalancedRun(
        seed,
        losses,
        score(model, tokens, labels),
        score(model, held_out_tokens, held_out_labels),
    )
    return model, run


def wilson_interval(correct: int, samples: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Where a proportion lies with 95 % confidence (Wilson 1927, JASA 22); z is the normal quantile.

    Unlike p ± z·√(p(1−p)/n) it stays within [0, 1] and has a width at p = 1.
    """
    if not 0 <= correct <= samples or samples < 1:
        raise ValueError(f"wilson_interval: {correct} of {samples} is no proportion")
    p, spread = correct / samples, z * z / samples
    middle = (p + spread / 2) / (1 + spread)
    half = z * math.sqrt(p * (1 - p) / samples + spread / (4 * samples)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _step(model: TextClassifier, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> float:
    """One full-batch step; returns the loss before it."""
    model.train()
    loss = F.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
