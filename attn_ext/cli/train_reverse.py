"""`attn-ext train-reverse`: an encoder with a decoder learns to write words backwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from .. import backend
from ..models import WeightsError
from ..models import save as save_model
from ..teach import reverse
from .common import (
    JsonOption,
    check_for_model,
    check_writable,
    finish,
    progress,
    says_errors_plainly,
    set_up,
    thread_count,
)

DEFAULT_PATH = Path("reverse.safetensors")
MIN_EXACT_MATCH = 0.99
STEPS = 900
SHOWN = ("attention", "transformer", "encoder", "racecar")


@says_errors_plainly(WeightsError)
def train_reverse(
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights and words.")] = 0,
    save: Annotated[
        Path, typer.Option("--out", "--save", metavar="FILE.safetensors", help="Where the model goes.")
    ] = DEFAULT_PATH,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="CPU threads; more only wait in so small a model.")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """Train an encoder and decoder to write words backwards.

    Words of 4 to 12 letters; scored on 1,000 that training never saw, by greedy decoding.

    Exit code 1: less than 99 % of them come out without a fault (the model is saved all the same).
    """
    check_writable("--out", save)
    check_for_model("--out", save)
    set_up(None)
    with thread_count(threads):
        report = run(seed, save)
    finish(report, show, json)


def run(seed: int, path: Path) -> dict[str, Any]:
    """Train, score and save; returns the report, ready for JSON."""
    with progress("training", STEPS) as advance:
        start = time.perf_counter()
        model, trained = reverse.train(seed, steps=STEPS, on_step=advance)
        seconds = time.perf_counter() - start
    save_model(model, path)
    with torch.no_grad():
        written = reverse.greedy(model, torch.cat([reverse.spell(word) for word in SHOWN]))
    return {
        "isa": backend.active(),
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": len(trained.losses),
        "first_loss": trained.losses[0],
        "last_loss": trained.losses[-1],
        "seconds": seconds,
        "held_out": trained.held_out,
        "exact": trained.exact,
        "exact_match": trained.exact_match,
        "interval": list(trained.interval),
        "min_exact_match": MIN_EXACT_MATCH,
        "examples": {word: reverse.read_back(row) for word, row in zip(SHOWN, written, strict=True)},
        "model": str(path.absolute()),
        "ok": trained.exact_match >= MIN_EXACT_MATCH,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `run` returned."""
    low, high = report["interval"]
    console.print(
        f"The task: write a word of {reverse.SHORTEST} to {reverse.LONGEST} letters backwards. The model has "
        f"{report['parameters']:,} parameters, 2 blocks on either side, 4 heads."
    )
    console.print(
        f"  loss         {report['first_loss']:.3f} → {report['last_loss']:.4f} in {report['steps']} steps, "
        f"{report['seconds']:.1f} s"
    )
    verdict = "ok" if report["ok"] else f"FAILED: below {report['min_exact_match']}"
    console.print(
        f"  exact match  {report['exact_match']:.3f}, {report['exact']} of {report['held_out']} held-out words; "
        f"95 % interval {low:.3f} – {high:.3f}: {verdict}",
        style=None if report["ok"] else "bold red",
    )
    for word, written in report["examples"].items():
        console.print(f"  {word:12} {written}")
    console.print(f"  saved as     {report['model']}", soft_wrap=True)
