from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smc_sglang.smc import step
from smc_sglang.smc.weights import Weights

LOG_WEIGHTS = st.lists(st.floats(-700, 700) | st.just(-math.inf), min_size=1, max_size=12)


@given(LOG_WEIGHTS)
def test_agrees_with_the_definitions(values: list[float]) -> None:
    weights = Weights(torch.tensor(values, dtype=torch.float64))
    n, top = len(values), max(values)
    if top == -math.inf:
        assert bool(weights.degenerate)
        assert float(weights.ess) == 0
        assert float(weights.normalized.sum()) == 0
        assert float(weights.log_mean) == -math.inf
        return
    w = [math.exp(value - top) for value in values]
    normalized = [value / math.fsum(w) for value in w]
    assert not bool(weights.degenerate)
    assert weights.normalized.tolist() == pytest.approx(normalized)
    assert float(weights.ess) == pytest.approx(1 / math.fsum(v * v for v in normalized))
    assert float(weights.log_mean) == pytest.approx(top + math.log(math.fsum(w) / n), abs=1e-9)
    assert 1 - 1e-9 <= float(weights.ess) <= n * (1 + 1e-9)


@given(st.lists(LOG_WEIGHTS.filter(lambda v: len(v) == 3), min_size=1, max_size=4))
def test_groups_do_not_touch_each_other(groups: list[list[float]]) -> None:
    together = Weights(torch.tensor(groups, dtype=torch.float64))
    for i, values in enumerate(groups):
        alone = Weights(torch.tensor(values, dtype=torch.float64))
        assert torch.equal(together.normalized[i], alone.normalized)
        assert torch.equal(together.ess[i], alone.ess)
        assert torch.equal(together.log_mean[i], alone.log_mean)
        assert torch.equal(together[i].log_weights, alone.log_weights)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_plus_infinity_raise(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN"):
        Weights(torch.tensor([0.0, bad]))
    with pytest.raises(ValueError, match="NaN"):
        Weights.uniform(2).add(torch.tensor([0.0, bad]))


def test_minus_infinity_is_legal_and_stays() -> None:
    weights = Weights.uniform(3).add(torch.tensor([0.0, -math.inf, math.log(3.0)]))
    assert weights.normalized.tolist() == pytest.approx([0.25, 0.0, 0.75])
    assert float(weights.log_mean) == pytest.approx(math.log(4 / 3))
    assert weights.add(torch.ones(3)).log_weights[1] == -math.inf


@pytest.mark.parametrize("value", [0.0, -123.456, 1e-3])
def test_equal_weights_have_ess_of_exactly_n(value: float) -> None:
    for n in range(1, 70):
        weights = Weights(torch.full((n,), value, dtype=torch.float64))
        assert float(weights.ess) == n
        assert float(weights.log_mean) == value


def test_float32_is_widened() -> None:
    assert Weights(torch.zeros(3)).log_weights.dtype == torch.float64


def test_weigh_counts_tokens_through_the_finishing_one() -> None:
    increments = torch.tensor([[[1.0, 2.0, 4.0], [1.0, math.nan, math.inf], [7.0, 7.0, 7.0]]], dtype=torch.float64)
    weights = step.weigh(Weights.uniform(1, 3), increments, torch.tensor([[3, 1, 0]]))
    assert weights.log_weights.tolist() == [[7.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="NaN"):
        step.weigh(Weights.uniform(1, 3), increments, torch.tensor([[3, 2, 0]]))
