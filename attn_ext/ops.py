"""The functions of the package, from the front door to the operators.

`attention` reads its options, and then takes one of three roads:

- no gradient is asked for and nothing but a causal corner and a scale is set: the lean operator `attention_inference`;
- gradients in eager mode: an `autograd.Function` over `attention_forward` and `attention_backward`; under
  `torch.compile` and export the same two as registered operators;
- forward-mode AD, functorch transforms, second derivatives: `attn_ext.reference`, plain differentiable PyTorch.

Tensors on a GPU take the same roads. Lengths and cu_seqlens that lie there are checked there: what is wrong with them
is told by `backend.check_cuda`, not by the call.

The operators themselves, `torch.ops.attn_ext.*`, know no forward-mode AD, and only `attention_forward` has a gradient:
the functions here choose the road, a direct call of an operator does not.

Letters: B batch, Hq and Hkv heads, Lq and Lk lengths, D and Dv head dims (see README).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_ext import reference
from attn_ext._arguments import (
    CORNERS,
    Options,
    check_call,
    check_device,
    common_dtype,
    dual_numbers,
    expect_tensor,
    have_tangent,
    integer_tensor,
    named,
    number,
    read_corner,
    read_indices,
    read_options,
    readable,
    uncompiled,
)
from attn_ext._fake import empty_in_order_of
from attn_ext._load import _C  # noqa: F401  registers torch.ops.attn_ext

_CORNER_NAMES: dict[int, bool | str] = {0: False, **{n: name for name, n in CORNERS.items()}}
_PLAIN = (float, int)

# Looked up once: a small call takes a few microseconds in all.
_functorch_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling

_inference = torch.ops.attn_ext.attention_inference.default
_forward = torch.ops.attn_ext.attention_forward.default
_backward = torch.ops.attn_ext.attention_backward.default
_weights = torch.ops.attn_ext.attention_weights.default


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
        scale: default 1/√D. 0 and negative numbers are taken as they are. A plain number: tensors are refused, as
            their gradient would be lost; for a learned scale multiply q by it.
        softcap: scores become softcap·tanh(scores / softcap). None or 0 is off. A plain number likewise.
        alibi_slopes: float32 (Hq,) or (B, Hq): −slope·|distance| is added. No gradient.
        sinks: (Hq,) logits that join the softmax without a key or a value. Has a gradient.
        key_lengths: (B,) int32 or int64: keys at and past the length are hidden.
        dropout_p: drops weights after the softmax and scales the others by 1/(1 − p). The caller says when: pass 0
            in evaluation. p is rounded to a multiple of 1/65536: 0.999999 drops all weights.
        return_lse: also return the natural log-sum-exp of each row's scores.
        return_weights: also return the softmax probabilities before dropout.

    Returns:
        out (B, Hq, Lq, Dv) in the dtype of q and in q's memory order, or a tuple of out, lse (B, Hq, Lq) in float32
        (float64 for float64) and weights (B, Hq, Lq, Lk), as asked. A row that sees no key: 0, −inf, 0.

    Raises:
        TypeError: q, k, v of several or unknown dtypes; a mask, bias, sinks or key_lengths of another dtype than said
            above; a scale, softcap or dropout_p that is no plain number.
        ValueError: shapes, devices or options that do not fit; the message names what came and what was expected.
    """
    op = "attention"
    plain = (
        mask is None
        and bias is None
        and window is None
        and (softcap is None or (type(softcap) in _PLAIN and not softcap))
        and alibi_slopes is None
        and sinks is None
        and key_lengths is None
        and type(dropout_p) in _PLAIN
        and not dropout_p
        and not return_lse
        and not return_weights
    )
    q, k, v = common_dtype(op, q, k, v)
    if plain and not _differentiating(q, k, v):
        corner = 0 if causal is False else read_corner(op, causal, q, k)
        if scale is not None:
            scale = number(op, "scale", scale)
        if not (q.is_cpu and k.is_cpu and v.is_cpu):
            check_device(op, q, k, v)
        try:
            return _inference(q, k, v, corner, scale)
        except ValueError as error:
            raise named(op, error) from None

    options = read_options(
        op,
        q,
        k,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
        dropout_p=dropout_p,
    )
    return _run(op, q, k, v, options, return_lse, return_weights)


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
    causal = "top_left" if is_causal else False
    try:
        if (
            attn_mask is None
            and type(dropout_p) in _PLAIN
            and not dropout_p
            and isinstance(query, Tensor)
            and isinstance(key, Tensor)
            and isinstance(value, Tensor)
            and query.dim() == 4
            and query.shape[:2] == key.shape[:-2] == value.shape[:-2]
        ):  # the common call, unadorned
            return attention(query, key, value, causal=causal, scale=scale)
        query, key, value = _read_leading(op, query, key, value, enable_gqa)
        if attn_mask is not None:
            expect_tensor(op, "attn_mask", attn_mask)
        rest: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": dropout_p}
        if query.dim() == 2:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            return attention(query, key, value, mask=attn_mask, **rest).squeeze(0)
        if query.dim() <= 5:
            return attention(query, key, value, mask=attn_mask, **rest)
        return _many_batch_dims(op, query, key, value, attn_mask, rest)
    except (TypeError, ValueError) as error:
        raise named(op, error) from None


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
            sequence's own lengths. causal=True says that every sequence has as many queries as keys; where values
            cannot be compared (in compiled code, under vmap) it needs one tensor as both cu_seqlens.
        alibi_slopes: (Hq,) or (B, Hq).

    Returns:
        out (total, Hq, Dv), with return_lse also the lse (Hq, total). A row has the same bits as in a padded call.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    op = "attention_varlen"
    q, k, v = common_dtype(op, q, k, v)
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        integer_tensor(op, name, t)
    if causal is True:
        _expect_equal_lengths(op, cu_seqlens_q, cu_seqlens_k)
        causal = "bottom_right"
    options = read_options(
        op,
        q,
        k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
    )
    options = options._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
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
        rows: which queries: a sequence of integers, NumPy's and one-dimensional tensors included, in any order and
            also repeated; negative ones count from the end. Default all.
        heads: which query heads, likewise.
        mask, bias, causal, window, scale, softcap, alibi_slopes, sinks, key_lengths: as in `attention`.

    Returns:
        (B, heads, rows, Lk) in the dtype of q. Rows sum to 1 (less with a sink; 0 where none is seen). Differentiable.

    Raises:
        TypeError, ValueError: as `attention`; TypeError also for rows or heads that are no sequence of integers.
        IndexError: a row or head that is not there.
    """
    op = "attention_weights"
    q, k, _ = common_dtype(op, q, k, k)
    options = read_options(
        op,
        q,
        k,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_lengths=key_lengths,
    )
    check_device(op, q, k, *options.tensors)
    check_call(op, q, k, None, options)  # before the selection, which would hide what does not fit
    index = None if heads is None else read_indices(op, "heads", heads, q.shape[-3], q.device)
    positions = None if rows is None else read_indices(op, "rows", rows, q.shape[-2], q.device)
    return (uncompiled().chosen_weights if dual_numbers() else _chosen_weights)(
        q, k, options, index, positions
    )


# --- helpers of the functions above ---------------------------------------------------------------------------------


def _draw_seed(q: Tensor) -> Tensor:
    """The key of this call's dropout mask, from torch's generator, so that manual_seed and checkpoints hold."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)


