"""attn_ext as an attention implementation of Hugging Face transformers, and a key/value cache that appends in place.

    from attn_ext.integrations import transformers as hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attn_ext")
    model.generate(**inputs, cache=hf.cache(model.config))
    print(hf.reached(model))  # which attention layers ran on attn_ext, and how often

A model of transformers computes attention through a table of functions (`AttentionInterface`) and builds its masks
through another (`AttentionMaskInterface`); `register` puts ours into both. The library hands over key and value heads
unrepeated, and a mask only where plain causal or full attention does not say it all. What else a model passes is
honoured (softcap, sinks, position bias, windows, packed sequences, attention weights), known to change nothing here
(`HARMLESS`), or refused by a TypeError; nothing is ignored silently.

Letters: B batch, Hq and Hkv heads, Lq queries, Lk keys, D and Dv head dims.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

import attn_ext
from attn_ext import masks

MINIMUM = "5.0"  # the oldest transformers this was tried with
_INSTALL = "pip install 'attn_ext[hf]'"

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache
    from transformers.masking_utils import eager_mask, sdpa_mask
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError(
        f"attn_ext.integrations.transformers needs transformers ≥ {MINIMUM}: {_INSTALL}"
    ) from error
except ImportError as error:
    import transformers

    raise ImportError(
        f"attn_ext.integrations.transformers needs transformers ≥ {MINIMUM}, and {transformers.__version__} is "
        f"installed: pip install -U 'transformers>={MINIMUM}'"
    ) from error

NAME = "attn_ext"

__all__ = [
    "HARMLESS",
    "MINIMUM",
    "NAME",
    "AttentionLayer",
    "PreallocatedLayer",
    "Reached",
    "attention_forward",
    "attention_mask",
    "cache",
    "reached",
    "register",
]

_log = logging.getLogger(__name__)


# --- registration -------------------------------------------------------------------------------------------------


@overload
def register() -> None: ...
@overload
def register(model: PreTrainedModel) -> Reached: ...
def register(model: PreTrainedModel | None = None) -> Reached | None:
    """Make `attn_implementation="attn_ext"` known to transformers. Calling it again changes nothing.

    Args:
        model: also switch this model over, as `model.set_attn_implementation("attn_ext")` does. A model that computes
            attention outside the interface (Bloom, GPT-Neo) stays as it is, with a warning of the library's.

    Returns:
        With a model, which of its attention layers were reached (see `reached`).
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    if model is None:
        return None
    model.set_attn_implementation(NAME)
    return reached(model)


