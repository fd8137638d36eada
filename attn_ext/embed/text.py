"""Reading text and cutting it into paragraphs."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

# A line of one repeated sign under a title, as reStructuredText, Markdown and pydoc draw it.
_UNDERLINE = re.compile(r"([=\-*~^\"'#+.`_])\1{2,}")
_MARKDOWN_TITLE = re.compile(r"#{1,6}\s+(?P<title>\S.*)")


class TextError(ValueError):
    """A text that cannot be used. The message is one sentence that names it and says why."""


@dataclass(frozen=True)
class Paragraph:
    """One paragraph: where it is from, the title it stands under, its text as written."""

    topic: str
    section: str
    text: str

    @property
    def first_line(self) -> str:
        """The first line with the white space of its edges removed."""
        return self.text.splitlines()[0].strip()

    @property
    def flowing(self) -> str:
        """The whole paragraph on one line, as it is embedded."""
        return " ".join(self.text.split())


def split_paragraphs(text: str, topic: str) -> list[Paragraph]:
    """Cut `text` at blank lines.

    Underlined titles and Markdown titles become the `section` of what follows. Blocks without a letter or
    digit (rules, drawn lines) are left out.
    """
    paragraphs = []
    section = ""
    for block in re.split(r"\n[^\S\n]*(?:\n[^\S\n]*)+", text.replace("\r\n", "\n").replace("\r", "\n")):
        lines = block.strip("\n").splitlines()
        if len(lines) >= 2 and lines[0].strip() and _UNDERLINE.fullmatch(lines[1].strip()):
            section, lines = lines[0].strip(), lines[2:]
        elif lines and (title := _MARKDOWN_TITLE.fullmatch(lines[0].strip())):
            section, lines = title["title"], lines[1:]
        kept = "\n".join(lines).strip()
        if any(character.isalnum() for character in kept):
            paragraphs.append(Paragraph(topic, section, kept))
    return paragraphs


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; "-" is standard input.

    Raises TextError where it is missing, a directory, unreadable, empty, binary or not UTF-8.
    """
    name = "standard input" if str(path) == "-" else str(path)
    if str(path) == "-" and sys.stdin is None:
        raise TextError("standard input is closed.")
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError as error:
        raise TextError(f"{name}: no such file.") from error
    except IsADirectoryError as error:
        raise TextError(f"{name} is a directory; name the files in it.") from error
    except OSError as error:
        raise TextError(f"{name} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise TextError(f"{name} is empty.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\0" in content:
            raise TextError(
                f"{name} is a binary file, not text (or UTF-16, which has to be UTF-8)."
            ) from error
        raise TextError(
            f"{name} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start}; "
            f"convert it first (iconv -f ENCODING -t UTF-8)."
        ) from error
    if "\0" in text:
        raise TextError(f"{name} is a binary file, not text.")
    return text


def python_topics(min_words: int = 8) -> list[Paragraph]:
    """The language reference that CPython ships (`pydoc_data.topics`): paragraphs of at least `min_words`.

    Raises TextError where this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextError(
            "This Python ships no pydoc_data.topics to read by default; name a text file."
        ) from error
    seen: dict[str, Paragraph] = {}  # topics overlap: a paragraph is kept once, under its first topic
    for topic, text in topics.items():
        for paragraph in split_paragraphs(text, topic):
            is_prose = not paragraph.text.startswith(">>>")
            if is_prose and len(re.findall(r"[^\W\d_]{2,}", paragraph.text)) >= min_words:
                seen.setdefault(paragraph.flowing, paragraph)
    return list(seen.values())
