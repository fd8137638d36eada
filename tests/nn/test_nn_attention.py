"""The attention modules: shapes, polarity, what they equal and refuse, training against evaluation."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_ext import masks, reference
from attn_ext.nn import MultiHeadAttention, ScaledDotProductAttention


def identity(module: MultiHeadAttention) -> MultiHeadAttention:
    """The module with identity projections."""
    with torch.no_grad():
        for linear in (module.w_q, module.w_k, module.w_v, module.w_o):
            linear.weight.copy_(torch.eye(*linear.weight.shape))
            linear.bias.zero_()
    return module


def from_torch(theirs: nn.MultiheadAttention) -> MultiHeadAttention:
    """Our module with the weights of torch's, written out by hand."""
    ours = MultiHeadAttention(
        theirs.embed_dim, theirs.num_heads, theirs.dropout, kdim=theirs.kdim, vdim=theirs.vdim
    )
    with torch.no_grad():
        if theirs.in_proj_weight is not None:
            weights = theirs.in_proj_weight.chunk(3)
        else:
            weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        for linear, weight, bias in zip(
            (ours.w_q, ours.w_k, ours.w_v), weights, theirs.in_proj_bias.chunk(3), strict=True
        ):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        ours.w_o.load_state_dict(theirs.out_proj.state_dict())
    return ours.train(theirs.training)


def assert_sum_to_one(weights: Tensor) -> None:
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- shapes and weights


def test_scaled_dot_product_attention_keeps_the_shape_and_its_weights_sum_to_one() -> None:
    x = torch.randn(2, 4, 8)
    output, weights = ScaledDotProductAttention(d_k=8)(x, x, x)  # in training mode, with dropout 0.1
    assert output.shape == (2, 4, 8) and weights.shape == (2, 4, 4)
    assert_sum_to_one(weights)
    heads = torch.randn(2, 3, 5, 8)
    output, weights = ScaledDotProductAttention(d_k=8)(heads, heads, heads)
    assert output.shape == (2, 3, 5, 8) and weights.shape == (2, 3, 5, 5)


def test_multi_head_attention_keeps_the_shape_and_its_weights_sum_to_one() -> None:
    x = torch.randn(2, 6, 12)
    output, weights = MultiHeadAttention(d_model=12, h=4)(x, x, x)
    assert output.shape == (2, 6, 12) and weights.shape == (2, 4, 6, 6)
    assert_sum_to_one(weights)


def test_scaled_dot_product_attention_divides_by_the_root_of_d_k() -> None:
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 6, 16), torch.randn(2, 6, 40)
    output, weights = ScaledDotProductAttention(16).eval()(q, k, v)
    expected = (q @ k.mT / 4).softmax(-1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, expected @ v)


def test_without_heads_every_kind_of_mask_means_the_same() -> None:
    attend = ScaledDotProductAttention(8, dropout=0.0)
    x = torch.randn(3, 4, 8)  # B is not 1: a mask read as (heads, …) would show
    lengths = torch.tensor([4, 2, 1])
    expected, expected_weights = attend(x, x, x, key_lengths=lengths)
    rows = torch.arange(4) < lengths[:, None]  # (B, Lk)
    for mask in (masks.padding(lengths), rows[:, None, :], rows[:, None, :].expand(3, 4, 4)):
        output, weights = attend(x, x, x, mask)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(weights, expected_weights)
        torch.testing.assert_close(attend(x, x, x, bias=masks.to_bias(mask))[0], expected)
    causal = attend(x, x, x, masks.causal(4))
    assert torch.equal(causal[0], attend(x, x, x, causal=True)[0])
    assert (causal[1].triu(1) == 0).all()


def test_weights_are_those_before_dropout_and_rows_of_dead_queries_are_zero() -> None:
    x = torch.randn(2, 4, 8)
    attend = MultiHeadAttention(8, 2, dropout=0.5)
    mask = masks.combine(
        masks.causal(4), masks.padding([4, 3]), torch.tensor([False, True, True, True])[:, None]
    )
    _, training = attend.train()(x, x, x, mask)
    _, evaluating = attend.eval()(x, x, x, mask)
    assert torch.equal(training, evaluating)
    assert (evaluating[:, :, 0] == 0).all()
    assert_sum_to_one(evaluating[:, :, 1:])
    assert torch.equal(evaluating > 0, mask.expand(2, 2, 4, 4))


