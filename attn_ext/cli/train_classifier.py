"""`attn-ext train-classifier`: a tutorial's toy classifier, first as it fails, then as it works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import backend
from ..models import WeightsError
from ..models import save as save_model
from ..teach import classifier
from ..teach.classifier import BalancedRun, Score, UnbalancedRun
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

DEFAULT_PATH = Path("classifier.safetensors")
MIN_ACCURACY = 0.99
UNBALANCED_EPOCHS, BALANCED_EPOCHS = 50, 300


@says_errors_plainly(WeightsError)
def train_classifier(
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the second part.")] = 0,
    save: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="Where the model goes.")
    ] = DEFAULT_PATH,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="CPU threads; more only wait in so small a model.")
    ] = 1,
    json: JsonOption = False,
) -> None:
    """Train a toy classifier: are tokens 3 and 7 both there?

    First the setting of many tutorials, which only learns to say "no"; then balanced classes, which works.

    The model is saved for `attn-ext heatmap`. Exit code 1: less than 99 % of the held-out sentences are right (the
    model is saved all the same).
    """
    check_writable("--save", save)
    check_for_model("--save", save)
    set_up(None)
    with thread_count(threads):
        report = run(seed, save)
    finish(report, show, json)


def run(seed: int, path: Path) -> dict[str, Any]:
    """Train both ways and save the second model; returns the report, ready for JSON."""
    with progress("training", UNBALANCED_EPOCHS + BALANCED_EPOCHS) as advance:
        unbalanced = classifier.train_unbalanced(epochs=UNBALANCED_EPOCHS, on_epoch=advance)
        start = time.perf_counter()
        model, balanced = classifier.train_balanced(seed, epochs=BALANCED_EPOCHS, on_epoch=advance)
        seconds = time.perf_counter() - start
    save_model(model, path)
    return {
        "isa": backend.active(),
        "question": "do tokens 3 and 7 both occur among the 8?",
        "unbalanced": _unbalanced_report(unbalanced),
        "balanced": _balanced_report(balanced),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "min_accuracy": MIN_ACCURACY,
        "model": str(path.absolute()),
        "ok": balanced.held_out.accuracy >= MIN_ACCURACY,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `run` returned."""
    unbalanced, balanced = report["unbalanced"], report["balanced"]
    console.print(
        f"The question: {report['question']} Tokens are 1 to 19. The model ({report['parameters']:,} parameters, "
        "2 blocks, 4 heads) answers from its first token."
    )
    console.print(
        f"\nAs tutorials set it: 200 uniform sentences, Adam 1e-3, 50 epochs, scored in train mode, seed "
        f"{unbalanced['seed']}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("epoch", "loss", "train accuracy", "(baseline)", "validation accuracy", "(baseline)"):
        table.add_column(name, justify="right", no_wrap=True)
    for epoch in unbalanced["log"]:
        train, validation = epoch["train"], epoch["validation"]
        table.add_row(
            str(epoch["epoch"]),
            f"{epoch['loss']:.3f}",
            f"{train['accuracy']:.3f}",
            f"({train['baseline']:.3f})",
            f"{validation['accuracy']:.3f}",
            f"({validation['baseline']:.3f})",
        )
    console.print(table)
    last = unbalanced["log"][-1]
    verdict = (
        "The validation accuracy is above the baseline by more than chance."
        if unbalanced["learned"]
        else 'Nothing was learned: "no" to every sentence (the baseline) scores as well. Only '
        f"{last['train']['positive']} of {last['train']['samples']} training sentences are a yes, and the loss "
        "falls because the model learns that."
    )
    console.print(verdict)

    held_out = balanced["held_out"]
    low, high = held_out["interval"]
    console.print(
        f"\nBalanced: 200 sentences, half of them a yes, AdamW 3e-3, 300 epochs, scored in eval mode, seed "
        f"{balanced['seed']}"
    )
    console.print(
        f"  loss               {balanced['first_loss']:.3f} → {balanced['last_loss']:.4f} in {report['seconds']:.1f} s"
    )
    console.print(f"  training accuracy  {balanced['train']['accuracy']:.3f}")
    console.print(
        f"  held-out accuracy  {held_out['accuracy']:.3f}, {held_out['correct']} of {held_out['samples']} sentences; "
        f"95 % interval {low:.3f} – {high:.3f}"
    )
    verdict = "ok" if report["ok"] else f"FAILED: below {report['min_accuracy']}"
    console.print(
        f"  baseline           {held_out['baseline']:.3f}: {verdict}",
        style=None if report["ok"] else "bold red",
    )
    console.print(f"  saved as           {report['model']}", soft_wrap=True)


def _unbalanced_report(run: UnbalancedRun) -> dict[str, Any]:
    log = [
        {
            "epoch": epoch.epoch,
            "loss": epoch.loss,
            "train": _score_report(epoch.train),
            "validation": _score_report(epoch.validation),
        }
        for epoch in run.log
    ]
    return {"seed": run.seed, "log": log, "learned": run.learned}


def _balanced_report(run: BalancedRun) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "epochs": len(run.losses),
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "train": _score_report(run.train),
        "held_out": _score_report(run.held_out),
    }


def _score_report(score: Score) -> dict[str, Any]:
    return {
        "samples": score.samples,
        "positive": score.positive,
        "correct": score.correct,
        "accuracy": score.accuracy,
        "interval": list(score.interval),
        "baseline": score.baseline,
    }
