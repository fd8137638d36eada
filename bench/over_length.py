"""What the benchmarks over length (decode, append, generate) share: their options, their files, their exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from bench import plot
from bench.attention import microseconds
from bench.common import (
    SCHEMA,
    BenchError,
    Runner,
    add_row_filter,
    add_run_options,
    describe_machine,
    require_folder,
    seconds_of,
    threads_of,
    time_runners,
    write_csv,
    write_json,
)
from bench.device import CpuDevice, Device, device_for


class Row(Protocol):
    """What a row of these benchmarks has."""

    @property
    def id(self) -> str:
        """Its name in filters and files."""
        ...

    @property
    def family(self) -> str:
        """Its name without the length: rows of one family make a curve."""
        ...

    @property
    def length(self) -> int: ...

    @property
    def quick(self) -> bool:
        """Whether it is part of --quick."""
        ...


AnyRow = TypeVar("AnyRow", bound=Row)


def add_options(
    parser: argparse.ArgumentParser, *, seconds: str, quantity: str, devices: Sequence[str] = ("cpu",)
) -> None:
    """The options of these commands; `quantity` is what the plot shows over length."""
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default="cpu")
    else:
        parser.set_defaults(device=devices[0])
    add_row_filter(parser)
    add_run_options(parser, seconds=seconds)
    parser.add_argument("--quick", action="store_true", help="the short rows, less time each")
    parser.add_argument("--json", metavar="FILE", help="write the result for compare and plot")
    parser.add_argument("--csv", metavar="FILE", help="write one line a row and rival")
    parser.add_argument("--plot", metavar="FILE.png", help=f"draw {quantity} over length")


def chosen(cases: Sequence[AnyRow], options: argparse.Namespace) -> list[AnyRow]:
    """The rows that --rows and --quick leave, at least one; BenchError where they leave none."""
    texts = [text.lower() for text in options.rows]
    cases = [case for case in cases if not texts or any(text in case.id.lower() for text in texts)]
    cases = [case for case in cases if case.quick or not options.quick]
    if not cases:
        raise BenchError(
            "no row fits these filters; --list names the rows (with --quick only the short ones run)"
        )
    return cases


@dataclass(frozen=True)
class Settings:
    """How a run measures."""

    threads: int
    seconds: float  # per rival and row
    rounds: int
    pause: float  # before each block
    ceiling_seconds: float  # per ceiling
    device: Device = CpuDevice()

    @staticmethod
    def of(options: argparse.Namespace, *, seconds: float, quick_seconds: float) -> Settings:
        """Reads and checks the options, files included, before anything takes time; sets torch's threads."""
        settings = Settings(
            threads=threads_of(options),
            seconds=seconds_of(options, quick_seconds if options.quick else seconds),
            rounds=3 if options.quick else 5,
            pause=0.05 if options.quick else 0.1,
            ceiling_seconds=0.1 if options.quick else 0.3,
            device=device_for(options.device),
        )
        for path in filter(None, (options.json, options.csv, options.plot)):
            require_folder(path)
        if options.plot:
            plot.require_matplotlib()
        torch.set_num_threads(settings.threads)
        return settings


def require_memory(cases: Sequence[AnyRow], needed: Callable[[AnyRow], int], device: Device) -> None:
    """BenchError where a row takes more memory than is free."""
    available = device.available_bytes()
    largest = max(cases, key=needed)
    if available is not None and needed(largest) > available:
        raise BenchError(
            f"row {largest.id!r} takes {needed(largest) / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are "
            "free; choose others with --rows or --quick"
        )


def time_row(row: dict[str, Any], runners: Sequence[Runner], settings: Settings) -> None:
    """Times the rivals of a row and adds their figures to it, and the ratio of torch's time to ours."""
    timings = time_runners(
        settings.device.timer, runners, seconds=settings.seconds, rounds=settings.rounds, pause=settings.pause
    )
    for runner in runners:
        row["rivals"][runner.name] = {"how": runner.how, **timings[runner.name].report()}
    add_ratio(row)


