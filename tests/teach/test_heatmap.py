"""Attention weights collected from models, and drawn."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attn_ext.models import TextClassifier
from attn_ext.nn import MultiHeadAttention, ScaledDotProductAttention
from attn_ext.teach.heatmap import Panel, collect_weights, draw, panels, save_figure

TOKENS = torch.tensor([[5, 3, 9, 7, 1], [1, 2, 3, 4, 5]])


class Mixed(nn.Module):
    """Every way in which attention modules are called: with and without weights, with heads, twice, crossing."""

    def __init__(self) -> None:
        super().__init__()
        self.second = ScaledDotProductAttention(8)
        self.first = MultiHeadAttention(8, 2)
        self.unused = MultiHeadAttention(8, 2)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[bool] = []

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        attended, weights = self.second(x, x, x)
        self.seen.append(weights is None)
        x = self.dropout(x + attended)
        attended, weights = self.first(x, memory, memory, None, need_weights=False)
        self.seen.append(weights is None)
        return self.second(x + attended, x, x, need_weights=False)[0]


@pytest.fixture
def model() -> TextClassifier:
    return TextClassifier(20, 16, 4, 32)


def test_collected_weights_are_those_the_model_returns(model: TextClassifier) -> None:
    collected = collect_weights(model, TOKENS)
    assert list(collected) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    _, weights = model.eval()(TOKENS, need_weights=True)
    for ours, theirs in zip(collected.values(), weights, strict=True):
        assert torch.equal(ours, theirs) and not ours.requires_grad


def test_any_attention_module_is_collected_in_the_order_of_the_calls() -> None:
    model = Mixed()
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 6, 8)
    collected = collect_weights(model, x, memory=memory)
    assert {name: tuple(w.shape) for name, w in collected.items()} == {
        "first": (2, 2, 3, 6),
        "second": (2, 1, 3, 3),
    }
    assert list(collected) == ["first", "second"]
    assert model.seen == [False, True]  # the model got what it had asked for


def test_the_model_is_left_as_it_was(model: TextClassifier) -> None:
    model.train()
    model.encoder.layers[1].eval()
    modes = [module.training for module in model.modules()]
    for tokens in (TOKENS, torch.full((1, 3), 99)):  # the second one is out of the vocabulary
        try:
            collect_weights(model, tokens)
        except IndexError:
            pass
        assert [module.training for module in model.modules()] == modes
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_our_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear called no MultiHeadAttention"):
        collect_weights(nn.Linear(2, 2), torch.randn(1, 2))


def test_panels_pick_blocks_and_heads() -> None:
    weights = [torch.rand(2, 3, 4, 5) for _ in range(2)]
    grid = panels(weights, blocks=[1], heads=[2, 0], batch=1)
    assert [panel.title for panel in grid[0]] == ["block 1, head 2", "block 1, head 0"]
    assert torch.equal(grid[0][0].weights, weights[1][1, 2])
    assert [len(row) for row in panels(weights)] == [3, 3]
    for wrong in ({"blocks": [2]}, {"blocks": [-1]}, {"heads": [3]}, {"batch": 2}):
        with pytest.raises(
            IndexError, match=r"(block|head|sequence) -?\d does not exist: there are \d, counted"
        ):
            panels(weights, **wrong)


# ---------------------------------------------------------------------- pictures


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")


def grid_of(*shape: int, heads: int = 1) -> list[list[Panel]]:
    return panels([torch.rand(1, heads, *shape).softmax(-1)])


def test_queries_go_down_and_keys_across(matplotlib: None) -> None:
    grid = grid_of(2, 3, heads=2)
    figure = draw(grid, query_labels=["a", "b"], key_labels=["x", "y", "z"], title="T", query=1, keys=[2])
    *axes, bar = figure.axes
    assert figure.get_suptitle() == "T" and bar.get_ylabel() == "attention weight"
    for ax, panel in zip(axes, grid[0], strict=True):
        (image,) = ax.images
        assert image.get_array().shape == (2, 3)
        torch.testing.assert_close(torch.from_numpy(image.get_array().data), panel.weights)
        assert [text.get_text() for text in ax.get_xticklabels()] == ["x", "y", "z"]
        assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]
        assert ax.get_title() == panel.title
        assert ax.yaxis_inverted()  # the first query is on top
        (outline,) = ax.patches
        assert (outline.get_xy(), outline.get_width(), outline.get_height()) == ((-0.5, 0.5), 3, 1)
        assert [text.get_fontweight() for text in ax.get_xticklabels()] == ["normal", "normal", "bold"]
    low, high = axes[0].images[0].get_clim()
    assert low == 0 and high == max(float(panel.weights.max()) for panel in grid[0])
    assert axes[0].images[0].get_clim() == axes[1].images[0].get_clim()


@pytest.mark.parametrize(
    ("Lq", "Lk", "label"), [(1, 1, "a"), (8, 8, "12"), (3, 40, "word"), (40, 40, "苹果"), (30, 100, "word")]
)
def test_no_label_touches_another(matplotlib: None, Lq: int, Lk: int, label: str) -> None:
    figure = draw(
        grid_of(Lq, Lk, heads=2), query_labels=[label] * Lq, key_labels=[label] * Lk, title="Some title"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without Chinese draws boxes of the same size
        figure.draw_without_rendering()
        *axes, bar = figure.axes
        boxes = [
            [text.get_window_extent() for text in labels if text.get_text()]
            for ax in axes
            for labels in (ax.get_xticklabels(), ax.get_yticklabels())
        ]
        panels_ = [ax.get_tightbbox() for ax in axes]
        titles = [ax.title.get_window_extent() for ax in axes]
    for row in boxes:
        assert not any(a.overlaps(b) for a, b in zip(row, row[1:], strict=False))
    everything = [*panels_, bar.get_tightbbox()]
    assert not any(a.overlaps(b) for i, a in enumerate(everything) for b in everything[i + 1 :])
    assert not any(box.overlaps(title) for row in boxes for box in row for title in titles)
    width, height = figure.get_size_inches() * figure.dpi
    for box in everything:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_pictures_are_saved_whole_without_a_display(
    matplotlib: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    for name in ("a", "b"):
        torch.manual_seed(7)
        figure = draw(grid_of(2, 2), query_labels=["$5$", "_b"], title="Costs & _more_")
        for suffix in ("png", "svg"):
            save_figure(figure, tmp_path / f"{name}.{suffix}")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for suffix in ("png", "svg"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert {"$5$", "_b", "query", "key", "attention weight", "block 0, head 0", "Costs &amp; _more_"} <= set(
        words
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_letters_that_no_font_has_are_named_in_one_warning(matplotlib: None, tmp_path: Path) -> None:
    figure = draw(grid_of(2, 2), query_labels=["\ue123", "\ue124"])  # private use: nobody has them
    with pytest.warns(UserWarning, match="no installed font has \ue123\ue124") as caught:
        save_figure(figure, tmp_path / "a.png")
    assert len(caught) == 1


def test_what_cannot_be_drawn_is_refused(matplotlib: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 2 query labels and 3 key labels, got 2 and 2"):
        draw(grid_of(2, 3), query_labels=["a", "b"])
    with pytest.raises(ValueError, match=r"panels of one size \(Lq, Lk\), got \[\(2, 2\), \(2, 3\)\]"):
        draw([*grid_of(2, 3), *grid_of(2, 2)], query_labels=["a", "b"])
    with pytest.raises(ValueError, match="got none"):
        draw([], query_labels=[])
    with pytest.raises(IndexError, match="query 2 does not exist"):
        draw(grid_of(2, 2), query_labels=["a", "b"], query=2)
    with pytest.raises(ValueError, match="a name that ends in one of .*png"):
        save_figure(draw(grid_of(2, 2), query_labels=["a", "b"]), tmp_path / "a.doc")
    with pytest.raises(OSError):
        save_figure(draw(grid_of(2, 2), query_labels=["a", "b"]), tmp_path / "absent" / "a.png")
