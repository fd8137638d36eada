"""Result files: written and read back, compared, drawn, and turned into the README's table."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from bench_support import made_up_result, made_up_row

from bench import attention, compare, table
from bench.__main__ import main
from bench.cases import Case
from bench.common import SCHEMA, BenchError, read_json, write_csv, write_json

SQUARE = Case("fp32", "forward", 1, 8, 512, 64)
CAUSAL = Case("fp32", "forward", 1, 8, 512, 64, causal=True)
BF16 = Case("bf16", "backward", 1, 8, 512, 64)


def saved(path: Path, *rows: dict, **changes: object) -> str:
    write_json(path, {**made_up_result(list(rows)), **changes})
    return str(path)


# --- JSON and CSV ---------------------------------------------------------------------------------------------------


def test_json_survives_the_round_trip(tmp_path: Path) -> None:
    result = made_up_result([made_up_row(SQUARE, 100.0, 250.0), made_up_row(BF16, 10.0, 5.0)])
    write_json(tmp_path / "a.json", result)
    assert read_json(tmp_path / "a.json") == result


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"schema": SCHEMA, "x": [math.nan, math.inf, 1.5]})
    assert read_json(tmp_path / "a.json")["x"] == [None, None, 1.5]


@pytest.mark.parametrize(
    "text", ["no json", "[1, 2]", json.dumps({"schema": "attn_ext.bench/0", "rows": []})]
)
def test_a_file_of_another_kind_is_refused_in_a_sentence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.json").write_text(text, encoding="utf-8")
    good = saved(tmp_path / "good.json", made_up_row(SQUARE, 1.0, 1.0))
    for command in (["compare", good, str(tmp_path / "odd.json")], ["plot", str(tmp_path / "odd.json")]):
        assert main(command) == 2
        said = capsys.readouterr().err.strip()
        assert "odd.json" in said and len(said.splitlines()) == 1


def test_csv_has_a_line_for_every_row_and_rival(tmp_path: Path) -> None:
    result = made_up_result([made_up_row(SQUARE, 100.0, 250.0)])
    write_csv(tmp_path / "a.csv", attention.CSV_FIELDS, attention.csv_lines(result))
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["rival"] for line in lines] == ["attn_ext", "torch", "onnxruntime"]
    assert float(lines[1]["median_us"]) == 250.0 and lines[0]["ceiling"] == "fma_fp32"
    assert lines[2]["skipped"] == "onnxruntime is not installed"


def test_rates_follow_from_flops_and_time() -> None:
    row = made_up_row(SQUARE, 1000.0, 2000.0)
    ours = row["rivals"]["attn_ext"]
    assert ours["gflops"] == pytest.approx(4 * 8 * 512 * 512 * 64 / 1e-3 / 1e9)
    assert ours["share"] == pytest.approx(ours["gflops"] / 100.0)
    assert made_up_row(BF16, 1.0, 1.0)["ceiling"] == "fma_fp32"  # this made-up CPU has no bf16 dot product


# --- compare --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after_us", "verdict"),
    [(100.0, "same"), (109.0, "same"), (92.0, "same"), (120.0, "slower"), (80.0, "faster")],
)
def test_a_change_counts_only_beyond_the_spread(after_us: float, verdict: str) -> None:
    before, after = (made_up_result([made_up_row(SQUARE, us, 300.0)]) for us in (100.0, after_us))
    (row,) = compare.compare(before, after)["rows"]
    assert row["verdict"] == verdict
    assert row["ratio"] == pytest.approx(100.0 / after_us)
    assert row["torch_ratio"] == 1.0


def test_compare_names_rows_and_settings_that_differ() -> None:
    before = made_up_result([made_up_row(SQUARE, 1.0, 1.0), made_up_row(CAUSAL, 1.0, 1.0)])
    after = made_up_result([made_up_row(SQUARE, 1.0, 1.0), made_up_row(BF16, 1.0, 1.0)])
    after["machine"]["threads"] = 8
    compared = compare.compare(before, after)
    assert compared["only_in_A"] == [CAUSAL.id] and compared["only_in_B"] == [BF16.id]
    assert compared["differences"] == ["threads (2 in A, 8 in B)"]


def test_compare_exits_with_1_only_where_asked_and_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = saved(tmp_path / "fast.json", made_up_row(SQUARE, 100.0, 300.0))
    slow = saved(tmp_path / "slow.json", made_up_row(SQUARE, 200.0, 300.0))
    assert main(["compare", fast, slow]) == 0
    assert "1 slower" in capsys.readouterr().out
    assert main(["compare", fast, slow, "--fail-on-slower"]) == 1
    assert main(["compare", slow, fast, "--fail-on-slower"]) == 0
    assert main(["compare", fast, fast, "--fail-on-slower"]) == 0


def test_a_row_that_was_wrong_is_no_speed(tmp_path: Path) -> None:
    wrong = made_up_row(SQUARE, 1.0, 1.0)
    wrong["check"]["ok"], wrong["rivals"] = False, {}
    good = saved(tmp_path / "good.json", made_up_row(SQUARE, 1.0, 1.0))
    bad = saved(tmp_path / "bad.json", wrong)
    assert main(["compare", good, bad, "--fail-on-slower"]) == 1


def test_compare_refuses_files_without_a_common_row(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", made_up_row(SQUARE, 1.0, 1.0))
    b = saved(tmp_path / "b.json", made_up_row(CAUSAL, 1.0, 1.0))
    assert main(["compare", a, b]) == 2


# --- table and plot -------------------------------------------------------------------------------------------------


def test_the_markdown_table_shows_lost_rows_too() -> None:
    text = table.markdown(
        made_up_result([made_up_row(SQUARE, 100.0, 250.0), made_up_row(BF16, 200.0, 100.0)])
    )
    lines = text.splitlines()
    assert lines[0].startswith("| B,H,L,D | dtype | pass |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[:4])
    assert "**2.50**" in lines[2] and lines[3].endswith("| 0.50 |")
    overlapping = made_up_row(SQUARE, ours_us=100.0, torch_us=105.0, spread=0.1)
    assert table.markdown(made_up_result([overlapping])).splitlines()[2].endswith("| 1.05 |")  # not bold
    assert "A CPU, 2 threads, scalar" in lines[-1]


def test_write_replaces_only_what_stands_between_the_markers(tmp_path: Path) -> None:
    result = saved(tmp_path / "a.json", made_up_row(SQUARE, 100.0, 250.0))
    page = tmp_path / "README.md"
    page.write_text(f"head\n{table.BEGIN}\nstale text\n{table.END}\ntail\n", encoding="utf-8")
    for _ in range(2):  # twice: writing again changes nothing
        assert main(["table", result, "--write", str(page)]) == 0
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"head\n{table.BEGIN}\n| B,H,L,D") and text.endswith(f"\n{table.END}\ntail\n")
        assert "stale text" not in text and text.count("| fp32 |") == 1


def test_a_page_can_hold_tables_of_several_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = saved(tmp_path / "a.json", made_up_row(SQUARE, 100.0, 250.0))
    page = tmp_path / "README.md"
    other, end = table.markers("speed-table-other")
    page.write_text(f"{table.BEGIN}\nfirst\n{table.END}\n{other}\nsecond\n{end}\n", encoding="utf-8")
    assert main(["table", result, "--write", str(page), "--name", "speed-table-other"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"{table.BEGIN}\nfirst\n{table.END}\n{other}\n| B,H,L,D") and "second" not in text
    assert main(["table", result, "--write", str(page), "--name", "a third"]) == 2
    assert (
        "must hold <!-- a third:begin -->" in capsys.readouterr().err
        and page.read_text(encoding="utf-8") == text
    )


@pytest.mark.parametrize(
    "page", ["no markers", f"{table.END}\n{table.BEGIN}", f"{table.BEGIN}\n{table.BEGIN}\n{table.END}"]
)
def test_write_refuses_a_page_without_its_markers(page: str, tmp_path: Path) -> None:
    result = saved(tmp_path / "a.json", made_up_row(SQUARE, 100.0, 250.0))
    (tmp_path / "README.md").write_text(page, encoding="utf-8")
    assert main(["table", result, "--write", str(tmp_path / "README.md")]) == 2
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == page


def test_the_table_can_be_cut_down_to_some_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (made_up_row(SQUARE, 1.0, 1.0), made_up_row(BF16, 1.0, 1.0))
    result = saved(tmp_path / "a.json", *rows)
    assert main(["table", result, "--rows", "bf16"]) == 0
    assert "fp32 |" not in capsys.readouterr().out
    assert main(["table", result, "--rows", "nothing"]) == 2


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    result = saved(tmp_path / "a.json", made_up_row(SQUARE, 100.0, 250.0), made_up_row(BF16, 10.0, 5.0))
    assert main(["plot", result]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_without_shares_cannot_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from bench import plot

    with pytest.raises(BenchError, match="nothing to draw"):
        plot.draw(made_up_result([]), str(tmp_path / "a.png"))


def test_families_of_one_length_are_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from bench import plot

    row = {"family": "f", "length": 7, "rivals": {"attn_ext": {"median_us": 1.0}}}
    with pytest.raises(BenchError, match="nothing to draw"):
        plot.draw({**made_up_result([row, row]), "bench": "decode"}, str(tmp_path / "a.png"))


def test_a_result_that_has_no_picture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    assert main(["plot", saved(tmp_path / "a.json", bench="block")]) == 2
    assert "there is no picture of bench block" in capsys.readouterr().err
