"""What does it cost to append tokens to a KV cache, at lengths from a hundred to a hundred thousand?

`kv_cache_append_` and `KVCache.append` write the new tokens in place, so that the length must not matter. Beside them:
an assignment to a slice of a preallocated tensor, and torch.cat, which copies all that is there. All rivals' caches
have room. Every row is first compared with the reference, bit by bit; a row that is wrong is not timed, and makes the
exit code 1.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from bench import over_length
from bench.attention import microseconds
from bench.common import DTYPES, Column, Runner, machine_line, print_table, say
from bench.over_length import Settings

NUM_KV_HEADS, HEAD_DIM = 8, 64
LENGTHS = (100, 1_000, 10_000, 100_000)
NO_INT8 = "torch has no int8 cache"
RIVALS = {
    "attn_ext": "kv_cache_append_",
    "KVCache": "KVCache.append",
    "torch": "slice assignment",
    "torch cat": "torch.cat",
}


@dataclass(frozen=True)
class Case:
    """One row: n tokens for a cache of one sequence that holds `length` of them."""

    dtype: str  # fp32, bf16; int8: the cache, for bf16 tokens
    n: int
    length: int
    quick: bool = False

    @property
    def id(self) -> str:
        return f"{self.family} at {self.length}"

    @property
    def family(self) -> str:
        return f"{self.dtype} {self.n} token" + ("s" if self.n > 1 else "")

    @property
    def token_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "int8" else DTYPES[self.dtype]


def all_cases() -> list[Case]:
    """Every row, in the order of the table."""
    return [
        Case(dtype, n, length, quick=n == 1 and length <= 10_000)
        for dtype in ("fp32", "bf16", "int8")
        for n in (1, 16)
        for length in LENGTHS
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench append`."""
    over_length.add_options(parser, seconds="0.5, quick 0.1", quantity="µs an append")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result was wrong."""
    cases = over_length.chosen(all_cases(), options)
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    settings = Settings.of(options, seconds=0.5, quick_seconds=0.1)
    over_length.require_memory(cases, memory_needed, settings.device)
    result = over_length.new_result("append", settings)
    for number, case in enumerate(cases, 1):
        say(f"[{number}/{len(cases)}] {case.id}")
        result["rows"].append(measure_row(case, settings))
    show(result)
    over_length.write_files(result, options, ("dtype", "tokens"))
    return over_length.exit_code(result)


def memory_needed(case: Case) -> int:
    """Bytes of a row: our cache, the one that torch.cat starts from, and the one that it makes."""
    return 3 * 2 * NUM_KV_HEADS * (case.length + ROOM) * HEAD_DIM * case.token_dtype.itemsize


def measure_row(case: Case, settings: Settings) -> dict[str, Any]:
    """Checks one row, then times all rivals in it."""
    row: dict[str, Any] = over_length.start_of(case, check(case))
    row |= {"dtype": case.dtype, "tokens": case.n}
    if not row["check"]["ok"]:
        say(f"    WRONG: {row['check']['worst']}")
        return row
    rivals = make_rivals(case)
    for name in RIVALS.keys() - rivals.keys():
        row["rivals"][name] = {"skipped": NO_INT8}
    runners = [Runner(name, rival.append, how=RIVALS[name]) for name, rival in rivals.items()]
    over_length.time_row(row, runners, settings)
    return row


# --- what is timed ------------------------------------------------------------------------------------------------

TURNS = 64  # appends of a KVCache before it is cut back to the row's length
ROOM = 16 * TURNS


@dataclass(frozen=True)
class Rival:
    """One way to append: what is timed, and what is stored behind the row's length after a first call."""

    append: Callable[[], Any]
    stored: Callable[[], tuple[Tensor, ...]]  # keys, values (and scales) of the n new tokens
    forget: Callable[[], None]  # that nothing of them is there before: rivals share a cache


