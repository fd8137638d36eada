"""Bad input: an error that names the op, what was expected and what came. Never a crash, never a read out of bounds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from op_support import make, raw_backward, raw_forward, raw_inference, raw_weights
from torch import Tensor
from torch.autograd import forward_ad

import attn_ext
from attn_ext import reference

Q, K, V = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 12)
# What a direct call of an op may raise: the stable ABI knows three kinds, torch's argument parser adds TypeError.
FROM_OPS = (ValueError, IndexError, RuntimeError, TypeError)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of a shape."""
    return make(shape, dtype)


def refused(
    errors: Any, words: tuple[str, ...], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """The call raises one of `errors`, and its message names the op and holds every one of `words`."""
    with pytest.raises(errors) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "attention" in message, f"does not name the op: {message}"
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


# name: shapes of q, k, v, and what the message must name.
BAD_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {
    "head dims of q and k differ": ((2, 4, 5, 16), (2, 4, 7, 8), (2, 4, 7, 8), ("16", "8")),
    "lengths of k and v differ": ((2, 4, 5, 16), (2, 4, 10, 16), (2, 4, 9, 16), ("10", "9")),
    "3 query heads on 2": ((2, 3, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16), ("3", "2")),
    "33 query heads on 2": ((1, 33, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), ("33", "2")),
    "4 query heads on 0": ((2, 4, 5, 16), (2, 0, 7, 16), (2, 0, 7, 16), ("4", "0")),
    "2 query heads on 4": ((2, 2, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16), ("2", "4")),
    "k with 8 heads, v with 4": ((2, 8, 5, 16), (2, 8, 7, 16), (2, 4, 7, 16), ("8", "4")),
    "batch 4 and 3": ((4, 2, 5, 16), (3, 2, 7, 16), (3, 2, 7, 16), ("4", "3")),
    "batch of v differs": ((4, 2, 5, 16), (4, 2, 7, 16), (3, 2, 7, 16), ("4", "3")),
    "head dim 0": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 16), ("0",)),
    "1-D": ((16,), (16,), (16,), ("16",)),
    "2-D": ((5, 16), (7, 16), (7, 16), ("5", "7")),
    "6-D": ((1, 1, 1, 2, 5, 16), (1, 1, 1, 2, 7, 16), (1, 1, 1, 2, 7, 16), ("5", "7")),
    "4-D q, 3-D k and v": ((2, 4, 5, 16), (4, 7, 16), (4, 7, 16), ("7",)),
    "3-D q, 4-D k and v": ((4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16), ("7",)),
    "3-D v": ((2, 4, 5, 16), (2, 4, 7, 16), (4, 7, 16), ("7",)),
    "5-D outer batch differs": ((3, 2, 4, 5, 16), (2, 2, 4, 7, 16), (2, 2, 4, 7, 16), ("3", "2")),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", BAD_SHAPES)
def test_shapes_that_do_not_fit_are_refused_with_their_numbers(case: str, grad: bool) -> None:
    *shapes, words = BAD_SHAPES[case]
    q, k, v = (floats(*shape).requires_grad_(grad) for shape in shapes)
    refused(ValueError, words, attn_ext.attention, q, k, v)
    refused(ValueError, words, attn_ext.attention, q, k, v, bias=floats(1))
    refused(FROM_OPS, words, raw_inference, q.detach(), k.detach(), v.detach())
    refused(FROM_OPS, words, raw_forward, q.detach(), k.detach(), v.detach())
    if case not in ("k with 8 heads, v with 4", "lengths of k and v differ", "batch of v differs", "3-D v"):
        refused(ValueError, words, attn_ext.attention_weights, q, k)
        refused(FROM_OPS, words, raw_weights, q.detach(), k.detach(), num_queries=5)


