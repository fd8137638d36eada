"""Tiny random models of transformers, one of every kind of attention, with inputs for them.

Weights are larger than the library's own initialisation, so that attention is far from uniform and whatever is lost
on the way (a mask, a cap, a sink) shows in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

VOCABULARY, LENGTH, WINDOW = 61, 11, 4
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]

Batch = dict[str, Any]


def llama() -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER, **SPECIAL))


def qwen3() -> tf.PreTrainedModel:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**DECODER, **SPECIAL, head_dim=8, **window))


def mistral() -> tf.PreTrainedModel:
    return tf.MistralForCausalLM(tf.MistralConfig(**DECODER, **SPECIAL, sliding_window=WINDOW))


def gemma2() -> tf.PreTrainedModel:
    window = {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 6}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**DECODER, **SPECIAL, head_dim=8, **window, **caps))


def gpt2() -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **SPECIAL, scale_attn_by_inverse_layer_idx=True))


def gpt_oss() -> tf.PreTrainedModel:
    window = {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(**DECODER, **SPECIAL, head_dim=8, **window, **experts, **rotary)
    )


def bert() -> tf.PreTrainedModel:
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES, intermediate_size=48, pad_token_id=0))


def vit() -> tf.PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, image_size=12, patch_size=4, num_labels=5))


def t5() -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    start = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, **start))


def bart() -> tf.PreTrainedModel:
    return tf.BartForConditionalGeneration(
        tf.BartConfig(**_two_sided(), **SPECIAL, decoder_start_token_id=1, forced_eos_token_id=None)
    )


def whisper() -> tf.PreTrainedModel:
    sound = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64}
    start = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_two_sided(), **sound, **SPECIAL, **start))


def _two_sided() -> dict[str, int]:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return {**sizes, **heads, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}


def bloom() -> tf.PreTrainedModel:
    return tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL)
    )


def gpt_neo() -> tf.PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}
    return tf.GPTNeoForCausalLM(tf.GPTNeoConfig(**sizes, **kinds, **SPECIAL, max_position_embeddings=64))


@dataclass(frozen=True)
class Kind:
    """How to build a model, how many attention layers it has, and which inputs it takes."""

    build: Callable[[], tf.PreTrainedModel]
    layers: int
    inputs: str = "tokens"  # or "image", "two texts", "sound and text"

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def padded(self) -> bool:
        return self.inputs != "image"


KINDS = {
    kind.name: kind
    for kind in (
        Kind(llama, 2),
        Kind(qwen3, 2),
        Kind(mistral, 2),
        Kind(gemma2, 2),
        Kind(gpt2, 2),
        Kind(gpt_oss, 2),
        Kind(bert, 2),
        Kind(vit, 2, "image"),
        Kind(t5, 6, "two texts"),
        Kind(bart, 6, "two texts"),
        Kind(whisper, 6, "sound and text"),
    )
}


def make(build: Callable[[], tf.PreTrainedModel], implementation: str = "eager") -> tf.PreTrainedModel:
    """The model with its own random weights (the same in every call), in evaluation mode."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.dim() > 1 else 0.05)
    model.set_attn_implementation(implementation)
    return model.eval()


def batch_of(kind: Kind, padding: str | None) -> Batch:
    """Two sequences (or images); with padding "left" or "right" the second is shorter."""
    generator = torch.Generator().manual_seed(1)
    tokens, mask = _tokens(generator, LENGTH, padding)
    if kind.inputs == "tokens":
        return {"input_ids": tokens, "attention_mask": mask}
    if kind.inputs == "image":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    target, target_mask = _tokens(generator, LENGTH - 2, padding)
    decoder = {"decoder_input_ids": target, "decoder_attention_mask": target_mask}
    if kind.inputs == "sound and text":
        return {"input_features": torch.randn(2, 8, 20, generator=generator), **decoder}
    return {"input_ids": tokens, "attention_mask": mask, **decoder}


def _tokens(generator: torch.Generator, length: int, padding: str | None) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(tokens)
    if padding is not None:
        mask[1, slice(0, 3) if padding == "left" else slice(-3, None)] = 0
    return tokens * mask, mask


def real(batch: Batch, logits: Tensor) -> Tensor:
    """The logits at positions that hold a token: (positions, features)."""
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return logits if mask is None else logits[mask.bool()]


def logits_and_gradients(model: tf.PreTrainedModel, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Real logits, and the gradient of every parameter of a fixed random sum of them."""
    model.zero_grad()
    logits = real(batch, model(**batch).logits)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).mean().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return logits.detach(), gradients
