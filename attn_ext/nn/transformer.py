"""Transformer blocks and stacks of them: attention and a feed-forward net, each with a residual and a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_ext._arguments import compiling
from attn_ext.kv_cache import BaseCache, DecoderCache
from attn_ext.nn.attention import MultiHeadAttention, attends
from attn_ext.nn.feed_forward import feed_forward
from attn_ext.nn.positional import RotaryEmbedding

__all__ = [
    "TransformerDecoder",
    "TransformerDecoderBlock",
    "TransformerEncoder",
    "TransformerEncoderBlock",
]


class TransformerEncoderBlock(nn.Module):
    """Self-attention, then a feed-forward net on each token. With `causal=True` it is the block of GPT and Llama.

        norm_first=False (BERT, the original)          norm_first=True (GPT-2, Llama, ViT)
        x = norm1(x + dropout(self_attn(x)))           x = x + dropout(self_attn(norm1(x)))
        x = norm2(x + dropout(ffn(x)))                 x = x + dropout(ffn(norm2(x)))

    Args:
        d_model: width of the tokens.
        h: number of heads.
        d_ff: width inside the feed-forward net.
        dropout: probability of dropping an attention weight, and an element of what either part adds to x.
        norm_first: where the norms stand, see above.
        activation: "relu", "gelu" (exact), "gelu_tanh" (its tanh approximation), "silu", or the gated "swiglu"
            and "geglu"; see `feed_forward`.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        norm_eps: added to the variance in the norms; BERT's weights want 1e-12.
        bias: whether linear maps and norms have a bias.
        num_kv_heads: number of key/value heads; h where not given.
        rotary: turns queries and keys by their positions.
        ffn_dropout: probability of dropping a feature inside the feed-forward net.
        device, dtype: where and as what the parameters are made.

    Attributes:
        self_attn: MultiHeadAttention with w_q, w_k, w_v, w_o.
        ffn: Sequential of Linear(d_model, d_ff), the activation, Linear(d_ff, d_model); or a GatedFeedForward.
        norm1, norm2: the norms.

    Raises:
        ValueError: sizes that do not fit together, an unknown activation or norm.
    """

    def __init__(
        self,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        activation: str = "relu",
        norm: str = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None,
        ffn_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.norm_first = norm_first
        self.self_attn = MultiHeadAttention(
            d_model, h, dropout, num_kv_heads=num_kv_heads, bias=bias, rotary=rotary, **made
        )
        self.ffn = feed_forward(d_model, d_ff, activation, dropout=ffn_dropout, bias=bias, **made)
        self.norm1 = make_norm(norm, d_model, norm_eps, bias=bias, **made)
        self.norm2 = make_norm(norm, d_model, norm_eps, bias=bias, **made)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        cache: BaseCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (B, L, d_model) → (B, L, d_model), and the weights (B, h, L, L) as well with `need_weights`.

        Args:
            x: the tokens.
            mask, causal, key_lengths, bias, positions: which keys a token may attend to and where tokens
                stand, as in `MultiHeadAttention`.
            need_weights: also return the attention weights before dropout.
            cache: keys and values of earlier tokens; x then holds the new ones. See `MultiHeadAttention`.
            cu_seqlens: with a cache, x may be packed, (total, d_model).

        Raises:
            TypeError: an integer mask (use mask.bool()).
            ValueError: shapes that do not fit together; options that a cache excludes.
            IndexError: more tokens than the cache may hold.
        """
        inner = self.norm1(x) if self.norm_first else x
        attended, weights = self.self_attn(
            inner,
            inner,
            inner,
            mask,
            causal=causal,
            key_lengths=key_lengths,
            bias=bias,
            positions=positions,
            need_weights=need_weights,
            cache=cache,
            cu_seqlens=cu_seqlens,
        )
        if self.norm_first:
            x = x + self.dropout(attended)
            x = x + self.dropout(self.ffn(self.norm2(x)))
        else:
            x = self.norm1(x + self.dropout(attended))
            x = self.norm2(x + self.dropout(self.ffn(x)))
        return (x, weights) if need_weights else x


