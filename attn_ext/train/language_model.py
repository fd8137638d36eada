"""The training loop of a language model on bytes.

    training = Training(Recipe(steps=500, minutes=None), corpus)
    training.run()
    save(training.model, "lm.safetensors")

Nothing random is carried from one step to the next. Which windows of the text a step reads and what dropout drops
follow from (seed, step, part of the batch) alone, so a run that goes on from a checkpoint, and one that is shared
out among processes, does what a single uninterrupted one does.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..embed.text import TextError
from ..models import CausalLM
from ..models.generation import writing
from .checkpoint import Checkpoint, CheckpointError
from .corpus import Corpus, token_tensor
from .processes import Processes
from .recipe import VOCAB_SIZE, Recipe

__all__ = ["Training", "TrainingDiverged", "TrainingStep", "memory_needed"]

_WEIGHTS, _ORDER, _DROPOUT = range(3)  # what a random stream is for


class TrainingDiverged(RuntimeError):
    """The loss, its gradients or the weights are no numbers any more. The message is one sentence."""


@dataclass(frozen=True)
class TrainingStep:
    """What a step did."""

    step: int  # counted from 1
    loss: float  # mean over the batch before the step, nats per byte
    learning_rate: float
    seconds: float  # of the whole run so far
    fraction: float  # of the run that is over
    tokens: int  # that this step read


class Training:
    """A run: the model, its optimizer, and how far they are.

    Args:
        recipe: what to build and how to train it.
        corpus: the text.
        processes: those that train together; this one alone where not given.

    Attributes:
        model: the `CausalLM` in training.
        step: how many steps are done.
        seconds: how long they took.
        losses: one a step, nats per byte.

    Raises:
        TextError: the training text is shorter than one window.
        ValueError: a number of processes that does not divide `recipe.parts`.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, processes: Processes | None = None) -> None:
        self.recipe = recipe
        self.corpus = corpus
        self.processes = processes = processes or Processes()
        if recipe.parts % processes.count:
            raise ValueError(
                f"{processes.count} processes cannot share out the batch evenly: it has {recipe.parts} parts"
            )
        self._windows = _Windows(corpus, recipe.context, recipe.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_stream(recipe.seed, _WEIGHTS))
            self.model = _new_model(recipe)
        self._parameters = dict(self.model.named_parameters())
        self._trained: nn.Module = self.model if processes.count == 1 else DistributedDataParallel(self.model)
        self._optimizer = _new_optimizer(self._parameters, recipe)
        self.step = 0
        self.seconds = 0.0
        self.losses: list[float] = []

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, corpus: Corpus, processes: Processes | None = None
    ) -> Training:
        """Go on where `checkpoint` was written.

        Raises:
            CheckpointError: it belongs to another text, or its tensors do not fit its recipe.
        """
        if checkpoint.fingerprint != corpus.fingerprint:
            raise CheckpointError(
                f"the checkpoint is of a run on another text ({', '.join(checkpoint.sources)}), "
                f"not on this one ({', '.join(corpus.sources)})."
            )
        training = cls(checkpoint.recipe, corpus, processes)
        training._take(checkpoint)
        return training

    @property
    def fraction(self) -> float:
        """The part of the run that is over."""
        return self.recipe.fraction_done(self.step, self.seconds)

    @property
    def finished(self) -> bool:
        return self.fraction >= 1

    def run(
        self,
        *,
        checkpoint_path: str | os.PathLike[str] | None = None,
        checkpoint_every: float = 60.0,
        on_step: Callable[[TrainingStep], None] = lambda step: None,
        on_unwritten: Callable[[CheckpointError], None] = lambda error: warnings.warn(
            str(error), stacklevel=3
        ),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train until the recipe's end, or until `should_stop()`, which is asked once in each step.

        torch's random state is the same afterwards as before.

        Args:
            checkpoint_path: a file that the leading process writes every `checkpoint_every` seconds, and when it
                is told to stop.
            on_step: called after each step.
            on_unwritten: told why a checkpoint could not be written on the way. The run goes on, and the next one is
                tried in its time.
            should_stop: where it is true in any process, all of them stop after this step.

        Returns:
            Whether the run is finished. The model is then in eval mode.

        Raises:
            TrainingDiverged: the loss or its gradients became infinite or NaN: the weights are those before that
                step. Or the weights did, in the last step or before a checkpoint, which is not written then.
            CheckpointError: the checkpoint cannot be written when the run was told to stop.
        """
        self._trained.train()
        started = time.perf_counter() - self.seconds
        written = self.seconds
        stopped = False
        with torch.random.fork_rng(devices=[]):
            while not self.finished and not stopped:
                step, stop_asked = self._one_step(started, should_stop)
                stopped = stop_asked and not self.finished
                on_step(step)
                due = checkpoint_path is not None and (stopped or self.seconds - written >= checkpoint_every)
                if self.finished or due:
                    self._expect_numbers()
                if checkpoint_path is None or not due or self.finished:
                    continue
                written = self.seconds
                try:
                    if self.processes.leads:
                        self.checkpoint().write(checkpoint_path)
                except CheckpointError as error:
                    if stopped:
                        raise
                    on_unwritten(error)
        if self.finished:
            self.model.eval()
        return self.finished

    def checkpoint(self) -> Checkpoint:
        """The run as it is now. Its tensors are the live ones: write it before the next step."""
        state = self._optimizer.state

        def averages(kind: str) -> dict[str, Tensor]:
            return {
                name: state[parameter][kind] if parameter in state else torch.zeros_like(parameter)
                for name, parameter in self._parameters.items()
            }

        return Checkpoint(
            recipe=self.recipe,
            sources=self.corpus.sources,
            fingerprint=self.corpus.fingerprint,
            step=self.step,
            seconds=self.seconds,
            losses=torch.tensor(self.losses, dtype=torch.float64),
            weights={name: parameter.detach() for name, parameter in self._parameters.items()},
            mean=averages("exp_avg"),
            square=averages("exp_avg_sq"),
        )

    def _one_step(self, started: float, should_stop: Callable[[], bool]) -> tuple[TrainingStep, bool]:
        """Do a step; also returns whether any process was told to stop."""
        recipe, processes = self.recipe, self.processes
        rate = recipe.rate_at(self.fraction)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        share = recipe.parts // processes.count
        parts = range(processes.rank * share, (processes.rank + 1) * share)
        loss = sum(self._gradients_of(part, share, last=part == parts[-1]) for part in parts)
        seconds = time.perf_counter() - started
        # One message a step: the mean loss, a clock that all share, and whether any was told to stop.
        loss, seconds, stop = processes.mean([loss, seconds, float(should_stop())])
        if not math.isfinite(loss):
            raise self._diverged("loss", loss, self.step + 1)
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), recipe.clip).item()
        if not math.isfinite(norm):
            raise self._diverged("gradients' norm", norm, self.step + 1)
        self._optimizer.step()
        self.step += 1
        self.seconds = seconds
        self.losses.append(loss)
        return TrainingStep(self.step, loss, rate, seconds, self.fraction, recipe.tokens_per_step), stop > 0

    def _expect_numbers(self) -> None:
        """Raise TrainingDiverged where the last step has spoiled the weights, which only the next one's loss would
        show: the weights themselves, and what they make of a window."""
        for name, parameter in self._parameters.items():
            if not torch.isfinite(parameter).all():
                raise self._diverged("weights", f"no numbers ({name})", self.step)
        window = self._windows[self.step * self.recipe.batch][None]
        with writing(self.model):
            logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).item()
        if not math.isfinite(loss):
            raise self._diverged("loss", loss, self.step)

    def _diverged(self, what: str, value: object, step: int) -> TrainingDiverged:
        return TrainingDiverged(
            f"The {what} became {value} in step {step}: a lower learning rate than "
            f"{self.recipe.learning_rate:g} may help."
        )

    def _gradients_of(self, part: int, share: int, *, last: bool) -> float:
        """Add the gradients of one part of the batch; processes exchange them after the last one."""
        recipe = self.recipe
        rows = recipe.batch // recipe.parts
        first = self.step * recipe.batch + part * rows
        windows = torch.stack([self._windows[n] for n in range(first, first + rows)])  # (rows, context + 1)
        torch.manual_seed(_stream(recipe.seed, _DROPOUT, self.step, part))
        exchanged_later = isinstance(self._trained, DistributedDataParallel) and not last
        with self._trained.no_sync() if exchanged_later else nullcontext():
            logits = self._trained(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / share
            loss.backward()
        return loss.item()

    def _take(self, checkpoint: Checkpoint) -> None:
        for kind in ("weights", "mean", "square"):
            shapes = {name: tuple(tensor.shape) for name, tensor in getattr(checkpoint, kind).items()}
            if shapes != {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}:
                raise CheckpointError(f"the checkpoint is damaged: its {kind} do not fit its recipe.")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(checkpoint.weights[name])
        state = self._optimizer.state_dict()
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        name_of = {parameter: name for name, parameter in self._parameters.items()}
        state["state"] = {
            index: {
                "step": torch.tensor(float(checkpoint.step)),
                "exp_avg": checkpoint.mean[name_of[parameter]],
                "exp_avg_sq": checkpoint.square[name_of[parameter]],
            }
            for index, parameter in enumerate(order)
        }
        self._optimizer.load_state_dict(state)
        self.step = checkpoint.step
        self.seconds = checkpoint.seconds
        self.losses = checkpoint.losses.tolist()


class _Windows:
    """An endless sequence of windows of context + 1 bytes; each pass over the text takes every window once.

    A pass cuts the text from another offset on and reads the windows in another order. The n-th window depends on
    the seed and n alone.
    """

    def __init__(self, corpus: Corpus, context: int, seed: int) -> None:
        self.tokens = token_tensor(corpus.training)
        self.context = context
        self.seed = seed
        if len(self.tokens) <= context:
            raise TextError(
                f"{', '.join(corpus.sources)}: {len(self.tokens)} bytes to train on are too few for a context of "
                f"{context}; at least {context + 1} are needed."
            )
        # One window less than would fit from offset 0, so that every pass has as many whatever its offset.
        self.in_a_pass = max(1, (len(self.tokens) - 1) // context - 1)
        self._pass = -1
        self._starts = np.empty(0, dtype=np.int64)

    def __getitem__(self, n: int) -> Tensor:
        """(context + 1,) int64."""
        number, index = divmod(n, self.in_a_pass)
        if number != self._pass:
            self._pass, self._starts = number, self._starts_of(number)
        start = int(self._starts[index])
        return self.tokens[start : start + self.context + 1]

    def _starts_of(self, number: int) -> np.ndarray:
        draw = np.random.Generator(np.random.PCG64(_stream(self.seed, _ORDER, number)))
        room = len(self.tokens) - 1 - self.in_a_pass * self.context  # where the first window may start
        offset = int(draw.integers(room + 1))
        return offset + self.context * draw.permutation(self.in_a_pass)


def _stream(*key: int) -> int:
    """A seed for the random stream that `key` names; neighbouring keys give unrelated streams."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def memory_needed(recipe: Recipe) -> int:
    """Bytes that a run takes at the least: weights, gradients, AdamW's two averages, and one part of a batch.

    Of a part these count: its tokens, the logits with their gradient, and in each block the inputs of its linear
    maps, which the backward pass reads again.
    """
    tokens = recipe.batch // recipe.parts * recipe.context
    kept = recipe.layers * (8 * recipe.d_model + 3 * recipe.d_ff) + 2 * VOCAB_SIZE
    return 4 * 4 * recipe.parameter_count + tokens * (8 + 4 * kept)


def _new_model(recipe: Recipe) -> CausalLM:
    return CausalLM(
        VOCAB_SIZE,
        recipe.d_model,
        recipe.heads,
        recipe.d_ff,
        recipe.layers,
        max_len=recipe.context,
        dropout=recipe.dropout,
        tokenizer="bytes",
    )


def _new_optimizer(parameters: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        fused=True,
    )
