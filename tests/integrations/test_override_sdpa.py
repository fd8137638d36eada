"""override_sdpa: what is caught, what is passed on, results like torch's, and that leaving restores torch."""

from __future__ import annotations

import asyncio
import inspect
import math
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_earlier
from torch.utils._pytree import tree_map_only

import attn_ext
from attn_ext.integrations import Calls, override_sdpa
from attn_ext.integrations import sdpa as module

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:Support for mismatched",
    "ignore:There is a performance drop",
    "ignore:.*torch.jit",
    "ignore:.*is deprecated.*:DeprecationWarning",
    "ignore:enable_nested_tensor is True",
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_same(ours: Any, torchs: Any) -> None:
    """Same shapes, dtypes and NaNs, and numbers that differ by rounding."""
    if isinstance(torchs, tuple):
        assert len(ours) == len(torchs)
        for a, b in zip(ours, torchs, strict=True):
            assert_same(a, b)
    elif torchs is None:
        assert ours is None
    else:
        assert type(ours) is type(torchs) and ours.shape == torchs.shape
        tolerance = TOLERANCE[torchs.dtype]
        torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance, equal_nan=True)


def inside_and_outside(function: Callable[[], Any]) -> Calls:
    """Asserts that a call gives the same result while the override is on; returns its counts."""
    torch.manual_seed(1)
    torchs = function()
    torch.manual_seed(1)
    with override_sdpa() as calls:
        ours = function()
    assert_same(ours, torchs)
    return calls


def same_error(function: Callable[[], Any]) -> Calls:
    """Asserts that a call that torch refuses is refused in the same words while the override is on."""
    with pytest.raises(Exception) as torchs:
        function()
    with override_sdpa() as calls, pytest.raises(Exception) as ours:
        function()
    assert (ours.type, str(ours.value)) == (torchs.type, str(torchs.value))
    return calls


def served_only(calls: Calls, n: int) -> None:
    assert (calls.served, calls.compiled, dict(calls.passed_on)) == (n, 0, {})


def state_of_torch() -> tuple[Any, ...]:
    dumps = [torch._C._dispatch_dump(name) for name in (module._SDPA, module._MHA)]
    return *dumps, F.multi_head_attention_forward, F.scaled_dot_product_attention, list(sys.meta_path)


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was() -> Iterator[None]:
    before = state_of_torch()
    yield
    assert state_of_torch() == before
    assert not module._switch.on


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# --- scaled_dot_product_attention: results ----------------------------------------------------------------------------


