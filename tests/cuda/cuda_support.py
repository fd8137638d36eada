"""What the CUDA tests share: options that are met in pairs, and the functions of the package, carried to the device."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import op_support
import torch
from device_support import carried
from op_support import Shape, dead_row_mask, make, random_bool, some_lengths
from torch import Tensor

import attn_ext
from attn_ext import ops

# Each alone and with each other; no two of one name meet.
PARTS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "mask": lambda s: {"mask": dead_row_mask(s)},
    "padding mask": lambda s: {"mask": random_bool(s.b, 1, 1, s.lk)},
    "float mask": lambda s: {
        "mask": make((s.lq, s.lk), seed=5).masked_fill(~random_bool(s.lq, s.lk), -math.inf)
    },
    "bias": lambda s: {"bias": make((1, s.hq, s.lq, s.lk), seed=6)},
    "own bias": lambda s: {"bias": make((s.b, s.hq, s.lq, s.lk), seed=6)},
    "top-left": lambda s: {"causal": "top_left"},
    "bottom-right": lambda s: {"causal": "bottom_right"},
    "window": lambda s: {"window": (5, 2)},
    "scale": lambda s: {"scale": -0.7},
    "softcap": lambda s: {"softcap": 1.5},
    "ALiBi": lambda s: {"alibi_slopes": torch.linspace(0.05, 0.7, s.b * s.hq).view(s.b, s.hq)},
    "sinks": lambda s: {"sinks": torch.linspace(-1.0, 2.0, s.hq)},
    "key lengths": lambda s: {"key_lengths": some_lengths(s)},
    "dropout": lambda s: {"dropout_p": 0.4, "dropout_seed": torch.tensor(987654321987654321)},
}


def pairs() -> Iterator[tuple[str, str]]:
    """All pairs of PARTS that set different options."""
    shape = Shape(1, 1, 1, 1, 1, 1)
    for first, second in itertools.combinations(PARTS, 2):
        if not PARTS[first](shape).keys() & PARTS[second](shape).keys():
            yield first, second


@contextmanager
def drawn_seed(seed: Tensor | None) -> Iterator[None]:
    """Has every call draw this seed, where there is one."""
    draw = ops._draw_seed
    if seed is not None:
        ops._draw_seed = lambda q: seed.to(q.device)
    try:
        yield
    finally:
        ops._draw_seed = draw


# --- the functions, with tensors of the host ----------------------------------------------------------------------

_attention = carried(attn_ext.attention)
attention_varlen = carried(attn_ext.attention_varlen)
attention_weights = carried(attn_ext.attention_weights)
attention_with_kv_cache = carried(attn_ext.attention_with_kv_cache)
kv_cache_append_ = carried(attn_ext.kv_cache_append_)
raw_forward = carried(op_support.raw_forward)
raw_backward = carried(op_support.raw_backward)
raw_weights = carried(op_support.raw_weights)


def attention(*args: Any, dropout_seed: Tensor | None = None, **options: Any) -> Any:
    """`attn_ext.attention` that takes the dropout's seed, as the reference does."""
    with drawn_seed(dropout_seed):
        return _attention(*args, **options)


check_forward = functools.partial(op_support.check_forward, attention=attention)
check_gradients = functools.partial(op_support.check_gradients, attention=attention)
