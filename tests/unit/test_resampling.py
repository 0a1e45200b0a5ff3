from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from smc_sglang.smc import step
from smc_sglang.smc.resampling import SCHEMES, arrange
from smc_sglang.smc.rng import Stream, uniforms
from smc_sglang.smc.weights import Weights

ALMOST_ONE = 1 - 2**-53
UNIFORM = st.floats(0, ALMOST_ONE) | st.sampled_from([0.0, ALMOST_ONE, 0.5])
WEIGHTS = torch.tensor([0.4, 0.0, 0.35, 0.05, 0.2, 0.0], dtype=torch.float64)

schemes = pytest.mark.parametrize("scheme", SCHEMES)


def draws(n_groups: int, m: int, seed: int = 0) -> Tensor:
    seeds = torch.arange(n_groups)[:, None] + seed * 10**6
    return uniforms(seeds, torch.arange(m), torch.tensor(0), Stream.RESAMPLE)


def offspring(ancestors: Tensor, n: int) -> Tensor:
    """How many each index has, [..., n]."""
    return torch.nn.functional.one_hot(ancestors, n).sum(-2)


@schemes
@pytest.mark.parametrize("m", [6, 2, 1, 15])
def test_offspring_are_unbiased(scheme: str, m: int) -> None:
    n_groups = 20_000
    ancestors = SCHEMES[scheme](WEIGHTS.expand(n_groups, -1), draws(n_groups, m))
    counts = offspring(ancestors, 6).double()
    error = counts.std(0) / n_groups**0.5
    assert bool(((counts.mean(0) - m * WEIGHTS).abs() <= 4 * error + 1e-12).all())
    assert bool((error < 0.03).all())


@schemes
def test_every_place_of_a_group_is_used(scheme: str) -> None:
    # Unbiased counts alone would not see two groups mixed up.
    weights = torch.eye(6, dtype=torch.float64)
    assert torch.equal(SCHEMES[scheme](weights, draws(6, 4)), torch.arange(6)[:, None].expand(-1, 4))


@schemes
@given(st.data())
def test_weight_zero_is_never_chosen(scheme: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.just(0.0) | st.floats(1e-12, 1e3), min_size=1, max_size=8).filter(any))
    u = data.draw(st.lists(UNIFORM, min_size=1, max_size=9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    weights = torch.tensor(values, dtype=dtype)
    ancestors = SCHEMES[scheme](weights, torch.tensor(u, dtype=torch.float64))
    assert ancestors.shape == (len(u),)
    assert bool((weights[ancestors] > 0).all())


@schemes
@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_sums_below_one_stay_in_range(scheme: str, u: float) -> None:
    """In float32 the cumulative sum of ten weights of 0.1 is not 1; the weight after them is 0."""
    weights = torch.tensor([0.0] + [0.1] * 10 + [0.0])
    ancestors = SCHEMES[scheme](weights, torch.full((1000,), u, dtype=torch.float64))
    assert int(ancestors.min()) >= 1
    assert int(ancestors.max()) <= 10


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=10).filter(lambda v: sum(v) > 1e-6),
    st.integers(1, 20),
    UNIFORM,
)
def test_systematic_and_residual_bounds(values: list[float], m: int, u: float) -> None:
    weights = torch.tensor(values, dtype=torch.float64)
    expected = m * weights / weights.sum()
    uniform = torch.full((m,), u, dtype=torch.float64)
    systematic = offspring(SCHEMES["systematic"](weights, uniform), len(values))
    assert bool(((systematic - expected).abs() < 1 + 1e-9).all())
    residual = offspring(SCHEMES["residual"](weights, uniform), len(values))
    assert bool((residual >= (expected - 1e-9).floor()).all())


def test_stratified_draws_once_per_stratum() -> None:
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    u = torch.tensor([0.99, 0.0, 0.5, 0.01], dtype=torch.float64)
    assert SCHEMES["stratified"](weights, u).tolist() == [0, 1, 2, 3]
    assert SCHEMES["multinomial"](weights, u).tolist() == [3, 0, 2, 0]


