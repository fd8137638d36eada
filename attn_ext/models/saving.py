"""One file for a whole model: its weights, and how to build it again.

    save(model, "classifier.safetensors")
    model = load("classifier.safetensors")  # a new process needs nothing else

The file is safetensors, which holds numbers only: reading one runs no code of whoever wrote it. Its metadata
names the model's class and holds its constructor's arguments as JSON. A class takes part by deriving from
`Saveable` and keeping those arguments in `config`. Needs safetensors (in the extra `cli`).
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._files import read_tensors, write_whole
from .errors import WeightsError

__all__ = ["Saveable", "load", "save"]

_FORMAT = "attn_ext model 1"


class Saveable(nn.Module):
    """A module that `save` and `load` know.

        class Tagger(Saveable):
            def __init__(self, d_model: int, *, tags: int = 5) -> None:
                super().__init__()
                self.config = {"d_model": d_model, "tags": tags}

    Attributes:
        config: the constructor's arguments by name, nothing but what JSON holds; `type(self)(**self.config)`
            builds the same model with other weights.
    """

    config: dict[str, Any]
    _classes: ClassVar[dict[str, type[Saveable]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Saveable._classes[_name_of(cls)] = cls  # a notebook's cell that runs again defines the class anew


def _name_of(cls: type) -> str:
    """The class's name in a file. Ours are all in attn_ext.models, whichever of its files they stand in."""
    module = "attn_ext.models" if cls.__module__.startswith("attn_ext.models.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


def save(model: Saveable, path: str | os.PathLike[str]) -> None:
    """Write `model` to `path`; an older file there is replaced in one step, or left whole if this fails.

    dtypes are kept, and weights that several modules share are stored once. The optimizer's state is not part
    of the file.

    Raises:
        TypeError: a model whose class does not derive from `Saveable`, or a config that JSON cannot hold.
        WeightsError: the file cannot be written, or safetensors is not installed.
    """
    if not isinstance(model, Saveable):
        raise TypeError(
            f"save: expected a Saveable such as attn_ext.models.TextClassifier, got {type(model).__name__}"
        )
    try:
        from safetensors.torch import save as to_bytes
    except ModuleNotFoundError as error:
        raise WeightsError(f"Saving a model needs {error.name}: pip install safetensors") from error
    tensors, shared = _tensors_and_sharing(model)
    metadata = {
        "format": _FORMAT,
        "class": _name_of(type(model)),
        "config": json.dumps(model.config),
        "shared": json.dumps(shared),
    }
    try:
        write_whole(path, to_bytes(tensors, metadata))
    except OSError as error:
        raise WeightsError(f"{path} cannot be written: {error.strerror or error}.") from error


def load(path: str | os.PathLike[str]) -> Any:
    """Read a file that `save` wrote: the model, on the CPU, in eval mode, in the dtypes it was saved in.

    The class has to be defined (its module imported) before. torch's random state stays as it is.

    Raises:
        WeightsError: the file is missing, truncated or not from `save`, names an unknown class, or its weights
            do not fit its config.
    """
    metadata, state = _read(Path(path))
    name = metadata["class"]
    if name not in Saveable._classes:
        known = ", ".join(sorted(Saveable._classes))
        raise WeightsError(
            f"{path} holds a {name}, which is not defined here (known: {known}); import its module first."
        )
    try:
        with torch.random.fork_rng(devices=[]):
            model = Saveable._classes[name](**json.loads(metadata["config"]))
        for duplicate, kept in json.loads(metadata["shared"]).items():
            state[duplicate] = state[kept]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} has a config that builds no {name} ({error}).") from error
    for tensor_name, tensor in model.state_dict(keep_vars=True).items():
        if tensor_name in state:
            tensor.data = tensor.data.to(state[tensor_name].dtype)  # load_state_dict would cast the file's
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        reasons = textwrap.shorten(" ".join(str(error).splitlines()[1:]), 200, placeholder=" …")
        raise WeightsError(f"{path} has weights that do not fit its config: {reasons}") from error
    return model.eval()


def _tensors_and_sharing(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict, each tensor once; and for each name of a tensor that has two, the name it is under."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept = first_name.setdefault(id(tensor), name)
        if kept != name:
            shared[name] = kept
        else:  # a clone: a view of another tensor's memory is refused by safetensors
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, shared


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file that `save` wrote; raises WeightsError for any other."""
    metadata, state = read_tensors(path, "model", WeightsError)
    if metadata.get("format") != _FORMAT or not {"class", "config", "shared"} <= metadata.keys():
        raise WeightsError(f"{path} was not written by attn_ext.models.save: its metadata names no model.")
    return metadata, state
