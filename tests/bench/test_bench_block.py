"""`python -m bench block`: what it compares, times and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_support  # noqa: F401  (makes `bench` importable)
import pytest
import torch

from bench import block, common
from bench.__main__ import main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "D_MODEL", 48)
    monkeypatch.setattr(block, "D_FF", 64)
    monkeypatch.setattr(block, "SHAPES", ((4, 8), (2, 16)))


ARGUMENTS = ["block", "--seconds", "0.01", "--threads", "1"]


def test_every_row_agrees_and_is_timed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = ["--rows", "fp32", "--rows", "bf16"]
    assert main([*ARGUMENTS, *everything, "--json", str(tmp_path / "a.json")]) == 0
    result = common.read_json(tmp_path / "a.json")
    assert [row["id"] for row in result["rows"]] == [case.id for case in block.all_cases()]
    shown = capsys.readouterr().out
    for row in result["rows"]:
        assert row["check"]["ok"] and row["check"]["worst"].startswith(("out", "dx"))
        for rival in ("attn_ext", "torch"):
            assert row["rivals"][rival]["median_us"] > 0 and row["rivals"][rival]["tokens_per_second"] > 0
        assert f"{row['ratio']:.2f}×" in shown


@pytest.mark.parametrize("row", ["fp32 eval 4×8", "fp32 train 4×8", "bf16 train 4×8"])
def test_a_wrong_result_ends_with_1_and_is_not_timed(
    row: str, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = block.from_torch

    def spoiled(layer: Any) -> Any:
        ours = honest(layer)
        with torch.no_grad():
            ours.self_attn.w_v.weight *= 2
        return ours

    monkeypatch.setattr(block, "from_torch", spoiled)
    assert main([*ARGUMENTS, "--rows", row, "--json", str(tmp_path / "a.json")]) == 1
    assert all(
        not r["check"]["ok"] and r["rivals"] == {} for r in common.read_json(tmp_path / "a.json")["rows"]
    )
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "nothing like it"], "no row fits"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--seconds", "-1"], "--seconds must be above 0"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["block", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["block", "--list", "--rows", "padded"]) == 0
    assert capsys.readouterr().out.split("\n") == ["fp32 train 8×128 padded", "fp32 eval 8×128 padded", ""]


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_rows_are_left_out_and_said_where_torch_is_slow_at_them(
    supported: bool,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert main([*ARGUMENTS, "--json", str(tmp_path / "a.json")]) == 0
    dtypes = {row["id"].split()[0] for row in common.read_json(tmp_path / "a.json")["rows"]}
    assert dtypes == ({"fp32", "bf16"} if supported else {"fp32"})
    assert ("bf16 rows are left out" in capsys.readouterr().err) is not supported
