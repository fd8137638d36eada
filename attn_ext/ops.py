"""The functions of the package, from the front door to the operators.

`attention` reads its options, and then takes one of three roads:

- no gradient is asked for and nothing but a causal corner and a scale is set: the lean operator `attention_inference`;
- gradients in eager mode: an `autograd.Function` over `attention_forward` and `attention_backward`; under
  `torch.compile` and export the same two as registered operators;
- forward-mode AD, functorch transforms, second derivatives: `attn_ext.reference`, plain differentiable PyTorch.

Letters: B batch, Hq and Hkv heads, Lq and Lk lengths, D and Dv head dims (see README).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_ext import reference
from attn_ext._load import _C  # noqa: F401  registers torch.ops.attn_ext

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CORNERS = {"top_left": 1, "bottom_right": 2}
_CORNER_NAMES: dict[int, bool | str] = {0: False, 1: "top_left", 2: "bottom_right"}
_GRAD_Q, _GRAD_K, _GRAD_V, _GRAD_BIAS, _GRAD_BIAS2, _GRAD_SINKS = (1 << n for n in range(6))

# Looked up once: a small call takes a few microseconds in all.
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling

_inference = torch.ops.attn_ext.attention_inference.default
_forward = torch.ops.attn_ext.attention_forward.default
_backward = torch.ops.attn_ext.attention_backward.default
_weights = torch.ops.attn_ext.attention_weights.default


class _Options(NamedTuple):
    """What the operators take after q, k, v, in their order."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    bias2: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    causal: int = 0
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    """Scaled dot-product attention: softmax(q·kᵀ·scale + bias, masked)·v, with memory linear in the lengths.

    Scores are q·kᵀ·scale, then capped, then biased, then masked; the softmax (with sinks) follows, then dropout,
    then the product with v (Vaswani et al. 2017, equation 1).

    Args:
        q: (B, Hq, Lq, D); also (Hq, Lq, D) or with two batch dims. float32, bfloat16, float16 or float64. Any strides.
        k: (B, Hkv, Lk, D), Hq a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv).
        v: (B, Hkv, Lk, Dv).
        mask: bool, True = attend; or any float dtype, then a bias. Broadcasts to (B, Hq, Lq, Lk) from the right.
        bias: any float dtype, added to the scaled scores, broadcast likewise; −inf hides a key. Has a gradient.
        causal: False, "top_left" (query i sees keys up to i) or "bottom_right" (up to i + Lk − Lq). True says that
            Lq == Lk, where the two are the same.
        window: (left, right): keys from i − left to i + right only, i aligned as causal is (bottom-right where it is
            off); None is unbounded.
        scale: default 1/√D. 0 and negative numbers are taken as they are.
        softcap: scores become softcap·tanh(scores / softcap). None or 0 is off.
        alibi_slopes: float32 (Hq,) or (B, Hq): −slope·|distance| is added. No gradient.
        sinks: (Hq,) logits that join the softmax without a key or a value. Has a gradient.
        key_lengths: (B,) int32 or int64: keys at and past the length are hidden.
        dropout_p: drops weights after the softmax and scales the others by 1/(1 − p). The caller says when: pass 0
            in evaluation.
        return_lse: also return the natural log-sum-exp of each row's scores.
        return_weights: also return the softmax probabilities before dropout.

    Returns:
        out (B, Hq, Lq, Dv) in the dtype of q and in q's memory order, or a tuple of out, lse (B, Hq, Lq) in float32
        (float64 for float64) and weights (B, Hq, Lq, Lk), as asked. A row that sees no key: 0, −inf, 0.

    Raises:
        TypeError: q, k, v of several or unknown dtypes; a mask or bias of an integer dtype.
        ValueError: shapes, devices or options that do not fit; the message names what came and what was expected.
    """
    plain = (
        mask is None
        and bias is None
        and window is None
        and not softcap
        and alibi_slopes is None
        and sinks is None
        and key_lengths is None
        and not dropout_p
        and not return_lse
        and not return_weights
    )
    q, k, v = _common_dtype("attention", q, k, v)
    corner = 0 if causal is False else _corner("attention", causal, q, k)
    if plain and not _differentiating(q, k, v):
        if not (q.is_cpu and k.is_cpu and v.is_cpu):
            _check_device("attention", q, k, v)
        return _inference(q, k, v, corner, scale)

    bool_mask, bias, bias2 = _mask_and_biases("attention", mask, bias)
    options = _Options(
        mask=bool_mask,
        bias=bias,
        bias2=bias2,
        alibi_slopes=_no_gradient("attention", alibi_slopes),
        sinks=_float_tensor("attention", "sinks", sinks),
        key_lengths=_lengths("attention", key_lengths),
        dropout_seed=_draw_seed("attention", dropout_p, q),
        causal=corner,
        window_left=_window("attention", window)[0],
        window_right=_window("attention", window)[1],
        scale=scale,
        softcap=float(softcap or 0.0),
        dropout_p=float(dropout_p),
    )
    return _run("attention", q, k, v, options, return_lse, return_weights)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on our kernels: change the import, nothing else.

    Args:
        query: (…, Hq, Lq, D), any number of leading dims, which are broadcast against those of key and value.
        key: (…, Hkv, Lk, D).
        value: (…, Hkv, Lk, Dv).
        attn_mask: bool (True = attend) or float, broadcasts to (…, Hq, Lq, Lk).
        dropout_p: applied whenever it is not 0, as torch does.
        is_causal: query i sees keys up to i: the top-left corner. With a mask, both must allow the key.
        scale: default 1/√D.
        enable_gqa: Hq may be a multiple of Hkv, and key and value may differ in their heads. Without it heads are
            broadcast like the other leading dims.

    Returns:
        (…, Hq, Lq, Dv).

    Raises:
        TypeError, ValueError: as `attention`.
    """
    op = "scaled_dot_product_attention"
    if attn_mask is None and not dropout_p and isinstance(query, Tensor) and query.dim() == 4:
        batch_and_heads = query.shape[:2]
        if (
            key.shape[:-2] == batch_and_heads and value.shape[:-2] == batch_and_heads
        ):  # the common call, unadorned
            return attention(query, key, value, causal="top_left" if is_causal else False, scale=scale)
    for name, t in (("query", query), ("key", key), ("value", value)):
        _expect_tensor(op, name, t)
        if t.dim() < 2:
            raise ValueError(f"attn_ext.{op}: {name} must be (…, L, D), not {tuple(t.shape)}")
    rank = max(query.dim(), key.dim(), value.dim())
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not (same or (enable_gqa and query.shape[:-3] == key.shape[:-3] == value.shape[:-3])):
        query, key, value = _broadcast_leading(op, query, key, value, 3 if enable_gqa else 2)
    if rank == 2:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = _share_heads(op, query, key, value)
    batch = query.shape[:-3]
    if rank > 5:
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(batch + attn_mask.shape[-3:]).flatten(0, -4)
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
    if attn_mask is not None and rank == 2 and attn_mask.dim() < 2:
        attn_mask = attn_mask.expand(query.shape[-2], key.shape[-2])
    out = attention(
        query,
        key,
        value,
        mask=attn_mask,
        causal="top_left" if is_causal else False,
        scale=scale,
        dropout_p=dropout_p,
    )
    if rank == 2:
        return out.squeeze(0)
    return out.unflatten(0, batch) if rank > 5 else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Attention over sequences packed one behind the other, without padding.

    Args:
        q: (total, Hq, D): sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] − 1.
        k: (total of keys, Hkv, D), likewise by cu_seqlens_k.
        v: (total of keys, Hkv, Dv).
        cu_seqlens_q: (B + 1,) int32 or int64: 0, then the running total of the lengths.
        cu_seqlens_k: (B + 1,) int32 or int64.
        causal, window, scale, softcap, sinks, dropout_p, return_lse: as in `attention`; corners and windows by each
            sequence's own lengths. causal=True says that every sequence has as many queries as keys.
        alibi_slopes: (Hq,) or (B, Hq).

    Returns:
        out (total, Hq, Dv), with return_lse also the lse (Hq, total). A row has the same bits as in a padded call.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    op = "attention_varlen"
    q, k, v = _common_dtype(op, q, k, v)
    if causal is True and cu_seqlens_q is not cu_seqlens_k and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise ValueError(
            f"attn_ext.{op}: causal=True needs as many queries as keys in every sequence; "
            "say causal='top_left' or causal='bottom_right'"
        )
    options = _Options(
        alibi_slopes=_no_gradient(op, alibi_slopes),
        sinks=_float_tensor(op, "sinks", sinks),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        dropout_seed=_draw_seed(op, dropout_p, q),
        causal=2 if causal is True else _corner(op, causal, q, k),
        window_left=_window(op, window)[0],
        window_right=_window(op, window)[1],
        scale=scale,
        softcap=float(softcap or 0.0),
        dropout_p=float(dropout_p),
    )
    return _run(op, q, k, v, options, return_lse, False)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """The softmax probabilities themselves, of all rows and heads or of some, in memory linear in what is asked.

    Args:
        q: (B, Hq, Lq, D), or (Hq, Lq, D), or with two batch dims.
        k: (B, Hkv, Lk, D).
        rows: which queries (negative ones count from the end); default all.
        heads: which query heads, likewise.
        mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, key_lengths: as in `attention`.

    Returns:
        (B, heads, rows, Lk) in the dtype of q. Rows sum to 1 (less with a sink; 0 where none is seen). Differentiable.

    Raises:
        TypeError, ValueError: as `attention`; IndexError: a row or head that is not there.
    """
    op = "attention_weights"
    q, k, _ = _common_dtype(op, q, k, k)
    if not (3 <= q.dim() == k.dim() <= 5):
        raise ValueError(
            f"attn_ext.{op}: q and k must be (H, L, D), (B, H, L, D) or (B1, B2, H, L, D), "
            f"not {tuple(q.shape)} and {tuple(k.shape)}"
        )
    corner = _corner(op, causal, q, k)
    bool_mask, bias, bias2 = _mask_and_biases(op, mask, bias)
    Hq, Lq = q.shape[-3], q.shape[-2]
    alibi_slopes, sinks = _no_gradient(op, alibi_slopes), _float_tensor(op, "sinks", sinks)
    positions: Tensor | None = None
    if heads is not None:
        index = _indices(op, "heads", heads, Hq)
        if Hq % max(k.shape[-3], 1):
            raise ValueError(f"attn_ext.{op}: {Hq} heads of q must be a multiple of the {k.shape[-3]} of k")
        k = k.index_select(-3, index // (Hq // k.shape[-3]))
        q = q.index_select(-3, index)
        bool_mask, bias, bias2 = (_select(t, -3, index) for t in (bool_mask, bias, bias2))
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.index_select(-1, index)
        sinks = None if sinks is None else sinks.index_select(-1, index)
    if rows is not None:
        positions = _indices(op, "rows", rows, Lq)
        q = q.index_select(-2, positions)
        bool_mask, bias, bias2 = (_select(t, -2, positions) for t in (bool_mask, bias, bias2))
    left, right = _window(op, window)
    options = _Options(
        mask=bool_mask,
        bias=bias,
        bias2=bias2,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=_lengths(op, key_lengths),
        causal=corner,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=float(softcap or 0.0),
    )
    _check_device(op, q, k)
    return _weights_of(q, k, options, None, None, positions, Lq)


# --- reading the arguments ---------------------------------------------------------------------------------------


def _expect_tensor(op: str, name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"attn_ext.{op}: {name} must be a tensor, not {type(t).__name__}")


def _common_dtype(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast says; raises TypeError where q, k, v do not share one supported dtype."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, t in (("q", q), ("k", k), ("v", v)):
            _expect_tensor(op, name, t)
    if _any_autocast() and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v)
        )
    dtype = q.dtype
    if not (dtype is k.dtype and dtype is v.dtype and dtype in _DTYPES):
        raise TypeError(
            f"attn_ext.{op}: q, k, v must have one dtype out of float32, bfloat16, float16 and float64, "
            f"not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    return q, k, v


def _check_device(op: str, *tensors: Tensor | None) -> None:
    """Raises ValueError for tensors on several devices, or on one that no kernel of this build takes."""
    device: torch.device | None = None
    for t in tensors:
        if t is None or t.device == device:
            continue
        if device is not None:
            raise ValueError(
                f"attn_ext.{op}: all tensors must be on one device, not on {device} and {t.device}"
            )
        device = t.device
        if device.type not in ("cpu", "meta"):
            raise ValueError(
                f"attn_ext.{op}: tensors on {device} came, but this build has kernels for the CPU only"
            )


def _corner(op: str, causal: bool | str, q: Tensor, k: Tensor) -> int:
    """The operators' number for the causal corner."""
    if causal is False or causal is None:
        return 0
    if causal is True:
        if q.dim() < 3 or k.dim() < 3:
            return 2  # the operator refuses the shape
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"attn_ext.{op}: causal=True needs as many queries as keys, not {q.shape[-2]} and {k.shape[-2]}; say "
                "causal='top_left' (query i sees keys up to i) or causal='bottom_right' (the last query sees all keys)"
            )
        return 2
    if isinstance(causal, str) and causal in _CORNERS:
        return _CORNERS[causal]
    raise ValueError(
        f"attn_ext.{op}: causal must be False, True, 'top_left' or 'bottom_right', not {causal!r}"
    )


