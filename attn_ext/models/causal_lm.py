"""A decoder-only language model: what GPT and Llama are built like, in small."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..nn import RotaryEmbedding, TransformerEncoder
from .saving import Saveable

__all__ = ["CausalLM"]

_POSITIONS = ("rotary", "learned")


class CausalLM(Saveable):
    """Token ids to logits of the next token: embedding, pre-norm blocks with causal attention, norm, linear map.

    With activation="swiglu", norm="rms" and bias=False it has the layout of Llama (arXiv:2302.13971), with
    positions="learned", activation="gelu_tanh" and tie_embeddings=True that of GPT-2. Weights start as GPT-2's do:
    normal with deviation 0.02, those that write into the residual stream divided by √(2 · num_layers).

    Args:
        vocab_size: how many tokens there are.
        d_model, h, d_ff, num_layers: width, heads, width of the feed-forward nets, blocks.
        max_len: the longest sequence that forward takes.
        num_kv_heads: number of key/value heads; h where not given.
        dropout: probability of dropping an attention weight, an embedded feature, or an element that a block adds.
        activation, norm, norm_eps, bias: as in `TransformerEncoderBlock`.
        positions: "rotary" turns queries and keys, "learned" adds an embedding of the position.
        rotary_base: as in `RotaryEmbedding`.
        tie_embeddings: whether the output map has the embedding's weights.
        tokenizer: what the tokens are of a text, kept in `config` for whoever reads the file: "bytes" where they
            are its UTF-8 bytes; None does not say.

    Attributes:
        config: these arguments by name; `attn_ext.models.save` stores them beside the weights.

    Raises:
        ValueError: sizes that do not fit together, unknown names.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        h: int,
        d_ff: int,
        num_layers: int,
        *,
        max_len: int = 1024,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        activation: str = "swiglu",
        norm: str = "rms",
        norm_eps: float = 1e-5,
        bias: bool = False,
        positions: str = "rotary",
        rotary_base: float = 10000.0,
        tie_embeddings: bool = True,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if positions not in _POSITIONS:
            raise ValueError(f"CausalLM: positions must be one of {', '.join(_POSITIONS)}, got {positions!r}")
        if vocab_size < 1 or max_len < 1:
            raise ValueError(
                f"CausalLM: vocab_size and max_len must be at least 1, got {vocab_size} and {max_len}"
            )
        if tokenizer not in (None, "bytes") or (tokenizer == "bytes" and vocab_size < 256):
            raise ValueError(
                'CausalLM: tokenizer must be None, or "bytes" with a vocab_size of at least 256, '
                f"got {tokenizer!r} with {vocab_size}"
            )
        if h < 1 or d_model % h:
            raise ValueError(f"CausalLM: d_model = {d_model} cannot be split into h = {h} equal heads")
        self.max_len = max_len
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(max_len, d_model) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = TransformerEncoder(
            num_layers,
            d_model,
            h,
            d_ff,
            dropout,
            norm_first=True,
            activation=activation,
            norm=norm,
            norm_eps=norm_eps,
            bias=bias,
            num_kv_heads=num_kv_heads,
            rotary=RotaryEmbedding(d_model // h, rotary_base) if positions == "rotary" else None,
        )
        self.output = nn.Linear(d_model, vocab_size, bias=False)
        self._initialise(num_layers)
        if tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """tokens (B, L) → logits (B, L, vocab_size): those at i are of token i + 1, from tokens 0 … i.

        Args:
            tokens: integers in [0, vocab_size).
            mask: bool, True = may attend, beside the causal one: (B, 1, 1, L) for padding, or what broadcasts to
                (B, h, L, L).
            key_lengths: (B,) lengths of right-padded sequences.
            positions: where the tokens stand, (L,) or (B, L); 0 … L − 1 where not given. Left-padded batches
                need them, beside a mask.
            need_weights: also return the attention weights (B, h, L, L) of each block.

        Raises:
            ValueError: tokens that are not (B, L), more than max_len of them, or positions of another shape.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.max_len:
            raise ValueError(
                f"CausalLM: expected tokens (B, at most {self.max_len}), got {tuple(tokens.shape)}"
            )
        x = self.embedding(tokens)
        options = {}
        if self.position_embedding is not None:
            x = x + self.position_embedding(self._positions_like(tokens, positions))
        else:
            options["positions"] = positions
        hidden = self.blocks(
            self.dropout(x), mask, causal=True, key_lengths=key_lengths, need_weights=need_weights, **options
        )
        if need_weights:
            hidden, weights = hidden
            return self.output(hidden), weights
        return self.output(hidden)

    def _positions_like(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        batch, length = tokens.shape
        if positions is None:
            return torch.arange(length, device=tokens.device)
        if tuple(positions.shape) not in ((length,), (batch, length)):
            raise ValueError(
                f"CausalLM: expected positions ({length},) or ({batch}, {length}), got {tuple(positions.shape)}"
            )
        return positions

    @torch.no_grad()
    def _initialise(self, num_layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks.layers:
            last = block.ffn[2] if isinstance(block.ffn, nn.Sequential) else block.ffn.w_down
            for linear in (block.self_attn.w_o, last):
                linear.weight /= math.sqrt(2 * num_layers)