@pytest.mark.parametrize("module", ["attention", "heads"])
def test_weights_that_nobody_asks_for_are_never_built(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import attn_ext.nn.attention as source

    asked: list[bool] = []
    real = source.attention

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(options.get("return_weights", False))
        return real(*args, **options)

    monkeypatch.setattr(source, "attention", spy)
    attend = (
        ScaledDotProductAttention(8, dropout=0.0) if module == "attention" else MultiHeadAttention(8, 2, 0.0)
    )
    x = torch.randn(2, 4, 8)
    output, weights = attend(x, x, x, need_weights=False)
    assert weights is None and asked == [False]
    with_weights, weights = attend(x, x, x)
    assert weights is not None and asked == [False, True]
    torch.testing.assert_close(output, with_weights)


# ---------------------------------------------------------------------- what it equals


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}], ids=["one width", "three widths"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_equals_torchs_module_with_the_same_weights(widths: dict[str, int], batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(24, 4, batch_first=batch_first, **widths)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = from_torch(theirs)
    q, k, v = (
        torch.randn(3, 5, 24),
        torch.randn(3, 7, widths.get("kdim", 24)),
        torch.randn(3, 7, widths.get("vdim", 24)),
    )

    def call_theirs(**options: Any) -> tuple[Tensor, Tensor]:
        order = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
        output, weights = theirs(*map(order, (q, k, v)), average_attn_weights=False, **options)
        return order(output), weights

    keep, padding = torch.rand(5, 7) < 0.7, masks.padding([7, 3, 5])
    keep[:, 0] = True
    bias = torch.randn(5, 7)
    for mine, yours in (
        ({}, {}),
        ({"mask": keep}, {"attn_mask": masks.to_torch(keep)}),
        ({"mask": padding}, {"key_padding_mask": masks.to_torch_key_padding_mask(padding)}),
        (
            {"key_lengths": torch.tensor([7, 3, 5])},
            {"key_padding_mask": masks.to_torch_key_padding_mask(padding)},
        ),
        ({"mask": bias}, {"attn_mask": bias}),
        ({"bias": bias}, {"attn_mask": bias}),
    ):
        for ours_part, theirs_part in zip(ours(q, k, v, **mine), call_theirs(**yours), strict=True):
            torch.testing.assert_close(ours_part, theirs_part, rtol=0, atol=1e-5)


def test_gradients_equal_those_of_torchs_module() -> None:
    theirs = nn.MultiheadAttention(24, 4, batch_first=True)
    ours = from_torch(theirs)
    q, k = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    upstream = torch.randn(2, 5, 24)
    ours(q, k, k, masks.padding([7, 4]), need_weights=False)[0].backward(upstream)
    theirs(q, k, k, key_padding_mask=~masks.padding([7, 4])[:, 0, 0])[0].backward(upstream)
    found = torch.cat([linear.weight.grad for linear in (ours.w_q, ours.w_k, ours.w_v)])
    torch.testing.assert_close(found, theirs.in_proj_weight.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.w_o.weight.grad, theirs.out_proj.weight.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_it_equals_the_reference_between_its_projections_for_every_number_of_shared_heads(
    num_kv_heads: int,
) -> None:
    attend = MultiHeadAttention(24, 4, num_kv_heads=num_kv_heads, bias=False).double().eval()
    x, y = torch.randn(2, 5, 24).double(), torch.randn(2, 7, 24).double()
    assert attend.w_k.weight.shape == attend.w_v.weight.shape == (6 * num_kv_heads, 24)
    output, weights = attend(x, y, y, causal="bottom_right")
    q = (x @ attend.w_q.weight.T).reshape(2, 5, 4, 6).transpose(1, 2)
    k, v = ((y @ w.weight.T).reshape(2, 7, num_kv_heads, 6).transpose(1, 2) for w in (attend.w_k, attend.w_v))
    expected, expected_weights = reference.attention(q, k, v, causal="bottom_right", return_weights=True)
    expected = expected.transpose(1, 2).reshape(2, 5, 24) @ attend.w_o.weight.T
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)


def test_one_query_over_four_keys_averages_the_three_real_ones() -> None:
    attend = identity(MultiHeadAttention(1, 1, dropout=0.0))
    with torch.no_grad():
        attend.w_q.weight.zero_()
        attend.w_k.weight.zero_()
    x = torch.tensor([1.0, 2.0, 3.0, 100.0]).reshape(1, 4, 1)
    for options in (
        {"mask": masks.padding([3], 4)},
        {"mask": masks.from_tokens(torch.tensor([[5, 5, 5, 0]]))},
        {"mask": masks.to_bias(masks.padding([3], 4))},
        {"key_lengths": torch.tensor([3])},
    ):
        output, _ = attend(x[:, :1], x, x, **options)
        assert output.item() == pytest.approx(2.0, abs=1e-5)
    upside_down = torch.ones(4, 4).triu(1).bool()
    output, _ = attend(x, x, x, upside_down)
    assert output[0, 3].item() == 0.0 and output.isfinite().all()


# ---------------------------------------------------------------------- heads, batch and tokens stay apart


def test_a_diagonal_mask_and_identity_weights_give_the_input_back() -> None:
    for B, L in ((2, 3), (4, 4)):  # B = L hides a mix-up of the two
        x = torch.randn(B, L, 4)
        output, _ = identity(MultiHeadAttention(4, 2, dropout=0.0))(x, x, x, torch.eye(L, dtype=torch.bool))
        torch.testing.assert_close(output, x)


def test_samples_do_not_see_each_other_and_tokens_may_be_permuted() -> None:
    attend = MultiHeadAttention(12, 3, dropout=0.0)
    x = torch.randn(4, 4, 12)
    output, _ = attend(x, x, x)
    changed = x.clone()
    changed[1] = 1e6
    assert torch.equal(attend(changed, changed, changed)[0][0], output[0])
    order = torch.tensor([2, 0, 3, 1])
    permuted = x[:, order]
    torch.testing.assert_close(attend(permuted, permuted, permuted)[0], output[:, order], rtol=0, atol=1e-5)


def test_each_head_has_its_own_slice_of_the_features() -> None:
    attend = identity(MultiHeadAttention(4, 2, dropout=0.0))
    x = torch.randn(1, 5, 4)
    changed = x.clone()
    changed[..., 2:] += 3.0  # the second head's features
    before, after = attend(x, x, x), attend(changed, changed, changed)
    torch.testing.assert_close(before[1][:, 0], after[1][:, 0])
    torch.testing.assert_close(before[0][..., :2], after[0][..., :2])
    assert not torch.allclose(before[1][:, 1], after[1][:, 1])


def test_cross_attention_takes_other_lengths_and_an_all_true_mask_changes_nothing() -> None:
    attend = MultiHeadAttention(16, 4, dropout=0.0)
    q, k = torch.randn(2, 20, 16), torch.randn(2, 10, 16)
    output, weights = attend(q, k, k)
    assert output.shape == (2, 20, 16) and weights.shape == (2, 4, 20, 10)
    for mask in (
        masks.padding([10, 10]),
        torch.ones(20, 10, dtype=torch.bool),
        torch.ones(2, 20, 10, dtype=torch.bool),
    ):
        torch.testing.assert_close(attend(q, k, k, mask)[0], output)


def test_a_mask_of_three_dims_belongs_to_sequences_and_a_bias_of_three_dims_to_heads() -> None:
    attend = MultiHeadAttention(16, 4, dropout=0.0)
    x = torch.randn(4, 5, 16)  # as many sequences as heads: only the rule tells them apart
    mask = torch.rand(4, 5, 5) < 0.6
    torch.testing.assert_close(attend(x, x, x, mask)[1], attend(x, x, x, mask[:, None])[1])
    bias = torch.randn(4, 5, 5)
    torch.testing.assert_close(attend(x, x, x, bias=bias)[1], attend(x, x, x, bias=bias[None])[1])
    assert not torch.allclose(attend(x, x, x, bias=bias)[1], attend(x, x, x, bias)[1])


def test_no_tensor_is_copied_to_split_or_join_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    import attn_ext.nn.attention as source

    seen: dict[str, Any] = {}
    real = source.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen["inputs"] = (q, k, v)
        return real(q, k, v, **options)

    monkeypatch.setattr(source, "attention", spy)
    x = torch.randn(2, 5, 12)
    attend = MultiHeadAttention(12, 3, dropout=0.0)
    attend(x, x, x, need_weights=False)
    for t in seen["inputs"]:
        assert t.shape == (2, 3, 5, 4)
        assert t.stride() == (60, 4, 12, 1)  # a view of the (B, L, d_model) projection


# ---------------------------------------------------------------------- dead rows


def test_one_dead_query_does_not_poison_the_shared_weights() -> None:
    """Sample 1 has padded keys 2 and 3, and query 3 may only look at those."""
    attend = MultiHeadAttention(1, 1, dropout=0.0)
    nn.init.normal_(attend.w_o.bias)
    x = torch.randn(4, 2, 1).transpose(0, 1)  # sequence first in memory
    keep = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    padding = masks.padding([4, 2])
    as_float = masks.to_bias(masks.combine(keep, padding))

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(attend.parameters())))

    for mask in (masks.combine(keep, padding), as_float):
        output, _ = attend(x, x, x, mask, need_weights=False)
        assert torch.equal(output[1, 3], attend.w_o.bias)
        found = gradients(output[:, :2].sum())
        # The same loss without the row that is dead.
        alive, _ = attend(x[:, :3], x, x, mask[..., :3, :], need_weights=False)
        for g, expected in zip(found, gradients(alive[:, :2].sum()), strict=True):
            assert g.isfinite().all()
            torch.testing.assert_close(g, expected)