def _window(op: str, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"attn_ext.{op}: window must be (left, right), not {window!r}") from None
    for side in (left, right):
        if side is not None and (isinstance(side, (bool, float)) or side < 0):
            raise ValueError(
                f"attn_ext.{op}: window sides must be integers of at least 0, or None for no bound, not {window!r}"
            )
    return left, right


def _mask_and_biases(
    op: str, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Splits a mask that is bool or float: (bool mask, bias, second bias)."""
    bias = _float_tensor(op, "bias", bias)
    if mask is None:
        return None, bias, None
    _expect_tensor(op, "mask", mask)
    if mask.dtype == torch.bool:
        return mask, bias, None
    if not mask.is_floating_point():
        raise TypeError(
            f"attn_ext.{op}: mask must be bool (True = attend) or float (added to the scores), not {mask.dtype}; "
            "mask.bool() makes one"
        )
    return (None, mask, None) if bias is None else (None, bias, mask)


def _float_tensor(op: str, name: str, t: Tensor | None) -> Tensor | None:
    if t is not None:
        _expect_tensor(op, name, t)
    if t is not None and t.dtype not in _DTYPES:
        hint = "; a bool one goes to mask" if t.dtype == torch.bool else ""
        raise TypeError(
            f"attn_ext.{op}: {name} must be float32, bfloat16, float16 or float64, not {t.dtype}{hint}"
        )
    return t


def _no_gradient(op: str, slopes: Tensor | None) -> Tensor | None:
    if slopes is not None:
        _expect_tensor(op, "alibi_slopes", slopes)
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"attn_ext.{op}: alibi_slopes have no gradient; pass alibi_slopes.detach(), or a learned bias"
        )
    return slopes


def _lengths(op: str, lengths: Tensor | None) -> Tensor | None:
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        came = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"attn_ext.{op}: key_lengths must be an int32 or int64 tensor, not {came}")
    return lengths.reshape(-1)


def _draw_seed(op: str, dropout_p: float, q: Tensor) -> Tensor | None:
    """The key of this call's dropout mask, from torch's generator, so that manual_seed and checkpoints hold."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attn_ext.{op}: dropout_p must lie between 0 and 1, not be {dropout_p}")
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device) if dropout_p else None


