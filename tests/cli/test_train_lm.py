"""train-lm and train-reverse: what they print, save and refuse; signals; several processes."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="typer is not installed: pip install typer")
pytest.importorskip("rich", reason="rich is not installed: pip install rich")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from cli_support import assert_refused, read_json
from typer.testing import CliRunner, Result

from attn_ext.cli import train_reverse as reverse_command
from attn_ext.cli.app import app
from attn_ext.models import CausalLM, Seq2SeqTransformer, WeightsError, load, save
from attn_ext.teach import reverse
from attn_ext.train import Checkpoint, CheckpointError, Recipe, Training, bits_per_byte, read_corpus

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 32, "context": 16, "batch": 4}
TINY = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n}: naïve cats on mat {n % 7}.\n" for n in range(120)), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})


def called_json(*arguments: str | Path) -> dict[str, Any]:
    return read_json(call(*arguments, "--json"))


@contextmanager
def running(
    *arguments: str | Path, before: tuple[str, ...] = ("-m", "attn_ext.cli")
) -> Iterator[subprocess.Popen[bytes]]:
    """train-lm in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, *before, "train-lm", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # On one line however long pytest's paths are (those of its worker processes are longer).
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------------- train-lm


def test_training_saves_and_scores_a_model(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "lm.safetensors"
    report = called_json("train-lm", "--text", text, "--out", out, "--steps", "30", "--seed", "4", *TINY)
    model, corpus = load(out), read_corpus([text])
    assert isinstance(model, CausalLM) and model.config["tokenizer"] == "bytes"
    assert report["finished"] and report["steps"] == len(report["losses"]) == 30
    assert report["losses"][-1] < report["losses"][0] and report["loss_unit"] == "nats per byte"
    assert report["recipe"]["seed"] == 4 and report["recipe"]["minutes"] is None
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["model"] == str(out) and report["checkpoint"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lm.safetensors", "text.txt"]

    validation, held_out = report["validation"], corpus.validation
    assert report["validation_bytes"] == len(held_out) and validation["least_context"] == 13
    bits = bits_per_byte(model, held_out, corpus.training, stride=4)
    assert validation["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    sizes = {
        "this model": bits * len(held_out) / 8,
        "gzip -9": len(gzip.compress(held_out, 9)),
        "xz -9": len(lzma.compress(held_out, preset=9)),
    }
    characters = len(held_out.decode())
    assert validation["characters"] == characters < len(held_out)
    for row in validation["rows"]:
        size = sizes.pop(row["name"])
        assert row["bytes"] == pytest.approx(size, abs=1)
        assert row["bits_per_byte"] == pytest.approx(8 * size / len(held_out), rel=1e-5)
        assert row["bits_per_character"] == pytest.approx(8 * size / characters, rel=1e-5)
    assert not sizes


def test_the_curve_is_that_of_the_library(text: Path, tmp_path: Path) -> None:
    report = called_json("train-lm", "--text", text, "--out", tmp_path / "m", "--steps", "5", *TINY)
    training = Training(Recipe(**SIZES, steps=5, minutes=None), read_corpus([text]))
    training.run()
    assert report["losses"] == training.losses


def test_training_as_text_fits_80_columns(text: Path, tmp_path: Path) -> None:
    result = call("train-lm", "--text", text, "--out", tmp_path / "m", "--steps", "3", *TINY)
    assert result.exit_code == 0 and result.stderr == "" and "\x1b" not in result.stdout
    lines = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    flowing = " ".join(result.stdout.split())
    assert "1 block, a context of 16 bytes; 3 steps." in flowing and "Trained: 3 steps" in flowing
    assert re.search(r"this model +[\d,]+ +\d\.\d{3} +\d\.\d{3}\n", result.stdout)
    assert re.search(r"gzip -9 +[\d,]+ +\d\.\d{3} +\d\.\d{3}\n", result.stdout)
    assert f"saved as {tmp_path / 'm'}" in result.stdout


def test_a_time_budget_ends_the_run(text: Path, tmp_path: Path) -> None:
    report = called_json("train-lm", "--text", text, "--out", tmp_path / "m", "--minutes", "0.02", *TINY)
    assert report["seconds"] >= 1.2 and report["fraction"] == 1 and report["steps"] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    number: signal.Signals, text: Path, tmp_path: Path
) -> None:
    out, kept = tmp_path / "lm.safetensors", tmp_path / "lm.checkpoint.safetensors"
    with running("--text", text, "--out", out, "--steps", "100000", *TINY) as process:
        assert process.stdout is not None and str(text).encode() in process.stdout.readline()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and stderr == b"", stderr
    assert b"Stopped after" in stdout and str(kept).encode() in stdout and b"--resume goes on" in stdout
    assert not out.exists()
    checkpoint = Checkpoint.read(kept)
    uninterrupted = Training(checkpoint.recipe, read_corpus([text]))
    uninterrupted.run(should_stop=lambda: uninterrupted.step == checkpoint.step - 1)
    assert checkpoint.losses.tolist() == uninterrupted.losses

    assert_refused(call("train-lm", "--out", out), str(kept), "--resume", "--restart")


def test_resume_has_the_options_and_the_curve_of_the_run(text: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "lm.safetensors", tmp_path / "lm.checkpoint.safetensors"
    corpus = read_corpus([text])
    recipe = Recipe(**SIZES, steps=8, minutes=None, seed=3)
    half, whole = Training(recipe, corpus), Training(recipe, corpus)
    half.run(checkpoint_path=kept, should_stop=lambda: half.step == 3)
    whole.run()
    for option, value, has in (("--lr", "0.5", "0.003"), ("--steps", "9", "8"), ("--d-model", "32", "16")):
        name = {"--lr": "learning_rate"}.get(option, option[2:].replace("-", "_"))
        result = call("train-lm", "--resume", "--out", out, option, value)
        assert_refused(result, str(kept), f"{name} = {has}, but {option} {value} was given")
    other = tmp_path / "other.txt"
    other.write_text("another text, long enough to train on")
    assert_refused(call("train-lm", "--resume", "--out", out, "--text", other), str(kept), "another text")
    assert kept.exists() and not out.exists()
    report = called_json("train-lm", "--resume", "--out", out, "--seed", "3")
    assert report["losses"] == whole.losses and report["first_step"] == 4 and not kept.exists()
    for name, tensor in load(out).state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name])