def make_rivals(case: Case) -> dict[str, Rival]:
    """All ways that there are for a row's dtype, by name."""
    k, v = new_tokens(case)
    end = case.length + case.n
    cache = attn_ext.KVCache(
        1,
        NUM_KV_HEADS,
        HEAD_DIM,
        capacity=case.length + ROOM,
        dtype=case.token_dtype,
        quantized=case.dtype == "int8",
    )
    lengths = torch.tensor([case.length])

    def places() -> list[Tensor]:
        everything = (cache.k, cache.v, cache.k_scales, cache.v_scales)
        return [t[:, :, case.length : end] for t in everything if t is not None]

    def stored() -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in places())

    def forget() -> None:
        for t in places():
            t.fill_(77)

    scales = {"k_scales": cache.k_scales, "v_scales": cache.v_scales} if cache.quantized else {}
    in_place = functools.partial(attn_ext.kv_cache_append_, cache.k, cache.v, k, v, lengths, **scales)
    # The operator and the assignment write to the tensors of the KVCache: one cache is enough.
    rivals = {
        "attn_ext": Rival(in_place, stored, forget),
        "KVCache": Rival(_append_and_cut(cache, case, k, v), stored, forget),
    }
    if case.dtype == "int8":
        return rivals

    def assign() -> None:
        cache.k[:, :, case.length : end] = k
        cache.v[:, :, case.length : end] = v

    old_k, old_v = (
        torch.zeros(1, NUM_KV_HEADS, case.length, HEAD_DIM, dtype=case.token_dtype) for _ in range(2)
    )

    def concatenate() -> tuple[Tensor, Tensor]:
        return torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)

    return {
        **rivals,
        "torch": Rival(assign, stored, forget),
        "torch cat": Rival(
            concatenate, lambda: tuple(t[:, :, case.length :] for t in concatenate()), lambda: None
        ),
    }


def _append_and_cut(cache: attn_ext.KVCache, case: Case, k: Tensor, v: Tensor) -> Callable[[], None]:
    """Appends; every 64th call first goes back to the row's length, so that the cache never has to grow."""
    room = torch.zeros(1, NUM_KV_HEADS, case.length, HEAD_DIM, dtype=case.token_dtype)
    cache.append(room, room)
    turns = itertools.cycle([True] + [False] * (TURNS - 1))

    def append() -> None:
        if next(turns):
            cache.truncate(case.length)
        cache.append(k, v)

    return append


def new_tokens(case: Case) -> tuple[Tensor, Tensor]:
    """Random normal k and v (1, Hkv, n, D), the same ones every time for the same row."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
    shape = (1, NUM_KV_HEADS, case.n, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator).to(case.token_dtype) for _ in range(2))
    return k, v


# --- the check ----------------------------------------------------------------------------------------------------


def check(case: Case) -> dict[str, Any]:
    """Compares what each rival stores with what the reference does: ok, and who differs, in words."""
    expected = expected_rows(case)
    for name, rival in make_rivals(case).items():
        rival.forget()
        rival.append()
        for what, mine, right in zip(
            ("keys", "values", "scales of keys", "scales of values"), rival.stored(), expected, strict=False
        ):
            if not torch.equal(mine, right):
                return {"ok": False, "worst": f"{RIVALS[name]}: other {what} than the reference stores"}
    return {"ok": True, "worst": ""}


def expected_rows(case: Case) -> tuple[Tensor, ...]:
    """What the reference stores of the new tokens in a cache that has just room for them."""
    k, v = new_tokens(case)
    if case.dtype != "int8":
        return k, v
    caches = [torch.zeros(k.shape, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(k.shape[:-1]) for _ in range(2)]
    reference.kv_cache_append_(*caches, k, v, 0, k_scales=scales[0], v_scales=scales[1])
    return (*caches, *scales)


# --- output -------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Prints the table, and how much the length matters to whom."""
    columns = [Column("row", right=False), *(Column(f"{how} µs") for how in RIVALS.values())]
    cells = []
    for row in result["rows"]:
        if not row["check"]["ok"]:
            cells.append(over_length.wrong_row(row, len(columns)))
            continue
        figures = (row["rivals"][name] for name in RIVALS)
        cells.append([row["id"], *(microseconds(f) if "median_us" in f else "–" for f in figures)])
    print_table(columns, cells, machine_line(result["machine"]))
    print()
    lines = [
        f"One sequence, {NUM_KV_HEADS} heads of {HEAD_DIM}. "
        "Median ± half the spread from the 20th to the 80th percentile.",
        *growth(result),
        *over_length.reading(result),
    ]
    print("\n".join(lines))


def growth(result: dict[str, Any]) -> list[str]:
    """For each kind of row how the time at the longest length compares with that at the shortest."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["check"]["ok"]:
            families.setdefault(row["family"], []).append(row)
    lines = []
    for family, rows in families.items():
        first, last = (pick(rows, key=lambda row: row["length"]) for pick in (min, max))
        if first is last:
            continue
        ratios = [
            f"{how} {last['rivals'][name]['median_us'] / first['rivals'][name]['median_us']:.2f}×"
            for name, how in RIVALS.items()
            if "median_us" in first["rivals"][name]
        ]
        lines.append(
            f"{family}, time at {last['length']:,} over that at {first['length']:,}: {', '.join(ratios)}."
        )
    return lines