def test_a_batch_of_one_for_k_and_v_is_refused_or_truly_broadcast() -> None:
    q, k, v = floats(4, 2, 5, 16), floats(1, 2, 7, 16), floats(1, 2, 7, 16)
    for function in (attn_ext.attention, raw_inference):
        try:
            out = function(q, k, v)
        except ValueError as error:
            assert "4" in str(error) and "1" in str(error)
        else:
            expected = attn_ext.attention(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_q_k_v_of_different_dtypes_are_refused_naming_all_three(grad: bool) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    q, k, v = (
        floats(*shape, dtype=d).requires_grad_(grad) for shape, d in zip((Q, K, V), dtypes, strict=True)
    )
    refused(TypeError, ("float32", "float16", "bfloat16"), attn_ext.attention, q, k, v)
    refused(TypeError, ("float32", "bfloat16"), attn_ext.attention, q, k.float(), v)
    refused(FROM_OPS, (), raw_inference, q.detach(), k.detach(), v.detach())
    refused(FROM_OPS, (), raw_forward, q.detach(), k.detach(), v.detach())
    refused(TypeError, ("float32", "float16"), attn_ext.attention_weights, q, k)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_dtypes_that_attention_cannot_work_in_are_refused(dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(shape, dtype=torch.float32).to(dtype) for shape in (Q, K, V))
    refused(TypeError, (str(dtype).removeprefix("torch."),), attn_ext.attention, q, k, v)
    refused(FROM_OPS, (), raw_inference, q, k, v)
    refused(FROM_OPS, (), raw_forward, q, k, v)
    refused(FROM_OPS, (), raw_weights, q, k)


@pytest.mark.parametrize("wrong", [np.zeros(Q, dtype=np.float32), [[1.0, 2.0]], None, 3, "q"], ids=type)
def test_things_that_are_no_tensors_are_refused(wrong: Any) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for args in ((wrong, k, v), (q, wrong, v), (q, k, wrong)):
        with pytest.raises(TypeError):
            attn_ext.attention(*args)
    for name in ("mask", "bias", "alibi_slopes", "sinks", "key_lengths"):
        if wrong is not None:
            with pytest.raises(TypeError):
                attn_ext.attention(q, k, v, **{name: wrong})


def test_tensors_on_different_devices_are_refused_naming_both() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for args in ((q.to("meta"), k, v), (q, k.to("meta"), v), (q, k, v.to("meta"))):
        refused((ValueError, RuntimeError, TypeError), ("cpu", "meta"), attn_ext.attention, *args)
        refused(
            (ValueError, RuntimeError, TypeError),
            ("cpu", "meta"),
            attn_ext.attention_weights,
            q,
            k.to("meta"),
        )
    for name, value in (
        ("mask", torch.ones(7, dtype=torch.bool)),
        ("bias", floats(7)),
        ("alibi_slopes", floats(4)),
        ("sinks", floats(4)),
        ("key_lengths", torch.tensor([3, 4])),
    ):
        refused(
            (ValueError, RuntimeError, TypeError),
            ("meta",),
            attn_ext.attention,
            q,
            k,
            v,
            **{name: value.to("meta")},
        )


@pytest.mark.parametrize("rows", [None, [1]], ids=["all rows", "one row"])
def test_weights_of_tensors_on_different_devices_are_refused(rows: list[int] | None) -> None:
    q, k = floats(*Q), floats(*K)
    for name, value in (
        ("mask", torch.ones(5, 7, dtype=torch.bool)),
        ("bias", floats(5, 7)),
        ("alibi_slopes", floats(4)),
        ("sinks", floats(4)),
        ("key_lengths", torch.tensor([3, 4])),
    ):
        words = ("attention_weights", "cpu", "meta")
        refused(ValueError, words, attn_ext.attention_weights, q, k, rows=rows, **{name: value.to("meta")})
    refused(ValueError, ("meta",), attn_ext.attention_weights, q, k, heads=torch.tensor([1], device="meta"))


def test_raw_ops_refuse_a_mixture_of_devices() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    words = ("one device", "cpu", "meta")
    for args in ((q.to("meta"), k, v), (q, k.to("meta"), v), (q, k, v.to("meta"))):
        refused(ValueError, words, raw_inference, *args)
        refused(ValueError, words, raw_forward, *args)
    refused(ValueError, words, raw_weights, q, k.to("meta"))
    options: dict[str, Tensor] = {
        "mask": torch.ones(5, 7, dtype=torch.bool),
        "bias": floats(5, 7),
        "bias2": floats(5, 7),
        "alibi_slopes": floats(4),
        "sinks": floats(4),
        "key_lengths": torch.tensor([3, 4]),
    }
    out, lse, row_max, row_sum = raw_forward(q, k, v)
    saved = {"grad_out": out, "grad_lse": lse, "q": q, "k": k, "v": v}
    saved |= {"out": out, "row_max": row_max, "row_sum": row_sum}
    for name, value in options.items():
        refused(ValueError, words, raw_forward, q, k, v, **{name: value.to("meta")})
        refused(ValueError, words, raw_weights, q, k, **{name: value.to("meta")})
        refused(ValueError, words, raw_backward, **saved, **{name: value.to("meta")})
    refused(
        ValueError, words, raw_forward, q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(1, device="meta")
    )
    refused(ValueError, words, raw_weights, q, k, torch.arange(5, device="meta"), 5)
    for name, value in saved.items():
        refused(ValueError, words, raw_backward, **{**saved, name: value.to("meta")})


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_tensors_without_data_are_refused_as_those_with_data_are(case: str) -> None:
    *shapes, words = BAD_SHAPES[case]
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    refused(ValueError, words, attn_ext.attention, q, k, v)
    refused(ValueError, words, raw_forward, q, k, v)
    refused(ValueError, words, raw_inference, q, k, v)


@pytest.mark.parametrize("road", ["kernel", "no data", "vmap", "jvp", "reference"])
def test_every_road_refuses_the_same_options(road: str) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)

    def attend(name: str, **options: Any) -> Any:
        """Through one of the roads: attention, or the weights."""
        function = reference if road == "reference" else attn_ext
        if name == "attention":
            return lambda q, k, v: function.attention(q, k, v, **options)
        return lambda q, k, v: function.attention_weights(q, k, **options)

    def call(name: str, **options: Any) -> Any:
        if road == "no data":
            options = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in options.items()}
            return attend(name, **options)(*(x.to("meta") for x in (q, k, v)))
        if road == "vmap":
            return torch.func.vmap(attend(name, **options), out_dims=0)(*(x[None] for x in (q, k, v)))
        if road == "jvp":
            return torch.func.jvp(lambda q: attend(name, **options)(q, k, v), (q,), (q,))
        return attend(name, **options)(q, k, v)

    for name in ("attention", "attention_weights"):
        call(name, softcap=2.0, scale=0.5, alibi_slopes=floats(2, 4), key_lengths=torch.tensor([0, 7]))
        for option, value, words in (
            ("scale", math.nan, ("scale", "finite", "nan")),
            ("scale", math.inf, ("scale", "finite", "inf")),
            ("softcap", -1.0, ("softcap", "-1")),
            ("softcap", math.nan, ("softcap", "nan")),
            ("key_lengths", torch.tensor([1]), ("key_lengths", "2")),
            ("alibi_slopes", floats(2, 2), ("alibi_slopes", "(2, 2)")),
            ("alibi_slopes", floats(1, 4, 1), ("alibi_slopes", "(1, 4, 1)")),
            ("sinks", floats(3), ("sinks", "(3,)")),
            ("mask", torch.ones(4, 7, dtype=torch.bool), ("mask", "(4, 7)")),
            ("bias", floats(4, 7), ("bias", "(4, 7)")),
            ("window", (-1, 0), ("window",)),
        ):
            refused(
                ValueError,
                words if road == "reference" else (f"attn_ext.{name}:", *words),
                call,
                name,
                **{option: value},
            )
        if road != "reference":  # it takes slopes of every float dtype
            refused(ValueError, ("float32", "float64"), call, name, alibi_slopes=floats(4).double())
        if road != "no data":
            for lengths, word in (([1, 99], "99"), ([-1, 1], "-1")):
                refused(ValueError, ("key_lengths", word), call, name, key_lengths=torch.tensor(lengths))


