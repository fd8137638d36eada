"""torch.compile, torch.export, opcheck, fake and meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_support import MASKING, NEUTRAL, OPTIONS, Shape, dead_row_mask, make, random_bool, raw_forward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import attn_ext

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# A batch of two, lengths that are no multiple of sixteen, another value width, grouped heads.
ODD = Shape(2, 4, 2, 5, 7, 8, 6)
LAYOUTS = ("contiguous", "tokens_first", "fused_qkv", "stepped")


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Any:
    """Compiled code of one test must not serve the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------- opcheck


WEIGHTS: dict[str, Any] = {**MASKING, "row_max": None, "row_sum": None, "num_queries": 5}
OP_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal and window": {"causal": 2, "window_left": 3, "window_right": 1},
    "everything": {
        "mask": dead_row_mask(ODD),
        "bias": make((4, 5, 7)),
        "bias2": make((2, 1, 1, 7)),
        "alibi_slopes": make((4,)).abs(),
        "sinks": make((4,)),
        "key_lengths": torch.tensor([7, 3]),
        "dropout_seed": torch.tensor(5),
        "causal": 1,
        "scale": 0.2,
        "softcap": 2.0,
        "dropout_p": 0.25,
    },
}


def needing_grad(value: Any, wanted: bool) -> Any:
    """The same, wanting a gradient where it is a floating point tensor."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_(wanted)
    return value


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "tokens_first"])
@pytest.mark.parametrize("call", OP_CALLS)
def test_opcheck_passes_for_the_forward_op(call: str, layout: str, dtype: torch.dtype, grad: bool) -> None:
    args = tuple(x.requires_grad_(grad) for x in ODD.qkv(dtype, layout))
    kwargs = {**NEUTRAL, **OP_CALLS[call]}
    kwargs = {n: needing_grad(x, grad and n in ("bias", "bias2", "sinks")) for n, x in kwargs.items()}
    torch.library.opcheck(torch.ops.attn_ext.attention_forward.default, args, kwargs)


@pytest.mark.parametrize("layout", ["contiguous", "tokens_first"])
@pytest.mark.parametrize("call", OP_CALLS)
def test_opcheck_passes_for_the_backward_op(call: str, layout: str) -> None:
    q, k, v = ODD.qkv(torch.float32, layout)
    kwargs = {**NEUTRAL, **OP_CALLS[call]}
    out, lse, row_max, row_sum = raw_forward(q, k, v, **OP_CALLS[call])
    wanted = 7 + (8 + 16 + 32 if call == "everything" else 0)
    args = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, row_max, row_sum)
    torch.library.opcheck(torch.ops.attn_ext.attention_backward.default, args, {**kwargs, "grads": wanted})


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck_passes_for_the_inference_and_weights_ops(grad: bool) -> None:
    q, k, v = ODD.qkv(torch.float32, "tokens_first")
    if not grad:  # the lean op is for calls that nobody differentiates
        torch.library.opcheck(torch.ops.attn_ext.attention_inference.default, (q, k, v, 1, 0.3))
        kwargs = {**WEIGHTS, "bias": make((4, 5, 7)), "row_positions": None}
        torch.library.opcheck(torch.ops.attn_ext.attention_weights.default, (q, k), kwargs)
        rows = {**WEIGHTS, "causal": 2, "row_positions": torch.tensor([4, 0, 2, 1, 3])}
        torch.library.opcheck(torch.ops.attn_ext.attention_weights.default, (q, k), rows)
    else:
        args = (q.requires_grad_(True), k.requires_grad_(True), v.requires_grad_(True))
        kwargs = {**NEUTRAL, "causal": 2}
        torch.library.opcheck(torch.ops.attn_ext.attention_forward.default, args, kwargs)


def test_opcheck_passes_for_packed_sequences() -> None:
    q, k, v = (make((9, h, 8), seed=h).requires_grad_(True) for h in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    kwargs = {**NEUTRAL, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": 2}
    torch.library.opcheck(torch.ops.attn_ext.attention_forward.default, (q, k, v), kwargs)


# -------------------------------------------------------------------------------------- fake and meta tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (3, 3)], ids=["GQA", "one head", "MHA"])
def test_fake_tensors_say_the_same_shapes_strides_and_dtypes_as_real_ones(
    layout: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    for s in (
        Shape(2, *heads, 5, 7, 8, 6),
        Shape(1, *heads, 1, 7, 8),
        Shape(2, *heads, 0, 7, 8),
        Shape(2, *heads, 3, 0, 8),
    ):
        q, k, v = s.qkv(dtype, layout)
        for grad in (False, True):
            inputs = [x.detach().requires_grad_(grad) for x in (q, k, v)]
            for kwargs in (
                {},
                {"return_lse": True, "return_weights": True},
                {"mask": random_bool(s.lq, s.lk)},
            ):
                real = attn_ext.attention(*inputs, **kwargs)
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fake = attn_ext.attention(*(mode.from_tensor(x) for x in inputs), **kwargs)
                for r, f in zip(*(x if isinstance(x, tuple) else (x,) for x in (real, fake)), strict=True):
                    assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride()), (
                        f"{s} {kwargs.keys()}"
                    )


def test_meta_tensors_give_shapes_without_any_work() -> None:
    q, k, v = (torch.empty(64, heads, 4096, 128, device="meta") for heads in (32, 8, 8))
    out = attn_ext.attention(q, k, v, causal=True)
    assert out.device.type == "meta" and out.shape == q.shape
    with pytest.raises(ValueError, match="128"):
        attn_ext.attention(q, k[..., :64], v)


# ---------------------------------------------------------------------------------------------- torch.compile


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Traced without a graph break; run by AOT autograd without code generation, which is quick."""
    return torch.compile(function, fullgraph=True, backend=kwargs.pop("backend", "aot_eager"), **kwargs)


