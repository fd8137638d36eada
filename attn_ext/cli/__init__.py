"""The command `attn-ext`. One file a command; `app.py` lists them. Needs typer and rich (the extra `cli`)."""

from __future__ import annotations

import os
import sys

from .._interrupt import EXIT_INTERRUPTED, raise_again


def main() -> None:
    """Console entry point. Exit codes: 0 fine, 1 a check failed, 2 bad input or a missing piece, 130 Ctrl-C."""
    try:
        if sys.stdout is None:
            _refuse(
                "standard output is closed, and an open one is expected (>/dev/null where it is not wanted)."
            )
        _run()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def _run() -> None:
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "attn_ext":
            raise
        _refuse(
            f"the command line needs {error.name}, which is not installed: pip install typer rich "
            "(the extra 'cli' of attn_ext)"
        )
    raise_again()
    for stream in (sys.stdout, sys.stderr):
        # A quote or dash that the terminal's encoding lacks is shown as "?", instead of ending the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name="attn-ext")
        finally:
            sys.stdout.flush()  # what is left of it is written here, not while Python ends
    except BrokenPipeError:  # of `| head`, which has read enough
        _write_no_more()
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is not None:  # not of a stream: a bug of ours
            raise
        _write_no_more()
        _refuse(f"standard output cannot be written: {error.strerror or error}.")


def _write_no_more() -> None:
    """Let Python's own flush at the end go nowhere: it would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _refuse(message: str) -> None:
    print(f"attn-ext: {message}", file=sys.stderr)
    raise SystemExit(2) from None
