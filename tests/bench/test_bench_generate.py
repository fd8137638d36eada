"""`python -m bench generate`: its rivals write the same text, its check finds wrong tokens, and how it takes time."""

from __future__ import annotations

import copy
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import made_up_result
from torch import Tensor

import attn_ext
from attn_ext.models import CausalLM
from bench import common, generate, over_length, torch_caches
from bench.__main__ import main
from bench.device import CpuDevice
from bench.generate import Case
from bench.over_length import Settings

TINY = {"vocab_size": 17, "d_model": 16, "h": 4, "num_kv_heads": 2, "d_ff": 24, "num_layers": 2}
CASES = [Case("small", 5, quick=True), Case("small", 21), Case("mid", 5)]
ARGUMENTS = ["generate", "--seconds", "0.005", "--threads", "1"]
SETTINGS = Settings(threads=1, seconds=1e-6, rounds=2, pause=0.0, ceiling_seconds=0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MODELS", {"small": TINY, "mid": {**TINY, "num_kv_heads": 4}})
    monkeypatch.setattr(generate, "all_cases", lambda: CASES)
    honest = generate.time_writers
    monkeypatch.setattr(
        generate, "time_writers", lambda writers, prompt, _: honest(writers, prompt, SETTINGS)
    )


@pytest.fixture
def model(small: None) -> CausalLM:
    return generate.make_model("small", 64)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_every_row_is_right_and_timed(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    assert main([*ARGUMENTS, *files]) == 0
    result = common.read_json(tmp_path / "a.json")
    assert [row["id"] for row in result["rows"]] == ["small after 5", "small after 21", "mid after 5"]
    for row in result["rows"]:
        assert row["check"]["ok"]
        for name, how in generate.RIVALS.items():
            rival = row["rivals"][name]
            assert rival["how"] == how and rival["p20_us"] <= rival["median_us"] <= rival["p80_us"]
            assert rival["tokens_per_second"] == pytest.approx(1e6 / rival["median_us"])
            assert rival["prompt_us"] > 0
        assert row["ratio"] == pytest.approx(
            row["rivals"]["torch"]["median_us"] / row["rivals"]["attn_ext"]["median_us"]
        )
    shown = capsys.readouterr().out
    count = sum(p.numel() for p in generate.make_model("small", 8).parameters())
    assert f"small: {count / 1e6:.1f} M parameters" in shown and generate.parameters(TINY) == count
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["rival"] for line in lines[:4]] == list(generate.RIVALS)
    assert float(lines[0]["prompt_us"]) > 0
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0


def test_the_plot_is_a_png(small: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    assert main([*ARGUMENTS, "--rows", "small", "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --- right and wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch_caches.slice_caches, torch_caches.cat_caches])
def test_the_caches_in_plain_torch_give_the_logits_of_a_full_pass(
    make: Callable[..., Any], model: CausalLM
) -> None:
    text = torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(1))
    caches = make(model, 3)
    for cache in caches:
        cache.reserve(12)
    with torch.no_grad():
        pieces = [model(text[:, i:j], cache=caches) for i, j in ((0, 7), (7, 8), (8, 9), (9, 10))]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(text[:, :10]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rival", generate.RIVALS)
def test_rivals_write_the_likeliest_tokens(rival: str, model: CausalLM) -> None:
    prompt = torch.arange(9)[None]
    write = generate.make_writers(model)[rival]
    exact = copy.deepcopy(model).double()
    assert generate.difference_from_likeliest(exact, prompt, write) < 1e-5
    tokens: list[Tensor] = []
    write(prompt, 12, tokens.append)
    assert torch.equal(torch.stack(tokens, dim=1), model.generate(prompt, 12)[:, 9:])


def test_another_token_than_the_likeliest_is_found(model: CausalLM) -> None:
    prompt = torch.arange(9)[None]
    exact = copy.deepcopy(model).double()
    right: list[Tensor] = []
    model.generate(prompt, generate.CHECKED_TOKENS, callback=right.append)

    def difference(tokens: list[Tensor]) -> float:
        def write(_: Tensor, n: int, callback: Callable[[Tensor], None]) -> None:
            for token in tokens[:n]:
                callback(token)

        return generate.difference_from_likeliest(exact, prompt, write)

    assert difference(right) <= 0.0
    assert difference([*right[:-1], (right[-1] + 1) % 17]) > generate.ALLOWED
    assert difference([(right[0] + 1) % 17, *right[1:]]) > generate.ALLOWED
    assert difference(right[:-1]) == torch.inf  # one is missing


@pytest.mark.parametrize("what", ["off", "forgets the prompt", "forgets a token"])
def test_a_wrong_result_ends_with_1_and_is_not_timed(
    what: str, small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    honest = attn_ext.KVCache.attend

    def spoiled(self: attn_ext.KVCache, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.shape[2] == 1 and what == "forgets the prompt":
            self.truncate(0)
        if q.shape[2] == 1 and what == "forgets a token":
            self.truncate(self.max_length - 1)
        return honest(self, q, k, v, **options) * (-1 if what == "off" else 1)

    monkeypatch.setattr(attn_ext.KVCache, "attend", spoiled)
    assert main([*ARGUMENTS, "--rows", "small after 21", "--json", str(tmp_path / "a.json")]) == 1
    (row,) = common.read_json(tmp_path / "a.json")["rows"]
    assert not row["check"]["ok"] and row["rivals"] == {}
    assert "WRONG" in capsys.readouterr().out


def test_a_rival_that_writes_something_else_has_no_figure(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_caches, "_turned", lambda x, cos, sin: x)  # no positions
    assert main([*ARGUMENTS, "--rows", "small after 21", "--json", str(tmp_path / "a.json")]) == 0
    (row,) = common.read_json(tmp_path / "a.json")["rows"]
    assert "below the likeliest one" in row["rivals"]["torch"]["skipped"] and row["ratio"] is None
    assert row["rivals"]["no cache"]["median_us"] > 0
    assert "torch has no figure where" in capsys.readouterr().out


# --- time -----------------------------------------------------------------------------------------------------------


def writer(log: list[str], name: str, pause: float = 0.0) -> generate.Write:
    def write(prompt: Tensor, n: int, callback: Callable[[Tensor], None]) -> None:
        log.append(name)
        for _ in range(n):
            time.sleep(pause)
            callback(prompt[:, 0])

    return write


def test_a_writer_is_stopped_when_its_time_is_up_but_not_before_three_tokens() -> None:
    prompt = torch.zeros(1, 4, dtype=torch.int64)
    first, rest = generate.write_timed(writer([], "a"), prompt, 1000.0)
    assert len(rest) == generate.NEW_TOKENS - 1 and first > 0
    _, rest = generate.write_timed(writer([], "a", pause=0.001), prompt, 0.0)
    assert len(rest) == generate.FEWEST_TOKENS - 1 and min(rest) >= 0.001


def test_rivals_take_turns(small: None) -> None:
    log: list[str] = []
    paces = generate.time_writers({name: writer(log, name) for name in "abc"}, torch.zeros(1, 4), SETTINGS)
    assert "".join(log) == "abc" + "abc" + "cba"  # warm-up, two rounds
    assert paces["a"]["samples"] == 2 * (generate.FEWEST_TOKENS - 1)


# --- input ----------------------------------------------------------------------------------------------------------


def test_list_names_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--list", "--rows", "mid"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"mid after {n}" for n in (32, 128, 512, 2048)]


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "no such row"], ["--threads", "0"], ["--seconds", "0"], ["--plot", "/no/such/folder/a.png"]],
    ids=" ".join,
)
def test_bad_input_is_one_sentence_and_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("bench generate: ")


def test_too_little_memory_is_one_sentence_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda _: 10**8)
    assert main(["generate"]) == 2
    assert "'mid after 2048' takes" in capsys.readouterr().err


def test_lost_rows_are_named() -> None:
    row = {"id": "small after 5", "check": {"ok": True}, "rivals": {}, "ratio": 0.5}
    assert over_length.reading(made_up_result([row])) == [
        "attn_ext is slower than torch in 1 of 1 rows: small after 5."
    ]
