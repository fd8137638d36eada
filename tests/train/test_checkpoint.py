"""Checkpoints: what comes back is what was written; a kill at any moment leaves a whole file; others are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from safetensors.torch import save_file
from train_support import corpus, tiny

from attn_ext.models import save
from attn_ext.train import Checkpoint, CheckpointError, Training

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(steps: int = 3) -> Training:
    training = Training(tiny(), corpus())
    training.run(should_stop=lambda: training.step == steps - 1)
    return training


def test_everything_comes_back(tmp_path: Path) -> None:
    written = trained().checkpoint()
    written.write(tmp_path / "c")
    read = Checkpoint.read(tmp_path / "c")
    assert (read.recipe, read.sources, read.fingerprint) == (written.recipe, ("text",), corpus().fingerprint)
    assert read.step == 3 and read.seconds == written.seconds and torch.equal(read.losses, written.losses)
    for kind in ("weights", "mean", "square"):
        before, after = getattr(written, kind), getattr(read, kind)
        assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        assert any(tensor.abs().max() > 0 for tensor in after.values())


# Writes checkpoints of steps 1, 2, … and at the third stops in the middle: at half of the bytes, before they are
# flushed to the disk, or before the file takes its name.
KILLED_WHILE_WRITING = """
import io, os, pathlib, sys, time
sys.path.insert(0, {tests!r})
from train_support import corpus, tiny
from attn_ext.train import Training

def stuck(*args):
    print("stuck", flush=True)
    time.sleep(600)

moment, path = sys.argv[1:]
training = Training(tiny(), corpus())
for step in (1, 2, 3):
    training.run(should_stop=lambda: True)
    if step == 3 and moment == "half":
        class Half(io.FileIO):
            def write(self, content):
                super().write(content[: len(content) // 2])
                stuck()
        pathlib.Path.open = lambda self, mode: Half(self, "x")
    elif step == 3:
        setattr(os, moment, stuck)
    training.checkpoint().write(path)
"""


@pytest.mark.parametrize("moment", ["half", "fsync", "replace"])
def test_a_kill_while_it_is_written_leaves_the_last_one_whole(moment: str, tmp_path: Path) -> None:
    script = KILLED_WHILE_WRITING.format(tests=str(Path(__file__).parent))
    path = tmp_path / "c"
    process = subprocess.Popen(
        [sys.executable, "-c", script, moment, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"stuck\n"
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".c.*.partial"))) == 1  # it was in the middle of it
    checkpoint = Checkpoint.read(path)
    assert checkpoint.step == 2
    training = Training.from_checkpoint(checkpoint, corpus())
    assert training.run() and training.losses == trained(12).losses


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    trained().checkpoint().write(whole)
    content = whole.read_bytes()

    def refused(message: str, path: Path) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint.read(path)
        assert str(path) in str(caught.value)

    refused("does not exist", tmp_path / "absent")
    refused("is a folder", tmp_path)
    for length in (0, 5, 300, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        refused("is truncated, or no safetensors file", tmp_path / "cut")
    (tmp_path / "text").write_text("steps: 3\n" * 99)
    refused("is truncated, or no safetensors file", tmp_path / "text")
    save(trained().model, tmp_path / "model")
    refused("it holds a model, attn_ext.models.CausalLM", tmp_path / "model")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    refused("its metadata names no run", tmp_path / "other")


WRONG_RECIPES = ({"d_model": 32.0}, {"seed": 0.5}, {"d_ff": 10**9}, {"layers": 10**9})


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    from safetensors import safe_open

    whole, path = tmp_path / "whole", tmp_path / "damaged"
    trained().checkpoint().write(whole)
    with safe_open(whole, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}

    recipe = json.loads(metadata["recipe"])
    for changes in (
        {"recipe": "{}}"},
        {"recipe": '{"layers": 0}'},
        {"recipe": '{"width": 1}'},
        {"step": "x"},
        {"seconds": "inf"},
        {"seconds": "nan"},
        {"sources": "[1]"},
        *({"recipe": json.dumps({**recipe, **wrong})} for wrong in WRONG_RECIPES),
    ):
        save_file(tensors, path, {**metadata, **changes})
        with pytest.raises(CheckpointError, match="is a damaged checkpoint"):
            Checkpoint.read(path)
    save_file(tensors, path, {**metadata, "step": "4"})
    with pytest.raises(CheckpointError, match="4 steps, but losses"):
        Checkpoint.read(path)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("square/blocks")}
    save_file(without, path, metadata)
    with pytest.raises(CheckpointError, match="its square do not fit its recipe"):
        Training.from_checkpoint(Checkpoint.read(path), corpus())


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path) -> None:
    trained().checkpoint().write(tmp_path / "c")
    content = bytearray((tmp_path / "c").read_bytes())
    content[-5] ^= 1
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(CheckpointError, match="is a damaged checkpoint .the checksum of .* does not fit"):
        Checkpoint.read(tmp_path / "c")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        trained().checkpoint().write(tmp_path / "absent" / "c")
