"""What the commands share: errors as one sentence, consoles, JSON, options with one meaning."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
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
from .._files import read_metadata
from .._interrupt import EXIT_INTERRUPTED as EXIT_INTERRUPTED

EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")  # of torch

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

    So does it where there is not enough memory. Any other exception is a bug of ours and keeps its traceback.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            try:
                command(*args, **kwargs)
            except (UserError, *expected) as error:
                print(f"attn-ext: {error}", file=sys.stderr)
                raise typer.Exit(EXIT_BAD_INPUT) from None
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                print(f"attn-ext: {_what_was_too_large(error)}", file=sys.stderr)
                raise typer.Exit(EXIT_BAD_INPUT) from None

        return wrapped  # type: ignore[return-value]

    return decorate


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def _what_was_too_large(error: Exception) -> str:
    asked = re.search(r"allocate (\d+) bytes", str(error))
    return f"there is not enough memory{f' for {int(asked[1]):,} bytes more' if asked else ''}: ask for smaller sizes."


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
    target = Path(os.path.realpath(path))  # a symbolic link stays one: the file that it names is written
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:  # the name is too long, links go in a circle
        raise UserError(f"{option} {path}: {error.strerror}.") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise UserError(f"{option} {path}: is a directory.")
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(
            f"{option} {path}: expected the name of a file, and this is a device, pipe or socket."
        )
    if not target.parent.is_dir():
        raise UserError(f"{option} {path}: its folder does not exist.")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"{option} {path}: its folder may not be written.")


def check_for_model(option: str, path: Path) -> None:
    """Raise UserError where a model saved under this name would replace something else, or cannot be saved at all."""
    try:
        import safetensors  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{option} {path}: saving needs {error.name}: pip install safetensors") from error
    if not path.exists():
        return
    try:
        is_model = read_metadata(path, "model", UserError).get("format", "").startswith("attn_ext model ")
    except UserError:
        is_model = False
    if not is_model:
        raise UserError(
            f"{option} {path}: a file is there that is no saved model, and it is not replaced; expected a new name, "
            "or that of a model."
        )


def check_apart(outputs: Sequence[tuple[str, Path]], inputs: Sequence[tuple[str, str | Path]] = ()) -> None:
    """Raise UserError where an output, by whatever name or link, is the file of an input or of another output.

    Both are options with their paths; the input "-" is standard input.
    """
    for number, (option, path) in enumerate(outputs):
        for other_option, other in outputs[:number]:
            if _is_same_file(path, other):
                raise UserError(f"{other_option} and {option} are the same file, {other}.")
        for other_option, other in inputs:
            if _is_same_file(path, other):
                raise UserError(f"{option} {path} is the same file as {other_option} {other}, which is read.")


def _is_same_file(output: Path, other: str | Path) -> bool:
    if os.path.realpath(output) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(output, 0 if str(other) == "-" else other)  # 0: standard input
    except OSError:  # one of them does not exist
        return False


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
