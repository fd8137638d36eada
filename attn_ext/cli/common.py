"""What the commands share: errors as one sentence, consoles, JSON, options with one meaning."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .. import backend

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # what shells give a program that Ctrl-C ended

Command = TypeVar("Command", bound=Callable[..., None])

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="CPU threads to use.", show_default="torch's choice"),
]


class UserError(Exception):
    """The user can put this right. The message is one sentence; the command ends with exit code 2."""


def says_errors_plainly(*expected: type[Exception]) -> Callable[[Command], Command]:
    """Decorate a command: UserError and the `expected` exceptions become one line on stderr, exit code 2.

    Any other exception is a bug of ours and keeps its traceback.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                command(*args, **kwargs)
            except (UserError, *expected) as error:
                print(f"attn-ext: {error}", file=sys.stderr)
                raise typer.Exit(EXIT_BAD_INPUT) from None

        return wrapped  # type: ignore[return-value]

    return decorate


def set_up(threads: int | None) -> None:
    """Set the thread count and settle which instruction set runs, before any work is done.

    Raises UserError where ATTN_EXT_ISA names a set that cannot run here.
    """
    try:
        backend.active()
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error).removeprefix("attn_ext: ")) from error
    if threads is not None:
        torch.set_num_threads(threads)


def check_writable(option: str, path: Path) -> None:
    """Raise UserError where no file could be saved under this name, before any work is done."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(
            f"{option} {path}: {'is a directory' if path.is_dir() else 'its folder does not exist'}."
        )
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {path}: its folder may not be written.")


def finish(report: dict[str, Any], show: Callable[[dict[str, Any], Console], None], json: bool) -> None:
    """Print a report, as JSON or as `show` does; exit code 1 where it says that something is not "ok"."""
    if json:
        print_json(report)
    else:
        show(report, out())
    if not report.get("ok", True):
        raise typer.Exit(EXIT_CHECK_FAILED)


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Run a block with this many CPU threads (None: as many as now), then go back."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def out() -> Console:
    """The console of standard output; 80 columns, no colours where piped. Prints texts as they are."""
    return Console(highlight=False, markup=False, emoji=False)


def print_json(report: dict[str, Any]) -> None:
    """Print `report` as JSON on standard output; numbers that JSON lacks (NaN, infinity) become null."""
    print(json.dumps(_finite(report), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, gone when done; nothing at all where that is no terminal.

    Yields the function that moves it on by a number of steps.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=False,  # no thread that draws while something is being timed
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.update(task, advance=steps, refresh=True)
