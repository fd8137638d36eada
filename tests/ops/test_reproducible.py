"""Bitwise the same row whatever travels with it: threads, batch, other rows, chunks, strides.

Per instruction set and dtype. What is promised for outputs: any thread count, any batch, any number of other query
rows. For gradients: any thread count and any batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_support import LAYOUTS, OPTIONS, Shape, assert_same_bits, make
from torch import Tensor

import attn_ext

pytestmark = pytest.mark.isa_matrix

THREADS = (1, 2, 3, 5)
# Large enough that work is shared out and keys are split into several blocks and segments.
SHAPES = (
    Shape(2, 4, 2, 130, 130, 24),
    Shape(1, 2, 1, 33, 1100, 40),
    Shape(1, 4, 1, 1, 2100, 64),
    Shape(3, 3, 3, 9, 17, 33),
)


def per_entry(options: dict[str, Any], b: int) -> dict[str, Any]:
    """The options as batch entry b alone would get them, with a batch of one."""
    picked = {}
    for name, value in options.items():
        batched = isinstance(value, Tensor) and (
            (name in ("mask", "bias") and value.dim() == 4 and value.shape[0] > 1)
            or name == "key_lengths"
            or (name == "alibi_slopes" and value.dim() == 2)
        )
        picked[name] = value[b : b + 1] if batched else value
    return picked


def per_rows(options: dict[str, Any], rows: slice, lq: int) -> dict[str, Any]:
    """The options as some query rows alone would get them: masks are cut along Lq."""
    picked = {}
    for name, value in options.items():
        cut = name in ("mask", "bias") and value.dim() >= 2 and value.shape[-2] == lq and lq > 1
        picked[name] = value[..., rows, :] if cut else value
    return picked


@pytest.mark.parametrize("option", OPTIONS)
def test_output_has_the_same_bits_at_any_thread_count(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in SHAPES:
        q, k, v = s.qkv(dtype)
        options = OPTIONS[option](s)
        expected = None
        for threads in THREADS:
            torch.set_num_threads(threads)
            found = attn_ext.attention(q, k, v, **options, return_lse=True)
            expected = expected or found
            for name, actual, first in zip(("output", "lse"), found, expected, strict=True):
                assert_same_bits(actual, first, f"{name} at {threads} threads, {s}")


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_have_the_same_bits_at_any_thread_count(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in SHAPES:
        options = {
            name: x.clone().requires_grad_(True)
            if name in ("mask", "bias", "sinks") and x.is_floating_point()
            else x
            for name, x in OPTIONS[option](s).items()
        }
        tensors = [x.requires_grad_(True) for x in s.qkv(dtype)]
        learned = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
        grad_out = make((s.b, s.hq, s.lq, s.d), dtype, seed=8)
        expected = None
        for threads in THREADS:
            torch.set_num_threads(threads)
            out = attn_ext.attention(*tensors, **options)
            found = torch.autograd.grad(out, [*tensors, *learned], grad_out)
            expected = expected or found
            for i, (actual, first) in enumerate(zip(found, expected, strict=True)):
                assert_same_bits(actual, first, f"gradient {i} at {threads} threads, {s}")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_batch_entry_alone_has_the_bits_it_has_in_a_batch(
    isa: str, dtype: torch.dtype, option: str
) -> None:
    for s in (Shape(3, 4, 2, 70, 130, 24), Shape(5, 2, 2, 1, 700, 16)):
        options = OPTIONS[option](s)
        tensors = [x.requires_grad_(True) for x in s.qkv(dtype)]
        grad_out = make((s.b, s.hq, s.lq, s.d), dtype, seed=8)
        out = attn_ext.attention(*tensors, **options)
        grads = torch.autograd.grad(out, tensors, grad_out)
        for b in range(s.b):
            mine = per_entry(options, b)
            alone = [x.detach()[b : b + 1].clone().requires_grad_(True) for x in tensors]
            out_alone = attn_ext.attention(*alone, **mine)
            assert_same_bits(out_alone, out[b : b + 1], f"output of entry {b} alone, {s}")
            alone_grads = torch.autograd.grad(out_alone, alone, grad_out[b : b + 1])
            for name, actual, expected in zip("qkv", alone_grads, grads, strict=True):
                assert_same_bits(actual, expected[b : b + 1], f"gradient of {name}, entry {b} alone, {s}")


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (6, 1)])
def test_a_head_alone_has_the_bits_it_has_among_others(
    isa: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    group = heads[0] // heads[1]
    for lq, lk in ((70, 130), (1, 700)):
        q, k, v = Shape(2, *heads, lq, lk, 24).qkv(dtype)
        out = attn_ext.attention(q, k, v, causal="bottom_right")
        for h in range(heads[0]):
            kv = h // group
            alone = attn_ext.attention(
                q[:, h : h + 1], k[:, kv : kv + 1], v[:, kv : kv + 1], causal="bottom_right"
            )
            assert_same_bits(alone, out[:, h : h + 1], f"head {h} at {(lq, lk)}")


# Under the top-left corner a part of the queries stands at other positions.
MOVABLE = [name for name, build in OPTIONS.items() if build(SHAPES[0]).get("causal") != "top_left"]


@pytest.mark.parametrize("option", MOVABLE)
def test_a_row_alone_has_the_bits_it_has_among_other_rows(isa: str, dtype: torch.dtype, option: str) -> None:
    for s in (Shape(2, 4, 2, 61, 61, 24), Shape(1, 4, 1, 20, 900, 40)):
        q, k, v = s.qkv(dtype)
        options = OPTIONS[option](s)
        # Positions are aligned with the last key, so rows keep theirs only while the end of q stays: ask for the rows
        # from i on. Where nothing depends on the position, any part will do.
        positional = {"causal", "window", "alibi_slopes"} & options.keys()
        out, lse = attn_ext.attention(q, k, v, **options, return_lse=True)
        if positional:
            parts = [slice(i, s.lq) for i in (s.lq - 1, s.lq - 2, s.lq - 5, s.lq // 2, 3)]
        else:
            parts = [
                slice(i, j) for i, j in ((0, 1), (s.lq - 1, s.lq), (3, 4), (2, 9), (5, s.lq), (0, s.lq - 1))
            ]
        for rows in parts:
            some, some_lse = attn_ext.attention(
                q[:, :, rows], k, v, **per_rows(options, rows, s.lq), return_lse=True
            )
            assert_same_bits(some, out[:, :, rows], f"rows {rows} of {s}")
            assert_same_bits(some_lse, lse[:, :, rows], f"lse of rows {rows} of {s}")


@pytest.mark.parametrize("chunks", [(7, 9), (1, 15), (5, 5, 6), (64, 5), (300, 1, 299), (1,) * 40])
@pytest.mark.parametrize("window", [None, (20, 0)])
def test_a_prompt_fed_in_chunks_has_the_bits_of_one_causal_pass(
    isa: str, dtype: torch.dtype, chunks: tuple[int, ...], window: tuple[int, int] | None
) -> None:
    total = sum(chunks)
    q, k, v = Shape(2, 4, 2, total, total, 24).qkv(dtype)
    full = attn_ext.attention(q, k, v, causal=True, window=window)
    done = 0
    for n in chunks:
        # The chunk sees a prefix of the keys, here a view that is not contiguous, as a cache would be.
        end = done + n
        part = attn_ext.attention(
            q[:, :, done:end], k[:, :, :end], v[:, :, :end], causal="bottom_right", window=window
        )
        assert_same_bits(part, full[:, :, done:end], f"chunk {done}:{end}")
        done = end


def test_decoding_one_token_at_a_time_from_a_preallocated_cache_repeats_the_full_pass(
    isa: str, dtype: torch.dtype
) -> None:
    length, room = 13, 32
    q, k, v = Shape(2, 4, 2, length, length, 16).qkv(dtype)
    full = attn_ext.attention(q, k, v, causal=True)
    cache_k, cache_v = (torch.full((2, 2, room, 16), float("nan"), dtype=dtype) for _ in range(2))
    cache_k[:, :, :length], cache_v[:, :, :length] = k, v
    for t in range(5, length):
        growing = attn_ext.attention(
            q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], causal="bottom_right"
        )
        assert_same_bits(growing, full[:, :, t : t + 1], f"token {t}")
        # Unwritten slots hold NaN: they are never attended.
        fixed = attn_ext.attention(
            q[:, :, t : t + 1], cache_k, cache_v, key_lengths=torch.full((2,), t + 1, dtype=torch.int64)
        )
        assert_same_bits(fixed, full[:, :, t : t + 1], f"token {t} from the preallocated cache")


def test_keys_that_are_hidden_behind_the_end_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    s = Shape(2, 4, 2, 20, 300, 24)
    q, k, v = s.qkv(dtype)
    for n in (1, 37, 256, 257):
        short = attn_ext.attention(q, k[:, :, :n], v[:, :, :n])
        lengths = torch.full((s.b,), n)
        assert_same_bits(attn_ext.attention(q, k, v, key_lengths=lengths), short, f"key_lengths {n}")
        mask = torch.arange(s.lk) < n
        assert_same_bits(attn_ext.attention(q, k, v, mask=mask), short, f"padding mask of {n}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("option", ["plain", "causal bottom-right", "bool mask with dead rows", "bias"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(
    isa: str, dtype: torch.dtype, layout: str, option: str
) -> None:
    for s in (Shape(2, 4, 2, 70, 130, 24, 17), Shape(2, 4, 2, 1, 300, 16)):
        options = OPTIONS[option](s)
        grad_out = make((s.b, s.hq, s.lq, s.dv or s.d), dtype, seed=8)
        found = []
        for how in ("contiguous", layout):
            tensors = [x.requires_grad_(True) for x in s.qkv(dtype, how)]
            out = attn_ext.attention(*tensors, **options)
            found.append((out, *torch.autograd.grad(out, tensors, grad_out)))
        for name, actual, expected in zip(("out", "dq", "dk", "dv"), found[1], found[0], strict=True):
            assert_same_bits(actual, expected, f"{name} with {layout} inputs at {s}")


def test_twenty_runs_under_torch_deterministic_algorithms_agree(isa: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [x.requires_grad_(True) for x in Shape(2, 4, 4, 65, 65, 72).qkv(dtype)]
            expected = None
            for run in range(20):
                torch.set_num_threads((1, 3, 16)[run % 3])
                out = attn_ext.attention(*tensors, causal=True)
                found = (out, *torch.autograd.grad(out.sum(), tensors))
                expected = expected or found
                for actual, first in zip(found, expected, strict=True):
                    assert_same_bits(actual, first, f"run {run}")
    finally:
        torch.use_deterministic_algorithms(False)