class TransformerDecoderBlock(nn.Module):
    """Masked self-attention, attention to an encoder's output, a feed-forward net.

        norm_first=False (the original)                      norm_first=True
        x = norm1(x + dropout(masked_self_attn(x)))          x = x + dropout(masked_self_attn(norm1(x)))
        x = norm2(x + dropout(cross_attn(x, encoder)))       x = x + dropout(cross_attn(norm2(x), encoder))
        x = norm3(x + dropout(ffn(x)))                       x = x + dropout(ffn(norm3(x)))

    Args:
        d_model, h, d_ff, dropout, norm_first, activation, norm, norm_eps, bias, num_kv_heads, ffn_dropout,
            device, dtype: as in `TransformerEncoderBlock`.
        causal: whether a token sees only itself and those before it. With False it sees all that the
            `causal_mask` given to forward leaves, as in torch's layer.
        rotary: turns queries and keys of the self-attention by their positions.

    Attributes:
        masked_self_attn, cross_attn: MultiHeadAttention.
        ffn: as in `TransformerEncoderBlock`.
        norm1, norm2, norm3: the norms.

    Raises:
        ValueError: sizes that do not fit together, an unknown activation or norm.
    """

    def __init__(
        self,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        causal: bool = True,
        norm_first: bool = False,
        activation: str = "relu",
        norm: str = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None,
        ffn_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.causal = causal
        self.norm_first = norm_first
        self.masked_self_attn = MultiHeadAttention(
            d_model, h, dropout, num_kv_heads=num_kv_heads, bias=bias, rotary=rotary, **made
        )
        self.cross_attn = MultiHeadAttention(
            d_model, h, dropout, num_kv_heads=num_kv_heads, bias=bias, **made
        )
        self.ffn = feed_forward(d_model, d_ff, activation, dropout=ffn_dropout, bias=bias, **made)
        self.norm1 = make_norm(norm, d_model, norm_eps, bias=bias, **made)
        self.norm2 = make_norm(norm, d_model, norm_eps, bias=bias, **made)
        self.norm3 = make_norm(norm, d_model, norm_eps, bias=bias, **made)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        encoder_output: Tensor | None,
        causal_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        encoder_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        cache: DecoderCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """x (B, L, d_model) → (B, L, d_model), with `need_weights` also both attentions' weights.

        With a cache, x holds the new tokens. The first call stores the keys and values of the encoder's output, and
        later ones get None in its place:

            cache = attn_ext.DecoderCache(attn_ext.KVCache(batch=1, num_kv_heads=4, head_dim=16))
            y = block(start, encoder_output, encoder_lengths=lengths, cache=cache)
            y = block(token, None, cache=cache)

        Args:
            x: the tokens written so far.
            encoder_output: (B, Lsource, d_model).
            causal_mask: mask of the self-attention, in any form that `MultiHeadAttention` takes; beside what
                `causal` hides.
            padding_mask: mask of the attention to the encoder's output, such as the (B, 1, 1, Lsource) of
                `masks.padding`.
            key_lengths: (B,) lengths of the sequences in x.
            encoder_lengths: (B,) lengths of the sequences in encoder_output.
            positions: where the tokens of x stand, for `rotary`.
            need_weights: also return the weights before dropout, (B, h, L, L) and (B, h, L, Lsource).
            cache: see above, and `MultiHeadAttention`. Keys of the source that are hidden are not stored, so a
                padding_mask must be bool and the same for all queries and heads: (B, 1, 1, Lsource); it may have
                holes.
            cu_seqlens: with a cache, x may be packed, (total, d_model).

        Raises:
            TypeError: an integer mask (use mask.bool()); a cache that is no `DecoderCache`.
            ValueError: shapes that do not fit together; options that a cache excludes; no encoder_output in the
                first call with a cache, or another one later.
            IndexError: more tokens than the cache may hold.
        """
        cross = (
            None
            if cache is None
            else self._stored_source(cache, encoder_output, padding_mask, encoder_lengths)
        )
        inner = self.norm1(x) if self.norm_first else x
        attended, self_weights = self.masked_self_attn(
            inner,
            inner,
            inner,
            causal_mask,
            causal=self.causal,
            key_lengths=key_lengths,
            positions=positions,
            need_weights=need_weights,
            cache=None if cache is None else cache.target,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None:
            cache.source = cross
        x = x + self.dropout(attended)
        x = x if self.norm_first else self.norm1(x)
        inner = self.norm2(x) if self.norm_first else x
        if cache is not None:
            attended, cross_weights = self.cross_attn(inner, None, None, cache=cross, cu_seqlens=cu_seqlens)
        else:
            attended, cross_weights = self.cross_attn(
                inner,
                encoder_output,
                encoder_output,
                padding_mask,
                key_lengths=encoder_lengths,
                need_weights=need_weights,
            )
        x = x + self.dropout(attended)
        if self.norm_first:
            x = x + self.dropout(self.ffn(self.norm3(x)))
        else:
            x = self.norm2(x)
            x = self.norm3(x + self.dropout(self.ffn(x)))
        return (x, self_weights, cross_weights) if need_weights else x

    def _stored_source(
        self,
        cache: DecoderCache,
        encoder_output: Tensor | None,
        padding_mask: Tensor | None,
        encoder_lengths: Tensor | None,
    ) -> BaseCache:
        """Keys and values of the source: those in the cache, or in the first call new ones, which are not put there
        yet, so that a call that is refused changes nothing."""
        if not isinstance(cache, DecoderCache):
            raise TypeError(
                f"TransformerDecoderBlock: cache must be a DecoderCache, got {type(cache).__name__}"
            )
        if cache.source is not None:
            if encoder_output is not None or padding_mask is not None or encoder_lengths is not None:
                raise ValueError(
                    "TransformerDecoderBlock: the cache holds the encoder's keys and values already; give None for "
                    "encoder_output and no mask or lengths of it, or call reset() on the cache"
                )
            return cache.source
        if encoder_output is None:
            raise ValueError(
                "TransformerDecoderBlock: a first call with a cache needs encoder_output, to store its keys and values"
            )
        if not isinstance(encoder_output, Tensor):
            raise TypeError(
                f"TransformerDecoderBlock: encoder_output must be a tensor, got {type(encoder_output).__name__}"
            )
        batch, width = cache.batch, self.cross_attn.kdim
        if encoder_output.dim() != 3 or encoder_output.shape[0] != batch or encoder_output.shape[2] != width:
            raise ValueError(
                f"TransformerDecoderBlock: expected encoder_output ({batch}, Lsource, {width}) for a cache of {batch} "
                f"sequences, got {tuple(encoder_output.shape)}"
            )
        seen = _seen_keys(encoder_output, padding_mask, encoder_lengths)
        source = cache.for_source(encoder_output.shape[1])
        if seen is None:
            self.cross_attn.store(encoder_output, encoder_output, source)
        else:
            counts = seen.sum(dim=1)
            kept = encoder_output[seen]  # (total, d_model)
            self.cross_attn.store(kept, kept, source, cu_seqlens=F.pad(counts.cumsum(0), (1, 0)))
        return source


class TransformerEncoder(nn.Module):
    """A stack of `TransformerEncoderBlock`s.

    Args:
        num_layers: how many blocks.
        d_model, h, d_ff, dropout, norm_first, activation, norm, norm_eps, bias, num_kv_heads, rotary,
            ffn_dropout, device, dtype: as in the block, the same for all.
        final_norm: whether a norm follows the last block; where not given, with norm_first.

    Attributes:
        layers: ModuleList of the blocks.
        norm: the norm behind the last block, or Identity.

    Raises:
        ValueError: num_layers below 1, or what a block refuses.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        norm_first: bool = False,
        activation: str = "relu",
        norm: str = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None,
        ffn_dropout: float = 0.0,
        final_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"TransformerEncoder: num_layers must be at least 1, got {num_layers}")
        made = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(
            TransformerEncoderBlock(
                d_model,
                h,
                d_ff,
                dropout,
                norm_first=norm_first,
                activation=activation,
                norm=norm,
                norm_eps=norm_eps,
                bias=bias,
                num_kv_heads=num_kv_heads,
                rotary=rotary,
                ffn_dropout=ffn_dropout,
                **made,
            )
            for _ in range(num_layers)
        )
        final_norm = norm_first if final_norm is None else final_norm
        self.norm = make_norm(norm, d_model, norm_eps, bias=bias, **made) if final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        cache: Sequence[BaseCache] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """x (B, L, d_model) → (B, L, d_model), and a list of weights (B, h, L, L) with `need_weights`.

        Args:
            x: the tokens.
            mask, causal, key_lengths, bias, positions: as in `TransformerEncoderBlock`, the same for every
                block.
            need_weights: also return the attention weights before dropout.
            cache, cu_seqlens: as in `TransformerEncoderBlock`; one cache for each block, in order. Where a later
                block's cache refuses what an earlier one took, the earlier ones have stored it: `truncate` them.

        Raises:
            TypeError: an integer mask (use mask.bool()); caches of another kind.
            ValueError: shapes that do not fit together; options that a cache excludes; not one cache a block.
            IndexError: more tokens than a cache may hold.
        """
        options = {
            "causal": causal, "key_lengths": key_lengths, "bias": bias, "positions": positions,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        caches = one_a_layer("TransformerEncoder", cache, len(self.layers), BaseCache)
        if not need_weights:
            for layer, layer_cache in zip(self.layers, caches, strict=True):
                x = layer(x, mask, **options, cache=layer_cache)
            return self.norm(x)
        weights = []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x, layer_weights = layer(x, mask, **options, cache=layer_cache, need_weights=True)
            weights.append(layer_weights)
        return self.norm(x), weights


class TransformerDecoder(nn.Module):
    """A stack of `TransformerDecoderBlock`s.

    Args:
        num_layers: how many blocks.
        d_model, h, d_ff, dropout, causal, norm_first, activation, norm, norm_eps, bias, num_kv_heads, rotary,
            ffn_dropout, device, dtype: as in the block, the same for all.
        final_norm: whether a norm follows the last block; where not given, with norm_first.

    Attributes:
        layers: ModuleList of the blocks.
        norm: the norm behind the last block, or Identity.

    Raises:
        ValueError: num_layers below 1, or what a block refuses.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        h: int,
        d_ff: int,
        dropout: float = 0.1,
        *,
        causal: bool = True,
        norm_first: bool = False,
        activation: str = "relu",
        norm: str = "layer",
        norm_eps: float = 1e-5,
        bias: bool = True,
        num_kv_heads: int | None = None,
        rotary: RotaryEmbedding | None = None,
        ffn_dropout: float = 0.0,
        final_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"TransformerDecoder: num_layers must be at least 1, got {num_layers}")
        made = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(
            TransformerDecoderBlock(
                d_model,
                h,
                d_ff,
                dropout,
                causal=causal,
                norm_first=norm_first,
                activation=activation,
                norm=norm,
                norm_eps=norm_eps,
                bias=bias,
                num_kv_heads=num_kv_heads,
                rotary=rotary,
                ffn_dropout=ffn_dropout,
                **made,
            )
            for _ in range(num_layers)
        )
        final_norm = norm_first if final_norm is None else final_norm
        self.norm = make_norm(norm, d_model, norm_eps, bias=bias, **made) if final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        encoder_output: Tensor | None,
        causal_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        encoder_lengths: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        cache: Sequence[DecoderCache] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """x (B, L, d_model) → (B, L, d_model), and a list of (self, cross) weights with `need_weights`.

        Args:
            x, encoder_output, causal_mask, padding_mask, key_lengths, encoder_lengths, positions: as in
                `TransformerDecoderBlock`, the same for every block.
            need_weights: also return both attentions' weights of every block, before dropout.
            cache, cu_seqlens: as in `TransformerDecoderBlock`; one cache for each block, in order. Where a later
                block's cache refuses what an earlier one took, the earlier ones have stored the target: `truncate`
                them. They hold no source that they did not hold before.

        Raises:
            TypeError: an integer mask (use mask.bool()); caches of another kind.
            ValueError: shapes that do not fit together; options that a cache excludes; not one cache a block.
            IndexError: more tokens than a cache may hold.
        """
        options = {
            "key_lengths": key_lengths, "encoder_lengths": encoder_lengths, "positions": positions,
            "need_weights": need_weights, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        caches = one_a_layer("TransformerDecoder", cache, len(self.layers), DecoderCache)
        arguments = (x, encoder_output, causal_mask, padding_mask)
        if cache is None or compiling():  # which follows no exception
            return self._through_layers(caches, *arguments, **options)
        without_source = [c for c in caches if c.source is None]
        try:
            return self._through_layers(caches, *arguments, **options)
        except BaseException:
            for c in without_source:  # the call can be made again, and reads the source again
                c.source = None
            raise

    def _through_layers(
        self, caches: Sequence[DecoderCache | None], x: Tensor, *rest: Tensor | None, **options: Any
    ) -> Tensor | tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """forward, once there is one cache or None for each block."""
        weights = []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x = layer(x, *rest, **options, cache=layer_cache)
            if options["need_weights"]:
                x, self_weights, cross_weights = x
                weights.append((self_weights, cross_weights))
        return (self.norm(x), weights) if options["need_weights"] else self.norm(x)


def make_norm(
    norm: str,
    d_model: int,
    eps: float,
    *,
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """LayerNorm ("layer") or RMSNorm ("rms", which has no bias) over d_model features.

    Raises:
        ValueError: another name.
    """
    if norm == "layer":
        return nn.LayerNorm(d_model, eps=eps, bias=bias, device=device, dtype=dtype)
    if norm == "rms":
        return nn.RMSNorm(d_model, eps=eps, device=device, dtype=dtype)
    raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")


def one_a_layer(
    who: str, cache: Sequence[Any] | None, num_layers: int, kind: type[BaseCache] | type[DecoderCache]
) -> Sequence[Any]:
    """The caches of the blocks; None for each where there are none.

    Raises:
        ValueError: not a list of one for each block; one cache for two blocks.
        TypeError: caches of another kind.
    """
    if cache is None:
        return [None] * num_layers
    if not isinstance(cache, (list, tuple)) or len(cache) != num_layers:
        found = f"{len(cache)}" if isinstance(cache, (list, tuple)) else type(cache).__name__
        raise ValueError(
            f"{who}: cache must be a list with one cache for each of {num_layers} blocks, got {found}"
        )
    for layer, c in enumerate(cache):
        if not (isinstance(c, DecoderCache) if kind is DecoderCache else attends(c)):
            wanted = "DecoderCache" if kind is DecoderCache else "KVCache, PagedKVCache or SlidingKVCache"
            raise TypeError(f"{who}: the cache of block {layer} must be a {wanted}, got {type(c).__name__}")
    if not compiling():  # which has no ids of objects
        _expect_different(who, cache)
    return cache


def _expect_different(who: str, caches: Sequence[BaseCache | DecoderCache]) -> None:
    """Raises ValueError where two blocks would write to one cache: each would read the other's keys."""
    first: dict[int, int] = {}
    for layer, c in enumerate(caches):
        other = first.setdefault(id(c.target if isinstance(c, DecoderCache) else c), layer)
        if other != layer:
            raise ValueError(
                f"{who}: each block needs a cache of its own, and blocks {other} and {layer} got the same one"
            )


def _seen_keys(encoder_output: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Which tokens of the source some query may see, (B, Lsource) bool; None for all."""
    batch, length = encoder_output.shape[:2]
    seen = None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"TransformerDecoderBlock: with a cache padding_mask must be bool, got {found}")
        padded = mask.unsqueeze(1) if mask.dim() == 3 else mask  # as in MultiHeadAttention
        padded = padded[(None,) * max(0, 4 - padded.dim())]
        if padded.dim() != 4 or padded.shape[1:] != (1, 1, length) or padded.shape[0] not in (1, batch):
            raise ValueError(
                "TransformerDecoderBlock: with a cache padding_mask must be the same for all queries and heads, "
                f"({batch}, 1, 1, {length}), got {tuple(mask.shape)}"
            )
        seen = padded[:, 0, 0].expand(batch, length)
    if lengths is not None:
        if not isinstance(lengths, Tensor):
            raise TypeError(
                f"TransformerDecoderBlock: encoder_lengths must be a tensor of int32 or int64, "
                f"got {type(lengths).__name__}"
            )
        if tuple(lengths.shape) != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"TransformerDecoderBlock: encoder_lengths must be ({batch},) integers, "
                f"got {tuple(lengths.shape)} of {lengths.dtype}"
            )
        if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= length:
            raise ValueError(
                f"TransformerDecoderBlock: encoder_lengths must be 0 to {length}, got {lengths.tolist()}"
            )
        within = torch.arange(length, device=lengths.device) < lengths[:, None]
        seen = within if seen is None else seen & within
    return seen
