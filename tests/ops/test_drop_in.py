"""`attn_ext.scaled_dot_product_attention` in place of torch's: change the import, nothing else."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_support import assert_same_bits, make, random_bool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ext

sdpa = attn_ext.scaled_dot_product_attention


def torch_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's own function on its plain path, the one that takes every shape."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def same_as_torch(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> None:
    """Values, shape and dtype as torch's, which computes here in fp64 for the truth."""
    actual = sdpa(q, k, v, *args, **kwargs)
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    wide_kw = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in kwargs.items()
    }
    expected = torch_sdpa(q.double(), k.double(), v.double(), *wide, **wide_kw)
    assert actual.shape == expected.shape and actual.dtype == q.dtype
    limit = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}[q.dtype]
    assert (actual.double() - expected).abs().max() <= limit * max(1.0, expected.abs().max().item())


def test_the_signature_is_torchs() -> None:
    parameters = inspect.signature(sdpa).parameters
    assert list(parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ]
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    q, k, v = (make((2, 4, 5, 8), seed=i) for i in range(3))
    for call in (
        lambda f: f(q, k, v, None, 0.0, True),
        lambda f: f(query=q, key=k, value=v, attn_mask=random_bool(5, 5), dropout_p=0.0, is_causal=False),
        lambda f: f(q, k, v, scale=0.3, enable_gqa=True),
    ):
        torch.testing.assert_close(call(sdpa), call(torch_sdpa), rtol=0, atol=1e-5)
    for function in (sdpa, F.scaled_dot_product_attention):
        with pytest.raises(TypeError):
            function(q, k, v, None, 0.0, False, 0.3)  # scale is keyword-only


SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 8)),
    "3-D": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "4-D": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "5-D": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "6-D": ((2, 1, 2, 3, 5, 8), (2, 1, 2, 3, 7, 8), (2, 1, 2, 3, 7, 8)),
    "value heads of another width": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 12)),
    "keys and values of batch one": ((2, 3, 5, 8), (1, 3, 7, 8), (1, 1, 7, 8)),
    "queries of batch one": ((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "ranks that differ": ((2, 3, 5, 8), (3, 7, 8), (7, 8)),
    "2-D queries": ((5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "6-D broadcast": ((2, 1, 2, 3, 5, 8), (1, 2, 1, 3, 7, 8), (7, 8)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
}


@pytest.mark.isa_matrix
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_torch_takes_gives_what_torch_gives(dtype: torch.dtype, shape: str) -> None:
    q, k, v = (make(s, dtype, seed=i) for i, s in enumerate(SHAPES[shape]))
    for kwargs in ({}, {"scale": 0.2}, {"is_causal": True}):
        same_as_torch(q, k, v, **kwargs)
    lq, lk = q.shape[-2], k.shape[-2]
    for mask in (random_bool(lq, lk), make((lq, lk), seed=5), random_bool(1, lk)):
        if lk and (mask.dtype == torch.bool or mask.dtype == dtype or dtype.itemsize == 2):
            same_as_torch(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_torchs_for_every_shape(shape: str) -> None:
    found = []
    for function in (sdpa, torch_sdpa):
        tensors = [make(s, torch.float64, seed=i).requires_grad_(True) for i, s in enumerate(SHAPES[shape])]
        out = function(*tensors, is_causal=True)
        found.append(torch.autograd.grad(out, tensors, make(out.shape, torch.float64, seed=8)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "heads",
    [((4, 5, 8), (2, 7, 8), (2, 7, 8)), ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))]
    + [((2, 2, 4, 5, 8), (2, 2, 1, 7, 8), (2, 2, 1, 7, 8)), ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))]
    + [((2, 4, 5, 8), (2, 2, 7, 8), (2, 4, 7, 8)), ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 6))],
    ids=["3-D", "4-D", "5-D", "batch of one", "k and v with different heads", "one value head"],
)
def test_enable_gqa_shares_heads_as_torch_does(
    heads: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    q, k, v = (make(s, dtype, seed=i) for i, s in enumerate(heads))
    same_as_torch(q, k, v, enable_gqa=True)
    same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    same_as_torch(q, k, v, random_bool(5, 7), enable_gqa=True)


def test_grouped_heads_without_enable_gqa_are_refused_as_torch_refuses_them() -> None:
    q, k = make((2, 4, 5, 8)), make((2, 2, 7, 8))
    for function in (sdpa, torch_sdpa):
        with pytest.raises((RuntimeError, ValueError)):
            function(q, k, k)
        with pytest.raises((RuntimeError, ValueError)):
            function(q, make((2, 3, 7, 8)), make((2, 3, 7, 8)), enable_gqa=True)


@pytest.mark.isa_matrix
@pytest.mark.parametrize(
    "mask_shape",
    [(5, 7), (1, 7), (5, 1), (3, 5, 7), (3, 1, 7), (2, 1, 1, 7), (2, 3, 5, 7), (1, 3, 1, 1), (2, 1, 5, 7)],
)
def test_attention_masks_of_every_shape_mean_what_they_mean_in_torch(mask_shape: tuple[int, ...]) -> None:
    q, k, v = make((2, 3, 5, 8), seed=1), make((2, 3, 7, 8), seed=2), make((2, 3, 7, 8), seed=3)
    same_as_torch(q, k, v, random_bool(*mask_shape))
    same_as_torch(q, k, v, make(mask_shape, seed=5))
    hidden = torch.zeros(mask_shape).masked_fill(~random_bool(*mask_shape), -math.inf)
    same_as_torch(q, k, v, hidden)


def test_is_causal_is_the_top_left_corner() -> None:
    v = torch.arange(1.0, 7.0).view(1, 1, 6, 1)
    out = sdpa(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 6, 1), v, is_causal=True)
    assert out.flatten().tolist() == [1.0, 1.5]
    q, k = make((2, 3, 9, 8), seed=1), make((2, 3, 4, 8), seed=2)
    same_as_torch(q, k, k, is_causal=True)


