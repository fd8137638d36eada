"""`attn-ext demo`: this build, a real model on it, and its speed beside torch's, in about a minute."""

from __future__ import annotations

from typing import Annotated

import typer

from ..embed import TextError, python_topics
from ..models.minilm import WeightsError
from . import embed as embed_command
from . import info as info_command
from . import speed
from .common import (
    EXIT_CHECK_FAILED,
    JsonOption,
    ThreadsOption,
    out,
    print_json,
    progress,
    says_errors_plainly,
    set_up,
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
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Show this build, a real model on it, and its speed.

    Embeds Python's own documentation, answers a query, and times attention beside torch's.

    Exit code 1 means that a vector or an attention output failed its check.
    """
    queries = embed_command.checked_queries([query])
    set_up(threads)
    console = out()
    report: dict = {"info": info_command.collect()}
    if not json:
        console.print("This build", style="bold underline")
        info_command.show(report["info"], console)

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
        console.print("\nA real model: nearest paragraphs by meaning", style="bold underline")
        embed_command.show(report["embed"], console)

    with progress("timing attention", len(speed.cases(quick))) as advance:
        rows = speed.measure(quick, advance)
    report["speed"] = [row.report() for row in rows]
    report["ok"] = report["embed"]["ok"] and all(row.agrees for row in rows)
    if json:
        print_json(report)
    else:
        console.print("\nattention() beside F.scaled_dot_product_attention", style="bold underline")
        speed.show(rows, console)
    if not report["ok"]:
        raise typer.Exit(EXIT_CHECK_FAILED)