def test_one_length_for_each_example_of_vmap_is_taken() -> None:
    q, k, v = floats(3, *Q), floats(*K), floats(*V)
    lengths = torch.tensor([[7, 1], [3, 7], [0, 5]])
    out = torch.func.vmap(lambda q, n: attn_ext.attention(q, k, v, key_lengths=n))(q, lengths)
    for n in range(3):
        torch.testing.assert_close(out[n], attn_ext.attention(q[n], k, v, key_lengths=lengths[n]))


def test_errors_name_the_function_that_was_called() -> None:
    q, k, v = floats(*Q), floats(*K)[..., :8], floats(*V)
    x = floats(9, 4, 16)
    for name, call in (
        ("attention", lambda: attn_ext.attention(q, k, v)),
        ("attention", lambda: attn_ext.attention(q, k, v, return_lse=True)),
        ("attention", lambda: attn_ext.attention(q.clone().requires_grad_(), k, v)),
        ("attention_weights", lambda: attn_ext.attention_weights(q, k)),
        ("scaled_dot_product_attention", lambda: attn_ext.scaled_dot_product_attention(q, q, q[..., :3, :])),
        (
            "attention_varlen",
            lambda: attn_ext.attention_varlen(x, x, x, torch.tensor([0, 8]), torch.tensor([0, 9])),
        ),
    ):
        with pytest.raises(ValueError, match=f"^attn_ext.{name}: "):
            call()


@pytest.mark.parametrize(
    "number", [torch.tensor(0.5), torch.nn.Parameter(torch.tensor(0.0)), "a", None, [1.0]]
)
def test_numbers_must_be_plain_so_that_no_gradient_is_lost(number: Any) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    cu = torch.tensor([0, 4])
    for name in ("scale", "softcap", "dropout_p"):
        if number is None and name != "dropout_p":
            continue
        words = (name, "number")
        refused(TypeError, words, attn_ext.attention, q, k, v, **{name: number})
        refused(TypeError, words, attn_ext.attention, q, k, v, return_lse=True, **{name: number})
        x = floats(4, 2, 16)
        refused(TypeError, words, attn_ext.attention_varlen, x, x, x, cu, cu, **{name: number})
        if name != "dropout_p":
            refused(TypeError, words, attn_ext.attention_weights, q, k, **{name: number})
        if name != "softcap":
            refused(TypeError, words, attn_ext.scaled_dot_product_attention, q, q, q, **{name: number})