def test_mask_and_is_causal_together_must_both_allow_a_key() -> None:
    q, k, v = make((2, 3, 5, 8), seed=1), make((2, 3, 7, 8), seed=2), make((2, 3, 7, 8), seed=3)
    mask = random_bool(2, 1, 5, 7)
    expected = torch_sdpa(q, k, v, mask & torch.ones(5, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(sdpa(q, k, v, mask, is_causal=True), expected, rtol=0, atol=1e-5)
    bias = make((5, 7), seed=5)
    expected = torch_sdpa(q, k, v, bias.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -math.inf))
    torch.testing.assert_close(sdpa(q, k, v, bias, is_causal=True), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-3, 3.0])
def test_causal_with_a_scale_of_zero_or_less_works(scale: float) -> None:
    q, k, v = (make((1, 2, 6, 8), seed=i) for i in range(3))
    expected = attn_ext.attention(q, k, v, causal="top_left", scale=scale)
    assert torch.isfinite(expected).all()
    assert_same_bits(sdpa(q, k, v, is_causal=True, scale=scale), expected, "drop-in")


@pytest.mark.parametrize("grad", ["q", "v", "mask", "all"])
def test_gradients_through_masks_and_options_are_torchs(grad: str) -> None:
    found = []
    for function in (sdpa, torch_sdpa):
        tensors = {
            "q": make((2, 4, 5, 8), torch.float64, seed=1),
            "k": make((2, 2, 7, 8), torch.float64, seed=2),
        }
        tensors |= {
            "v": make((2, 2, 7, 8), torch.float64, seed=3),
            "mask": make((4, 1, 7), torch.float64, seed=5),
        }
        wanted = [x.requires_grad_(True) for name, x in tensors.items() if grad in (name, "all")]
        q, k, v, mask = tensors.values()
        out = function(q, k, v, mask, enable_gqa=True, scale=0.3)
        found.append(torch.autograd.grad(out.square().sum(), wanted))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_a_wholly_hidden_row_is_zero_as_in_torchs_fused_kernel() -> None:
    q, k, v = make((1, 2, 3, 8), seed=1), make((1, 2, 4, 8), seed=2), make((1, 2, 4, 8), seed=3)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    assert (sdpa(q, k, v, mask)[:, :, 1] == 0).all()
    torch.testing.assert_close(
        sdpa(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask), rtol=0, atol=1e-6
    )


