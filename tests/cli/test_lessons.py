"""walkthrough, train-classifier and heatmap, called in this process: what they print and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="typer is not installed: pip install typer")
pytest.importorskip("rich", reason="rich is not installed: pip install rich")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from rich.cells import cell_len
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import attn_ext
from attn_ext.cli import common
from attn_ext.cli import train_classifier as train_command
from attn_ext.cli import walkthrough as walkthrough_command
from attn_ext.cli import walkthrough_texts as texts
from attn_ext.cli.app import app
from attn_ext.models import CausalLM, Seq2SeqTransformer, load, save
from attn_ext.teach import classifier, walkthrough

TRUE_FIRST_ROWS = ("0.4967 −0.1383  0.6477  1.5230", "−0.3226 −0.5214  1.3029 −1.6176")


def call(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80", **environment})


def called_json(*arguments: str | Path) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1, result.output
    assert result.stderr.startswith("attn-ext: ")
    for word in words:
        assert word in result.stderr


def widest(text: str) -> int:
    return max(map(cell_len, text.splitlines()))


# ---------------------------------------------------------------------- walkthrough


def test_walkthrough_gives_every_number() -> None:
    report = called_json("walkthrough")
    assert report["ok"] and report["seed"] == 42 and report["isa"] == attn_ext.backend.active()
    assert report["tokens"] == ["far", "away", "there", "is", "an", "apple", "tree"]
    assert report["plain"]["weights"][0] == pytest.approx(
        [0.04115936, 0.01223386, 0.17820851, 0.16625512, 0.21927912, 0.14523322, 0.23763083], abs=5e-9
    )
    assert report["causal"]["scaled"][0][1] is None and report["causal"]["weights"][0] == [
        1,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    assert torch.tensor(report["heads"]["weights"]).shape == (2, 7, 7)
    assert torch.tensor(report["heads"]["merged"]).shape == (7, 4)
    assert len(report["differences"]) == 8 and all(0 <= d["output"] < 1e-5 for d in report["differences"])


def test_walkthrough_takes_a_seed() -> None:
    report = called_json("walkthrough", "--seed", "7")
    assert report["seed"] == 7 and report["X"] == walkthrough.walk_through(7).X.tolist()


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_walkthrough_reads_well_in_80_columns_without_colours(lang: str) -> None:
    result = call("walkthrough", "--lang", lang)
    assert result.exit_code == 0 and widest(result.stdout) <= 80 and "\x1b" not in result.stdout
    assert all(row in result.stdout for row in TRUE_FIRST_ROWS)
    for shape in ("X (7, 4)", "Q (7, 4)", "K (7, 4)", "V (7, 4)", "scores (7, 7)", "scaled (7, 7)",
                  "weights (7, 7)", "output (7, 4)"):  # fmt: skip
        assert f" {shape}" in result.stdout
    assert "−17.4478" in result.stdout and "14.7643" in result.stdout
    for token in texts.TOKENS[lang]:
        assert result.stdout.count(f"\n{token} ") >= 12
    assert result.stdout.count("\n  ■ · · · · · ·\n") == 1 and result.stdout.count("\n  ■ ■ ■ ■ ■ · ·\n") == 2
    has_chinese = re.search("[\u4e00-\u9fff]", result.stdout) is not None
    assert has_chinese == (lang == "zh")


def test_shades_say_what_the_percentages_say() -> None:
    cells = re.findall(
        r"(  |░░|▒▒|▓▓|██)( ..|100)(?= |\n)", call("walkthrough").stdout.partition("in percent")[2]
    )
    shaded = {shade: [int(n) for s, n in cells if s == shade and n.strip().isdigit()] for shade, _ in cells}
    assert set(shaded) >= {"░░", "▒▒", "▓▓", "██"}
    for shade, low, high in (("░░", 5, 30), ("▒▒", 30, 55), ("▓▓", 55, 80), ("██", 80, 100)):
        assert all(low <= n <= high for n in shaded[shade]), (shade, shaded[shade])


def test_both_languages_fill_in_the_same_values() -> None:
    every = [value for value in vars(texts).values() if isinstance(value, texts.Words)]
    every += [*texts.SUMMARY_POINTS, *texts.EXAMPLES.values()]
    assert len(every) > 20
    for words in every:
        assert set(re.findall(r"{\w+}", words.en)) == set(re.findall(r"{\w+}", words.zh)), words.en
        assert words.en and words.zh and words.en.isascii() is not None
    assert len(texts.TOKENS["en"]) == len(texts.TOKENS["zh"]) == walkthrough.LENGTH


def test_lines_are_broken_where_the_language_allows() -> None:
    wrap = walkthrough_command.wrap
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("of shape (7, 4) here", 14) == ["of shape", "(7, 4) here"]
    assert wrap("一二三，四五", 6) == ["一二", "三，四", "五"]
    assert wrap("一二“三”", 6) == ["一二", "“三”"]
    text = texts.HEADS_TEXT.zh
    assert "".join(wrap(text, 30)).replace(" ", "") == text.replace(" ", "")


def test_walkthrough_ends_with_1_where_the_kernel_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = walkthrough.attention
    monkeypatch.setattr(walkthrough, "attention", lambda *a, **o: tuple(x + 0.5 for x in right(*a, **o)))
    result = call("walkthrough")
    assert result.exit_code == 1 and "They DISAGREE." in result.stdout
    assert call("walkthrough", "--json").exit_code == 1


# ---------------------------------------------------------------------- train-classifier


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one full training."""
    return called_json("train-classifier", "--save", tmp_path_factory.mktemp("trained") / "c.safetensors")


