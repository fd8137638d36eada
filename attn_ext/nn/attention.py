"""Attention as modules: the plain one and the one with heads.

Letters: B batch, h query heads, h_kv key/value heads, Lq queries, Lk keys, d_k = d_model / h.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from attn_ext._arguments import out_of_reach
from attn_ext.kv_cache import BaseCache, PagedKVCache, SlidingKVCache
from attn_ext.kv_cache.base import packed_counts
from attn_ext.nn.positional import RotaryEmbedding, table_dtype
from attn_ext.ops import attention

__all__ = ["MultiHeadAttention", "ScaledDotProductAttention"]


class ScaledDotProductAttention(nn.Module):
    """softmax(q·kᵀ/√d_k)·v, with dropout on the weights while training.

    Args:
        d_k: width of q and k; the scores are divided by its square root.
        dropout: probability of dropping a weight while training.

    Example:
        >>> attend = ScaledDotProductAttention(d_k=8)
        >>> output, weights = attend(x, x, x)  # x (2, 4, 8) → (2, 4, 8), (2, 4, 4)
    """

    def __init__(self, d_k: int, dropout: float = 0.1) -> None:
        super().__init__()
        if d_k < 1:
            raise ValueError(f"ScaledDotProductAttention: d_k must be at least 1, got {d_k}")
        self.d_k = d_k
        self.dropout = _checked_dropout("ScaledDotProductAttention", dropout)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            q: (B, Lq, d_k), or (B, h, Lq, d_k) with heads.
            k: (B, Lk, d_k) or (B, h_kv, Lk, d_k), where h_kv divides h.
            v: (B, Lk, d_v) or (B, h_kv, Lk, d_v).
            mask: bool, True = may attend, or float, added to the scores. Without heads (Lq, Lk), (B, Lq, Lk)
                or (B, 1, 1 or Lq, Lk); with heads it broadcasts to (B, h, Lq, Lk) from the right.
            causal: False, "top_left" or "bottom_right"; True where Lq == Lk.
            key_lengths: (B,) integers; keys at and past the length are hidden.
            bias: float, shapes as `mask`, added to the scores.
            need_weights: False gives None in their place and never builds them.

        Returns:
            output, shaped as q with the width of v; and the weights before dropout, (B, Lq, Lk) or
            (B, h, Lq, Lk).

        Raises:
            TypeError: an integer mask, or q, k, v of different dtypes.
            ValueError: shapes that do not fit together.
        """
        if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim() or q.shape[-1] != self.d_k:
            raise ValueError(
                "ScaledDotProductAttention: expected q, k, v (B, L, d) or (B, h, L, d) with d of q equal to "
                f"d_k = {self.d_k}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        without_heads = q.dim() == 3
        if without_heads:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)  # (B, 1, L, d)
            mask, bias = _with_head_dim(mask), _with_head_dim(bias)
        result = attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            causal=causal,
            key_lengths=key_lengths,
            scale=1.0 / math.sqrt(self.d_k),
            dropout_p=self.dropout if self.training else 0.0,
            return_weights=need_weights,
        )
        output, weights = result if need_weights else (result, None)
        if without_heads:
            output = output.squeeze(1)
            weights = None if weights is None else weights.squeeze(1)
        return output, weights

    def extra_repr(self) -> str:
        return f"d_k={self.d_k}, dropout={self.dropout}"


