"""How a language model is built and trained, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

__all__ = ["VOCAB_SIZE", "Recipe"]

VOCAB_SIZE = 256  # bytes


@dataclass(frozen=True)
class Recipe:
    """The sizes of a model on bytes, and its training by AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    A run ends after `steps`, or after `minutes`: exactly one of them is given. The learning rate follows the part
    of the run that is over, so that it comes down in time either way.

    Args:
        d_model, heads, d_ff, layers: as in `CausalLM`; `d_ff` is the width inside of a SwiGLU net.
        context: how many bytes the model sees at once.
        dropout: as in `CausalLM`.
        batch: windows of `context` bytes in a step.
        parts: pieces that a batch is computed in, each with a random stream of its own. Processes share them
            out, so that any number of processes which divides `parts` follows the same curve.
        learning_rate: at its highest.
        warm_up: the part of the run in which it rises from near 0; then it falls as a cosine.
        last_rate: what is left of it at the end, as a part of the highest.
        weight_decay: of matrices; vectors (the norms) have none.
        beta1, beta2: decay of AdamW's averages.
        clip: the norm of all gradients together is at most this.
        seed: of the weights, the order of the text and dropout.

    Raises:
        TypeError: what is no number, or no integer where one belongs.
        ValueError: a number that no run can have. The message names it.
    """

    d_model: int = 128
    heads: int = 2
    d_ff: int = 352
    layers: int = 4
    context: int = 256
    dropout: float = 0.0
    batch: int = 2
    parts: int = 2
    learning_rate: float = 3e-3
    warm_up: float = 0.02
    last_rate: float = 0.01
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0
    seed: int = 0
    steps: int | None = None
    minutes: float | None = 10.0

    def __post_init__(self) -> None:
        self._expect_numbers()
        for name in ("d_model", "heads", "d_ff", "layers", "context", "batch", "parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.heads or self.d_model // self.heads % 2:
            raise ValueError(
                f"d_model must be an even multiple of heads, got {self.d_model} for {self.heads} heads"
            )
        if self.batch % self.parts:
            raise ValueError(f"batch must be a multiple of parts, got {self.batch} for {self.parts} parts")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("dropout", "warm_up", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if not 0 <= self.last_rate <= 1:
            raise ValueError(f"last_rate must be from 0 to 1, got {self.last_rate}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError(f"expected either steps or minutes, got {self.steps} and {self.minutes}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")

    def _expect_numbers(self) -> None:
        """Recipes come out of files too, whose numbers may be of any type."""
        sizes = ("d_model", "heads", "d_ff", "layers", "context", "batch", "parts", "seed", "steps")
        for name, value in vars(self).items():
            if value is None and name in ("steps", "minutes"):
                continue
            kind, expected = (Integral, "an integer") if name in sizes else (Real, "a number")
            if isinstance(value, bool) or not isinstance(value, kind):
                raise TypeError(f"{name} must be {expected}, got {value!r}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def parameter_count(self) -> int:
        """Of the model, without building it: embedding (the output map shares it), blocks, norms."""
        d = self.d_model
        block = 4 * d * d + 3 * d * self.d_ff + 2 * d
        return VOCAB_SIZE * d + self.layers * block + d

    def fraction_done(self, step: int, seconds: float) -> float:
        """The part of a run that is over after `step` steps and `seconds`; 1 or more at its end."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)

    def rate_at(self, fraction: float) -> float:
        """The learning rate once `fraction` of the run is over."""
        if fraction < self.warm_up:
            shape = fraction / self.warm_up
        else:
            left = min(1.0, (fraction - self.warm_up) / (1 - self.warm_up))
            shape = 0.5 * (1 + math.cos(math.pi * left))
        return self.learning_rate * (self.last_rate + (1 - self.last_rate) * shape)
