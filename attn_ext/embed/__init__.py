"""From text to nearest paragraphs: reading, cutting, embedding in sorted batches, comparing with torch."""

from __future__ import annotations

from .comparison import MIN_COSINE, Comparison, PlainBert, compare, comparison_work, spread
from .encode import TokenBatch, embed_batches, make_batches, nearest
from .text import Paragraph, TextError, python_topics, read_text, split_paragraphs

__all__ = [
    "MIN_COSINE",
    "Comparison",
    "Paragraph",
    "PlainBert",
    "TextError",
    "TokenBatch",
    "compare",
    "comparison_work",
    "embed_batches",
    "make_batches",
    "nearest",
    "python_topics",
    "read_text",
    "split_paragraphs",
    "spread",
]
