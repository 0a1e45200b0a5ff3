"""Exact acceptance for given chains and uniforms: against the algorithm by the book, and its corners one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from smc_sglang.smc import step
from smc_sglang.smc.densities import ALL_TOKENS, Density, Truncation
from smc_sglang.smc.rejection import Accepted, greedy_acceptance, multi_draft_acceptance
from smc_sglang.smc.rng import Stream, uniforms
from tests.unit.test_step import DRAFT, TARGET, Models, make_rows, take

VOCAB = 3
ALMOST_ONE = 1 - 2**-53
INF = float("inf")

# Chains and draft length of each group.
GROUPS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**32)


@dataclass(frozen=True, eq=False)
class Chains:
    """The arguments of `multi_draft_acceptance`."""

    members: Tensor
    drafted: Tensor
    draft_lengths: Tensor
    log_q: Tensor  # float32 [n_rows, k, vocab]
    log_p: Tensor  # float32 [n_rows, k + 1, vocab]
    accept_uniforms: Tensor
    last_uniforms: Tensor

    def accepted(self) -> Accepted:
        return multi_draft_acceptance(
            self.members,
            self.drafted,
            self.draft_lengths,
            lambda k: self.log_q[:, k],
            lambda k: self.log_p[:, k],
            self.accept_uniforms,
            self.last_uniforms,
        )

    def rows(self, group: int) -> list[int]:
        return [row for row in self.members[group].tolist() if row >= 0]


def random_chains(groups: list[tuple[int, int]], seed: int, banned: float = 0.3) -> Chains:
    """Chains from random laws with zeros that depend on the whole prefix.

    The groups' rows are in no order and two rows are nobody's; NaN is where nobody should look.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes, lengths = zip(*groups, strict=True)
    n_rows, k = sum(sizes) + 2, max(lengths)
    order = torch.randperm(n_rows, generator=generator)[:-2]
    group, row_lengths = torch.zeros(n_rows, dtype=torch.int64), torch.full((n_rows,), -1)
    group[order] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    row_lengths[order] = torch.tensor(lengths)[group[order]]

    tables = torch.randn(2, len(sizes), (VOCAB + 1) ** k, VOCAB, generator=generator) * 2
    bans = torch.rand(tables.shape, generator=generator) < banned
    tables = tables.masked_fill(bans & (tables < tables.amax(-1, keepdim=True)), -torch.inf)
    drafted, prefix = torch.zeros(n_rows, k, dtype=torch.int64), torch.zeros(n_rows, dtype=torch.int64)
    laws = torch.full((2, n_rows, k + 1, VOCAB), torch.nan)
    for t in range(k + 1):
        laws[:, :, t] = tables[:, group, prefix]
        if t < k:
            token = torch.multinomial(laws[1, :, t].softmax(-1), 1, generator=generator).squeeze(1)
            drafted[:, t] = torch.where(t < row_lengths, token, 0)
            prefix += (token + 1) * (VOCAB + 1) ** t
    unseen = torch.arange(k + 1) > row_lengths[:, None]
    log_p = laws[0].masked_fill(unseen[..., None], torch.nan)
    log_q = laws[1, :, :k].masked_fill(unseen[:, 1:, None], torch.nan)

    u = torch.rand(len(sizes), max(sizes) * k + 1, generator=generator, dtype=torch.float64)
    u = torch.where(u < 0.1, 0.0, torch.where(u > 0.9, ALMOST_ONE, u))
    members = pad_sequence(list(order.split(sizes)), batch_first=True, padding_value=-1)
    accept = u[:, 1:].view(len(sizes), max(sizes), k)
    return Chains(members, drafted, torch.tensor(lengths), log_q, log_p, accept, u[:, 0])


def by_the_book(chains: Chains, group: int) -> tuple[list[int], int]:
    """The accepted tokens and the one after them."""
    rows, accepted = chains.rows(group), []
    for t in range(int(chains.draft_lengths[group]) + 1):
        viable = [row for row in rows if chains.drafted[row, :t].tolist() == accepted]
        law = chains.log_p[viable[0], t].double().softmax(-1)
        if t == chains.draft_lengths[group]:
            break
        q = chains.log_q[viable[0], t].double().softmax(-1)
        for row in viable:
            token = int(chains.drafted[row, t])
            if chains.accept_uniforms[group, rows.index(row), t] * q[token] < law[token]:
                accepted.append(token)
                break
            law = (law - q).clamp(min=0)
            law = law / law.sum()
        if len(accepted) == t:
            break
    ends = law.cumsum(0)
    return accepted, int((ends <= chains.last_uniforms[group] * ends[-1]).sum())