def test_numbers_of_numpy_are_plain_numbers() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    actual = attn_ext.attention(
        q, k, v, scale=np.float32(0.5), softcap=np.float64(2), window=(np.int64(2), 1)
    )
    torch.testing.assert_close(actual, attn_ext.attention(q, k, v, scale=0.5, softcap=2, window=(2, 1)))


def test_none_is_no_corner_and_an_integer_beyond_float_no_number() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    refused(ValueError, ("causal", "None"), attn_ext.attention, q, k, v, causal=None)
    refused(ValueError, ("scale", "float"), attn_ext.attention, q, k, v, scale=10**400)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", ["bool mask", "float mask", "bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 5, 6),
        (2, 4, 4, 7),
        (3, 4, 5, 7),
        (2, 3, 5, 7),
        (2, 5, 7),
        (3, 5, 7),
        (6,),
        (1, 2, 4, 5, 7),
        (0,),
    ],
)
def test_masks_that_do_not_broadcast_are_refused_naming_both_shapes(
    shape: tuple[int, ...], kind: str, grad: bool
) -> None:
    q, k, v = (floats(*s).requires_grad_(grad) for s in (Q, K, V))
    part = torch.ones(shape, dtype=torch.bool if kind == "bool mask" else torch.float32)
    name = kind.split()[-1]
    # The shape that came, and the sizes it had to broadcast to.
    words = (str(shape[-1]), str(shape[0]), "2", "4", "5", "7", "mask" if kind == "bool mask" else "bias")
    refused(ValueError, words, attn_ext.attention, q, k, v, **{name: part})
    refused(ValueError, words, attn_ext.attention_weights, q, k, **{name: part})
    raw = {"mask": part} if kind == "bool mask" else {"bias": part}
    for option in (raw, {"bias2": part} if kind != "bool mask" else raw):
        refused(FROM_OPS, (), raw_forward, q.detach(), k.detach(), v.detach(), **option)
        refused(FROM_OPS, (), raw_weights, q.detach(), k.detach(), **option)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_masks_of_integers_are_refused_with_the_advice_to_use_bool(dtype: torch.dtype) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    mask = torch.ones(5, 7).to(dtype)
    refused(
        TypeError, ("mask", "bool", str(dtype).removeprefix("torch.")), attn_ext.attention, q, k, v, mask=mask
    )
    refused(TypeError, ("bool",), attn_ext.attention_weights, q, k, mask=mask)
    refused(TypeError, ("bias",), attn_ext.attention, q, k, v, bias=mask)
    refused(FROM_OPS, (), raw_forward, q, k, v, mask=mask)
    refused(FROM_OPS, (), raw_forward, q, k, v, bias=mask)


def test_a_bool_bias_is_refused() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    refused(TypeError, ("bias", "bool"), attn_ext.attention, q, k, v, bias=torch.ones(5, 7, dtype=torch.bool))
    refused(FROM_OPS, (), raw_forward, q, k, v, bias=torch.ones(5, 7, dtype=torch.bool))
    refused(FROM_OPS, (), raw_forward, q, k, v, mask=floats(5, 7))


def test_causal_true_needs_as_many_keys_as_queries_and_the_error_names_both_corners() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for function in (attn_ext.attention, lambda q, k, v, **o: attn_ext.attention_weights(q, k, **o)):
        refused(ValueError, ("top_left", "bottom_right", "5", "7"), function, q, k, v, causal=True)
        refused(ValueError, ("top_left", "bottom_right", "middle"), function, q, k, v, causal="middle")
    for causal in (3, -1, 2**40):
        refused(FROM_OPS, ("causal",), raw_forward, q, k, v, causal=causal)
        refused(FROM_OPS, ("causal",), raw_inference, q, k, v, causal)
        refused(FROM_OPS, ("causal",), raw_weights, q, k, causal=causal)


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (-5, None), (None, -2)])
def test_negative_windows_are_refused(window: tuple[int | None, int | None]) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    refused(ValueError, ("window", "-"), attn_ext.attention, q, k, v, window=window)
    refused(FROM_OPS, ("window",), raw_forward, q, k, v, window_left=window[0], window_right=window[1])
    refused(FROM_OPS, ("window",), raw_weights, q, k, window_left=window[0], window_right=window[1])


@pytest.mark.parametrize(
    "window", [3, (1,), (1, 2, 3), "left", (1.5, 2), ("a", 1), (1, True), (torch.tensor(1), 1)]
)
def test_windows_that_are_no_pair_of_integers_are_refused(window: Any) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    refused(ValueError, ("window",), attn_ext.attention, q, k, v, window=window)


