"""The command `attn-ext`. One file a command; `app.py` lists them. Needs typer and rich (the extra `cli`)."""

from __future__ import annotations

import sys


def main() -> None:
    """Console entry point. Exit codes: 0 fine, 1 a check failed, 2 bad input or a missing piece."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "attn_ext":
            raise
        print(
            f"attn-ext: the command line needs {error.name}, which is not installed: pip install typer rich "
            "(the extra 'cli' of attn_ext)",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        # A quote or dash that the terminal's encoding lacks is shown as "?", instead of ending the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app(prog_name="attn-ext")