def _expect_equal_lengths(op: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raises ValueError unless every sequence is known to have as many queries as keys."""
    if cu_seqlens_q is cu_seqlens_k:
        return
    corner = "say causal='top_left' or causal='bottom_right'"
    if _compiling() or not (readable(cu_seqlens_q) and readable(cu_seqlens_k)):
        raise ValueError(
            f"attn_ext.{op}: causal=True needs as many queries as keys in every sequence, and while compiling, "
            f"under vmap, on a GPU or without data the two cu_seqlens cannot be compared; pass one tensor as both, "
            f"or {corner}"
        )
    if cu_seqlens_q.tolist() != cu_seqlens_k.tolist():
        raise ValueError(
            f"attn_ext.{op}: causal=True needs as many queries as keys in every sequence; {corner}"
        )


def _chosen_weights(
    q: Tensor, k: Tensor, options: Options, heads: Tensor | None, rows: Tensor | None
) -> Tensor:
    """The weights of some query heads, each with the key head it reads, and of some queries; None is all."""
    num_queries = q.shape[-2]
    if heads is not None:
        shared_by = max(q.shape[-3] // max(k.shape[-3], 1), 1)
        k = k.index_select(-3, heads // shared_by)
        slopes, sinks = (
            None if t is None else t.index_select(-1, heads) for t in (options.alibi_slopes, options.sinks)
        )
        options = options._replace(alibi_slopes=slopes, sinks=sinks)
    for index, dim in ((heads, -3), (rows, -2)):
        if index is not None:
            q = q.index_select(dim, index)
            options = options._replace(
                mask=_select(options.mask, dim, index),
                bias=_select(options.bias, dim, index),
                bias2=_select(options.bias2, dim, index),
            )
    return _weights_of("attention_weights", q, k, options, None, None, rows, num_queries)


def _select(t: Tensor | None, dim: int, index: Tensor) -> Tensor | None:
    """Entries of a tensor that broadcasts: those of a dim of size 1 stand for all."""
    if t is None or t.dim() < -dim or t.shape[dim] == 1:
        return t
    return t.index_select(dim, index)


def _read_leading(
    op: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with equal leading dims and, but for query heads that share them, equal heads."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        expect_tensor(op, name, t)
        if t.dim() < 2:
            raise ValueError(f"attn_ext.{op}: {name} must be (…, L, D), not {tuple(t.shape)}")
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not (same or (enable_gqa and query.shape[:-3] == key.shape[:-3] == value.shape[:-3])):
        query, key, value = _broadcast_leading(op, query, key, value, 3 if enable_gqa else 2)
    if enable_gqa and query.dim() > 2 and key.shape[-3] != value.shape[-3]:
        key, value = _share_heads(op, query, key, value)
    return query, key, value


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


def _many_batch_dims(
    op: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    """Attention over three and more batch dims, as two: those in which the mask differs, and those that share it.

    So the mask is never copied for the batch entries that share it.
    """
    batch = query.shape[:-3]
    if mask is not None:
        full = (*batch, query.shape[-3], query.shape[-2], key.shape[-2])
        sizes = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
        if mask.dim() > len(full) or any(n != m and n != 1 for n, m in zip(sizes, full, strict=True)):
            raise ValueError(f"attn_ext.{op}: attn_mask {tuple(mask.shape)} must broadcast to {full}")
        mask = mask[(None,) * (len(full) - mask.dim())]
    differs = [d for d in range(len(batch)) if mask is not None and _differs_along(mask, d)]
    shared = [d for d in range(len(batch)) if d not in differs]
    two = [1, 1]
    for n, dims in enumerate((differs, shared)):
        for d in dims:
            two[n] = two[n] * batch[d]
    if mask is not None:
        for d in reversed(shared):
            mask = mask.select(d, 0)
        mask = mask.reshape(two[0], 1, *mask.shape[-3:])
    order = [*differs, *shared]
    query, key, value = (
        t.permute(*order, -3, -2, -1).reshape(*two, *t.shape[-3:]) for t in (query, key, value)
    )
    out = attention(query, key, value, mask=mask, **rest)
    out = out.reshape([batch[d] for d in order] + list(out.shape[-3:]))
    return out.permute([order.index(d) for d in range(len(batch))] + [-3, -2, -1])


def _differs_along(t: Tensor, dim: int) -> bool:
    """Whether a dim of a tensor can hold different values, being neither of size 1 nor expanded."""
    return t.shape[dim] != 1 and (t.stride(dim) != 0 or t.shape[dim] == 0)


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
    return (_functorch_active() or forward_ad._current_level >= 0) and _transformed(*tensors)


def _transformed(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD or a functorch transform (vmap, grad, jvp …) follows one of the tensors."""
    if (
        _functorch_active()
    ):  # also in a transform that is being compiled: dynamo answers this from what it traces
        return True
    if forward_ad._current_level < 0:
        return False
    return have_tangent(*tensors)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, return_weights: bool
) -> Any:
    check_device(op, q, k, v, *options.tensors)
    learned = (q, k, v, options.bias, options.bias2, options.sinks)
    if options.dropout_p:
        options = options._replace(dropout_seed=_draw_seed(q))
    row_max = row_sum = None
    try:
        if _transformed(*learned):
            check_call(op, q, k, v, options)
            out, lse = (uncompiled().unfused if dual_numbers() else _unfused)(q, k, v, options)
        elif _differentiating(*learned) and not _compiling():
            out, lse, row_max, row_sum = _Attention.apply(
                q, k, v, options.bias, options.bias2, options.sinks, options
            )
        else:
            out, lse, row_max, row_sum = _forward(q, k, v, *options)
    except ValueError as error:
        raise named(op, error) from None
    if not (return_lse or return_weights):
        return out
    result = [out, lse] if return_lse else [out]
    if return_weights:
        result.append(_weights_of(op, q, k, options, row_max, row_sum, None, q.shape[-2]))
    return tuple(result)