@st.composite
def sdpa_calls(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    lead = draw(st.sampled_from([(), (3,), (2, 3), (1, 2), (2, 4), (2, 1, 4)]))
    lq, lk, d = (draw(st.integers(1, n)) for n in (9, 9, 17))
    dv = draw(st.sampled_from([d, 5]))
    gqa = len(lead) > 0 and lead[-1] == 4 and draw(st.booleans())
    kv_lead = (*lead[:-1], draw(st.sampled_from([1, 2, 4]))) if gqa else lead
    if not gqa and lead and draw(st.integers(0, 4)) == 0:
        kv_lead = (1,) * len(lead)  # broadcast
    blhd = len(lead) == 2 and draw(st.booleans())

    def tensor(lead: tuple[int, ...], length: int, width: int) -> Tensor:
        if blhd:
            return heads(lead[0], length, lead[1], width, dtype=dtype).transpose(1, 2)
        return heads(*lead, length, width, dtype=dtype)

    mask = None
    # torch 2.13 reads a float32 mask of a float64 call as if it were another: the results are not those of the formula.
    kinds = ["none", "bool", "own"] if dtype == torch.float64 else ["none", "bool", "float32", "own"]
    kind = draw(st.sampled_from(kinds))
    if kind != "none":
        shape = tuple(
            draw(st.sampled_from([size, 1])) for size in (*lead[draw(st.integers(0, len(lead))) :], lq, lk)
        )
        mask = torch.rand(shape) > 0.3
        if kind != "bool":
            bias = torch.randn(shape, dtype=torch.float32 if kind == "float32" else dtype)
            mask = bias.masked_fill(~mask, -math.inf)
    causal = mask is None and draw(st.booleans())
    scales = [None, 0.3] if causal else [None, 0.0, 0.3, -0.5]  # torch's own NaN: see the test below
    return {
        "query": tensor(lead, lq, d),
        "key": tensor(kv_lead, lk, d),
        "value": tensor(kv_lead, lk, dv),
        "attn_mask": mask,
        "is_causal": causal,
        "scale": draw(st.sampled_from(scales)),
        "enable_gqa": gqa,
    }


@settings(max_examples=100)
@given(sdpa_calls())
def test_results_are_torchs(call: dict[str, Any]) -> None:
    calls = inside_and_outside(lambda: F.scaled_dot_product_attention(**call))
    served_only(calls, 1)


@settings(max_examples=50)
@given(sdpa_calls(), st.booleans())
def test_gradients_are_torchs(call: dict[str, Any], learned_mask: bool) -> None:
    def gradients() -> tuple[Tensor, ...]:
        copies = {n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in call.items()}
        learned = [copies[n].requires_grad_() for n in ("query", "key", "value")]
        mask = copies["attn_mask"]
        if learned_mask and mask is not None and mask.is_floating_point():
            learned.append(mask.requires_grad_())
        out = F.scaled_dot_product_attention(**copies)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return torch.autograd.grad(out, learned, weight)

    mask = call["attn_mask"]
    if mask is not None and learned_mask and (mask == -math.inf).all(-1).any():
        return  # torch's own gradient of a row that sees nothing is NaN on that path
    if {t.dtype for t in call.values() if isinstance(t, Tensor)} & {torch.bfloat16, torch.float16}:
        return  # torch rounds in between, on some paths after every step
    served_only(inside_and_outside(gradients), 1)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_is_not_positive(scale: float) -> None:
    q = heads(2, 3, 5, 8)
    with override_sdpa() as calls:
        ours = imported_earlier(q, q, q, is_causal=True, scale=scale)
    served_only(calls, 1)
    triangle = torch.ones(5, 5, dtype=torch.bool).tril()
    assert_same(ours, imported_earlier(q, q, q, triangle, scale=scale))  # with is_causal torch gives NaN


@pytest.mark.parametrize(
    ("shapes", "math"),
    [(((2, 3, 5, 8),) * 3, False), (((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 4)), True)],
    ids=["fused", "unfused"],
)
def test_memory_order_is_torchs(shapes: Any, math: bool) -> None:
    q, k, v = (heads(B, L, H, D).transpose(1, 2) for B, H, L, D in shapes)
    torchs = imported_earlier(q, k, v)
    with override_sdpa():
        ours = imported_earlier(q, k, v)
    assert ours.stride() == torchs.stride()
    assert ours.is_contiguous() == math


def test_it_is_our_kernel_that_runs() -> None:
    q = heads(2, 3, 70, 64)
    with override_sdpa():
        ours = imported_earlier(q, q, q)
    assert torch.equal(ours, attn_ext.scaled_dot_product_attention(q, q, q))
    assert not torch.equal(ours, imported_earlier(q, q, q))


def test_dropout() -> None:
    q, v = torch.zeros(2, 4, 64, 8), torch.ones(2, 4, 256, 8)
    k = torch.zeros(2, 4, 256, 8)
    with override_sdpa() as calls:
        torch.manual_seed(3)
        first = imported_earlier(q, k, v, dropout_p=0.25)
        torch.manual_seed(3)
        again = imported_earlier(q, k, v, dropout_p=0.25)
        all_dropped = imported_earlier(q, k, v, dropout_p=1.0)
    served_only(calls, 3)
    assert torch.equal(first, again)
    assert 0.01 < first.std() < 0.06 and abs(first.mean() - 1) < 0.01  # sqrt(p / (1 - p) / 256) = 0.036
    assert not all_dropped.any()


def test_second_derivatives() -> None:
    q = heads(1, 2, 4, 8, dtype=torch.float64).requires_grad_()

    def second(attend: Callable[..., Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(attend(q, q, q).pow(2).sum(), q, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), q)[0]

    with override_sdpa() as calls:
        ours = second(imported_earlier)
    served_only(calls, 1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_same(ours, second(imported_earlier))


@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_autocast(mask: str | None) -> None:
    q = heads(2, 3, 6, 8)
    attn_mask = {None: None, "float": torch.randn(6, 6), "bool": torch.rand(6, 6) > 0.2}[mask]

    def call() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return imported_earlier(q, q, q.double().float(), attn_mask)

    served_only(inside_and_outside(call), 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode: Any) -> None:
    def call() -> Tensor:
        with mode():
            q = torch.linspace(-1, 1, 240).view(2, 3, 5, 8)
            return imported_earlier(q, q, q, is_causal=True)

    served_only(inside_and_outside(call), 1)


# --- scaled_dot_product_attention: who is caught ----------------------------------------------------------------------


class Attend(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def test_every_name_and_caller() -> None:
    q = heads(1, 2, 4, 8)
    program = torch.export.export(Attend(), (q,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script, trace = torch.jit.script(Attend()), torch.jit.trace(Attend(), (q,))
    callers = [
        lambda: F.scaled_dot_product_attention(q, q, q),
        lambda: imported_earlier(q, q, q),
        lambda: torch._C._nn.scaled_dot_product_attention(q, q, q),
        lambda: torch.ops.aten.scaled_dot_product_attention(q, q, q),
        lambda: script(q),
        lambda: trace(q),
        lambda: program.module()(q),
        lambda: Attend()(nn.Parameter(q)).detach(),
    ]
    for caller in callers:
        served_only(inside_and_outside(caller), 1)


def test_subclass_without_dispatch_of_its_own_is_served() -> None:
    class Named(Tensor):
        pass

    q = heads(1, 2, 4, 8).as_subclass(Named)
    served_only(inside_and_outside(lambda: imported_earlier(q, q, q)), 1)


def test_call_from_below_autograd_records_no_gradient() -> None:
    q = heads(1, 2, 4, 8).requires_grad_()

    def as_a_kernel_calls_it() -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return F.scaled_dot_product_attention(q, q, q)

    assert not as_a_kernel_calls_it().requires_grad
    with override_sdpa() as calls:
        assert not as_a_kernel_calls_it().requires_grad
    served_only(calls, 1)


# --- scaled_dot_product_attention: what is passed on ------------------------------------------------------------------

Q = torch.linspace(-1, 1, 64).view(1, 2, 4, 8)
GQ = torch.linspace(-1, 1, 96).view(1, 4, 3, 8)
KEEP = torch.ones(4, 4, dtype=torch.bool).tril()

PASSED_ON: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "mask and causal": ("is_causal beside attn_mask", (Q, Q, Q, KEEP, 0.0, True), {}),
    "integer mask": ("attn_mask of torch.int32", (Q, Q, Q, KEEP.int()), {}),
    "float64 mask": ("attn_mask of torch.float64", (Q, Q, Q, torch.zeros(4, 4).double()), {}),
    "bfloat16 mask": ("attn_mask of torch.bfloat16", (Q, Q, Q, torch.zeros(4, 4).bfloat16()), {}),
    "mask 1-D": ("attn_mask of fewer than two dims", (Q, Q, Q, KEEP[0]), {}),
    "mask 0-D": ("attn_mask of fewer than two dims", (Q, Q, Q, torch.tensor(True)), {}),
    "mask of another length": ("shapes that do not fit", (Q, Q, Q, torch.ones(3, 3) > 0), {}),
    "mask of more heads": (
        "shapes that do not fit",
        (Q[:, :1], Q[:, :1], Q[:, :1], KEEP.expand(1, 2, 4, 4)),
        {},
    ),
    "mask of more dims": ("shapes that do not fit", (Q, Q, Q, KEEP.expand(1, 1, 1, 4, 4)), {}),
    "mask of key heads": (
        "shapes that do not fit",
        (GQ, Q, Q, torch.ones(1, 2, 3, 4) > 0),
        {"enable_gqa": True},
    ),
    "dtypes": ("query, key and value of different dtypes", (Q, Q.double(), Q), {}),
    "integers": ("dtype torch.int32", (Q.int(), Q.int(), Q.int()), {}),
    "complex": ("dtype torch.complex64", (Q.cfloat(), Q.cfloat(), Q.cfloat()), {}),
    "1-D": ("fewer than two dims", (Q[0, 0, 0], Q, Q), {}),
    "head dim": ("shapes that do not fit", (Q, Q[..., :4], Q), {}),
    "heads": ("shapes that do not fit", (Q, GQ, GQ), {}),
    "heads without enable_gqa": ("shapes that do not fit", (GQ, Q, Q), {}),
    "heads with enable_gqa": ("shapes that do not fit", (GQ[:, :3], Q, Q), {"enable_gqa": True}),
    "2-D with enable_gqa": ("shapes that do not fit", (Q[0, 0], Q[0, 0], Q[0, 0]), {"enable_gqa": True}),
    "batches with enable_gqa": (
        "enable_gqa with other leading dims",
        (GQ.expand(3, 4, 3, 8), Q, Q),
        {"enable_gqa": True},
    ),
    "no keys": ("empty tensor", (Q, Q[:, :, :0], Q[:, :, :0]), {}),
    "no queries": ("empty tensor", (Q[:, :, :0], Q, Q), {}),
    "no head dim": ("empty tensor", (Q[..., :0], Q[..., :0], Q), {}),
    "dropout": ("dropout_p outside [0, 1]", (Q, Q, Q, None, 1.5), {}),
    "negative dropout": ("dropout_p outside [0, 1]", (Q, Q, Q, None, -0.5), {}),
    "scale": ("scale that is not finite", (Q, Q, Q), {"scale": math.nan}),
    "sparse": ("layout torch.sparse_coo", (Q.to_sparse(), Q, Q), {}),
    "two devices": ("device meta", (Q, Q.to("meta"), Q), {}),
}


# Those that torch answers with a result; it refuses the others.
ANSWERED = ("mask and causal", "batches with enable_gqa", "no keys", "no queries", "no head dim", "scale")


@pytest.mark.parametrize("name", PASSED_ON)
def test_passed_on_with_torchs_answer(name: str) -> None:
    reason, args, options = PASSED_ON[name]
    compare = inside_and_outside if name in ANSWERED else same_error
    calls = compare(lambda: imported_earlier(*args, **options))
    assert calls.served == 0
    assert dict(calls.passed_on) == {reason: 1}


@pytest.mark.parametrize("query", [[1.0], None])
def test_arguments_that_are_no_tensors(query: Any) -> None:
    calls = same_error(lambda: imported_earlier(query, Q, Q))
    served_only(calls, 0)  # refused before anything is dispatched


def test_meta_tensors() -> None:
    with override_sdpa() as calls:
        out = imported_earlier(Q.to("meta"), Q.to("meta"), Q.to("meta"))
    assert out.is_meta and out.shape == Q.shape
    assert dict(calls.passed_on) == {"device meta": 1}


def test_nested_tensors() -> None:
    parts = [heads(2, 3, 8), heads(2, 3, 8)]

    def call() -> Tensor:
        nested = torch.nested.nested_tensor(parts)
        return torch.nested.to_padded_tensor(imported_earlier(nested, nested, nested), 0.0)

    assert dict(inside_and_outside(call).passed_on) == {"nested tensor": 1}


def test_torch_func() -> None:
    q = heads(3, 1, 2, 4, 8, dtype=torch.float64)

    def loss(t: Tensor) -> Tensor:
        return imported_earlier(t, t, t).pow(2).sum()

    for call in (
        lambda: torch.vmap(lambda t: imported_earlier(t, t, t))(q),
        lambda: torch.func.grad(loss)(q),
        lambda: torch.vmap(torch.func.grad(loss))(q),
    ):
        assert dict(inside_and_outside(call).passed_on) == {"torch.func transform": 1}


def test_forward_mode() -> None:
    def call() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            with torch.autograd.forward_ad.dual_level():
                q = torch.autograd.forward_ad.make_dual(Q, Q.flip(-1))
                return torch.autograd.forward_ad.unpack_dual(imported_earlier(q, q, q)).tangent

    assert dict(inside_and_outside(call).passed_on) == {"forward-mode AD": 1}


class Logged(Tensor):
    """A tensor around another one, which notes the operators it meets."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        args, kwargs = tree_map_only(Logged, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Logged, func(*args, **kwargs))


def test_subclass_with_dispatch_of_its_own() -> None:
    def operators() -> list[str]:
        Logged.seen.clear()
        with torch.no_grad():
            imported_earlier(Logged(Q), Logged(Q), Logged(Q))
        return list(Logged.seen)

    torchs = operators()
    with override_sdpa() as calls:
        assert operators() == torchs
    assert torchs and dict(calls.passed_on) == {"tensor subclass": 1}


# --- nn.MultiheadAttention --------------------------------------------------------------------------------------------


def mha_masks(name: str, batch: int, num_heads: int, lq: int, lk: int) -> dict[str, Any]:
    """torch's polarity: True hides."""
    hide = torch.ones(lq, lk, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, lk, dtype=torch.bool)
    padding[0, -2:] = True
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "dead": {"key_padding_mask": padding | torch.tensor([[False], [True]])},
        "bool": {"attn_mask": hide},
        "float": {"attn_mask": torch.randn(lq, lk)},
        "per head": {"attn_mask": torch.rand(batch * num_heads, lq, lk) > 0.8},
        "both": {"attn_mask": hide, "key_padding_mask": padding},
        "hint": {"attn_mask": hide, "is_causal": True},
    }[name]


MASKS = ["none", "padding", "dead", "bool", "float", "per head", "both", "hint"]


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("need_weights", ["no", "mean", "all"])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_multihead_attention(masks: str, need_weights: str, mode: str, dtype: torch.dtype) -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=dtype).train(mode == "train")
    x = torch.randn(2, 5, 16, dtype=dtype)
    kwargs = mha_masks(masks, 2, 4, 5, 5)
    if masks == "float":
        kwargs["attn_mask"] = kwargs["attn_mask"].to(dtype)

    def call() -> Any:
        with torch.inference_mode(mode == "inference"):
            return mha(
                x,
                x,
                x,
                need_weights=need_weights != "no",
                average_attn_weights=need_weights == "mean",
                **kwargs,
            )

    served_only(inside_and_outside(call), 1)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"kdim": 6, "vdim": 7},
        {"bias": False},
    ],
    ids=str,
)
def test_multihead_attention_of_every_kind(options: dict[str, Any], need_weights: bool) -> None:
    options = {"batch_first": True, **options}
    mha = nn.MultiheadAttention(16, 4, **options).eval()
    x = torch.randn(2, 5, 16)
    k, v = torch.randn(2, 7, options.get("kdim", 16)), torch.randn(2, 7, options.get("vdim", 16))
    if not options["batch_first"]:
        x, k, v = (t.transpose(0, 1) for t in (x, k, v))
    masks = mha_masks("both", 2, 4, 5, 7)
    served_only(inside_and_outside(lambda: mha(x, k, v, need_weights=need_weights, **masks)), 1)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_without_a_batch(need_weights: bool) -> None:
    mha = nn.MultiheadAttention(16, 4)
    x = torch.randn(5, 16)
    served_only(inside_and_outside(lambda: mha(x, x, x, need_weights=need_weights)), 1)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_gradients(need_weights: bool) -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    bias = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def call() -> tuple[Tensor, ...]:
        out, weights = mha(x, x, x, attn_mask=bias, need_weights=need_weights)
        loss = out.pow(2).sum() + (0 if weights is None else weights.pow(3).sum())
        return torch.autograd.grad(loss, [bias, *mha.parameters()])

    served_only(inside_and_outside(call), 1)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_multihead_attention_autocast(need_weights: bool, mode: Any) -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)

    def call() -> Any:
        with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            return mha(x, x, x, need_weights=need_weights)

    served_only(inside_and_outside(call), 1)


