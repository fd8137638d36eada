"""Pictures of the benchmarks over length: a curve for each rival, a panel for each family of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.common import BenchError

COLOURS = {
    "attn_ext": "#1f6f8b",
    "KVCache": "#7db8c9",
    "torch": "#e07a3f",
    "torch cat": "#a23b2a",
    "no cache": "#9aa5b1",
}
PANELS_A_LINE = 3
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Measure:
    """What a panel shows over length."""

    label: str
    value: Callable[[dict[str, Any], float], float]  # of a row and a time in microseconds
    ceiling: Callable[[dict[str, Any]], float] | None = None


MEASURES: dict[str, tuple[Measure, ...]] = {
    "decode": (
        Measure(
            "GB/s of keys and values",
            lambda row, us: row["bytes"] / us / 1e3,
            lambda row: row["ceilings"]["mean"]["read_gbs"],
        ),
        Measure("µs a step", lambda row, us: us),
    ),
    "append": (Measure("µs an append", lambda row, us: us),),
    "generate": (Measure("tokens/s", lambda row, us: 1e6 / us),),
}


def figure(result: dict[str, Any]) -> Any:
    """The picture of a result of one of these benchmarks, a matplotlib Figure.

    Raises:
        BenchError: no family has rows of two lengths.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families: dict[str, Rows] = {}
    for row in result["rows"]:
        if "attn_ext" in row["rivals"]:
            families.setdefault(row["family"], []).append(row)
    families = {
        name: sorted(rows, key=lambda row: row["length"])
        for name, rows in families.items()
        if len({row["length"] for row in rows}) > 1
    }
    if not families:
        raise BenchError("there is nothing to draw: no two rows differ in nothing but their length")
    panels = [
        (name, families[name], measure)
        for line in _lines(list(families))
        for measure in MEASURES[result["bench"]]
        for name in line
    ]
    across = min(PANELS_A_LINE, len(families))
    down = math.ceil(len(panels) / across)
    drawing = Figure(figsize=(4.6 * across, 3.0 * down + 0.9), layout="constrained")
    FigureCanvasAgg(drawing)
    grid = drawing.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    first_of: dict[str, Any] = {}
    for axes, (name, rows, measure) in zip(grid.flat, panels, strict=False):
        if measure.label in first_of:
            axes.sharey(first_of[measure.label])
        first_of.setdefault(measure.label, axes)
        _draw_panel(axes, name, rows, measure)
    curves = {curve.get_label(): curve for axes in grid.flat for curve in axes.get_legend_handles_labels()[0]}
    drawing.legend(
        handles=list(curves.values()), loc="outside upper center", ncols=len(curves), frameon=False
    )
    return drawing


def _lines(names: list[str]) -> list[list[str]]:
    """The families side by side; all lines but the last are full."""
    return [names[i : i + PANELS_A_LINE] for i in range(0, len(names), PANELS_A_LINE)]


def _draw_panel(axes: Any, title: str, rows: Rows, measure: Measure) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for name, colour in COLOURS.items():
        timed = [row for row in rows if "median_us" in row["rivals"].get(name, {})]
        if not timed:
            continue
        lengths = [row["length"] for row in timed]
        middle, low, high = (
            [measure.value(row, row["rivals"][name][which]) for row in timed]
            for which in ("median_us", "p20_us", "p80_us")
        )
        how = timed[0]["rivals"][name]["how"]
        axes.plot(lengths, middle, color=colour, marker="o", markersize=3, linewidth=1.4, label=how or name)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
    if measure.ceiling is not None:
        ceilings = [measure.ceiling(row) for row in rows]
        style = {"color": "#555555", "linewidth": 0.9, "linestyle": (0, (4, 3))}
        axes.plot([row["length"] for row in rows], ceilings, label="what the machine reads", **style)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=40)
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, loc="left", fontsize=9, weight="bold")
    axes.set_xlabel("length", fontsize=8)
    axes.set_ylabel(measure.label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
