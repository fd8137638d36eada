"""The Python code in the documentation runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [
        (match.start(), match.group(1)) for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    ]
    assert blocks, f"{page} has no block of Python"
    names: dict[str, object] = {"__name__": page}
    for start, code in blocks:
        line = text.count("\n", 0, start) + 1
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)  # line numbers as in the page