def add_ratio(row: dict[str, Any]) -> None:
    """Adds the ratio of torch's time to ours, where torch was timed."""
    ours, torchs = (row["rivals"].get(name, {}) for name in ("attn_ext", "torch"))
    if "median_us" in torchs:
        row["ratio"] = torchs["median_us"] / ours["median_us"]


def start_of(case: Row, check: dict[str, Any]) -> dict[str, Any]:
    """A row of the result before it is timed."""
    return {
        "id": case.id,
        "family": case.family,
        "length": case.length,
        "check": check,
        "rivals": {},
        "ratio": None,
    }


def new_result(name: str, settings: Settings) -> dict[str, Any]:
    """What goes into the JSON file, without rows as yet.

    Raises:
        BenchError: ATTN_EXT_ISA names an instruction set that cannot run here.
    """
    return {
        "schema": SCHEMA,
        "bench": name,
        "machine": describe_machine(settings.device.name, settings.threads),
        "settings": {"seconds": settings.seconds, "rounds": settings.rounds, "pause": settings.pause},
        "rows": [],
    }


TIMING_FIELDS = ("median_us", "p20_us", "p80_us", "first_us", "samples", "calls_per_sample")
MACHINE_FIELDS = ("device", "threads", "isa", "attn_ext", "torch", "time")


def write_files(result: dict[str, Any], options: argparse.Namespace, own_fields: Sequence[str]) -> None:
    """Writes what --json, --csv and --plot ask for.

    Args:
        own_fields: columns of the CSV that only this benchmark has, of rows or of rivals.
    """
    if options.json:
        write_json(options.json, result)
    if options.csv:
        fields = ("id", "family", "length", "rival", "how", *TIMING_FIELDS)
        fields = (*fields, *own_fields, "skipped", "check", *MACHINE_FIELDS)
        write_csv(options.csv, fields, csv_lines(result))
    if options.plot:
        plot.draw(result, options.plot)


def csv_lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for every row and rival; a row that is wrong has one line."""
    lines = []
    for row in result["rows"]:
        check = "ok" if row["check"]["ok"] else row["check"]["worst"]
        for name, rival in row["rivals"].items() or [("attn_ext", {})]:
            lines.append({**result["machine"], **row, "rival": name, **rival, "check": check})
    return lines


def exit_code(result: dict[str, Any]) -> int:
    """1 where a row was wrong, else 0."""
    return int(any(not row["check"]["ok"] for row in result["rows"]))


def reading(result: dict[str, Any]) -> list[str]:
    """Sentences that end every table: what lost, what was left out, what was wrong."""
    timed = [row for row in result["rows"] if row["check"]["ok"]]
    compared = [row for row in timed if row["ratio"] is not None]
    lost = [row["id"] for row in compared if row["ratio"] < 1]
    skipped: dict[str, set[str]] = {}
    for row in timed:
        for name, rival in row["rivals"].items():
            if "skipped" in rival:
                skipped.setdefault(name, set()).add(rival["skipped"])
    lines = [f"{name} has no figure where: {'; '.join(sorted(why))}." for name, why in skipped.items()]
    lines.append(
        f"attn_ext is slower than torch in {len(lost)} of {len(compared)} rows"
        + (f": {'; '.join(lost)}." if lost else ".")
    )
    wrong = [row["id"] for row in result["rows"] if not row["check"]["ok"]]
    if wrong:
        lines.append(f"WRONG RESULTS in {len(wrong)} rows: {'; '.join(wrong)}.")
    return lines


def wrong_row(row: dict[str, Any], width: int) -> list[str]:
    """Cells of a row whose result was wrong: what was, and no figures."""
    return [row["id"], "WRONG", row["check"]["worst"], *[""] * (width - 3)]


def beside(ours: dict[str, Any], theirs: dict[str, Any], *more: Callable[[dict[str, Any]], str]) -> list[str]:
    """Cells of a rival: its time, `more` of it, and the ratio of its time to ours; dashes where it has no figure."""
    if "median_us" not in theirs:
        return ["–"] * (2 + len(more))
    ratio = theirs["median_us"] / ours["median_us"]
    return [microseconds(theirs), *(text(theirs) for text in more), f"{ratio:.2f}×"]
