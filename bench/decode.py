"""How fast is the attention of one new token over a KV cache, in share of what memory and arithmetic allow?

A step stores the token and attends to all that is cached. Beside attn_ext: torch's SDPA on a slice of a preallocated
cache, and SDPA after torch.cat. Every row is first compared with the reference in float64; a row that is wrong is not
timed, and makes the exit code 1. Each rival goes through copies of its cache that together are four times as large as
the last-level cache, so that memory is read and not a CPU cache. What memory gives is measured just before and after
each row, what multiply-adds give as well: "% of limit" is the share of the smaller of the two.

With --device cuda (untried: no GPU has run it) CUDA events time each step, after the L2 cache was emptied; the limits
are those of torch's sums and matrix products; and each of torch's kernels behind SDPA has a figure, on a slice of its
cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_ext
from attn_ext import reference
from bench import over_length
from bench.attention import error_and_allowance, microseconds, percent, rate
from bench.common import (
    Column,
    Runner,
    ceiling_of,
    machine_line,
    mean_ceilings,
    print_table,
    say,
)
from bench.decode_cases import (
    Case,
    Inputs,
    all_cases,
    as_stored,
    copies_of,
    gpu_cases,
    make_inputs,
    memory_needed,
    our_caches,
    past,
    preallocated,
)
from bench.device import NAMES
from bench.over_length import Settings
from bench.peers import BACKENDS, CannotRun, answer_of, eager_attention, through_backend

RIVALS = {"attn_ext": "", "torch": "SDPA on a slice", "torch cat": "SDPA after torch.cat"}
NO_INT8 = "torch has no int8 cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench decode`."""
    over_length.add_options(parser, seconds="1, quick 0.2", quantity="GB/s and µs a token", devices=NAMES)


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result was wrong."""
    cases = [*all_cases(), *(gpu_cases() if options.device == "cuda" else [])]
    cases = over_length.chosen(cases, options)
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    settings = Settings.of(options, seconds=1.0, quick_seconds=0.2)
    over_length.require_memory(cases, memory_needed, settings.device)
    result = measure(cases, settings)
    show(result)
    over_length.write_files(result, options, CSV_FIELDS)
    return over_length.exit_code(result)


CSV_FIELDS = (
    *("dtype", "bytes", "flops", "gbs", "share_of_read", "share", "limit", "tokens_per_second"),
    *("read_gbs_before", "read_gbs_after", "copies", "quantisation_error"),
)


def measure(cases: Sequence[Case], settings: Settings) -> dict[str, Any]:
    """The whole run. Returns what goes into the JSON file."""
    result = over_length.new_result("decode", settings)
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.id}")
        result["rows"].append(measure_row(case, settings))
    return result


def measure_row(case: Case, settings: Settings) -> dict[str, Any]:
    """Checks one row, then times all rivals in it, between two measurements of the ceilings."""
    device = settings.device
    inputs = make_inputs(case, device.name)
    copies = copies_of(case, device.last_level_cache_bytes(), device.available_bytes())
    caches = our_caches(case, inputs, copies)
    truth = Truth.of(case, inputs)
    row = over_length.start_of(case, check(case, inputs, caches[0], truth))
    row |= {
        "dtype": case.dtype,
        "bytes": case.bytes,
        "flops": case.flops,
        "batch": case.B,
        "copies": copies,
        "quantisation_error": truth.quantisation_error,
    }
    if not row["check"]["ok"]:
        say(f"    WRONG: {row['check']['worst']}")
        return row
    runners = [Runner("attn_ext", in_turn([our_step(case, inputs, cache) for cache in caches]))]
    of_torch = {name: torch_steps(name, case, inputs, copies) for name in ("torch", "torch cat")}
    for name, steps in of_torch.items():
        reason = difference_from(truth.out, steps[0]()) if steps else NO_INT8
        if reason:
            row["rivals"][name] = {"skipped": reason}
        else:
            runners.append(Runner(name, in_turn(steps), how=RIVALS[name]))
    for name in BACKENDS if device.name == "cuda" and case.dtype != "int8" else ():
        steps = [through_backend(name, step) for step in of_torch["torch"]]  # the caches of "torch", not more
        try:
            reason = difference_from(truth.out, answer_of(steps[0]))
        except CannotRun as refusal:
            reason = str(refusal)
        if reason:
            row["rivals"][name] = {"skipped": reason}
        else:
            runners.append(Runner(name, in_turn(steps), how=RIVALS["torch"]))
    before = device.ceilings(settings.threads, settings.ceiling_seconds)
    over_length.time_row(row, runners, settings)
    after = device.ceilings(settings.threads, settings.ceiling_seconds)
    row["ceilings"] = {"before": before, "after": after, "mean": mean_ceilings(before, after)}
    add_rates(row)
    return row


def add_rates(row: dict[str, Any]) -> None:
    """Adds GB/s, tokens/s and the shares of the ceilings to every timed rival of a row."""
    ceilings = row["ceilings"]["mean"]
    row["read_gbs_before"], row["read_gbs_after"] = (
        row["ceilings"][when]["read_gbs"] for when in ("before", "after")
    )
    name, arithmetic = ceiling_of(row["dtype"], ceilings)
    least = {"read_gbs": row["bytes"] / ceilings["read_gbs"] / 1e3, name: row["flops"] / arithmetic / 1e3}
    row["limit"] = max(least, key=least.__getitem__)  # the limit that takes longer, in microseconds
    for rival in row["rivals"].values():
        if "median_us" in rival:
            rival["gbs"] = row["bytes"] / rival["median_us"] / 1e3
            rival["share_of_read"] = rival["gbs"] / ceilings["read_gbs"]
            rival["share"] = least[row["limit"]] / rival["median_us"]
            rival["tokens_per_second"] = row["batch"] / rival["median_us"] * 1e6


# --- what is timed ------------------------------------------------------------------------------------------------

Step = Callable[[], Tensor]  # stores the token at the same place again and again; returns (B, Hq, 1, D)


def in_turn(steps: Sequence[Step]) -> Step:
    """One step after the other, round and round."""
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def our_step(case: Case, inputs: Inputs, cache: dict[str, Any], *, append: bool = True) -> Step:
    """Stores the last token and attends; or only attends, to a cache that has it."""
    k, v = inputs.new if append else (None, None)
    lengths = torch.full((case.B,), case.L - append, device=inputs.q.device)
    return functools.partial(
        attn_ext.attention_with_kv_cache, inputs.q, cache_lengths=lengths, k=k, v=v, **cache
    )


def torch_steps(name: str, case: Case, inputs: Inputs, copies: int) -> list[Step]:
    """torch's side of a row over copies of its cache; none where it has no such cache.

    It has no paged cache: in such rows it has a contiguous one, which is the easier work. A ring that is exactly as
    long as the window needs no mask, as softmax does not care for the order of keys.
    """
    if case.dtype == "int8":
        return []
    attend = functools.partial(F.scaled_dot_product_attention, inputs.q, enable_gqa=case.Hq != case.Hkv)
    k, v = inputs.new
    if name == "torch cat":

        def concatenate(old_k: Tensor, old_v: Tensor) -> Tensor:
            return attend(torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2))

        return [functools.partial(concatenate, *old) for old in past(inputs, copies)]

    place = (case.L - 1) % (case.window or case.L)

    def write_and_slice(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        k_cache[:, :, place : place + 1] = k
        v_cache[:, :, place : place + 1] = v
        return attend(k_cache[:, :, : case.visible], v_cache[:, :, : case.visible])

    return [functools.partial(write_and_slice, *cache) for cache in preallocated(case, inputs, copies)]


# --- the check ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What a row must give."""

    out: Tensor  # (B, Hq, 1, D) in float64, from what the cache holds
    plain: Tensor  # the same by plain PyTorch in the row's dtype (int8: float32)
    quantisation_error: (
        float | None
    )  # of an int8 cache: largest error beside what is not quantised, as a share of it

    @staticmethod
    def of(case: Case, inputs: Inputs) -> Truth:
        k, v = as_stored(case, inputs)
        out = by_heads(case, _exactly, inputs.q, k, v)
        plain = by_heads(case, eager_attention, inputs.q.to(k.dtype), k, v)
        if case.dtype != "int8":
            return Truth(out, plain, None)
        exact = by_heads(case, _exactly, inputs.q, inputs.k, inputs.v)
        return Truth(out, plain, float((out - exact).abs().max() / exact.abs().max()))