def _indices(op: str, name: str, index: Sequence[int] | Tensor, size: int) -> Tensor:
    """Indices below `size` as an int64 tensor, negative ones counted from the end."""
    if not isinstance(index, Tensor):
        numbers = [int(n) if isinstance(n, int) and not isinstance(n, bool) else None for n in index]
        if None in numbers:
            raise TypeError(f"attn_ext.{op}: {name} must be a list of integers, not {index!r}")
        bad = [n for n in numbers if n is not None and not -size <= n < size]
        if bad:
            raise IndexError(f"attn_ext.{op}: there are {size} {name}, so {bad[0]} is none of them")
        return torch.tensor([n % size for n in numbers if n is not None], dtype=torch.int64)
    if index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        raise TypeError(
            f"attn_ext.{op}: {name} must be 1-D of int32 or int64, not {index.dtype} {tuple(index.shape)}"
        )
    if not _compiling() and not _functorch_active():  # else index_select finds out
        outside = index[(index < -size) | (index >= size)]
        if outside.numel():
            raise IndexError(f"attn_ext.{op}: there are {size} {name}, so {int(outside[0])} is none of them")
    index = index.long()
    return torch.where(index < 0, index + size, index)


def _select(t: Tensor | None, dim: int, index: Tensor) -> Tensor | None:
    """Entries of a tensor that broadcasts: those of a dim of size 1 stand for all."""
    if t is None or t.dim() < -dim or t.shape[dim] == 1:
        return t
    return t.index_select(dim, index)


