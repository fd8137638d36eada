"""`attn-ext demo`: everything there is to see, in about a minute and a half."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..embed import TextError, python_topics
from ..models import WeightsError, packaged_weights
from ..models import load as load_model
from ..teach.walkthrough import walk_through
from . import embed as embed_command
from . import heatmap as heatmap_command
from . import info as info_command
from . import speed
from . import train_classifier as train_command
from . import walkthrough as walkthrough_command
from .common import (
    EXIT_CHECK_FAILED,
    JsonOption,
    ThreadsOption,
    UserError,
    check_for_model,
    check_writable,
    out,
    print_json,
    progress,
    says_errors_plainly,
    set_up,
    thread_count,
)

DEFAULT_QUERY = "Why is my default list shared between calls of the function?"


@says_errors_plainly(WeightsError, TextError)
def demo(
    query: Annotated[
        str, typer.Option("--query", "-q", help="What to look for in Python's documentation.")
    ] = (DEFAULT_QUERY),
    quick: Annotated[
        bool, typer.Option("--quick", help="Less text and fewer shapes: seconds, not a minute.")
    ] = False,
    save: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the trained model and the pictures go.")
    ] = Path("attn-ext-demo"),
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Show this build, a lesson, a real model, and speed.

    Walks through attention by hand, trains a small classifier and draws what it looks at, embeds Python's own
    documentation and answers a query, and times attention beside torch's.

    Exit code 1 means that one of them failed its check.
    """
    queries = embed_command.checked_queries([query])
    set_up(threads)
    packaged_weights()  # what is missing is said now, not in a minute
    _make_folder(save)
    console = out()

    def begin(title: str) -> None:
        console.print(f"\n{title}", style="bold underline")

    report: dict = {"info": info_command.collect()}
    if not json:
        console.print("This build", style="bold underline")
        info_command.show(report["info"], console)

    walk = walk_through()
    report["walkthrough"] = walkthrough_command.collect(walk)
    if not json:
        begin("Attention by hand (with every number: attn-ext walkthrough)")
        walkthrough_command.show(walk, "en", console, brief=True)

    path = save / train_command.DEFAULT_PATH
    with thread_count(1):
        report["train_classifier"] = train_command.run(0, path)
    if not json:
        begin("A classifier learns to look (attn-ext train-classifier)")
        train_command.show(report["train_classifier"], console)

    report["heatmap"] = heatmap_command.run(
        load_model(path),
        str(path),
        heatmap_command.DEFAULT_TOKENS,
        heatmap_command.DEFAULT_WATCHED,
        None,
        None,
        save / "heatmap" if heatmap_command.can_draw() else None,
    )
    if not json:
        begin("What it looks at (attn-ext heatmap)")
        heatmap_command.show(report["heatmap"], console)

    paragraphs, source = python_topics(), "pydoc_data.topics"
    if quick:  # one chapter, which answers the default query
        paragraphs, source = (
            [p for p in paragraphs if p.topic == "compound"],
            "pydoc_data.topics (compound)",
        )
    report["embed"], _ = embed_command.run(
        paragraphs,
        [source],
        queries,
        top=3 if quick else 5,
        batch_size=32,
        compared=True,
        compared_sentences=64 if quick else 512,
        rounds=3,
    )
    if not json:
        begin("A real model: nearest paragraphs by meaning (attn-ext embed)")
        embed_command.show(report["embed"], console)

    with progress("timing attention", len(speed.cases(quick))) as advance:
        rows = speed.measure(quick, advance)
    report["speed"] = [row.report() for row in rows]
    report["ok"] = (
        walk.ok
        and report["train_classifier"]["ok"]
        and report["embed"]["ok"]
        and all(row.agrees for row in rows)
    )
    if json:
        print_json(report)
    else:
        begin("attention() beside F.scaled_dot_product_attention")
        speed.show(rows, console)
    if not report["ok"]:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--save {path}: {error.strerror}.") from error
    check_writable("--save", path / train_command.DEFAULT_PATH)
    check_for_model("--save", path / train_command.DEFAULT_PATH)
