"""How much memory there is: what is too large is refused before it is begun."""

from __future__ import annotations

import os
from pathlib import Path

from .common import UserError


def expect_room(what: str, needed: int) -> None:
    """Raise UserError where `needed` bytes are more than this machine, or the container, has available."""
    there = available()
    if there is not None and needed > there:
        raise UserError(f"{what} needs at least {needed:,} bytes of memory, and {there:,} are available.")


def available() -> int | None:
    """Bytes that a program could still get without swapping; None where the system does not say."""
    found = [room for room in (_of_the_machine(), _of_the_container()) if room is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return 1024 * int(value.split()[0])
        return None
    except OSError:  # no Linux: all there is, which is better than nothing
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None


def _of_the_container() -> int | None:
    """What is left of a limit of cgroup v2. Files that the system only keeps in case they are read again are free."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text(), int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit ("max"), or none to be seen
        return None