def test_a_window_that_reaches_further_than_any_sequence_has_no_bound() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for size in (2**41, 2**63 - 1, 2**64, 2**70):
        assert torch.equal(attn_ext.attention(q, k, v, window=(size, size)), attn_ext.attention(q, k, v))
        expected = attn_ext.attention(q, k, v, window=(None, 0))
        assert torch.equal(attn_ext.attention(q, k, v, window=(size, 0)), expected)


@pytest.mark.parametrize("shape", [(3,), (5,), (), (1, 4, 1), (2, 3), (3, 4), (0,)])
def test_alibi_slopes_and_sinks_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for name in ("alibi_slopes", "sinks"):
        words = (name, "4", *(str(n) for n in shape))
        refused(ValueError, words, attn_ext.attention, q, k, v, **{name: floats(*shape)})
        refused(ValueError, words, attn_ext.attention_weights, q, k, **{name: floats(*shape)})
        refused(FROM_OPS, (name,), raw_forward, q, k, v, **{name: floats(*shape)})


def test_sinks_per_batch_entry_and_integer_sinks_and_slopes_are_refused() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    refused(ValueError, ("sinks", "4", "2"), attn_ext.attention, q, k, v, sinks=floats(2, 4))
    for name in ("alibi_slopes", "sinks"):
        refused(
            (TypeError, ValueError),
            (name,),
            attn_ext.attention,
            q,
            k,
            v,
            **{name: torch.ones(4, dtype=torch.int64)},
        )
        refused(FROM_OPS, (name,), raw_forward, q, k, v, **{name: torch.ones(4, dtype=torch.int64)})


def test_asking_for_the_gradient_of_alibi_slopes_raises() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    slopes = torch.linspace(0.1, 0.5, 4).requires_grad_(True)
    refused((ValueError, RuntimeError), ("alibi_slopes",), attn_ext.attention, q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        attn_ext.attention(q, k, v, alibi_slopes=slopes)  # nobody asks
    slopes = slopes.detach()
    for call in (
        lambda s: attn_ext.attention(q, k, v, alibi_slopes=s),
        lambda s: attn_ext.attention_weights(q, k, alibi_slopes=s),
    ):
        refused(ValueError, ("alibi_slopes",), torch.func.jvp, call, (slopes,), (slopes,))
        with forward_ad.dual_level():
            refused(ValueError, ("alibi_slopes",), call, forward_ad.make_dual(slopes, slopes))
            refused(
                ValueError,
                ("alibi_slopes",),
                torch.compile(call, backend="eager"),
                forward_ad.make_dual(slopes, slopes),
            )


def test_key_lengths_that_do_not_fit_are_refused() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for wrong in (
        torch.tensor([1]),
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]]),
        torch.zeros(0, dtype=torch.int64),
    ):
        refused(ValueError, ("key_lengths", "2"), attn_ext.attention, q, k, v, key_lengths=wrong)
        refused(FROM_OPS, ("key_lengths",), raw_forward, q, k, v, key_lengths=wrong)
        refused(FROM_OPS, ("key_lengths",), raw_weights, q, k, key_lengths=wrong)
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor([True, False])):
        refused((TypeError, ValueError), ("key_lengths",), attn_ext.attention, q, k, v, key_lengths=wrong)
        refused(FROM_OPS, ("key_lengths",), raw_forward, q, k, v, key_lengths=wrong)
    for bad in (-1, 8, 2**31, -(2**31), 2**40):
        lengths = torch.tensor([3, bad])
        refused(
            (ValueError, IndexError),
            ("key_lengths", str(bad), "7"),
            attn_ext.attention,
            q,
            k,
            v,
            key_lengths=lengths,
        )
        refused(FROM_OPS, ("key_lengths",), raw_forward, q, k, v, key_lengths=lengths)
        refused(FROM_OPS, ("key_lengths",), raw_weights, q, k, key_lengths=lengths)


def test_the_dropout_seed_must_be_one_64_bit_integer() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    for wrong in (
        None,
        torch.tensor([1, 2]),
        torch.tensor(1.0),
        torch.tensor(1, dtype=torch.int32),
        torch.zeros(0).long(),
    ):
        refused(FROM_OPS, ("dropout_seed",), raw_forward, q, k, v, dropout_p=0.5, dropout_seed=wrong)


# ------------------------------------------------------------------------------------------- packed sequences