def _broadcast_leading(
    op: str, query: Tensor, key: Tensor, value: Tensor, own: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcasts all dims but the last `own` against one another, as views."""
    rank = max(query.dim(), key.dim(), value.dim(), own)
    padded = [t.reshape((1,) * (rank - t.dim()) + t.shape) for t in (query, key, value)]
    try:
        leading = torch.broadcast_shapes(*(t.shape[:-own] for t in padded))
    except RuntimeError:
        raise ValueError(
            f"attn_ext.{op}: the leading dims of query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} must broadcast" + ("" if own == 3 else " (heads too, without enable_gqa)")
        ) from None
    query, key, value = (t.expand(leading + t.shape[-own:]) for t in padded)
    return query, key, value


def _share_heads(op: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats key and value heads to those of the query, where the two have different numbers of them."""
    Hq = query.shape[-3]
    for name, t in (("key", key), ("value", value)):
        if t.shape[-3] == 0 or Hq % t.shape[-3]:
            raise ValueError(
                f"attn_ext.{op}: the {Hq} heads of query must be a multiple of the {t.shape[-3]} of {name}"
            )
    key, value = (t.repeat_interleave(Hq // t.shape[-3], -3) for t in (key, value))
    return key, value


# --- which road ---------------------------------------------------------------------------------------------------


def _differentiating(*tensors: Tensor | None) -> bool:
    """Whether reverse-mode, forward-mode or functorch follows one of the tensors."""
    if _grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return (
        not _compiling()
        and (_functorch_active() or forward_ad._current_level >= 0)
        and _transformed(*tensors)
    )


def _transformed(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD or a functorch transform (vmap, grad, jvp …) follows one of the tensors."""
    if _compiling():
        return False
    if _functorch_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: _Options, return_lse: bool, return_weights: bool
) -> Any:
    _check_device(op, q, k, v, *(t for t in options[:9]))
    learned = (q, k, v, options.bias, options.bias2, options.sinks)
    row_max = row_sum = None
    if _transformed(*learned):
        out, lse = _unfused(q, k, v, options)
    elif _compiling():
        out, lse, row_max, row_sum = _forward(q, k, v, *options)
    elif _differentiating(*learned):
        out, lse, row_max, row_sum = _Attention.apply(
            q, k, v, options.bias, options.bias2, options.sinks, options
        )
    else:
        out, lse, row_max, row_sum = _forward(q, k, v, *options)
    if not (return_lse or return_weights):
        return out
    result = [out, lse] if return_lse else [out]
    if return_weights:
        result.append(_weights_of(q, k, options, row_max, row_sum, None, q.shape[-2]))
    return tuple(result)


def _unfused(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Output and lse in plain PyTorch, differentiable any number of times and in both modes."""
    shared: dict[str, Any] = {
        "causal": _CORNER_NAMES[options.causal],
        "window": (options.window_left, options.window_right),
        "scale": options.scale,
        "softcap": options.softcap or None,
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        "dropout_p": options.dropout_p,
        "dropout_seed": options.dropout_seed,
        "return_lse": True,
    }
    if options.cu_seqlens_q is not None:
        return reference.attention_varlen(q, k, v, options.cu_seqlens_q, options.cu_seqlens_k, **shared)
    return reference.attention(
        q,
        k,
        v,
        mask=options.mask if options.bias2 is None else options.bias2,
        bias=options.bias,
        key_lengths=options.key_lengths,
        **shared,
    )


# --- gradients ----------------------------------------------------------------------------------------------------


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: _Options, output: tuple[Tensor, ...]) -> None:
    """Saves what the backward needs; tensors through autograd, so that in-place changes are noticed."""
    out, _, row_max, row_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, row_sum)  # the lse is what has a gradient
    ctx.save_for_backward(q, k, v, out, row_max, row_sum, *options[:9])
    ctx.numbers = options[9:]


def _gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, needs: Sequence[bool]
) -> list[Any]:
    """Gradients of (q, k, v, bias, bias2, sinks), None where not needed."""
    q, k, v, out, row_max, row_sum, *tensors = ctx.saved_tensors
    options = _Options(*tensors, *ctx.numbers)
    if grad_out is None and grad_lse is None:
        return [None] * 6
    if torch.is_grad_enabled() and not _compiling():  # create_graph: a derivative of this one may follow
        return _unfused_gradients(q, k, v, options, grad_out, grad_lse, needs)
    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    asked = sum(bit << n for n, bit in enumerate(needs))
    grads = _backward(grad_out, grad_lse, q, k, v, out, row_max, row_sum, *options, asked)
    return [g if needed else None for g, needed in zip(grads, needs, strict=True)]


def _unfused_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: _Options,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: Sequence[bool],
) -> list[Any]:
    """The same, as a differentiable function of the inputs and of the incoming gradients."""
    inputs = (q, k, v, options.bias, options.bias2, options.sinks)
    # Views, so that an input that came in twice is told apart.
    views = [t.view_as(t) if t is not None and needed else t for t, needed in zip(inputs, needs, strict=True)]
    q, k, v, bias, bias2, sinks = views
    pairs = zip(
        _unfused(q, k, v, options._replace(bias=bias, bias2=bias2, sinks=sinks)),
        (grad_out, grad_lse),
        strict=True,
    )
    outputs, incoming = zip(*((o, g) for o, g in pairs if g is not None), strict=True)
    wanted = [t for t, needed in zip(views, needs, strict=True) if needed]
    found = iter(torch.autograd.grad(outputs, wanted, incoming, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in needs]


class _Attention(torch.autograd.Function):
    """(q, k, v, bias, bias2, sinks) → (out, lse, row_max, row_sum)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, bias2: Any, sinks: Any, options: _Options
    ) -> Any:
        output = _forward(q, k, v, *options)
        _save(ctx, q, k, v, options, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        return (*_gradients(ctx, grads[0], grads[1], ctx.needs_input_grad[:6]), None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *rest = inputs
    _save(ctx, q, k, v, _Options(*rest), output)


def _registered_backward(ctx: Any, grad_out: Any, grad_lse: Any, grad_max: Any, grad_sum: Any) -> Any:
    needs = ctx.needs_input_grad
    q, k, v, bias, bias2, sinks = _gradients(
        ctx, grad_out, grad_lse, (*needs[:3], needs[4], needs[5], needs[7])
    )
    return (q, k, v, None, bias, bias2, None, sinks, *(None,) * 10)


torch.library.register_autograd(
    "attn_ext::attention_forward", _registered_backward, setup_context=_setup_context
)


class _Weights(torch.autograd.Function):
    """(q, k, bias, bias2, sinks) → weights; they are Lq × Lk anyway, so their gradient goes the plain way."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, bias: Any, bias2: Any, sinks: Any, options: _Options, *rest: Any
    ) -> Tensor:
        row_max, row_sum, positions, num_queries = rest
        ctx.save_for_backward(q, k, *options[:9], positions)
        ctx.numbers, ctx.num_queries = options[9:], num_queries
        return _weights(q, k, *options[:6], row_max, row_sum, positions, num_queries, *options[9:14])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, *tensors, positions = ctx.saved_tensors
        options = _Options(*tensors, *ctx.numbers)
        needs = ctx.needs_input_grad[:5]
        create_graph = torch.is_grad_enabled()
        inputs = (q, k, options.bias, options.bias2, options.sinks)
        with torch.enable_grad():
            views = [
                t
                if t is None or not needed
                else (t.view_as(t) if create_graph else t.detach().requires_grad_())
                for t, needed in zip(inputs, needs, strict=True)
            ]
            q, k, bias, bias2, sinks = views
            options = options._replace(bias=bias, bias2=bias2, sinks=sinks)
            weights = _unfused_weights(q, k, options, positions, ctx.num_queries)
            wanted = [t for t, needed in zip(views, needs, strict=True) if needed]
            found = iter(
                torch.autograd.grad(weights, wanted, grad, create_graph=create_graph, allow_unused=True)
            )
        return (*(next(found) if needed else None for needed in needs), *(None,) * 5)