def _unfused(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
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


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options, output: tuple[Tensor, ...]) -> None:
    """Saves what the backward needs; tensors through autograd, so that in-place changes are noticed."""
    out, _, row_max, row_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, row_sum)  # the lse is what has a gradient
    ctx.save_for_backward(q, k, v, out, row_max, row_sum, *options.tensors)
    ctx.numbers = options[9:]


def _gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, needs: Sequence[bool]
) -> list[Any]:
    """Gradients of (q, k, v, bias, bias2, sinks), None where not needed."""
    q, k, v, out, row_max, row_sum, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.numbers)
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
    options: Options,
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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, bias2: Any, sinks: Any, options: Options
    ) -> Any:
        output = _forward(q, k, v, *options)
        _save(ctx, q, k, v, options, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        return (*_gradients(ctx, grads[0], grads[1], ctx.needs_input_grad[:6]), None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *rest = inputs
    _save(ctx, q, k, v, Options(*rest), output)


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
        ctx: Any, q: Tensor, k: Tensor, bias: Any, bias2: Any, sinks: Any, options: Options, *rest: Any
    ) -> Tensor:
        row_max, row_sum, positions, num_queries = rest
        ctx.save_for_backward(q, k, *options.tensors, positions)
        ctx.numbers, ctx.num_queries = options[9:], num_queries
        return _weights(q, k, *options[:6], row_max, row_sum, positions, num_queries, *options[9:14])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, *tensors, positions = ctx.saved_tensors
        options = Options(*tensors, *ctx.numbers)
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
    op: str,
    q: Tensor,
    k: Tensor,
    options: Options,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    positions: Tensor | None,
    num_queries: int,
) -> Tensor:
    """The weights, from the saved statistics of a forward pass where there are some."""
    learned = (q, k, options.bias, options.bias2, options.sinks)
    try:
        if _transformed(*learned) or (_compiling() and _differentiating(*learned)):
            unfused = uncompiled().unfused_weights if dual_numbers() else _unfused_weights
            return unfused(q, k, options, positions, num_queries)
        if _differentiating(*learned):
            return _Weights.apply(*learned, options, row_max, row_sum, positions, num_queries)
        return _weights(q, k, *options[:6], row_max, row_sum, positions, num_queries, *options[9:14])
    except ValueError as error:
        raise named(op, error) from None


