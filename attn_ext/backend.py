"""Which instruction set (ISA) the CPU kernels run with.

The best one that the machine has is picked at the first use; the variable ATTN_EXT_ISA forces one.

    >>> attn_ext.backend.available()
    ('avx512', 'avx2', 'scalar')
    >>> with attn_ext.backend.use("scalar"):
    ...     out = attn_ext.attention(q, k, v)
"""

from __future__ import annotations

from types import TracebackType

from attn_ext._load import _C

__all__ = ["active", "available", "use"]


def active() -> str:
    """Name of the instruction set that runs now.

    Raises:
        ValueError: ATTN_EXT_ISA names one that does not exist or that this machine lacks.
    """
    return _C.active_isa()


def available() -> tuple[str, ...]:
    """Names of all instruction sets that were built and that this machine can run, the best first."""
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
        raise ValueError(
            f"unknown or unsupported instruction set {name!r}; choose one of {', '.join(choices)}"
        )
    try:
        before: str | None = active()
    except ValueError:  # ATTN_EXT_ISA is wrong: nothing was active
        before = None
    _C.use_isa(name)
    return _Restore(before)


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