def test_calls_that_make_no_sense_raise() -> None:
    def x(*shape: int) -> Tensor:
        return make(shape)

    for args, kwargs in (
        ((x(8), x(8), x(8)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 9), x(2, 3, 7, 9)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8), x(2, 3, 6, 8)), {}),
        ((x(2, 3, 5, 8), x(3, 3, 7, 8), x(3, 3, 7, 8)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8).half(), x(2, 3, 7, 8)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8), x(2, 3, 7, 8), x(5, 6)), {}),
        ((x(1, 1, 5, 8), x(1, 1, 7, 8), x(1, 1, 7, 8), x(2, 3, 5, 7)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8), x(2, 3, 7, 8), torch.ones(5, 7, dtype=torch.int64)), {}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8), x(2, 3, 7, 8)), {"dropout_p": 1.5}),
        ((x(2, 3, 5, 8), x(2, 3, 7, 8), x(2, 3, 7, 8)), {"dropout_p": -0.5}),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match="attention"):
            sdpa(*args, **kwargs)


def test_a_whole_torch_module_runs_unchanged_on_the_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = make((2, 6, 16))
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    expected = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    actual = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert calls
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        (7,),
        (5, 7),
        (4, 5, 7),
        (3, 1, 5, 7),
        (2, 1, 1, 1, 1, 7),
        (1, 2, 1, 1, 5, 7),
        (2, 1, 3, 4, 5, 7),
        (2, 2, 3, 1, 1, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float", "expanded"])
def test_masks_of_many_batch_dims_are_torchs(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = (make((2, 2, 3, 4, n, 8), seed=n + i) for i, n in enumerate((5, 7, 7)))
    mask = random_bool(*shape) if kind != "float" else make(shape, seed=5)
    if kind == "expanded":
        mask = mask.expand(2, 2, 3, 4, 5, 7)
    same_as_torch(q, k, v, attn_mask=mask)


def test_a_mask_that_batch_entries_share_is_never_copied_for_each_of_them() -> None:
    q = make((64, 1, 64, 1, 2, 8))
    mask = random_bool(64, 1, 1, 1, 2, 2)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.bool:
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        for given in (mask, mask.expand(64, 1, 64, 1, 2, 2)):
            sdpa(q, q, q, attn_mask=given)
    assert largest <= mask.numel()


@pytest.mark.parametrize("wrong", [None, [1], 3], ids=type)
def test_things_that_are_no_tensors_are_refused(wrong: Any) -> None:
    for shape in ((2, 4, 5, 8), (5, 8), (2, 2, 3, 4, 5, 8)):
        x = make(shape)
        for name in ("query", "key", "value", "attn_mask"):
            if name == "attn_mask" and wrong is None:
                continue
            call = {"query": x, "key": x, "value": x, name: wrong}
            with pytest.raises(TypeError, match=f"scaled_dot_product_attention: {name} must be a tensor"):
                sdpa(**call)


def test_bad_masks_and_probabilities_are_refused_in_the_name_of_the_function() -> None:
    for shape in ((5, 8), (2, 4, 5, 8), (2, 2, 3, 4, 5, 8)):
        x = make(shape)
        for mask in (random_bool(3), random_bool(7, 5), random_bool(9, 1, 1, 1, 1, 5, 5)):
            with pytest.raises(ValueError, match="scaled_dot_product_attention: .*mask .* must broadcast to"):
                sdpa(x, x, x, attn_mask=mask)
        for p in (None, "a"):
            with pytest.raises(TypeError, match="scaled_dot_product_attention: dropout_p must be a number"):
                sdpa(x, x, x, dropout_p=p)