@pytest.mark.parametrize("option", OPTIONS)
def test_compiled_calls_equal_eager_ones_with_and_without_gradients(option: str) -> None:
    options = OPTIONS[option](ODD)

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attn_ext.attention(q * 1.5, k, v, **options, return_lse=True)
        return out.transpose(1, 2).reshape(2, 5, -1), lse

    fast = compiled(block)
    q, k, v = ODD.qkv(layout="tokens_first")
    with torch.no_grad():
        for actual, expected in zip(fast(q, k, v), block(q, k, v), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    found = []
    for function in (fast, block):
        tensors = [x.detach().requires_grad_(True) for x in (q, k, v)]
        out, lse = function(*tensors)
        live = torch.where(torch.isinf(lse), 0.0, lse)
        found.append((out, *torch.autograd.grad(out.square().sum() + live.square().sum(), tensors)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_learned_biases_and_sinks_get_their_gradients_in_compiled_code() -> None:
    q, k, v = ODD.qkv()

    def block(mask: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return attn_ext.attention(q, k, v, mask=mask, bias=bias, sinks=sinks, causal="bottom_right")

    found = []
    for function in (compiled(block), block):
        leaves = [make(s, seed=6).requires_grad_(True) for s in ((2, 1, 1, 7), (4, 5, 7), (4,))]
        found.append(torch.autograd.grad(function(*leaves).square().sum(), leaves))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_one_tensor_as_q_k_and_v_compiles_and_keeps_its_gradient() -> None:
    def block(x: Tensor) -> Tensor:
        return attn_ext.attention(x, x, x, causal=True)

    found = []
    for function in (compiled(block), block):
        x = make((2, 3, 5, 8)).requires_grad_(True)
        found.append(torch.autograd.grad(function(x).square().sum(), x)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["drop-in", "packed", "weights"])
def test_the_other_functions_compile_without_a_graph_break(name: str) -> None:
    q, k, v = ODD.qkv()
    cu_q, cu_k = torch.tensor([0, 4, 5]), torch.tensor([0, 5, 7])
    block = {
        "drop-in": lambda: attn_ext.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "packed": lambda: attn_ext.attention_varlen(
            q[0].transpose(0, 1),
            k[0].transpose(0, 1),
            v[0].transpose(0, 1),
            cu_q,
            cu_k,
            causal="bottom_right",
        ),
        "weights": lambda: attn_ext.attention_weights(q, k, rows=[4, 1], causal="bottom_right"),
    }[name]
    torch.testing.assert_close(compiled(block)(), block(), rtol=0, atol=1e-5)


def test_the_view_of_merged_heads_works_in_compiled_code() -> None:
    def block(x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in x.view(2, 7, 3, 4, 8).unbind(2))
        out = attn_ext.attention(q, k, v, causal=True)
        return out.transpose(1, 2).view(2, 7, 32)  # a view, not a reshape: fails where fake strides lie

    x = make((2, 7, 96))
    torch.testing.assert_close(compiled(block)(x), block(x), rtol=0, atol=1e-5)


def test_sizes_that_change_do_not_recompile_for_ever_and_stay_right() -> None:
    count = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return graph.forward

    def block(q: Tensor, k: Tensor) -> Tensor:
        return attn_ext.attention(q, k, k, causal="bottom_right") + 1

    fast = torch.compile(block, fullgraph=True, backend=counting, dynamic=True)
    for lq, lk in ((5, 7), (6, 9), (17, 33), (2, 100)):
        q, k = make((2, 4, lq, 8), seed=1), make((2, 2, lk, 8), seed=2)
        torch.testing.assert_close(fast(q, k), block(q, k), rtol=0, atol=1e-5)
    assert count <= 2


def test_dropout_in_compiled_code_follows_the_seed_and_differs_from_call_to_call() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_ext.attention(q, k, v, dropout_p=0.5)

    fast = compiled(block)
    q, k, v = (x.requires_grad_(True) for x in ODD.qkv(torch.float64))
    torch.manual_seed(3)
    first, second = fast(q, k, v), fast(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(fast(q, k, v), first)
    # Linear in v: the backward that drops other weights than the forward fails this.
    grad_out = make(first.shape, torch.float64, seed=8)
    (dv,) = torch.autograd.grad(first, v, grad_out)
    assert (dv * v).sum().item() == pytest.approx((grad_out * first).sum().item(), rel=1e-9)


def test_inductor_generates_code_around_the_op() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = ((x @ w) * s for s in (0.5, 1.0, 2.0))
        return torch.relu(attn_ext.attention(q, k, v, causal=True)).sum(-1)

    found = []
    for function in (torch.compile(block, fullgraph=True), block):
        x, w = make((2, 3, 5, 8)).requires_grad_(True), make((8, 8), seed=2).requires_grad_(True)
        out = function(x, w)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, w))))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_compiled_code_under_autocast_equals_eager_code_under_autocast() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attn_ext.attention(q, k, v, causal="bottom_right")

    q, k, v = ODD.qkv()
    actual, expected = compiled(block)(q, k, v), block(q, k, v)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["plain numbers", "weights", "drop-in of rank 6", "packed", "jvp"])
