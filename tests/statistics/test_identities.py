"""The identities of SMC decoding, on models whose sequence law can be enumerated.

All run through the engine's own algorithm. Seeds are fixed: a test that passes passes always.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests.statistics.toy import Runs, Toy, run

STANDARD_ERRORS = 4.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy() -> Toy:
    """A draft that often disagrees with the target."""
    return Toy.random(vocab=3, length=5, agreement=0.2, seed=4)


def total_variation(runs: Runs, masses: Tensor) -> tuple[float, float]:
    """Between the answers' law and the target, and what sampling noise alone would give on average."""
    law, error = runs.law(len(masses))
    noise = (2 / torch.pi) ** 0.5 * error.sum() / 2
    return float((law - masses / masses.sum()).abs().sum() / 2), float(noise)


def goodness_of_fit(runs: Runs, masses: Tensor) -> float:
    """The p-value of Pearson's chi-square of one answer per group against a law."""
    counts = torch.bincount(runs.answers[:, 0], minlength=len(masses)).double()
    expected = masses / masses.sum() * len(runs.answers)
    assert not bool(counts[masses == 0].any())
    common = expected > 5
    statistic = ((counts - expected)[common].square() / expected[common]).sum()
    return float(chi2.sf(float(statistic), int(common.sum()) - 1))


def assert_unbiased(log_z: Tensor, expected: float, precision: float) -> None:
    """E[Z^] is `expected`, seen to `precision` (a relative standard error, so that the test has teeth)."""
    z = log_z.exp() / expected
    error = float(z.std()) / len(z) ** 0.5
    assert error < precision
    assert abs(float(z.mean()) - 1) < STANDARD_ERRORS * error


@pytest.mark.parametrize(
    ("n_particles", "draft_length", "threshold", "scheme"),
    [
        (1, 2, 0.5, "systematic"),
        (3, 3, 0.0, "systematic"),
        (4, 1, 0.5, "systematic"),
        (16, 1, 0.7, "systematic"),
        (5, 1, 1.0, "systematic"),
        (5, 1, 1.0, "stratified"),
        (5, 1, 1.0, "residual"),
        (5, 1, 1.0, "multinomial"),
    ],
)
def test_z_is_one_on_average(toy: Toy, n_particles: int, draft_length: int, threshold: float, scheme: str) -> None:
    runs = run(toy, 40_000, n_particles, draft_length, threshold=threshold, scheme=scheme, seed=1)
    assert_unbiased(runs.log_z, 1.0, precision=0.01)
    assert (runs.n_resampled > 0) == (threshold > 0 and n_particles > 1)


@pytest.mark.parametrize(("scheme", "threshold"), [("systematic", 0.5), ("multinomial", 1.0)])
def test_law_approaches_the_target_as_one_over_n(toy: Toy, scheme: str, threshold: float) -> None:
    target = toy.law()
    tv = {}
    for n, n_groups, n_draws in [(1, 20_000, 1), (4, 40_000, 4), (16, 20_000, 8), (64, 10_000, 16)]:
        runs = run(toy, n_groups, n, 1, threshold=threshold, scheme=scheme, n_draws=n_draws, seed=2)
        tv[n], noise = total_variation(runs, target)
        assert noise < 0.02
        if n > 4:
            assert tv[n] < 1.5 * tv[4] * 4 / n + noise
    assert tv[1] > 0.3
    assert 0.05 < tv[4] < tv[1] / 2


def test_power_reaches_its_own_target() -> None:
    toy = Toy.random(vocab=3, length=5, agreement=0.5, seed=5)
    squares = toy.law(lambda p, q, t: p**2)
    for n, n_groups, bound in [(4, 20_000, 0.2), (16, 20_000, 0.05), (64, 10_000, 0.0125)]:
        runs = run(toy, n_groups, n, 1, power=2.0, n_draws=8, seed=3)
        tv, noise = total_variation(runs, squares)
        assert tv < bound + noise
        assert_unbiased(runs.log_z, float(squares.sum()), precision=0.01)

    # The bounds mean something: two laws that a wrong engine would give are far from the target.
    def sharpened(p: np.ndarray, q: np.ndarray, t: int) -> np.ndarray:
        return p**2 / (p**2).sum()

    first = torch.arange(len(squares)) % (toy.vocab + 1)  # the first token of each code
    shares = torch.zeros(toy.vocab + 1, dtype=torch.float64).scatter_add_(0, first, squares)
    starts = torch.zeros_like(shares).scatter_add_(0, first, toy.law(sharpened))
    shared = squares / shares.clamp(min=1e-300)[first] * starts[first]
    for wrong in (toy.law(sharpened), shared):
        assert float((wrong - squares / squares.sum()).abs().sum()) / 2 > 0.3


def test_a_perfect_draft_is_never_resampled() -> None:
    toy = Toy.random(vocab=4, length=4, agreement=1.0, seed=5)
    runs = run(toy, 20_000, 6, 2, threshold=1.0, seed=4)
    assert bool((runs.ess == 6).all())
    assert runs.n_resampled == 0
    assert bool((runs.log_z == 0).all())
    assert goodness_of_fit(runs, toy.law()) > 1e-3


@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_one_particle_takes_k_from_the_draft_and_one_from_the_target(toy: Toy, draft_length: int) -> None:
    def alternating(p: np.ndarray, q: np.ndarray, t: int) -> np.ndarray:
        return p if t % (draft_length + 1) == 0 else q

    runs = run(toy, 40_000, 1, draft_length, seed=5)
    assert goodness_of_fit(runs, toy.law(alternating)) > 1e-3
    assert goodness_of_fit(runs, toy.law()) < 1e-9


def test_no_draft_is_plain_decoding(toy: Toy) -> None:
    runs = run(toy, 20_000, 1, 0, seed=6)
    assert goodness_of_fit(runs, toy.law()) > 1e-3
    assert bool((runs.log_z == 0).all())


@pytest.mark.parametrize("scheme", ["systematic", "stratified", "residual", "multinomial"])
@pytest.mark.parametrize(("n_particles", "shrink_to"), [(8, {0: 3}), (8, {1: 1}), (8, {0: 5, 1: 2}), (2, {0: 7})])
def test_a_change_of_size_keeps_z_unbiased(toy: Toy, scheme: str, n_particles: int, shrink_to: dict[int, int]) -> None:
    runs = run(toy, 20_000, n_particles, 1, scheme=scheme, shrink_to=shrink_to, seed=7)
    assert_unbiased(runs.log_z, 1.0, precision=0.015)


def test_a_shrunk_group_keeps_its_target(toy: Toy) -> None:
    runs = run(toy, 10_000, 64, 1, shrink_to={0: 32}, n_draws=16, seed=8)
    tv, noise = total_variation(runs, toy.law())
    assert tv < 0.025 + noise
