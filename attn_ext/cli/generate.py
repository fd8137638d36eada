"""`attn-ext generate`: a language model of `attn-ext train-lm` goes on with a text."""

from __future__ import annotations

import codecs
import math
import secrets
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from .. import backend
from ..kv_cache import BaseCache
from ..models import CausalLM, LogitsError, WeightsError
from ..models import load as load_model
from .common import (
    EXIT_INTERRUPTED,
    JsonOption,
    ThreadsOption,
    UserError,
    print_json,
    says_errors_plainly,
    set_up,
)
from .train_lm import DEFAULT_OUT

DEFAULT_TOKENS = 200
DEFAULT_TEMPERATURE = 0.8


@says_errors_plainly(WeightsError, LogitsError)
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="How the text begins.")],
    model: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="A model of attn-ext train-lm.")
    ] = DEFAULT_OUT,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000_000,
            help="How many bytes to write.",
            show_default="200, or as many as the model reads",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="0 takes the likeliest byte; higher draws more freely.",
            show_default="0.8, or 0 with --beams",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Draw from so many bytes only.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest bytes that together have this probability.")
    ] = None,
    beams: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Above 1: search for the likeliest text, and show it at the end."),
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of what is drawn.", show_default="another one each time")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="See only so many bytes back; the text may then be of any length."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Keep keys and values as int8.")] = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Go on with a text.

    The text comes on standard output as it is written; how fast that was, and how large the cache, on standard error.

    Ctrl-C stops; exit code 130.
    """
    if (top_k is not None or top_p is not None) and (beams > 1 or temperature == 0):
        raise UserError(
            "--top-k and --top-p are for drawing: they go with a --temperature above 0 and no --beams."
        )
    if beams > 1 and temperature:
        raise UserError("--beams searches for the likeliest text and draws nothing: leave out --temperature.")
    if temperature is None:
        temperature = 0.0 if beams > 1 else DEFAULT_TEMPERATURE
    if not math.isfinite(temperature):
        raise UserError(f"--temperature must be a finite number, got {temperature:g}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {top_p:g}.")
    set_up(threads)
    lm = load_writer(model)
    content = _as_bytes(prompt)
    count = _checked_count(lm, model, len(content), tokens, window)
    stream = None if json else _Stream(prompt)
    report = run(
        lm,
        content,
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        num_beams=beams,
        seed=secrets.randbits(32) if seed is None else seed,
        window=window,
        quantized=int8,
        on_byte=stream.write if stream else lambda byte: None,
    )
    report = {"model": str(model), **report}
    if stream is not None:
        stream.close(report["text"] if beams > 1 else "")
        show(report, Console(stderr=True, highlight=False, markup=False, emoji=False))
    else:
        print_json(report)
    if not report["finished"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def load_writer(path: Path) -> CausalLM:
    """The model in `path`; raises UserError or WeightsError where there is none that writes bytes."""
    if not path.exists():
        raise UserError(f"{path} does not exist; attn-ext train-lm makes a model that writes.")
    model = load_model(path)
    if not isinstance(model, CausalLM):
        raise UserError(f"{path} holds a {type(model).__name__}, and only a CausalLM goes on with a text.")
    if model.config["tokenizer"] != "bytes":
        raise UserError(
            f"{path} does not say that its tokens are bytes, so that no text can be made of them."
        )
    return model


def run(
    model: CausalLM,
    prompt: bytes,
    count: int,
    *,
    window: int | None,
    quantized: bool,
    num_beams: int,
    on_byte: Callable[[int], None],
    **options: Any,
) -> dict[str, Any]:
    """Write `count` tokens behind the prompt; returns the report, ready for JSON.

    `on_byte` gets each token as it comes, except with beams. `options` are those of `CausalLM.generate`.
    """
    kind = "sliding" if window is not None else "paged" if num_beams > 1 else "contiguous"
    capacity = None if window is not None else len(prompt) + count - 1
    caches = model.new_cache(1, capacity, kind=kind, window=window, quantized=quantized)
    tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long()[None]
    written: list[int] = []

    started, finished = time.perf_counter(), True
    with _times_of_passes(model) as passes, _stop_signal(streams=num_beams == 1) as should_stop:

        def on_token(token: Tensor) -> None:
            written.append(int(token))
            on_byte(written[-1])
            if should_stop():
                raise KeyboardInterrupt

        try:
            result = model.generate(
                tokens,
                count,
                num_beams=num_beams,
                cache=caches,
                callback=on_token if num_beams == 1 else None,
                **options,
            )
            written = result[0, len(prompt) :].tolist()
        except KeyboardInterrupt:
            finished = False
    return {
        "isa": backend.active(),
        "threads": torch.get_num_threads(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "prompt": prompt.decode("utf-8"),
        "text": _text(written),
        "finished": finished,
        "options": {"num_beams": num_beams, **options},
        "prefill": _speed(len(prompt), passes[0] - started if passes else 0.0),
        "decode": _speed(max(0, len(passes) - 1), passes[-1] - passes[0] if passes else 0.0),
        "cache": _cache_report(caches, kind),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `run` found out about speed and memory."""
    options, cache = report["options"], report["cache"]
    how = f"seed {options['seed']}" if options["temperature"] else "the likeliest bytes"
    if options["num_beams"] > 1:
        how = f"{options['num_beams']} beams"
    lines = [
        f"{report['model']}: {report['parameters']:,} parameters, {report['isa']}, "
        f"{report['threads']} thread{'' if report['threads'] == 1 else 's'}, {how}",
        f"  prompt   {_speed_line(report['prefill'])}",
        f"  decode   {_speed_line(report['decode'])} (the prompt's pass gave the first)",
        f"  cache    {cache['bytes']:,} bytes of {cache['dtype']}: {cache['kind']}, {cache['layers']} layers, "
        f"{cache['positions']:,} positions",
    ]
    if not report["finished"]:
        lines.append("  stopped before the end")
    for line in lines:
        console.print(line, soft_wrap=True)


