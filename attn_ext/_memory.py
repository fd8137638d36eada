"""How much memory there is: what is too large is refused before it is begun."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int | None:
    """Physical memory, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_bytes() -> int | None:
    """Memory that is free, or held by caches of files that would be dropped; None where the system does not say.

    Inside a container it is no more than its limit leaves.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return memory_bytes()
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        files = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    except (OSError, StopIteration):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + files))