def test_restart_begins_anew(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    Training(Recipe(**SIZES, steps=9, minutes=None), read_corpus([text])).checkpoint().write(kept)
    arguments = (
        "train-lm",
        "--text",
        text,
        "--checkpoint",
        kept,
        "--out",
        tmp_path / "m",
        "--steps",
        "2",
        *TINY,
    )
    assert_refused(call(*arguments), str(kept), "--restart")
    assert_refused(call(*arguments, "--restart", "--resume"), "exclude each other")
    assert called_json(*arguments, "--restart")["first_step"] == 0 and not kept.exists()


def test_a_kill_leaves_a_checkpoint_to_go_on_from(text: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "lm.safetensors", tmp_path / "lm.checkpoint.safetensors"
    arguments = ("--text", text, "--out", out, "--steps", "3000", "--checkpoint-every", "0", *TINY)
    with running(*arguments) as process:
        while not kept.exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    checkpoint = Checkpoint.read(kept)
    assert 1 <= checkpoint.step < 3000
    training = Training.from_checkpoint(checkpoint, read_corpus([text]))
    again = Training(checkpoint.recipe, read_corpus([text]))
    for run in (training, again):
        run.run(should_stop=lambda run=run: run.step == checkpoint.step + 2)
    assert training.losses == again.losses


def test_two_processes_have_the_curve_of_one(text: Path, tmp_path: Path) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    shared = ("--text", text, "--steps", "20", "--parts", "4", *TINY)
    alone = called_json("train-lm", "--out", tmp_path / "one", *shared)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "attn_ext.cli")
    with running("--out", tmp_path / "two", *shared, "--json", before=launcher) as together:
        stdout, stderr = together.communicate(timeout=300)
    assert together.returncode == 0, stderr.decode()
    report = json.loads(stdout)  # one object: one process printed
    assert (alone["processes"], report["processes"]) == (1, 2)
    assert len(report["losses"]) == 20 and report["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert report["validation"]["bits_per_byte"] == pytest.approx(
        alone["validation"]["bits_per_byte"], abs=1e-3
    )
    ours, theirs = load(tmp_path / "one").state_dict(), load(tmp_path / "two").state_dict()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "absent.txt"], ["absent.txt", "no such file"]),
        (["--text", "empty.txt"], ["empty.txt", "is empty"]),
        (["--text", "short.txt"], ["short.txt", "few"]),
        (["--text", "fits-no-window.txt"], ["fits-no-window.txt", "too few for a context of 256"]),
        (["--text", "latin1.txt"], ["latin1.txt", "not UTF-8"]),
        (["--text", "."], [".", "is a directory"]),
        (["--out", "no/lm.safetensors"], ["--out", "its folder does not exist"]),
        (["--out", "."], ["--out", "is a directory"]),
        (["--out", "x", "--checkpoint", "./x"], ["--out and --checkpoint are the same file, x"]),
        (["--checkpoint", "no/c"], ["--checkpoint", "its folder does not exist"]),
        (["--minutes", "1", "--steps", "3"], ["--minutes and --steps"]),
        (["--minutes", "0"], ["minutes must be above 0, got 0"]),
        (["--minutes", "nan"], ["minutes must be above 0, got nan"]),
        (["--lr", "-1"], ["learning_rate must be above 0, got -1"]),
        (["--dropout", "1"], ["dropout must be from 0 to below 1, got 1"]),
        (["--d-model", "30"], ["even multiple of heads"]),
        (["--batch", "3"], ["batch must be a multiple of parts"]),
        (["--resume"], ["lm.checkpoint.safetensors", "does not exist"]),
        (["--resume", "--checkpoint", "cut"], ["cut", "truncated"]),
        (["--resume", "--checkpoint", "model"], ["model", "it holds a model"]),
        (["--out", "dangling"], ["--out dangling", "its folder does not exist"]),
        (["--out", "pipe"], ["--out pipe", "is a device, pipe or socket"]),
        (["--out", "x" * 300], ["--out xxx", "too long"]),
        (["--out", "x" * 250], ["--checkpoint xxx", "too long"]),
        (["--out", "short.txt"], ["--out short.txt", "no saved model"]),
        (["--out", "m", "--checkpoint", "short.txt"], ["short.txt", "no checkpoint"]),
        (["--out", "m", "--checkpoint", "short.txt", "--restart"], ["short.txt", "no checkpoint"]),
        (["--out", "m", "--checkpoint", "model", "--restart"], ["model", "no checkpoint"]),
        (["--text", "model", "--out", "model"], ["--out model is the same file as --text model"]),
        (["--text", "model", "--out", "link"], ["--out link is the same file as --text model"]),
        (["--text", "model", "--out", "hard"], ["--out hard is the same file as --text model"]),
        (["--text", "short.txt", "--out", "short.txt"], ["--out short.txt is the same file as --text"]),
        (["--text", "model", "--checkpoint", "link"], ["--checkpoint link is the same file as --text model"]),
        (["--d-model", "1000000", "--heads", "1"], ["bytes of memory", "available"]),
        (["--batch", "1000000000", "--parts", "1"], ["bytes of memory", "available"]),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "short.txt").write_bytes(b"short")
    (tmp_path / "fits-no-window.txt").write_bytes(b"some words " * 20)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9" * 99)
    (tmp_path / "cut").write_bytes(b"\x99" * 100)
    save(CausalLM(8, 8, 2, 8, 1), tmp_path / "model")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "model")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "hard").hardlink_to(tmp_path / "model")
    os.mkfifo(tmp_path / "pipe")  # no real device: a fault, run as root, would replace it for everybody
    before = sorted(tmp_path.iterdir())
    assert_refused(call("train-lm", *arguments), *words)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["train-lm", "--d-ff", "99999999999999999999999"],
        ["train-lm", "--layers", "100000000"],
        ["generate", "-p", "x", "--beams", "1000000000"],
        ["generate", "-p", "x", "--beams", "2", "--window", "8", "--tokens", "99999999999999"],
    ],
)
def test_a_size_beyond_all_measure_is_a_bad_option(arguments: list[str]) -> None:
    option = arguments[-2]
    result = call(*arguments)
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error"),
    ],
)
def test_too_little_memory_is_one_sentence(
    error: Exception, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Training, "run", fails)
    arguments = ("--text", text, "--out", tmp_path / "m", "--steps", "2", *TINY, "--json")
    words = ("for 4,096 bytes more",) if error.args else ()
    assert_refused(call("train-lm", *arguments), "there is not enough memory", *words)


