"""What goes wrong with files of weights."""

from __future__ import annotations

__all__ = ["WeightsError"]


class WeightsError(RuntimeError):
    """Weights or tokenizer are absent or wrong. The message is one sentence that says what to do."""