def test_multihead_attention_dropout() -> None:
    mha = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 16)
    calls = inside_and_outside(lambda: mha(x, x, x))  # the weights that torch returns are those after dropout
    assert dict(calls.passed_on) == {"weights after dropout": 1}
    with override_sdpa() as calls:
        mha(x, x, x, need_weights=False)
    served_only(calls, 1)


def test_multihead_attention_errors_and_other_dtypes() -> None:
    mha = nn.MultiheadAttention(16, 4)
    x = torch.randn(2, 5, 16)
    served_only(same_error(lambda: mha(x, x, x, attn_mask=torch.zeros(3, 3))), 0)
    served_only(same_error(lambda: mha(x, x, x, is_causal=True)), 0)
    served_only(same_error(lambda: mha(x, x[:1], x)), 0)
    small = nn.MultiheadAttention(16, 4, device="meta")
    with override_sdpa() as calls:
        out, weights = small(*[x.to("meta")] * 3)
    assert out.shape == (2, 5, 16) and weights.shape == (5, 2, 2)
    assert dict(calls.passed_on) == {"device meta": 1}


def test_native_multi_head_attention() -> None:
    mha = nn.MultiheadAttention(16, 4)
    x, y = torch.randn(2, 2, 5, 16)

    def native(query: Tensor, key: Tensor, *mask: Any, heads: int = 4, dim: int = 16) -> Any:
        projections = (mha.in_proj_weight, mha.in_proj_bias, mha.out_proj.weight, mha.out_proj.bias)
        mask, mask_type = mask or (None, None)
        with torch.no_grad():
            return torch._native_multi_head_attention(
                query, key, key, dim, heads, *projections, mask, True, True, mask_type
            )

    hide = torch.ones(5, 5).triu(1) > 0
    served_only(inside_and_outside(lambda: native(x, x)), 1)
    served_only(inside_and_outside(lambda: native(x, y)), 1)
    served_only(inside_and_outside(lambda: native(x, x, hide, 0)), 1)
    for call in (
        lambda: native(x, y[:, :3]),
        lambda: native(x[0], x[0]),
        lambda: native(x, x, heads=3),
        lambda: native(x, x, dim=8),
        lambda: native(x, x, hide[:3, :3], 0),
    ):
        assert dict(same_error(call).passed_on) == {"shapes that do not fit": 1}
    assert dict(same_error(lambda: native(x.double(), x.double())).passed_on) == {"dtype torch.float32": 1}
    assert dict(inside_and_outside(lambda: native(x[:, :0], x[:, :0])).passed_on) == {"empty tensor": 1}


