"""`attn-ext generate`: the text, what it says about speed and memory, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="typer is not installed: pip install typer")
pytest.importorskip("rich", reason="rich is not installed: pip install rich")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from cli_support import assert_refused, read_json
from typer.testing import CliRunner, Result

from attn_ext.cli import generate as command
from attn_ext.cli.app import app
from attn_ext.models import CausalLM, TextClassifier, save

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_LEN = 64


def new_model(**options: Any) -> CausalLM:
    torch.manual_seed(5)
    options = {
        "max_len": MAX_LEN,
        "tokenizer": "bytes",
        "rotary_base": 30.0,
        "tie_embeddings": False,
        **options,
    }
    lm = CausalLM(options.pop("vocab_size", 256), 16, 2, 32, 2, **options).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(12.0 if parameter.dim() > 1 else 1.0)
    return lm


def reciting(text: bytes) -> CausalLM:
    """A model that writes `text` over and over, whatever came before: it looks at nothing but the position."""
    lm = new_model(positions="learned")
    with torch.no_grad():
        for block in lm.blocks.layers:
            block.self_attn.w_o.weight.zero_()
            block.ffn.w_down.weight.zero_()
        lm.embedding.weight.zero_()
        lm.output.weight.copy_(torch.randn(256, 16))
        directions = lm.output.weight / lm.output.weight.norm(dim=1, keepdim=True)
        lm.output.weight.copy_(directions * 60)
        for position in range(MAX_LEN):
            lm.position_embedding.weight[position] = directions[text[position % len(text)]]
    return lm


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(new_model(), tmp_path / "lm.safetensors")
    return tmp_path / "lm.safetensors"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], env={"COLUMNS": "80"})


def called_json(*arguments: str | Path) -> dict[str, Any]:
    return read_json(call(*arguments, "--json"))


def test_the_report_has_the_text_the_speeds_and_the_memory(path: Path) -> None:
    report = called_json(
        "--prompt", "Hé", "--model", path, "--tokens", "30", "--temperature", "0", "--threads", "1"
    )
    prompt = torch.tensor([list("Hé".encode())])
    written = new_model().generate(prompt, 30)[0, 3:].tolist()
    assert report["prompt"] == "Hé" and report["text"] == bytes(written).decode("utf-8", "replace")
    assert report["model"] == str(path) and report["finished"] and report["threads"] == 1
    assert report["prefill"]["tokens"] == 3 and report["decode"]["tokens"] == 29
    for part in (report["prefill"], report["decode"]):
        assert part["tokens_per_second"] == pytest.approx(part["tokens"] / part["seconds"])
    cache = report["cache"]
    # 2 layers, keys and values, 2 heads of 8, 3 + 30 - 1 positions, 4 bytes
    assert cache == {
        "kind": "contiguous", "layers": 2, "positions": 32, "dtype": "float32", "bytes": 2 * 2 * 2 * 8 * 32 * 4,
    }  # fmt: skip


def test_the_text_comes_on_stdout_and_the_rest_on_stderr(path: Path) -> None:
    result = call("--prompt", "The ", "--model", path, "--tokens", "20", "--seed", "3")
    assert result.exit_code == 0
    report = called_json("--prompt", "The ", "--model", path, "--tokens", "20", "--seed", "3")
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", report["text"])
    assert result.stdout == f"The {shown}\n"
    assert f"{path}: " in result.stderr and "seed 3" in result.stderr
    assert re.search(r"prompt   4 tokens in [\d.]+ s: [\d,]+ tokens/s", result.stderr)
    assert re.search(r"decode   19 tokens in [\d.]+ s: [\d,]+ tokens/s", result.stderr)
    assert re.search(r"cache    [\d,]+ bytes of float32: contiguous, 2 layers, 23 positions", result.stderr)


def test_a_seed_gives_the_same_text_and_none_another_one(path: Path) -> None:
    def text(*options: str) -> str:
        return called_json("-p", "The ", "--model", path, "--tokens", "40", *options)["text"]

    assert text("--seed", "3") == text("--seed", "3") != text("--seed", "4")
    assert text() != text()
    again = called_json("-p", "The ", "--model", path, "--tokens", "40")
    assert text("--seed", str(again["options"]["seed"])) == again["text"]
    assert text("--top-k", "1") == text("--temperature", "0") == text("--top-p", "0.000001")


def test_characters_come_whole_though_they_are_several_bytes(tmp_path: Path) -> None:
    path = tmp_path / "lm.safetensors"
    save(reciting("né 树\n".encode()), path)
    arguments = ("--prompt", "n", "--model", path, "--temperature", "0")
    # A prompt of one byte at position 0 is followed by the text from its beginning: bytes 1, 2, 1, 3, 1, and 1 again.
    assert called_json(*arguments, "--tokens", "9")["text"] == "né 树\nn"
    assert call(*arguments, "--tokens", "9").stdout == "nné 树\nn\n"
    cut = called_json(*arguments, "--tokens", "5")["text"]  # in the middle of 树
    assert cut == "né \ufffd" and call(*arguments, "--tokens", "5").stdout == "nné \ufffd\n"


def test_what_steers_a_terminal_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "lm.safetensors"
    save(reciting(b"a\x1b[2J\x07\r\t\n"), path)
    arguments = ("--prompt", "b", "--model", path, "--temperature", "0", "--tokens", "9")
    assert call(*arguments).stdout == "ba\ufffd[2J\ufffd\ufffd\t\n\n"
    assert called_json(*arguments)["text"] == "a\x1b[2J\x07\r\t\n"


def test_tokens_that_are_no_bytes_are_shown_as_such() -> None:
    reader = command._Characters()
    assert [reader.read(token) for token in (97, 0xC3, 300, 0xC3, 0xA9)] == ["a", "", "\ufffd\ufffd", "", "é"]
    assert reader.end() == ""


def test_beams_write_the_likeliest_text(path: Path) -> None:
    report = called_json("--prompt", "The ", "--model", path, "--tokens", "12", "--beams", "4")
    written = new_model().generate(torch.tensor([list(b"The ")]), 12, num_beams=4)[0, 4:].tolist()
    assert report["text"] == bytes(written).decode("utf-8", "replace")
    assert report["cache"]["kind"] == "paged" and report["decode"]["tokens"] == 11
    result = call("--prompt", "The ", "--model", path, "--tokens", "12", "--beams", "4")
    assert result.exit_code == 0 and result.stdout.startswith("The ") and "4 beams" in result.stderr
    assert len(result.stdout) == len("The ") + len(report["text"]) + 1


def test_as_many_tokens_as_fit_are_written_by_default(path: Path) -> None:
    assert called_json("--prompt", "abcd", "--model", path)["decode"]["tokens"] == MAX_LEN - 4
    report = called_json("--prompt", "abcd", "--model", path, "--window", "16")
    assert report["decode"]["tokens"] == 199
    assert report["cache"]["kind"] == "sliding" and report["cache"]["positions"] == 16 + 64


def test_a_window_writes_past_what_the_model_reads_and_int8_takes_less(path: Path) -> None:
    arguments = (
        "--prompt",
        "abcd",
        "--model",
        path,
        "--tokens",
        "100",
        "--window",
        "16",
        "--temperature",
        "0",
    )
    whole, small = called_json(*arguments), called_json(*arguments, "--int8")
    assert whole["decode"]["tokens"] == 99 and small["cache"]["dtype"] == "int8"
    assert small["cache"]["bytes"] < 0.5 * whole["cache"]["bytes"]
    lm = new_model()
    cache = lm.new_cache(1, kind="sliding", window=16)
    written = lm.generate(torch.tensor([list(b"abcd")]), 100, cache=cache)[0, 4:].tolist()
    assert whole["text"] == bytes(written).decode("utf-8", "replace")


def test_a_missing_or_foreign_model_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(
        call("-p", "a", "--model", tmp_path / "no"), str(tmp_path / "no"), "attn-ext train-lm makes"
    )
    (tmp_path / "text").write_text("no model")
    assert_refused(
        call("-p", "a", "--model", tmp_path / "text"), str(tmp_path / "text"), "no safetensors file"
    )
    assert_refused(call("-p", "a", "--model", tmp_path), "is a folder")
    save(TextClassifier(20, 16, 4, 32), tmp_path / "classifier")
    assert_refused(call("-p", "a", "--model", tmp_path / "classifier"), "holds a TextClassifier")
    save(CausalLM(300, 16, 4, 32, 1), tmp_path / "unknown")
    assert_refused(call("-p", "a", "--model", tmp_path / "unknown"), "does not say that its tokens are bytes")


def test_what_the_model_cannot_read_is_one_sentence(path: Path, tmp_path: Path) -> None:
    long = "x" * (MAX_LEN + 1)
    assert_refused(call("-p", long, "--model", path), "--prompt has 65 bytes", "64 at most", "--window 64")
    assert called_json("-p", long[1:], "--model", path)["decode"]["tokens"] == 0
    assert_refused(call("-p", "abcd", "--model", path, "--tokens", "62"), "--tokens 62", "can write 61")
    assert called_json("-p", "abcd", "--model", path, "--tokens", "61")["decode"]["tokens"] == 60
    assert_refused(call("-p", "abcd", "--model", path, "--window", "65"), "--window 65", "64 bytes at most")
    save(new_model(positions="learned"), tmp_path / "learned")
    assert_refused(call("-p", "a", "--model", tmp_path / "learned", "--window", "8"), "numbers its positions")
    refused = call("-p", "a", "--model", tmp_path / "learned", "--tokens", "99")
    assert_refused(refused, "can write 64")
    assert "--window" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt needs some text"),
        (["--prompt", os.fsdecode(b"caf\xe9")], "--prompt is not valid UTF-8"),
        (["--prompt", "a", "--beams", "2", "--temperature", "0.5"], "leave out --temperature"),
        (["--prompt", "a", "--beams", "2", "--top-k", "5"], "--top-k and --top-p are for drawing"),
        (["--prompt", "a", "--temperature", "0", "--top-p", "0.5"], "--top-k and --top-p are for drawing"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature must be a finite number"),
    ],
)
def test_options_that_mean_nothing_are_one_sentence(path: Path, arguments: list[str], message: str) -> None:
    assert_refused(call(*arguments, "--model", path), message)


@pytest.mark.parametrize("arguments", [[], ["-p", "a", "--tokens", "0"], ["-p", "a", "--temperature", "-1"]])
def test_bad_options_end_with_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Usage:" in result.stderr


def test_an_unknown_instruction_set_is_one_sentence(path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "attn_ext.cli", "generate", "-p", "a", "--model", str(path)],
        capture_output=True,
        env={**os.environ, "ATTN_EXT_ISA": "sse9"},
        timeout=300,
    )
    assert result.returncode == 2 and result.stdout == b"" and b"Traceback" not in result.stderr
    assert b"sse9" in result.stderr and b"scalar" in result.stderr


def test_help_fits_80_columns() -> None:
    result = call("-h")
    assert result.exit_code == 0 and "tokens" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_the_program_streams_and_stops_at_ctrl_c(path: Path) -> None:
    """In a process of its own: text comes before the end, and Ctrl-C leaves it whole and says how far it was."""
    process = subprocess.Popen(
        [sys.executable, "-m", "attn_ext.cli", "generate", "-p", "abcd", "--model", str(path), "--window", "16",
         "--tokens", "1000000", "--seed", "1"],
        bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        beginning = b""
        while len(beginning) < 100:
            beginning += process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert beginning.startswith(b"abcd") and process.returncode == 130
    assert (beginning + rest).decode("utf-8").endswith("\n")
    assert b"Traceback" not in stderr and b"stopped before the end" in stderr and b"tokens/s" in stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [[], ["--temperature", "0"], ["--beams", "2"]])
def test_a_model_whose_logits_are_no_numbers_is_one_sentence(
    value: float, options: list[str], tmp_path: Path
) -> None:
    lm = new_model()
    with torch.no_grad():
        lm.output.weight.fill_(value)
    save(lm, tmp_path / "lm")
    result = call("--prompt", "x", "--model", tmp_path / "lm", "--json", *options)
    assert_refused(result, "the model's logits are", "no token can be chosen")