@given(st.lists(st.integers(0, 7), min_size=8, max_size=8))
def test_arrange_moves_as_few_as_possible(values: list[int]) -> None:
    arranged = arrange(torch.tensor(values)).tolist()
    assert Counter(arranged) == Counter(values)
    assert all(arranged[j] == j for j in set(values))


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_arrange_is_batched(values: list[list[int]]) -> None:
    together = arrange(torch.tensor(values))
    assert together.tolist() == [arrange(torch.tensor(row)).tolist() for row in values]


# -- the steps built on them -------------------------------------------------------------------------------


def test_resample_decides_by_group() -> None:
    weights = Weights(torch.tensor([[0.0, -9.0, -9.0], [0.0, -0.1, 0.1], [-math.inf] * 3], dtype=torch.float64))
    outcome = step.resample(weights, torch.full((3,), 0.5), SCHEMES["systematic"], draws(3, 3))
    assert outcome.resampled.tolist() == [True, False, False]
    assert outcome.ancestors.tolist() == [[0, 0, 0], [0, 1, 2], [0, 1, 2]]
    assert outcome.weights.log_weights[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(outcome.weights.log_weights[1:], weights.log_weights[1:])
    assert torch.equal(outcome.ess, weights.ess)
    expected = math.log((1 + 2 * math.exp(-9)) / 3)
    assert outcome.log_z_increment.tolist() == pytest.approx([expected, 0.0, 0.0])


@pytest.mark.parametrize("n", [1, 3, 7])
def test_thresholds_zero_and_one(n: int) -> None:
    equal = Weights.uniform(1, n)
    uneven = Weights(torch.linspace(-5, 0, n, dtype=torch.float64)[None])

    def resampled(weights: Weights, threshold: float) -> bool:
        return bool(step.resample(weights, threshold, SCHEMES["systematic"], draws(1, n)).resampled)

    assert not resampled(equal, 0.0)
    assert not resampled(uneven, 0.0)
    assert not resampled(equal, 1.0)
    assert resampled(uneven, 1.0) == (n > 1)


@schemes
def test_resample_keeps_estimates_unbiased(scheme: str) -> None:
    """E[Z^ * mean of f over the resampled] = mean of w_i f_i, for any f."""
    n_groups = 20_000
    weights = Weights((3 * WEIGHTS).log().expand(n_groups, -1))
    outcome = step.resample(weights, 1.0, SCHEMES[scheme], draws(n_groups, 6))
    assert bool(outcome.resampled.all())
    f = torch.tensor([1.0, 5.0, -2.0, 7.0, 0.5, 9.0], dtype=torch.float64)
    estimate = outcome.log_z_increment.exp() * f[outcome.ancestors].mean(1)
    error = float(estimate.std()) / n_groups**0.5
    assert abs(float(estimate.mean()) - float((3 * WEIGHTS * f).mean())) < 4 * error + 1e-12
    assert error < 0.01


def test_settle_draws_by_weight() -> None:
    n_groups = 20_000
    weights = Weights(WEIGHTS.log().expand(n_groups, -1))
    index, increment = step.settle(weights, draws(n_groups, 1).squeeze(1))
    share = offspring(index[:, None], 6).double().mean(0)
    error = (WEIGHTS * (1 - WEIGHTS) / n_groups).sqrt()
    assert bool(((share - WEIGHTS).abs() <= 4 * error).all())
    assert torch.allclose(increment, torch.full((n_groups,), math.log(1 / 6), dtype=torch.float64))
    one, _ = step.settle(weights[0], torch.tensor(0.99, dtype=torch.float64))
    assert int(one) == 4


@schemes
@pytest.mark.parametrize("m", [1, 4, 9])
def test_shrink_keeps_estimates_unbiased(scheme: str, m: int) -> None:
    """E[Z^' * mean of f over the m offspring] = Z^ * sum_i W_i f_i, for any f."""
    n_groups = 20_000
    weights = Weights((2 * WEIGHTS).log().expand(n_groups, -1))
    ancestors, increment = step.shrink(weights, SCHEMES[scheme], draws(n_groups, m))
    assert ancestors.shape == (n_groups, m)
    f = torch.tensor([1.0, 5.0, -2.0, 7.0, 0.5, 9.0], dtype=torch.float64)
    estimate = increment.exp() * f[ancestors].mean(1)
    error = float(estimate.std()) / n_groups**0.5
    assert abs(float(estimate.mean()) - 2 / 6 * float((WEIGHTS * f).sum())) < 4 * error + 1e-12