# --- nn.TransformerEncoder --------------------------------------------------------------------------------------------


def encoder(norm_first: bool = False, nested: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


@pytest.mark.parametrize("masks", ["none", "padding", "bool", "both", "float"])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_transformer_encoder(masks: str, mode: str, norm_first: bool, nested: bool) -> None:
    model = encoder(norm_first, nested).train(mode == "train")
    x = torch.randn(2, 5, 16)
    given_masks = mha_masks(masks, 2, 4, 5, 5)
    kwargs = {
        name: given_masks[theirs]
        for name, theirs in (("mask", "attn_mask"), ("src_key_padding_mask", "key_padding_mask"))
        if theirs in given_masks
    }

    def call() -> Tensor:
        with torch.inference_mode(mode == "inference"):
            return model(x, **kwargs)

    served_only(inside_and_outside(call), 2)


def test_nested_fast_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    varlen = attn_ext.ops.attention_varlen
    monkeypatch.setattr(attn_ext.ops, "attention_varlen", lambda *a: (seen.append(len(a[0])), varlen(*a))[1])
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        served_only(inside_and_outside(lambda: model(x, src_key_padding_mask=padding)), 2)
    assert seen == [8, 8]  # tokens without their padding, once a layer


def test_nested_tensor_of_another_layout() -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])

    def padded(need_weights: bool) -> Tensor:
        with torch.no_grad():
            out, _ = mha(nested, nested, nested, need_weights=need_weights)
        return torch.nested.to_padded_tensor(out, 0.0)

    served_only(inside_and_outside(lambda: padded(False)), 1)
    calls = inside_and_outside(lambda: padded(True))
    assert dict(calls.passed_on) == {"nested tensor with a mask or weights": 1}


