"""What goes wrong with models, in one sentence each."""

from __future__ import annotations

__all__ = ["LogitsError", "WeightsError"]


class LogitsError(RuntimeError):
    """A model's logits are no numbers that a token could be chosen by."""


class WeightsError(RuntimeError):
    """Weights or tokenizer are absent or wrong. The message is one sentence that says what to do."""
