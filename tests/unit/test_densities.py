from __future__ import annotations

import math

import pytest
import torch

from smc_sglang.smc.densities import (
    ALL_TOKENS,
    EPSILON,
    Bias,
    Density,
    MinLength,
    Penalties,
    Truncation,
    log_density,
    power_density,
)
from smc_sglang.smc.rejection import greedy_acceptance


class EvenTokens:
    """A grammar of even tokens; a row whose last drafted token is odd is in a dead end."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows

    def rows(self, index: torch.Tensor) -> EvenTokens:
        return EvenTokens(len(index))

    def allowed(self, drafted: torch.Tensor, k: int) -> torch.Tensor:
        even = torch.arange(7) % 2 == 0
        alive = (drafted[:, k - 1] % 2 == 0) if k else torch.ones(self.n_rows, dtype=torch.bool)
        return even & alive[:, None]


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


def truncation(top_k: int = ALL_TOKENS, top_p: float = 1.0, min_p: float = 0.0, rows: int = 1) -> Truncation:
    return Truncation(torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p))


LAW = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),  # the token that goes beyond it is kept
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.41, "min_p": 0.1}, {1, 3}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_the_likely_tokens(parameters: dict, kept: set[int]) -> None:
    law = truncation(**parameters).apply(LAW)[0].exp()
    assert {token for token in range(4) if law[token] > 0} == kept
    mass = sum(float(LAW[0, token].exp()) for token in kept)
    assert [float(law[token]) for token in kept] == pytest.approx([float(LAW[0, t].exp()) / mass for t in kept])


def test_truncation_of_a_flat_law_looks_at_the_whole_vocabulary() -> None:
    """More tokens are kept than are sorted at first; a peaked row beside it is not changed by that."""
    laws = torch.stack([torch.randn(5000, generator=GENERATOR) * scale for scale in (0.1, 8.0)]).log_softmax(-1)
    both = truncation(top_p=0.9, rows=2).apply(laws)
    for row in range(2):
        values, index = laws[row].double().exp().sort(descending=True)
        n_kept = int((values.cumsum(0) - values <= 0.9).sum())
        assert set(both[row].isfinite().nonzero().flatten().tolist()) == set(index[:n_kept].tolist())
    assert torch.equal(both[1], truncation(top_p=0.9).apply(laws[1:])[0])


def test_the_proposal_of_a_truncated_row_reaches_every_token() -> None:
    density = Density(torch.ones(2), Truncation(torch.tensor([2, ALL_TOKENS]), torch.ones(2), torch.zeros(2)))
    logits = LAW.repeat(2, 1)
    q, p = density.proposal(logits).exp(), density.target(logits).exp()
    assert torch.allclose(q[0], (1 - EPSILON) * p[0] + EPSILON * LAW[0].exp())
    assert torch.equal(p[1], q[1])
    assert q.sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_penalties_see_the_tokens_of_the_block() -> None:
    counts = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]])
    penalties = Penalties(counts, torch.tensor([0.5, 0.0]), torch.tensor([0.25, 0.0]), torch.tensor([1.0, 2.0]))
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, -1.0, 1.0, 0.0]])
    drafted = torch.tensor([[0, 1, 3], [0, 1, 2]])
    shaped = Density(torch.ones(2), shapers=(penalties,)).shaped(logits, drafted, 2)
    assert shaped[0].tolist() == [1 - 0.5 * 3 - 0.25, 1 - 0.5 - 0.25, 1.0, 1.0]  # what comes later does not count
    assert shaped[1].tolist() == [1.5, -2.0, 1.0, 0.0]
    assert logits[0].tolist() == [1.0] * 4


def test_no_stop_before_the_minimum() -> None:
    stops = torch.tensor([[False, True, False], [False, True, False]])
    density = Density(torch.ones(2), shapers=(MinLength(torch.tensor([2, 0]), stops),))
    for offset, banned in ((0, True), (1, True), (2, False)):
        shaped = density.shaped(torch.zeros(2, 3), torch.zeros(2, offset, dtype=torch.int64), offset)
        assert bool(shaped[0, 1].isneginf()) == banned
        assert shaped[1].tolist() == [0.0] * 3


def test_a_bias_of_minus_infinity_is_a_ban() -> None:
    bias = Bias(torch.tensor([[0.0, -torch.inf, 2.0]]))
    density = Density(torch.tensor([0.5]), shapers=(bias,))
    shaped = density.shaped(torch.zeros(1, 3), torch.zeros(1, 0, dtype=torch.int64), 0)
    assert density.target(shaped)[0, 1] == -torch.inf
    assert density.proposal(shaped)[0].exp().tolist() == pytest.approx([1 / (1 + math.e**4), 0, 1 / (1 + math.e**-4)])
    assert density.may_vanish


def test_rows_take_every_parameter_along() -> None:
    density = Density(TEMPERATURES, truncation(top_k=2, rows=4), (Bias(torch.arange(28.0).view(4, 7)),))
    some = density.rows(torch.tensor([2, 0]))
    nothing = torch.zeros(4, 0, dtype=torch.int64)
    whole = density.target(density.shaped(LOGITS, nothing, 0))[[2, 0]]
    assert torch.equal(some.target(some.shaped(LOGITS[[2, 0]], nothing[:2], 0)), whole)


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


def _masked(is_global: list[bool], **parts: object) -> tuple[Density, torch.Tensor]:
    """A density of four rows at temperature 1 under :class:`EvenTokens`, and the allowed tokens."""
    density = Density(torch.ones(4), masks=EvenTokens(4), is_global=torch.tensor(is_global), **parts)  # type: ignore
    return density, torch.arange(7) % 2 == 0


def test_local_semantics_renormalises_and_global_keeps_the_mass() -> None:
    density, even = _masked([False, False, True, True])
    judgement = density.judge(LOGITS, torch.empty(4, 0, dtype=torch.int64), 0)
    plain = LOGITS.log_softmax(-1)
    local = LOGITS.masked_fill(~even, -torch.inf).log_softmax(-1)
    for row in (0, 1):
        for law in (judgement.log_probs, judgement.whole, judgement.allowed):
            assert torch.allclose(law[row], local[row])
    for row in (2, 3):
        assert torch.allclose(judgement.log_probs[row], local[row])  # what an exact step would draw from
        assert torch.allclose(judgement.whole[row], plain[row])
        assert torch.allclose(judgement.allowed[row], plain[row].masked_fill(~even, -torch.inf))
    law, log_c = judgement.bonus(torch.ones(4), density.is_global)
    assert torch.allclose(law, local)
    assert torch.allclose(log_c, torch.where(density.is_global, plain[:, even].logsumexp(-1), torch.zeros(4)))


def test_a_dead_end_has_no_weight_and_still_something_to_draw() -> None:
    density, even = _masked([False, False, True, True])
    drafted = torch.tensor([[2], [3], [2], [3]])  # rows 1 and 3 cannot go on
    judgement = density.judge(LOGITS, drafted, 1)
    for row, alive in enumerate([True, False, True, False]):
        assert bool(judgement.whole[row].isneginf().all()) is not alive
        assert bool(judgement.allowed[row].isneginf().all()) is not alive
        assert torch.isfinite(judgement.log_probs[row][even]).all()
    law, log_c = judgement.bonus(torch.ones(4), density.is_global)
    assert law.exp().sum(-1).tolist() == pytest.approx([1.0] * 4)
    assert log_c.isneginf().tolist() == [False, True, False, True]


def test_where_all_that_a_grammar_allows_is_banned_the_grammar_wins() -> None:
    bias = torch.zeros(4, 7)
    bias[0, ::2] = -torch.inf
    density, even = _masked([False] * 4, shapers=(Bias(bias),))
    shaped = density.shaped(LOGITS, torch.empty(4, 0, dtype=torch.int64), 0)
    assert torch.isfinite(shaped[0]).tolist() == even.tolist()
    assert torch.allclose(shaped[1:], LOGITS[1:].masked_fill(~even, -torch.inf))