# --- the switch -------------------------------------------------------------------------------------------------------


def served(calls: Calls) -> int:
    """Makes one call of torch's attention and tells whether `calls` counted it as served."""
    before = calls.served
    imported_earlier(Q, Q, Q)
    return calls.served - before


def test_nesting_and_leaving() -> None:
    with override_sdpa() as outer:
        with override_sdpa() as inner:
            assert served(inner) == 1
        assert served(inner) == 0
        assert outer.served == 2
    assert served(outer) == 0


def test_leaving_by_an_exception() -> None:
    before = state_of_torch()
    with pytest.raises(ZeroDivisionError), override_sdpa() as calls:
        with pytest.raises(RuntimeError, match="same dtype"):
            imported_earlier(Q, Q.double(), Q)
        assert served(calls) == 1  # an error of torch's does not switch off
        1 / 0  # noqa: B018
    assert state_of_torch() == before
    assert served(calls) == 0


def test_one_object_can_be_entered_again() -> None:
    switch = override_sdpa()
    with switch as first, switch as second:
        assert served(second) == 1
    with switch as third:
        assert served(third) == 1
    assert (first.served, second.served, third.served) == (1, 1, 1)


def test_for_the_process() -> None:
    switch = override_sdpa()
    calls = switch.enable()
    try:
        assert served(calls) == 1
        with pytest.raises(RuntimeError, match="on already"):
            switch.enable()
        with override_sdpa():
            pass
        assert served(calls) == 1
    finally:
        switch.disable()
    assert served(calls) == 0
    with pytest.raises(RuntimeError, match="not on"):
        switch.disable()


