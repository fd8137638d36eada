"""Reading text files and cutting them into paragraphs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from attn_ext.embed import TextError, python_topics, read_text, split_paragraphs


def texts(text: str) -> list[tuple[str, str]]:
    return [(paragraph.section, paragraph.text) for paragraph in split_paragraphs(text, "t")]


def test_blank_lines_cut_and_nothing_else_does() -> None:
    assert texts("one\ntwo\n\nthree\n \t \n\n\nfour") == [("", "one\ntwo"), ("", "three"), ("", "four")]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_every_newline_style_is_read_alike(newline: str) -> None:
    assert texts(newline.join(["one", "two", "", "three"])) == [("", "one\ntwo"), ("", "three")]


def test_underlined_and_markdown_titles_become_the_section() -> None:
    text = "before\n\nFirst title\n***********\n\none\n\nSecond\n======\ntwo\n\n## Third\n\nthree\n\nfour"
    assert texts(text) == [
        ("", "before"),
        ("First title", "one"),
        ("Second", "two"),
        ("Third", "three"),
        ("Third", "four"),
    ]


def test_blocks_without_a_letter_or_digit_are_left_out() -> None:
    assert texts("-----\n\n* * *\n\n+--+--+\n\n€ 5\n\n远处有一棵苹果树") == [
        ("", "€ 5"),
        ("", "远处有一棵苹果树"),
    ]


def test_brackets_and_markup_stay_as_they_are() -> None:
    (paragraph,) = split_paragraphs("  [bold]a[/bold]  and\n   more  ", "t")
    assert paragraph.first_line == "[bold]a[/bold]  and"
    assert paragraph.flowing == "[bold]a[/bold] and more"


def test_pythons_own_topics_are_long_paragraphs_with_their_topic_and_title() -> None:
    paragraphs = python_topics()
    assert len(paragraphs) > 500
    assert len({paragraph.flowing for paragraph in paragraphs}) == len(paragraphs)
    (found,) = [p for p in paragraphs if p.flowing.startswith("A list display yields a new list object")]
    assert (found.topic, found.section) == ("lists", "List displays")
    assert len(python_topics(min_words=40)) < len(paragraphs)


def test_a_python_without_topics_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TextError, match="no pydoc_data.topics .* name a text file"):
        python_topics()


def test_utf8_is_read_and_its_byte_order_mark_dropped(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfna\xc3\xafve\n")
    assert read_text(path) == "naïve\n"


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped text")))
    assert read_text("-") == "piped text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
        (b"text\0with a null byte", "is a binary file"),
        ("text".encode("utf-16"), "is a binary file.*UTF-16"),
        (b"caf\xe9 latin", "is not UTF-8 text: byte 0xe9 at offset 3"),
    ],
)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(TextError, match=f"text.txt {message}"):
        read_text(path)


def test_missing_files_and_directories_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="absent.txt: no such file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(TextError, match="is a directory"):
        read_text(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TextError, match="cannot be read: Not a directory"):
        read_text(tmp_path / "file" / "below")
