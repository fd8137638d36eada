"""`python -m bench decode`: what it compares, what it counts, what it times, and what it refuses."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import CEILINGS, quick_timing
from torch import Tensor

import attn_ext
from attn_ext._memory import available_bytes, memory_bytes
from bench import common, decode, decode_cases
from bench.__main__ import main
from bench.decode_cases import Case
from bench.device import CpuDevice

CASES = [
    Case("fp32", 1, 4, 2, 70, 16, quick=True),
    Case("fp32", 1, 4, 2, 9, 16),
    Case("bf16", 2, 4, 2, 33, 16),
    Case("fp16", 1, 2, 2, 33, 8),
    Case("fp64", 1, 2, 1, 33, 8),
    Case("int8", 2, 4, 2, 40, 16),
    Case("fp32", 2, 4, 1, 40, 16),
    Case("fp32", 2, 4, 2, 33, 16, page=16),
    Case("int8", 2, 4, 2, 33, 16, page=4),
    Case("bf16", 1, 4, 2, 50, 16, window=7),
    Case("fp32", 1, 4, 2, 5, 16, window=7),
    Case("fp32", 1, 4, 2, 1, 16),
]
ARGUMENTS = ["decode", "--seconds", "0.002", "--threads", "1"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take no time, on a made-up machine with a small cache."""
    monkeypatch.setattr(decode, "all_cases", lambda: CASES)
    monkeypatch.setattr(CpuDevice, "ceilings", lambda *_: dict(CEILINGS))
    monkeypatch.setattr(CpuDevice, "last_level_cache_bytes", lambda _: 2**14)
    quick_timing(monkeypatch)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Replaces the operator by `change(honest operator, …)`."""
    monkeypatch.setattr(
        attn_ext, "attention_with_kv_cache", functools.partial(change, attn_ext.attention_with_kv_cache)
    )


# --- a run ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_row_is_right_and_timed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"a.{name}") for name in ("json", "csv")}
    assert main([*ARGUMENTS, "--json", files["json"], "--csv", files["csv"]]) == 0
    result = common.read_json(files["json"])
    assert [row["id"] for row in result["rows"]] == [case.id for case in CASES]
    shown = capsys.readouterr().out
    for row, case in zip(result["rows"], CASES, strict=True):
        assert row["check"]["ok"] and row["check"]["worst"].startswith("out: error")
        ours = row["rivals"]["attn_ext"]
        assert ours["gbs"] == pytest.approx(case.bytes / ours["median_us"] / 1e3)
        assert ours["share_of_read"] == pytest.approx(ours["gbs"] / CEILINGS["read_gbs"])
        assert ours["tokens_per_second"] == pytest.approx(case.B / ours["median_us"] * 1e6)
        for rival in ("torch", "torch cat"):
            if case.dtype == "int8":
                assert row["rivals"][rival] == {"skipped": decode.NO_INT8} and row["ratio"] is None
                assert 0 < row["quantisation_error"] < 0.05
            else:
                assert row["rivals"][rival]["how"] == decode.RIVALS[rival]
                assert row["ratio"] == pytest.approx(row["rivals"]["torch"]["median_us"] / ours["median_us"])
        assert row["id"] in shown
    assert "Tokens/s of int8 over those of bf16" not in shown  # no two rows are twins here
    with open(files["csv"], encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["rival"] for line in lines[:3]] == list(decode.RIVALS) and len(lines) == 3 * len(CASES)
    assert lines[0]["id"] == CASES[0].id and float(lines[0]["bytes"]) == CASES[0].bytes
    assert lines[0]["check"] == "ok" and float(lines[0]["read_gbs_before"]) == CEILINGS["read_gbs"]
    assert main(["compare", files["json"], files["json"]]) == 0


def test_the_plot_is_a_png_and_can_be_drawn_again(small: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "now.png")]
    assert main([*ARGUMENTS, "--rows", "fp32 1,4/2", *files]) == 0
    assert main(["plot", str(tmp_path / "a.json"), "-o", str(tmp_path / "later.png")]) == 0
    for name in ("now.png", "later.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# --- wrong results --------------------------------------------------------------------------------------------------


def off_by_two_percent(honest: Callable[..., Tensor], q: Tensor, **rest: Any) -> Tensor:
    return honest(q, **rest) * 1.02


def one_key_missing(honest: Callable[..., Tensor], q: Tensor, **rest: Any) -> Tensor:
    out = honest(q, **rest)
    cut = {**rest, "cache_lengths": rest["cache_lengths"] - 1}
    return out if rest["k"] is None else honest(q, **cut)


def reads_past_the_end(honest: Callable[..., Tensor], q: Tensor, **rest: Any) -> Tensor:
    if rest["k"] is not None:
        honest(q, **rest)
    return honest(q, **{**rest, "cache_lengths": rest["cache_lengths"] + 2, "k": None, "v": None})


def stores_another_token(honest: Callable[..., Tensor], q: Tensor, **rest: Any) -> Tensor:
    out = honest(q, **rest)
    if rest["k"] is not None:
        honest(q, **{**rest, "v": rest["v"] * 1.02})
    return out


@pytest.mark.parametrize("change", [off_by_two_percent, one_key_missing, stores_another_token])
@pytest.mark.parametrize("case", [c for c in CASES if c.L > 7], ids=lambda c: c.id)
def test_a_wrong_result_is_found_in_every_kind_of_row(
    change: Callable[..., Any], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, change)
    inputs = decode_cases.make_inputs(case)
    (cache,) = decode_cases.our_caches(case, inputs, 1)
    assert not decode.check(case, inputs, cache, decode.Truth.of(case, inputs))["ok"]


@pytest.mark.parametrize("case", [c for c in CASES if not c.window], ids=lambda c: c.id)
def test_places_without_a_token_must_not_be_read(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, reads_past_the_end)
    inputs = decode_cases.make_inputs(case)
    (cache,) = decode_cases.our_caches(case, inputs, 1)
    assert "error inf" in decode.check(case, inputs, cache, decode.Truth.of(case, inputs))["worst"]


def test_a_wrong_result_ends_with_1_and_is_not_timed(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, off_by_two_percent)
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main([*ARGUMENTS, "--rows", "fp32 1,4/2,70", *files]) == 1
    (row,) = common.read_json(tmp_path / "a.json")["rows"]
    assert not row["check"]["ok"] and row["rivals"] == {}
    said = capsys.readouterr()
    assert "WRONG" in said.out and "WRONG" in said.err
    assert "out: error" in (tmp_path / "a.csv").read_text(encoding="utf-8")


def test_a_rival_that_computes_something_else_has_no_figure(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        decode, "past", lambda inputs, copies: [(inputs.k, inputs.v)]
    )  # has the token already
    assert main([*ARGUMENTS, "--rows", "fp32 1,4/2,70", "--json", str(tmp_path / "a.json")]) == 0
    (row,) = common.read_json(tmp_path / "a.json")["rows"]
    assert "differs from the reference" in row["rivals"]["torch cat"]["skipped"]
    assert row["rivals"]["torch"]["median_us"] > 0


# --- what is counted ------------------------------------------------------------------------------------------------


def test_bytes_and_flops_are_those_of_what_is_seen() -> None:
    assert Case("fp32", 1, 32, 8, 16384, 128).bytes == 2 * 8 * 16384 * 128 * 4
    assert Case("bf16", 8, 32, 8, 2048, 128).bytes == 2 * 8 * 8 * 2048 * 128 * 2
    assert Case("int8", 1, 32, 8, 100, 128).bytes == 2 * 8 * 100 * (128 + 4)
    assert Case("fp32", 1, 32, 8, 16384, 128, window=4096).bytes == 2 * 8 * 4096 * 128 * 4
    assert Case("fp32", 1, 32, 1, 16384, 128).flops == 4 * 32 * 16384 * 128


@pytest.mark.parametrize(
    ("case", "limit", "microseconds"),
    [
        (Case("fp32", 1, 1, 1, 1000, 100), "read_gbs", 800_000 / 10e9 * 1e6),
        (Case("fp32", 1, 64, 1, 1000, 100), "fma_fp32", 25_600_000 / 100e9 * 1e6),
        (Case("bf16", 1, 64, 1, 1000, 100), "fma_fp32", 25_600_000 / 100e9 * 1e6),
        (Case("fp64", 1, 64, 1, 1000, 100), "fma_fp64", 25_600_000 / 50e9 * 1e6),
    ],
    ids=lambda x: getattr(x, "id", x),
)
def test_the_share_is_of_the_smaller_limit(case: Case, limit: str, microseconds: float) -> None:
    timing = common.Timing(1000.0, 900.0, 1100.0, 1000.0, 5, 1).report()
    ceilings = {"before": CEILINGS, "after": CEILINGS, "mean": CEILINGS}
    row = {
        "dtype": case.dtype, "bytes": case.bytes, "flops": case.flops, "batch": 1, "ceilings": ceilings,
        "rivals": {"attn_ext": timing, "torch": {"skipped": "no reason"}},
    }  # fmt: skip
    decode.add_rates(row)
    assert row["limit"] == limit
    assert row["rivals"]["attn_ext"]["share"] == pytest.approx(microseconds / 1000.0)
    assert row["rivals"]["torch"] == {"skipped": "no reason"}


def test_int8_is_set_beside_bf16(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    twins = [Case(dtype, 1, 4, 2, 40, 16) for dtype in ("bf16", "int8")]
    monkeypatch.setattr(decode, "all_cases", lambda: twins)
    assert main([*ARGUMENTS, "--json", str(tmp_path / "a.json")]) == 0
    result = common.read_json(tmp_path / "a.json")
    bf16, int8 = (row["rivals"]["attn_ext"]["tokens_per_second"] for row in result["rows"])
    assert f"{int8 / bf16:.2f} (1,4/2,40,16)" in "\n".join(decode.notes(result))


# --- caches in turn -------------------------------------------------------------------------------------------------


def test_copies_are_four_times_the_cpu_cache_or_what_memory_allows() -> None:
    case = Case("fp32", 1, 32, 8, 1024, 128)  # 8 MiB
    assert decode_cases.copies_of(case, 32 * 2**20, None) == 16
    assert decode_cases.copies_of(case, 33 * 2**20, 2**40) == 17
    assert decode_cases.copies_of(case, 32 * 2**20, 2**29) == 10
    assert decode_cases.copies_of(case, 32 * 2**20, 0) == 1
    assert decode_cases.copies_of(case, 2**20, None) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_rivals_go_through_copies_that_share_no_memory(case: Case) -> None:
    inputs = decode_cases.make_inputs(case)
    sets = [
        [(cache["k_cache"], cache["v_cache"]) for cache in decode_cases.our_caches(case, inputs, 3)],
        decode_cases.preallocated(case, inputs, 3),
        decode_cases.past(inputs, 3),
    ]
    for copies in sets:
        tensors = [t for pair in copies for t in pair]
        assert len(copies) == 3
        assert len({t.untyped_storage().data_ptr() + t.storage_offset() for t in tensors if t.numel()}) in (
            0,
            6,
        )
        for k, v in copies[1:]:
            torch.testing.assert_close(k, copies[0][0], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(v, copies[0][1], rtol=0, atol=0, equal_nan=True)


def test_steps_are_taken_in_turn() -> None:
    turn = decode.in_turn([lambda name=name: name for name in "abc"])
    assert "".join(turn() for _ in range(7)) == "abcabca"


# --- input ----------------------------------------------------------------------------------------------------------


def test_list_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(set(listed)) == len(listed)
    for row in (
        "fp32 1,32/8,16384,128",
        "bf16 8,32/8,2048,128",
        "int8 1,32/8,16384,128",
        "fp32 1,32/1,16384,128",
    ):
        assert row in listed
    assert {"fp32 1,32/8,16384,128 page 16", "bf16 1,32/8,16384,128 window 4096"} < set(listed)
    assert main(["decode", "--list", "--quick", "--rows", "INT8"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"int8 1,32/8,{n},128" for n in (128, 1024, 4096)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "no such row"],
        ["--threads", "0"],
        ["--seconds", "0"],
        ["--json", "/no/such/folder/a.json"],
        ["--csv", "/no/such/folder/a.csv"],
        ["--plot", "/no/such/folder/a.png"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["decode", "append"])
def test_bad_input_is_one_sentence_and_2(
    command: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"bench {command}: ")


@pytest.mark.parametrize("command", ["decode", "append"])
def test_too_little_memory_is_one_sentence_and_2(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda _: 1_000_000)
    assert main([command, "--quick"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "0.0 GB are free" in said[0]


@pytest.mark.parametrize("command", ["decode", "append", "generate"])
def test_an_instruction_set_that_cannot_run_is_one_sentence_and_2(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise ValueError("no abacus here")

    monkeypatch.setattr(attn_ext.backend, "active", refuse)
    assert main([command, "--quick"]) == 2
    assert capsys.readouterr().err == f"bench {command}: no abacus here\n"


def test_free_memory_is_a_part_of_all_memory() -> None:
    free, everything = available_bytes(), memory_bytes()
    assert free is None or (0 < free <= (everything or math.inf))
