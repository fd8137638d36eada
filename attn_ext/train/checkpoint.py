"""A training run in one file, from which it goes on as if it had never stopped.

The file is safetensors, which holds numbers only: reading one runs no code. Its metadata holds the recipe and how
far the run is as JSON, and a checksum of each tensor; its tensors are the weights, AdamW's two averages of each, and
the losses so far. Neither a random state nor a position in the text is needed: both follow from the seed and the
step (see `language_model`).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .._files import read_metadata, read_tensors, write_whole
from .recipe import Recipe

__all__ = ["Checkpoint", "CheckpointError"]

_FORMAT = "attn_ext training 2"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, written or used. The message is one sentence that names it."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run is, between two steps.

    Attributes:
        recipe: of the run.
        sources: the files that its text came from.
        fingerprint: of its text (`Corpus.fingerprint`).
        step: how many steps are done.
        seconds: how long they took.
        losses: (step,) float64, the mean loss of each step in nats per byte.
        weights, mean, square: by parameter: the model's weights, and AdamW's averages of the gradient and of its
            square.
    """

    recipe: Recipe
    sources: tuple[str, ...]
    fingerprint: str
    step: int
    seconds: float
    losses: Tensor
    weights: dict[str, Tensor]
    mean: dict[str, Tensor]
    square: dict[str, Tensor]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file in one step: whoever reads it, and whenever, finds the old checkpoint or this one.

        Raises:
            CheckpointError: the file cannot be written, or safetensors is not installed.
        """
        try:
            from safetensors.torch import save as to_bytes
        except ModuleNotFoundError as error:
            raise CheckpointError(
                f"Writing a checkpoint needs {error.name}: pip install safetensors"
            ) from error
        tensors = {"losses": self.losses}
        for kind in ("weights", "mean", "square"):
            tensors |= {f"{kind}/{name}": tensor for name, tensor in getattr(self, kind).items()}
        metadata = {
            "format": _FORMAT,
            "recipe": json.dumps(asdict(self.recipe)),
            "sources": json.dumps(self.sources),
            "fingerprint": self.fingerprint,
            "step": str(self.step),
            "seconds": repr(self.seconds),
            "checksums": json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()}),
        }
        try:
            write_whole(path, to_bytes(tensors, metadata))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read a file that `write` wrote.

        Raises:
            CheckpointError: it is missing, truncated, of another kind, or damaged; or safetensors is not installed.
        """
        metadata, tensors = read_tensors(Path(path), "checkpoint", CheckpointError)
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is no checkpoint of a training run: {_what_it_is(metadata)}.")
        try:
            kinds: dict[str, dict[str, Tensor]] = {"weights": {}, "mean": {}, "square": {}}
            checksums = json.loads(metadata["checksums"])
            for name, tensor in tensors.items():
                if checksums[name] != _checksum(tensor):
                    raise ValueError(f"the checksum of {name} does not fit its numbers")
            losses = tensors.pop("losses")
            for name, tensor in tensors.items():
                kind, _, parameter = name.partition("/")
                kinds[kind][parameter] = tensor
            checkpoint = cls(
                recipe=Recipe(**json.loads(metadata["recipe"])),
                sources=tuple(json.loads(metadata["sources"])),
                fingerprint=metadata["fingerprint"],
                step=int(metadata["step"]),
                seconds=float(metadata["seconds"]),
                losses=losses,
                **kinds,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is a damaged checkpoint ({error}).") from error
        if losses.shape != (checkpoint.step,) or losses.dtype != torch.float64:
            raise CheckpointError(
                f"{path} is a damaged checkpoint: {checkpoint.step} steps, but losses {tuple(losses.shape)}."
            )
        # Counted, not built: a damaged recipe may ask for more memory than there is.
        if sum(tensor.numel() for tensor in checkpoint.weights.values()) != checkpoint.recipe.parameter_count:
            raise CheckpointError(f"{path} is a damaged checkpoint: its weights do not fit its recipe.")
        if not 0 <= checkpoint.seconds < math.inf:
            raise CheckpointError(
                f"{path} is a damaged checkpoint: seconds must be at least 0, got {checkpoint.seconds}."
            )
        if not all(isinstance(source, str) for source in checkpoint.sources):
            raise CheckpointError(f"{path} is a damaged checkpoint: its sources are no names of files.")
        return checkpoint

    @staticmethod
    def expect_at(path: str | os.PathLike[str]) -> None:
        """Raise CheckpointError where `path` is no file that `write` wrote, of this version or another.

        The file may still be damaged: only its metadata is read.
        """
        metadata = read_metadata(Path(path), "checkpoint", CheckpointError)
        if not metadata.get("format", "").startswith(_FORMAT.rstrip("0123456789")):
            raise CheckpointError(f"{path} is no checkpoint of a training run: {_what_it_is(metadata)}.")


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _what_it_is(metadata: dict[str, str]) -> str:
    if "class" in metadata:
        return f"it holds a model, {metadata['class']}"
    return f"its format is {metadata['format']!r}" if "format" in metadata else "its metadata names no run"
