from __future__ import annotations

import pytest
import torch

from smc_sglang.smc.densities import Density, log_density, power_density
from smc_sglang.smc.rejection import greedy_acceptance

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(4, 7, generator=GENERATOR) * 5
TEMPERATURES = torch.tensor([1.0, 0.5, 2.0, 1e-4])


def test_temperature_divides_the_logits() -> None:
    exact = (LOGITS.double() / TEMPERATURES.double()[:, None]).log_softmax(-1)
    log_p = log_density(LOGITS, TEMPERATURES)
    assert log_p.dtype == torch.float32
    assert torch.allclose(log_p.double(), exact, rtol=1e-5, atol=1e-6)


def test_temperature_one_is_the_softmax() -> None:
    assert torch.allclose(log_density(LOGITS, torch.ones(4)), LOGITS.log_softmax(-1))


def test_low_temperatures_keep_small_differences() -> None:
    """Two logits of 100 that are 2^-15 apart: divided first, their rounding would be larger than the gap."""
    logits = torch.tensor([100.0, 100.0 + 2**-15])
    log_p = log_density(logits, torch.tensor(2**-15))
    assert log_p.tolist() == pytest.approx([-1.3132617, -0.3132617])


def test_half_precision_logits_are_widened() -> None:
    log_p = log_density(LOGITS.bfloat16(), torch.ones(4))
    assert log_p.dtype == torch.float32
    assert torch.allclose(log_p.exp().sum(-1), torch.ones(4))


def test_temperature_zero_gives_finite_values() -> None:
    assert torch.equal(log_density(LOGITS, torch.zeros(4)), log_density(LOGITS, torch.ones(4)))


def test_banned_tokens_stay_banned() -> None:
    logits = LOGITS.clone()
    logits[:, 2] = -torch.inf
    log_p = log_density(logits, TEMPERATURES)
    assert bool(log_p[:, 2].isneginf().all())
    raised, log_c = power_density(log_p, torch.tensor([1.0, 2.0, 0.5, 1.0]))
    assert bool(raised[:, 2].isneginf().all())
    assert bool(log_c.isfinite().all())


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0, 7.0])
def test_power_normalises_each_position(power: float) -> None:
    log_p = log_density(LOGITS, TEMPERATURES[:3].repeat(2)[:4])
    raised, log_c = power_density(log_p, torch.full((4,), power))
    masses = log_p.double().exp() ** power
    assert torch.allclose(log_c.double(), masses.sum(-1).log(), atol=1e-5)
    assert torch.allclose(raised.double().exp(), masses / masses.sum(-1, keepdim=True), atol=1e-6)


def test_power_one_changes_nothing() -> None:
    log_p = log_density(LOGITS, TEMPERATURES)
    raised, log_c = power_density(log_p, torch.tensor([1.0, 2.0, 1.0, 1.0]))
    assert torch.equal(raised[[0, 2, 3]], log_p[[0, 2, 3]])
    assert log_c[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert log_c[1] != 0


def test_tokens_of_a_block_are_looked_up_by_position() -> None:
    logits = torch.randn(3, 5, 7, generator=GENERATOR)
    tokens = torch.randint(7, (3, 5), generator=GENERATOR)
    density = Density(torch.tensor([0.5, 1.0, 2.0]))
    everything = log_density(logits, density.temperatures[:, None])
    assert torch.equal(density.log_probs_of(logits, tokens), everything.gather(-1, tokens[..., None])[..., 0])
    assert density.log_probs_of(logits[:, :0], tokens[:, :0]).shape == (3, 0)
    index = torch.tensor([2, 0])
    assert torch.equal(density.rows(index).log_probs(logits[index, 0]), everything[index, 0])


@pytest.mark.parametrize(
    ("drafted", "argmax", "length", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 9, 3], [1, 2, 3, 4], 3, 1),
        ([9, 2, 3], [1, 2, 3, 4], 3, 0),
        ([1, 2, 3], [1, 2, 3, 4], 2, 2),  # what is past the draft length is padding
        ([1, 2, 3], [1, 2, 3, 4], 0, 0),
        ([], [7], 0, 0),
    ],
)
def test_greedy_acceptance(drafted: list[int], argmax: list[int], length: int, accepted: int) -> None:
    n_accepted, token = greedy_acceptance(
        torch.tensor([drafted], dtype=torch.int64), torch.tensor([argmax]), torch.tensor([length])
    )
    assert n_accepted.tolist() == [accepted]
    assert token.tolist() == [argmax[accepted]]
