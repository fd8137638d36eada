"""`attn-ext train-lm`: a small language model on real text, beside gzip and xz."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from .. import backend
from .._memory import available_bytes
from ..embed import TextError
from ..models import WeightsError
from ..models import save as save_model
from ..train import (
    DOCUMENTATION,
    Checkpoint,
    CheckpointError,
    Corpus,
    Processes,
    Recipe,
    Training,
    TrainingDiverged,
    TrainingStep,
    bits_per_byte,
    compressed_sizes,
    memory_needed,
    read_corpus,
    training_processes,
)
from .common import (
    EXIT_INTERRUPTED,
    JsonOption,
    ThreadsOption,
    UserError,
    check_apart,
    check_for_model,
    check_writable,
    out,
    print_json,
    progress,
    says_errors_plainly,
    set_up,
)

DEFAULT_OUT = Path("lm.safetensors")
_DEFAULTS = Recipe()
_LARGEST = 2**31 - 1  # of a size; what of it fits into memory is counted before the model is built
_OPTION_OF = {"learning_rate": "--lr"}  # where it is not the name with dashes


def _number(help: str, name: str, **limits: Any) -> Any:
    default = getattr(_DEFAULTS, name)
    return typer.Option(help=help, show_default=f"{default:g}", **limits)


@says_errors_plainly(WeightsError, TextError, CheckpointError, TrainingDiverged)
def train_lm(
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A UTF-8 text file, - for standard input; repeatable.",
            show_default="Python's own pydoc_data.topics",
        ),
    ] = None,
    save: Annotated[
        Path, typer.Option("--out", "--save", metavar="FILE.safetensors", help="Where the model goes.")
    ] = DEFAULT_OUT,
    minutes: Annotated[float | None, _number("Train as long as this.", "minutes")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Train for so many steps instead.", min=1, max=10**12, show_default="by --minutes"),
    ] = None,
    seed: Annotated[
        int | None, _number("Of weights, order and dropout.", "seed", min=0, max=2**32 - 1)
    ] = None,
    layers: Annotated[int | None, _number("Blocks.", "layers", min=1, max=1000)] = None,
    d_model: Annotated[int | None, _number("Width.", "d_model", min=1, max=_LARGEST)] = None,
    heads: Annotated[int | None, _number("Heads.", "heads", min=1, max=_LARGEST)] = None,
    d_ff: Annotated[
        int | None, _number("Width of the feed-forward nets.", "d_ff", min=1, max=_LARGEST)
    ] = None,
    context: Annotated[
        int | None, _number("Bytes that the model sees.", "context", min=1, max=_LARGEST)
    ] = None,
    dropout: Annotated[float | None, _number("Probability of dropping.", "dropout")] = None,
    batch: Annotated[int | None, _number("Windows of text in a step.", "batch", min=1, max=_LARGEST)] = None,
    parts: Annotated[
        int | None,
        _number("Pieces of a batch, which torchrun's processes share out.", "parts", min=1, max=_LARGEST),
    ] = None,
    lr: Annotated[float | None, _number("Highest learning rate.", "learning_rate")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.safetensors",
            help="Where an unfinished run is kept.",
            show_default="--out, ending in .checkpoint.safetensors",
        ),
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How often it is written.")
    ] = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew and replace it.")] = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Train a small language model on text, byte by byte.

    The last tenth of the text is held out. At the end the model's bits per byte of it stand beside those of
    gzip -9 and xz -9.

    Ctrl-C writes a checkpoint after the step at hand and ends with exit code 130; --resume goes on, with the
    options and the curve of the run that was stopped. A checkpoint is also written every minute and at the end. It is
    removed once the model is saved; where it cannot be, --resume saves it later, under the --out that is given then.

    Several processes share the work: torchrun --nproc-per-node 2 -m attn_ext.cli train-lm
    """
    check_writable("--out", save)
    kept = checkpoint or save.with_name(f"{save.name.removesuffix('.safetensors')}.checkpoint.safetensors")
    check_writable("--checkpoint", kept)
    outputs = [("--out", save), ("--checkpoint", kept)]
    check_apart(outputs, [("--text", path) for path in text or ()])
    check_for_model("--out", save)
    _check_start(kept, resume, restart)
    asked = {
        "minutes": minutes, "steps": steps, "seed": seed, "layers": layers, "d_model": d_model, "heads": heads,
        "d_ff": d_ff, "context": context, "dropout": dropout, "batch": batch, "parts": parts,
        "learning_rate": lr,
    }  # fmt: skip
    asked = {name: value for name, value in asked.items() if value is not None}
    set_up(threads)
    with training_processes() as processes:
        training = _resumed(kept, text, asked, processes, outputs) if resume else _new(text, asked, processes)
        report = run(training, save, kept, checkpoint_every, quiet=json)
    if processes.leads:
        print_json(report) if json else show(report, out())
    if processes.leads and report["validation"] is None or not report["finished"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def run(
    training: Training, path: Path, checkpoint: Path, checkpoint_every: float, *, quiet: bool = False
) -> dict[str, Any]:
    """Train, save and score; returns the report, ready for JSON."""
    leads = training.processes.leads
    first_step = training.step
    with _stop_signals() as should_stop:
        if leads and not quiet:
            _announce(training)
        with _bar(training) as on_step:
            finished = training.run(
                checkpoint_path=checkpoint,
                checkpoint_every=checkpoint_every,
                on_step=on_step,
                on_unwritten=_Warning(),
                should_stop=should_stop,
            )
    report = {
        "isa": backend.active(),
        "threads": torch.get_num_threads(),
        "processes": training.processes.count,
        "sources": list(training.corpus.sources),
        "training_bytes": len(training.corpus.training),
        "validation_bytes": len(training.corpus.validation),
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "recipe": asdict(training.recipe),
        "finished": finished,
        "first_step": first_step,
        "steps": training.step,
        "seconds": training.seconds,
        "fraction": min(1.0, training.fraction),
        "tokens_per_second": training.step * training.recipe.tokens_per_step / training.seconds,
        "losses": training.losses,
        "loss_unit": "nats per byte",
        "validation": None,
        "model": None,
        "checkpoint": str(checkpoint.absolute()),
    }
    if finished and leads:
        _save(training, path, checkpoint)
        report |= {"model": str(path.absolute()), "checkpoint": None}
        try:
            report["validation"] = _validation(training)
        except KeyboardInterrupt:
            pass  # the report says that it was not scored
    return report


def _save(training: Training, path: Path, checkpoint: Path) -> None:
    """Save a finished run's model. Only then is its checkpoint removed, which is brought up to date before."""
    unwritten = None
    try:
        training.checkpoint().write(checkpoint)
    except CheckpointError as error:
        unwritten = error  # no harm is done where the model can be saved
    try:
        save_model(training.model, path)
    except (WeightsError, MemoryError) as error:
        what = str(error) or f"{path} cannot be written: there is not enough memory."
        if unwritten is not None:
            raise UserError(f"{what} Nor could the finished run be kept: {unwritten}") from error
        raise UserError(
            f"{what} The finished run is kept: --resume --checkpoint {checkpoint}, with another --out, saves it."
        ) from error
    try:
        checkpoint.unlink(missing_ok=True)
    except OSError as error:
        _warn(f"{checkpoint}, which is no longer needed, cannot be removed: {error.strerror}.")


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `run` returned."""
    trained = (
        f"{report['steps']:,} steps, {_time(report['seconds'])}, {report['tokens_per_second']:,.0f} tokens/s"
    )
    if not report["finished"]:
        console.print(
            f"Stopped after {trained}: {report['fraction']:.0%} of the run. The checkpoint is "
            f"{report['checkpoint']}; the same command with --resume goes on.",
            soft_wrap=True,
        )
        return
    dropped = " (with dropout)" if report["recipe"]["dropout"] else ""
    console.print(f"Trained: {trained}; loss {_recent(report['losses'])} bits per byte at the end{dropped}.")
    validation = report["validation"]
    if validation is None:
        console.print(f"Stopped while scoring; saved as {report['model']}", soft_wrap=True)
        return
    console.print(
        f"\nThe {report['validation_bytes']:,} bytes that were held out, each predicted from at least "
        f"{validation['least_context']} bytes before it:"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in ("bytes", "bits per byte", "bits per character"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in validation["rows"]:
        table.add_row(
            row["name"],
            f"{row['bytes']:,}",
            f"{row['bits_per_byte']:.3f}",
            f"{row['bits_per_character']:.3f}",
        )
    console.print(table)
    console.print(
        "gzip and xz begin with nothing; the model has seen the training text, and its size is not counted."
    )
    console.print(f"saved as {report['model']}", soft_wrap=True)


def _new(text: list[str] | None, asked: dict[str, Any], processes: Processes) -> Training:
    if {"minutes", "steps"} <= asked.keys():
        raise UserError("--minutes and --steps both end the run; give one of them.")
    if "steps" in asked:
        asked = {"minutes": None, **asked}
    try:
        recipe = Recipe(**asked)
    except ValueError as error:
        raise UserError(f"{error}.") from error
    _expect_room(recipe)
    return _begun(lambda corpus: Training(recipe, corpus, processes), read_corpus(text or ()))


def _resumed(
    path: Path,
    text: list[str] | None,
    asked: dict[str, Any],
    processes: Processes,
    outputs: list[tuple[str, Path]],
) -> Training:
    """The run in `path`; raises UserError where an option was given that the run does not have."""
    checkpoint = Checkpoint.read(path)
    for name, value in asked.items():
        has = getattr(checkpoint.recipe, name)
        if has != value:
            option = _OPTION_OF.get(name, "--" + name.replace("_", "-"))
            raise UserError(f"{path} is of a run with {name} = {has}, but {option} {value} was given.")
    if text is None and checkpoint.sources != (DOCUMENTATION,):
        text = list(checkpoint.sources)
        check_apart(outputs, [("the run's text", source) for source in text])
        corpus = _corpus_again(path, text)
    else:
        corpus = read_corpus(text or ())
    try:
        _expect_room(checkpoint.recipe)
        return _begun(lambda corpus: Training.from_checkpoint(checkpoint, corpus, processes), corpus)
    except CheckpointError as error:
        raise UserError(f"{path}: {error}") from error


def _corpus_again(path: Path, sources: list[str]) -> Corpus:
    """The text of the run in `path`; raises UserError where it came from standard input and is not there again."""
    again = UserError(
        f"{path} is of a run whose text came from standard input: it has to be piped in again, the same text."
    )
    if "-" in sources and sys.stdin is not None and sys.stdin.isatty():
        raise again  # reading would wait for somebody to type it
    try:
        return read_corpus(sources)
    except TextError as error:
        if str(error).startswith("standard input"):
            raise again from error
        raise


def _expect_room(recipe: Recipe) -> None:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes that torchrun started on this machine
    needed, there = here * memory_needed(recipe), available_bytes()
    if there is not None and needed > there:
        raise UserError(
            f"A run of these sizes needs at least {needed:,} bytes of memory, and {there:,} are available."
        )


class _Warning:
    """Says on standard error that checkpoints cannot be written: once for each reason, not every time."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, error: CheckpointError) -> None:
        if str(error) not in self._said:
            self._said.add(str(error))
            _warn(f"{error} The training goes on without a checkpoint.")


def _warn(message: str) -> None:
    print(f"attn-ext: warning: {message}", file=sys.stderr)


def _begun(make: Callable[[Corpus], Training], corpus: Corpus) -> Training:
    try:
        return make(corpus)
    except TextError:  # a ValueError that says all by itself
        raise
    except ValueError as error:
        raise UserError(f"{error}.") from error


def _check_start(checkpoint: Path, resume: bool, restart: bool) -> None:
    if resume and restart:
        raise UserError("--resume and --restart exclude each other.")
    if not checkpoint.exists():
        return
    try:
        Checkpoint.expect_at(checkpoint)
    except CheckpointError as error:
        if resume:
            raise
        raise UserError(
            f"--checkpoint {checkpoint}: a file is there that is no checkpoint, and it is not replaced ({error}); "
            "expected a new name."
        ) from error
    if not resume and not restart:
        raise UserError(
            f"{checkpoint} is of an unfinished run: add --resume to go on with it, or --restart to begin anew."
        )


def _announce(training: Training) -> None:
    recipe, corpus = training.recipe, training.corpus
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    blocks = "1 block" if recipe.layers == 1 else f"{recipe.layers} blocks"
    length = f"{recipe.steps:,} steps" if recipe.steps else f"{recipe.minutes:g} minutes"
    begun = f", from step {training.step:,} on" if training.step else ""
    out().print(
        f"{', '.join(corpus.sources)}: {len(corpus.training):,} bytes to train on, {len(corpus.validation):,} held "
        f"out. {parameters:,} parameters, {blocks}, a context of {recipe.context} bytes; {length}{begun}."
    )


def _validation(training: Training) -> dict[str, Any]:
    corpus = training.corpus
    text = corpus.validation
    stride = max(1, training.model.max_len // 4)
    with progress("scoring", len(text)) as advance:
        bits = bits_per_byte(training.model, text, corpus.training, stride=stride, on_bytes=advance)
    if not math.isfinite(bits):
        raise UserError(
            f"The model is saved, but the held-out text costs {bits} bits per byte: a lower learning rate than "
            f"{training.recipe.learning_rate:g} may help."
        )
    sizes = {"this model": bits * len(text) / 8, **compressed_sizes(text)}
    characters = len(text.decode("utf-8"))
    return {
        "bits_per_byte": bits,
        "least_context": training.model.max_len - stride + 1,
        "characters": characters,
        "rows": [
            {
                "name": name,
                "bytes": math.ceil(size),
                "bits_per_byte": 8 * size / len(text),
                "bits_per_character": 8 * size / characters,
            }
            for name, size in sizes.items()
        ],
    }


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (and SIGTERM) ask for a stop after the step at hand; a second Ctrl-C ends the program at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT and "WORLD_SIZE" not in os.environ:
            # (torchrun hands the terminal's Ctrl-C on to processes that may have had it already.)
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar(training: Training) -> Iterator[Callable[[TrainingStep], None]]:
    """A bar on standard error with loss, speed and time left; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("step {task.fields[step]:,}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[loss]} bits/byte"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[left]} left"),
    )
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (console.is_terminal and training.processes.leads),
        auto_refresh=False,
    )
    before, tokens = training.seconds, 0
    begun = training.fraction

    with bar:
        task = bar.add_task("training", total=1.0, step=training.step, loss="–", speed=0.0, left="–")

        def on_step(step: TrainingStep) -> None:
            nonlocal tokens
            tokens += step.tokens
            elapsed = step.seconds - before
            left = elapsed * (1 - step.fraction) / max(step.fraction - begun, 1e-9)
            bar.update(
                task,
                completed=min(1.0, step.fraction),
                step=step.step,
                loss=_recent(training.losses),
                speed=tokens / elapsed,
                left=_time(max(0.0, left)),
                refresh=True,
            )

        yield on_step


def _recent(losses: list[float]) -> str:
    """The mean of the last 50 losses, in bits."""
    last = losses[-50:]
    return f"{sum(last) / len(last) / math.log(2):.3f}"


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
