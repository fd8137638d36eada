"""A speed table of the README, from a result file: printed, or put in place between its two markers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.attention import MARKS, marks_sentence, microseconds, percent, rate
from bench.common import BenchError, add_row_filter, clearly_faster, machine_line, read_json
from bench.peers import ENGINES

NAME = "speed-table"


def markers(name: str) -> tuple[str, str]:
    """What stands before and after the table of that name."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


BEGIN, END = markers(NAME)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench table`."""
    parser.add_argument("file", metavar="FILE.json")
    add_row_filter(parser)
    parser.add_argument("--write", metavar="README.md", help=f"replace what stands between {BEGIN} and {END}")
    parser.add_argument("--name", default=NAME, help="another table's: what the two markers begin with")


def run(options: argparse.Namespace) -> int:
    """Prints or writes the table."""
    result = read_json(options.file)
    if result["bench"] != "attention":
        raise BenchError(
            f"{options.file} is a result of bench {result['bench']}, and this table is of attention"
        )
    if options.rows:
        texts = [text.lower() for text in options.rows]
        kept = [row for row in result["rows"] if any(text in row["id"].lower() for text in texts)]
        if not kept:
            raise BenchError(f"{options.file} has no row that holds {' or '.join(options.rows)}")
        result = {**result, "rows": kept}
    text = markdown(result)
    if options.write is None:
        print(text)
        return 0
    path = Path(options.write)
    try:
        page = path.read_text(encoding="utf-8")
        path.write_text(replace_between_markers(page, text, options.name, options.write), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot rewrite {path}: {error.strerror}") from error
    print(f"{path}: speed table of {len(result['rows'])} rows written")
    return 0


def markdown(result: dict[str, Any]) -> str:
    """A Markdown table, with the machine below it."""
    engines = [
        name for name in ENGINES if any("gflops" in row["rivals"].get(name, {}) for row in result["rows"])
    ]
    headings = [
        "B,H,L,D",
        "dtype",
        "pass",
        "attn_ext µs",
        "GFLOP/s",
        "of ceiling",
        "torch µs",
        *engines,
        "× torch",
    ]
    lines = ["| " + " | ".join(headings) + " |"]
    lines.append("|" + "|".join(["---"] * 3 + ["---:"] * (len(headings) - 3)) + "|")
    for row in result["rows"]:
        start = [row["case"], row["dtype"], row["pass"]]
        if not row["check"]["ok"]:
            cells = [*start, "**wrong**", *[""] * (len(headings) - 4)]
        else:
            ours, theirs = row["rivals"]["attn_ext"], row["rivals"]["torch"]
            others = [row["rivals"].get(name, {}) for name in engines]
            cells = [
                *start,
                microseconds(ours),
                rate(ours["gflops"]),
                percent(ours["share"]),
                microseconds(theirs) + MARKS[theirs["how"]],
                *(microseconds(other) if "median_us" in other else "–" for other in others),
                f"**{row['ratio']:.2f}**" if clearly_faster(row) else f"{row['ratio']:.2f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{machine_line(result['machine'])}. {ceilings_sentence(result)}Times: median ± half of p20 to p80; bold where "
        f"our p80 lies below torch's p20. torch: SDPA{marks_sentence(result['rows'])}.",
    ]
    return "\n".join(lines)


def ceilings_sentence(result: dict[str, Any]) -> str:
    """The ceilings that the shares are taken of."""
    mean = result["ceilings"]["mean"]
    if "fma_fp32" not in mean:
        return ""
    words = {"tiles_bf16": "bf16 by tiles", "dot_bf16": "bf16 by the dot product"}
    peaks = [f"{mean[name]:.0f} {how}" for name, how in words.items() if mean.get(name) is not None]
    bf16 = ", ".join(peaks) or "no bf16 dot product"
    return f"Ceilings in GFLOP/s: {mean['fma_fp32']:.0f} fp32, {mean['fma_fp64']:.0f} fp64, {bf16}. "


def replace_between_markers(page: str, text: str, name: str, path: str) -> str:
    """The page with `text` between the markers of that name, in place of what stood there.

    Raises:
        BenchError: a marker is missing, stands there twice, or the two are the wrong way round.
    """
    begin, end = markers(name)
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise BenchError(f"{path} must hold {begin} and, after it, {end}, once each")
    head, _, rest = page.partition(begin)
    tail = rest.partition(end)[2]
    return f"{head}{begin}\n{text}\n{end}{tail}"