def assert_by_the_book(chains: Chains, accepted: Accepted) -> None:
    for group, (length, row) in enumerate(zip(accepted.lengths.tolist(), accepted.rows.tolist(), strict=True)):
        tokens, last = by_the_book(chains, group)
        assert row in chains.rows(group)
        assert chains.drafted[row, :length].tolist() == tokens
        assert int(accepted.last[group]) == last


@given(GROUPS, SEEDS)
def test_groups_follow_the_book(groups: list[tuple[int, int]], seed: int) -> None:
    chains = random_chains(groups, seed)
    assert_by_the_book(chains, chains.accepted())


@given(GROUPS, SEEDS)
def test_shapes_types_and_ranges(groups: list[tuple[int, int]], seed: int) -> None:
    chains = random_chains(groups, seed)
    accepted = chains.accepted()
    for tensor in (accepted.lengths, accepted.rows, accepted.last):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (len(groups),)
    assert bool(((accepted.lengths >= 0) & (accepted.lengths <= chains.draft_lengths)).all())
    assert bool(((accepted.last >= 0) & (accepted.last < VOCAB)).all())
    assert bool((chains.members == accepted.rows[:, None]).any(1).all())


@given(GROUPS, SEEDS)
def test_no_token_that_the_target_excludes(groups: list[tuple[int, int]], seed: int) -> None:
    chains = random_chains(groups, seed, banned=0.7)
    accepted = chains.accepted()
    for length, row, last in zip(
        accepted.lengths.tolist(), accepted.rows.tolist(), accepted.last.tolist(), strict=True
    ):
        for t, token in enumerate([*chains.drafted[row, :length].tolist(), last]):
            assert chains.log_p[row, t, token] > -torch.inf


@given(GROUPS, SEEDS)
def test_a_group_alone_gives_the_same(groups: list[tuple[int, int]], seed: int) -> None:
    """Whatever the other groups, the numbers of the rows and the padding."""
    chains = random_chains(groups, seed)
    together = chains.accepted()
    for group, (size, k) in enumerate(groups):
        rows = chains.members[group, :size]
        alone = Chains(
            torch.arange(size)[None],
            chains.drafted[rows, :k],
            chains.draft_lengths[[group]],
            chains.log_q[rows, :k],
            chains.log_p[rows, : k + 1],
            chains.accept_uniforms[[group], :size, :k],
            chains.last_uniforms[[group]],
        ).accepted()
        assert int(alone.lengths) == int(together.lengths[group])
        assert int(alone.last) == int(together.last[group])
        assert int(rows[alone.rows]) == int(together.rows[group])


@given(GROUPS, SEEDS)
def test_a_perfect_draft_is_accepted_whole(groups: list[tuple[int, int]], seed: int) -> None:
    chains = random_chains(groups, seed)
    log_p = chains.log_p.clone()
    log_p[:, :-1] = torch.where(chains.log_q.isnan(), log_p[:, :-1], chains.log_q)
    accept = torch.full_like(chains.accept_uniforms, ALMOST_ONE)
    chains = replace(chains, log_p=log_p, accept_uniforms=accept)
    accepted = chains.accepted()
    assert torch.equal(accepted.lengths, chains.draft_lengths)
    assert torch.equal(accepted.rows, chains.members[:, 0])
    assert_by_the_book(chains, accepted)


# -- corners, on one group whose laws are the same at every position -----------------------------------------


def one_group(
    p: list[float], q: list[float], drafted: list[list[int]], accept: list[list[float]], last: float = 0.5
) -> Chains:
    """p and q as logits; `drafted` and `accept` [n_chains][k]."""
    n, k = len(drafted), len(drafted[0])
    return Chains(
        torch.arange(n)[None],
        torch.tensor(drafted, dtype=torch.int64),
        torch.tensor([k]),
        torch.tensor(q).expand(n, k, -1),
        torch.tensor(p).expand(n, k + 1, -1),
        torch.tensor([accept], dtype=torch.float64),
        torch.tensor([last], dtype=torch.float64),
    )


