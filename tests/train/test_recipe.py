"""The numbers of a run: what is refused, and the learning rate over its course."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attn_ext.train import Recipe


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"d_model": 30, "heads": 4}, "even multiple of heads, got 30 for 4 heads"),
        ({"d_model": 12, "heads": 4}, "even multiple of heads, got 12 for 4 heads"),
        ({"batch": 6, "parts": 4}, "batch must be a multiple of parts, got 6 for 4 parts"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0, got nan"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
        ({"last_rate": -0.1}, "last_rate must be from 0 to 1, got -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative, got -1.0"),
        ({"seed": 2**32}, "seed must be from 0 to"),
        ({"steps": 5}, "expected either steps or minutes, got 5 and 10.0"),
        ({"minutes": None}, "expected either steps or minutes, got None and None"),
        ({"minutes": None, "steps": 0}, "steps must be at least 1, got 0"),
        ({"minutes": -1.0}, "minutes must be above 0, got -1.0"),
        ({"minutes": math.inf}, "minutes must be above 0, got inf"),
    ],
)
def test_numbers_that_no_run_can_have_are_named(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**numbers)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"d_model": 32.0}, "d_model must be an integer, got 32.0"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"layers": True}, "layers must be an integer, got True"),
        ({"heads": None}, "heads must be an integer, got None"),
        ({"clip": "1"}, "clip must be a number, got '1'"),
    ],
)
def test_what_is_no_number_is_named(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Recipe(**numbers)


def test_the_learning_rate_rises_and_then_falls_as_a_cosine() -> None:
    recipe = Recipe(learning_rate=1.0, warm_up=0.2, last_rate=0.1)
    assert recipe.rate_at(0.0) == pytest.approx(0.1)
    assert recipe.rate_at(0.1) == pytest.approx(0.55)
    assert recipe.rate_at(0.2) == pytest.approx(1.0)
    assert recipe.rate_at(0.6) == pytest.approx(0.55)
    assert recipe.rate_at(0.4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert recipe.rate_at(1.0) == recipe.rate_at(1.5) == pytest.approx(0.1)
    assert Recipe(learning_rate=1.0, warm_up=0.0).rate_at(0.0) == 1.0


def test_a_run_is_over_by_steps_or_by_time() -> None:
    assert Recipe(steps=8, minutes=None).fraction_done(2, 1e9) == 0.25
    assert Recipe(minutes=2.0).fraction_done(10**9, 30.0) == 0.25
