"""An encoder and a decoder: the Transformer of Vaswani et al. 2017 (arXiv:1706.03762)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import masks
from ..kv_cache import DecoderCache
from ..nn import PositionalEncoding, TransformerDecoder, TransformerEncoder
from ..nn.positional import next_positions
from .caches import cache_dtype, expect_caches, expect_positions, given_or_new, new_caches, reserve
from .generation import Decoding, decode, is_token, one_each, read_prompt, writing
from .saving import Saveable

__all__ = ["Seq2SeqTransformer"]


class Seq2SeqTransformer(Saveable):
    """Source tokens and the target tokens so far to logits of the next target token.

    Embeddings times √d_model plus sinusoids; padding (pad_idx) of the source is hidden from both the encoder and
    the decoder, the future of the target from each of its tokens. Padding of the target stands behind its real
    tokens, which therefore never see it: leave it out of the loss (`ignore_index=pad_idx`).

    Args:
        source_vocab_size, target_vocab_size: how many tokens there are on either side.
        d_model, h, d_ff: width, heads, width of the feed-forward nets.
        num_encoder_layers, num_decoder_layers: blocks on either side.
        dropout: as in the blocks, and on the embedded tokens.
        max_len: the longest sequence on either side.
        pad_idx: the token that stands for nothing.
        norm_first, activation: as in `TransformerEncoderBlock`.
        tie_embeddings: whether the output map has the target embedding's weights.

    Attributes:
        config: these arguments by name; `attn_ext.models.save` stores them beside the weights.

    Raises:
        ValueError: sizes that do not fit together, an unknown activation, pad_idx outside of a vocabulary.
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        d_model: int,
        h: int,
        d_ff: int,
        num_encoder_layers: int = 2,
        num_decoder_layers: int = 2,
        *,
        dropout: float = 0.1,
        max_len: int = 512,
        pad_idx: int = 0,
        norm_first: bool = True,
        activation: str = "relu",
        tie_embeddings: bool = True,
    ) -> None:
        super().__init__()
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if not 0 <= pad_idx < min(source_vocab_size, target_vocab_size):
            raise ValueError(
                f"Seq2SeqTransformer: pad_idx must be a token of both vocabularies "
                f"({source_vocab_size} and {target_vocab_size} tokens), got {pad_idx}"
            )
        self.d_model = d_model
        self.pad_idx = pad_idx
        self.source_embedding = nn.Embedding(source_vocab_size, d_model, padding_idx=pad_idx)
        self.target_embedding = nn.Embedding(target_vocab_size, d_model, padding_idx=pad_idx)
        self.positions = PositionalEncoding(d_model, max_len)
        self.dropout = nn.Dropout(dropout)
        layout = {"norm_first": norm_first, "activation": activation}
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, h, d_ff, dropout, **layout)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, h, d_ff, dropout, **layout)
        self.output = nn.Linear(d_model, target_vocab_size, bias=False)
        with torch.no_grad():
            for embedding in (self.source_embedding, self.target_embedding):
                nn.init.normal_(embedding.weight, std=d_model**-0.5)
                embedding.weight[pad_idx].zero_()
        if tie_embeddings:
            self.output.weight = self.target_embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source (B, Ls), target (B, Lt) → logits (B, Lt, target_vocab_size): those at i are of target i + 1.

        Raises:
            ValueError: tokens that are not (B, L), or more than max_len of them.
        """
        return self.decode(target, self.encode(source), masks.from_tokens(source, self.pad_idx))

    def encode(self, source: Tensor) -> Tensor:
        """source (B, Ls), padded with pad_idx → what the decoder attends to, (B, Ls, d_model)."""
        x = self._embedded("source", source, self.source_embedding)
        return self.encoder(x, masks.from_tokens(source, self.pad_idx))

    def decode(
        self,
        target: Tensor,
        encoder_output: Tensor | None,
        source_mask: Tensor | None = None,
        *,
        cache: Sequence[DecoderCache] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """target (B, Lt), encoder_output (B, Ls, d_model), its mask (B, 1, 1, Ls) → logits (B, Lt, vocabulary).

        Args:
            cache: one for each block, as `new_cache` makes them. The target is then what is new of it; the first call
                needs encoder_output and its mask, and later ones get None for both.
            cu_seqlens: with a cache, target may be packed, (total,), and so are the logits.

        Raises:
            TypeError: caches of another kind, or what `TransformerDecoder` refuses.
            ValueError: tokens that are not (B, L), or more than max_len of them; one cache for two blocks, caches that
                hold different lengths; what `TransformerDecoder` refuses.
            IndexError: more tokens than the cache may hold.
        """
        if cache is None:
            x = self._embedded("target", target, self.target_embedding)
        else:
            who = "Seq2SeqTransformer"
            expect_caches(who, cache, len(self.decoder.layers), DecoderCache, target, cu_seqlens)
            expect_positions(who, target, cu_seqlens, cache[0], self.positions.pe.shape[1])
            x = self.target_embedding(target) * math.sqrt(self.d_model)
            x = self.dropout(self.positions(x, next_positions(cache[0].lengths, target, cu_seqlens)))
        return self.output(
            self.decoder(x, encoder_output, None, source_mask, cache=cache, cu_seqlens=cu_seqlens)
        )

    def new_cache(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        kind: str = "contiguous",
        page_size: int = 16,
        quantized: bool = False,
        dtype: torch.dtype | None = None,
    ) -> list[DecoderCache]:
        """Empty caches, one for each block of the decoder, for `decode` and `generate`.

        Args:
            batch: how many sequences.
            capacity: positions of each target that there is room for to begin with.
            kind: "contiguous" or "paged", how targets are kept.
            page_size, quantized, dtype: as in `CausalLM.new_cache`.

        Raises:
            ValueError: another kind, a capacity above max_len.
            TypeError: sizes that are no integers.
        """
        attention = self.decoder.layers[0].masked_self_attn
        weight = attention.w_k.weight
        caches = new_caches(
            "Seq2SeqTransformer.new_cache",
            len(self.decoder.layers),
            batch,
            capacity,
            kind=kind,
            kinds=("contiguous", "paged"),
            max_len=self.positions.pe.shape[1],
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.d_k,
            page_size=page_size,
            quantized=quantized,
            dtype=cache_dtype(weight) if dtype is None else dtype,
            device=weight.device,
        )
        return [DecoderCache(cache) for cache in caches]

    def generate(
        self,
        source: Tensor,
        max_new_tokens: int,
        *,
        bos: int,
        eos: int | Sequence[int] | None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        seed: int | Sequence[int] | None = None,
        callback: Callable[[Tensor], object] | None = None,
        cache: str | Sequence[DecoderCache] | None = None,
    ) -> Tensor:
        """Write a target for each source: (B, Ls) → (B, 1 + n), bos and n ≤ max_new_tokens tokens.

        The source is read once. Runs in eval mode and without gradients; afterwards the model is as it was. Each call
        begins with empty caches.

        Args:
            source: integers in [0, source_vocab_size), padded with pad_idx.
            max_new_tokens: no row gets more; the result is as wide as the longest row needs. The last token is not
                read, so it may be max_len at most.
            bos: the token that every target begins with.
            eos: a token, or several, that end a row, or None. They are part of it; pad_idx follows.
            temperature, top_k, top_p, num_beams, length_penalty, seed, callback, cache: as in `CausalLM.generate`;
                cache from `new_cache` of this class.

        Raises:
            TypeError, ValueError, IndexError, LogitsError: as `CausalLM.generate`.
        """
        who = "Seq2SeqTransformer.generate"
        vocab_size, max_len = self.target_embedding.num_embeddings, self.positions.pe.shape[1]
        decoding = Decoding(
            who, vocab_size, max_new_tokens, temperature, top_k, top_p, num_beams, length_penalty,
            eos, self.pad_idx, seed, callback,
        )  # fmt: skip
        read_prompt(who, source, None, self.source_embedding.num_embeddings, name="source")
        if not is_token(bos, vocab_size):
            raise ValueError(f"{who}: bos must be a token from 0 to {vocab_size - 1}, got {bos!r}")
        start = torch.full((source.shape[0], 1), bos, dtype=torch.int64, device=source.device)
        if max_new_tokens > max_len:
            raise ValueError(
                f"{who}: bos and {max_new_tokens} new tokens, of which the last is not read, need {max_new_tokens} "
                f"positions, and max_len is {max_len}"
            )
        caches = given_or_new(
            who, cache, [layer.masked_self_attn for layer in self.decoder.layers], len(source), num_beams,
            lambda kind: self.new_cache(len(source), max(1, max_new_tokens), kind=kind), DecoderCache,
        )  # fmt: skip
        if not max_new_tokens or not len(source):
            return start
        decoding.expect_seeds(len(source))
        reserve(who, caches, [max_new_tokens] * len(source), [1] * len(source), num_beams)

        def read(chosen: Tensor, active: Tensor) -> Tensor:
            new, cu_seqlens = one_each(chosen, active, caches[0].batch)
            return self.decode(new, None, cache=caches, cu_seqlens=cu_seqlens).view(len(active), -1)

        with writing(self):
            encoded, seen = self.encode(source), masks.from_tokens(source, self.pad_idx)
            new = decode(self.decode(start, encoded, seen, cache=caches)[:, 0], read, caches, decoding)
        return torch.cat([start, new], dim=1)

    def _embedded(self, which: str, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        max_len = self.positions.pe.shape[1]
        if tokens.dim() != 2 or tokens.shape[1] > max_len:
            raise ValueError(
                f"Seq2SeqTransformer: expected {which} tokens (B, at most {max_len}), got {tuple(tokens.shape)}"
            )
        return self.dropout(self.positions(embedding(tokens) * math.sqrt(self.d_model)))
