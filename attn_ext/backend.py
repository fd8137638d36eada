"""Which instruction set (ISA) the CPU kernels run with.

The best one that the machine has is picked at the first use; the variable ATTN_EXT_ISA forces one.

amx_bf16 and avx512_bf16 multiply bf16 numbers in pairs, and are avx512 for every other dtype. By default amx_bf16 runs
wherever the CPU has tiles and Linux lets the process use them, else avx512_bf16 on AMD's CPUs; on others avx512 is
faster, and avx512_bf16 runs where it is asked for.

Linux lets a process use tiles on condition that the signal stacks (sigaltstack) of its threads have room for them, some
12 KB: where one has not, amx_bf16 is not available, and afterwards Linux refuses smaller ones. ATTN_EXT_ISA=avx512 asks
for no tiles.

    >>> attn_ext.backend.available()
    ('amx_bf16', 'avx512', 'avx512_bf16', 'avx2', 'scalar')
    >>> with attn_ext.backend.use("scalar"):
    ...     out = attn_ext.attention(q, k, v)
"""

from __future__ import annotations

from types import TracebackType

import torch

from attn_ext import _load
from attn_ext._load import _C

__all__ = ["active", "available", "check_cuda", "use"]

# What the kernels of csrc/cuda/checks.h can find wrong, by their numbers.
_FAULTS: dict[int, tuple[type[Exception], str]] = {
    1: (ValueError, "key_lengths must lie between 0 and the number of keys"),
    2: (ValueError, "cu_seqlens must start with 0, not fall, and end with the number of rows"),
    3: (ValueError, "row_positions must lie between 0 and the number of queries"),
    4: (ValueError, "cache_lengths must be at least 0"),
    5: (IndexError, "the tokens do not fit into the cache's capacity"),
    6: (
        ValueError,
        "the queries see keys that the ring has overwritten; give a window, or fewer tokens at a time",
    ),
    7: (IndexError, "block_table must name blocks of the pool for every position that is used"),
    8: (IndexError, "the rotary tables do not reach as far as the positions"),
    9: (IndexError, "queries begin before position 0, which rotary has no angle for"),
}


def active() -> str:
    """Name of the instruction set that runs now.

    Raises:
        ValueError: ATTN_EXT_ISA names one that does not exist or that this machine lacks.
    """
    return _C.active_isa()


def available() -> tuple[str, ...]:
    """Names of all instruction sets that were built and that this machine can run.

    The best one, which runs by default, comes first.
    """
    return tuple(isa["name"] for isa in _C.isas() if isa["compiled"] and isa["supported"])


def use(name: str) -> _Restore:
    """Run all further calls of this process with one instruction set.

    As a plain call it lasts; as `with use(name):` the set that was active comes back at the end of the block. Where
    ATTN_EXT_ISA names none that could be active, this is the way out: the choice then stays after the block too.

    Args:
        name: one of `available()`.

    Raises:
        ValueError: any other name; the message lists the choices.
    """
    choices = available()
    if name not in choices:
        why = next((f" ({isa['why_not']})" for isa in _C.isas() if isa["name"] == name), "")
        raise ValueError(
            f"unknown or unsupported instruction set {name!r}{why}; choose one of {', '.join(choices)}"
        )
    try:
        before: str | None = active()
    except ValueError:  # ATTN_EXT_ISA is wrong: nothing was active
        before = None
    _C.use_isa(name)
    return _Restore(before)


def check_cuda(device: torch.device | str | None = None) -> None:
    """Raise what calls on a GPU have found wrong since the last time, if anything. Waits for the current stream.

    Lengths, cu_seqlens and block tables that lie on a GPU are checked there, while the host runs on: a sequence for
    which they are wrong takes no part in its call (nothing is written to its cache, its output is 0), and this function
    tells. (The cache classes read their lengths before a call, which waits as well, and raise at once.)

    Args:
        device: which GPU; default the current one.

    Raises:
        ValueError, IndexError: as the same call on the CPU would have; the message names the kind of fault and the
            lowest number of a sequence that any call found wrong.
        RuntimeError: there are no CUDA kernels here; the message says why.
    """
    if _load.cuda_device_type is None:
        raise RuntimeError(f"attn_ext.backend.check_cuda: there are no CUDA kernels ({_load.why_no_cuda})")
    place = torch.empty(0, device=_load.cuda_device_type if device is None else device)
    found = int(torch.ops.attn_ext.take_fault(place))
    if found >= 0:
        kind, text = _FAULTS[found % 256]
        what = "row" if found % 256 == 3 else "sequence"
        raise kind(
            f"attn_ext: {what} {found // 256} of a call on {place.device}: {text} (what was wrong took no part)"
        )


class _Restore:
    """What `use` returns: leaving its `with` block puts the former instruction set back."""

    def __init__(self, before: str | None) -> None:
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            _C.use_isa(self._before)
