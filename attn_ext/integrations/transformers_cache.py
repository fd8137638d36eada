"""A key/value cache for transformers that appends in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache


def cache(config: Any = None, *, capacity: int = 64) -> Cache:
    """A cache for `generate(..., cache=...)` or a model call, whose full-attention layers append in place.

    Args:
        config: the model's. It tells sliding-window, linear and other special layers, which keep the library's own
            cache layers, and encoder-decoder models, which get a cache for each side. None: all layers are ours.
        capacity: room for so many positions to begin with; it doubles when it is full.

    Returns:
        A new, empty `DynamicCache`, or an `EncoderDecoderCache` of two. Every batch needs its own.

    Raises:
        ValueError: a capacity below 1.
    """
    if getattr(config, "is_encoder_decoder", False):
        return EncoderDecoderCache(_one_cache(config, capacity), _one_cache(config, capacity))
    return _one_cache(config, capacity)


def _one_cache(config: Any, capacity: int) -> DynamicCache:
    ours = functools.partial(PreallocatedLayer, capacity=capacity)
    ours()  # a capacity that cannot be is refused now, not in the first forward pass
    result = DynamicCache(config=config)
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
        if capacity < 1:
            raise ValueError(f"attn_ext: the capacity of a cache must be at least 1, got {capacity}")
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
    writable: (
        bool  # whether the buffer past `length` is ours to write, and no backward pass needs what it holds
    )

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
