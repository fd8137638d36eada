"""Where the CUDA tests run: a GPU, or the simulator, to which tensors on the CPU are the device's.

Tests make tensors on the host, compare on the host, and call by `carried` functions: those take a copy of the memory of
their arguments to the device (strides, offsets and what two tensors share are kept), bring results back, and gradients
as well, and store in the host's tensors what the call has written into the device's. The same is done for the
simulator, so that what a GPU will run is what runs everywhere. `OnlyOnTheDevice` sees to it that no test calls an
operator with the host's tensors: on a machine with a GPU it would test the CPU's kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIMULATED = os.environ.get("ATTN_EXT_CUDA_SIM") == "1"


def _device() -> str | None:
    """Where the tensors of the CUDA kernels live; None where there are none."""
    if not (SIMULATED or torch.cuda.is_available()):
        return None
    from attn_ext import _load

    return _load.cuda_device_type


DEVICE = _device()

Result = TypeVar("Result")
_calls = 0  # carried calls that run now


class _ToDevice(torch.autograd.Function):
    """The device's copy of a tensor, made beforehand; its gradient goes back to the host."""

    @staticmethod
    def forward(ctx: Any, _host: Tensor, there: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return there.view_as(there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else grad.cpu(), None


class Carrier:
    """Takes tensors to the device, each memory once, and brings back what has become of it."""

    def __init__(self) -> None:
        self._memory: dict[
            int, tuple[torch.UntypedStorage, torch.UntypedStorage]
        ] = {}  # the host's, the device's
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # so that one tensor given twice stays one

    def take(self, value: Any) -> Any:
        """`value` with every tensor in it, in lists, tuples and dicts as well, replaced by one on the device."""
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (value, self._take(value))
            return self._tensors[id(value)][1]
        if isinstance(value, dict):
            return {name: self.take(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.take, value))
        return value

    def _take(self, t: Tensor) -> Tensor:
        memory = t.untyped_storage()
        if memory._cdata not in self._memory:
            there = torch.UntypedStorage(memory.nbytes(), device=DEVICE)
            there.copy_(memory)
            self._memory[memory._cdata] = (memory, there)
        there = self._memory[memory._cdata][1]
        twin = torch.empty(0, dtype=t.dtype, device=DEVICE)
        twin.set_(there, t.storage_offset(), t.size(), t.stride())
        return _ToDevice.apply(t, twin) if t.requires_grad and torch.is_grad_enabled() else twin

    def store(self) -> None:
        """What was written to the device's memory is written to the host's."""
        for host, there in self._memory.values():
            host.copy_(there)


def brought_back(value: Any) -> Any:
    """`value` with every tensor in it on the host; gradients find their way."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(map(brought_back, value))
    return value


def carried(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, run on the device with tensors of the host."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Result:
        global _calls
        carrier = Carrier()
        args, options = carrier.take(args), carrier.take(options)
        _calls += 1
        try:
            result = brought_back(function(*args, **options))
        finally:
            _calls -= 1
            carrier.store()
        return result

    return call


class OnlyOnTheDevice(TorchFunctionMode):
    """Lets operators of attn_ext run with tensors of the device only.

    On a GPU the tensors tell. Those of the simulator look like the host's: there only carried calls have them, and the
    backward passes of such calls.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith("attn_ext.") and not name.startswith("attn_ext.take_fault"):
            if SIMULATED:
                there = _calls > 0 or torch._C._current_autograd_node() is not None
            else:
                there = all(
                    t.device.type == DEVICE for t in (*args, *kwargs.values()) if isinstance(t, Tensor)
                )
            assert there, f"{name} is called with tensors of the host: by a function that is not carried"
        return func(*args, **kwargs)
