"""The law of what exact acceptance commits, against full enumeration. Seeds are fixed: what passes passes always."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor

from smc_sglang.smc import step
from smc_sglang.smc.densities import ALL_TOKENS, Density, Truncation
from smc_sglang.smc.rejection import multi_draft_acceptance
from tests.statistics.toy import START, Toy

N_GROUPS = 12_000
STANDARD_ERRORS = 4.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = ALL_TOKENS
    top_p: float = 1.0
    min_p: float = 0.0

    def density(self, n_rows: int) -> Density:
        temperatures, *bounds = (torch.full((n_rows,), getattr(self, field.name)) for field in fields(self))
        return Density(temperatures, None if self == Sampling(self.temperature) else Truncation(*bounds))

    def law(self, p: np.ndarray) -> np.ndarray:
        """p~ of p, [..., vocab]."""
        p = p ** (1 / self.temperature)
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1)
        ranked = np.take_along_axis(p, order, -1)
        kept = (ranked.cumsum(-1) - ranked <= self.top_p) & (ranked >= self.min_p * ranked[..., :1])
        kept &= np.arange(p.shape[-1]) < self.top_k
        np.put_along_axis(p, order, ranked * kept, -1)
        return p / p.sum(-1, keepdims=True)


PLAIN = Sampling()
TRUNCATED = Sampling(temperature=0.8, top_k=2)


@dataclass(frozen=True)
class Groups:
    """Sequences of independent groups in mode `exact`."""

    sizes: Tensor  # int64 [n_groups]
    draft_lengths: Tensor  # int64 [n_groups]
    seeds: Tensor  # int64 [n_groups]
    tokens: Tensor  # int64 [n_groups, START + capacity], START first, -1 after `lengths`
    lengths: Tensor  # int64 [n_groups], START not counted

    @classmethod
    def start(cls, sizes: Tensor, draft_lengths: Tensor, capacity: int, seed: int) -> Groups:
        n_groups = len(sizes)
        tokens = torch.tensor([*START, *[-1] * capacity]).repeat(n_groups, 1)
        seeds = seed * 10**9 + torch.arange(n_groups)
        return cls(sizes, draft_lengths, seeds, tokens, torch.zeros(n_groups, dtype=torch.int64))

    def of(self, index: Tensor) -> Groups:
        return Groups(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def emitted(self) -> Tensor:
        return self.tokens[:, len(START) :]

    def after_a_cycle(self, toy: Toy, sampling: Sampling) -> Groups:
        """With one more block."""
        n_rows, n_groups = int(self.sizes.sum()), len(self.sizes)
        index, group = torch.arange(n_rows), torch.arange(n_groups).repeat_interleave(self.sizes)
        end, draft_lengths = len(START) + self.lengths, self.draft_lengths[group]
        rows = step.Rows(
            pending=self.tokens[group, end[group] - 1],
            draft_lengths=draft_lengths,
            draft_lengths_list=tuple(draft_lengths.tolist()),
            density=sampling.density(n_rows),
            greedy=torch.zeros(n_rows, dtype=torch.bool),
            powers=torch.ones(n_rows),
            seeds=self.seeds[group],
            particles=index - (self.sizes.cumsum(0) - self.sizes)[group],
            positions=self.lengths[group],
            any_greedy=False,
            keeps_laws=True,
        )
        log_p, log_q = (torch.tensor(table).log().float() for table in (toy.target, toy.draft))
        before = self.tokens[group, end[group] - 2]
        context = before.clone()

        def draft(k: int, rows: Tensor, tokens: Tensor) -> Tensor:
            logits = log_q[context[rows], tokens]
            context[rows] = tokens
            return logits

        def score(tokens: Tensor) -> Tensor:
            return log_p[torch.cat([before[:, None], tokens[:, :-1]], dim=1), tokens]

        block, laws = step.propose_and_score(rows, draft, score)
        members = torch.full((n_groups, int(self.sizes.max())), -1)
        members[group, rows.particles] = index
        block = block.replaced(index, step.accept_exactly(laws, members), group)
        last_rows = self.sizes.cumsum(0) - 1
        columns = end[:, None] + torch.arange(block.tokens.shape[1])
        tokens = self.tokens.scatter(1, columns, block.tokens[last_rows])
        return replace(self, tokens=tokens, lengths=self.lengths + block.lengths[last_rows])

    def completed(self, length: int, target: np.ndarray) -> Tensor:
        """The first `length` tokens, missing ones by plain decoding: so blocks of all lengths have one law."""
        law, generator, tokens = torch.tensor(target), torch.Generator().manual_seed(0), self.tokens.clone()
        for t in range(len(START), len(START) + length):
            missing = tokens[:, t] < 0
            after = law[tokens[missing, t - 2], tokens[missing, t - 1]]
            tokens[missing, t] = torch.multinomial(after, 1, generator=generator).squeeze(1)
        return tokens[:, len(START) : len(START) + length]


def masses(table: np.ndarray, length: int) -> np.ndarray:
    """The law of the first `length` tokens, [vocab] * length."""
    joint = table[START]
    for t in range(1, length):
        joint = joint[..., None] * (table[START[1]] if t == 1 else table)
    return joint


def goodness_of_fit(tokens: Tensor, law: np.ndarray) -> float:
    """The p-value of Pearson's chi-square of sequences [n, length] against a law [vocab] * length."""
    code = np.ravel_multi_index(tokens.T.numpy(), law.shape)
    counts, expected = np.bincount(code, minlength=law.size), law.flatten() * len(tokens)
    assert not counts[expected == 0].any()
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    return float(chi2.sf(statistic, common.sum() - 1))


