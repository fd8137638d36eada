"""Text as bytes: what a language model learns from, and what is held out to score it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..embed.text import TextError, read_text

__all__ = ["DOCUMENTATION", "Corpus", "python_documentation", "read_corpus", "split_text"]

DOCUMENTATION = "pydoc_data.topics"  # the source of a corpus that was read from no file
HELD_OUT = 0.1
_SEPARATOR = "\n\n"
_COUNTS_AS_COPY = 40  # shorter paragraphs ("See also:") recur by nature


@dataclass(frozen=True)
class Corpus:
    """A text cut by position: the first part is trained on, the last one is only scored."""

    sources: tuple[str, ...]
    training: bytes
    validation: bytes

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of either part."""
        cut = len(self.training).to_bytes(8, "big")
        return hashlib.sha256(cut + self.training + self.validation).hexdigest()


def read_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Read UTF-8 text files, one after the other; Python's documentation where there are none.

    Raises:
        TextError: a file is missing, a directory, unreadable, empty, binary or not UTF-8, or all of them together
            are too short to hold some out.
    """
    if not paths:
        return split_text(python_documentation(), (DOCUMENTATION,))
    return split_text(_SEPARATOR.join(map(read_text, paths)), tuple(map(str, paths)))


def split_text(text: str, sources: Sequence[str] = ("text",)) -> Corpus:
    """Hold out the last tenth of `text`, from the start of a character on.

    Raises:
        TextError: fewer than 20 bytes.
    """
    content = text.encode("utf-8")
    if len(content) < 20:
        raise TextError(
            f"{', '.join(sources)}: {len(content)} bytes of text are too few to train on; at least 20 are needed."
        )
    cut = len(content) - round(len(content) * HELD_OUT)
    while content[cut] & 0xC0 == 0x80:  # inside of a character
        cut -= 1
    return Corpus(tuple(sources), content[:cut], content[cut:])


def python_documentation() -> str:
    """The language reference that CPython ships (`pydoc_data.topics`), each paragraph once.

    Topics overlap: a fifth of the text is there twice. Such copies would fall on both sides of the cut, and the
    held-out part would reward having learned them by heart.

    Raises:
        TextError: this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextError(
            "This Python ships no pydoc_data.topics to read by default; name a file with --text."
        ) from error
    return _SEPARATOR.join(_without_copies(_SEPARATOR.join(topics.values()))) + "\n"


def token_tensor(content: bytes) -> Tensor:
    """Bytes as tokens: (L,) int64."""
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))


def _without_copies(text: str) -> Iterable[str]:
    """The paragraphs of `text` without those that came before, wherever their lines were broken."""
    seen = set()
    for paragraph in re.split(r"\n(?:[^\S\n]*\n)+", text):
        words = " ".join(paragraph.split())
        if not words or words in seen:
            continue
        if len(words) >= _COUNTS_AS_COPY:
            seen.add(words)
        yield paragraph.rstrip()