def test_all_threads_are_served() -> None:
    q = heads(2, 4, 33, 16)
    expected = attn_ext.scaled_dot_product_attention(q, q, q)
    outputs: list[Tensor] = []
    with override_sdpa() as calls:
        threads = [
            threading.Thread(target=lambda: outputs.extend(imported_earlier(q, q, q) for _ in range(20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    served_only(calls, 80)
    assert len(outputs) == 80 and all(torch.equal(out, expected) for out in outputs)


def test_the_last_of_several_users_switches_off() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with override_sdpa():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with override_sdpa() as calls:
        thread.start()
        entered.wait()
        assert served(calls) == 1
    assert module._switch.on
    leave.set()
    thread.join()
    assert not module._switch.on


def test_counts_in_words() -> None:
    with override_sdpa() as calls:
        imported_earlier(Q, Q, Q)
        for _ in range(2):
            imported_earlier(Q, Q, Q[..., :0])
    assert str(calls) == "1 served, 0 compiled, 2 passed on\n       2  empty tensor"


# --- decorators -------------------------------------------------------------------------------------------------------


def test_decorated_function() -> None:
    @override_sdpa()
    def attend(q: Tensor, *, scale: float) -> Tensor:
        """Attends."""
        assert module._switch.on
        return imported_earlier(q, q, q, scale=scale)

    assert attend.__name__ == "attend" and attend.__doc__ == "Attends."
    assert torch.equal(attend(Q, scale=0.5), attn_ext.scaled_dot_product_attention(Q, Q, Q, scale=0.5))
    assert not module._switch.on
    with pytest.raises(TypeError):
        attend(Q)


def test_decorated_function_that_calls_itself() -> None:
    @override_sdpa()
    def countdown(n: int) -> int:
        assert module._switch.on
        return n if n == 0 else countdown(n - 1)

    assert countdown(3) == 0


def test_decorated_coroutine() -> None:
    @override_sdpa()
    async def attend() -> bool:
        await asyncio.sleep(0)
        return module._switch.on

    assert inspect.iscoroutinefunction(attend)
    assert asyncio.run(attend())


def test_decorated_generator_is_on_only_while_it_runs() -> None:
    closed = []

    @override_sdpa()
    def steps() -> Iterator[Any]:
        try:
            sent = yield module._switch.on
            try:
                yield (module._switch.on, sent)
            except KeyError as error:
                yield (module._switch.on, error.args)
            return "end"  # noqa: B901
        finally:
            closed.append(module._switch.on)

    generator = steps()
    assert next(generator) is True and not module._switch.on
    assert generator.send("hello") == (True, "hello") and not module._switch.on
    assert generator.throw(KeyError("thrown")) == (True, ("thrown",))
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "end" and closed == [True]

    generator = steps()
    next(generator)
    generator.close()
    assert closed == [True, True] and not module._switch.on


def test_what_cannot_be_decorated() -> None:
    async def agen() -> Any:
        yield 1

    with pytest.raises(TypeError, match="async generator"):
        override_sdpa()(agen)
    with pytest.raises(TypeError, match=r"not a Linear.*model\.forward"):
        override_sdpa()(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="the class Linear"):
        override_sdpa()(nn.Linear)
    with pytest.raises(TypeError, match="not a int"):
        override_sdpa()(3)  # type: ignore[arg-type]


def test_forward_of_one_module() -> None:
    model = encoder().eval()
    x = torch.randn(2, 5, 16)
    torchs = model(x)
    model.forward = override_sdpa()(model.forward)
    with override_sdpa() as calls:
        ours = model(x)
    served_only(calls, 2)
    assert_same(ours, torchs)


# --- torch.compile ----------------------------------------------------------------------------------------------------


class Recorder:
    """A backend that notes the operators it is given, after AOTAutograd."""

    def __init__(self) -> None:
        import torch._dynamo  # noqa: F401

        with override_sdpa():
            pass  # the first use forgets what was compiled before
        torch.compiler.reset()
        self.graphs: list[set[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.graphs.append({str(n.target) for n in graph.graph.nodes if n.op == "call_function"})
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=note)(graph, inputs)

    def take(self) -> str:
        """Whose attention the graphs since the last call hold: "ours", "torch's", or "" where nothing was compiled."""
        operators = set().union(*self.graphs)
        self.graphs.clear()
        ours = any(name.startswith("attn_ext.") for name in operators)
        torchs = any("scaled_dot_product" in name or "softmax" in name for name in operators)
        assert not (ours and torchs)
        return "ours" if ours else "torch's" if torchs else ""


def by_module(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q) * 2


def by_name(q: Tensor) -> Tensor:
    return imported_earlier(q, q, q) * 2


@pytest.mark.parametrize("function", [by_module, by_name])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_compiled_code_follows_the_switch(function: Callable[[Tensor], Tensor], needs_grad: bool) -> None:
    q = heads(2, 3, 70, 64).requires_grad_(needs_grad)
    torchs = function(q)
    ours = attn_ext.scaled_dot_product_attention(q, q, q) * 2
    assert not torch.equal(ours, torchs)
    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True)

    assert torch.equal(compiled(q), torchs)
    assert recorder.take() == "torch's"
    with override_sdpa() as calls:  # compiled outside, called inside
        assert torch.equal(compiled(q), ours)
        assert recorder.take() == "ours"
        assert torch.equal(compiled(q), ours)
    assert (calls.served, calls.compiled, dict(calls.passed_on)) == (0, 1, {})
    assert torch.equal(compiled(q), torchs)
    with override_sdpa(), override_sdpa():
        assert torch.equal(compiled(q), ours)
    assert recorder.take() == ""  # both versions are kept

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True)
    with override_sdpa():  # compiled inside, called outside
        assert torch.equal(compiled(q), ours)
    assert recorder.take() == "ours"
    assert torch.equal(compiled(q), torchs)
    assert recorder.take() == "torch's"


def test_compiled_gradients() -> None:
    q = heads(2, 3, 5, 8, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(by_name(q).pow(2).sum(), q)
    compiled = torch.compile(by_name, backend=Recorder(), fullgraph=True)
    with override_sdpa():
        out = compiled(q)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), q)  # after leaving
    assert_same(grad, expected)


def test_compiled_function_that_holds_the_block() -> None:
    def block(q: Tensor) -> tuple[Tensor, Tensor]:
        with override_sdpa():
            inside = imported_earlier(q, q, q)
        return inside, imported_earlier(q, q, q)

    q = heads(2, 3, 70, 64)
    ours, torchs = attn_ext.scaled_dot_product_attention(q, q, q), imported_earlier(q, q, q)
    inside, outside = torch.compile(block, backend="eager", fullgraph=True)(q)
    assert torch.equal(inside, ours) and torch.equal(outside, torchs)
    assert not module._switch.on
    decorated = torch.compile(override_sdpa()(by_name), backend="eager", fullgraph=True)
    assert torch.equal(decorated(q), ours * 2)
    assert not module._switch.on


def test_block_that_the_compiler_leaves_to_eager_mode() -> None:
    counts: list[Calls] = []

    def block(q: Tensor) -> tuple[Tensor, Tensor]:
        with override_sdpa() as calls:
            inside = imported_earlier(q, q, q)
            torch._dynamo.graph_break()
            counts.append(calls)
        return inside, imported_earlier(q, q, q)

    q = heads(2, 3, 70, 64)
    inside, outside = torch.compile(block, backend="eager")(q)
    assert torch.equal(inside, attn_ext.scaled_dot_product_attention(q, q, q))
    assert torch.equal(outside, imported_earlier(q, q, q))
    assert not module._switch.on and counts[0].served == 1


def test_compiled_shapes_that_change() -> None:
    compiled = torch.compile(
        lambda q, k, m: imported_earlier(q, k, k, m), backend=Recorder(), fullgraph=True, dynamic=True
    )
    q = heads(2, 3, 5, 8)
    with override_sdpa() as calls:
        for length in (4, 7, 9):
            k, mask = heads(2, 3, length, 8), torch.rand(2, 1, 5, length) > 0.2
            assert_same(compiled(q, k, mask), attn_ext.scaled_dot_product_attention(q, k, k, mask))
    assert (calls.served, calls.compiled) == (0, 1)


@pytest.mark.parametrize("need_weights", [False, True])
def test_compiled_multihead_attention(need_weights: bool) -> None:
    mha = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    recorder = Recorder()
    compiled = torch.compile(mha, backend=recorder, fullgraph=True)
    expected = mha(x, x, x, need_weights=need_weights)
    assert_same(compiled(x, x, x, need_weights=need_weights), expected)
    assert recorder.take() == "torch's"
    with override_sdpa() as calls:
        assert_same(compiled(x, x, x, need_weights=need_weights), expected)
    if need_weights:
        assert dict(calls.passed_on) == {"weights in compiled code": 1}
    else:
        assert recorder.take() == "ours" and calls.compiled == 1
    recorder.take()
    assert_same(compiled(x, x, x, need_weights=need_weights), expected)
    assert recorder.take() == ""


def test_compiled_encoder() -> None:
    model = encoder(nested=False).eval()
    x = torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend=Recorder(), fullgraph=True)
    with override_sdpa() as calls:
        assert_same(compiled(x), model(x))  # gradients are on: no fast path
    assert (calls.served, calls.compiled) == (2, 2)  # the eager call's layers, the compiled call's layers
    with torch.no_grad():
        expected = compiled(x)
        with override_sdpa() as calls:
            assert_same(compiled(x), expected)
        assert calls.served == 2  # the fast path is one operator in the graph, and dispatched when it runs


def test_compiled_calls_that_are_passed_on() -> None:
    for function, reason in (
        (lambda q: imported_earlier(q, q, q, KEEP, 0.0, True), "is_causal beside attn_mask"),
        (lambda q: torch.vmap(lambda t: imported_earlier(t, t, t))(q[None])[0], "torch.func transform"),
    ):
        torch.compiler.reset()
        expected = function(Q)
        with override_sdpa() as calls:
            assert_same(torch.compile(function, backend="eager", fullgraph=True)(Q), expected)
        assert calls.compiled == calls.served == 0 and set(calls.passed_on) == {reason}


def test_compiled_autocast() -> None:
    def call(q: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return imported_earlier(q, q, q)

    recorder = Recorder()
    with override_sdpa():
        assert_same(torch.compile(call, backend=recorder, fullgraph=True)(Q), call(Q))
    assert recorder.take() == "ours"


def in_a_new_process(code: str) -> None:
    start = "import sys, torch, attn_ext\nfrom attn_ext.integrations import override_sdpa\n" + (
        "F = torch.nn.functional\nq = torch.randn(2, 3, 70, 64)\n"
        "def attend(q): return F.scaled_dot_product_attention(q, q, q)\n"
        "torchs, ours = attend(q), attn_ext.scaled_dot_product_attention(q, q, q)\n"
        "assert not torch.equal(ours, torchs)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


def test_compiler_that_is_imported_while_on() -> None:
    in_a_new_process(
        """
        finders = list(sys.meta_path)
        with override_sdpa():
            assert "torch._dynamo" not in sys.modules
            compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(q), ours)
        assert torch.equal(compiled(q), torchs)
        assert sys.meta_path == finders
        """
    )


def test_code_compiled_before_the_first_use() -> None:
    in_a_new_process(
        """
        finders = list(sys.meta_path)
        with override_sdpa():
            assert torch.equal(attend(q), ours)
        assert sys.meta_path == finders and "torch._dynamo" not in sys.modules
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q), torchs)
        with override_sdpa():
            assert torch.equal(compiled(q), ours)
        assert torch.equal(compiled(q), torchs)
        """
    )


def test_a_compiler_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import trace_rules

    monkeypatch.setattr(module, "_dynamo_taught", False)
    monkeypatch.delattr(trace_rules, "get_torch_obj_rule_map")
    with pytest.warns(UserWarning, match="does not know the compiler of torch"), override_sdpa() as calls:
        assert served(calls) == 1