def test_cumulative_lengths_that_do_not_fit_are_refused() -> None:
    q, k, v = floats(9, 4, 16), floats(12, 2, 16), floats(12, 2, 16)
    good_q, good_k = [0, 4, 9], [0, 5, 12]
    call = attn_ext.attention_varlen
    call(q, k, v, torch.tensor(good_q), torch.tensor(good_k))
    total = {"q": 9, "k": 12}
    for which, n in total.items():
        for wrong in (
            [1, 4, n],
            [0, 4, n - 1],
            [0, 4, n + 1],
            [0, n + 1, n],
            [0, -1, n],
            [0, 2**31, n],
            [0, 4, 2**40],
            [0, 2**40, n],
            [-(2**40), 4, n],
        ):
            pair = {"q": torch.tensor(good_q), "k": torch.tensor(good_k), which: torch.tensor(wrong)}
            word = (f"cu_seqlens_{which}",)
            refused((ValueError, IndexError), word, call, q, k, v, *pair.values())
            through_jvp = (lambda q, p=pair: call(q, k, v, *p.values()), (q,), (q,))
            refused(ValueError, word, torch.func.jvp, *through_jvp)
            refused(FROM_OPS, word, raw_forward, q, k, v, **{f"cu_seqlens_{x}": y for x, y in pair.items()})
    good_q, good_k = torch.tensor(good_q), torch.tensor(good_k)
    for bad_q, bad_k in (
        (good_q, torch.tensor([0, 12])),  # not as many sequences
        (good_q.float(), good_k),
        (good_q, good_k.bool()),
        (good_q[None], good_k[None]),
        (good_q[:0], good_k[:0]),
        (torch.tensor(0), torch.tensor(0)),
    ):
        refused((ValueError, TypeError), ("cu_seqlens",), call, q, k, v, bad_q, bad_k)
        through_jvp = (lambda q, a=bad_q, b=bad_k: call(q, k, v, a, b), (q,), (q,))
        refused((ValueError, TypeError), ("cu_seqlens",), torch.func.jvp, *through_jvp)
        refused(FROM_OPS, ("cu_seqlens",), raw_forward, q, k, v, cu_seqlens_q=bad_q, cu_seqlens_k=bad_k)
    x = floats(4, 9, 16)  # would pass for one sequence of nine rows and four heads
    for which in ("cu_seqlens_q", "cu_seqlens_k"):
        refused(FROM_OPS, ("cu_seqlens",), raw_forward, x, x, x, **{which: torch.tensor([0, 2, 4])})


@pytest.mark.parametrize("wrong", [None, [0, 8], (0, 8), np.array([0, 8]), 8], ids=type)
def test_cumulative_lengths_that_are_no_tensors_are_refused(wrong: Any) -> None:
    for x in (floats(8, 4, 16), floats(2, 8, 4, 16)):
        cu = torch.tensor([0, 8])
        for causal in (False, True):
            words = ("attention_varlen", "must be a tensor of int32 or int64", type(wrong).__name__)
            call = attn_ext.attention_varlen
            refused(TypeError, ("cu_seqlens_q", *words), call, x, x, x, wrong, cu, causal=causal)
            refused(TypeError, ("cu_seqlens_k", *words), call, x, x, x, cu, wrong, causal=causal)


