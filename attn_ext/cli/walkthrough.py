"""`attn-ext walkthrough`: attention by hand, one shape at a time, in English or Chinese."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import backend
from ..teach.walkthrough import D_MODEL, HEADS, LENGTH, PADDING, Steps, Walk, walk_through
from . import walkthrough_texts as texts
from .common import EXIT_CHECK_FAILED, JsonOption, out, print_json, says_errors_plainly, set_up
from .walkthrough_texts import Words

# From none of a row's weight to all of it: the shade tells without colours, the number exactly.
_SHADES = ("  ", "░░", "▒▒", "▓▓", "██")
_STYLES = ("", "rgb(120,150,190)", "rgb(90,140,210)", "rgb(60,120,220)", "rgb(40,100,230)")


_CELL = 7  # columns that most numbers take: −1.2345


class Language(str, enum.Enum):
    """Languages of the texts."""

    en = "en"
    zh = "zh"


@says_errors_plainly()
def walkthrough(
    lang: Annotated[Language, typer.Option("--lang", help="English or Chinese.")] = Language.en,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the random numbers.")] = 42,
    json: JsonOption = False,
) -> None:
    """Walk through attention by hand, one shape at a time.

    Five steps in NumPy on a sentence of seven tokens, then heads and masks, every number shown; then the same
    numbers from the C++ kernel.

    Exit code 1: the kernel's numbers differ.
    """
    set_up(None)
    walk = walk_through(seed)
    if json:
        print_json(collect(walk, lang.value))
    else:
        show(walk, lang.value, out())
    if not walk.ok:
        raise typer.Exit(EXIT_CHECK_FAILED)


def collect(walk: Walk, lang: str = "en") -> dict[str, Any]:
    """Every array of the walk, ready for JSON. Hidden scores (−∞) become null."""
    return {
        "seed": walk.seed,
        "isa": backend.active(),
        "tokens": list(texts.TOKENS[lang]),
        "X": walk.X.tolist(),
        "W_Q": walk.W_Q.tolist(),
        "W_K": walk.W_K.tolist(),
        "W_V": walk.W_V.tolist(),
        "plain": _steps_report(walk.plain),
        "heads": {**_steps_report(walk.heads), "merged": walk.merged.tolist()},
        "causal": {"mask": walk.causal_mask.tolist(), **_steps_report(walk.causal)},
        "padding": {"mask": walk.padding_mask.tolist(), **_steps_report(walk.padding)},
        "differences": [
            {
                "example": difference.example,
                "dtype": difference.dtype,
                "output": difference.output,
                "weights": difference.weights,
                "fine": difference.fine,
            }
            for difference in walk.differences
        ],
        "ok": walk.ok,
    }


def show(walk: Walk, lang: str, console: Console, *, brief: bool = False) -> None:
    """Print the walk; `brief` leaves out heads, masks and all matrices but the heat map of the weights."""
    page = _Page(console, lang)
    _show_steps(walk, page, brief)
    page.part(texts.HEAT_MAP)
    page.heat_map(walk.plain.weights)
    if not brief:
        _show_heads(walk, page)
        _show_masks(walk, page)
    _show_kernel(walk, page)
    page.part(texts.SUMMARY)
    for number, point in enumerate(texts.SUMMARY_POINTS, start=1):
        page.say(point, before=f"{number}. ", shape=_shape(walk.X), square=_shape(walk.plain.weights))


def _show_steps(walk: Walk, page: _Page, brief: bool) -> None:
    plain, flat, square = walk.plain, _shape(walk.X), _shape(walk.plain.weights)
    page.say(texts.TITLE, "bold", length=LENGTH, width=D_MODEL, seed=walk.seed)
    sentence = ("" if page.lang == "zh" else " ").join(page.tokens)
    page.say(texts.SENTENCE, sentence=sentence, shape=flat, square=_shape(walk.W_Q))

    page.part(texts.STEP_1)
    page.say(texts.STEP_1_TEXT, shape=flat)
    if not brief:
        page.matrices({"X": walk.X, "Q": plain.Q})
        page.matrices({"K": plain.K, "V": plain.V})
    page.part(texts.STEP_2)
    page.say(texts.STEP_2_TEXT, shape=square)
    if not brief:
        page.matrices({"scores": plain.scores})
    page.part(texts.STEP_3)
    page.say(
        texts.STEP_3_TEXT,
        root=f"{D_MODEL**0.5:g}",
        lowest=_number(plain.scores.min()),
        highest=_number(plain.scores.max()),
        scaled_lowest=_number(plain.scaled.min()),
        scaled_highest=_number(plain.scaled.max()),
    )
    if not brief:
        page.matrices({"scaled": plain.scaled})
    page.part(texts.STEP_4)
    page.say(texts.STEP_4_TEXT, shape=square)
    if not brief:
        page.matrices({"weights": plain.weights})
    page.part(texts.STEP_5)
    page.say(texts.STEP_5_TEXT, shape=flat)
    if not brief:
        page.matrices({"output": plain.output})


def _show_heads(walk: Walk, page: _Page) -> None:
    page.part(texts.HEADS)
    page.say(
        texts.HEADS_TEXT,
        heads=HEADS,
        width=D_MODEL,
        flat=_shape(walk.X),
        viewed=f"({LENGTH}, {HEADS}, {D_MODEL // HEADS})",
        split=_shape(walk.heads.Q),
        head_width=D_MODEL // HEADS,
    )
    for head, weights in enumerate(walk.heads.weights):
        page.say(texts.HEAD, "dim", head=head)
        page.heat_map(weights)
    page.matrices({page.word(texts.MERGED): walk.merged})


def _show_masks(walk: Walk, page: _Page) -> None:
    page.part(texts.CAUSAL)
    page.say(texts.CAUSAL_TEXT)
    page.mask(walk.causal_mask)
    page.heat_map(walk.causal.weights)
    page.part(texts.PADDING)
    page.say(texts.PADDING_TEXT, count=PADDING)
    page.mask(walk.padding_mask)
    page.heat_map(walk.padding.weights)


def _show_kernel(walk: Walk, page: _Page) -> None:
    page.part(texts.KERNEL)
    page.say(texts.KERNEL_TEXT, isa=backend.active())
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(page.word(texts.EXAMPLE), no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for words in (texts.OUTPUT, texts.WEIGHTS):
        table.add_column(page.word(words), justify="right", no_wrap=True)
    for difference in walk.differences:
        table.add_row(
            page.word(texts.EXAMPLES[difference.example]),
            difference.dtype,
            f"{difference.output:.1e}",
            f"{difference.weights:.1e}",
            style=None if difference.fine else "bold red",
        )
    page.console.print(table)
    page.say(texts.AGREE if walk.ok else texts.DISAGREE, "green" if walk.ok else "bold red")


class _Page:
    """Prints texts in one language, and matrices whose rows are the sentence's tokens."""

    def __init__(self, console: Console, lang: str) -> None:
        self.console = console
        self.lang = lang
        self.tokens = texts.TOKENS[lang]

    def word(self, words: Words) -> str:
        return getattr(words, self.lang)

    def say(self, words: Words, style: str = "", *, before: str = "", **values: Any) -> None:
        for line in wrap(before + self.word(words).format(**values), self.console.width):
            self.console.print(line, style=style, no_wrap=True)

    def part(self, words: Words) -> None:
        self.console.print()
        self.say(words, "bold")

    def matrices(self, named: dict[str, NDArray[np.float64]]) -> None:
        """Matrices side by side, their names and shapes above them; a square one has its tokens there too."""
        square = all(matrix.shape[1] == len(self.tokens) for matrix in named.values())
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=square)
        table.add_column()
        names = " " * (max(map(cell_len, self.tokens)) + 1)
        for position, (name, matrix) in enumerate(named.items()):
            if position:
                table.add_column()  # a gap
            for heading in self.tokens if square else [""] * matrix.shape[1]:
                table.add_column(heading, justify="right", min_width=_CELL, no_wrap=True)
            names += f"{name} {_shape(matrix)}".ljust(matrix.shape[1] * (_CELL + 1) + 1)
        for i, token in enumerate(self.tokens):
            cells = [token]
            for position, matrix in enumerate(named.values()):
                cells += [""] * bool(position) + [_number(x) for x in matrix[i]]
            table.add_row(*cells)
        self.console.print(names.rstrip(), style="dim")
        self.console.print(table)

    def heat_map(self, weights: NDArray[np.float64]) -> None:
        """Weights (L, L) as shades with their percentages; hidden ones as a dot."""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column()
        for token in self.tokens:
            table.add_column(token, justify="right", min_width=5, no_wrap=True)
        for token, row in zip(self.tokens, weights, strict=True):
            cells = [Text(token)]
            for weight in row:
                # Up to 5 % nothing, then a shade more for every further quarter.
                level = max(0, int(np.ceil((weight - 0.05) * (len(_SHADES) - 1))))
                cell = Text(_SHADES[level], style=_STYLES[level])
                cells.append(cell.append(f"{weight * 100:3.0f}" if weight else "  ·", style="default"))
            table.add_row(*cells)
        self.console.print(table)

    def mask(self, mask: NDArray[np.bool_]) -> None:
        for row in mask:
            self.console.print("  " + " ".join("■" if seen else "·" for seen in row))


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns.

    A line may end at a space and between Chinese characters, but not before Chinese punctuation that closes,
    after one that opens, or inside a shape such as (7, 4).
    """
    piece = r"\([\d, L]+\)[.,;:]?|[“（]*(?:[\u4e00-\u9fff]|[^\s\u3000-\u9fff\uff00-\uffef“”]+)[，。；：、！？）”]*| +|."
    lines, line = [], ""
    for match in re.finditer(piece, text):
        if cell_len(line + match[0].rstrip()) > width:
            lines.append(line.rstrip())
            line = match[0].lstrip()
        else:
            line += match[0]
    return [*lines, line.rstrip()]


def _steps_report(steps: Steps) -> dict[str, Any]:
    return {
        name: getattr(steps, name).tolist()
        for name in ("Q", "K", "V", "scores", "scaled", "weights", "output")
    }


def _shape(array: NDArray[Any]) -> str:
    return f"({', '.join(map(str, array.shape))})"


def _number(x: float) -> str:
    return f"{x:.4f}".replace("-", "−")