def one_block(
    toy: Toy, n_chains: int, draft_length: int, sampling: Sampling = PLAIN, *, n_groups: int = N_GROUPS, seed: int
) -> tuple[Tensor, Tensor]:
    """The first draft_length + 1 tokens of each group, and how many of them are its first block."""
    sizes, draft_lengths = torch.full((n_groups,), n_chains), torch.full((n_groups,), draft_length)
    groups = Groups.start(sizes, draft_lengths, draft_length + 1, seed).after_a_cycle(toy, sampling)
    return groups.completed(draft_length + 1, sampling.law(toy.target)), groups.lengths


@pytest.fixture(scope="module")
def toy() -> Toy:
    """A draft that often disagrees with the target."""
    return Toy.random(vocab=4, length=4, agreement=0.2, seed=4)


@pytest.fixture(scope="module")
def far() -> Toy:
    """The draft's favourite is what the target hardly or never says, and the reverse."""
    random = Toy.random(vocab=4, length=4, agreement=0.0, seed=5)
    target, draft = random.target.copy(), random.draft.copy()
    draft[..., 0], target[..., 3] = 8.0, 8.0
    draft[1:, :, 3] = 0.0
    target[:, 1:, 0] = 0.0
    return replace(random, target=target / target.sum(-1, keepdims=True), draft=draft / draft.sum(-1, keepdims=True))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_law_of_one_token_exactly(m: int) -> None:
    """All chains from a flat q, and all uniforms on a grid that hits every case in proportion.

    The probabilities of acceptance are multiples of 1/2, and the residuals' masses of 1/24.
    """
    law = torch.tensor([8, 17, 19, 20])
    grid = torch.cartesian_prod(*[torch.arange(4)] * m, *[torch.arange(2)] * m, torch.arange(24))
    members = torch.arange(len(grid) * m).view(-1, m)
    drafted = grid[:, :m].reshape(-1, 1)
    accepted = multi_draft_acceptance(
        members,
        drafted,
        torch.ones(len(grid), dtype=torch.int64),
        lambda k: torch.zeros(len(drafted), 4),
        lambda k: law.log().expand(len(drafted), 4),
        (grid[:, m:-1, None].double() + 0.5) / 2,
        (grid[:, -1].double() + 0.5) / 24,
    )
    tokens = torch.where(accepted.lengths > 0, drafted[accepted.rows, 0], accepted.last)
    assert torch.equal(torch.bincount(tokens) * 64, law * len(grid))


@pytest.mark.parametrize("draft_length", [1, 2, 3])
@pytest.mark.parametrize("n_chains", [1, 2, 4, 8])
def test_law_of_a_block(toy: Toy, n_chains: int, draft_length: int) -> None:
    tokens, _ = one_block(toy, n_chains, draft_length, seed=0)
    assert goodness_of_fit(tokens, masses(toy.target, draft_length + 1)) > 1e-3
    almost = 0.95 * toy.target + 0.05 * toy.draft
    assert goodness_of_fit(tokens, masses(almost, draft_length + 1)) < 1e-6


@pytest.mark.parametrize("n_chains", [1, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.6), id="cold"),
        pytest.param(Sampling(temperature=1.7), id="hot"),
        pytest.param(Sampling(top_k=2), id="top_k"),
        pytest.param(Sampling(temperature=0.8, top_p=0.7), id="top_p"),
        pytest.param(Sampling(min_p=0.3), id="min_p"),
        pytest.param(Sampling(temperature=1.3, top_k=3, top_p=0.8, min_p=0.1), id="all"),
    ],
)
def test_law_of_a_block_under_sampling_parameters(toy: Toy, sampling: Sampling, n_chains: int) -> None:
    tokens, _ = one_block(toy, n_chains, 2, sampling, seed=9)
    assert goodness_of_fit(tokens, masses(sampling.law(toy.target), 3)) > 1e-3


def test_the_proposal_that_counts_is_the_mixture(toy: Toy) -> None:
    """The whole law's small share in it is seen only in many groups."""
    tokens, _ = one_block(toy, 2, 1, Sampling(top_k=2), n_groups=80_000, seed=11)
    assert goodness_of_fit(tokens, masses(Sampling(top_k=2).law(toy.target), 2)) > 1e-3


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize(("n_chains", "draft_length"), [(1, 2), (2, 1), (4, 3), (8, 2)])
def test_law_of_a_block_far_from_the_draft(far: Toy, n_chains: int, draft_length: int, sampling: Sampling) -> None:
    tokens, _ = one_block(far, n_chains, draft_length, sampling, seed=2)
    assert goodness_of_fit(tokens, masses(sampling.law(far.target), draft_length + 1)) > 1e-3


