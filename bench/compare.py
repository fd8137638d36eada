"""What changed between two result files? For each row the ratio of our times, and whether it exceeds the spread.

A row is "faster" or "slower" only where the ranges from the 20th to the 80th percentile do not overlap; anything less
is noise. torch's own ratio stands beside it as a control: where it moves as well, it was the machine that changed.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.common import BenchError, Column, print_table, read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench compare`."""
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    parser.add_argument(
        "--fail-on-slower", action="store_true", help="exit code 1 where a row is slower or wrong in B"
    )


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; 0, or with --fail-on-slower 1 where B is worse."""
    before, after = read_json(options.before), read_json(options.after)
    if before["bench"] != after["bench"]:
        raise BenchError(
            f"{options.before} answers {before['bench']!r} and {options.after} {after['bench']!r}"
        )
    compared = compare(before, after)
    if not compared["rows"]:
        raise BenchError(f"{options.before} and {options.after} have no row in common")
    columns = [Column("row", right=False), Column("A µs"), Column("B µs"), Column("A/B"), Column("torch A/B")]
    cells = [
        [
            row["id"],
            _time(row["before_us"]),
            _time(row["after_us"]),
            _ratio(row["ratio"]),
            _ratio(row["torch_ratio"]),
            row["verdict"],
        ]
        for row in compared["rows"]
    ]
    print_table(
        [*columns, Column("verdict", right=False)], cells, f"A = {options.before}, B = {options.after}"
    )
    for difference in compared["differences"]:
        print(f"Not the same: {difference}.")
    for side in ("A", "B"):
        only = compared[f"only_in_{side}"]
        if only:
            print(f"Only in {side}: {'; '.join(only)}.")
    counts = {verdict: 0 for verdict in ("faster", "slower", "same", "wrong")}
    for row in compared["rows"]:
        counts[row["verdict"]] += 1
    print(
        "B beside A: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + "."
    )
    return int(options.fail_on_slower and counts["slower"] + counts["wrong"] > 0)


SAME_MACHINE = ("cpu", "device", "threads", "isa", "torch", "compiler")


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Row by row, in the order of the first file: times, ratios (above 1: B is faster), verdicts."""
    old = {row["id"]: row for row in before["rows"]}
    new = {row["id"]: row for row in after["rows"]}
    rows = []
    for name in (name for name in old if name in new):
        a, b = (timed(side[name], "attn_ext") for side in (old, new))
        torch_a, torch_b = (timed(side[name], "torch") for side in (old, new))
        rows.append(
            {
                "id": name,
                "before_us": a and a["median_us"],
                "after_us": b and b["median_us"],
                "ratio": a["median_us"] / b["median_us"] if a and b else None,
                "torch_ratio": torch_a["median_us"] / torch_b["median_us"] if torch_a and torch_b else None,
                "verdict": verdict(a, b) if a and b else "wrong",
            }
        )
    return {
        "rows": rows,
        "only_in_A": [name for name in old if name not in new],
        "only_in_B": [name for name in new if name not in old],
        "differences": [
            f"{name} ({before['machine'][name]} in A, {after['machine'][name]} in B)"
            for name in SAME_MACHINE
            if before["machine"][name] != after["machine"][name]
        ],
    }


def timed(row: dict[str, Any], rival: str) -> dict[str, Any] | None:
    """A rival's figures in a row; None where it has none."""
    figures = row["rivals"].get(rival, {})
    return figures if "median_us" in figures else None


def verdict(before: dict[str, float], after: dict[str, float]) -> str:
    """ "faster" or "slower" where the ranges p20 to p80 do not overlap, else "same"."""
    if after["p80_us"] < before["p20_us"]:
        return "faster"
    return "slower" if after["p20_us"] > before["p80_us"] else "same"


def _time(us: float | None) -> str:
    return "wrong" if us is None else f"{us:.4g}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
