"""Builders for attention masks. In this whole package a mask is bool and True means "may attend".

Letters: B batch, Lq queries, Lk keys. Every mask broadcasts to (B, Hq, Lq, Lk) from the right. In the
drawings queries go down, keys go across, `x` is True (the query may attend to the key) and `.` is False (the
key is hidden):

    causal(4)        padding([2, 4], 4)     sliding_window(5, left=1, right=0)
    x . . .          x x . .                x . . . .
    x x . .                                 x x . . .
    x x x .          x x x x                . x x . .
    x x x x                                 . . x x .
                                            . . . x x

`nn.MultiheadAttention` and `nn.TransformerEncoder` of torch read bool masks the other way round (True hides):
go through `from_torch`, `from_torch_key_padding_mask` and their inverses. `F.scaled_dot_product_attention`
reads them as we do. A row that may attend to nothing is no error: its output is exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "build_causal_mask",
    "causal",
    "combine",
    "create_padding_mask",
    "documents",
    "from_tokens",
    "from_torch",
    "from_torch_key_padding_mask",
    "padding",
    "prefix_lm",
    "sliding_window",
    "to_bias",
    "to_torch",
    "to_torch_key_padding_mask",
]

Corner = Literal["top_left", "bottom_right"]


def query_positions(
    Lq: int, Lk: int, corner: str = "bottom_right", *, device: torch.device | None = None
) -> Tensor:
    """Where query i stands among the keys: at i ("top_left") or i + Lk − Lq ("bottom_right"); (Lq, 1) int64.

    Raises:
        ValueError: any other corner.
    """
    if corner not in ("top_left", "bottom_right"):
        raise ValueError(f'corner must be "top_left" or "bottom_right", got {corner!r}')
    first = 0 if corner == "top_left" else Lk - Lq
    return torch.arange(first, first + Lq, device=device)[:, None]


def causal(
    Lq: int, Lk: int | None = None, corner: Corner = "bottom_right", *, device: torch.device | None = None
) -> Tensor:
    """No query sees what comes after it: (Lq, Lk) bool.

    With as many keys as queries the two corners are the same. Otherwise "bottom_right" lets the last query
    see the last key (new tokens after a cache), "top_left" lets the first query see the first key only (as
    torch's `is_causal=True` does).

        causal(2, 5)       causal(2, 5, "top_left")      causal(4, 2)     causal(4, 2, "top_left")
        x x x x .          x . . . .                     . .              x .
        x x x x x          x x . . .                     . .              x x
                                                         x .              x x
                                                         x x              x x

    Args:
        Lq: number of queries.
        Lk: number of keys; as many as queries where not given.
        corner: which corner of the matrix the diagonal runs into.
        device: where to build the mask.

    Raises:
        ValueError: a corner that does not exist.
    """
    Lk = Lq if Lk is None else Lk
    return torch.arange(Lk, device=device) <= query_positions(Lq, Lk, corner, device=device)


def sliding_window(
    Lq: int,
    Lk: int | None = None,
    left: int | None = None,
    right: int | None = None,
    corner: Corner = "bottom_right",
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Query i sees the keys from i − left to i + right, (Lq, Lk) bool; None leaves that side open.

        sliding_window(5, left=1, right=2)     sliding_window(2, 5, left=2, right=0)
        x x x . .                              . x x x .
        x x x x .                              . . x x x
        . x x x x
        . . x x x
        . . . x x

    Args:
        Lq: number of queries.
        Lk: number of keys; as many as queries where not given.
        left: how many keys before its own position a query sees, at least 0.
        right: how many keys after it, at least 0; 0 makes the window causal.
        corner: how positions of queries and keys are matched where Lq and Lk differ, as in `causal`.
        device: where to build the mask.

    Raises:
        ValueError: a negative side, or a corner that does not exist.
    """
    for side, size in (("left", left), ("right", right)):
        if size is not None and size < 0:
            raise ValueError(f"the {side} side of a window must be None or at least 0, got {size}")
    Lk = Lq if Lk is None else Lk
    distance = torch.arange(Lk, device=device) - query_positions(Lq, Lk, corner, device=device)  # (Lq, Lk)
    inside = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        inside = inside & (distance >= -left)
    if right is not None:
        inside = inside & (distance <= right)
    return inside


def padding(lengths: Tensor | Sequence[int], max_len: int | None = None) -> Tensor:
    """Hide the keys at and past each sequence's length: (B, 1, 1, Lk) bool.

        padding([2, 4], 4)
        x x . .        sequence 0
        x x x x        sequence 1

    The op can do the same without a mask: `attention(..., key_lengths=lengths)`.

    Args:
        lengths: real tokens of each sequence, (B,) integers.
        max_len: Lk; the longest length where not given.

    Raises:
        TypeError: lengths that are not integers (a padding mask handed in by mistake, for one).
        ValueError: lengths that are not one-dimensional.
    """
    lengths = torch.as_tensor(lengths)
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise TypeError(f"padding: lengths must be integers, one per sequence, got dtype {lengths.dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"padding: lengths must have shape (B,), got {tuple(lengths.shape)}")
    if max_len is None:
        max_len = int(lengths.max()) if lengths.numel() else 0
    return (torch.arange(max_len, device=lengths.device) < lengths[:, None])[:, None, None, :]


def from_tokens(seq: Tensor, pad_idx: int = 0) -> Tensor:
    """Hide the padding tokens of a batch: (B, 1, 1, L) bool, True where `seq` holds a real token.

        from_tokens(tensor([[7, 3, 0, 0], [5, 1, 2, 9]]))
        x x . .        sequence 0
        x x x x        sequence 1

    Args:
        seq: token ids (B, L), integers.
        pad_idx: the id that means padding, wherever in a row it stands.

    Raises:
        TypeError: floating point or bool tokens.
        ValueError: not two-dimensional.
    """
    if seq.is_floating_point() or seq.dtype == torch.bool:
        raise TypeError(f"from_tokens: seq must hold integer token ids, got dtype {seq.dtype}")
    if seq.dim() != 2:
        raise ValueError(f"from_tokens: seq must have shape (B, L), got {tuple(seq.shape)}")
    return (seq != pad_idx)[:, None, None, :]


def documents(segment_ids: Tensor, key_segment_ids: Tensor | None = None) -> Tensor:
    """Several documents in one row: a query sees only the keys of its own document.

        documents(tensor([0, 0, 1, 1, 1]))
        x x . . .
        x x . . .
        . . x x x
        . . x x x
        . . x x x

    Args:
        segment_ids: the document of each query, (Lq,) or (B, Lq), any integers.
        key_segment_ids: the document of each key, (Lk,) or (B, Lk); the queries' where not given.

    Returns:
        (Lq, Lk), or (B, 1, Lq, Lk) for batched ids. Causal inside each: `combine(documents(ids), causal(L))`.

    Raises:
        ValueError: ids that are neither (L,) nor (B, L), or of two different ranks.
    """
    keys = segment_ids if key_segment_ids is None else key_segment_ids
    if segment_ids.dim() not in (1, 2) or keys.dim() != segment_ids.dim():
        raise ValueError(
            "documents: segment ids must both be (L,) or both (B, L), "
            f"got {tuple(segment_ids.shape)} for the queries and {tuple(keys.shape)} for the keys"
        )
    same = segment_ids[..., :, None] == keys[..., None, :]
    return same if same.dim() == 2 else same[:, None]


def prefix_lm(L: int, prefix_lengths: int | Tensor, *, device: torch.device | None = None) -> Tensor:
    """A prompt that sees all of itself, followed by causal tokens.

        prefix_lm(5, 2)
        x x . . .
        x x . . .
        x x x . .
        x x x x .
        x x x x x

    Args:
        L: number of queries and of keys.
        prefix_lengths: length of the prompt, one int for all or integers (B,).
        device: where to build the mask, where prefix_lengths is an int.

    Returns:
        (L, L), or (B, 1, L, L) for lengths (B,).

    Raises:
        TypeError: a tensor of lengths that are not integers.
        ValueError: a tensor of lengths that is not one-dimensional.
    """
    if isinstance(prefix_lengths, int):
        return causal(L, device=device) | (torch.arange(L, device=device) < prefix_lengths)
    return causal(L, device=prefix_lengths.device) | padding(prefix_lengths, L)


def combine(*masks: Tensor) -> Tensor:
    """All masks at once: True where every one of them is, broadcast against each other from the right.

        causal(3)     padding([2], 3)     combine(causal(3), padding([2], 3))
        x . .         x x .               x . .
        x x .                             x x .
        x x x                             x x .

    Raises:
        TypeError: no mask, or one that is not bool. Float masks are biases: hand them to the op as `bias`.
        ValueError: shapes that do not broadcast together.
    """
    if not masks:
        raise TypeError("combine: give at least one mask")
    for mask in masks:
        _require_bool("combine", mask)
    together = masks[0]
    for mask in masks[1:]:
        try:
            together = together & mask
        except RuntimeError:
            shapes = ", ".join(str(tuple(m.shape)) for m in masks)
            raise ValueError(f"combine: the masks do not broadcast together, shapes {shapes}") from None
    return together


def to_bias(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same mask as numbers to add to the scores: 0 where True, −inf where False; shape of `mask`.

    Raises:
        TypeError: a mask that is not bool, or a dtype that is not floating point.
    """
    _require_bool("to_bias", mask)
    if not dtype.is_floating_point:
        raise TypeError(f"to_bias: −inf needs a floating point dtype, got {dtype}")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def from_torch_key_padding_mask(key_padding_mask: Tensor) -> Tensor:
    """From torch's `key_padding_mask`, (B, Lk) with True = padding, to our mask (B, 1, 1, Lk).

    Raises:
        TypeError: not bool. A float one holds numbers to add to the scores: hand it to the op as `bias`.
        ValueError: not (B, Lk).
    """
    _require_bool("from_torch_key_padding_mask", key_padding_mask)
    if key_padding_mask.dim() != 2:
        raise ValueError(
            f"from_torch_key_padding_mask: expected shape (B, Lk), got {tuple(key_padding_mask.shape)}"
        )
    return ~key_padding_mask[:, None, None, :]


def to_torch_key_padding_mask(mask: Tensor) -> Tensor:
    """From our padding mask (B, 1, 1, Lk) to torch's `key_padding_mask`, (B, Lk) with True = padding.

    Raises:
        TypeError: not bool.
        ValueError: not (B, 1, 1, Lk): such a mask hides more than padding.
    """
    _require_bool("to_torch_key_padding_mask", mask)
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError(f"to_torch_key_padding_mask: expected shape (B, 1, 1, Lk), got {tuple(mask.shape)}")
    return ~mask[:, 0, 0, :]


def from_torch(attn_mask: Tensor) -> Tensor:
    """From the `attn_mask` of torch's *modules* (bool, True hides) to ours (True attends), same shape.

    Raises:
        TypeError: not bool. A float `attn_mask` needs no change: hand it to the op as `bias`.
    """
    _require_bool("from_torch", attn_mask)
    return ~attn_mask


def to_torch(mask: Tensor) -> Tensor:
    """From ours (True attends) to the `attn_mask` of torch's *modules* (True hides), same shape.

    Raises:
        TypeError: not bool.
    """
    _require_bool("to_torch", mask)
    return ~mask


def build_causal_mask(seq_len: int) -> Tensor:
    """`causal(seq_len)` under the name used in tutorials: lower-triangular (seq_len, seq_len) bool."""
    return causal(seq_len)


def create_padding_mask(seq: Tensor, pad_idx: int = 0) -> Tensor:
    """`from_tokens(seq, pad_idx)` under the name used in tutorials: (B, 1, 1, L) bool, True = real token."""
    return from_tokens(seq, pad_idx)


def _require_bool(who: str, mask: Tensor) -> None:
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return
    got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if isinstance(mask, Tensor) and mask.is_floating_point():
        advice = "a float mask is a bias: hand it to the op as bias="
    else:
        advice = "mask.bool() makes one of 0 and 1"
    raise TypeError(f"{who}: a mask must be a bool tensor (True = may attend), got {got}; {advice}")
