"""Attention weights as a picture: queries down, keys across.

    weights = collect_weights(model, tokens)                # any model with attention modules of attn_ext.nn
    grid = panels(list(weights.values()), heads=[0, 2])     # a row of panels for each block
    figure = draw(grid, query_labels=words, title="Who looks at whom")
    save_figure(figure, "weights.png")                      # or .svg, .pdf

Drawing needs matplotlib (the extra `plot`), no display, and leaves pyplot's figures alone.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import torch
from torch import Tensor, nn

from .._files import write_whole
from ..nn import MultiHeadAttention, ScaledDotProductAttention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Panel", "collect_weights", "draw", "panels", "save_figure"]

# Inches.
_CELL = 0.26
_SMALLEST_PANEL = 1.2
_LARGEST_PANEL = 7.0  # longer sequences get smaller cells and fewer labels
_LETTER = 0.075  # the width of one at 8 points

_EMPHASIS = "#c0392b"
_CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Arial Unicode MS",
)


@dataclass(frozen=True)
class Panel:
    """One matrix of the picture: weights (Lq, Lk)."""

    title: str
    weights: Tensor


def collect_weights(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Run `model(*args, **kwargs)` once and return what each attention module paid attention to.

    The model runs in eval mode, without gradients. Each module's training mode comes back afterwards, and no
    hook stays behind, even where the model raises.

    Returns:
        In the order of the calls, the name of each `MultiHeadAttention` or `ScaledDotProductAttention` and its
        weights before dropout, (B, h, Lq, Lk), h = 1 where there are no heads. A module that is called several
        times keeps its last.

    Raises:
        ValueError: the model called no such module.
    """
    collected: dict[str, Tensor] = {}
    attending = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention | ScaledDotProductAttention)
    }
    with _eval_mode(model), _weights_taken(attending, collected), torch.no_grad():
        model(*args, **kwargs)
    if not collected:
        raise ValueError(
            f"collect_weights: {type(model).__name__} called no MultiHeadAttention or "
            "ScaledDotProductAttention of attn_ext.nn"
        )
    return collected


def panels(
    weights: Sequence[Tensor],
    *,
    blocks: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch: int = 0,
) -> list[list[Panel]]:
    """Pick blocks, heads and one sequence of the batch: a row of panels for each block, a column for each head.

    Args:
        weights: one tensor (B, h, Lq, Lk) for each block.
        blocks, heads: counted from 0; all where not given.
        batch: which sequence.

    Raises:
        IndexError: a block, head or sequence that is not there.
    """
    chosen = _within("block", range(len(weights)) if blocks is None else blocks, len(weights))
    grid = []
    for block in chosen:
        of_block = weights[block]
        _within("sequence", [batch], of_block.shape[0])
        here = _within("head", range(of_block.shape[1]) if heads is None else heads, of_block.shape[1])
        grid.append([Panel(f"block {block}, head {head}", of_block[batch, head]) for head in here])
    return grid


