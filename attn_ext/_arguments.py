"""Reading the arguments of a call: what came is brought into one form, or refused in one clear sentence.

The functions of `ops.py` and `cache_ops.py` read their arguments here. Shapes are then left to the kernels, which
check them at no cost that can be felt (`Call` in csrc/call.h); `check_call` is the same in Python, for calls that reach
no kernel: tensors without data, functorch and forward-mode AD, the reference, `explain`. Both say the same in the same
words: attn_ext.<function>: what was expected, and what came.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_ext._load import cuda_device_type, why_no_cuda

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
CORNERS = {"top_left": 1, "bottom_right": 2}

_LONGEST = 2**40  # a window that reaches further has no bound: no sequence is that long
_SYMBOLIC = (torch.SymInt, torch.SymFloat)  # numbers that only a trace knows, and that must stay symbols

# Looked up once: a small call takes a few microseconds in all.
_any_autocast = torch._C._is_any_autocast_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_functorch = torch._C._functorch
compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


class Options(NamedTuple):
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

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those of them that are tensors."""
        return self[:9]


def named(op: str, error: Exception) -> Exception:
    """The error in the name of the function that was called, not of what it called in turn."""
    _, found, text = str(error).partition(": ")
    return type(error)(f"attn_ext.{op}: {text}") if found and str(error).startswith("attn_ext.") else error


# --- one argument at a time ---------------------------------------------------------------------------------------


def read_options(
    op: str,
    q: Tensor,
    k: Tensor,
    *,
    causal: Any = False,
    mask: Any = None,
    bias: Any = None,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    key_lengths: Any = None,
    dropout_p: Any = 0.0,
) -> Options:
    """The options of a call in the form the operators take. What depends on the shapes is not looked at yet.

    Raises:
        TypeError: an argument of a wrong type, or a tensor of a wrong dtype.
        ValueError: a corner or a window that does not exist, a dropout_p outside [0, 1], slopes that want a gradient.
    """
    mask, bias, bias2 = _mask_and_biases(op, mask, bias)
    left, right = read_window(op, window)
    return Options(
        mask=mask,
        bias=bias,
        bias2=bias2,
        alibi_slopes=None if alibi_slopes is None else _without_gradient(op, alibi_slopes),
        sinks=None if sinks is None else _float_tensor(op, "sinks", sinks),
        key_lengths=None
        if key_lengths is None
        else integer_tensor(op, "key_lengths", key_lengths).reshape(-1),
        causal=read_corner(op, causal, q, k),
        window_left=left,
        window_right=right,
        scale=None if scale is None else number(op, "scale", scale),
        softcap=0.0 if softcap is None else number(op, "softcap", softcap),
        dropout_p=_probability(op, dropout_p),
    )


def expect_tensor(op: str, name: str, t: object) -> None:
    """Raises TypeError for anything else."""
    if not isinstance(t, Tensor):
        raise TypeError(f"attn_ext.{op}: {name} must be a tensor, not {type(t).__name__}")


