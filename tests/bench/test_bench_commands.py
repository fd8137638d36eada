"""The commands as a person runs them: exit codes, sentences, and one short run of everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_support  # makes `bench` importable
import pytest
import torch

import attn_ext
from bench import attention, common, memory
from bench.__main__ import main
from bench.cases import Case

TINY = ["--rows", "fp32 forward 1,1,4,8", "--quick", "--seconds", "0.02", "--threads", "1", "--no-engines"]


def test_a_run_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main(["attention", *TINY, *files]) == 0
    shown = capsys.readouterr().out
    result = common.read_json(tmp_path / "a.json")
    (row,) = result["rows"]
    assert row["id"] == "fp32 forward 1,1,4,8" and row["check"]["ok"]
    for rival in ("attn_ext", "torch"):
        numbers = row["rivals"][rival]
        assert 0 < numbers["p20_us"] <= numbers["median_us"] <= numbers["p80_us"]
        assert numbers["first_us"] > 0 and numbers["gflops"] > 0
    assert result["machine"]["threads"] == 1 and result["machine"]["isa"] == attn_ext.backend.active()
    assert result["ceilings"]["mean"]["fma_fp32"] > 0 and result["ceilings"]["mean"]["read_gbs"] > 0
    assert f"{row['ratio']:.2f}×" in shown
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0


def test_a_wrong_result_ends_with_1_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = attn_ext.attention
    monkeypatch.setattr(attn_ext, "attention", lambda *args, **kwargs: honest(*args, **kwargs) + 0.1)
    assert main(["attention", *TINY, "--json", str(tmp_path / "a.json")]) == 1
    (row,) = common.read_json(tmp_path / "a.json")["rows"]
    assert not row["check"]["ok"] and row["rivals"] == {}
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_on_a_machine_without_it_is_one_sentence_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "CUDA" in said.err and len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["attention", "--rows", "no such row"],
        ["attention", "--threads", "0"],
        ["attention", "--seconds", "0"],
        ["attention", *TINY, "--json", "/no/such/folder/a.json"],
        ["memory", "--row", "no such row"],
        ["memory", "--threads", "-1"],
        ["compare", "no.json", "no.json"],
        ["table", "no.json"],
        ["plot", "no.json"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]  # progress
    assert len(said) == 1 and said[0].startswith(f"bench {arguments[0]}: ")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["attention", "--dtype", "int8"]])
def test_unknown_words_are_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_an_instruction_set_that_cannot_run_is_one_sentence_and_2() -> None:
    command = [sys.executable, "-m", "bench", "attention", *TINY]
    environment = {**os.environ, "ATTN_EXT_ISA": "abacus"}
    done = subprocess.run(
        command, cwd=bench_support.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "abacus" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_plain_table_lines_up() -> None:
    columns = [common.Column("name", right=False), common.Column("µs")]
    assert common.plain_table(columns, [["a", "12.5"], ["longer", "3"]]).splitlines() == [
        "name      µs",
        "a       12.5",
        "longer     3",
    ]


def test_list_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--list", "--dtype", "fp64"]) == 0
    assert capsys.readouterr().out.splitlines() == ["fp64 forward 1,8,512,64", "fp64 backward 1,8,512,64"]


# --- timing ---------------------------------------------------------------------------------------------------------


def test_rivals_take_turns_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(common, "WARM_UP_SECONDS", 0.0)
    runners = [common.Runner(name, lambda name=name: called.append(name)) for name in ("a", "b")]

    class Instant:
        def seconds_per_call(self, call: Any, calls: int) -> float:
            call()
            return 1.0

    timings = common.time_runners(Instant(), runners, seconds=1e-9, rounds=3, pause=0.0)
    assert called == [
        *"aa",
        *"bb",
        *"aabb",
        *"bbaa",
        *"aabb",
    ]  # first call and calibration; then three rounds
    assert timings["a"].samples == 3 and timings["a"].median_us == 1e6


def test_gradients_are_recorded_only_for_those_who_ask() -> None:
    seen: dict[str, bool] = {}
    runners = [
        common.Runner(
            name, lambda name=name: seen.update({name: torch.is_grad_enabled()}), grad=name == "training"
        )
        for name in ("inference", "training")
    ]
    common.time_runners(common.CpuTimer(), runners, seconds=1e-4, rounds=1, pause=0.0)
    assert seen == {"inference": False, "training": True}


def test_percentiles_lie_between_neighbours() -> None:
    assert common.percentiles([4.0]) == (4.0, 4.0)
    assert common.percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 5.0)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_of_a_row_counts_what_it_returns() -> None:
    case = next(c for c in attention.all_cases() if c.id == "fp32 backward 4,12,128,64")
    numbers = memory.measure(case, 1)["attn_ext"]
    if numbers is None:
        pytest.skip("this system's peak of memory cannot be reset")
    assert numbers["returned_bytes"] == 4 * 4 * 4 * 12 * 128 * 64  # out, dq, dk, dv in fp32
    assert numbers["peak_bytes"] >= 0.5 * numbers["returned_bytes"]


def test_the_promise_is_broken_by_one_byte_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = 4 * 16384 * 8 * 64 * 4 + 3 * 4 * 8 * 16384 + 64_000_000

    def check(peak: int) -> dict[str, Any]:
        numbers = {"attn_ext": {"peak_bytes": peak, "returned_bytes": 0, "extra_bytes": 0}}
        monkeypatch.setattr(memory, "measure", lambda *_: numbers)
        return memory.check_promise(1)

    assert check(allowed)["kept"] is True
    broken = check(allowed + 1)
    assert broken["kept"] is False and "BROKEN" in memory.promise_line(broken)
    assert attention.exit_code({"rows": [], "memory_check": broken}) == 1
    assert attention.exit_code({"rows": [], "memory_check": check(allowed)}) == 0


def test_engines_that_cannot_do_a_row_say_why() -> None:
    from bench.cases import make_inputs
    from bench.peers import ENGINES, CannotRun, engine_runner

    case = Case("fp32", "backward", 1, 2, 8, 8)
    for name in ENGINES:
        with pytest.raises(CannotRun, match="inference only"):
            engine_runner(name, case, make_inputs(case), 1)


def test_everything_printed_is_valid_json_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--row", "fp32 forward 1,1,4,8", "--threads", "1", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"attn_ext"}
