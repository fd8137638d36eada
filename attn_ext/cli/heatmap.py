"""`attn-ext heatmap`: what a saved model's heads look at in one sentence, as numbers and as a picture."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from ..models import TextClassifier, WeightsError
from ..models import load as load_model
from ..teach.heatmap import collect_weights, draw, panels, save_figure
from .common import (
    JsonOption,
    UserError,
    check_apart,
    check_writable,
    finish,
    says_errors_plainly,
    set_up,
)
from .train_classifier import DEFAULT_PATH

DEFAULT_TOKENS = (12, 5, 3, 16, 9, 7, 1, 14)
DEFAULT_WATCHED = (3, 7)
QUERY = 0  # the classifier answers from its first token


@says_errors_plainly(WeightsError)
def heatmap(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A file that attn_ext.models.save wrote.")
    ] = DEFAULT_PATH,
    tokens: Annotated[
        str, typer.Option(metavar="IDS", help="The sentence: token ids, with spaces or commas between them.")
    ] = " ".join(map(str, DEFAULT_TOKENS)),
    watch: Annotated[
        list[int] | None,
        typer.Option(help="A token to sum the weight on; repeatable.", show_default="3 and 7"),
    ] = None,
    block: Annotated[
        list[int] | None,
        typer.Option(help="A block to show, from 0; repeatable.", show_default="all"),
    ] = None,
    head: Annotated[
        list[int] | None,
        typer.Option(help="A head to show, from 0; repeatable.", show_default="all"),
    ] = None,
    save: Annotated[
        Path, typer.Option(metavar="NAME", help="The pictures become NAME.png and NAME.svg.")
    ] = Path("heatmap"),
    json: JsonOption = False,
) -> None:
    """Draw what a trained model's heads look at.

    Queries down, keys across. For the classifier of `attn-ext train-classifier` the first token, from which it
    answers, should look at 3 and 7: the table says how much of its weight falls there.
    """
    sentence = _token_ids(tokens)
    name = picture_name(save)
    for picture in _pictures(name):
        check_writable("--save", picture)
        check_apart([("--save", picture)], [("MODEL", model)])
    if not can_draw():
        raise UserError(
            "heatmap needs matplotlib, which is not installed: pip install matplotlib "
            "(the extra 'plot' of attn_ext)."
        )
    set_up(None)
    if not model.exists():
        raise UserError(f"{model} does not exist; attn-ext train-classifier makes a model to look at.")
    report = run(load_model(model), str(model), sentence, watch or DEFAULT_WATCHED, block, head, name)
    finish(report, show, json)


def run(
    model: nn.Module,
    source: str,
    sentence: Sequence[int],
    watched: Sequence[int],
    blocks: Sequence[int] | None,
    heads: Sequence[int] | None,
    name: Path | None,
) -> dict[str, Any]:
    """Collect the weights of one sentence and draw them into `name`.png and `name`.svg (None: no pictures).

    Returns the report, ready for JSON. Raises UserError for a sentence, block or head that the model lacks.
    """
    tokens = _checked_tokens(model, source, sentence)
    places = _places(sentence, watched)
    try:
        weights = collect_weights(model, tokens)
        grid = panels(list(weights.values()), blocks=blocks, heads=heads)
    except (IndexError, ValueError) as error:
        raise UserError(f"{source}: {error}.") from error

    labels = [str(token) for token in sentence]
    rows = []
    for block_number, row in zip(blocks or range(len(weights)), grid, strict=True):
        for head_number, panel in zip(heads or range(len(row)), row, strict=True):
            seen = panel.weights[QUERY]
            on = {str(token): float(seen[places[token]].sum()) for token in places}
            rows.append({"block": block_number, "head": head_number, "on": on, "sum": sum(on.values())})
    keys = sorted(place for found in places.values() for place in found)
    files = []
    if name is not None:
        figure = draw(
            grid,
            query_labels=labels,
            title="What the tokens " + " ".join(labels) + " look at",
            query=QUERY,
            keys=keys,
        )
        try:
            for path in _pictures(name.absolute()):
                save_figure(figure, path)
                files.append(str(path))
        except OSError as error:
            raise UserError(f"--save {name}: {error.strerror or error}.") from error
    return {
        "model": {"file": source, "class": type(model).__name__},
        "tokens": list(sentence),
        "prediction": _prediction(model, tokens),
        "query": {"position": QUERY, "token": sentence[QUERY]},
        "watched": list(places),
        "rows": rows,
        "mean": sum(row["sum"] for row in rows) / len(rows),
        "uniform": len(keys) / len(sentence),
        "files": files,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `run` returned."""
    query, watched = report["query"], [str(token) for token in report["watched"]]
    console.print(f"{report['model']['class']} of {report['model']['file']}", soft_wrap=True)
    console.print(f"  tokens   {' '.join(map(str, report['tokens']))}")
    prediction = report["prediction"]
    if prediction is not None:
        console.print(
            f"  answer   class {prediction['class']} with probability {prediction['probability']:.4f}"
        )
    console.print(
        f"\nHow the first token ({query['token']}) spreads its weight of 1; even attention would put "
        f"{report['uniform']:.3f} on {_listed(watched)}:"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("block", "head", *(f"on {token}" for token in watched), "sum", "× even"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        table.add_row(
            str(row["block"]),
            str(row["head"]),
            *(f"{row['on'][token]:.3f}" for token in watched),
            f"{row['sum']:.3f}",
            f"{row['sum'] / report['uniform']:.1f}",
        )
    console.print(table)
    console.print(
        f"Mean of these heads: {report['mean']:.3f}, {report['mean'] / report['uniform']:.1f} × even attention."
    )
    for path in report["files"]:
        console.print(f"  picture  {path}", soft_wrap=True)
    if not report["files"]:
        console.print("  no picture: matplotlib is not installed (pip install matplotlib)")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def picture_name(path: Path) -> Path:
    """The name without .png or .svg; raises UserError where no file could be made under it."""
    name = path.with_suffix("") if path.suffix in (".png", ".svg") else path
    if not name.name or not name.absolute().parent.is_dir():
        raise UserError(f"--save {path}: its folder does not exist.")
    return name


def _pictures(name: Path) -> list[Path]:
    return [name.with_name(name.name + suffix) for suffix in (".png", ".svg")]


def _token_ids(text: str) -> list[int]:
    try:
        sentence = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--tokens {text!r}: expected token ids, such as 5 3 9 7.") from None
    if not sentence:
        raise UserError("--tokens needs at least one token id.")
    return sentence


def _checked_tokens(model: nn.Module, source: str, sentence: Sequence[int]) -> torch.Tensor:
    """(1, L) int64; raises UserError where the model cannot read the sentence."""
    tokens = torch.tensor([list(sentence)])
    try:
        inspect.signature(model.forward).bind(tokens)
    except TypeError:
        raise UserError(
            f"{source} holds a {type(model).__name__}, which takes more than tokens; use "
            "attn_ext.teach.heatmap from Python."
        ) from None
    config = getattr(model, "config", {})
    vocab_size, max_len = config.get("vocab_size"), config.get("max_len")
    if vocab_size is not None:
        unknown = next((token for token in sentence if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise UserError(f"--tokens: {source} knows the ids 0 to {vocab_size - 1}, got {unknown}.")
    if max_len is not None and len(sentence) > max_len:
        raise UserError(f"--tokens: {source} reads at most {max_len} tokens, got {len(sentence)}.")
    return tokens


def _places(sentence: Sequence[int], watched: Sequence[int]) -> dict[int, list[int]]:
    """Where each watched token stands; raises UserError for one that does not."""
    places = {}
    for token in watched:
        places[token] = [i for i, other in enumerate(sentence) if other == token]
        if not places[token]:
            raise UserError(
                f"token {token} is not in the sentence {' '.join(map(str, sentence))}; "
                "--watch names tokens that are."
            )
    return places


def _prediction(model: nn.Module, tokens: torch.Tensor) -> dict[str, Any] | None:
    if not isinstance(model, TextClassifier):
        return None
    with torch.no_grad():
        probabilities = model(tokens)[0].softmax(dim=0)
    best = int(probabilities.argmax())
    return {"class": best, "probability": float(probabilities[best])}


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