def test_padding_that_holds_nan_leaks_into_nothing() -> None:
    attend = MultiHeadAttention(8, 2, dropout=0.0)
    q, k = torch.randn(2, 3, 8), torch.randn(2, 6, 8)
    lengths = torch.tensor([4, 6])
    clean, _ = attend(q, k, k, key_lengths=lengths)
    k[0, 4:] = math.nan
    for options in ({"key_lengths": lengths}, {"mask": masks.padding(lengths)}):
        output, weights = attend(q, k, k, **options)
        assert torch.equal(output, clean) and weights.isfinite().all()


# ---------------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    "build", [lambda p: ScaledDotProductAttention(8, p), lambda p: MultiHeadAttention(8, 2, p)]
)
def test_dropout_is_alive_in_training_only_and_comes_back_after_evaluation(
    build: Callable[[float], nn.Module],
) -> None:
    attend, without = build(0.8), build(0.0)
    without.load_state_dict(attend.state_dict())
    x = torch.randn(2, 16, 8)

    def run(module: nn.Module) -> Tensor:
        return module(x, x, x)[0]

    for _ in range(2):
        attend.train()
        assert not torch.equal(run(attend), run(attend))
        attend.eval()
        assert torch.equal(run(attend), run(attend)) and torch.equal(run(attend), run(without))
        with torch.inference_mode():
            assert torch.equal(run(attend), run(without))
    assert attend.dropout == 0.8
    attend.train()
    torch.manual_seed(3)
    first = run(attend)
    torch.manual_seed(3)
    assert torch.equal(run(attend), first)