def outcome(chains: Chains) -> tuple[int, int, int]:
    accepted = chains.accepted()
    return int(accepted.lengths), int(accepted.rows), int(accepted.last)


FLAT = [0.0, 0.0, 0.0, 0.0]  # 1/4 each
FIRST_TWO, LAST_TWO = [0.0, 0.0, -INF, -INF], [-INF, -INF, 0.0, 0.0]  # 1/2 each


@pytest.mark.parametrize(("u", "accepted"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 0), (ALMOST_ONE, 0)])
def test_acceptance_below_the_ratio(u: float, accepted: int) -> None:
    assert outcome(one_group(FLAT, FIRST_TWO, [[1]], [[u]]))[0] == accepted


@pytest.mark.parametrize(("last", "token"), [(0.0, 2), (0.499, 2), (0.501, 3), (ALMOST_ONE, 3)])
def test_after_a_rejection_the_residual_gives_the_token(last: float, token: int) -> None:
    assert outcome(one_group(FLAT, FIRST_TWO, [[0], [1]], [[0.9], [0.0]], last)) == (0, 0, token)


@pytest.mark.parametrize(("last", "token"), [(0.0, 2), (0.499, 2), (0.501, 3), (ALMOST_ONE, 3)])
def test_after_a_whole_chain_the_target_gives_the_token(last: float, token: int) -> None:
    assert outcome(one_group(LAST_TWO, FLAT, [[3, 2]], [[0.9, 0.9]], last)) == (2, 0, token)


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_laws_without_a_common_token(u: float) -> None:
    assert outcome(one_group(LAST_TWO, FIRST_TWO, [[0], [1], [0]], [[u]] * 3, last=0.7)) == (0, 0, 3)


def test_chains_are_tried_in_the_order_of_members() -> None:
    chains = one_group(FLAT, FLAT, [[0], [1], [2]], [[0.9]] * 3)
    assert outcome(replace(chains, members=torch.tensor([[2, 0, 1]])))[1] == 2


@pytest.mark.parametrize(("u", "accepted"), [(0.49, 1), (0.51, 0)])
def test_the_residual_is_a_law(u: float, accepted: int) -> None:
    """0 rejected, r = (0, 1, 3, 4) / 8: a second chain's token 1 is accepted with probability 1/2."""
    p = torch.tensor([0.0, 9.0, 11.0, 12.0]).log().tolist()
    assert outcome(one_group(p, FLAT, [[0], [1]], [[0.0], [u]]))[:2] == (accepted, accepted)


@pytest.mark.parametrize(
    ("second", "expected"),
    [([0, 0, 1], (3, 1)), ([0, 1, 1], (2, 0)), ([1, 0, 1], (2, 0)), ([1, 1, 1], (2, 0))],
)
def test_only_a_chain_with_the_same_beginning_takes_over(second: list[int], expected: tuple[int, int]) -> None:
    """Where the first chain's last token is rejected."""
    accept = [[0.0, 0.0, 0.9], [0.0, 0.0, 0.0]]
    assert outcome(one_group([0.0, 1.0], [1.0, 0.0], [[0, 0, 0], second], accept))[:2] == expected


def test_padding_is_no_chain() -> None:
    """-1 would be row 0 or the last one, and both drafted what the group's residual is made of."""
    chains = one_group([0.0, 1.0], [1.0, 0.0], [[1], [0], [1]], [[0.9], [0.0], [0.0]])
    assert outcome(replace(chains, members=torch.tensor([[1, -1, -1]]))) == (0, 1, 1)


@pytest.mark.parametrize(
    ("excess", "tokens"),
    [
        (-INF, (0, 1)),  # nothing is left
        (-24.0, (0, 1)),  # 2e-11: rounding
        (-18.0, (3, 3)),  # 8e-9: a law
    ],
)
def test_a_residual_of_rounding_gives_way_to_the_target(excess: float, tokens: tuple[int, int]) -> None:
    """Token 2 is drafted against all odds, where p = q but for it and for token 3's excess."""
    p, q = [0.0, 0.0, -INF, excess], [0.0, 0.0, -46.0, -INF]
    for last, token in zip((0.25, 0.75), tokens, strict=True):
        assert outcome(one_group(p, q, [[2]], [[0.0]], last)) == (0, 0, token)
    next_chain = (1, 1) if tokens == (0, 1) else (0, 0)
    assert outcome(one_group(p, q, [[2], [0]], [[0.0], [0.9]]))[:2] == next_chain