def draw(
    grid: Sequence[Sequence[Panel]],
    *,
    query_labels: Sequence[str],
    key_labels: Sequence[str] | None = None,
    title: str = "Attention weights",
    query: int | None = None,
    keys: Sequence[int] = (),
) -> Figure:
    """Draw every panel with one colour scale, from 0 to the largest weight shown.

    Args:
        grid: rows of panels, all of one size (Lq, Lk).
        query_labels, key_labels: one for each token; keys are labelled as queries where not given. Where there
            is no room, only every n-th is written.
        title: above the whole picture.
        query, keys: a row to outline, and keys whose labels are set in red.

    Returns:
        A matplotlib figure, for `save_figure`.

    Raises:
        ValueError: no panel at all, panels of different sizes, or as many labels as there are no tokens.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    flat = [panel for row in grid for panel in row]
    key_labels = query_labels if key_labels is None else key_labels
    _check(flat, query_labels, key_labels, query, keys)
    Lq, Lk = flat[0].weights.shape
    cell = min(_CELL, _LARGEST_PANEL / max(Lq, Lk))
    width, height = max(_SMALLEST_PANEL, cell * Lk), max(_SMALLEST_PANEL, cell * Lq)
    room_left, room_below = (0.3 + _LETTER * _longest(labels) for labels in (query_labels, key_labels))
    across, down = max(len(row) for row in grid), len(grid)
    size = (
        max(across * (width + room_left) + 1.0, 2 * _LETTER * len(title)),
        down * (height + room_below + 0.3) + 0.6,
    )
    largest = max(float(panel.weights.max()) for panel in flat)

    with rc_context({"font.family": _fonts()}):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=11)
        axes = figure.subplots(down, across, squeeze=False)
        image = None
        for i, j in ((i, j) for i in range(down) for j in range(across)):
            ax = axes[i, j]
            if j >= len(grid[i]):
                ax.set_axis_off()  # a block with fewer heads than another
                continue
            values = grid[i][j].weights.detach().float().cpu().numpy()
            image = ax.imshow(values, cmap="Blues", vmin=0, vmax=largest or 1.0, aspect="auto")
            ax.set_title(grid[i][j].title, fontsize=9)
            _label(ax, query_labels, key_labels, cell_width=width / Lk, cell_height=height / Lq)
            _emphasise(ax, query, keys, Lk)
            if j == 0:
                ax.set_ylabel("query", fontsize=9)
            if i == down - 1:
                ax.set_xlabel("key", fontsize=9)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, aspect=20 * down, pad=0.02)
        bar.set_label("attention weight", fontsize=9)
        bar.ax.tick_params(labelsize=8)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the name ends in (.png, .svg, .pdf), whole or not at all.

    The same figure gives the same bytes. Text in an SVG stays text.

    Raises:
        ValueError: an ending that matplotlib does not know.
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context

    kind = Path(path).suffix.removeprefix(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"{path}: expected a name that ends in one of {', '.join(sorted(known))}")
    content = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with rc_context({"svg.hashsalt": "attn_ext", "svg.fonttype": "none"}), _missing_letters_named():
        figure.savefig(content, format=kind, dpi=160, metadata=undated)
    write_whole(path, content.getvalue())


def _label(
    ax: Axes, query_labels: Sequence[str], key_labels: Sequence[str], *, cell_width: float, cell_height: float
) -> None:
    """Write the tokens at the axes: every one, or every n-th where they would touch."""
    upright = _longest(key_labels) > 2
    room = 0.15 if upright else max(0.15, _LETTER * _longest(key_labels) + 0.05)
    for axis, labels, step, rotation in (
        (ax.xaxis, key_labels, math.ceil(room / cell_width), 90 if upright else 0),
        (ax.yaxis, query_labels, math.ceil(0.15 / cell_height), 0),
    ):
        shown = range(0, len(labels), step)
        axis.set_ticks(shown, [labels[i].replace("$", r"\$") for i in shown], rotation=rotation, fontsize=8)
    ax.tick_params(length=2, pad=2)


def _emphasise(ax: Axes, query: int | None, keys: Sequence[int], Lk: int) -> None:
    from matplotlib.patches import Rectangle

    if query is not None:
        outline = Rectangle(
            (-0.5, query - 0.5),
            Lk,
            1,
            fill=False,
            edgecolor=_EMPHASIS,
            linewidth=1.2,
            clip_on=False,
            zorder=3,
        )
        ax.add_patch(outline)
    for place, tick in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True):
        if int(place) in keys:
            tick.set(color=_EMPHASIS, fontweight="bold")


def _longest(labels: Sequence[str]) -> int:
    """Columns that the widest label takes: a Chinese character takes two."""
    return max(sum(2 if east_asian_width(letter) in "WF" else 1 for letter in label) for label in labels)


def _fonts() -> list[str]:
    """matplotlib's own font, then those of this machine that have Chinese, for letters which it lacks."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in _CHINESE_FONTS if name in installed)]


@contextmanager
def _missing_letters_named() -> Iterator[None]:
    """One warning that names the letters no font here has, in place of one from matplotlib for each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = set()
    for warning in caught:
        glyph = re.match(r"Glyph (\d+) ", str(warning.message))
        if glyph:
            missing.add(chr(int(glyph[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if missing:
        warnings.warn(
            f"no installed font has {''.join(sorted(missing))}: the picture shows boxes in their place",
            stacklevel=4,
        )


def _check(
    flat: Sequence[Panel],
    query_labels: Sequence[str],
    key_labels: Sequence[str],
    query: int | None,
    keys: Sequence[int],
) -> None:
    sizes = {tuple(panel.weights.shape) for panel in flat}
    if len(sizes) != 1 or len(size := next(iter(sizes))) != 2 or 0 in size:
        raise ValueError(f"draw: expected panels of one size (Lq, Lk), got {sorted(sizes) or 'none'}")
    if (len(query_labels), len(key_labels)) != size:
        raise ValueError(
            f"draw: expected {size[0]} query labels and {size[1]} key labels, "
            f"got {len(query_labels)} and {len(key_labels)}"
        )
    if query is not None:
        _within("query", [query], size[0])
    _within("key", keys, size[1])


def _within(what: str, wanted: Sequence[int], count: int) -> list[int]:
    """Return `wanted`; raises IndexError for one outside 0 … count − 1."""
    for index in wanted:
        if not 0 <= index < count:
            raise IndexError(f"{what} {index} does not exist: there are {count}, counted from 0")
    return list(wanted)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def _weights_taken(attending: dict[str, nn.Module], collected: dict[str, Tensor]) -> Iterator[None]:
    """Make each attention module return its weights, keep them, and hand on only what the caller asked for."""
    handles = []

    def listen(name: str, module: nn.Module) -> None:
        asked = True

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            nonlocal asked
            asked = kwargs.get("need_weights", True)
            return args, {**kwargs, "need_weights": True}

        def take(_: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
            output_, weights, *rest = output
            collected.pop(name, None)  # so that the order is that of the calls
            collected[name] = weights if weights.dim() == 4 else weights.unsqueeze(1)
            return (output_, weights if asked else None, *rest)

        handles.append(module.register_forward_pre_hook(ask, with_kwargs=True))
        handles.append(module.register_forward_hook(take))

    try:
        for name, module in attending.items():
            listen(name, module)
        yield
    finally:
        for handle in handles:
            handle.remove()