def test_law_of_a_block_whose_chains_share_nothing() -> None:
    """Of forty tokens three chains seldom draft the same. Seen by tens of tokens."""
    toy = Toy.random(vocab=40, length=3, agreement=0.3, seed=6)
    tokens, _ = one_block(toy, 3, 2, seed=3)
    law = masses(toy.target, 3).reshape(4, 10, 4, 10, 4, 10).sum((1, 3, 5))
    assert goodness_of_fit(tokens // 10, law) > 1e-3


def test_law_of_groups_of_all_kinds_in_one_batch(toy: Toy) -> None:
    kinds = torch.tensor([(1, 3), (3, 0), (2, 1), (8, 2), (1, 1), (5, 3)])
    kind = torch.arange(10_000 * len(kinds)) % len(kinds)
    sizes, draft_lengths = kinds[kind].T
    groups = Groups.start(sizes, draft_lengths, 4, seed=4).after_a_cycle(toy, PLAIN)
    for i in range(len(kinds)):
        tokens = groups.of(kind == i).completed(4, toy.target)
        assert goodness_of_fit(tokens, masses(toy.target, 4)) > 1e-3


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize(("n_chains", "draft_length"), [(1, 3), (2, 2), (4, 1), (4, 3), (8, 2)])
def test_law_of_whole_sequences(n_chains: int, draft_length: int, sampling: Sampling) -> None:
    """Block after block, each from where the last one ended."""
    toy, length, finished = Toy.random(vocab=3, length=5, agreement=0.3, seed=7), 5, []
    sizes, draft_lengths = torch.full((N_GROUPS,), n_chains), torch.full((N_GROUPS,), draft_length)
    groups = Groups.start(sizes, draft_lengths, length + draft_length, seed=5)
    while len(groups.lengths) and len(finished) < length:
        groups = groups.after_a_cycle(toy, sampling)
        done = groups.lengths >= length
        finished.append(groups.of(done).emitted[:, :length])
        groups = groups.of(~done)
    tokens = torch.cat(finished)
    assert len(tokens) == N_GROUPS
    assert goodness_of_fit(tokens, masses(sampling.law(toy.target), length)) > 1e-3
    almost = 0.9 * sampling.law(toy.target) + 0.1 * sampling.law(toy.draft)
    assert goodness_of_fit(tokens, masses(almost, length)) < 1e-6


# -- how much is accepted ------------------------------------------------------------------------------------


def expected_length(toy: Toy, n_chains: int, draft_length: int) -> float:
    """The mean number of accepted drafted tokens, from what can happen to one chain after another."""

    @cache
    def follow(n: int, k: int, a: int, b: int) -> float:
        if k == 0:
            return 0.0
        residual, q, mean, rejected = toy.target[a, b], toy.draft[a, b], 0.0, 1.0
        for left in reversed(range(n)):
            accepted = np.minimum(residual, q)
            for token in range(toy.vocab):
                alike = binom.pmf(range(left + 1), left, q[token])  # later chains with the same token
                further = sum(alike[i] * follow(1 + i, k - 1, b, token) for i in range(left + 1))
                mean += rejected * accepted[token] * (1 + further)
            rejected *= 1 - accepted.sum()
            residual = np.maximum(residual - q, 0)
            residual /= residual.sum()
        return mean

    return follow(n_chains, draft_length, *START)


@pytest.mark.parametrize("draft_length", [1, 3])
def test_more_chains_accept_more(toy: Toy, draft_length: int) -> None:
    means = []
    for n_chains in (1, 2, 4, 8):
        _, lengths = one_block(toy, n_chains, draft_length, seed=6)
        accepted = (lengths - 1).double()
        error = float(accepted.std()) / N_GROUPS**0.5
        assert abs(float(accepted.mean()) - expected_length(toy, n_chains, draft_length)) < STANDARD_ERRORS * error
        assert error < 0.015
        means.append(float(accepted.mean()))
    assert all(more > fewer + 0.03 for fewer, more in itertools.pairwise(means))


def test_one_chain_accepts_the_overlap_of_the_laws(toy: Toy) -> None:
    """P(t tokens are accepted) = the sum of prod min(p, q) over their values: ordinary speculative decoding."""
    _, lengths = one_block(toy, 1, 3, seed=7)
    for t in (1, 2, 3):
        expected = masses(np.minimum(toy.target, toy.draft), t).sum()
        share = float((lengths > t).double().mean())
        assert abs(share - expected) < STANDARD_ERRORS * (expected * (1 - expected) / N_GROUPS) ** 0.5


def test_a_perfect_draft_is_accepted_whole() -> None:
    toy = Toy.random(vocab=4, length=4, agreement=1.0, seed=8)
    tokens, lengths = one_block(toy, 2, 3, seed=8)
    assert bool((lengths == 4).all())
    assert goodness_of_fit(tokens, masses(toy.target, 4)) > 1e-3
