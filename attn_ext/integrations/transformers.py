"""attn_ext as an attention implementation of Hugging Face transformers, and a key/value cache that appends in place.

    from attn_ext.integrations import transformers as hf

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attn_ext")
    model.generate(**inputs, cache=hf.cache(model.config))  # before transformers 5.24: past_key_values=
    print(hf.reached(model))  # which attention layers ran on attn_ext, and how often

A model of transformers computes attention through a table of functions (`AttentionInterface`) and builds its masks
through another (`AttentionMaskInterface`); `register` puts ours into both. The library hands over key and value heads
unrepeated, and a mask only where plain causal or full attention does not say it all. What else a model passes is
honoured (softcap, sinks, position bias, windows, packed sequences, attention weights), known to change nothing here
(`HARMLESS`), or refused by a TypeError; nothing is ignored silently.

Letters: B batch, Hq and Hkv heads, Lq queries, Lk keys, D and Dv head dims.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor, nn

from attn_ext.integrations import _require_transformers  # noqa: F401  isort: skip  (first)
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils.output_capturing import _active_collector

import attn_ext
from attn_ext import masks
from attn_ext.integrations.transformers_cache import PreallocatedLayer, cache
from attn_ext.integrations.transformers_layers import (
    NAME,
    AttentionLayer,
    Reached,
    computes_attention_itself,
    count_call,
    reached,
)

__all__ = [
    "HARMLESS",
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
        output_attentions: also return the weights; so is done where the library says that it collects them.
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
        count_call(module)

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
    output_attentions = bool(output_attentions) or _weights_are_collected()

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
        return_weights=output_attentions,
    )
    out, weights = result if output_attentions else (result, None)
    return out.transpose(1, 2).contiguous(), weights


def _weights_are_collected() -> bool:
    """Whether the forward pass under way was asked for attention weights.

    Not every model passes `output_attentions` down to its layers (GPT-2 does not): the library picks the weights up by
    hooks, and notes in a context variable what it wants.
    """
    collected = _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


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
    if config is not None and computes_attention_itself(type(config)):
        return eager_mask(**arguments)
    return sdpa_mask(**arguments)


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