def _weights_of(
    q: Tensor,
    k: Tensor,
    options: _Options,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    positions: Tensor | None,
    num_queries: int,
) -> Tensor:
    """The weights, from the saved statistics of a forward pass where there are some."""
    learned = (q, k, options.bias, options.bias2, options.sinks)
    if _transformed(*learned) or (_compiling() and _differentiating(*learned)):
        return _unfused_weights(q, k, options, positions, num_queries)
    if _differentiating(*learned):
        return _Weights.apply(*learned, options, row_max, row_sum, positions, num_queries)
    return _weights(q, k, *options[:6], row_max, row_sum, positions, num_queries, *options[9:14])


def _unfused_weights(
    q: Tensor, k: Tensor, options: _Options, positions: Tensor | None, num_queries: int
) -> Tensor:
    mask, bias = options.mask, options.bias
    if options.bias2 is not None:
        mask = options.bias2
    rows: dict[str, Any] = (
        {} if positions is None else {"row_positions": positions, "num_queries": num_queries}
    )
    return reference.attention_weights(
        q,
        k,
        mask=mask,
        bias=bias,
        causal=_CORNER_NAMES[options.causal],
        window=(options.window_left, options.window_right),
        scale=options.scale,
        softcap=options.softcap or None,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        key_lengths=options.key_lengths,
        **rows,
    )