def _unfused_weights(
    q: Tensor, k: Tensor, options: Options, positions: Tensor | None, num_queries: int
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


def _statistics(q: Tensor, packed: bool) -> Tensor:
    sizes = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:-1])
    return q.new_empty(sizes, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _check_statistics(op: str, q: Tensor, packed: bool, **tensors: Tensor | None) -> None:
    """One number of the right dtype for each row of q."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sizes = (q.shape[1], q.shape[0]) if packed else tuple(q.shape[:-1])
    for name, t in tensors.items():
        if t is not None and (tuple(t.shape) != sizes or t.dtype != dtype):
            raise ValueError(f"attn_ext.{op}: {name} must be {dtype} {sizes}, not {t.dtype} {tuple(t.shape)}")


@torch.library.register_fake("attn_ext::attention_inference")
def _fake_inference(q: Tensor, k: Tensor, v: Tensor, causal: int, scale: float | None) -> Tensor:
    op = "attention_inference"
    check_device(op, q, k, v)
    check_call(op, q, k, v, Options(causal=causal, scale=scale))
    return empty_in_order_of(q, v.shape[-1])


@torch.library.register_fake("attn_ext::attention_forward")
def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    op, options = "attention_forward", Options(*rest)
    check_device(op, q, k, v, *options.tensors)
    check_call(op, q, k, v, options)
    if options.dropout_p > 0 and options.dropout_seed is None:
        raise ValueError(f"attn_ext.{op}: dropout_p > 0 needs a dropout_seed")
    packed = options.cu_seqlens_q is not None
    return (empty_in_order_of(q, v.shape[-1]), *(_statistics(q, packed) for _ in range(3)))


@torch.library.register_fake("attn_ext::attention_backward")
def _fake_backward(
    grad_out: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    op = "attention_backward"
    (out, row_max, row_sum), options, grads = rest[:3], Options(*rest[3:-1]), rest[-1]
    check_device(op, q, k, v, grad_out, grad_lse, out, row_max, row_sum, *options.tensors)
    check_call(op, q, k, v, options)
    sizes = (*q.shape[:-1], v.shape[-1])
    for name, t in (("grad_out", grad_out), ("out", out)):
        if tuple(t.shape) != sizes or t.dtype != q.dtype:
            raise ValueError(
                f"attn_ext.{op}: {name} must be {q.dtype} {sizes}, not {t.dtype} {tuple(t.shape)}"
            )
    packed = options.cu_seqlens_q is not None
    _check_statistics(op, q, packed, grad_lse=grad_lse, row_max=row_max, row_sum=row_sum)
    learned = {"q": q, "k": k, "v": v, "bias": options.bias, "bias2": options.bias2, "sinks": options.sinks}
    if not 0 <= grads < 1 << len(learned):
        raise ValueError(f"attn_ext.{op}: grads must be a bit mask below 64, not {grads}")
    result = []
    for n, (name, t) in enumerate(learned.items()):
        if not grads >> n & 1:
            result.append(q.new_empty((0,)))
        elif t is None:
            raise ValueError(f"attn_ext.{op}: grads asks for the gradient of {name}, which is not given")
        elif n < 3:
            result.append(empty_in_order_of(t, t.shape[-1]))
        else:
            result.append(t.new_empty(t.shape))
    return tuple(result)


@torch.library.register_fake("attn_ext::attention_weights")
def _fake_weights(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    op = "attention_weights"
    (row_max, row_sum, positions, num_queries), numbers = rest[6:10], rest[10:]
    options = Options(*rest[:6], None, None, None, *numbers)
    check_device(op, q, k, *options.tensors, row_max, row_sum, positions)
    check_call(op, q, k, None, options)
    if (row_max is None) != (row_sum is None):
        raise ValueError(f"attn_ext.{op}: row_max and row_sum must be given together")
    _check_statistics(op, q, False, row_max=row_max, row_sum=row_sum)
    if positions is None:
        if num_queries != q.shape[-2]:
            raise ValueError(
                f"attn_ext.{op}: num_queries must be the {q.shape[-2]} rows of q where no row_positions are given, "
                f"not {num_queries}"
            )
    elif tuple(positions.shape) != (q.shape[-2],):
        raise ValueError(
            f"attn_ext.{op}: row_positions must have one entry for each of the {q.shape[-2]} rows of q, "
            f"not shape {tuple(positions.shape)}"
        )
    return q.new_empty((*q.shape[:-1], k.shape[-2]))
