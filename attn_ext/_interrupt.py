"""Ctrl-C while the command `attn-ext` still imports torch, which importing the package does before `cli` runs.

Only the command is meant. A program that imports attn_ext gets its KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

EXIT_INTERRUPTED = 130  # what shells give a program that Ctrl-C ended


def _end_quietly_while_importing() -> None:
    """Where this process is `attn-ext` or `python -m attn_ext.cli`, let Ctrl-C end it without a traceback."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if _is_command() and is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on the command handles KeyboardInterrupt itself."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    if Path(sys.argv[0] if sys.argv else "").stem == "attn-ext":
        return True
    # While `python -m` imports the package, sys.argv[0] is "-m" still; -m may be one of several options of Python.
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return sys.argv[:1] == ["-m"] and options[-1:] == ["attn_ext.cli"]


def _end(number: int, frame: FrameType | None) -> None:
    # No exception: half-imported modules catch some, and nothing has been begun that had to be undone.
    os._exit(EXIT_INTERRUPTED)


_end_quietly_while_importing()