def test_training_fails_as_tutorials_set_it_and_says_so(trained: dict[str, Any]) -> None:
    unbalanced = trained["unbalanced"]
    assert unbalanced["seed"] == 42 and not unbalanced["learned"]
    last = unbalanced["log"][-1]
    assert last["epoch"] == 50 and last["loss"] < unbalanced["log"][0]["loss"]
    assert last["train"]["accuracy"] == last["train"]["baseline"] == 0.92
    assert last["validation"]["accuracy"] == last["validation"]["baseline"] == 0.86


def test_training_balanced_learns(trained: dict[str, Any]) -> None:
    balanced, held_out = trained["balanced"], trained["balanced"]["held_out"]
    assert trained["ok"] and (balanced["seed"], balanced["epochs"]) == (0, 300)
    assert balanced["last_loss"] < 0.05 < balanced["first_loss"]
    assert held_out["samples"] == 1000 and held_out["baseline"] == 0.5
    assert held_out["accuracy"] == held_out["correct"] / 1000 >= trained["min_accuracy"] == 0.99
    low, high = held_out["interval"]
    assert low < held_out["accuracy"] <= high


def test_the_saved_model_is_the_trained_one(trained: dict[str, Any]) -> None:
    model = load(trained["model"])
    tokens, labels = classifier.draw_balanced(1000, torch.Generator().manual_seed(123))
    assert classifier.score(model, tokens, labels).accuracy > 0.97
    assert sum(p.numel() for p in model.parameters()) == trained["parameters"]


def test_training_as_text_shows_baselines_and_fits_80_columns(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    train_command.show({**trained, "model": "m"}, common.out())
    text = capsys.readouterr().out
    assert widest(text) <= 80
    assert "0.920      (0.920)                 0.860      (0.860)" in text and "Nothing was learned" in text
    assert re.search(r"held-out accuracy  (0\.99\d|1\.000), \d+ of 1000 sentences; 95 % interval", text)
    assert re.search(r"baseline +0\.500: ok", text)


def test_training_that_learns_too_little_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "BALANCED_EPOCHS", 2)
    monkeypatch.setattr(train_command, "UNBALANCED_EPOCHS", 1)
    path = tmp_path / "c.safetensors"
    threads = torch.get_num_threads()
    result = call("train-classifier", "--save", path, "--seed", "3")
    assert result.exit_code == 1 and "FAILED: below 0.99" in result.stdout and path.is_file()
    assert torch.get_num_threads() == threads
    result = call("train-classifier", "--save", path, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


def test_training_is_not_begun_for_a_file_that_cannot_be_saved(tmp_path: Path) -> None:
    assert_refused(call("train-classifier", "--save", tmp_path / "no" / "c"), "its folder does not exist")
    assert_refused(call("train-classifier", "--save", tmp_path), "is a directory")
    assert call("train-classifier", "--seed", "-1").exit_code == 2


# ---------------------------------------------------------------------- heatmap


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")


def test_heatmap_shows_the_first_token_looking_at_3_and_7(
    matplotlib: None, trained: dict[str, Any], tmp_path: Path
) -> None:
    report = called_json("heatmap", trained["model"], "--save", tmp_path / "map")
    sentence = [12, 5, 3, 16, 9, 7, 1, 14]
    assert report["tokens"] == sentence and report["watched"] == [3, 7] and report["uniform"] == 2 / 8
    assert report["prediction"]["class"] == 1 and report["prediction"]["probability"] > 0.9
    _, weights = load(trained["model"])(torch.tensor([sentence]), need_weights=True)
    rows = report["rows"]
    assert [(row["block"], row["head"]) for row in rows] == [(b, h) for b in range(2) for h in range(4)]
    for row in rows:
        first = weights[row["block"]][0, row["head"], 0]
        assert row["on"] == pytest.approx({"3": first[2].item(), "7": first[5].item()}, abs=1e-6)
        assert row["sum"] == pytest.approx(row["on"]["3"] + row["on"]["7"])
    assert report["mean"] == pytest.approx(sum(row["sum"] for row in rows) / 8)
    assert report["mean"] > 1.5 * report["uniform"] and max(row["sum"] for row in rows) > 0.8
    assert report["files"] == [str(tmp_path / "map.png"), str(tmp_path / "map.svg")]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "map.svg").read_text(encoding="utf-8")
    assert all(f">block {b}, head {h}<" in svg for b in range(2) for h in range(4))
    assert ">16<" in svg and ">attention weight<" in svg and "What the tokens 12 5 3" in svg


