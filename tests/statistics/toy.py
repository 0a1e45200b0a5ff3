"""Toy model pairs whose sequence law can be enumerated, run through the engine's own algorithm.

A model is a table of next-token probabilities after the last two tokens. Token 0 ends a sequence, and so does
its `length`-th token. Many independent groups run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc_sglang.smc import step
from smc_sglang.smc.densities import Density
from smc_sglang.smc.resampling import SCHEMES, Scheme, arrange
from smc_sglang.smc.rng import Stream, uniforms
from smc_sglang.smc.weights import Weights

EOS = 0
START = (1, 1)

# masses(target, draft, offset in the sequence) -> next-token masses
NextToken = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Toy:
    target: np.ndarray  # [vocab, vocab, vocab]: p(. | a, b)
    draft: np.ndarray  # the same for q
    length: int

    @classmethod
    def random(cls, vocab: int, length: int, agreement: float, seed: int = 0) -> Toy:
        """A random target, and a draft that is the target with weight `agreement`, else unrelated."""
        rng = np.random.default_rng(seed)
        target, other = rng.dirichlet(np.ones(vocab), size=(2, vocab, vocab))
        return cls(target, agreement * target + (1 - agreement) * other, length)

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]

    def law(self, next_token: NextToken = lambda p, q, t: p) -> Tensor:
        """The mass of every complete sequence, at its :func:`code`; float64 [(vocab + 1) ** length]."""
        masses = torch.zeros((self.vocab + 1) ** self.length, dtype=torch.float64)

        def walk(tokens: list[int], mass: float) -> None:
            if tokens and (tokens[-1] == EOS or len(tokens) == self.length):
                masses[code(torch.tensor(tokens), self.vocab)] = mass
                return
            a, b = (*START, *tokens)[-2:]
            for token, p in enumerate(next_token(self.target[a, b], self.draft[a, b], len(tokens))):
                walk([*tokens, token], mass * float(p))

        walk([], 1.0)
        return masses


def code(tokens: Tensor, vocab: int) -> Tensor:
    """A number for each sequence [..., length]; -1 after its end."""
    digits = (vocab + 1) ** torch.arange(tokens.shape[-1])
    return ((tokens + 1) * digits).sum(-1)


@dataclass(frozen=True)
class Runs:
    """The outcome of many independent groups."""

    answers: Tensor  # int64 [n_groups, n_draws], codes; the draws of one group share its particles
    log_z: Tensor  # float64 [n_groups]
    ess: Tensor  # float64 [n_groups, n_cycles]
    n_resampled: int

    def law(self, n_codes: int) -> tuple[Tensor, Tensor]:
        """How often each sequence came out, and the standard error of that, float64 [n_codes]."""
        n_groups, n_draws = self.answers.shape
        shares = torch.zeros(n_groups, n_codes, dtype=torch.float64)
        one = torch.full(self.answers.shape, 1 / n_draws, dtype=torch.float64)
        shares.scatter_add_(1, self.answers, one)
        return shares.mean(0), shares.std(0) / n_groups**0.5


class _Models:
    """The toy pair as the two callables of one cycle; `context` is the token before the pending one."""

    def __init__(self, toy: Toy, context: Tensor) -> None:
        self._p, self._q = (torch.tensor(table).log().float() for table in (toy.target, toy.draft))
        self._context, self._before = context, context.clone()

    def draft(self, k: int, rows: Tensor, tokens: Tensor) -> Tensor:
        logits = self._q[self._before[rows], tokens]
        self._before[rows] = tokens
        return logits

    def score(self, tokens: Tensor) -> Tensor:
        return self._p[torch.cat([self._context[:, None], tokens[:, :-1]], dim=1), tokens]


@dataclass(frozen=True)
class Population:
    """All groups between two cycles."""

    tokens: Tensor  # int64 [n_groups, n_particles, 2 + committed], START first
    ended_at: Tensor  # int64 [n_groups, n_particles], length of the finished, 0 of the live
    weights: Weights

    def of(self, ancestors: Tensor, weights: Weights) -> Population:
        tokens = self.tokens.take_along_dim(ancestors.unsqueeze(-1), dim=1)
        return Population(tokens, self.ended_at.gather(1, ancestors), weights)

    def extended(self, tokens: Tensor, length: int) -> tuple[Population, Tensor]:
        """After a block [n_groups, n_particles, width], and how many of its tokens count."""
        committed, width = self.tokens.shape[-1] - len(START), tokens.shape[-1]
        stops = tokens == EOS
        through_stop = torch.where(stops.any(-1), stops.long().argmax(-1) + 1, width)
        valid = through_stop.clamp(max=length - committed).masked_fill(self.ended_at > 0, 0)
        ends = (self.ended_at == 0) & (stops.any(-1) | (width >= length - committed))
        ended_at = torch.where(ends, committed + valid, self.ended_at)
        return Population(torch.cat([self.tokens, tokens], dim=-1), ended_at, self.weights), valid


def run(
    toy: Toy,
    n_groups: int,
    n_particles: int,
    draft_length: int,
    *,
    threshold: float = 0.5,
    scheme: str = "systematic",
    power: float = 1.0,
    shrink_to: dict[int, int] | None = None,
    n_draws: int = 1,
    seed: int = 0,
) -> Runs:
    """Run `n_groups` groups to their answers.

    Args:
        shrink_to: cycle -> the number of particles to go on with after it.
        n_draws: answers drawn from each finished group (the engine draws one; more of them show the same law
        with
            less noise).
    """
    seeds = seed * 10**9 + torch.arange(n_groups)
    start = torch.tensor(START).expand(n_groups, n_particles, -1)
    first = _Models(toy, torch.full((n_groups,), START[0])).score(torch.full((n_groups, 1), START[1]))[:, 0]
    tokens, log_c = step.first_tokens(first, _rows(start[:, :1], seeds, 0, power), n_particles)
    unborn = torch.zeros(n_groups, n_particles, dtype=torch.int64)
    weights = Weights(log_c[:, None].expand(-1, n_particles))
    population, _ = Population(start, unborn, weights).extended(tokens.unsqueeze(-1), toy.length)

    log_z, ess, n_resampled = torch.zeros(n_groups, dtype=torch.float64), [], 0
    for cycle in range(-(-(toy.length - 1) // (draft_length + 1))):
        now = population.tokens.shape[-1] - len(START)
        shape = population.ended_at.shape
        models = _Models(toy, population.tokens[..., -2].flatten())
        block, _ = step.propose_and_score(
            _rows(population.tokens, seeds, draft_length, power), models.draft, models.score
        )
        population, valid = population.extended(block.tokens.unflatten(0, shape), toy.length)
        weights = step.weigh(population.weights, block.log_increments.unflatten(0, shape), valid)

        threshold_now = torch.full((n_groups,), threshold).masked_fill((population.ended_at > 0).all(1), 0.0)
        draws = _uniforms(seeds, shape[1], now, Stream.RESAMPLE)
        outcome = step.resample(weights, threshold_now, SCHEMES[scheme], draws)
        population = population.of(arrange(outcome.ancestors), outcome.weights)
        log_z = log_z + outcome.log_z_increment
        ess.append(outcome.ess)
        n_resampled += int(outcome.resampled.sum())
        if shrink_to and cycle in shrink_to:
            population, increment = _shrunk(population, SCHEMES[scheme], seeds, shrink_to[cycle], now)
            log_z = log_z + increment

    assert bool((population.ended_at > 0).all())
    answers = []
    for draw in range(n_draws):
        uniform = _uniforms(seeds, 1, 1000 + draw, Stream.SETTLE).squeeze(1)
        index, increment = step.settle(population.weights, uniform)
        chosen = population.tokens[torch.arange(n_groups), index][:, len(START) : len(START) + toy.length]
        ended_at = population.ended_at[torch.arange(n_groups), index]
        chosen = chosen.masked_fill(torch.arange(chosen.shape[1]) >= ended_at[:, None], -1)
        answers.append(code(chosen, toy.vocab))
    return Runs(torch.stack(answers, dim=1), log_z + increment, torch.stack(ess, dim=1), n_resampled)


def _shrunk(population: Population, scheme: Scheme, seeds: Tensor, n: int, position: int) -> tuple[Population, Tensor]:
    ancestors, increment = step.shrink(population.weights, scheme, _uniforms(seeds, n, position, Stream.SHRINK))
    return population.of(ancestors, Weights.uniform(len(seeds), n)), increment


def _uniforms(seeds: Tensor, n: int, position: int, stream: Stream) -> Tensor:
    return uniforms(seeds[:, None], torch.arange(n), torch.tensor(position), stream)


def _rows(tokens: Tensor, seeds: Tensor, draft_length: int, power: float) -> step.Rows:
    n_groups, n, width = tokens.shape
    n_rows = n_groups * n
    return step.Rows(
        pending=tokens[..., -1].flatten(),
        draft_lengths=torch.full((n_rows,), draft_length),
        draft_lengths_list=(draft_length,) * n_rows,
        density=Density(torch.ones(n_rows)),
        greedy=torch.zeros(n_rows, dtype=torch.bool),
        powers=torch.full((n_rows,), power),
        seeds=seeds.repeat_interleave(n),
        particles=torch.arange(n).repeat(n_groups),
        positions=torch.full((n_rows,), width - len(START)),
        any_greedy=False,
    )