class MultiHeadAttention(nn.Module):
    """Attention in h subspaces at once, between two linear maps.

        q (B, Lq, d_model) → w_q → (B, h,    Lq, d_k) ┐
        k (B, Lk, kdim)    → w_k → (B, h_kv, Lk, d_k) ├ attend → (B, h, Lq, d_k) → (B, Lq, d_model) → w_o
        v (B, Lk, vdim)    → w_v → (B, h_kv, Lk, d_k) ┘

    The heads are split by a view and a transpose: no tensor is copied on the way.

    Args:
        d_model: width of q and of the output.
        h: number of query heads; d_k = d_model / h.
        dropout: probability of dropping a weight while training.
        num_kv_heads: number of key/value heads, each for h / num_kv_heads query heads; h where not given.
        bias: whether the four linear maps have a bias.
        kdim: width of k; d_model where not given.
        vdim: width of v; d_model where not given.
        rotary: turns the heads of q and k by their positions before they meet, for self-attention.
        device, dtype: where and as what the parameters are made.

    Raises:
        ValueError: h does not divide d_model, num_kv_heads does not divide h, dropout is outside [0, 1], or
            rotary is made for heads of another width.

    Example:
        >>> attend = MultiHeadAttention(d_model=12, h=4)
        >>> output, weights = attend(x, x, x)  # x (2, 6, 12) → (2, 6, 12), (2, 4, 6, 6)
    """

    def __init__(
        self,
        d_model: int,
        h: int,
        dropout: float = 0.1,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        rotary: RotaryEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model < 1 or h < 1 or d_model % h != 0:
            raise ValueError(
                f"MultiHeadAttention: d_model = {d_model} cannot be split into h = {h} equal heads"
            )
        num_kv_heads = h if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or h % num_kv_heads != 0:
            raise ValueError(
                f"MultiHeadAttention: h = {h} query heads cannot share num_kv_heads = {num_kv_heads} evenly"
            )
        self.d_model = d_model
        self.h = h
        self.num_kv_heads = num_kv_heads
        self.d_k = d_model // h
        self.kdim = d_model if kdim is None else kdim
        self.vdim = d_model if vdim is None else vdim
        self.dropout = _checked_dropout("MultiHeadAttention", dropout)
        if rotary is not None and rotary.head_dim != self.d_k:
            raise ValueError(
                f"MultiHeadAttention: rotary turns heads of width {rotary.head_dim}, "
                f"but d_model / h is {self.d_k}"
            )
        self.rotary = rotary
        width = num_kv_heads * self.d_k
        self.w_q = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)
        self.w_k = nn.Linear(self.kdim, width, bias=bias, device=device, dtype=dtype)
        self.w_v = nn.Linear(self.vdim, width, bias=bias, device=device, dtype=dtype)
        self.w_o = nn.Linear(d_model, d_model, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        mask: Tensor | None = None,
        *,
        causal: bool | str = False,
        key_lengths: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        need_weights: bool | None = None,
        cache: BaseCache | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from q to k and v; self-attention is `attend(x, x, x)`.

        With a cache, x holds the tokens that are new. Their keys and values are stored behind those of earlier
        calls, and the queries attend to all of them:

            cache = attn_ext.KVCache(batch=1, num_kv_heads=4, head_dim=16)
            output, _ = attend(prompt, prompt, prompt, causal=True, cache=cache)  # (1, n, d_model)
            output, _ = attend(token, token, token, causal=True, cache=cache)  # (1, 1, d_model)

        Args:
            q: (B, Lq, d_model).
            k: (B, Lk, kdim).
            v: (B, Lk, vdim).
            mask: bool, True = may attend, or float, added to the scores: (Lq, Lk), (B, Lq, Lk) the same for
                all heads, or anything that broadcasts to (B, h, Lq, Lk), such as the (B, 1, 1, Lk) of
                `masks.padding`. torch's modules read bool masks the other way round: see `masks.from_torch`.
            causal: False, "top_left" or "bottom_right"; True where Lq == Lk. With a cache False, or True, which
                there is bottom-right: a query sees what was stored before it.
            key_lengths: (B,) integers; keys at and past the length are hidden.
            bias: float, added to the scores, may be learned: (Lq, Lk), (h, Lq, Lk), or anything that
                broadcasts to (B, h, Lq, Lk). With three dims the first is the heads: a bias belongs to heads,
                a mask to sequences.
            positions: where the tokens stand, integers (L,) or (B, L), for `rotary`; 0 … L − 1 where not given.
            need_weights: False gives None in their place and never builds them; True where not given, but with a
                cache False, the only choice there.
            cache: `KVCache`, `PagedKVCache` or `SlidingKVCache` of B sequences, h_kv heads of width d_k, in the
                dtype of the projections. It knows where the tokens stand and which keys there are, so that
                mask, key_lengths, bias and positions cannot be given. k and v are both None where nothing is to
                be stored. For inference: nothing that needs a gradient, no dropout.
            cu_seqlens: with a cache, q, k and v may be packed, (total, width), with another number of tokens for
                each sequence: those of sequence b are rows cu_seqlens[b] to cu_seqlens[b + 1] − 1.

        Returns:
            output (B, Lq, d_model), or (total, d_model), and the weights before dropout (B, h, Lq, Lk). Their rows
            sum to 1; where a query may attend to no key they are 0, and its output is the bias of w_o.

        Raises:
            TypeError: an integer mask (use mask.bool()); a cache that is none; another dtype than the cache's.
            ValueError: shapes that do not fit together; options that a cache excludes.
            IndexError: more tokens than the cache may hold; it is as it was before.
        """
        if cache is not None:
            _expect_cache(cache)
            unknown = {"mask": mask, "key_lengths": key_lengths, "bias": bias, "positions": positions}
            self._check_cached(unknown, causal, need_weights)
            return self._attend_cached(q, k, v, bool(causal), cache, cu_seqlens), None
        if cu_seqlens is not None:
            raise ValueError(
                "MultiHeadAttention: cu_seqlens is for calls with a cache; see attn_ext.attention_varlen"
            )
        if k is None or v is None:
            raise ValueError(
                "MultiHeadAttention: k and v can be None only where a cache holds keys and values"
            )
        need_weights = need_weights is not False
        self._check_shapes(q, k, v)
        q_heads = self._q_heads(q).transpose(1, 2)  # (B, h, Lq, d_k)
        k_heads, v_heads = (x.transpose(1, 2) for x in self._kv_heads(k, v))  # (B, h_kv, Lk, d_k)
        if self.rotary is not None:
            q_heads, k_heads = self._turn(q_heads, k_heads, positions)
        elif positions is not None:
            raise ValueError("MultiHeadAttention: positions need a module that was built with rotary=…")
        result = attention(
            q_heads,
            k_heads,
            v_heads,
            mask=_with_head_dim(mask),
            bias=bias,
            causal=causal,
            key_lengths=key_lengths,
            dropout_p=self.dropout if self.training else 0.0,
            return_weights=need_weights,
        )
        output, weights = result if need_weights else (result, None)
        return self.w_o(output.transpose(1, 2).flatten(-2)), weights  # (B, Lq, d_model), (B, h, Lq, Lk)

    def store(self, k: Tensor, v: Tensor, cache: BaseCache, *, cu_seqlens: Tensor | None = None) -> None:
        """Put the keys and values of k and v into a cache, for queries that come later with `k=None, v=None`.

        That is how cross-attention works through an encoder's output once, and not for each token.

        Args:
            k: (B, n, kdim), or packed with cu_seqlens (total, kdim).
            v: (B, n, vdim), or (total, vdim).
            cache, cu_seqlens: as in `forward`.

        Raises:
            As `forward` with a cache.
        """
        _expect_cache(cache)
        self._check_widths((k, v), (self.kdim, self.vdim), cu_seqlens)
        heads = _heads_for_cache(self._kv_heads(k, v), cu_seqlens)
        cache.append(*heads, cu_seqlens=cu_seqlens, **self._rotary_for("append", cache, heads[0], cu_seqlens))

    def _attend_cached(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        causal: bool,
        cache: BaseCache,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """forward with a cache, once its options are checked."""
        if (k is None) != (v is None):
            raise ValueError("MultiHeadAttention: k and v must be given together")
        k_heads = v_heads = None
        if k is None or v is None:
            self._check_widths((q,), (self.d_model,), cu_seqlens)
        else:
            self._check_widths((q, k, v), (self.d_model, self.kdim, self.vdim), cu_seqlens)
            k_heads, v_heads = _heads_for_cache(self._kv_heads(k, v), cu_seqlens)
        (q_heads,) = _heads_for_cache((self._q_heads(q),), cu_seqlens)
        output = cache.attend(
            q_heads,
            k_heads,
            v_heads,
            cu_seqlens=cu_seqlens,
            causal=causal,
            **self._rotary_for("attend", cache, k_heads, cu_seqlens),
        )  # (B, h, Lq, d_k) or (total, h, d_k)
        return self.w_o((output if cu_seqlens is not None else output.transpose(1, 2)).flatten(-2))

    def _rotary_for(
        self, method: str, cache: BaseCache, k: Tensor | None, cu_seqlens: Tensor | None
    ) -> dict[str, Any]:
        """The cache turns queries and keys itself, by tables that reach as far as the positions will.

        method: that of the cache which is about to be called, for messages.
        """
        if self.rotary is None:
            return {}
        rows = _reachable(cache)
        if not out_of_reach(cache.device):  # else no length can be read, and no cache grows
            if k is None:
                new = 0
            elif cu_seqlens is None:
                new = k.shape[2]
            else:  # checked here already: tables are not to be computed for tokens that did not come
                op = f"{type(cache).__name__}.{method}"
                new = max(packed_counts(op, cu_seqlens, cache.batch, "k", k.shape[0]), default=0)
            rows = max(rows, cache.max_length + new)
        dtype = table_dtype(cache.dtype)
        return {
            "rotary": self.rotary.tables(rows, dtype=dtype, device=cache.device),
            "rotary_interleaved": self.rotary.interleaved,
        }

    def _q_heads(self, q: Tensor) -> Tensor:
        return self.w_q(q).unflatten(-1, (self.h, self.d_k))  # (…, h, d_k)

    def _kv_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.num_kv_heads, self.d_k)
        return self.w_k(k).unflatten(-1, heads), self.w_v(v).unflatten(-1, heads)  # (…, h_kv, d_k)

    def _turn(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                "MultiHeadAttention: rotary is for self-attention, where queries and keys are the same tokens; "
                f"got {q.shape[2]} queries and {k.shape[2]} keys"
            )
        return self.rotary(q, positions), self.rotary(k, positions)

    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        expected = (self.d_model, self.kdim, self.vdim)
        fits = all(x.dim() == 3 and x.shape[2] == width for x, width in zip((q, k, v), expected, strict=True))
        if not fits or k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0]:
            raise ValueError(
                f"MultiHeadAttention: expected q (B, Lq, {expected[0]}), k (B, Lk, {expected[1]}), "
                f"v (B, Lk, {expected[2]}), got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            )

    def _check_cached(
        self, unknown: dict[str, Tensor | None], causal: bool | str, need_weights: bool | None
    ) -> None:
        given = [name for name, x in unknown.items() if x is not None]
        if given:
            raise ValueError(
                f"MultiHeadAttention: {', '.join(given)} cannot be given with a cache, which knows where tokens stand "
                "and which keys there are; leave padding out with cu_seqlens"
            )
        if need_weights:
            raise ValueError("MultiHeadAttention: there are no weights with a cache; leave out need_weights")
        if causal not in (False, True, "bottom_right"):
            raise ValueError(
                f"MultiHeadAttention: with a cache causal must be False, True or 'bottom_right', got {causal!r}"
            )
        if self.training and self.dropout > 0:
            raise ValueError(
                "MultiHeadAttention: a cache is for inference, and this module drops weights "
                f"(dropout={self.dropout}); call eval() first"
            )

    def _check_widths(
        self, tensors: tuple[Tensor, ...], widths: tuple[int, ...], cu_seqlens: Tensor | None
    ) -> None:
        """What the cache cannot check, for it sees the projections."""
        leading = "(B, L, " if cu_seqlens is None else "(total, "
        rank = 3 if cu_seqlens is None else 2
        if any(x.dim() != rank or x.shape[-1] != width for x, width in zip(tensors, widths, strict=True)):
            raise ValueError(
                f"MultiHeadAttention: expected {', '.join(f'{leading}{width})' for width in widths)}, "
                f"got {', '.join(str(tuple(x.shape)) for x in tensors)}"
            )

    def extra_repr(self) -> str:
        shared = "" if self.num_kv_heads == self.h else f", num_kv_heads={self.num_kv_heads}"
        return f"d_model={self.d_model}, h={self.h}{shared}, dropout={self.dropout}"


def _heads_for_cache(heads: tuple[Tensor, ...], cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """(B, L, h, d_k) → (B, h, L, d_k); packed ones, (total, h, d_k), are as a cache takes them."""
    return heads if cu_seqlens is not None else tuple(x.transpose(1, 2) for x in heads)


def _reachable(cache: BaseCache) -> int:
    """Positions that a cache could store without growing; in a ring they have no end, and 0 stands for that."""
    if isinstance(cache, SlidingKVCache):
        return 0
    if isinstance(cache, PagedKVCache):
        return cache.block_table.shape[1] * cache.page_size
    return cache.capacity


def attends(cache: object) -> bool:
    """Whether an object may be a cache: those of this package, and others that have their interface."""
    return hasattr(cache, "attend")


def _expect_cache(cache: object) -> None:
    """Raises TypeError for anything else."""
    if not attends(cache):
        raise TypeError(
            f"MultiHeadAttention: cache must be a KVCache, PagedKVCache or SlidingKVCache, got {type(cache).__name__}"
        )


def _with_head_dim(mask: Tensor | None) -> Tensor | None:
    """(B, Lq, Lk) → (B, 1, Lq, Lk), for a mask of three dims belongs to sequences; other ranks unchanged."""
    return mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask


def _checked_dropout(who: str, dropout: float) -> float:
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{who}: dropout must be between 0 and 1, got {dropout}")
    return dropout