def test_packed_tensors_that_do_not_fit_are_refused() -> None:
    cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12])
    call = attn_ext.attention_varlen
    for q, k, v, words in (
        ((9, 4, 16), (12, 2, 8), (12, 2, 8), ("16", "8")),
        ((9, 4, 16), (12, 3, 16), (12, 3, 16), ("4", "3")),
        ((9, 4, 16), (12, 2, 16), (11, 2, 16), ("12", "11")),
        ((2, 4, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16), ()),
        ((9, 16), (12, 16), (12, 16), ()),
        ((9, 4, 0), (12, 2, 0), (12, 2, 16), ("0",)),
    ):
        tensors = [floats(*shape) for shape in (q, k, v)]
        refused(ValueError, words, call, *tensors, cu_q, cu_k)
        refused(FROM_OPS, words, raw_forward, *tensors, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(TypeError):
        call(floats(9, 4, 16), floats(12, 2, 16).double(), floats(12, 2, 16), cu_q, cu_k)
    # Sequences of different lengths: causal=True cannot say which corner is meant.
    refused(
        ValueError,
        ("top_left",),
        call,
        floats(9, 4, 16),
        floats(12, 2, 16),
        floats(12, 2, 16),
        cu_q,
        cu_k,
        causal=True,
    )


# ------------------------------------------------------------------------------------------ the other raw ops


def test_backward_refuses_tensors_that_do_not_belong_together() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    out, lse, row_max, row_sum = raw_forward(q, k, v)
    good: dict[str, Any] = {
        "grad_out": torch.ones_like(out),
        "grad_lse": torch.ones_like(lse),
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "row_max": row_max,
        "row_sum": row_sum,
    }
    assert raw_backward(**good)[0].shape == q.shape
    for name, value in good.items():
        for wrong in (
            value[..., :-1],
            value[:1],
            value[:, :1],
            value[None],
            value.to(torch.int64),
            value.double(),
            value.new_zeros(()),
            value.new_zeros(0),
        ):
            if name in ("k", "v") and wrong.shape[1:2] == (1,):
                continue  # one key/value head would be a call of its own
            refused(FROM_OPS, (), raw_backward, **{**good, name: wrong})
    for grads in (-1, 64, 2**40):
        refused(FROM_OPS, ("grads",), raw_backward, **good, grads=grads)
    for grads, missing in ((8, "bias"), (16, "bias2"), (32, "sinks")):
        refused(FROM_OPS, (missing,), raw_backward, **good, grads=grads)


def test_weights_op_refuses_positions_that_do_not_fit() -> None:
    q, k = floats(2, 4, 3, 16), floats(*K)
    raw_weights(q, k, torch.tensor([0, 4, 2]), 5)
    for positions, num_queries in (
        (torch.tensor([0, 5, 2]), 5),
        (torch.tensor([0, -1, 2]), 5),
        (torch.tensor([0, 2**40, 2]), 5),
        (torch.tensor([0, 1]), 5),
        (torch.tensor([[0, 1, 2]]), 5),
        (torch.tensor([0.0, 1.0, 2.0]), 5),
        (torch.tensor([0, 1, 2]), -5),
        (torch.tensor([0, 1, 2]), -(2**63)),
        (torch.tensor([0, 1, 2]), 2**41),
    ):
        refused(FROM_OPS, (), raw_weights, q, k, positions, num_queries)


def test_unknown_options_are_refused_and_options_are_keyword_only() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    with pytest.raises(TypeError):
        attn_ext.attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError):
        attn_ext.attention(q, k, v, torch.ones(5, 7, dtype=torch.bool))
    names = list(inspect.signature(attn_ext.attention).parameters)
    assert names == [
        *("q", "k", "v", "mask", "bias", "causal", "window", "scale", "softcap", "alibi_slopes", "sinks"),
        *("key_lengths", "dropout_p", "return_lse", "return_weights"),
    ]


def test_a_refused_call_leaves_the_next_one_right() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    expected = attn_ext.attention(q, k, v)
    for _ in range(3):
        with pytest.raises(ValueError):
            attn_ext.attention(q, k[..., :8], v)
        assert torch.equal(attn_ext.attention(q, k, v), expected)


def test_sparse_and_quantised_tensors_raise_instead_of_being_misread() -> None:
    q, k, v = floats(*Q), floats(*K), floats(*V)
    sparse = q.to_sparse()
    with pytest.raises(FROM_OPS):
        attn_ext.attention(sparse, k, v)
    with pytest.raises(FROM_OPS):
        attn_ext.attention(q, k, v, mask=(floats(5, 7) > 0).to_sparse())


# ---------------------------------------------------------------------------------------- fuzzing the raw ops

ANY_DTYPE = st.sampled_from(
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.complex64,
    ]
)
ODD_INTEGERS = st.sampled_from([-(2**63), -(2**40), -2, -1, 0, 1, 2, 3, 7, 64, 2**31, 2**40, 2**63 - 1])
ODD_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1.0, 1e-300, 1e300])


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """A tensor of any rank from 0 to 6, any small sizes, any dtype, some with strides of zero, some transposed."""
    shape = draw(st.lists(st.integers(0, 5), max_size=6))
    tensor = torch.ones(shape, dtype=draw(ANY_DTYPE))
    change = draw(st.sampled_from(["none", "expand", "transpose", "step", "overlap"]))
    if change == "expand" and shape:
        tensor = tensor[..., :1].expand(shape) if shape[-1] else tensor
    elif change == "transpose" and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    elif change == "step" and shape:
        tensor = tensor[..., ::2]
    elif change == "overlap" and tensor.numel() > 6:
        tensor = torch.as_strided(tensor, (3, 3), (1, 1))
    return tensor


@st.composite
def near_miss(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """A tensor that fits, changed in one respect: a size, a rank, a dtype, a stride."""
    how = draw(st.sampled_from(["shorter", "longer", "rank up", "rank down", "dtype", "stride", "any"]))
    if how == "any" or tensor.dim() == 0:
        return draw(any_tensor())
    dim = draw(st.integers(0, tensor.dim() - 1))
    if how == "shorter":
        return tensor.narrow(dim, 0, draw(st.integers(0, tensor.shape[dim])))
    if how == "longer":
        return torch.cat([tensor, tensor], dim)
    if how == "rank up":
        return tensor.unsqueeze(dim)
    if how == "rank down":
        return tensor.select(dim, 0) if tensor.shape[dim] else tensor.flatten()
    if how == "dtype":
        return tensor.to(draw(ANY_DTYPE))
    return tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape)


