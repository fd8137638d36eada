"""`python -m bench append`: what it compares, times and says of growth."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import made_up_result, quick_timing

import attn_ext
from bench import append, common
from bench.__main__ import main
from bench.append import Case

ARGUMENTS = ["append", "--seconds", "0.002", "--threads", "1"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LENGTHS", (5, 40))
    quick_timing(monkeypatch)


def test_every_row_is_right_and_timed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main([*ARGUMENTS, *files]) == 0
    result = common.read_json(tmp_path / "a.json")
    assert [row["id"] for row in result["rows"]] == [case.id for case in append.all_cases()]
    for row in result["rows"]:
        assert row["check"]["ok"]
        for name, how in append.RIVALS.items():
            rival = row["rivals"][name]
            if row["dtype"] == "int8" and name.startswith("torch"):
                assert rival == {"skipped": append.NO_INT8}
            else:
                assert rival["how"] == how and rival["p20_us"] <= rival["median_us"] <= rival["p80_us"]
    shown = capsys.readouterr().out
    assert "fp32 1 token, time at 40 over that at 5: kv_cache_append_ " in shown
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * len(result["rows"]) and lines[0]["tokens"] == "1"
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0


def test_the_plot_is_a_png(small: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    rows = ["--rows", "16", "--rows", "fp32"]  # four families: two lines of panels
    assert main([*ARGUMENTS, *rows, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("what", ["nothing is written", "another token is written", "one place too late"])
def test_a_wrong_append_ends_with_1_and_is_not_timed(
    dtype: str, what: str, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    honest = attn_ext.kv_cache_append_

    def spoiled(k_cache: Any, v_cache: Any, k: Any, v: Any, lengths: Any, **rest: Any) -> None:
        if what == "another token is written":
            honest(k_cache, v_cache, k, v * 2, lengths, **rest)
        elif what == "one place too late":
            honest(k_cache, v_cache, k, v, lengths + 1, **rest)

    monkeypatch.setattr(attn_ext, "kv_cache_append_", spoiled)
    assert main([*ARGUMENTS, "--rows", f"{dtype} 16", "--json", str(tmp_path / "a.json")]) == 1
    for row in common.read_json(tmp_path / "a.json")["rows"]:
        assert not row["check"]["ok"] and row["rivals"] == {}
        assert row["check"]["worst"].startswith("kv_cache_append_: other ")
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["other keys", "nothing"])
def test_a_wrong_class_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it writes nothing at all, and the operator has written the same tokens before."""
    honest = attn_ext.KVCache.append

    def spoiled(cache: attn_ext.KVCache, k: torch.Tensor, v: torch.Tensor) -> None:
        kept = cache.k.clone()
        honest(cache, -k if what == "other keys" else k, v)
        if what == "nothing":
            cache.k.copy_(kept)

    monkeypatch.setattr(attn_ext.KVCache, "append", spoiled)
    assert append.check(Case("fp32", 1, 5)) == {
        "ok": False,
        "worst": "KVCache.append: other keys than the reference stores",
    }


def test_a_cache_stays_as_long_as_its_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[attn_ext.KVCache] = []

    class Noted(attn_ext.KVCache):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(attn_ext, "KVCache", Noted)
    rival = append.make_rivals(Case("fp32", 16, 5))["KVCache"]
    (cache,) = made
    capacity = cache.capacity
    for _ in range(append.TURNS + 1):
        rival.append()
    assert cache.lengths.tolist() == [5 + 16] and cache.capacity == capacity


def test_growth_is_the_longest_over_the_shortest() -> None:
    def row(length: int, us: float) -> dict[str, Any]:
        timing = common.Timing(us, us, us, us, 1, 1).report()
        rivals = {name: timing for name in append.RIVALS}
        rivals["torch cat"] = common.Timing(us * length, us, us, us, 1, 1).report()
        check = {"ok": True, "worst": ""}
        return {"id": str(length), "family": "f", "length": length, "check": check, "rivals": rivals}

    (line,) = append.growth(made_up_result([row(100, 5.0), row(10, 4.0), row(50, 9.0)]))
    assert line.startswith("f, time at 100 over that at 10: kv_cache_append_ 1.25×")
    assert line.endswith("torch.cat 12.50×.")
    assert append.growth(made_up_result([row(100, 5.0)])) == []


def test_list_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["append", "--list", "--rows", "fp32 16"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [f"fp32 16 tokens at {n}" for n in (100, 1_000, 10_000, 100_000)]
