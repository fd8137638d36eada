"""A decoder-only language model: what GPT and Llama are built like, in small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..kv_cache import BaseCache, SlidingKVCache
from ..nn import RotaryEmbedding, TransformerEncoder
from ..nn.positional import next_positions, table_dtype
from .caches import cache_dtype, expect_caches, expect_positions, given_or_new, new_caches, reserve
from .generation import Decoding, decode, one_each, read_prompt, writing
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
        cache: Sequence[BaseCache] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """tokens (B, L) → logits (B, L, vocab_size): those at i are of token i + 1, from tokens 0 … i.

        With a cache, tokens are those that are new, and what is in the cache comes before them:

            cache = model.new_cache(batch=1)
            logits = model(prompt, cache=cache)  # prompt (1, L)
            logits = model(token, cache=cache)  # token (1, 1)

        Args:
            tokens: integers in [0, vocab_size).
            mask: bool, True = may attend, beside the causal one: (B, 1, 1, L) for padding, or what broadcasts to
                (B, h, L, L).
            key_lengths: (B,) lengths of right-padded sequences.
            positions: where the tokens stand, (L,) or (B, L); 0 … L − 1 where not given. Left-padded batches
                need them, beside a mask.
            need_weights: also return the attention weights (B, h, L, L) of each block.
            cache: one for each block, as `new_cache` makes them; excludes mask, key_lengths, positions and
                need_weights. No sequence may become longer than max_len, except with rotary positions and sliding
                caches, in which no token looks further back than their window.
            cu_seqlens: with a cache, tokens may be packed, (total,), and so are the logits, (total, vocab_size);
                see `MultiHeadAttention`.

        Raises:
            TypeError: caches of another kind, or one for keys and values of another dtype.
            ValueError: tokens that are not (B, L), more than max_len of them, or positions of another shape; options
                that a cache excludes; one cache for two blocks, caches that hold different lengths.
            IndexError: more tokens than the cache may hold.
        """
        hidden = self._hidden(tokens, mask, key_lengths, positions, need_weights, cache, cu_seqlens)
        if need_weights:
            hidden, weights = hidden
            return self.output(hidden), weights
        return self.output(hidden)

    def new_cache(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        kind: str = "contiguous",
        window: int | None = None,
        page_size: int = 16,
        quantized: bool = False,
        dtype: torch.dtype | None = None,
    ) -> list[BaseCache]:
        """Empty caches, one for each block, for `forward` and `generate`.

        Args:
            batch: how many sequences.
            capacity: positions of each sequence that there is room for to begin with; of a sliding cache, its slots.
            kind: "contiguous" (`KVCache`), "paged" (`PagedKVCache`) or "sliding" (`SlidingKVCache`).
            window: how many tokens back a token sees, itself included; for a sliding cache only.
            page_size: tokens in a block of a paged cache.
            quantized: store int8; see `KVCache`.
            dtype: of keys and values; that of the weights where not given, or autocast's where it is on.

        Raises:
            ValueError: another kind, a capacity above max_len, a window where none belongs or none where one does.
            TypeError: sizes that are no integers.
        """
        attention = self.blocks.layers[0].self_attn
        weight = attention.w_k.weight
        caches = new_caches(
            "CausalLM.new_cache",
            len(self.blocks.layers),
            batch,
            capacity,
            kind=kind,
            max_len=self.max_len,
            window=window,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.d_k,
            page_size=page_size,
            quantized=quantized,
            dtype=cache_dtype(weight) if dtype is None else dtype,
            device=weight.device,
        )
        if attention.rotary is not None and kind == "sliding":
            # Its positions are no slots, so compiled code could not know how far the tables have to reach.
            attention.rotary.tables(self.max_len, dtype=table_dtype(caches[0].dtype), device=weight.device)
        return caches

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        eos: int | Sequence[int] | None = None,
        pad: int | None = None,
        seed: int | Sequence[int] | None = None,
        callback: Callable[[Tensor], object] | None = None,
        cache: str | Sequence[BaseCache] | None = None,
    ) -> Tensor:
        """Go on writing: (B, L) → (B, L + n), with n ≤ max_new_tokens.

        All new tokens begin in column L, so prompts of different lengths are padded on the left:

            [[7, 4, 9, 2],      mask [[1, 1, 1, 1],   →   [[7, 4, 9, 2 | 5, 8, eos],
             [0, 0, 6, 3]]            [0, 0, 1, 1]]        [0, 0, 6, 3 | eos, pad, pad]]

        Padding is left out before anything is computed: a row's first token stands at position 0, and what a row
        becomes does not depend on its neighbours (up to rounding). Runs in eval mode and without gradients;
        afterwards the model is as it was. Each call begins with empty caches.

        Args:
            tokens: the prompts, integers in [0, vocab_size).
            max_new_tokens: no row gets more. A row ends earlier by a token of eos; the result is as wide as the
                longest row needs.
            mask: (B, L) bool, True where a token stands, False where padding does, wherever that is.
            temperature: 0 always takes the likeliest token. Otherwise one is drawn from
                softmax(logits / temperature).
            top_k: draw from the top_k likeliest tokens only.
            top_p: draw from the likeliest tokens that together have this probability.
            num_beams: above 1, search for the likeliest text with so many beams a row; temperature is then 0.
            length_penalty: beams are compared by log-probability / tokens ** length_penalty: above 0 favours long
                texts. From −10 to 10.
            eos: a token, or several, that end a row. They are part of it.
            pad: what a row that has ended is filled up with; the first token of eos where not given.
            seed: of the random streams, one a row, so that a row draws the same in any batch. An integer stands for
                all (see `attn_ext.models.generation.row_seed`), a list names one a row; without it torch's generator
                gives one.
            callback: called with the new tokens (B,) as each column is complete, pad where a row has ended. Not with
                beams.
            cache: the kind of cache, "contiguous" or "paged", which beams use where nothing is given. Or empty caches
                of B sequences from `new_cache`, which then keep what was written, without the last token. With
                beams they keep nothing of use.

        Raises:
            TypeError: tokens that are no integers, a mask that is not bool, caches of another kind or dtype.
            ValueError: a row without tokens, a setting that means nothing, caches that are not empty or do not fit the
                model; prompts too long: every token but the last new one is read, so a prompt's tokens +
                max_new_tokens − 1 may be max_len at most (more only with rotary positions and sliding caches).
            IndexError: more tokens than the caches given may hold. Nothing is written then.
            LogitsError: logits from which no token can be chosen: NaN, +inf, or −inf for all tokens of a row.
        """
        who = "CausalLM.generate"
        decoding = Decoding(
            who, self.embedding.num_embeddings, max_new_tokens, temperature, top_k, top_p, num_beams, length_penalty,
            eos, pad, seed, callback,
        )  # fmt: skip
        prompt = read_prompt(who, tokens, mask, self.embedding.num_embeddings)
        needed = [n + max(0, max_new_tokens - 1) for n in prompt.lengths]  # the last new token is not read
        capacity = min(max(needed, default=1), self.max_len)
        caches = given_or_new(
            who, cache, [layer.self_attn for layer in self.blocks.layers], len(needed), num_beams,
            lambda kind: self.new_cache(len(needed), capacity, kind=kind), BaseCache,
        )  # fmt: skip
        if not self._endless(caches) and max(needed, default=0) > self.max_len:
            raise ValueError(
                f"{who}: a prompt of {max(prompt.lengths)} tokens and {max_new_tokens} new ones, of which the last is "
                f"not read, need {max(needed)} positions, and max_len is {self.max_len}"
            )
        if not max_new_tokens or not prompt.lengths:
            return tokens.clone()
        decoding.expect_seeds(len(needed))
        reserve(who, caches, needed, prompt.lengths, num_beams)

        def read(chosen: Tensor, active: Tensor) -> Tensor:
            new, cu_seqlens = one_each(chosen, active, caches[0].batch)
            return self(new, cache=caches, cu_seqlens=cu_seqlens).view(len(active), -1)

        with writing(self):
            first = self._last_logits(prompt.tokens, caches, prompt.cu_seqlens)
            new = decode(first, read, caches, decoding)
        return torch.cat([tokens, new.to(tokens.dtype)], dim=1)

    def _last_logits(self, tokens: Tensor, cache: Sequence[BaseCache], cu_seqlens: Tensor | None) -> Tensor:
        """forward's logits of the last token of each row alone, (B, vocab_size)."""
        hidden = self._hidden(tokens, cache=cache, cu_seqlens=cu_seqlens)
        return self.output(hidden[:, -1] if cu_seqlens is None else hidden[cu_seqlens[1:] - 1])

    def _hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        cache: Sequence[BaseCache] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """forward without the output map."""
        if cache is not None:
            expect_caches("CausalLM", cache, len(self.blocks.layers), BaseCache, tokens, cu_seqlens)
            if not self._endless(cache):
                expect_positions("CausalLM", tokens, cu_seqlens, cache[0], self.max_len)
        elif tokens.dim() != 2 or tokens.shape[1] > self.max_len:
            raise ValueError(
                f"CausalLM: expected tokens (B, at most {self.max_len}), got {tuple(tokens.shape)}"
            )
        x = self.embedding(tokens)
        if self.position_embedding is not None and cache is None:
            x = x + self.position_embedding(self._positions_like(tokens, positions))
            positions = None
        elif self.position_embedding is not None:  # where positions are given as well, the blocks refuse them
            x = x + self.position_embedding(next_positions(cache[0].lengths, tokens, cu_seqlens))
        return self.blocks(
            self.dropout(x),
            mask,
            causal=True,
            key_lengths=key_lengths,
            positions=positions,
            need_weights=need_weights,
            cache=cache,
            cu_seqlens=cu_seqlens,
        )

    def _endless(self, cache: Sequence[BaseCache]) -> bool:
        """Whether sequences may go on past max_len: no distance that forward was trained on is then exceeded."""
        return self.position_embedding is None and all(
            isinstance(c, SlidingKVCache) and c.window <= self.max_len for c in cache
        )

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
