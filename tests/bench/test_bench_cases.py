"""The rows: what they count as flops, and that inputs fit their description."""

from __future__ import annotations

import bench_support  # noqa: F401  makes `bench` importable
import pytest
import torch

from bench.cases import Case, all_cases, flops, make_inputs, select, visible


def test_flops_of_a_full_row_are_four_times_scores_times_width() -> None:
    assert flops(Case("fp32", "forward", 2, 3, 5, 8)) == 4 * 2 * 3 * 5 * 5 * 8


def test_flops_count_both_widths_and_both_lengths() -> None:
    case = Case("fp32", "forward", 1, 4, 6, 8, Hkv=2, Lk=10, Dv=16)
    assert flops(case) == 2 * 4 * 6 * 10 * 8 + 2 * 4 * 6 * 10 * 16


def test_square_causal_flops_are_half() -> None:
    full, causal = (Case("fp32", "forward", 1, 2, 128, 64, causal=c) for c in (False, True))
    assert flops(causal) == flops(full) / 2


def test_backward_flops_are_two_and_a_half_times_the_forward() -> None:
    one, two, both = (Case("fp32", p, 1, 2, 16, 8) for p in ("forward", "backward", "forward+backward"))
    assert flops(two) == 2.5 * flops(one)
    assert flops(both) == 3.5 * flops(one)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"window": (1, 0)}, 7),  # 1 + 2 + 2 + 2
        ({"window": (1, 0), "causal": True}, 7),
        ({"key_lengths": (3,)}, 12),
        ({"Lk": 6, "causal": "bottom_right"}, 3 + 4 + 5 + 6),
        ({"Lk": 6, "causal": "top_left"}, 1 + 2 + 3 + 4),
    ],
)
def test_only_visible_scores_count(options: dict, pairs: int) -> None:
    assert flops(Case("fp32", "forward", 1, 1, 4, 8, **options)) == 4 * pairs * 8


@pytest.mark.parametrize(
    "case", [c for c in all_cases() if c.Lq <= 1024 and c.Lk <= 1500], ids=lambda c: c.id
)
def test_visible_scores_are_those_of_the_full_mask(case: Case) -> None:
    seen = visible(case)
    if seen is None:
        counted = case.B * case.Lq * case.Lk
    else:
        counted = int(seen.expand(case.B, 1, case.Lq, case.Lk).sum())
    ours = flops(case) / (2 * case.Hq * (case.D + case.Dv))
    ours /= {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[case.direction]
    # Square causal rows count exactly half, by convention; the diagonal makes it a little more.
    assert ours == pytest.approx(
        counted, rel=1e-9 if not (case.causal is True and case.Lq == case.Lk) else 0.1
    )


def test_ids_are_unique() -> None:
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids)


def test_rows_of_every_dtype_and_pass_are_there() -> None:
    cases = all_cases()
    assert {case.dtype for case in cases} == {"fp32", "bf16", "fp16", "fp64"}
    assert {case.direction for case in cases} == {"forward", "backward", "forward+backward"}
    assert {case.dtype for case in cases if case.quick} == {"fp32", "bf16", "fp16", "fp64"}


def test_filters_join_with_and_texts_with_or() -> None:
    cases = all_cases()
    chosen = select(cases, rows=["1,8,4096,64", "1,8,2048,128"], dtypes=["bf16"], passes=["backward"])
    assert [case.id for case in chosen] == [
        "bf16 backward 1,8,4096,64",
        "bf16 backward 1,8,4096,64 causal",
        "bf16 backward 1,8,2048,128",
    ]
    assert select(cases) == cases


def test_inputs_are_the_same_every_time_and_lie_as_said() -> None:
    case = Case("bf16", "backward", 2, 4, 6, 8, Hkv=2, Lk=7, Dv=3, layout="tokens")
    first, second = make_inputs(case), make_inputs(case)
    assert torch.equal(first.q, second.q)
    assert first.q.shape == (2, 4, 6, 8) and first.k.shape == (2, 2, 7, 8) and first.v.shape == (2, 2, 7, 3)
    assert first.q.dtype is torch.bfloat16
    assert first.q.transpose(1, 2).is_contiguous() and not first.q.is_contiguous()
    assert first.grad_out is not None and first.grad_out.shape == (2, 4, 6, 3)
    assert all(leaf.requires_grad for leaf in first.leaves)


def test_only_a_learned_bias_is_a_leaf() -> None:
    learned = make_inputs(Case("fp32", "backward", 1, 2, 4, 8, bias="learned"))
    fixed = make_inputs(Case("fp32", "backward", 1, 2, 4, 8, bias="fixed"))
    assert len(learned.leaves) == 4 and len(fixed.leaves) == 3
