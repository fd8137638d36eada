"""Text as bytes: reading, cutting by position, paragraphs that are there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_ext.embed import TextError
from attn_ext.train import DOCUMENTATION, python_documentation, read_corpus, split_text


def test_the_last_tenth_is_held_out() -> None:
    text = "".join(chr(97 + n % 26) for n in range(1000))
    corpus = split_text(text)
    assert (len(corpus.training), len(corpus.validation)) == (900, 100)
    assert (corpus.training + corpus.validation).decode() == text


@pytest.mark.parametrize("length", range(20, 60))
def test_no_character_is_cut(length: int) -> None:
    corpus = split_text("é€𝄞"[length % 3] * length)
    corpus.training.decode("utf-8"), corpus.validation.decode("utf-8")
    assert len(corpus.validation) >= 2


def test_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufefffirst file, naïve\n".encode())
    (tmp_path / "b").write_bytes(b"second file\r\n")
    corpus = read_corpus([tmp_path / "a", str(tmp_path / "b")])
    assert corpus.training + corpus.validation == "first file, naïve\n\n\nsecond file\r\n".encode()
    assert corpus.sources == (str(tmp_path / "a"), str(tmp_path / "b"))


def test_the_fingerprint_changes_with_every_byte_and_the_cut() -> None:
    corpus = split_text("x" * 100)
    assert corpus.fingerprint == split_text("x" * 100, ["another name"]).fingerprint
    for other in ("x" * 101, "y" + "x" * 99, "x" * 99 + "y"):
        assert split_text(other).fingerprint != corpus.fingerprint


def test_pythons_documentation_has_each_paragraph_once() -> None:
    text = python_documentation()
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    long = [paragraph for paragraph in paragraphs if len(paragraph) >= 40]
    assert len(long) > 1000 and len(long) == len(set(long))
    assert "\n   " in text  # lines and indents are kept
    corpus = read_corpus()
    assert corpus.sources == (DOCUMENTATION,) and len(corpus.training) > 250_000
    held_out = {" ".join(paragraph.split()) for paragraph in corpus.validation.decode().split("\n\n")}
    assert not {paragraph for paragraph in held_out if len(paragraph) >= 40} & set(
        " ".join(paragraph.split()) for paragraph in corpus.training.decode().split("\n\n")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b" \n", "is empty"),
        (b"nineteen characters", "19 bytes of text are too few"),
        (b"caf\xe9 is not UTF-8 text", "is not UTF-8 text"),
        (bytes(range(256)), "is a binary file"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=message) as caught:
        read_corpus([path])
    assert str(path) in str(caught.value)
