"""A run that takes a second: its text, its recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_ext.train import Corpus, Recipe, split_text

TEXT = "".join(f"line {n}: the cat sat on mat {n % 7}.\n" for n in range(120))
TINY = Recipe(
    d_model=16, heads=2, d_ff=32, layers=1, context=16, dropout=0.1, batch=4, parts=2, steps=12, minutes=None
)


def tiny(**changes: Any) -> Recipe:
    return replace(TINY, **changes)


def corpus() -> Corpus:
    return split_text(TEXT)