def test_a_model_that_the_last_step_spoiled_is_not_saved(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    arguments = ("--text", text, "--out", out, "--steps", "2", "--lr", "1e30", *TINY, "--json")
    assert_refused(call("train-lm", *arguments), "in step 2: a lower learning rate than 1e+30")
    assert not out.exists()


def test_a_finished_run_whose_model_cannot_be_saved_is_kept_for_another_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise WeightsError("m cannot be written: No space left on device.")

    kept, out = tmp_path / "m.checkpoint.safetensors", tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr("attn_ext.cli.train_lm.save_model", full)
        arguments = ("--text", text, "--out", tmp_path / "m", "--steps", "3", *TINY, "--json")
        assert_refused(
            call("train-lm", *arguments), "No space left", f"--resume --checkpoint {kept}", "--out"
        )
    assert Checkpoint.read(kept).step == 3
    report = called_json("train-lm", "--resume", "--checkpoint", kept, "--out", out)
    assert report["first_step"] == report["steps"] == 3 and isinstance(load(out), CausalLM)
    assert not kept.exists()


def test_a_disk_that_is_full_for_checkpoints_is_one_warning(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Checkpoint, path: Path) -> None:
        raise CheckpointError(f"{path} cannot be written: No space left on device.")

    monkeypatch.setattr(Checkpoint, "write", full)
    out = tmp_path / "m"
    result = call(
        "train-lm", "--text", text, "--out", out, "--steps", "4", "--checkpoint-every", "0", *TINY, "--json"
    )
    assert result.exit_code == 0 and isinstance(load(out), CausalLM)
    assert len(result.stderr.splitlines()) == 1 and "warning" in result.stderr and "No space" in result.stderr


def test_a_text_from_standard_input_has_to_be_piped_again(text: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "m", tmp_path / "m.checkpoint.safetensors"
    run = Training(Recipe(**SIZES, steps=3, minutes=None), replace(read_corpus([text]), sources=("-",)))
    run.run(checkpoint_path=kept, should_stop=lambda: True)
    words = (str(kept), "came from standard input", "piped in again")
    assert_refused(call("train-lm", "--resume", "--out", out), *words)
    again = CliRunner().invoke(app, ["train-lm", "--resume", "--out", str(out)], input=text.read_bytes())
    assert again.exit_code == 0 and isinstance(load(out), CausalLM)


def test_a_resumed_run_does_not_overwrite_its_text(text: Path, tmp_path: Path) -> None:
    kept, model = tmp_path / "kept", tmp_path / "model.txt"
    save(CausalLM(8, 8, 2, 8, 1), model)
    run = Training(
        Recipe(**SIZES, steps=3, minutes=None), replace(read_corpus([text]), sources=(str(model),))
    )
    run.run(checkpoint_path=kept, should_stop=lambda: True)
    result = call("train-lm", "--resume", "--checkpoint", kept, "--out", model)
    assert_refused(result, f"--out {model} is the same file as the run's text {model}")


def test_a_run_that_diverges_is_one_sentence(text: Path, tmp_path: Path) -> None:
    arguments = ("--text", text, "--out", tmp_path / "m", "--steps", "99", "--lr", "1e30", *TINY, "--json")
    assert_refused(call("train-lm", *arguments), "became nan in step", "a lower learning rate than 1e+30")
    assert not (tmp_path / "m").exists()


def test_ctrl_c_while_scoring_leaves_the_saved_model(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("attn_ext.cli.train_lm.bits_per_byte", interrupted)
    out = tmp_path / "m"
    result = call("train-lm", "--text", text, "--out", out, "--steps", "2", *TINY)
    assert result.exit_code == 130 and f"Stopped while scoring; saved as {out}" in result.stdout
    assert isinstance(load(out), CausalLM)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_minutes_on_pythons_documentation_beat_gzip(tmp_path: Path) -> None:
    with running("--out", tmp_path / "m", "--json", "--threads", "2") as process:
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    bits = {row["name"]: row["bits_per_byte"] for row in json.loads(stdout)["validation"]["rows"]}
    assert bits["this model"] < min(2.12, bits["gzip -9"], bits["xz -9"])


# ---------------------------------------------------------------------- train-reverse


def test_reversing_words_is_trained_scored_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_command, "STEPS", 3)
    monkeypatch.setattr(reverse, "_HELD_OUT", 50)
    out, threads = tmp_path / "r.safetensors", torch.get_num_threads()
    result = call("train-reverse", "--out", out, "--seed", "2", "--json")
    assert result.exit_code == 1 and result.stderr == ""
    report = json.loads(result.stdout)
    assert (report["seed"], report["steps"], report["ok"]) == (2, 3, False)
    assert report["exact_match"] == report["exact"] / report["held_out"] < 0.5
    model = load(out)
    assert isinstance(model, Seq2SeqTransformer) and torch.get_num_threads() == threads
    twin = reverse.train(2, steps=3)[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    result = call("train-reverse", "--out", out)
    assert (
        result.exit_code == 1 and "FAILED: below 0.99" in result.stdout and "attention    " in result.stdout
    )


def test_a_model_that_reverses_every_word_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_command, "STEPS", 1)
    monkeypatch.setattr(reverse, "greedy", lambda model, source: reverse.reverse(source)[:, 1:])
    result = call("train-reverse", "--out", tmp_path / "r")
    assert result.exit_code == 0 and "1.000, 1000 of 1000 held-out words" in " ".join(result.stdout.split())
    assert re.search(r"attention +noitnetta\n", result.stdout)


def test_reversing_is_not_begun_for_a_file_that_cannot_be_saved(tmp_path: Path) -> None:
    assert_refused(call("train-reverse", "--out", tmp_path / "no" / "r"), "its folder does not exist")
    assert_refused(call("train-reverse", "--out", tmp_path), "is a directory")
    (tmp_path / "notes").write_text("mine")
    assert_refused(call("train-reverse", "--out", tmp_path / "notes"), "no saved model")
    assert_refused(call("train-classifier", "--save", tmp_path / "notes"), "no saved model")
    assert (tmp_path / "notes").read_text() == "mine"
