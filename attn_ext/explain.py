"""Which kernel a call would use, how it is cut into tasks, and what it costs."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attn_ext._arguments import (
    CORNERS,
    Options,
    check_call,
    check_device,
    common_dtype,
    read_options,
    readable,
)
from attn_ext._load import _C, cuda_device_type, cuda_kernels
from attn_ext.ops import _differentiating, _transformed, attention


class _Printed:
    """A dataclass that prints as a table of its fields."""

    def __str__(self) -> str:
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        width = max(map(len, names))
        return "\n".join(f"{name:<{width}}  {_text(getattr(self, name))}" for name in names)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Plan(_Printed):
    """What `explain` found out of a call on the CPU. Print it, or read its fields."""

    kernel: str  #: forward kernel by name, or "reference"
    why: str  #: why that road and not another
    isa: str  #: instruction set that runs
    threads: int  #: threads the call would use
    tasks: int  #: pieces that the threads share
    rows_per_task: int  #: stacked rows of all query heads of one key/value head
    key_block: int  #: keys taken at once
    segments: int  #: > 1 where the keys of a row are split over tasks
    register_tile: str  #: rows × columns of one register tile
    arithmetic: str  #: what is multiplied, and in which format products are summed
    flops: int  #: 2·(D + Dv) for each score that a query may see by position, where lengths can be read
    bytes: int  #: q, k, v and out, once
    scratch_bytes: int  #: at most, beside inputs and outputs, all threads together


@dataclass(frozen=True)
class Launch:
    """A kernel that a call on a GPU launches."""

    kernel: str
    blocks: int
    threads: int  #: of a block
    shared_bytes: int  #: shared memory of a block

    def __str__(self) -> str:
        blocks = f"{self.blocks:,} {'block' if self.blocks == 1 else 'blocks'} of {self.threads} threads"
        return f"{self.kernel}, {blocks} and {self.shared_bytes:,} bytes of shared memory"


@dataclass(frozen=True)
class CudaPlan(_Printed):
    """What `explain` found out of a call on a GPU. Print it, or read its fields."""

    kernel: str  #: the forward kernel, "reference", or "none" where there is nothing to compute
    why: str  #: why this kernel and not another
    device: str  #: where it would run
    operator: str  #: operator that is called, and why that one
    columns: int  #: head dim that the kernel is compiled for (forward_general: columns of the output at once)
    tile_rows: int  #: stacked rows of all query heads of one key/value head that a block computes
    tile_keys: int  #: keys that it takes at once
    shared_bytes_to_have: int  #: shared memory that a block can have on this device
    launches: tuple[Launch, ...]  #: of forward kernels, in order; not those that check lengths on the way
    flops: int  #: 2·(D + Dv) for each score that a query may see by position, where lengths can be read
    bytes: int  #: q, k, v and out, once


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Plan | CudaPlan:
    """Tells how `attention(q, k, v, **options)` would run, without running it.

    Under vmap, grad or jvp and for dual tensors plain PyTorch computes: the kernel is then "reference", the sizes of
    tasks and tiles are 0, and shapes and counts are those of one example.

    Args:
        q: (B, Hq, Lq, D), or (Hq, Lq, D), or with two batch dims.
        k: (B, Hkv, Lk, D).
        v: (B, Hkv, Lk, Dv).
        **options: the other arguments of `attention`.

    Returns:
        A `Plan`; for tensors on a GPU a `CudaPlan`.

    Raises:
        TypeError, ValueError: as `attention` for the same arguments.
    """
    op = "explain"
    call = inspect.signature(attention).bind(q, k, v, **options)
    q, k, v = common_dtype(op, q, k, v)
    others = {n: x for n, x in call.arguments.items() if n not in ("q", "k", "v")}
    read = read_options(
        op, q, k, **{n: x for n, x in others.items() if n not in ("return_lse", "return_weights")}
    )
    check_device(op, q, k, v, *read.tensors)
    check_call(op, q, k, v, read)
    given = {
        n: x
        for n, x in others.items()
        if isinstance(x, Tensor) or (x is not None and x is not False and x != 0)
    }

    learned = (q, k, v, read.bias, read.bias2, read.sinks)
    flops = 2 * _visible_scores(q, k, read) * (q.shape[-1] + v.shape[-1])
    out_bytes = q.shape[:-1].numel() * v.shape[-1] * q.element_size()
    costs = {"flops": flops, "bytes": sum(t.numel() * t.element_size() for t in (q, k, v)) + out_bytes}
    transformed = _transformed(*learned)
    if transformed:
        kernel, why = (
            "reference",
            "a functorch transform or forward-mode AD follows: plain PyTorch, which keeps all scores",
        )
    elif _differentiating(*learned):
        kernel, why = "attention_forward", "a gradient is asked for: row statistics are kept for the backward"
    elif given.keys() <= {"causal", "scale"}:
        kernel, why = "attention_inference", "no gradient and no option beyond a corner and a scale"
    else:
        kernel, why = "attention_forward", "set beyond a corner and a scale: " + ", ".join(sorted(given))
    if cuda_kernels is not None and q.device.type == cuda_device_type:
        return _on_cuda(q, k, v, kernel, why, costs)
    if transformed:
        scores = q.shape[:-1].numel() * k.shape[-2]
        return Plan(
            kernel=kernel,
            why=why,
            isa="none",
            threads=torch.get_num_threads(),
            tasks=0,
            rows_per_task=0,
            key_block=0,
            segments=0,
            register_tile="none",
            arithmetic="PyTorch's",
            scratch_bytes=scores * max(q.element_size(), 4),
            **costs,
        )
    plan = _C.plan_forward(*_sizes(q, k, v), torch.get_num_threads())
    return Plan(kernel=kernel, why=why, isa=_C.active_isa(), **costs, **plan)


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, operator: str, why: str, costs: dict[str, int]) -> CudaPlan:
    """The plan of a call of `operator` on a GPU, which was chosen for the reason `why`."""
    assert cuda_kernels is not None
    on_gpu = q.device.type == "cuda"
    with torch.cuda.device(q.device) if on_gpu else nullcontext():
        plan = cuda_kernels.plan_cuda_forward(*_sizes(q, k, v))
    if operator == "reference":
        kernel = operator
        plan |= {"why": why, "columns": 0, "tile_rows": 0, "tile_keys": 0, "launches": []}
    else:
        kernel = plan["launches"][0][0] if plan["launches"] else "none"
    plan["launches"] = tuple(Launch(*launch) for launch in plan["launches"])
    return CudaPlan(
        kernel=kernel,
        device=torch.cuda.get_device_name(q.device) if on_gpu else "simulator",
        operator=f"{operator}: {why}",
        **costs,
        **plan,
    )


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int | str, ...]:
    """B, Hq, Hkv, Lq, Lk, D, Dv and the dtype's name, as the functions that plan take them."""
    return (
        q.shape[:-3].numel(), q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1],
        str(q.dtype).removeprefix("torch."),
    )  # fmt: skip


def _visible_scores(q: Tensor, k: Tensor, options: Options) -> int:
    """How many (query, key) pairs of all batch entries and heads may see one another by position."""
    Lq, Lk = q.shape[-2], k.shape[-2]
    batch, heads = q.shape[:-3].numel(), q.shape[-3]
    center = torch.arange(Lq) + (0 if options.causal == CORNERS["top_left"] else Lk - Lq)
    lengths = torch.full((batch,), Lk)
    if options.key_lengths is not None and readable(options.key_lengths):
        lengths = torch.tensor(options.key_lengths.tolist(), dtype=torch.int64)
    first = torch.zeros_like(center)
    if options.window_left is not None:
        first = (center - options.window_left).clamp(min=0)
    end = lengths[:, None].expand(batch, Lq)
    if options.causal:
        end = torch.minimum(end, center + 1)
    if options.window_right is not None:
        end = torch.minimum(end, center + options.window_right + 1)
    return int((end - first).clamp(min=0).sum()) * heads
