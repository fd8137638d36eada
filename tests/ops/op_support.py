"""What the op tests share: input makers, the options table, a scalar-loop attention, and the accuracy rule.

The truth is `attn_ext.reference`; `naive_attention` below is written from the formula alone, in plain Python loops, so
that the reference is itself checked against something that shares no code with it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPE_IDS = ("float32", "bfloat16", "float16", "float64")


def available_isas() -> list[str]:
    """Names of the instruction sets to test: what ATTN_EXT_ISA names, or all that this machine has, best first."""
    forced = os.environ.get("ATTN_EXT_ISA")
    if forced:
        return [forced]
    import attn_ext

    return list(attn_ext.backend.available())


# ---------------------------------------------------------------------------------------------- accuracy rule


def assert_close_to_reference(
    actual: Tensor,
    reference64: Tensor,
    plain: Tensor,
    *,
    factor: float = 2.0,
    atol: float | None = None,
    rounding: float = 0.0,
    what: str = "output",
) -> None:
    """Compare with fp64 truth, allowing a small multiple of the error plain PyTorch makes in the same dtype.

    The rule: max|actual - reference64| <= factor * max|plain - reference64| + atol, with infinities and NaN in the same
    places and atol 1e-5 (1e-10 in float64, or nothing would be left to test).

    Args:
        actual: what the op returned, any floating dtype.
        reference64: the same computation done in float64.
        plain: the same computation done by plain PyTorch in the dtype of the inputs.
        factor: how many times plain PyTorch's error is allowed (gradients: see `assert_grads_close_to_reference`).
        atol: absolute allowance; by default 1e-5, or 1e-10 for float64.
        rounding: least error to allow plain PyTorch: on a handful of numbers it can be right by luck.
        what: name for the message.
    """
    assert actual.shape == reference64.shape, (
        f"{what}: shape {tuple(actual.shape)}, not {tuple(reference64.shape)}"
    )
    if actual.numel() == 0:
        return
    got, truth, yardstick = actual.detach().double(), reference64.detach().double(), plain.detach().double()
    if atol is None:
        atol = 1e-10 if actual.dtype == torch.float64 else 1e-5
    special = ~torch.isfinite(truth)
    same_special = torch.equal(
        torch.nan_to_num(got[special], nan=7.0), torch.nan_to_num(truth[special], nan=7.0)
    )
    assert same_special, f"{what}: not the same NaN or infinite values as the reference"
    assert torch.isfinite(got[~special]).all(), f"{what}: NaN or infinity where the reference is finite"
    # Where plain PyTorch overflowed and the truth is finite, the rounding of the true result is the yardstick.
    rounded = truth.to(actual.dtype).double()
    yardstick = torch.where(torch.isfinite(yardstick), yardstick, rounded)
    plain_error = torch.maximum((yardstick - truth).abs(), (rounded - truth).abs())
    allowed = factor * max(rounding, torch.where(special, 0.0, plain_error).max().item()) + atol
    error = torch.where(special, 0.0, (got - truth).abs())
    worst = error.max().item()
    assert worst <= allowed, (
        f"{what}: error {worst:.3g} at {tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))}, "
        f"allowed {allowed:.3g} ({factor:g} x plain PyTorch's + {atol:g})"
    )


def assert_grads_close_to_reference(
    actual: dict[str, Tensor], reference64: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """The same rule for gradients by name: three times plain PyTorch's error, + 1e-4.

    Half an ulp of `dtype`, that of q, k and v, at the largest gradient counts as the least error of plain PyTorch: what
    is saved for the backward is rounded to it once, and that reaches the gradients of fp32 biases and sinks too. And
    since delta is the sum of Dv products with the rounded output, √Dv of them.
    """
    assert actual.keys() == reference64.keys()
    sizes = [x[torch.isfinite(x)].abs().max().item() for x in reference64.values() if torch.isfinite(x).any()]
    head_dim_v = reference64["v"].shape[-1] if "v" in reference64 else 1
    rounding = torch.finfo(dtype).eps / 2 * max(head_dim_v, 1) ** 0.5 * max(sizes, default=0.0)
    for name in actual:
        assert_close_to_reference(
            actual[name],
            reference64[name],
            plain[name],
            factor=3.0,
            atol=1e-10 if dtype == torch.float64 else 1e-4,
            rounding=rounding,
            what=f"gradient of {name}",
        )


# ----------------------------------------------------------------------------------------------------- inputs

LAYOUTS = ("contiguous", "tokens_first", "fused_qkv", "stepped", "features_first", "odd_offset")


def make(
    shape: Iterable[int], dtype: torch.dtype = torch.float32, layout: str = "contiguous", seed: int = 0
) -> Tensor:
    """Random normal values of a shape, in one of the memory layouts users hand to attention.

    contiguous; tokens_first: a (B, L, H, D) tensor seen transposed; fused_qkv: one third of a fused projection;
    stepped: every second element of the last dim; features_first: the last two dims swapped in memory;
    odd_offset: starts one element into its storage, with rows one element longer than needed (never aligned).
    """
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed * 7919 + sum((i + 1) * n for i, n in enumerate(shape)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "contiguous" or len(shape) < 3:
        return values
    *batch, heads, length, dim = shape
    if layout == "tokens_first":
        holder = torch.empty(*batch, length, heads, dim, dtype=dtype).transpose(-3, -2)
    elif layout == "fused_qkv":
        holder = torch.full((*batch, length, 3, heads, dim), float("nan"), dtype=dtype)
        holder = holder.select(-3, 1).transpose(-3, -2)
    elif layout == "stepped":
        holder = torch.full((*batch, heads, length, 2 * dim), float("nan"), dtype=dtype)[..., ::2]
    elif layout == "features_first":
        holder = torch.empty(*batch, heads, dim, length, dtype=dtype).transpose(-1, -2)
    elif layout == "odd_offset":
        rows = math.prod(batch) * heads * length
        holder = torch.full((rows * (dim + 1) + 1,), float("nan"), dtype=dtype)[1:]
        holder = holder.view(*batch, heads, length, dim + 1)[..., :dim]
    else:
        raise ValueError(f"unknown layout {layout!r}")
    holder.copy_(values)
    return holder


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; `dv` is the width of the value heads."""

    b: int
    hq: int
    hkv: int
    lq: int
    lk: int
    d: int
    dv: int = 0

    def qkv(
        self, dtype: torch.dtype = torch.float32, layout: str = "contiguous"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Random q (B, Hq, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv)."""
        return (
            make((self.b, self.hq, self.lq, self.d), dtype, layout, seed=1),
            make((self.b, self.hkv, self.lk, self.d), dtype, layout, seed=2),
            make((self.b, self.hkv, self.lk, self.dv or self.d), dtype, layout, seed=3),
        )


def random_bool(*shape: int, keep: float = 0.6, seed: int = 4) -> Tensor:
    """A random keep-mask whose first key is always visible, so that no row is dead by accident."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) < keep
    if shape and shape[-1]:
        mask[..., 0] = True
    return mask


def dead_row_mask(s: Shape) -> Tensor:
    """A (B, Hq, Lq, Lk) keep-mask whose first and every third row after it sees no key at all."""
    mask = random_bool(s.b, s.hq, s.lq, s.lk)
    mask[..., ::3, :] = False
    return mask


def some_lengths(s: Shape) -> Tensor:
    """Key lengths (B,) between 0 and Lk, the first full and the second 0."""
    lengths = [(s.lk, 0, (s.lk + 1) // 2, s.lk - 1)[i % 4] for i in range(s.b)]
    return torch.tensor(lengths, dtype=torch.int64)


# Every option on its own, then the combinations that meet inside a kernel. Floats are drawn in fp32 whatever q's dtype.
OPTIONS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "plain": lambda s: {},
    "causal top-left": lambda s: {"causal": "top_left"},
    "causal bottom-right": lambda s: {"causal": "bottom_right"},
    "bool mask": lambda s: {"mask": random_bool(s.b, s.hq, s.lq, s.lk)},
    "bool mask with dead rows": lambda s: {"mask": dead_row_mask(s)},
    "padding mask": lambda s: {"mask": random_bool(s.b, 1, 1, s.lk)},
    "float mask": lambda s: {"mask": make((s.b, s.hq, s.lq, s.lk), seed=5)},
    "float mask of zero and -inf": lambda s: {
        "mask": torch.zeros(s.b, 1, s.lq, s.lk).masked_fill(~random_bool(s.b, 1, s.lq, s.lk), -math.inf)
    },
    "bias": lambda s: {"bias": make((s.b, s.hq, s.lq, s.lk), seed=6)},
    "broadcast bias": lambda s: {"bias": make((1, s.hq, s.lq, s.lk), seed=6)},
    "float mask and bias": lambda s: {
        "mask": make((s.b, 1, 1, s.lk), seed=5),
        "bias": make((s.hq, s.lq, s.lk), seed=6),
    },
    "bool mask and bias": lambda s: {"mask": random_bool(s.lq, s.lk), "bias": make((s.hq, 1, s.lk), seed=6)},
    "window both sides": lambda s: {"window": (2, 3)},
    "window left only": lambda s: {"window": (4, None)},
    "window right only": lambda s: {"window": (None, 1)},
    "window of the diagonal": lambda s: {"window": (0, 0)},
    "window under causal top-left": lambda s: {"window": (3, 1), "causal": "top_left"},
    "window under causal bottom-right": lambda s: {"window": (3, None), "causal": "bottom_right"},
    "softcap": lambda s: {"softcap": 1.5},
    "softcap and bias": lambda s: {"softcap": 1.5, "bias": make((s.lq, s.lk), seed=6)},
    "ALiBi": lambda s: {"alibi_slopes": torch.linspace(0.1, 0.7, s.hq)},
    "ALiBi per batch, causal": lambda s: {
        "alibi_slopes": torch.linspace(0.05, 0.7, s.b * s.hq).view(s.b, s.hq),
        "causal": "top_left",
    },
    "sinks": lambda s: {"sinks": torch.linspace(-1.0, 2.0, s.hq)},
    "sinks with dead rows": lambda s: {"sinks": torch.linspace(-1.0, 2.0, s.hq), "mask": dead_row_mask(s)},
    "key lengths": lambda s: {"key_lengths": some_lengths(s)},
    "key lengths under causal bottom-right": lambda s: {
        "key_lengths": some_lengths(s),
        "causal": "bottom_right",
    },
    "scale zero": lambda s: {"scale": 0.0},
    "scale negative": lambda s: {"scale": -0.7},
    "everything at once": lambda s: {
        "mask": random_bool(s.b, 1, s.lq, s.lk, keep=0.8),
        "bias": make((1, s.hq, s.lq, s.lk), seed=6),
        "causal": "bottom_right",
        "window": (40, 5),
        "scale": 0.3,
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.7, s.hq),
        "sinks": torch.linspace(-1.0, 2.0, s.hq),
        "key_lengths": some_lengths(s),
    },
}


def visible_keys(s: Shape, options: dict[str, Any]) -> Tensor:
    """Which key each row may see, (B, Hq, Lq, Lk) bool, by plain loops over the rules."""
    seen = torch.ones(s.b, s.hq, s.lq, s.lk, dtype=torch.bool)
    for part in (options.get("mask"), options.get("bias")):
        if part is not None:
            part = part if part.dtype == torch.bool else part != -math.inf
            seen &= part.expand(s.b, s.hq, s.lq, s.lk)
    causal, lengths = options.get("causal", False), options.get("key_lengths")
    left, right = options.get("window") or (None, None)
    for i in range(s.lq):
        at = i if causal == "top_left" else i + s.lk - s.lq
        for j in range(s.lk):
            hidden = (causal in ("top_left", "bottom_right") and j > at) or (causal is True and j > i)
            hidden = hidden or (left is not None and j < at - left) or (right is not None and j > at + right)
            if hidden:
                seen[:, :, i, j] = False
    if lengths is not None:
        for b, length in enumerate(lengths.tolist()):
            seen[b, :, :, length:] = False
    return seen


def naive_attention(
    s: Shape, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in Python floats, one row at a time: out (B, Hq, Lq, Dv), lse (B, Hq, Lq), weights (..., Lk)."""
    seen = visible_keys(s, options).tolist()
    shape = (s.b, s.hq, s.lq, s.lk)
    added = torch.zeros(shape, dtype=torch.float64)
    for part in (options.get("mask"), options.get("bias")):
        if part is not None and part.dtype != torch.bool:
            added = added + part.double()
    added = added.tolist()
    scale = options.get("scale")
    scale = 1.0 / math.sqrt(s.d) if scale is None else scale
    softcap, slopes, sinks = (options.get(name) for name in ("softcap", "alibi_slopes", "sinks"))
    qs, ks, vs = q.double().tolist(), k.double().tolist(), v.double().tolist()
    width = v.shape[-1]
    out = torch.zeros(s.b, s.hq, s.lq, width, dtype=torch.float64)
    lse = torch.full((s.b, s.hq, s.lq), -math.inf, dtype=torch.float64)
    weights = torch.zeros(shape, dtype=torch.float64)
    for b in range(s.b):
        for h in range(s.hq):
            kv = h // (s.hq // s.hkv)
            sink = [] if sinks is None else [float(sinks[h])]
            slope = 0.0
            if slopes is not None:
                slope = float(slopes[h] if slopes.dim() == 1 else slopes[b, h])
            for i in range(s.lq):
                at = i if options.get("causal", False) == "top_left" else i + s.lk - s.lq
                scores = {}
                for j in range(s.lk):
                    if not seen[b][h][i][j]:
                        continue
                    x = scale * sum(x * y for x, y in zip(qs[b][h][i], ks[b][kv][j], strict=True))
                    if softcap:
                        x = softcap * math.tanh(x / softcap)
                    scores[j] = x + added[b][h][i][j] - slope * abs(at - j)
                if not scores and not sink:
                    continue
                top = max([*scores.values(), *sink])
                total = sum(math.exp(x - top) for x in [*scores.values(), *sink])
                lse[b, h, i] = top + math.log(total)
                for j, x in scores.items():
                    weights[b, h, i, j] = math.exp(x - top) / total
                for d in range(width):
                    out[b, h, i, d] = sum(float(weights[b, h, i, j]) * vs[b][kv][j][d] for j in scores)
    return out, lse, weights


# ------------------------------------------------------------------------------------------------ comparisons


def reference_call(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], dtype: torch.dtype, **more: Any
) -> Any:
    """`attn_ext.reference.attention` with every step done in `dtype`: float64 for the truth, q's for plain PyTorch."""
    import attn_ext

    return attn_ext.reference.attention(q, k, v, **options, **more, dtype=dtype)


# The same inputs in another layout, or with another instruction set, have the same truth: it is computed once.
_KNOWN: OrderedDict[bytes, Any] = OrderedDict()


def remembered(key: Iterable[Any], compute: Callable[[], Any]) -> Any:
    """`compute()`, or what it gave before for the same key: tensors count by value and dtype, not by strides."""
    digest = hashlib.blake2b(digest_size=16)
    for item in key:
        if isinstance(item, Tensor):
            digest.update(repr((item.dtype, item.shape)).encode())
            digest.update(item.detach().double().numpy().tobytes())
        else:
            digest.update(repr(item).encode())
    name = digest.digest()
    if name not in _KNOWN:
        _KNOWN[name] = compute()
        if len(_KNOWN) > 1500:
            _KNOWN.popitem(last=False)
    return _KNOWN[name]


def option_key(options: dict[str, Any]) -> list[Any]:
    """Names and values of the options, one behind the other."""
    return [x for item in sorted(options.items()) for x in item]


def check_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    what: str = "output",
    attention: Callable[..., Any] | None = None,
) -> Tensor:
    """Call attention without gradients and hold output and lse against the reference; returns the output.

    `attention` is called in the place of `attn_ext.attention`, as it would be.
    """
    import attn_ext

    attention = attention or attn_ext.attention

    def expected() -> tuple[Tensor, ...]:
        truth = reference_call(q, k, v, options, torch.float64, return_lse=True)
        return (*truth, *reference_call(q, k, v, options, q.dtype, return_lse=True))

    with torch.no_grad():
        out, lse = attention(q, k, v, **options, return_lse=True)
        truth, truth_lse, plain, plain_lse = remembered(("forward", q, k, v, *option_key(options)), expected)
        assert out.dtype == q.dtype
        assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
        assert_close_to_reference(out, truth, plain, what=what)
        assert_close_to_reference(lse, truth_lse, plain_lse, what=f"lse of {what}")
        lean = attention(q, k, v, **options)
    same = torch.equal(torch.nan_to_num(lean), torch.nan_to_num(out))
    assert same, f"{what}: asking for the lse changed the output"
    return out


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Leaves over the same memory that want gradients; cast, so copied, where another dtype is given."""
    cast = {
        name: tensor.detach() if dtype is None else tensor.detach().to(dtype)
        for name, tensor in tensors.items()
    }
    return {name: tensor.requires_grad_(True) for name, tensor in cast.items()}


def gradients(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of `function(q, k, v, **options)` for every tensor named in `tensors`.

    `tensors` holds q, k, v and those differentiable options (mask, bias, sinks) that should get a gradient.
    """
    others = {name: value for name, value in tensors.items() if name not in ("q", "k", "v")}
    call = {**options, **others}
    out, lse = function(tensors["q"], tensors["k"], tensors["v"], **call, return_lse=True)
    roots, grads = [out], [grad_out.to(out.dtype)]
    if grad_lse is not None:
        roots.append(lse)
        grads.append(grad_lse.to(lse.dtype))
    names = [name for name, value in tensors.items() if value.requires_grad]
    found = torch.autograd.grad(roots, [tensors[name] for name in names], grads)
    return out, dict(zip(names, found, strict=True))


def check_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    *,
    wanted: Iterable[str] | None = None,
    grad_out: Tensor | None = None,
    with_lse: bool = False,
    attention: Callable[..., Any] | None = None,
) -> dict[str, Tensor]:
    """Hold the gradients of attention against the reference's and return them.

    Args:
        wanted: names among q, k, v, mask, bias, sinks; default: all that are floating point tensors here.
        grad_out: upstream gradient, any strides; random by default.
        with_lse: also send a gradient into the lse.
        attention: called in the place of `attn_ext.attention`, as it would be.
    """
    import attn_ext

    every: dict[str, Tensor] = {"q": q, "k": k, "v": v}
    for name in ("mask", "bias", "sinks"):
        value = options.get(name)
        if value is not None and value.is_floating_point():
            every[name] = value
    names = list(every) if wanted is None else list(wanted)
    if grad_out is None:
        grad_out = make((*q.shape[:-1], v.shape[-1]), q.dtype, seed=8)
    grad_lse = make(q.shape[:-1], torch.float32, seed=9) if with_lse else None

    def run(function: Callable[..., Any], dtype: torch.dtype | None) -> dict[str, Tensor]:
        tensors = leaves(every, dtype)
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in names)
        return gradients(function, tensors, options, grad_out, grad_lse)[1]

    actual = run(attention or attn_ext.attention, None)
    for name, grad in actual.items():
        assert grad.shape == every[name].shape, f"gradient of {name} has shape {tuple(grad.shape)}"
        assert grad.dtype == every[name].dtype, f"gradient of {name} has dtype {grad.dtype}"

    def expected() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        reference = attn_ext.reference.attention
        return (
            run(partial(reference, dtype=torch.float64), torch.float64),
            run(partial(reference, dtype=q.dtype), None),
        )

    key = ("backward", q, k, v, *option_key(options), names, grad_out, with_lse)
    assert_grads_close_to_reference(actual, *remembered(key, expected), q.dtype)
    return actual


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor, so that equality also tells -0 from 0 and NaN from NaN apart."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise equality; the message says how many elements differ and by how much."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    different = bits(actual) != bits(expected)
    if different.any():
        gap = (actual.double() - expected.double()).abs().max().item()
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, by up to {gap:.3g}"
        )


