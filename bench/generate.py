"""How many tokens a second does a language model write, behind prompts of growing length?

`CausalLM.generate` with our cache; beside it the same model with caches in plain torch (SDPA on a slice of a
preallocated one, SDPA after torch.cat) and without a cache. Two models with random weights, fp32, one sequence, always
the likeliest token. Every rival's text is first compared with a full pass in float64: each token must be the likeliest
one up to rounding. A row where ours is not is not timed, and makes the exit code 1.

Times are of one token after the prompt; what the prompt takes stands beside them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_ext.models import CausalLM
from bench import over_length, torch_caches
from bench.attention import microseconds
from bench.common import Column, Timing, machine_line, print_table, say
from bench.over_length import Settings

MODELS: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 256, "d_model": 256, "h": 8, "num_kv_heads": 4, "d_ff": 688, "num_layers": 4},
    "mid": {"vocab_size": 8192, "d_model": 768, "h": 12, "num_kv_heads": 4, "d_ff": 2048, "num_layers": 12},
}
NEW_TOKENS = 32  # at most; fewer where time is up
FEWEST_TOKENS = 3
CHECKED_TOKENS = 6
ALLOWED = 1e-3  # that a token's logit may lie below the largest, as a share of the largest magnitude

RIVALS = {
    "attn_ext": "",
    "torch": "SDPA on a slice",
    "torch cat": "SDPA after torch.cat",
    "no cache": "the whole text again",
}


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    length: int  # of the prompt
    quick: bool = False

    @property
    def id(self) -> str:
        return f"{self.model} after {self.length}"

    @property
    def family(self) -> str:
        return self.model


def all_cases() -> list[Case]:
    """Every row, in the order of the table."""
    return [
        *(Case("small", length, quick=length <= 512) for length in (32, 128, 512, 2048, 8192)),
        *(Case("mid", length) for length in (32, 128, 512, 2048)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench generate`."""
    over_length.add_options(parser, seconds="3, quick 0.5, and the prompts beside", quantity="tokens/s")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result was wrong."""
    cases = over_length.chosen(all_cases(), options)
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    settings = Settings.of(options, seconds=3.0, quick_seconds=0.5)
    over_length.require_memory(cases, memory_needed, settings.device)
    result = over_length.new_result("generate", settings)
    for name, own in itertools.groupby(cases, key=lambda case: case.model):
        model = make_model(name, max(case.length for case in all_cases()) + NEW_TOKENS)
        exact = copy.deepcopy(model).double()
        for case in own:
            say(f"[{len(result['rows']) + 1}/{len(cases)}] {case.id}")
            result["rows"].append(measure_row(case, model, exact, settings))
    show(result)
    over_length.write_files(result, options, ("tokens_per_second", "prompt_us"))
    return over_length.exit_code(result)


def memory_needed(case: Case) -> int:
    """Bytes of a row: the weights in fp32 and fp64, and of the check the logits and a block's features in fp64."""
    sizes = MODELS[case.model]
    features = sizes["vocab_size"] + 2 * sizes["d_ff"] + 8 * sizes["d_model"]
    return 12 * parameters(sizes) + 16 * (case.length + NEW_TOKENS) * features


def make_model(name: str, max_len: int) -> CausalLM:
    """A model with random weights, in which every block matters for the next token."""
    model = CausalLM(**MODELS[name], max_len=max_len, tie_embeddings=False).eval()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5, generator=generator)
    return model


def measure_row(case: Case, model: CausalLM, exact: CausalLM, settings: Settings) -> dict[str, Any]:
    """Checks one row, then times all rivals in it."""
    generator = torch.Generator().manual_seed(case.length)
    prompt = torch.randint(model.embedding.num_embeddings, (1, case.length), generator=generator)
    writers = make_writers(model)
    errors = {name: difference_from_likeliest(exact, prompt, write) for name, write in writers.items()}
    ours = errors.pop("attn_ext")
    worst = f"a token lies {ours:.1e} below the likeliest one, allowed {ALLOWED:.0e}"
    row = over_length.start_of(case, {"ok": ours <= ALLOWED, "worst": worst, "checked": "tokens"})
    if not row["check"]["ok"]:
        say(f"    WRONG: {worst}")
        return row
    for name, error in errors.items():
        if not error <= ALLOWED:
            row["rivals"][name] = {"skipped": f"a token lies {error:.1e} below the likeliest one"}
            del writers[name]
    for name, paces in time_writers(writers, prompt, settings).items():
        row["rivals"][name] = {"how": RIVALS[name], **paces}
    over_length.add_ratio(row)
    return row


# --- what is timed ------------------------------------------------------------------------------------------------

Write = Callable[[Tensor, int, Callable[[Tensor], None]], None]
"""Writes n tokens behind a prompt (1, L), and calls back with each token (1,) as soon as it is known."""


def make_writers(model: CausalLM) -> dict[str, Write]:
    """The rivals, by name."""

    def with_cache(make_caches: Callable[[], Any]) -> Write:
        def write(prompt: Tensor, n: int, callback: Callable[[Tensor], None]) -> None:
            model.generate(prompt, n, callback=callback, cache=make_caches())

        return write

    def without_cache(text: Tensor, n: int, callback: Callable[[Tensor], None]) -> None:
        with torch.no_grad():
            for _ in range(n):
                token = model(text)[:, -1].argmax(dim=-1)
                callback(token)
                text = torch.cat((text, token[:, None]), dim=1)

    return {
        "attn_ext": with_cache(lambda: None),
        "torch": with_cache(lambda: torch_caches.slice_caches(model, 1)),
        "torch cat": with_cache(lambda: torch_caches.cat_caches(model, 1)),
        "no cache": without_cache,
    }