def test_sizes_and_numbers_that_are_symbols_compile_without_a_graph_break(name: str) -> None:
    def call(q: Tensor, mask: Tensor, scale: float, left: int) -> Tensor:
        if name == "weights":
            return attn_ext.attention_weights(q, q, mask=mask, rows=[0, 2], scale=scale)
        if name == "drop-in of rank 6":
            x = q[:, None, None]
            return attn_ext.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=scale)
        if name == "packed":
            x, cu = q[0].transpose(0, 1), torch.tensor([0, q.shape[-2]])
            return attn_ext.attention_varlen(x, x, x, cu, cu, causal=True, scale=scale, window=(left, None))
        if name == "jvp":
            return torch.func.jvp(lambda q: attn_ext.attention(q, q, q, scale=scale).sum(), (q,), (q,))[1]
        window = (left, q.shape[-2] // 2)
        return attn_ext.attention(q, q, q, mask=mask, scale=scale, softcap=2 * scale, window=window)

    fast = compiled(call, dynamic=True)
    for batch, length, scale, left in ((2, 5, 0.5, 2), (3, 7, 0.25, 3), (4, 9, 0.75, 4)):
        q, mask = make((batch, 2, length, 8)), random_bool(length, length)
        torch.testing.assert_close(
            fast(q, mask, scale, left), call(q, mask, scale, left), rtol=1e-5, atol=1e-5
        )


# ------------------------------------------------------------------------------- torch.compile and torch.func


def transformed(name: str, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of q that puts attention through a transform of torch.func."""

    def loss(q: Tensor) -> Tensor:
        return attn_ext.attention(q, k, v, causal="bottom_right").square().sum()

    return {
        "jvp": lambda q: torch.func.jvp(loss, (q,), (torch.cos(q),))[1],
        "grad": torch.func.grad(loss),
        "hessian": torch.func.hessian(lambda q: attn_ext.attention(q, k, v).square().sum()),
        "vmap": torch.func.vmap(lambda q: attn_ext.attention(q, k[0], v[0])),
        "jvp of the weights": lambda q: torch.func.jvp(
            lambda q: attn_ext.attention_weights(q, k, rows=[4]), (q,), (torch.cos(q),)
        )[1],
    }[name]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["jvp", "grad", "hessian", "vmap", "jvp of the weights"])
def test_transforms_inside_compiled_code_give_what_they_give_in_eager_code(name: str, backend: str) -> None:
    q, k, v = Shape(2, 2, 1, 5, 7, 4, 3).qkv()
    function = transformed(name, k, v)
    expected = function(q)
    assert expected.abs().max() > 1e-3
    actual = compiled(function, backend=backend)(q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("traced_before", [False, True])
def test_a_tangent_that_enters_compiled_code_from_outside_is_not_lost(
    backend: str, traced_before: bool
) -> None:
    q, k, v = ODD.qkv()
    tangent = make(q.shape, seed=9)
    for attend in (
        lambda q: attn_ext.attention(q, k, v),
        lambda q: attn_ext.attention_weights(q, k, rows=[1]),
    ):
        _, expected = torch.func.jvp(attend, (q,), (tangent,))
        for way in ("func", "dual"):
            torch._dynamo.reset()
            fast = torch.compile(attend, backend=backend)
            if traced_before:
                fast(q)
            if way == "func":
                _, actual = torch.func.jvp(fast, (q,), (tangent,))
            else:
                with forward_ad.dual_level():
                    actual = forward_ad.unpack_dual(fast(forward_ad.make_dual(q, tangent))).tangent
            assert actual is not None, f"the tangent of {way} is lost"
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_without_a_graph_break_such_a_tangent_is_refused() -> None:
    q, k, v = ODD.qkv()
    with forward_ad.dual_level(), pytest.raises(Exception, match="tangents of dual tensors"):
        compiled(lambda q: attn_ext.attention(q, k, v))(forward_ad.make_dual(q, q))


def test_numbers_that_came_as_parameters_are_refused_in_compiled_code_too() -> None:
    q, k, v = ODD.qkv()
    learned = torch.nn.Parameter(torch.tensor(0.5))
    for name in ("scale", "softcap"):
        for function, words in (
            (
                torch.compile(attn_ext.attention, backend="eager"),
                f"^attn_ext.attention: {name} must be a plain",
            ),
            (compiled(attn_ext.attention), f"{name} must be a plain number, not a tensor"),
        ):
            with pytest.raises(Exception, match=words):
                function(q, k, v, **{name: learned})


def test_compiled_packed_causal_true_needs_one_tensor_for_both() -> None:
    x = make((9, 2, 8))
    cu = torch.tensor([0, 4, 9])

    def attend(x: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return attn_ext.attention_varlen(x, x, x, cu_q, cu_k, causal=True)

    torch.testing.assert_close(compiled(attend)(x, cu, cu), attend(x, cu, cu.clone()))
    with pytest.raises(Exception, match="pass one tensor as both"):
        compiled(attend)(x, cu, cu.clone())
    broken_graph = torch.compile(attend, backend="eager")
    torch.testing.assert_close(broken_graph(x, cu, cu.clone()), attend(x, cu, cu))


# ----------------------------------------------------------------------------------------------- torch.export


class Block(torch.nn.Module):
    """Self-attention with a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)
        self.bias = torch.nn.Parameter(make((4, 1, 1), seed=6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, L, 16), mask (B, 1, 1, L)."""
        b, length, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.projection(x).view(b, length, 3, 4, 4).unbind(2))
        out = attn_ext.attention(q, k, v, mask=mask, bias=self.bias, causal=True)
        return out.transpose(1, 2).reshape(b, length, 16)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_equals_the_module_also_at_other_sizes(strict: bool) -> None:
    block = Block()
    x, mask = make((2, 7, 16)), random_bool(2, 1, 1, 7)
    length, batch = torch.export.Dim("length", min=2, max=64), torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(
        block, (x, mask), dynamic_shapes=({0: batch, 1: length}, {0: batch, 3: length}), strict=strict
    )
    assert any("attn_ext" in str(node.target) for node in program.graph.nodes), "the op was traced away"
    for b, n in ((2, 7), (3, 19)):
        x, mask = make((b, n, 16)), random_bool(b, 1, 1, n)
        torch.testing.assert_close(program.module()(x, mask), block(x, mask), rtol=0, atol=1e-5)


def test_an_exported_program_can_be_trained() -> None:
    block = Block()
    x, mask = make((2, 7, 16)), random_bool(2, 1, 1, 7)
    block(x, mask).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    exported = torch.export.export(block, (x, mask)).module()
    exported(x, mask).square().sum().backward()
    for name, parameter in exported.named_parameters():
        assert parameter.grad is not None, f"{name} lost its gradient in the export"
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-4)


def test_an_exported_program_survives_saving_and_loading(tmp_path: Any) -> None:
    block = Block().eval()
    x, mask = make((2, 7, 16)), random_bool(2, 1, 1, 7)
    torch.export.save(torch.export.export(block, (x, mask)), tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    torch.testing.assert_close(loaded(x, mask), block(x, mask), rtol=0, atol=1e-5)