def test_a_dropout_of_one_leaves_nothing_but_the_bias_of_the_last_projection() -> None:
    x = torch.randn(2, 4, 8)
    assert (ScaledDotProductAttention(8, dropout=1.0)(x, x, x)[0] == 0).all()
    attend = MultiHeadAttention(8, 2, dropout=1.0)
    assert torch.equal(attend(x, x, x)[0], attend.w_o.bias.expand(2, 4, 8))


def test_a_part_in_evaluation_mode_inside_a_model_that_trains_stays_still() -> None:
    model = nn.ModuleList([MultiHeadAttention(8, 2, 0.8), MultiHeadAttention(8, 2, 0.8)]).train()
    model[1].eval()
    x = torch.randn(2, 16, 8)
    assert not torch.equal(model[0](x, x, x)[0], model[0](x, x, x)[0])
    assert torch.equal(model[1](x, x, x)[0], model[1](x, x, x)[0])


# ---------------------------------------------------------------------- dtypes, copies, compile


def test_autocast_runs_and_keeps_the_mask_in_fp32() -> None:
    attend = MultiHeadAttention(256, 8, dropout=0.0)
    x = torch.randn(64, 1, 256).transpose(0, 1)
    plain = attend(x, x, x, torch.zeros(64, 64))[0]
    with torch.autocast("cpu"):
        output, weights = attend(x, x, x, torch.zeros(64, 64))
        assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), plain, rtol=0, atol=2e-2)
    # 1000.3 and 1000 are one number in bf16.
    bias = torch.full((64, 64), 1000.0)
    bias[:, ::2] += 0.3
    expected = attend(x, x, x, bias)[1]
    with torch.autocast("cpu"):
        weights = attend(x, x, x, bias)[1]
    torch.testing.assert_close(weights.float(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_modules_run_in_every_dtype(dtype: torch.dtype) -> None:
    attend = MultiHeadAttention(16, 4, dtype=dtype).eval()
    x = torch.randn(2, 5, 16, dtype=dtype)
    output, weights = attend(x, x, x, causal=True)
    assert output.dtype == weights.dtype == dtype
    exact = copy.deepcopy(attend).double()(x.double(), x.double(), x.double(), causal=True)[0]
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=2e-2)


def test_copies_and_pickles_are_equal_and_independent() -> None:
    attend = MultiHeadAttention(8, 2, num_kv_heads=1).eval()
    x = torch.randn(2, 4, 8, requires_grad=True)
    expected = attend(x, x, x)[0]  # a live graph must not get in the way
    buffer = io.BytesIO()
    torch.save(attend, buffer)
    buffer.seek(0)
    copies = (
        copy.deepcopy(attend),
        pickle.loads(pickle.dumps(attend)),
        torch.load(buffer, weights_only=False),
    )
    for other in copies:
        assert torch.equal(other(x, x, x)[0], expected)
        with torch.no_grad():
            other.w_q.weight.zero_()
        assert torch.equal(attend(x, x, x)[0], expected)
    assert sorted(attend.state_dict()) == sorted(
        f"w_{name}.{part}" for name in "qkvo" for part in ("weight", "bias")
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_compiled_equals_eager_without_graph_breaks(need_weights: bool) -> None:
    attend = MultiHeadAttention(16, 4, dropout=0.0, num_kv_heads=2)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 16, requires_grad=True)
    mask = masks.padding([5, 3])
    for options in ({}, {"mask": mask}, {"causal": True, "bias": torch.randn(4, 5, 5)}):
        output, weights = compiled(x, x, x, **options, need_weights=need_weights)
        expected, expected_weights = attend(x, x, x, **options, need_weights=need_weights)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
        assert (weights is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-5)
        found, truth = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (output, expected))
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- errors


