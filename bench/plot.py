"""A picture of a result file.

Of bench attention: for every row the share of the machine's ceiling, ours beside the others'. Of the benchmarks over
length: curves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import curves
from bench.common import BenchError, clearly_faster, machine_line, read_json

COLOURS = {"attn_ext": "#1f6f8b", "torch": "#e07a3f", "onnxruntime": "#9aa5b1", "openvino": "#c9b458"}

Panels = dict[str, list[dict[str, Any]]]  # rows by dtype and pass


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench plot`."""
    parser.add_argument("file", metavar="FILE.json")
    parser.add_argument("-o", "--output", metavar="FILE.png", help="default: FILE.png beside FILE.json")


def run(options: argparse.Namespace) -> int:
    """Draws the picture."""
    require_matplotlib()
    output = options.output or str(Path(options.file).with_suffix(".png"))
    draw(read_json(options.file), output)
    print(output)
    return 0


def require_matplotlib() -> None:
    """BenchError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError("a plot needs matplotlib: pip install matplotlib") from error


def draw(result: dict[str, Any], path: str) -> None:
    """Writes the picture.

    Raises:
        BenchError: the result holds nothing that can be drawn, or the file cannot be written.
    """
    if result["bench"] in curves.MEASURES:
        figure = curves.figure(result)
    elif result["bench"] == "attention":
        figure = _bars(result)
    else:
        raise BenchError(f"there is no picture of bench {result['bench']}")
    figure.supxlabel(machine_line(result["machine"]), fontsize=7.5, color="#555555")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot write {path}: {error}") from error


def _bars(result: dict[str, Any]) -> Any:
    """One panel for each dtype and pass, one group of bars for each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: Panels = {}
    for row in result["rows"]:
        if row["rivals"].get("attn_ext", {}).get("share") is not None:
            panels.setdefault(f"{row['dtype']} {row['pass']}", []).append(row)
    if not panels:
        raise BenchError("there is nothing to draw: no row has a share of a ceiling")
    columns = _in_columns(panels)
    tallest = max(0.1 * sum(heights) + 0.4 * len(heights) for heights in map(_heights, columns))
    figure = Figure(figsize=(8.5 * len(columns), tallest + 1.3), layout="constrained")
    FigureCanvasAgg(figure)
    furthest = max(
        row["rivals"][name]["share"] for rows in panels.values() for row in rows for name in _rivals(row)
    )
    for side, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        grid = side.subplots(len(column), 1, squeeze=False, gridspec_kw={"height_ratios": _heights(column)})
        for axes, (title, rows) in zip(grid[:, 0], column.items(), strict=True):
            _draw_panel(axes, title, rows)
            axes.set_xlim(0, max(1.0, furthest) * 1.09)
            axes.tick_params(axis="x", labelbottom=axes is grid[-1, 0])
        grid[-1, 0].set_xlabel(
            "share of the peak of multiply-adds (bf16: or of dot products or tiles) of the same run;\n"
            "beside our bars: times as fast as torch, bold where both spreads lie apart"
        )
    present = [n for n in COLOURS if any(n in _rivals(row) for rows in panels.values() for row in rows)]
    patches = [Patch(color=COLOURS[name], label=name) for name in present]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(present), frameon=False)
    return figure


def _in_columns(panels: Panels) -> list[Panels]:
    """One column of panels, or two of about the same height where one would be taller than a page."""
    heights = _heights(panels)
    if sum(heights) <= 80 or len(heights) < 2:
        return [panels]
    names = list(panels)
    cut = min(range(1, len(names)), key=lambda n: max(sum(heights[:n]), sum(heights[n:])))
    return [{name: panels[name] for name in part} for part in (names[:cut], names[cut:])]


def _heights(panels: Panels) -> list[int]:
    """Heights counted in bars: a row takes as many as it has rivals, and one of air."""
    return [sum(len(_rivals(row)) + 1 for row in rows) for rows in panels.values()]


def _rivals(row: dict[str, Any]) -> list[str]:
    """Who has a bar in the row, from top to bottom."""
    return [name for name in COLOURS if row["rivals"].get(name, {}).get("share") is not None]


def _draw_panel(axes: Any, title: str, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import PercentFormatter

    centres, y = [], 0.5
    for row in rows:
        rivals = _rivals(row)
        centres.append(y + (len(rivals) - 1) / 2)
        for name in rivals:
            share = row["rivals"][name]["share"]
            axes.barh(y, share, height=1.0, color=COLOURS[name])
            if name == "attn_ext":
                weight = "bold" if clearly_faster(row) else "normal"
                axes.text(share + 0.006, y, f"{row['ratio']:.2f}×", va="center", fontsize=7, weight=weight)
            y += 1
        y += 1
    axes.axvline(1.0, color="#555555", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks(centres, [row["case"] for row in rows], fontsize=8)
    axes.set_ylim(y - 1, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(title, loc="left", fontsize=9, weight="bold")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