class _TimeIsUp(Exception):
    pass


def time_writers(writers: dict[str, Write], prompt: Tensor, settings: Settings) -> dict[str, dict[str, Any]]:
    """Times rivals against each other, a text each in turn, after pauses; the order turns round every other round.

    Returns:
        By name: a Timing of the tokens after the first, tokens_per_second, and prompt_us, the median of the time from
        the call to the first token.
    """
    firsts: dict[str, list[float]] = {name: [] for name in writers}
    intervals: dict[str, list[float]] = {name: [] for name in writers}
    for write in writers.values():  # thread pools, tables, memory
        write_timed(write, prompt[:, :8], 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(settings.rounds):
            for name in list(writers) if turn % 2 == 0 else reversed(writers):
                time.sleep(settings.pause)
                first, rest = write_timed(writers[name], prompt, settings.seconds / settings.rounds)
                firsts[name].append(first)
                intervals[name] += rest
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    paces = {}
    for name, taken in intervals.items():
        timing = Timing.of(taken, first=taken[0], calls_per_sample=1)
        paces[name] = {
            **timing.report(),
            "tokens_per_second": 1e6 / timing.median_us,
            "prompt_us": statistics.median(firsts[name]) * 1e6,
        }
    return paces


def write_timed(write: Write, prompt: Tensor, seconds: float) -> tuple[float, list[float]]:
    """Lets a rival write until its time after the first token is up, but at least three tokens.

    Returns:
        Seconds up to the first token, and from token to token.
    """
    ticks = [time.perf_counter()]

    def tick(_: Tensor) -> None:
        ticks.append(time.perf_counter())
        if len(ticks) > FEWEST_TOKENS and ticks[-1] - ticks[1] > seconds:
            raise _TimeIsUp

    try:
        write(prompt, NEW_TOKENS, tick)
    except _TimeIsUp:  # an exception is a legitimate way out of generate
        pass
    first, *rest = (after - before for before, after in itertools.pairwise(ticks))
    return first, rest


# --- the check ----------------------------------------------------------------------------------------------------


def difference_from_likeliest(exact: CausalLM, prompt: Tensor, write: Write) -> float:
    """How far the logit of a token that was written lies below the largest at its place, at worst.

    Args:
        exact: the model in float64, which reads the whole text at once.

    Returns:
        A share of the largest magnitude among the logits; infinite for NaN, and where a token is missing.
    """
    tokens: list[Tensor] = []
    write(prompt, CHECKED_TOKENS, tokens.append)
    if len(tokens) != CHECKED_TOKENS:
        return torch.inf
    written = torch.stack(tokens, dim=1)  # (1, n)
    with torch.no_grad():
        logits = exact(torch.cat((prompt, written[:, :-1]), dim=1))[:, prompt.shape[1] - 1 :]  # (1, n, V)
    below = logits.amax(-1) - logits.gather(-1, written[..., None]).squeeze(-1)
    return float((below / logits.abs().amax(-1)).nan_to_num(torch.inf).max())


# --- output -------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Prints the table, and what one must know to read it."""
    columns = [Column("row", right=False), Column("tokens/s"), Column("µs a token"), Column("prompt ms")]
    for name in list(RIVALS)[1:]:
        columns += [Column(f"{name} µs"), Column("tokens/s"), Column("ratio")]
    cells = []
    for row in result["rows"]:
        if not row["check"]["ok"]:
            cells.append(over_length.wrong_row(row, len(columns)))
            continue
        ours, *others = (row["rivals"][name] for name in RIVALS)
        cells.append(
            [
                row["id"],
                f"{ours['tokens_per_second']:.1f}",
                microseconds(ours),
                f"{ours['prompt_us'] / 1e3:.1f}",
                *(
                    cell
                    for other in others
                    for cell in over_length.beside(
                        ours, other, lambda rival: f"{rival['tokens_per_second']:.1f}"
                    )
                ),
            ]
        )
    print_table(columns, cells, machine_line(result["machine"]))
    print()
    for line in notes(result):
        print(line)


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the table."""
    used = {row["family"] for row in result["rows"]}
    models = [
        f"{name}: {parameters(sizes) / 1e6:.1f} M parameters, "
        + ", ".join(f"{key} {value}" for key, value in sizes.items())
        for name, sizes in MODELS.items()
        if name in used
    ]
    return [
        *(f"{line}." for line in models),
        "One token after the prompt: median ± half the spread from the 20th to the 80th percentile. prompt: from the "
        "call to the first token. ratio: their time of a token over ours.",
        "; ".join(f"{name}: {how}" for name, how in RIVALS.items() if how) + ".",
        *over_length.reading(result),
    ]


def parameters(sizes: dict[str, Any]) -> int:
    """How many numbers a model has."""
    with torch.device("meta"):
        return sum(p.numel() for p in CausalLM(**sizes, tie_embeddings=False).parameters())
