"""How well a model predicts a text, in bits per byte, and what general compressors make of the same text."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..models import CausalLM
from ..models.generation import writing
from .corpus import token_tensor

__all__ = ["bits_per_byte", "compressed_sizes"]

_WINDOWS_AT_ONCE = 8


def bits_per_byte(
    model: CausalLM,
    text: bytes,
    before: bytes = b"",
    *,
    stride: int | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> float:
    """The mean of −log₂ p(byte | what stands before it) over `text`: each byte is predicted once.

    A window of `model.max_len` bytes moves on by `stride`, and each time only the last `stride` predictions of it
    count. So a byte is predicted from at least max_len − stride + 1 bytes before it, where there are as many.

    Args:
        model: on bytes (a vocabulary of 256); in eval mode meanwhile.
        text: what is scored, at least one byte.
        before: what stands before `text`. Its last bytes are seen, not scored. Without it the first byte of
            `text` cannot be predicted and counts as 8 bits.
        stride: 1 … max_len; a quarter of max_len where not given. Smaller is slower, and gives more context.
        on_bytes: told how many bytes were just scored.

    Raises:
        ValueError: an empty text, or a stride outside of 1 … max_len.
    """
    context = model.max_len
    stride = max(1, context // 4) if stride is None else stride
    if not text:
        raise ValueError("bits_per_byte: expected at least one byte, got an empty text")
    if not 1 <= stride <= context:
        raise ValueError(f"bits_per_byte: stride must be from 1 to max_len = {context}, got {stride}")
    tokens = token_tensor(before[-context:] + text)
    first = len(tokens) - len(text)  # the first token that is scored
    bits = 0.0
    if first == 0:
        bits, first = 8.0, 1
        on_bytes(1)
    ends = [min(start + stride, len(tokens)) for start in range(first, len(tokens), stride)]
    starts = [max(0, end - context - 1) for end in ends]
    scored = [end - start for start, end in zip(range(first, len(tokens), stride), ends, strict=True)]
    with writing(model):
        for group in _groups_of_one_length(starts, ends):
            windows = torch.stack([tokens[starts[i] : ends[i]] for i in group])  # (n, up to context + 1)
            logits = model(windows[:, :-1])
            for row, i in enumerate(group):
                nats = F.cross_entropy(logits[row, -scored[i] :], windows[row, -scored[i] :], reduction="sum")
                bits += nats.item() / math.log(2)
            on_bytes(sum(scored[i] for i in group))
    return bits / len(text)


def compressed_sizes(text: bytes) -> dict[str, int]:
    """Bytes of `text` as `gzip -9` and `xz -9` store it, headers and all."""
    return {"gzip -9": len(gzip.compress(text, 9, mtime=0)), "xz -9": len(lzma.compress(text, preset=9))}


def _groups_of_one_length(starts: list[int], ends: list[int]) -> list[list[int]]:
    """Neighbouring windows that go through the model together: at most eight, all of one length."""
    groups: list[list[int]] = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        fits = groups and len(groups[-1]) < _WINDOWS_AT_ONCE
        if fits and ends[groups[-1][0]] - starts[groups[-1][0]] == end - start:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