# What models pass along that changes nothing about the attention computed here, and why.
HARMLESS = {
    "position_ids": "rotary embeddings are applied already, and packed sequences are in the mask",
    "cache_position": "the mask says which keys a query may see",
    "use_cache": "the cache was updated before attention",
    "cache": "the cache was updated before attention",
    "past_key_values": "the cache was updated before attention",
    "past_key_value": "the cache was updated before attention",
    "output_hidden_states": "what a model returns beside attention",
    "output_router_logits": "what a model returns beside attention",
    "return_dict": "how a model returns it",
    "num_items_in_batch": "how a loss is averaged",
    "max_length_q": "follows from cu_seq_lens_q",
    "max_length_k": "follows from cu_seq_lens_k",
    "deterministic": "always so here",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer that calls.
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        attention_mask: bool, True = attend, or float, added to the scores; broadcasts to (B, Hq, Lq, Lk). It holds all
            that hides keys: causality, padding, windows. None is causal for a causal layer with more than one query,
            else full; with more keys than queries top-left, for then the keys behind are unused slots of a cache.
        dropout: applied where above 0.
        scaling: of the scores; default 1/√D.
        is_causal: for calls without a mask; default `module.is_causal`, or True where the layer has none.
        softcap: caps the scores (Gemma 2).
        s_aux: (Hq,) sink logits (GPT-OSS).
        sliding_window: for calls without a mask: a query sees that many keys up to its own, and in layers that
            are not causal as many behind it.
        position_bias: float, added to the scores; broadcasts to (B, Hq, Lq, Lk) (T5). Has a gradient.
        output_attentions: also return the weights (default: `module.config.output_attentions`).
        cu_seq_lens_q: (sequences + 1,), for several sequences in one row (B = 1): 0, then the running total of their
            lengths. No query sees a key of another sequence.
        cu_seq_lens_k: the same of the keys; default as of the queries.
        seq_idx: (B, L), says the same by the number of each token's sequence.
        kwargs: those in `HARMLESS`, and any that are None.

    Returns:
        out (B, Lq, Hq, Dv), contiguous, and the weights before dropout (B, Hq, Lq, Lk) or None.

    Raises:
        TypeError: any other argument that is not None; its name is in the message.
        ValueError: shapes that do not fit.
    """
    for name, argument in kwargs.items():
        if argument is not None and name not in HARMLESS:
            raise TypeError(
                f"attn_ext: {type(module).__name__} passes {name}=…, which attn_ext does not know and will not ignore; "
                'give this model attn_implementation="sdpa" or "eager"'
            )
    if not torch.compiler.is_compiling():
        _calls[module] = _calls.get(module, 0) + 1

    Lq = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = Lq > 1 and attention_mask is None and is_causal
    window = None
    if sliding_window is not None and attention_mask is None:
        window = (sliding_window - 1, None if is_causal else sliding_window - 1)

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None or seq_idx is not None:
        together = _same_sequence(query, key, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
        attention_mask = together if attention_mask is None else _hide(attention_mask, together)
    if output_attentions is None:
        output_attentions = getattr(getattr(module, "config", None), "output_attentions", False)

    B = max(query.shape[0], key.shape[0])
    if query.shape[0] != key.shape[0]:  # learned queries, the same for every sequence
        query, key, value = (t.expand(B, -1, -1, -1) for t in (query, key, value))
    result = attn_ext.attention(
        query,
        key,
        value,
        mask=attention_mask,
        bias=position_bias,
        causal="top_left" if causal else False,
        window=window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout,
        return_weights=bool(output_attentions),
    )
    out, weights = result if output_attentions else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def attention_mask(**arguments: Any) -> Tensor | None:
    """The mask that transformers builds for `attention_forward`: the one of its own "sdpa" implementation.

    A model that computes attention itself and never calls us would misread it (a bool mask added to scores hides
    nothing). Loaded with `attn_implementation="attn_ext"` such a model gets the mask of "eager", and a warning.

    Args:
        arguments: as `transformers.masking_utils.sdpa_mask` takes them.

    Returns:
        (B, 1, Lq, Lk) bool, True = attend, or None where `is_causal` says it all.
    """
    config = arguments.get("config")
    if config is not None and _is_outside(type(config)):
        return eager_mask(**arguments)
    return sdpa_mask(**arguments)


@functools.cache
def _is_outside(config: type) -> bool:
    """Whether the models of a configuration class define attention layers of their own but never use the interface."""
    package, _, name = config.__module__.rpartition(".")
    code = sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_')}")
    if code is None or not any(_is_attention_class(value) for value in vars(code).values()):
        return False
    outside = not hasattr(code, _TABLE)
    if outside:
        _log.warning(
            "attn_ext: models of %s compute attention outside the attention interface of transformers; "
            "they stay with their own code.",
            config.__name__,
        )
    return outside


def _same_sequence(
    query: Tensor,
    key: Tensor,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor:
    """The mask of packed sequences: True where query and key are of the same one, (B or 1, 1, Lq, Lk)."""
    Lq, Lk = query.shape[2], key.shape[2]
    allowed = []
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        ends_q = cu_seq_lens_k if cu_seq_lens_q is None else cu_seq_lens_q
        ends_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        if query.shape[0] != 1:
            raise ValueError(f"attn_ext: cu_seq_lens_q packs one row, but the batch has {query.shape[0]}")
        segments = (
            torch.bucketize(torch.arange(L, device=ends.device), ends[1:].contiguous(), right=True)[None]
            for L, ends in ((Lq, ends_q), (Lk, ends_k))
        )
        allowed.append(masks.documents(*segments))
    if seq_idx is not None:
        if seq_idx.shape[-1] != Lq or Lq != Lk:
            raise ValueError(
                f"attn_ext: seq_idx {tuple(seq_idx.shape)} must number every one of {Lq} queries and {Lk} keys"
            )
        allowed.append(masks.documents(seq_idx))
    return masks.combine(*allowed)


def _hide(mask: Tensor, visible: Tensor) -> Tensor:
    """The bool or float mask with every key hidden that is not visible."""
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


# --- what was reached ---------------------------------------------------------------------------------------------

_TABLE = "ALL_ATTENTION_FUNCTIONS"  # the name under which every modeling file imports the interface

# Calls by attention layer since the process began. Kept here and not on the layers, so that nothing of a model changes.
_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


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
        lines = [f"attn_ext: {len(self.reached)} of {len(self.layers)} attention layers reached, {self.calls} calls"]
        for layer in self.layers:
            fate = f"{layer.calls} calls" if layer.why_not is None else f"not reached: {layer.why_not}"
            lines.append(f"  {layer.name} ({layer.class_name}): {fate}")
        return "\n".join(lines)


def reached(model: nn.Module) -> Reached:
    """Which attention layers of a model attn_ext computes, and how many calls of each it has counted.

    Attention layers are the innermost modules with "Attention" in the name of their class, and whatever has called us.
    A layer is reached where it has called, or where its class uses the attention interface of transformers and its
    configuration names "attn_ext".

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
            why_not = None if calls else _why_not(module, config)
            layers.append(AttentionLayer(name, type(module).__name__, calls, why_not))
    return Reached(tuple(layers))


def _why_not(layer: nn.Module, config: Any) -> str | None:
    if not _uses_interface(type(layer)):
        return "its class computes attention itself, outside the attention interface"
    implementation = getattr(config, "_attn_implementation", None)
    return None if implementation == NAME else f"its configuration says {implementation!r}"


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


# --- the cache ----------------------------------------------------------------------------------------------------


def cache(config: Any = None, *, capacity: int = 64) -> Cache:
    """A cache for `generate(..., cache=...)` or a model call, whose full-attention layers append in place.

    Args:
        config: the model's. It tells sliding-window, linear and other special layers, which keep the library's own
            cache layers, and encoder-decoder models, which get a cache for each side. None: all layers are ours.
        capacity: room for so many positions to begin with; it doubles when it is full.

    Returns:
        A `DynamicCache`, or an `EncoderDecoderCache` of two. An empty one for every sequence or batch.

    Raises:
        ValueError: a capacity below 1.
    """
    if capacity < 1:
        raise ValueError(f"attn_ext: the capacity of a cache must be at least 1, got {capacity}")
    if getattr(config, "is_encoder_decoder", False):
        return EncoderDecoderCache(_one_cache(config, capacity), _one_cache(config, capacity))
    return _one_cache(config, capacity)


def _one_cache(config: Any, capacity: int) -> DynamicCache:
    result = DynamicCache(config=config)
    ours = functools.partial(PreallocatedLayer, capacity=capacity)
    result.layers = [ours() if type(layer) is DynamicLayer else layer for layer in result.layers]
    if result.layer_class_to_replicate is DynamicLayer:
        result.layer_class_to_replicate = ours
    return result


class PreallocatedLayer(DynamicLayer):
    """A cache layer that writes new keys and values behind the old ones, in place, into a buffer that doubles.

    The library's `DynamicLayer` copies the whole cache for every token; here a token costs its own size (amortised).
    `keys` (B, Hkv, L, D) and `values` (B, Hkv, L, Dv) are views of the buffers, overwritten once positions were
    cropped and written anew. While autograd records, states are concatenated as in the library, for a backward
    pass may still need what it saved.

    Also for `Cache(layer_class_to_replicate=PreallocatedLayer)`.
    """

    def __init__(self, capacity: int = 64, **kwargs: Any) -> None:
        self.capacity = capacity
        self._keys: _GrowingStates | None = None
        self._values: _GrowingStates | None = None
        super().__init__(**kwargs)

    @property
    def keys(self) -> Tensor | None:
        """(B, Hkv, L, D), or None before the first update."""
        return None if self._keys is None else self._keys.states

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._keys = None if states is None else _GrowingStates.of(states, self.capacity)

    @property
    def values(self) -> Tensor | None:
        """(B, Hkv, L, Dv), or None before the first update."""
        return None if self._values is None else self._values.states

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._values = None if states is None else _GrowingStates.of(states, self.capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for states like these."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self._keys = _GrowingStates.like(key_states, self.capacity)
        self._values = _GrowingStates.like(value_states, self.capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append states (B, Hkv, new, D) and (B, Hkv, new, Dv); returns all keys and values so far.

        Raises:
            ValueError: another batch, head count, head dim, dtype or device than the cache holds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._keys.append("keys", key_states), self._values.append("values", value_states)

    def get_seq_length(self) -> int:
        """How many positions are held."""
        return 0 if self._keys is None else self._keys.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions, given as a negative number; their room stays."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of positions to remove as a negative number, got {tokens_to_remove}"
            )
        if self.is_initialized:
            for states in (self._keys, self._values):
                states.length = max(0, states.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b goes on as a copy of sequence beam_idx[b], (B,)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, copies side by side."""
        if self.get_seq_length() > 0:
            every = torch.arange(self._keys.buffer.shape[0], device=self.device)
            self.batch_select_indices(every.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the sequences `indices`, in that order; a bool mask (B,) works as well."""
        if self.get_seq_length() > 0:
            if indices.dtype == torch.bool:
                indices = indices.nonzero().squeeze(1)
            for states in (self._keys, self._values):
                states.select(indices.to(states.buffer.device))


@dataclass
class _GrowingStates:
    """(B, H, length, D) states at the front of a buffer (B, H, room, D)."""

    buffer: Tensor
    length: int
    least: int  # room of the smallest buffer
    writable: bool  # whether the buffer past `length` is ours to write, and no backward pass needs what it holds

    @classmethod
    def like(cls, states: Tensor, least: int) -> _GrowingStates:
        """Empty, for states of this shape (but for their number), dtype and device."""
        B, H, _, D = states.shape
        return cls(states.new_empty((B, H, least, D)), 0, least, True)

    @classmethod
    def of(cls, states: Tensor, least: int) -> _GrowingStates:
        """Holding a tensor of somebody else's, which is never written to."""
        return cls(states, states.shape[-2], least, False)

    @property
    def states(self) -> Tensor:
        return self.buffer.narrow(2, 0, self.length)

    def append(self, name: str, new: Tensor) -> Tensor:
        self._require_like(name, new)
        end = self.length + new.shape[2]
        if torch.is_grad_enabled():
            self.buffer, self.writable = torch.cat((self.states, new), dim=2), False
        else:
            # A buffer made in inference mode cannot be written outside it.
            frozen = self.buffer.is_inference() and not torch.is_inference_mode_enabled()
            if end > self.buffer.shape[2] or not self.writable or frozen:
                self._move(end)
            self.buffer.narrow(2, self.length, new.shape[2]).copy_(new)
        self.length = end
        return self.states

    def select(self, indices: Tensor) -> None:
        chosen = self.states.index_select(0, indices)
        if torch.is_grad_enabled():
            self.buffer, self.writable = chosen, False
            return
        room = self.buffer.shape[2]
        self.buffer, self.writable = chosen.new_empty((*chosen.shape[:2], room, chosen.shape[3])), True
        self.states.copy_(chosen)

    def _move(self, needed: int) -> None:
        """Into a new buffer that holds `needed` positions."""
        room = max(self.buffer.shape[2], self.least)
        while room < needed:
            room *= 2
        B, H, _, D = self.buffer.shape
        old = self.states
        self.buffer, self.writable = self.buffer.new_empty((B, H, room, D)), True
        self.states.copy_(old)

    def _require_like(self, name: str, new: Tensor) -> None:
        held = self.buffer
        sizes = lambda t: (*t.shape[:2], *t.shape[3:], t.dtype, t.device)  # noqa: E731
        if new.dim() != 4 or sizes(new) != sizes(held):
            B, H, _, D = held.shape
            raise ValueError(
                f"attn_ext: the cache holds {name} ({B}, {H}, L, {D}) {held.dtype} on {held.device}, "
                f"got {tuple(new.shape)} {new.dtype} on {new.device}"
            )
