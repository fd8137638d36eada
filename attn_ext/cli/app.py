"""The list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .demo import demo
from .embed import embed
from .generate import generate
from .heatmap import heatmap
from .info import info
from .train_classifier import train_classifier
from .train_lm import train_lm
from .train_reverse import train_reverse
from .walkthrough import walkthrough

app = typer.Typer(
    name="attn-ext",
    help="Attention for PyTorch from scratch: look at this build, learn on it, and see it run a real model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich draws boxes that leave 30 of 80 columns for the text
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"attn-ext {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


app.command()(info)
app.command()(walkthrough)
app.command("train-classifier")(train_classifier)
app.command()(heatmap)
app.command("train-reverse")(train_reverse)
app.command("train-lm")(train_lm)
app.command()(generate)
app.command()(embed)
app.command()(demo)
