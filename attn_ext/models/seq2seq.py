"""An encoder and a decoder: the Transformer of Vaswani et al. 2017 (arXiv:1706.03762)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import masks
from ..nn import PositionalEncoding, TransformerDecoder, TransformerEncoder
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

    def decode(self, target: Tensor, encoder_output: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """target (B, Lt), encoder_output (B, Ls, d_model), its mask (B, 1, 1, Ls) → logits (B, Lt, vocabulary)."""
        x = self._embedded("target", target, self.target_embedding)
        return self.output(self.decoder(x, encoder_output, None, source_mask))

    def _embedded(self, which: str, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        max_len = self.positions.pe.shape[1]
        if tokens.dim() != 2 or tokens.shape[1] > max_len:
            raise ValueError(
                f"Seq2SeqTransformer: expected {which} tokens (B, at most {max_len}), got {tuple(tokens.shape)}"
            )
        return self.dropout(self.positions(embedding(tokens) * math.sqrt(self.d_model)))