def test_differences_that_float32_cannot_tell_count() -> None:
    assert outcome(one_group([2**-26, 0.0], [0.0, 0.0], [[1]], [[ALMOST_ONE]])) == (0, 0, 0)


def test_no_drafted_tokens() -> None:
    """One token from each target, and the proposals are not asked for."""

    def proposal(k: int) -> Tensor:
        raise AssertionError

    for k in (0, 2):  # other rows of the batch may have drafted
        accepted = multi_draft_acceptance(
            torch.tensor([[1, 0], [2, -1]]),
            torch.zeros(3, k, dtype=torch.int64),
            torch.tensor([0, 0]),
            proposal,
            lambda k: torch.tensor([FIRST_TWO, FIRST_TWO, LAST_TWO]),
            torch.zeros(2, 2, k, dtype=torch.float64),
            torch.full((2,), 0.7, dtype=torch.float64),
        )
        assert (accepted.lengths.tolist(), accepted.rows.tolist(), accepted.last.tolist()) == ([0, 0], [1, 2], [1, 3])


@pytest.mark.parametrize(("u", "depths"), [(0.0, [0, 1, 2]), (0.9, [0])])
def test_laws_past_the_end_are_not_asked_for(u: float, depths: list[int]) -> None:
    chains, asked = one_group(FLAT, FIRST_TWO, [[0, 1]], [[u, u]]), []

    def target(k: int) -> Tensor:
        asked.append(k)
        return chains.log_p[:, k]

    multi_draft_acceptance(
        chains.members,
        chains.drafted,
        chains.draft_lengths,
        lambda k: chains.log_q[:, k],
        target,
        chains.accept_uniforms,
        chains.last_uniforms,
    )
    assert asked == depths


# -- temperature 0 -------------------------------------------------------------------------------------------


def choices(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 1), min_size=length, max_size=length)


@given(st.lists(st.tuples(st.integers(0, 3), choices(3), choices(4)), min_size=1, max_size=5), SEEDS)
def test_greedy_acceptance_is_rejection_from_point_masses(
    rows: list[tuple[int, list[int], list[int]]], seed: int
) -> None:
    lengths, drafted, argmax = (torch.tensor(column) for column in zip(*rows, strict=True))
    drafted = drafted.masked_fill(torch.arange(3) >= lengths[:, None], 0)
    u = torch.rand(len(rows), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    accepted = multi_draft_acceptance(
        torch.arange(len(rows))[:, None],
        drafted,
        lengths,
        lambda k: torch.zeros(len(rows), 2).scatter(1, 1 - drafted[:, [k]], -torch.inf),
        lambda k: torch.zeros(len(rows), 2).scatter(1, 1 - argmax[:, [k]], -torch.inf),
        u[:, None, :3],
        u[:, 3],
    )
    n_accepted, last = greedy_acceptance(drafted, argmax, lengths)
    assert torch.equal(n_accepted, accepted.lengths)
    assert torch.equal(last, accepted.last)
    for row, (length, _, _) in enumerate(rows):
        agreeing = 0
        while agreeing < length and drafted[row, agreeing] == argmax[row, agreeing]:
            agreeing += 1
        assert (int(n_accepted[row]), int(last[row])) == (agreeing, int(argmax[row, agreeing]))


def test_greedy_acceptance_without_drafted_tokens() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int64)
    n_accepted, last = greedy_acceptance(empty, torch.tensor([[4], [2]]), torch.tensor([0, 0]))
    assert n_accepted.dtype == last.dtype == torch.int64
    assert (n_accepted.tolist(), last.tolist()) == ([0, 0], [4, 2])


# -- what the step makes of it -------------------------------------------------------------------------------


