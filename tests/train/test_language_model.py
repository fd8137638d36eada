"""The training loop: it learns, it goes on where it stopped to the last bit, its clock ends it in time."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from train_support import corpus, tiny

from attn_ext.embed import TextError
from attn_ext.models import load, save
from attn_ext.train import (
    Checkpoint,
    CheckpointError,
    Processes,
    Training,
    TrainingDiverged,
    TrainingStep,
    bits_per_byte,
    memory_needed,
    split_text,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_loss_falls_and_held_out_text_is_predicted(tmp_path: Path) -> None:
    training = Training(tiny(steps=150, d_model=32, learning_rate=1e-2, dropout=0.0), corpus())
    before = bits_per_byte(training.model, corpus().validation, corpus().training)
    assert training.run() and not training.model.training
    assert training.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert sum(training.losses[-10:]) / 10 < 1.0 < training.losses[0]
    after = bits_per_byte(training.model, corpus().validation, corpus().training)
    assert after < 2.0 < 7.0 < before
    save(training.model, tmp_path / "lm")
    again = load(tmp_path / "lm")
    assert again.config["tokenizer"] == "bytes"
    assert bits_per_byte(again, corpus().validation, corpus().training) == after


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_run_that_goes_on_has_the_curve_of_one_that_never_stopped(stop: int, tmp_path: Path) -> None:
    whole = Training(tiny(), corpus())
    assert whole.run()
    first = Training(tiny(), corpus())
    path = tmp_path / "c"
    assert not first.run(checkpoint_path=path, should_stop=lambda: first.step == stop - 1)
    assert first.step == stop and first.model.training
    torch.manual_seed(99)  # nothing random outside of the checkpoint has a part in it
    second = Training.from_checkpoint(Checkpoint.read(path), corpus())
    assert second.step == stop and second.run()
    assert second.losses == whole.losses and len(whole.losses) == 12
    for name, parameter in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], parameter), name
    for kind in ("mean", "square"):
        ours, theirs = getattr(second.checkpoint(), kind), getattr(whole.checkpoint(), kind)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_has_not_begun_can_be_kept_too(tmp_path: Path) -> None:
    whole = Training(tiny(), corpus())
    whole.checkpoint().write(tmp_path / "c")
    later = Training.from_checkpoint(Checkpoint.read(tmp_path / "c"), corpus())
    assert whole.run() and later.step == 0 and later.run() and later.losses == whole.losses


def test_a_seed_gives_the_same_run_and_leaves_torchs_own_alone() -> None:
    state = torch.get_rng_state()
    curves = []
    for seed in (0, 0, 1):
        training = Training(tiny(seed=seed), corpus())
        training.run()
        curves.append(training.losses)
    assert curves[0] == curves[1] != curves[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_parts_of_a_batch_add_up_to_the_batch() -> None:
    curves = []
    for parts in (1, 2, 4):
        training = Training(tiny(parts=parts, dropout=0.0), corpus())
        training.run()
        curves.append(training.losses)
    assert curves[1] == pytest.approx(curves[0], abs=1e-4) and curves[2] == pytest.approx(curves[0], abs=1e-4)
    dropped = Training(tiny(dropout=0.5), corpus())
    dropped.run()
    assert dropped.losses != pytest.approx(curves[0], abs=1e-4)


def test_each_pass_reads_every_window_once_in_an_order_of_its_own() -> None:
    training = Training(tiny(), split_text("".join(f"{n:04}" for n in range(400))))
    content = training.corpus.training
    windows = training._windows
    count = windows.in_a_pass
    passes = [[windows[n].tolist() for n in range(k * count, (k + 1) * count)] for k in range(3)]
    starts = []
    for read in passes:
        assert all(len(window) == 17 for window in read)
        where = [content.find(bytes(window)) for window in read]
        assert min(where) >= 0
        cut = sorted(where)
        assert [b - a for a, b in itertools.pairwise(cut)] == [16] * (count - 1)
        starts.append(where)
    assert count >= len(content) // 16 - 2
    assert starts[0] != starts[1] and len({min(where) for where in starts}) > 1
    assert windows[count + 3].tolist() == passes[1][3]  # the same whatever was read before


def test_a_time_budget_ends_the_run_with_the_rate_come_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0 * next(clock))  # each look takes a second
    seen: list[TrainingStep] = []
    training = Training(tiny(steps=None, minutes=1.0, learning_rate=1.0), corpus())
    monkeypatch.setattr(training._optimizer, "step", lambda: None)
    assert training.run(on_step=seen.append)
    assert [step.step for step in seen] == list(range(1, 61)) and training.seconds == 60
    rates = [step.learning_rate for step in seen]
    assert rates[0] == pytest.approx(0.01) and max(rates) > 0.99 and rates[-1] < 0.02
    assert rates.index(max(rates)) <= 3 and seen[-1].fraction == 1.0
    assert all(step.tokens == 64 for step in seen)


def test_checkpoints_come_as_often_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[int] = []
    monkeypatch.setattr(Checkpoint, "write", lambda self, path: written.append(self.step))
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0 * next(clock))
    Training(tiny(), corpus()).run(checkpoint_path=tmp_path / "c", checkpoint_every=5.0)
    assert written == [5, 10]
    Training(tiny(), corpus(), Processes(rank=1)).run(checkpoint_path=tmp_path / "c", checkpoint_every=5.0)
    assert written == [5, 10]


def test_a_loss_that_is_no_number_ends_the_run_before_it_spoils_the_weights() -> None:
    training = Training(tiny(learning_rate=1e30, warm_up=0.0, steps=50, dropout=0.0), corpus())
    with pytest.raises(
        TrainingDiverged,
        match=r"The (loss|gradients' norm) became (nan|inf) in step \d+: a lower learning rate",
    ):
        training.run()
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())
    assert training.step == len(training.losses) and all(map(math.isfinite, training.losses))


@pytest.mark.parametrize("value", [math.nan, 3e38])
def test_weights_that_the_last_step_spoiled_are_no_finished_run(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tiny(dropout=0.0), corpus())
    step = training._optimizer.step

    def spoiling() -> None:
        step()
        if training.step == 11:
            with torch.no_grad():
                for parameter in training.model.parameters():
                    if parameter.dim() == 1:  # of the norms
                        parameter.fill_(value)

    monkeypatch.setattr(training._optimizer, "step", spoiling)
    with pytest.raises(TrainingDiverged, match="in step 12: a lower learning rate"):
        training.run(checkpoint_path=tmp_path / "c", checkpoint_every=0.0)
    kept = Checkpoint.read(tmp_path / "c")
    assert kept.step == 11 and all(torch.isfinite(weight).all() for weight in kept.weights.values())


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    training, told = Training(tiny(), corpus()), []
    absent = tmp_path / "absent" / "c"
    assert training.run(checkpoint_path=absent, checkpoint_every=0.0, on_unwritten=told.append)
    assert len(told) == 11 and all("cannot be written" in str(error) for error in told)
    stopped = Training(tiny(), corpus())
    with pytest.raises(CheckpointError, match="cannot be written"):
        stopped.run(checkpoint_path=absent, should_stop=lambda: True)


@pytest.mark.parametrize("sizes", [{}, {"layers": 3, "d_model": 24, "d_ff": 20}])
def test_the_memory_that_is_counted_is_that_of_the_parameters_and_less_than_is_used(
    sizes: dict[str, int],
) -> None:
    recipe = tiny(**sizes)
    parameters = sum(parameter.numel() for parameter in Training(recipe, corpus()).model.parameters())
    with_more = memory_needed(tiny(**sizes, batch=8)) - memory_needed(recipe)  # 2 windows more in a part
    assert memory_needed(recipe) - with_more == 16 * parameters


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TextError, match="90 bytes to train on are too few for a context of 90; at least 91"):
        Training(tiny(context=90), split_text("x" * 100))
    Training(tiny(context=89), split_text("x" * 100)).run()
    with pytest.raises(ValueError, match="3 processes cannot share out the batch evenly: it has 2 parts"):
        Training(tiny(), corpus(), Processes(0, 3))
    training = Training(tiny(), corpus())
    training.run(should_stop=lambda: True)
    with pytest.raises(
        CheckpointError, match=r"of a run on another text \(text\), not on this one \(b.txt\)"
    ):
        Training.from_checkpoint(training.checkpoint(), split_text("x" * 100, ["b.txt"]))