# ----------------------------------------------------------------------------------------- the ops themselves

MASKING: dict[str, Any] = {
    "mask": None,
    "bias": None,
    "bias2": None,
    "alibi_slopes": None,
    "sinks": None,
    "key_lengths": None,
    "causal": 0,
    "window_left": None,
    "window_right": None,
    "scale": None,
    "softcap": 0.0,
}
NEUTRAL: dict[str, Any] = {
    **MASKING,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "dropout_seed": None,
    "dropout_p": 0.0,
}


def raw_inference(q: Tensor, k: Tensor, v: Tensor, causal: int = 0, scale: float | None = None) -> Tensor:
    """`torch.ops.attn_ext.attention_inference`."""
    return torch.ops.attn_ext.attention_inference(q, k, v, causal, scale)


def raw_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch.ops.attn_ext.attention_forward`, every option neutral but those given: out, lse, row max, row sum."""
    return torch.ops.attn_ext.attention_forward(q, k, v, **{**NEUTRAL, **options})


def raw_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    grads: int = 7,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`torch.ops.attn_ext.attention_backward`; grads: 1 q, 2 k, 4 v, 8 bias, 16 bias2, 32 sinks."""
    return torch.ops.attn_ext.attention_backward(
        grad_out, grad_lse, q, k, v, out, row_max, row_sum, **{**NEUTRAL, **options}, grads=grads
    )


def raw_weights(
    q: Tensor, k: Tensor, row_positions: Tensor | None = None, num_queries: int | None = None, **options: Any
) -> Tensor:
    """`torch.ops.attn_ext.attention_weights` for the rows in q, which stand at row_positions of num_queries."""
    if num_queries is None:
        num_queries = q.shape[-2] if q.dim() > 1 else 1
    call = {**MASKING, "row_max": None, "row_sum": None, **options}
    return torch.ops.attn_ext.attention_weights(
        q, k, **call, row_positions=row_positions, num_queries=num_queries
    )