def common_dtype(op: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast says; raises TypeError where q, k, v do not share one supported dtype."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, t in (("q", q), ("k", k), ("v", v)):
            expect_tensor(op, name, t)
    if _any_autocast():
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            cast = uncompiled().cast if dual_numbers() else _cast
            q, k, v = cast(torch.get_autocast_dtype(kind), q, k, v)
    dtype = q.dtype
    if not (dtype is k.dtype and dtype is v.dtype and dtype in FLOATS):
        _refuse_dtypes(op, q, k, v)
    return q, k, v


def _cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _refuse_dtypes(op: str, *tensors: Tensor) -> NoReturn:
    raise TypeError(
        f"attn_ext.{op}: q, k, v must have one dtype out of float32, bfloat16, float16 and float64, "
        f"not {', '.join(str(t.dtype) for t in tensors)}"
    )


def check_device(op: str, *tensors: Tensor | None) -> None:
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
        if device.type not in ("cpu", "meta", cuda_device_type):
            kernels = "the CPU and for CUDA only" if cuda_device_type == "cuda" else "the CPU only"
            why = f" (of those for CUDA: {why_no_cuda})" if device.type == "cuda" else ""
            raise ValueError(
                f"attn_ext.{op}: tensors on {device} came, but there are kernels for {kernels}{why}"
            )


def number(op: str, name: str, x: Any) -> float:
    """A plain number as a float. A tensor is refused: its gradient would be lost without a word."""
    if type(x) is float:
        return x
    if isinstance(x, Tensor):
        raise TypeError(
            f"attn_ext.{op}: {name} must be a plain number, not a tensor (it has no gradient); pass float({name})"
        )
    if isinstance(x, _SYMBOLIC):
        return x
    if not isinstance(x, numbers.Real):
        raise TypeError(f"attn_ext.{op}: {name} must be a number, not {x!r}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"attn_ext.{op}: {name} must fit into a float, and this integer is larger") from None


def _probability(op: str, p: Any) -> float:
    p = number(op, "dropout_p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"attn_ext.{op}: dropout_p must lie between 0 and 1, not be {p}")
    return p


def read_corner(op: str, causal: Any, q: Tensor, k: Tensor) -> int:
    """The operators' number for the causal corner."""
    if causal is False:
        return 0
    if causal is True:
        if q.dim() < 3 or k.dim() < 3:
            return 2  # the shape will be refused
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"attn_ext.{op}: causal=True needs as many queries as keys, not {q.shape[-2]} and {k.shape[-2]}; say "
                "causal='top_left' (query i sees keys up to i) or causal='bottom_right' (the last query sees all keys)"
            )
        return 2
    if isinstance(causal, str) and causal in CORNERS:
        return CORNERS[causal]
    raise ValueError(
        f"attn_ext.{op}: causal must be False, True, 'top_left' or 'bottom_right', not {causal!r}"
    )


def read_window(op: str, window: Any) -> tuple[int | None, int | None]:
    """(left, right) as plain integers, None where there is no bound."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"attn_ext.{op}: window must be (left, right), not {window!r}") from None
    return _window_side(op, left, window), _window_side(op, right, window)


def _window_side(op: str, side: Any, window: Any) -> int | None:
    if side is None:
        return None
    size = side if isinstance(side, torch.SymInt) else index_of(side)
    if size is None or size < 0:
        raise ValueError(
            f"attn_ext.{op}: window sides must be integers of at least 0, or None for no bound, not {window!r}"
        )
    return None if size > _LONGEST else size


def index_of(x: Any) -> int | None:
    """An integer of any type as an int, NumPy's too; None for bools and all that is no integer."""
    if isinstance(x, (bool, Tensor)):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def _mask_and_biases(
    op: str, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Splits a mask that is bool or float: (bool mask, bias, second bias)."""
    if bias is not None:
        bias = _float_tensor(op, "bias", bias)
    if mask is None:
        return None, bias, None
    expect_tensor(op, "mask", mask)
    if mask.dtype == torch.bool:
        return mask, bias, None
    if mask.dtype not in FLOATS:
        raise TypeError(
            f"attn_ext.{op}: mask must be bool (True = attend), or float32, bfloat16, float16 or float64 (added to the "
            f"scores), not {mask.dtype}; mask.bool() makes one of 0 and 1"
        )
    return (None, mask, None) if bias is None else (None, bias, mask)


def _float_tensor(op: str, name: str, t: Tensor) -> Tensor:
    expect_tensor(op, name, t)
    if t.dtype not in FLOATS:
        hint = "; a bool one goes to mask" if t.dtype == torch.bool else ""
        raise TypeError(
            f"attn_ext.{op}: {name} must be float32, bfloat16, float16 or float64, not {t.dtype}{hint}"
        )
    return t


def _without_gradient(op: str, slopes: Tensor) -> Tensor:
    expect_tensor(op, "alibi_slopes", slopes)
    if (slopes.requires_grad and torch.is_grad_enabled()) or have_tangent(slopes):
        raise ValueError(
            f"attn_ext.{op}: alibi_slopes have no gradient; pass alibi_slopes.detach(), or a learned bias"
        )
    return slopes


def integer_tensor(op: str, name: str, t: Any) -> Tensor:
    """Raises TypeError for all but tensors of int32 or int64."""
    if not isinstance(t, Tensor) or t.dtype not in INTEGERS:
        came = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"attn_ext.{op}: {name} must be a tensor of int32 or int64, not {came}")
    return t


def read_indices(op: str, name: str, index: Any, size: int, device: torch.device) -> Tensor:
    """Indices below `size` as an int64 tensor (n,), negative ones counted from the end.

    Raises:
        TypeError: neither a sequence of integers nor a one-dimensional tensor of them.
        IndexError: an index that is not there. Under vmap, on a GPU and while compiling the gather finds out.
    """
    if isinstance(index, Tensor):
        if index.dim() != 1 or index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
            raise TypeError(
                f"attn_ext.{op}: {name} must be one-dimensional and of integers, "
                f"not {index.dtype} {tuple(index.shape)}"
            )
        if index.device != device:
            raise ValueError(
                f"attn_ext.{op}: all tensors must be on one device, not on {device} and {index.device}"
            )
        index = index.long()
        if not compiling() and readable(index):
            _expect_inside(op, name, index.tolist(), size)
        return torch.where(index < 0, index + size, index)
    chosen = whole_numbers(op, name, index)
    _expect_inside(op, name, chosen, size)
    return torch.tensor([n % size for n in chosen], dtype=torch.int64, device=device)


def whole_numbers(op: str, name: str, sequence: Any) -> list[int]:
    """Raises TypeError for all but sequences of integers, NumPy's included."""
    try:
        found = [index_of(n) for n in sequence]
    except TypeError:  # one integer, a slice: nothing that can be gone through
        raise TypeError(
            f"attn_ext.{op}: {name} must be a sequence of integers, not {type(sequence).__name__}"
        ) from None
    chosen = [n for n in found if n is not None]
    if len(chosen) < len(found):
        raise TypeError(f"attn_ext.{op}: {name} must be a sequence of integers, not {sequence!r}")
    return chosen


def _expect_inside(op: str, name: str, index: Sequence[int], size: int) -> None:
    for n in index:
        if not -size <= n < size:
            raise IndexError(f"attn_ext.{op}: there are {size} {name}, so {n} is none of them")


# --- what may be known about a tensor -----------------------------------------------------------------------------


def dual_numbers() -> bool:
    """Whether forward-mode AD runs and no functorch transform does.

    Compiled code loses the tangents of dual tensors that come in from outside, without a word. What meets them is
    therefore called through `uncompiled()`: a break of the graph, or an error where none is allowed.
    """
    return forward_ad._current_level >= 0 and not _functorch_active()


def uncompiled() -> ModuleType:
    """`attn_ext._uncompiled`, imported here and not above: with it comes torch's compiler, which takes seconds."""
    from attn_ext import _uncompiled

    return _uncompiled


def have_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward-mode AD follows one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return (uncompiled().have_tangent if dual_numbers() else _have_tangent)(*tensors)


def _have_tangent(*tensors: Tensor | None) -> bool:
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def capturing(device: torch.device) -> bool:
    """Whether calls on this device are recorded in a CUDA graph now, and nothing is computed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def out_of_reach(device: torch.device) -> bool:
    """Whether no number can be read from tensors there: in compiled code, and while a CUDA graph is captured."""
    return compiling() or capturing(device)


def readable(t: Tensor) -> bool:
    """Whether the numbers in a tensor are at hand and are one for all: not without data, not batched by vmap.

    Nor on a GPU: whoever reads there waits for it. Its kernels check such numbers themselves (`backend.check_cuda`).

    While compiling they are not; callers ask for that themselves, as this function may be compiled on its own.
    """
    if type(t) is not Tensor or t.device.type != "cpu" or _dispatch_modes() > 0:
        return False
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            return False
        t = _functorch.get_unwrapped(t)
    return True


# --- the whole call -----------------------------------------------------------------------------------------------


def check_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    options: Options,
    slope_dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> None:
    """Raises ValueError where the parts of a call do not fit together, as the kernels do.

    Args:
        op: the function to name.
        q, k, v: as in `attention`, or packed where the options hold cu_seqlens; v is None where it is not needed.
        options: as the operators take them.
        slope_dtypes: what alibi_slopes may be; the reference takes more than the kernels.
    """
    packed = options.cu_seqlens_q is not None and options.cu_seqlens_k is not None
    batch = _check_shapes(op, q, k, v, packed)
    _check_numbers(op, options)
    if packed:
        if any(t is not None for t in (options.mask, options.bias, options.bias2, options.key_lengths)):
            raise ValueError(f"attn_ext.{op}: packed sequences take no mask, bias or key_lengths")
        batch = _check_packed(op, q, k, options)
    elif options.cu_seqlens_q is not None or options.cu_seqlens_k is not None:
        raise ValueError(f"attn_ext.{op}: cu_seqlens_q and cu_seqlens_k must be given together")
    target = (*q.shape[:-1], k.shape[-2])
    for name, t in (("mask", options.mask), ("bias", options.bias), ("bias", options.bias2)):
        if t is not None:
            _check_broadcast(op, name, t, target)
    heads = q.shape[-2] if packed else q.shape[-3]
    if options.alibi_slopes is not None:
        if options.alibi_slopes.dtype not in slope_dtypes:
            raise ValueError(f"attn_ext.{op}: alibi_slopes must be float32, not {options.alibi_slopes.dtype}")
        check_slopes(op, options.alibi_slopes, batch, heads)
    if options.sinks is not None:
        _float_tensor(op, "sinks", options.sinks)
        if options.sinks.dim() != 1 or options.sinks.shape[0] != heads:
            raise ValueError(
                f"attn_ext.{op}: sinks must be ({heads},), one logit a head, not {tuple(options.sinks.shape)}"
            )
    if options.key_lengths is not None:
        _check_lengths(op, options.key_lengths, batch, k.shape[-2])
    if options.dropout_seed is not None:
        seed = options.dropout_seed
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise ValueError(
                f"attn_ext.{op}: dropout_seed must be one int64 number, not {seed.dtype} {tuple(seed.shape)}"
            )


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor | None, packed: bool) -> int:
    """Checks q, k and v against one another; returns the number of batch entries."""

    def came() -> str:  # put together only where it is needed: a trace with sizes that are symbols cannot
        return ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip("qkv", tensors, strict=False))

    tensors = (q, k) if v is None else (q, k, v)
    if q.dtype not in FLOATS or any(t.dtype != q.dtype for t in tensors):
        _refuse_dtypes(op, *tensors)
    ranks = {t.dim() for t in tensors}
    if packed and ranks != {3}:
        raise ValueError(f"attn_ext.{op}: packed q, k, v must be (total, H, D), not {came()}")
    if not 3 <= q.dim() <= 5:
        raise ValueError(
            f"attn_ext.{op}: q, k, v must be (H, L, D), (B, H, L, D) or (B1, B2, H, L, D), not {came()}"
        )
    if len(ranks) > 1:
        raise ValueError(f"attn_ext.{op}: q, k, v must have the same number of dimensions, not {came()}")
    heads, length = (-2, -3) if packed else (-3, -2)
    if any(t.shape[:-3] != q.shape[:-3] for t in tensors):
        raise ValueError(f"attn_ext.{op}: q, k, v must have the same batch sizes, not {came()}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attn_ext.{op}: q and k must have the same head dim: {came()}")
    if q.shape[-1] == 0:
        raise ValueError(f"attn_ext.{op}: the head dim of q and k must be at least 1: {came()}")
    if v is not None and v.shape[heads] != k.shape[heads]:
        raise ValueError(f"attn_ext.{op}: k and v must have the same number of heads: {came()}")
    if v is not None and v.shape[length] != k.shape[length]:
        raise ValueError(f"attn_ext.{op}: k and v must have the same length: {came()}")
    Hq, Hkv = q.shape[heads], k.shape[heads]
    if (Hkv == 0 and Hq != 0) or (Hkv != 0 and Hq % Hkv != 0):
        raise ValueError(
            f"attn_ext.{op}: the {Hq} heads of q must be a multiple of the heads of k and v, which are {Hkv}: {came()}"
        )
    batch = 1
    for size in q.shape[:-3]:  # Size.numel() would make numbers of symbols
        batch = batch * size
    return batch


def _check_numbers(op: str, options: Options) -> None:
    if not 0 <= options.causal <= 2:
        raise ValueError(
            f"attn_ext.{op}: causal must be 0 (off), 1 (top-left) or 2 (bottom-right), not {options.causal}"
        )
    for name, side in (("window_left", options.window_left), ("window_right", options.window_right)):
        if side is not None and side < 0:
            raise ValueError(f"attn_ext.{op}: {name} must be at least 0, or None for no bound, not {side}")
    scale, softcap, p = options.scale, options.softcap, options.dropout_p
    # Comparisons, for they can be traced with symbols.
    if isinstance(scale, float) and not -math.inf < scale < math.inf:
        raise ValueError(f"attn_ext.{op}: scale must be finite, not {scale}")
    if isinstance(softcap, float) and not 0 <= softcap < math.inf:
        raise ValueError(f"attn_ext.{op}: softcap must be 0 (off) or a positive number, not {softcap}")
    if isinstance(p, float) and not 0 <= p <= 1:
        raise ValueError(f"attn_ext.{op}: dropout_p must lie between 0 and 1, not be {p}")


def _check_broadcast(op: str, name: str, t: Tensor, target: tuple[int, ...]) -> None:
    wanted = t.dtype == torch.bool if name == "mask" else t.dtype in FLOATS
    if not wanted:
        kind = "bool (True = attend)" if name == "mask" else "a float tensor"
        raise ValueError(f"attn_ext.{op}: {name} must be {kind}, not {t.dtype}")
    sizes = (1,) * (len(target) - t.dim()) + tuple(t.shape)
    if t.dim() > len(target) or any(n != m and n != 1 for n, m in zip(sizes, target, strict=True)):
        raise ValueError(f"attn_ext.{op}: {name} {tuple(t.shape)} must broadcast to {target}")


def check_slopes(op: str, slopes: Tensor, batch: int, heads: int) -> None:
    shape = tuple(slopes.shape)
    if shape != (heads,) and shape != (batch, heads):
        raise ValueError(
            f"attn_ext.{op}: alibi_slopes must be ({heads},) or ({batch}, {heads}), one slope a head, not {shape}"
        )


def _check_lengths(op: str, lengths: Tensor, batch: int, Lk: int) -> None:
    integer_tensor(op, "key_lengths", lengths)
    if lengths.dim() != 1 or lengths.shape[0] != batch:
        raise ValueError(
            f"attn_ext.{op}: key_lengths must have one entry for each of the {batch} batch entries, "
            f"not shape {tuple(lengths.shape)}"
        )
    if not compiling() and readable(lengths):
        for b, n in enumerate(lengths.tolist()):
            if not 0 <= n <= Lk:
                raise ValueError(
                    f"attn_ext.{op}: key_lengths[{b}] must lie between 0 and the {Lk} keys, not be {n}"
                )


def _check_packed(op: str, q: Tensor, k: Tensor, options: Options) -> int:
    """Checks both rows of boundaries; returns the number of sequences."""
    counts = []
    for name, cu, of, total in (
        ("cu_seqlens_q", options.cu_seqlens_q, "q", q.shape[0]),
        ("cu_seqlens_k", options.cu_seqlens_k, "k", k.shape[0]),
    ):
        cu = integer_tensor(op, name, cu)
        if cu.dim() != 1 or cu.shape[0] == 0:
            raise ValueError(
                f"attn_ext.{op}: {name} must have one dimension, and hold one more entry than sequences, "
                f"not shape {tuple(cu.shape)}"
            )
        if not compiling() and readable(cu):
            check_boundaries(op, name, cu.tolist(), of, total)
        counts.append(cu.shape[0] - 1)
    if counts[0] != counts[1]:
        raise ValueError(
            f"attn_ext.{op}: cu_seqlens_q and cu_seqlens_k must describe as many sequences, "
            f"not {counts[0]} and {counts[1]}"
        )
    return counts[0]


def check_boundaries(op: str, name: str, cu: Sequence[int], of: str, total: int) -> None:
    if cu[0] != 0:
        raise ValueError(f"attn_ext.{op}: {name} must start with 0, not with {cu[0]}")
    for b in range(1, len(cu)):
        if cu[b] < cu[b - 1]:
            raise ValueError(
                f"attn_ext.{op}: {name} must not fall, but entry {b} is {cu[b]} after {cu[b - 1]}"
            )
    if cu[-1] != total:
        raise ValueError(f"attn_ext.{op}: {name} must end with the {total} rows of {of}, not with {cu[-1]}")
