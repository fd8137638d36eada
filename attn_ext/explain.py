"""Which kernel a call would use, how it is cut into tasks, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

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


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Plan:
    """Tells how `attention(q, k, v, **options)` would run, without running it.

    Args:
        q: (B, Hq, Lq, D), or (Hq, Lq, D), or with two batch dims.
        k: (B, Hkv, Lk, D).
        v: (B, Hkv, Lk, Dv).
        **options: the other arguments of `attention`.

    Returns:
        A `Plan`.

    Raises:
        TypeError, ValueError: as `attention` for the same arguments.
    """
    from attn_ext.ops import _differentiating, attention

    # The call itself, on tensors without data: all its checks and none of its work.
    without_data = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in options.items()}
    with torch.no_grad():
        attention(q.to("meta"), k.to("meta"), v.to("meta"), **without_data)

    given = {
        n: x
        for n, x in options.items()
        if isinstance(x, Tensor) or (x is not None and x is not False and x != 0)
    }
    if _differentiating(q, k, v, *(x for x in given.values() if isinstance(x, Tensor))):
        kernel, why = "attention_forward", "a gradient is asked for: row statistics are kept for the backward"
    elif given.keys() <= {"causal", "scale"}:
        kernel, why = "attention_inference", "no gradient and no option beyond a corner and a scale"
    else:
        kernel, why = "attention_forward", "set beyond a corner and a scale: " + ", ".join(sorted(given))
    plan = _C.plan_forward(
        q.shape[:-3].numel(), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1],
        str(q.dtype).removeprefix("torch."), torch.get_num_threads(),
    )  # fmt: skip
    out_bytes = q.shape[:-1].numel() * v.shape[-1] * q.element_size()
    return Plan(
        kernel=kernel,
        why=why,
        isa=_C.active_isa(),
        flops=2 * _visible_scores(q, k, **options) * (q.shape[-1] + v.shape[-1]),
        bytes=sum(t.numel() * t.element_size() for t in (q, k, v)) + out_bytes,
        **plan,
    )


def _visible_scores(
    q: Tensor,
    k: Tensor,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    **_: Any,
) -> int:
    """How many (query, key) pairs of all batch entries and heads may see one another by position."""
    Lq, Lk = q.shape[-2], k.shape[-2]
    batch, heads = q.shape[:-3].numel(), q.shape[-3]
    center = torch.arange(Lq) + (0 if causal == "top_left" else Lk - Lq)
    lengths = torch.full((batch,), Lk) if key_lengths is None else key_lengths.reshape(-1).cpu()
    left, right = window or (None, None)
    first = torch.zeros_like(center) if left is None else (center - left).clamp(min=0)
    end = lengths[:, None].expand(batch, Lq)
    if causal:
        end = torch.minimum(end, center + 1)
    if right is not None:
        end = torch.minimum(end, center + right + 1)
    return int((end - first).clamp(min=0).sum()) * heads