def test_heatmap_draws_what_is_asked_for(matplotlib: None, trained: dict[str, Any], tmp_path: Path) -> None:
    arguments = ("heatmap", trained["model"], "--save", tmp_path / "one.png", "--tokens", "7,3, 7 2")
    report = called_json(*arguments, "--block", "1", "--head", "2", "--head", "0", "--watch", "7")
    assert [(row["block"], row["head"]) for row in report["rows"]] == [(1, 2), (1, 0)]
    assert report["tokens"] == [7, 3, 7, 2] and report["uniform"] == 2 / 4
    svg = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert ">block 1, head 2<" in svg and ">block 0, head 0<" not in svg


def test_heatmap_as_text_fits_80_columns(matplotlib: None, trained: dict[str, Any], tmp_path: Path) -> None:
    result = call("heatmap", trained["model"], "--save", tmp_path / "map")
    assert result.exit_code == 0
    table = result.stdout.partition("How the first token")[2].partition("picture")[0]
    assert widest(table) <= 80 and "\x1b" not in result.stdout
    assert "even attention would put 0.250" in table and "Mean of these heads: 0." in table
    assert f"picture  {tmp_path / 'map.png'}\n" in result.stdout


def test_heatmap_takes_other_models_of_tokens(matplotlib: None, tmp_path: Path) -> None:
    path = tmp_path / "lm.safetensors"
    save(CausalLM(20, 16, 4, 32, 1), path)
    report = called_json("heatmap", path, "--save", tmp_path / "map", "--tokens", "3 7 1")
    assert report["prediction"] is None and len(report["rows"]) == 4
    assert all(row["on"] == {"3": 1.0, "7": 0.0} for row in report["rows"])  # causal: the first sees itself


def test_heatmap_refuses_files_that_are_no_model(
    matplotlib: None, trained: dict[str, Any], tmp_path: Path
) -> None:
    whole = Path(trained["model"]).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.txt").write_text("not a model")
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    save(Seq2SeqTransformer(20, 20, 16, 4, 32), tmp_path / "pairs.safetensors")
    for name, words in (
        ("absent.safetensors", "does not exist"),
        ("cut.safetensors", "truncated"),
        ("notes.txt", "no safetensors file"),
        ("foreign.safetensors", "not written by attn_ext.models.save"),
        ("pairs.safetensors", "holds a Seq2SeqTransformer, which takes more than tokens"),
    ):
        path = tmp_path / name
        assert_refused(call("heatmap", path, "--save", tmp_path / "map"), str(path), words)
    assert not list(tmp_path.glob("map*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1 2 3"], ["token 7 is not in the sentence 1 2 3", "--watch"]),
        (["--watch", "4"], ["token 4 is not in the sentence"]),
        (["--tokens", "3 7 20"], ["knows the ids 0 to 19, got 20"]),
        (["--tokens", "3 7 -1"], ["knows the ids 0 to 19, got -1"]),
        (["--tokens", "3 7 " * 17], ["reads at most 32 tokens, got 34"]),
        (["--tokens", "three 7"], ["'three 7'", "expected token ids"]),
        (["--tokens", " "], ["at least one token id"]),
        (["--block", "2"], ["block 2 does not exist: there are 2, counted from 0"]),
        (["--block", "-1"], ["block -1 does not exist"]),
        (["--head", "4"], ["head 4 does not exist: there are 4, counted from 0"]),
        (["--save", "no/such/map"], ["no/such/map", "its folder does not exist"]),
    ],
)
def test_heatmap_refuses_what_the_model_lacks(
    matplotlib: None, trained: dict[str, Any], tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    result = call("heatmap", trained["model"], "--save", tmp_path / "map", *arguments)
    assert_refused(result, *words)
    assert not list(tmp_path.iterdir())
