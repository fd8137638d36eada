"""What the tests of the commands ask of a result."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import Result


def read_json(result: Result) -> dict[str, Any]:
    """What a command with --json printed: that, and nothing else."""
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def assert_refused(result: Result, *words: str) -> None:
    """One sentence on stderr that holds the words, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1, result.output
    assert result.stderr.startswith("attn-ext: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
