"""Which attention layers of a model of transformers attn_ext computes, and how often each has called."""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

NAME = "attn_ext"  # as in attn_implementation="attn_ext"

_TABLE = "ALL_ATTENTION_FUNCTIONS"  # the name under which every modeling file imports the attention interface

# Calls by attention layer since the process began. Kept here and not on the layers, so that nothing of a model changes.
_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model."""

    name: str  # in the model, as in `model.get_submodule(name)`
    class_name: str
    calls: int  # that came to attn_ext so far; those inside compiled graphs are not counted
    why_not: str | None  # why its attention is not computed by attn_ext; None where it is


@dataclass(frozen=True)
class Reached:
    """Which attention layers of a model attn_ext computes. `print` it."""

    layers: tuple[AttentionLayer, ...]

    @property
    def reached(self) -> tuple[AttentionLayer, ...]:
        """The layers whose calls come to attn_ext."""
        return tuple(layer for layer in self.layers if layer.why_not is None)

    @property
    def unreached(self) -> tuple[AttentionLayer, ...]:
        """The layers that compute attention in another way; `why_not` says why."""
        return tuple(layer for layer in self.layers if layer.why_not is not None)

    @property
    def calls(self) -> int:
        """All calls so far."""
        return sum(layer.calls for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"attn_ext: {len(self.reached)} of {len(self.layers)} attention layers reached, {self.calls} calls"
        ]
        for layer in self.layers:
            fate = f"{layer.calls} calls" if layer.why_not is None else f"not reached: {layer.why_not}"
            lines.append(f"  {layer.name} ({layer.class_name}): {fate}")
        return "\n".join(lines)


def reached(model: nn.Module) -> Reached:
    """Which attention layers of a model attn_ext computes, and how many calls of each it has counted.

    Attention layers are the innermost modules with "Attention" in the name of their class, and whatever has called us.
    A layer is reached where its configuration names "attn_ext" and its class uses the attention interface of
    transformers (or has called us, by whatever way).

    Args:
        model: any model of transformers, or a module that holds some.
    """
    layers = []
    configurations: dict[str, Any] = {}  # of each module's model
    for name, module in model.named_modules():
        own = getattr(module, "config", None)
        inherited = configurations.get(name.rpartition(".")[0]) if name else None
        configurations[name] = config = own if hasattr(own, "_attn_implementation") else inherited
        calls = _calls.get(module, 0)
        if calls or _is_innermost_attention(module):
            implementation = getattr(config, "_attn_implementation", None)
            why_not = None
            if not calls and not _uses_interface(type(module)):
                why_not = "its class computes attention itself, outside the attention interface"
            elif implementation != NAME:
                why_not = f"its configuration says {implementation!r}"
            layers.append(AttentionLayer(name, type(module).__name__, calls, why_not))
    return Reached(tuple(layers))


def count_call(layer: nn.Module) -> None:
    """One more call of this attention layer."""
    _calls[layer] = _calls.get(layer, 0) + 1


_outside: dict[type, bool] = {}  # by configuration class, as found by computes_attention_itself


def computes_attention_itself(config: type) -> bool:
    """Whether the models of a configuration class define attention layers of their own but never use the interface."""
    if config not in _outside:
        package, _, name = config.__module__.rpartition(".")
        code = sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_')}")
        own_layers = code is not None and any(_is_attention_class(value) for value in vars(code).values())
        _outside[config] = own_layers and not hasattr(code, _TABLE)
        if _outside[config]:
            _log.warning(
                "attn_ext: models of %s compute attention outside the attention interface of transformers, "
                "and go on doing so.",
                config.__name__,
            )
    return _outside[config]


def _is_attention_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and "Attention" in value.__name__


def _is_innermost_attention(module: nn.Module) -> bool:
    inside = (inner for inner in module.modules() if inner is not module)
    return _is_attention_class(type(module)) and not any(_is_attention_class(type(inner)) for inner in inside)


def _uses_interface(layer: type) -> bool:
    """Whether a method of the class reads the table of attention functions (decorators looked through)."""
    for base in layer.__mro__:
        for method in vars(base).values():
            while hasattr(method, "__wrapped__"):
                method = method.__wrapped__
            if _TABLE in getattr(getattr(method, "__code__", None), "co_names", ()):
                return True
    return False
