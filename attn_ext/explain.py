"""Which kernel a call would use, how it is cut into tasks, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attn_ext import reference
from attn_ext._load import _C


@dataclass(frozen=True)
class Plan:
    """What `explain` found out. Print it, or read its fields."""

    kernel: str  #: forward kernel by name
    why: str  #: why that road and not another
    isa: str  #: instruction set that runs
    threads: int  #: threads the call would use
    tasks: int  #: pieces that the threads share
    rows_per_task: int  #: stacked rows of all query heads of one key/value head
    key_block: int  #: keys taken at once
    segments: int  #: > 1 where the keys of a row are split over tasks
    register_tile: str  #: rows × columns of one register tile
    flops: int  #: 2·(D + Dv) for each score that a query may see by position
    bytes: int  #: q, k, v and out, once
    scratch_bytes: int  #: beside inputs and outputs, all threads together

    def __str__(self) -> str:
        width = max(len(f.name) for f in fields(self))
        return "\n".join(f"{f.name:<{width}}  {self._text(f.name)}" for f in fields(self))

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        return f"{value:,}" if isinstance(value, int) else str(value)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    **options: Any,
) -> Plan:
    """Tells how `attention(q, k, v, …)` would run, without running it.

    Args:
        q: (B, Hq, Lq, D), or (Hq, Lq, D), or with two batch dims.
        k: (B, Hkv, Lk, D).
        v: (B, Hkv, Lk, Dv).
        causal, window, key_lengths: as in `attention`.
        **options: the other arguments of `attention`.

    Returns:
        A `Plan`.

    Raises:
        TypeError, ValueError: as `attention` for the same arguments.
    """
    from attn_ext.ops import _differentiating, attention

    with torch.no_grad():  # the front door's own checks, on no rows at all
        attention(
            q[..., :0, :],
            k,
            v,
            **{n: x for n, x in options.items() if n in ("scale", "softcap", "dropout_p")},
        )
    plan = _C.plan_forward(
        q.shape[:-3].numel(), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1],
        str(q.dtype).removeprefix("torch."), torch.get_num_threads(),
    )  # fmt: skip
    seen = reference.visible(q.shape[-2], k.shape[-2], causal=causal, window=window, key_lengths=key_lengths)
    heads = q.shape[:-2].numel()
    if seen is None:
        scores = heads * q.shape[-2] * k.shape[-2]
    else:
        scores = int(seen.sum()) * heads // (seen.shape[0] if seen.dim() > 2 else 1)
    learned = [
        t for t in (q, k, v, options.get("bias"), options.get("mask"), options.get("sinks")) if t is not None
    ]
    plain = not any(
        x is not None and x is not False and x != 0 for x in options.values() if not isinstance(x, Tensor)
    )
    plain = (
        plain
        and window is None
        and key_lengths is None
        and not any(isinstance(x, Tensor) for x in options.values())
    )
    if _differentiating(*learned):
        kernel, why = "attention_forward", "a gradient is asked for: row statistics are kept for the backward"
    elif plain:
        kernel, why = "attention_inference", "no gradient and no option beyond a corner and a scale"
    else:
        kernel, why = "attention_forward", "options beyond a corner and a scale are set"
    return Plan(
        kernel=kernel,
        why=why,
        isa=_C.active_isa(),
        flops=2 * scores * (q.shape[-1] + v.shape[-1]),
        bytes=sum(t.numel() * t.element_size() for t in (q, k, v))
        + q.shape[:-1].numel() * v.shape[-1] * q.element_size(),
        **plan,
    )