# --- fake tensors: shapes, dtypes and strides without data ----------------------------------------------------------


def _empty_in_order_of(like: Tensor, width: Any) -> Tensor:
    """As csrc/attention.cpp does it: dense, the dims in memory in the order of like's, the last one `width` wide."""
    rank = like.dim()
    key: list[Any] = [0] * rank
    for d in reversed(range(rank)):
        tells = like.shape[d] > 1 and like.stride(d) != 0
        key[d] = like.stride(d) if tells else (key[d + 1] if d + 1 < rank else 0)
    order = sorted(range(rank), key=lambda d: key[d], reverse=True)  # stable
    sizes = [*like.shape[:-1], width]
    strides: list[Any] = [0] * rank
    stride: Any = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(sizes[d], 1)
    return like.new_empty_strided(sizes, strides)


def _statistics(q: Tensor, packed: bool) -> Tensor:
    sizes = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:-1])
    return q.new_empty(sizes, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check_fake(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the operators check of q, k, v, for those without data."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (3 <= q.dim() <= 5 and q.dim() == k.dim() == v.dim()):
        raise ValueError(f"attn_ext.{op}: q, k, v must have the same 3 to 5 dimensions, not {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attn_ext.{op}: q and k must have the same head dim: {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"attn_ext.{op}: k and v must have the same batch, heads and length: {shapes}")


@torch.library.register_fake("attn_ext::attention_inference")
def _fake_inference(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None) -> Tensor:
    _check_fake("attention_inference", q, k, v)
    return _empty_in_order_of(q, v.shape[-1])


@torch.library.register_fake("attn_ext::attention_forward")
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _check_fake("attention_forward", q, k, v)
    options = _Options(*rest)
    packed = options.cu_seqlens_q is not None
    target = (*q.shape[:-1], k.shape[-2])
    for name, t in (("mask", options.mask), ("bias", options.bias), ("bias", options.bias2)):
        if t is None:
            continue
        sizes = (1,) * (len(target) - t.dim()) + tuple(t.shape)
        if t.dim() > len(target) or any(a != b and a != 1 for a, b in zip(sizes, target, strict=False)):
            raise ValueError(
                f"attn_ext.attention_forward: {name} {tuple(t.shape)} must broadcast to {target}"
            )
    return (_empty_in_order_of(q, v.shape[-1]), *(_statistics(q, packed) for _ in range(3)))


@torch.library.register_fake("attn_ext::attention_backward")
def _fake_backward(
    grad_out: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    options, grads = _Options(*rest[3:-1]), rest[-1]
    learned = (q, k, v, options.bias, options.bias2, options.sinks)
    result = []
    for n, t in enumerate(learned):
        if not grads >> n & 1:
            result.append(q.new_empty((0,)))
        elif n < 3:
            result.append(_empty_in_order_of(t, t.shape[-1]))
        else:
            result.append(t.new_empty(t.shape))
    return tuple(result)


@torch.library.register_fake("attn_ext::attention_weights")
def _fake_weights(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], k.shape[-2]))