def test_sizes_that_cannot_be_built_are_refused_with_their_numbers() -> None:
    for build, match in (
        (lambda: MultiHeadAttention(1600, 48), "1600.*48"),
        (lambda: MultiHeadAttention(12, 0), "12.*0"),
        (lambda: MultiHeadAttention(12, 6, num_kv_heads=4), "6.*4"),
        (lambda: MultiHeadAttention(12, 6, num_kv_heads=0), "6.*0"),
        (lambda: MultiHeadAttention(12, 6, dropout=1.5), "1.5"),
        (lambda: ScaledDotProductAttention(8, dropout=-0.5), "-0.5"),
        (lambda: ScaledDotProductAttention(0), "got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            build()


def test_inputs_that_do_not_fit_are_refused_with_their_shapes() -> None:
    attend = MultiHeadAttention(12, 3, kdim=10, vdim=8, dropout=0.0)
    q, k, v = torch.randn(2, 5, 12), torch.randn(2, 7, 10), torch.randn(2, 7, 8)
    attend(q, k, v)
    for bad, match in (
        ((q[0], k, v), r"q \(5, 12\)"),
        ((q[..., :10], k, v), r"q \(2, 5, 10\)"),
        ((q, v, k), r"k \(2, 7, 8\)"),
        ((q, k, v[:, :6]), r"v \(2, 6, 8\)"),
        ((q[:1], k, v), r"q \(1, 5, 12\)"),
    ):
        with pytest.raises(ValueError, match=match):
            attend(*bad)
    with pytest.raises(ValueError, match="7"):
        attend(q, k, v, torch.ones(5, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="bool"):
        attend(q, k, v, torch.ones(5, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"d_k = 8.*\(2, 4, 6\)"):
        x = torch.randn(2, 4, 6)
        ScaledDotProductAttention(8)(x, x, x)
