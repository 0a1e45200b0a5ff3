"""Going on within one lineage when too many tokens are held back."""

from __future__ import annotations

from array import array

import pytest
import torch

from smc_sglang.engine.group import lineage
from smc_sglang.smc import step
from smc_sglang.smc.resampling import SCHEMES
from smc_sglang.smc.weights import Weights

# Two lineages of three and two particles; one of the first ends early.
STREAMS = [array("q", tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [1, 6, 7, 7], [1, 6, 7, 7])]
W = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)


def drawn(limit: int, *uniforms: float) -> list[int] | None:
    """The kept particles when position 1 draws the first uniform, position 2 the second, and later ones the last."""
    kept = lineage(STREAMS, W, limit, lambda at: torch.tensor([uniforms[min(at, len(uniforms)) - 1]]).double())
    return None if kept is None else kept.nonzero().flatten().tolist()


def test_nothing_happens_within_the_limit() -> None:
    assert drawn(3, 0.0) is None


@pytest.mark.parametrize(("uniform", "kept"), [(0.0, [0, 1, 2]), (0.59, [0, 1, 2]), (0.61, [3, 4]), (0.99, [3, 4])])
def test_a_lineage_is_drawn_by_its_total_weight(uniform: float, kept: list[int]) -> None:
    assert drawn(2, uniform) == kept


def test_lineages_are_drawn_until_the_rest_fits() -> None:
    assert drawn(1, 0.0, 0.0) == [0, 1]  # differ at the last token only
    assert drawn(1, 0.0, 0.9) == [2]  # has ended here
    assert drawn(1, 0.7) == [3, 4]  # agree to the end


def test_weights_of_zero_are_never_drawn() -> None:
    weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        kept = lineage(STREAMS, weights, 1, lambda _, u=uniform: torch.tensor([u]).double())  # type: ignore[misc]
        assert kept is not None
        assert kept.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_particle_has_its_expected_offspring(scheme: str) -> None:
    """E[offspring of i] = N * W_i over both draws, and log Z^ takes in the mean weight whatever was drawn."""
    generator = torch.Generator().manual_seed(0)
    weights = Weights(W.log() + 3.0)
    offspring, n_draws = torch.zeros(5, dtype=torch.float64), 5_000
    for uniform in torch.rand(n_draws, 6, generator=generator, dtype=torch.float64):
        kept = lineage(STREAMS, W, 2, lambda _, u=uniform: u[:1])  # type: ignore[misc]
        assert kept is not None
        ancestors, log_z = step.narrow(weights, kept, SCHEMES[scheme], uniform[1:])
        offspring += torch.bincount(ancestors, minlength=5)
        assert float(log_z) == pytest.approx(3.0 - torch.tensor(5.0).log().item())
    # A lineage has 5 offspring or none, so one draw's standard deviation is below 2.5.
    assert torch.allclose(offspring / n_draws, 5 * W, atol=4 * 2.5 / n_draws**0.5)
