"""The page about symptoms: all eight are there, each can be seen by code and has a cure (test_docs.py runs it)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_every_symptom_of_the_table_has_a_section_with_code_and_a_cure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[.*?\]\(#([\w-]+)\)", text, re.M)
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(linked) == 8 and linked == anchors
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
        assert blocks and any("assert" in block for block in blocks), section
        assert "\nCure: " in section, section


def test_the_commands_that_the_page_names_exist() -> None:
    pytest.importorskip("typer", reason="typer is not installed: pip install typer")
    pytest.importorskip("rich", reason="rich is not installed: pip install rich")
    from attn_ext.cli.app import app

    named = set(re.findall(r"`attn-ext ([\w-]+)", PAGE.read_text(encoding="utf-8")))
    assert named and named <= {
        command.name or command.callback.__name__ for command in app.registered_commands
    }