def _exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return reference.attention(q.double(), k.double(), v.double())


def by_heads(case: Case, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query a head to all keys, one key/value head at a time to save memory: (B, Hq, 1, D).

    The query heads of a key/value head are handed over as so many queries of one head.
    """
    grouped = q.unflatten(1, (case.Hkv, -1)).squeeze(3)  # (B, Hkv, Hq / Hkv, D)
    outs = [attend(grouped[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]) for h in range(case.Hkv)]
    return torch.cat(outs, dim=1).flatten(1, 2).unsqueeze(2)


def check(case: Case, inputs: Inputs, cache: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """Takes a step, and compares the output with the truth, and with a call that finds the token in the cache.

    Allowed: twice the error of plain PyTorch in the row's own dtype + 1e-5; no difference at all between the calls.

    Returns:
        ok, worst (in words), checked.
    """
    out = our_step(case, inputs, cache)()
    again = our_step(case, inputs, cache, append=False)()
    error, allowed = error_and_allowance(out, truth.out, truth.plain, True)
    ok, worst = error <= allowed, f"out: error {error:.2e}, allowed {allowed:.2e}"
    if ok and not torch.equal(out, again):
        ok, worst = False, "the token that was stored is not the one that was attended to"
    return {"ok": ok, "worst": worst, "checked": "all heads, and what was stored"}


def difference_from(truth: Tensor, theirs: Tensor) -> str | None:
    """Why a rival has no figure: what it computes is something else; None where it is the row."""
    limit = (3e-2 if theirs.dtype in (torch.bfloat16, torch.float16) else 1e-3) * float(truth.abs().max())
    difference = float((theirs.double() - truth).abs().max())
    return None if difference <= limit else f"it differs from the reference by {difference:.1e}"


# --- output -------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Prints the table, and what one must know to read it."""
    columns = [Column("B,Hq/Hkv,L,D", right=False)]
    columns += [Column(text) for text in ("ours µs", "GB/s", "% of read", "% of limit", "tokens/s")]
    columns += [Column(text) for text in ("torch µs", "GB/s", "ratio", "torch cat µs", "ratio", "read GB/s")]
    if result["machine"]["device"] != "cpu":
        columns.append(Column("others GB/s", right=False))
    cells = []
    for row in result["rows"]:
        if not row["check"]["ok"]:
            cells.append(over_length.wrong_row(row, len(columns)))
            continue
        ours, torchs, cat = (row["rivals"][name] for name in RIVALS)
        cells.append(
            [
                row["id"],
                microseconds(ours),
                rate(ours["gbs"]),
                percent(ours["share_of_read"]),
                percent(ours["share"]) + ("ᵃ" if row["limit"] != "read_gbs" else " "),
                f"{ours['tokens_per_second']:,.0f}",
                *over_length.beside(ours, torchs, lambda rival: rate(rival["gbs"])),
                *over_length.beside(ours, cat),
                f"{row['read_gbs_before']:.1f} → {row['read_gbs_after']:.1f}",
            ]
        )
        others = {name: row["rivals"][name] for name in BACKENDS if name in row["rivals"]}
        if result["machine"]["device"] != "cpu":
            cells[-1].append(
                ", ".join(f"{name} {rate(rival['gbs'])}" for name, rival in others.items() if "gbs" in rival)
                or "–"
            )
    print_table(columns, cells, machine_line(result["machine"]))
    print()
    for line in notes(result):
        print(line)


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the table."""
    lines = [
        "A step of one layer: store a token, attend to all. Median ± half the spread from the 20th to the 80th "
        "percentile. GB/s: keys and values read. read: the machine's, before → after the row. limit: the smaller of "
        "that and (ᵃ) what multiply-adds allow.",
        f"torch: {RIVALS['torch']} of a preallocated cache (rows with pages: a contiguous one); torch cat: "
        f"{RIVALS['torch cat']}. ratio: their time over ours. int8 rows have bf16 queries.",
    ]
    rows = {row["id"]: row for row in result["rows"] if row["check"]["ok"]}
    cache = result["machine"]["last_level_cache_bytes"]  # a GPU's L2
    warm = [name for name, row in rows.items() if row["copies"] * row["bytes"] < 4 * cache]
    if warm:
        lines.append(
            f"Memory did not suffice for copies of four times the last-level cache: {'; '.join(warm)}."
        )
    moved = [
        name for name, row in rows.items() if not 0.9 <= row["read_gbs_after"] / row["read_gbs_before"] <= 1.1
    ]
    if moved:
        lines.append(f"Memory's speed moved by more than a tenth during {len(moved)} of {len(rows)} rows.")
    errors = [row["quantisation_error"] for row in rows.values() if row["quantisation_error"] is not None]
    if errors:
        lines.append(f"An int8 cache moves the largest output by {max(errors):.1%} at most.")
    twins = [(rows.get("bf16" + name[len("int8") :]), row) for name, row in rows.items() if "int8" in name]
    gains = [
        f"{row['rivals']['attn_ext']['tokens_per_second'] / twin['rivals']['attn_ext']['tokens_per_second']:.2f} "
        f"({row['id'].removeprefix('int8 ')})"
        for twin, row in twins
        if twin
    ]
    if gains:
        lines.append(f"Tokens/s of int8 over those of bf16: {', '.join(gains)}.")
    return [*lines, *over_length.reading(result)]
