"""What the processes that `torchrun` started say to one another; one process alone says nothing.

with training_processes() as processes:
    losses = processes.mean([loss])
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Processes", "training_processes"]


@dataclass(frozen=True)
class Processes:
    """How many processes train together, and which one this is."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each value over all processes, the same in all of them to the last bit."""
        if self.count == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together)
        return (together / self.count).tolist()


@contextmanager
def training_processes() -> Iterator[Processes]:
    """Join the group that torchrun's variables (RANK, WORLD_SIZE, …) describe, on gloo; without them, be alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