def valid_call() -> dict[str, Any]:
    """Arguments of `attention_forward` that fit together, every option in use."""
    return {
        "q": floats(*Q),
        "k": floats(*K),
        "v": floats(*V),
        "mask": torch.ones(2, 1, 5, 7, dtype=torch.bool),
        "bias": floats(4, 5, 7),
        "bias2": floats(2, 1, 1, 7),
        "alibi_slopes": floats(4),
        "sinks": floats(4),
        "key_lengths": torch.tensor([7, 3]),
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "dropout_seed": torch.tensor(5),
        "causal": 2,
        "window_left": 4,
        "window_right": 2,
        "scale": 0.3,
        "softcap": 2.0,
        "dropout_p": 0.25,
    }


@st.composite
def spoiled(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A call with one to three of its arguments replaced."""
    call = dict(good)
    for name in draw(st.lists(st.sampled_from(sorted(call)), min_size=1, max_size=3, unique=True)):
        value = call[name]
        if isinstance(value, Tensor):
            optional = [] if name in ("q", "k", "v", "out", "grad_out", "row_max", "row_sum") else [st.none()]
            call[name] = draw(st.one_of(near_miss(value), any_tensor(), *optional))
        elif value is None:
            call[name] = draw(st.one_of(any_tensor(), st.just(torch.tensor([0, 2]))))
        elif isinstance(value, int):
            call[name] = draw(ODD_INTEGERS)
        else:
            call[name] = draw(ODD_FLOATS)
    return call


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=400)
def test_fuzzed_forward_calls_return_the_right_shapes_or_raise(data: st.DataObject) -> None:
    call = data.draw(spoiled(valid_call()))
    try:
        out, lse, row_max, row_sum = torch.ops.attn_ext.attention_forward(**call)
    except FROM_OPS:
        return
    q, v = call["q"], call["v"]
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == q.dtype
    if call["cu_seqlens_q"] is None:
        assert lse.shape == q.shape[:-1] and row_max.shape == lse.shape and row_sum.shape == lse.shape


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=400)
def test_fuzzed_backward_calls_return_the_right_shapes_or_raise(data: st.DataObject) -> None:
    call = valid_call()
    out, lse, row_max, row_sum = torch.ops.attn_ext.attention_forward(**call)
    call |= {"grad_out": torch.ones_like(out), "grad_lse": torch.ones_like(lse)}
    call |= {"out": out, "row_max": row_max, "row_sum": row_sum, "grads": 63}
    call = data.draw(spoiled(call))
    try:
        grads = torch.ops.attn_ext.attention_backward(**call)
    except FROM_OPS:
        return
    for bit, name, grad in zip(
        (1, 2, 4, 8, 16, 32), ("q", "k", "v", "bias", "bias2", "sinks"), grads, strict=True
    ):
        assert grad.shape == (call[name].shape if call["grads"] & bit else (0,)), name


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300)
def test_fuzzed_inference_calls_return_the_right_shapes_or_raise(data: st.DataObject) -> None:
    good = {"q": floats(*Q), "k": floats(*K), "v": floats(*V), "causal": 1, "scale": 0.5}
    call = data.draw(spoiled(good))
    try:
        out = torch.ops.attn_ext.attention_inference(**call)
    except FROM_OPS:
        return
    assert out.shape == (*call["q"].shape[:-1], call["v"].shape[-1]) and out.dtype == call["q"].dtype


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300)
def test_fuzzed_weights_calls_return_the_right_shapes_or_raise(data: st.DataObject) -> None:
    good = valid_call()
    for name in ("v", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed", "dropout_p"):
        del good[name]
    good |= {
        "row_max": None,
        "row_sum": None,
        "row_positions": torch.tensor([0, 1, 2, 3, 4]),
        "num_queries": 5,
    }
    call = data.draw(spoiled(good))
    try:
        weights = torch.ops.attn_ext.attention_weights(**call)
    except FROM_OPS:
        return
    assert weights.shape == (*call["q"].shape[:-1], call["k"].shape[-2])


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_fuzzed_packed_calls_return_the_right_shapes_or_raise(data: st.DataObject) -> None:
    good = valid_call() | {"q": floats(9, 4, 16), "k": floats(12, 2, 16), "v": floats(12, 2, 12)}
    good |= {"mask": None, "bias": None, "bias2": None, "key_lengths": None}
    good |= {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 5, 12])}
    call = data.draw(spoiled(good))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        # Right shape, wrong values: the case where only a check of every value prevents a read out of bounds.
        if call[name] is good[name] and data.draw(st.booleans()):
            values = data.draw(st.lists(st.integers(-3, 15), min_size=3, max_size=3))
            call[name] = torch.tensor(values)
    try:
        out = torch.ops.attn_ext.attention_forward(**call)[0]
    except FROM_OPS:
        return
    assert out.shape == (*call["q"].shape[:-1], call["v"].shape[-1])