def _checked_count(model: CausalLM, path: Path, prompt: int, asked: int | None, window: int | None) -> int:
    """How many tokens to write; raises UserError where the model could not read so many."""
    rotary = model.position_embedding is None
    if window is not None and window > model.max_len:
        raise UserError(f"--window {window}: {path} reads {model.max_len} bytes at most.")
    if window is not None and not rotary:
        raise UserError(
            f"--window: {path} numbers its positions, so that a text cannot go on past {model.max_len}."
        )
    if window is not None:
        return DEFAULT_TOKENS if asked is None else asked
    room = model.max_len - prompt + 1  # the last byte is not read
    hint = f"; --window {model.max_len} goes on without end" if rotary else ""
    if room < 1:
        raise UserError(f"--prompt has {prompt} bytes, and {path} reads {model.max_len} at most{hint}.")
    if asked is not None and asked > room:
        raise UserError(
            f"--tokens {asked}: behind a prompt of {prompt} bytes {path} can write {room}, for it reads "
            f"{model.max_len} at most{hint}."
        )
    return min(DEFAULT_TOKENS, room) if asked is None else asked


def _as_bytes(prompt: str) -> bytes:
    try:
        content = prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("--prompt is not valid UTF-8.") from None
    if not content:
        raise UserError("--prompt needs some text to go on from.")
    return content


@contextmanager
def _stop_signal(*, streams: bool) -> Iterator[Callable[[], bool]]:
    """While text is streamed, the first Ctrl-C only asks to stop: in the midst of a write it could tear a character."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or not streams:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _times_of_passes(model: CausalLM) -> Iterator[list[float]]:
    """When each pass through the model ended: the prompt's first, then one a token."""
    times: list[float] = []
    handle = model.blocks.register_forward_hook(lambda *_: times.append(time.perf_counter()))
    try:
        yield times
    finally:
        handle.remove()


def _speed(tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else None}


def _speed_line(speed: dict[str, Any]) -> str:
    rate = speed["tokens_per_second"]
    return f"{speed['tokens']:,} tokens in {speed['seconds']:.3f} s" + (
        f": {rate:,.0f} tokens/s" if rate else ""
    )


def _cache_report(caches: list[BaseCache], kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "layers": len(caches),
        "positions": caches[0].k.shape[0] * caches[0].k.shape[2],
        "dtype": str(caches[0].k.dtype).removeprefix("torch."),
        "bytes": sum(cache.nbytes for cache in caches),
    }


def _text(tokens: list[int]) -> str:
    reader = _Characters()
    return "".join(map(reader.read, tokens)) + reader.end()


class _Characters:
    """Characters out of single bytes: each comes with its last byte, and what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, token: int) -> str:
        if token > 255:  # of a larger vocabulary: no byte
            return self._decoder.decode(b"", final=True) + "\ufffd"
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Stream:
    """Shows a text on standard output as it comes, its prompt first.

    What a model writes is noise before it is trained, so characters that steer a terminal are shown as U+FFFD.
    """

    def __init__(self, prompt: str) -> None:
        self._characters = _Characters()
        self._show(prompt)

    def write(self, token: int) -> None:
        self._show(self._characters.read(token))

    def close(self, rest: str = "") -> None:
        self._show(self._characters.end() + rest + "\n")

    def _show(self, text: str) -> None:
        shown = (c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
        sys.stdout.write("".join(shown))
        sys.stdout.flush()