def test_replaced_rows_commit_what_their_group_accepted() -> None:
    block = step.Block(
        tokens=torch.tensor([[5, 6, 7], [1, 2, 3], [8, 9, -1], [4, -1, -1], [5, 0, 1]]),
        lengths=torch.tensor([3, 3, 2, 1, 3]),
        log_increments=torch.full((5, 3), 0.5, dtype=torch.float64),
    )
    accepted = Accepted(torch.tensor([1, 2, 0]), torch.tensor([4, 1, 3]), torch.tensor([30, 31, 32]))
    replaced = block.replaced(torch.tensor([4, 3, 1, 0]), accepted, torch.tensor([0, 2, 1, 0]))
    assert replaced.tokens.tolist() == [[5, 30, -1], [1, 2, 31], [8, 9, -1], [32, -1, -1], [5, 30, -1]]
    assert replaced.lengths.tolist() == [2, 3, 2, 1, 2]
    assert replaced.log_increments.tolist() == [[0.0] * 3, [0.0] * 3, [0.5] * 3, [0.0] * 3, [0.0] * 3]
    assert block.tokens[0].tolist() == [5, 6, 7]
    assert block.lengths.tolist() == [3, 3, 2, 1, 3]
    assert bool((block.log_increments == 0.5).all())


MEMBERS = torch.tensor([[5, 0, 2], [1, 4, -1], [3, -1, -1]])  # row 6 is in no group


def group_rows(seed: int) -> step.Rows:
    """Three groups with draft lengths 2, 3 and 0: one truncated, one with a temperature."""
    group = torch.tensor([0, 1, 0, 2, 1, 0, 3])
    density = Density(
        torch.tensor([1.0, 0.7, 1.0, 1.3])[group],
        Truncation(
            torch.tensor([40, ALL_TOKENS, 1, 3])[group], torch.tensor([0.9, 1.0, 1.0, 1.0])[group], torch.zeros(7)
        ),
    )
    return make_rows(
        [2, 3, 2, 0, 3, 2, 1],
        pending=group * 7 + 1,
        seeds=group + 10 * seed,
        particles=torch.tensor([1, 0, 2, 0, 1, 0, 0]),
        positions=group * 5 + 2,
        density=density,
        keeps_laws=True,
    )


def accept_exactly(rows: step.Rows, members: Tensor) -> tuple[Accepted, step.Laws]:
    models = Models()
    _, laws = step.propose_and_score(rows, models.draft, models.score)
    return step.accept_exactly(laws, members), laws


def on_paper(rows: step.Rows, drafted: Tensor) -> Chains:
    """What exact acceptance is about in a batch of `MEMBERS`, without `Laws`."""
    before = torch.cat([rows.pending[:, None], drafted], dim=1)

    def draws(row: Tensor, offset: int, stream: Stream) -> Tensor:
        return uniforms(rows.seeds[row], rows.particles[row], rows.positions[row] + offset, stream)

    return Chains(
        MEMBERS,
        drafted,
        rows.draft_lengths[MEMBERS[:, 0]],
        torch.stack([rows.density.proposal(DRAFT[before[:, k]]) for k in range(3)], dim=1),
        torch.stack([rows.density.target(TARGET[before[:, k]]) for k in range(4)], dim=1),
        torch.stack([draws(MEMBERS, k, Stream.ACCEPT) for k in range(3)], dim=2),
        draws(MEMBERS[:, 0], 0, Stream.BONUS),
    )


def test_exact_acceptance_of_a_block_follows_the_book() -> None:
    lengths, winners = set(), set()
    for seed in range(40):
        rows = group_rows(seed)
        accepted, laws = accept_exactly(rows, MEMBERS)
        chains = on_paper(rows, laws.drafted)
        assert_by_the_book(chains, accepted)
        for k in range(3):
            drafting = rows.draft_lengths > k
            assert torch.equal(laws.proposal(k)[drafting], chains.log_q[drafting, k])
        lengths |= set(enumerate(accepted.lengths.tolist()))
        winners |= set(accepted.rows.tolist())
    assert lengths == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)}
    assert winners == {0, 1, 2, 3, 4, 5}


def test_exact_acceptance_of_a_group_alone_gives_the_same() -> None:
    for seed in range(10):
        rows = group_rows(seed)
        together, _ = accept_exactly(rows, MEMBERS)
        for group, members in enumerate(MEMBERS.tolist()):
            index = [row for row in members if row >= 0]
            alone, _ = accept_exactly(take(rows, index), torch.arange(len(index))[None])
            assert int(alone.lengths) == int(together.lengths[group])
            assert int(alone.last) == int(together.last[group])
            assert index[int(alone.rows)] == int(together.rows[group])
