from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from smc_sglang.smc.rng import Stream, derive_seed, invert_cdf, sample_categorical, uniforms

ALMOST_ONE = 1 - 2**-53
INT64 = st.integers(-(2**63), 2**63 - 1)
N = torch.arange(100_000)
ZERO = torch.tensor(0)


def variations() -> dict[str, torch.Tensor]:
    """Uniforms along each argument, others fixed; seeds that are dense, sparse and extreme."""
    return {
        "seeds": uniforms(N, ZERO, ZERO, Stream.DRAFT),
        "high seeds": uniforms(N << 40, ZERO, ZERO, Stream.DRAFT),
        "negative seeds": uniforms(-N, ZERO + 3, ZERO, Stream.DRAFT),
        "particles": uniforms(ZERO, N, ZERO, Stream.DRAFT),
        "positions": uniforms(ZERO, ZERO, N, Stream.DRAFT),
        "all": uniforms(N, N, N, Stream.DRAFT),
        "swapped": uniforms(ZERO, N % 100, N // 100, Stream.DRAFT),
        "resample": uniforms(ZERO, ZERO, N, Stream.RESAMPLE),
    }


@pytest.mark.parametrize("name", variations())
def test_uniform_and_serially_independent(name: str) -> None:
    u = variations()[name]
    assert u.dtype == torch.float64
    assert bool(((u >= 0) & (u < 1)).all())
    assert kstest(u.numpy(), "uniform").pvalue > 1e-3
    # Neighbours, on a 10 x 10 grid.
    cells = (u[:-1] * 10).long() * 10 + (u[1:] * 10).long()
    counts = torch.bincount(cells, minlength=100).double()
    expected = len(cells) / 100
    assert chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 99) > 1e-3


@pytest.mark.parametrize(("a", "b"), [(Stream.DRAFT, Stream.BONUS), (Stream.RESAMPLE, Stream.SETTLE)])
def test_streams_are_independent(a: Stream, b: Stream) -> None:
    for shift in range(-2, 3):
        first, second = uniforms(ZERO, ZERO, N, a), uniforms(ZERO, ZERO, N + shift, b)
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / len(N) ** 0.5


def test_no_two_draws_share_a_number() -> None:
    seeds, particles, positions = torch.meshgrid(torch.arange(-3, 4), torch.arange(32), torch.arange(64), indexing="ij")
    drawn = torch.cat([uniforms(seeds, particles, positions, stream).flatten() for stream in Stream])
    assert len(drawn.unique()) == len(drawn)


def test_uses_all_53_bits() -> None:
    u = uniforms(ZERO, ZERO, N, Stream.DRAFT) * 2**53
    assert bool((u == u.long()).all())
    bits = (u.long()[:, None] >> torch.arange(53)) & 1
    assert bool(((bits.double().mean(0) - 0.5).abs() < 0.01).all())


@given(st.lists(st.tuples(INT64, INT64, INT64), min_size=1, max_size=6), st.sampled_from(Stream))
def test_a_function_of_its_own_arguments_only(rows: list[tuple[int, int, int]], stream: Stream) -> None:
    together = uniforms(*torch.tensor(rows).unbind(1), stream)
    for row, u in zip(rows, together, strict=True):
        assert torch.equal(uniforms(*torch.tensor(row).unbind(), stream), u)


def splitmix(x: int) -> int:
    """Reference: one output of splitmix64 from state x, in Python's integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def test_the_reference_is_splitmix() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0


@given(INT64, INT64, INT64, st.sampled_from(Stream))
def test_agrees_with_plain_integers(seed: int, particle: int, position: int, stream: Stream) -> None:
    """So a request with a seed gives the same numbers on every device."""
    mask = 2**64 - 1
    state = splitmix((seed ^ stream * 0x9E3779B97F4A7C15) & mask)
    for counter in (particle, position):
        state = splitmix((state ^ counter) & mask)
    u = uniforms(torch.tensor(seed), torch.tensor(particle), torch.tensor(position), stream)
    assert float(u) == (state >> 11) / 2**53


def test_children_have_seeds_of_their_own() -> None:
    seeds = {derive_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(100)}
    assert len(seeds) == 500
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert derive_seed(5, 1) == derive_seed(5, 1)


@pytest.mark.parametrize("vocab", [5, 255, 256, 257, 1000])
def test_categorical_follows_its_law(vocab: int) -> None:
    logits = torch.full((vocab,), -torch.inf)
    support = torch.tensor([1, vocab // 2, vocab - 2])
    logits[support] = torch.tensor([0.2, 0.5, 0.3]).log()
    n = 30_000
    drawn = sample_categorical(logits.expand(n, -1), uniforms(N[:n], ZERO, ZERO, Stream.DRAFT))
    counts = torch.bincount(drawn, minlength=vocab)[support].double()
    expected = n * torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    assert int(counts.sum()) == n
    assert chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 2) > 1e-3


@settings(max_examples=50)
@given(st.integers(1, 1500), st.integers(0, 2**31), st.floats(0, ALMOST_ONE))
def test_categorical_inverts_the_distribution_function(vocab: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, vocab, generator=generator, dtype=torch.float64).log_softmax(-1)
    cumulative = log_probs.exp().cumsum(-1)
    drawn = sample_categorical(log_probs, torch.full((3,), u, dtype=torch.float64))
    for row, token in enumerate(drawn.tolist()):
        assert cumulative[row, token] >= u - 1e-12
        assert token == 0 or cumulative[row, token - 1] <= u + 1e-12


@settings(max_examples=50)
@given(st.integers(2, 700), st.data())
def test_categorical_never_draws_the_impossible(vocab: int, data: st.DataObject) -> None:
    possible = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4))
    u = data.draw(st.sampled_from([0.0, 2**-53, 0.5, ALMOST_ONE]))
    log_probs = torch.full((vocab,), -torch.inf)
    log_probs[torch.tensor(possible)] = torch.randn(len(possible))
    assert int(sample_categorical(log_probs, torch.tensor(u, dtype=torch.float64))) in possible


def test_rows_without_a_law_stay_in_range() -> None:
    """Their weight is NaN or -inf, which the caller sees; an index out of range would kill the device."""
    for vocab in (4, 600):
        rows = torch.stack([torch.full((vocab,), torch.nan), torch.full((vocab,), -torch.inf)])
        for u in (0.0, ALMOST_ONE):
            drawn = sample_categorical(rows, torch.full((2,), u, dtype=torch.float64))
            assert bool(((drawn >= 0) & (drawn < vocab)).all())


def test_a_point_that_rounds_up_to_the_total_has_mass() -> None:
    masses = torch.tensor([0.0, 0.3, 0.6, 0.0], dtype=torch.float64)
    assert invert_cdf(masses, torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() == [1, 2]
