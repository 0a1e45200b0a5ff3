"""One cycle of SMC decoding: draft, score, weigh, resample.

The whole algorithm, for groups of N particles each (rows of `Rows` are the particles of all groups)::

    tokens, log_c = first_tokens(prefill_logits, rows, N)            # x_0
    weights = Weights(log_c[:, None].expand(-1, N))
    while not every particle is finished:
        block = propose_and_score(rows, draft, score)                # draft, score
        valid = tokens of each row through its first finishing one
        weights = weigh(weights, block.log_increments, valid)        # weigh
        outcome = resample(weights, tau, scheme, uniforms)           # resample
        particle i becomes a copy of particle outcome.ancestors[i]
        weights, log_z = outcome.weights, log_z + outcome.log_z_increment
    answer, log_z_increment = settle(weights, uniform)               # one particle, by its weight

The two models come in as callables; nothing here knows how they run. No function waits for the device except
where a weight is checked for NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from smc_sglang.smc.densities import Density, power_density
from smc_sglang.smc.rejection import greedy_acceptance
from smc_sglang.smc.resampling import Scheme
from smc_sglang.smc.rng import Stream, invert_cdf, sample_categorical, uniforms
from smc_sglang.smc.weights import Weights

PADDING = -1  # in Block.tokens, after a row's last committed token

# draft(k, rows int64 [r], tokens int64 [r]) -> logits [r, vocab]: one pass of the draft model over the given
# rows, with the input token of each at block offset k (offset 0 is the pending token).
Draft = Callable[[int, Tensor, Tensor], Tensor]
# score(tokens int64 [n_rows, width]) -> logits [n_rows, width, vocab]: one pass of the target over the
# pending token and the drafted ones. Rows with fewer drafted tokens are padded with token 0 at the end.
Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """The live particles of all groups, and ordinary rows, as one batch. Every tensor is [n_rows]."""

    pending: Tensor  # int64, the last committed token: neither model has run on it
    draft_lengths: Tensor  # int64, K_i; 0 = plain autoregressive decoding, no draft pass
    draft_lengths_list: tuple[int, ...]  # the same, known to the host
    temperatures: Tensor  # float32
    greedy: Tensor  # bool, temperature 0: exact acceptance, no weights
    powers: Tensor  # float32, alpha
    seeds: Tensor  # int64
    particles: Tensor  # int64, index in the group
    positions: Tensor  # int64, of the first token that this block produces: the counter of its uniforms
    any_greedy: bool = True  # False where the host knows that no row is greedy: saves a pass over all logits

    @property
    def density(self) -> Density:
        """How logits become p~ and q~."""
        return Density(self.temperatures)

    @property
    def longest_draft(self) -> int:
        return max(self.draft_lengths_list, default=0)

    def uniforms(self, offsets: Tensor, stream: Stream) -> Tensor:
        """Each row's own uniforms at block offsets [n_rows or 1, m]; float64 [n_rows, m]."""
        positions = self.positions.unsqueeze(1) + offsets
        return uniforms(self.seeds.unsqueeze(1), self.particles.unsqueeze(1), positions, stream)

    def draft_passes(self) -> Iterator[tuple[int, Tensor]]:
        """(k, the rows that take part) of each draft pass, k = 0..K.

        A row that drafts K_i tokens takes part in K_i + 1 passes: the last only writes the KV of its last
        token.
        """
        if self.longest_draft == 0:
            return
        index = torch.arange(len(self.draft_lengths_list), device=self.pending.device)
        for k in range(self.longest_draft + 1):
            taking_part = [row for row, length in enumerate(self.draft_lengths_list) if length >= max(k, 1)]
            if len(taking_part) < len(index):
                index = torch.tensor(taking_part, device=self.pending.device)
            yield k, index


@dataclass(frozen=True, eq=False)
class Block:
    """What one cycle adds to each row."""

    tokens: Tensor  # int64 [n_rows, width], in order; PADDING after `lengths`
    lengths: Tensor  # int64 [n_rows], committed tokens
    log_increments: Tensor  # float64 [n_rows, width], each token's part of log w; 0 for padding, greedy rows


@dataclass(frozen=True, eq=False)
class Resampled:
    """The outcome of :func:`resample`."""

    ancestors: Tensor  # int64 [..., n_particles]: i becomes a copy of ancestors[i]; identity if not resampled
    resampled: Tensor  # bool [...]
    weights: Weights  # [..., n_particles], log w = 0 where resampled
    log_z_increment: Tensor  # float64 [...], 0 where not resampled
    ess: Tensor  # float64 [...], before resampling


def first_tokens(logits: Tensor, rows: Rows, n_particles: int) -> tuple[Tensor, Tensor]:
    """x_0 of every particle, a bonus token from the target's prefill logits.

    At power 1 the group shares one draw, which is exact. At other powers a shared draw would keep the group
    from its target for good, so each particle has its own.

    Args:
        logits: [n_rows, vocab], one row per group.
        rows: the groups; `pending` and `draft_lengths` are not used.
    Returns:
        Tokens int64 [n_rows, n_particles], and the log weight log c that all particles of a group get,
        float64 [n_rows].
    """
    log_probs, log_c = power_density(rows.density.log_probs(logits), rows.powers)
    index = torch.arange(n_particles, device=logits.device)
    particles = torch.where((rows.powers == 1).unsqueeze(1), 0, index) + rows.particles.unsqueeze(1)
    draws = uniforms(rows.seeds.unsqueeze(1), particles, rows.positions.unsqueeze(1), Stream.BONUS)
    greedy = rows.greedy.unsqueeze(1)
    tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), invert_cdf(log_probs.exp(), draws))
    return tokens, log_c.to(torch.float64).masked_fill(rows.greedy, 0.0)


def propose_and_score(rows: Rows, draft: Draft, score: Score) -> Block:
    """Steps 1, 2 and 4 of the cycle: K_i draft tokens and a bonus per row, with their weight increments.

    Greedy rows commit the drafted tokens that are the target's argmax and then its own choice.
    """
    inputs, log_q = _propose(rows, draft)
    logits = score(inputs)  # [n_rows, width, vocab]
    drafted = inputs[:, 1:]
    log_p = rows.density.log_probs_of(logits[:, :-1], drafted).to(torch.float64)
    last, log_c = _bonus(rows, logits)

    n_drafted = rows.draft_lengths
    if rows.any_greedy:
        n_accepted, choice = greedy_acceptance(drafted, logits.argmax(-1), rows.draft_lengths)
        n_drafted = torch.where(rows.greedy, n_accepted, n_drafted)
        last = torch.where(rows.greedy, choice, last)
    column = torch.arange(inputs.shape[1], device=inputs.device)
    is_drafted, is_last = column < n_drafted.unsqueeze(1), column == n_drafted.unsqueeze(1)

    gain = rows.powers.unsqueeze(1) * log_p - log_q
    increments = torch.where(is_drafted, pad(gain, (0, 1)), torch.where(is_last, log_c.unsqueeze(1), 0.0))
    tokens = torch.where(is_drafted, pad(drafted, (0, 1)), torch.where(is_last, last.unsqueeze(1), PADDING))
    return Block(tokens, n_drafted + 1, increments.masked_fill(rows.greedy.unsqueeze(1), 0.0))


def weigh(weights: Weights, increments: Tensor, valid: Tensor) -> Weights:
    """Step 3: log w_i += what the block's tokens up to the finishing one contribute.

    Args:
        increments: float64 [..., n_particles, width].
        valid: int64 [..., n_particles], tokens of each particle through its first finishing one.
    Raises:
        ValueError: an increment that counts is NaN or +inf.
    """
    counts = torch.arange(increments.shape[-1], device=increments.device) < valid.unsqueeze(-1)
    return weights.add(torch.where(counts, increments, 0.0).sum(-1))


def resample(weights: Weights, thresholds: Tensor | float, scheme: Scheme, uniforms: Tensor) -> Resampled:
    """Step 5: resample the groups with ESS < tau * N.

    A group without any weight left is not resampled: there is nothing to choose from (`Weights.degenerate`).

    Args:
        thresholds: tau of each group, [...].
        uniforms: float64 [..., n_particles].
    """
    resampled = (weights.ess < thresholds * weights.n) & ~weights.degenerate
    identity = torch.arange(weights.n, device=resampled.device)
    ancestors = torch.where(resampled.unsqueeze(-1), scheme(weights.normalized, uniforms), identity)
    log_z_increment = weights.log_mean.masked_fill(~resampled, 0.0)
    return Resampled(ancestors, resampled, weights.reset(resampled), log_z_increment, weights.ess)


def shrink(weights: Weights, scheme: Scheme, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Resample whatever the ESS, to as many particles as there are uniforms: log Z^ stays unbiased.

    Args:
        uniforms: float64 [..., m].
    Returns:
        Ancestors int64 [..., m], whose log weights are then 0, and the increment of log Z^, float64 [...].
    """
    return scheme(weights.normalized, uniforms), weights.log_mean


def settle(weights: Weights, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The answer: one particle, drawn with probability W_i (a posterior sample, not the argmax).

    Args:
        uniforms: float64 [...].
    Returns:
        Its index, int64 [...], and the increment of log Z^, float64 [...].
    """
    index = invert_cdf(weights.normalized, uniforms.unsqueeze(-1)).squeeze(-1)
    return index, weights.log_mean


def _propose(rows: Rows, draft: Draft) -> tuple[Tensor, Tensor]:
    """Step 1: draft K_i tokens per row.

    Returns:
        The target's input, int64 [n_rows, width]: pending, drafted, zeros; and log q~ of the drafted, float64
        [n_rows, width - 1].
    """
    longest = rows.longest_draft
    inputs = pad(rows.pending.unsqueeze(1), (0, longest))
    log_q = torch.zeros(inputs[:, 1:].shape, dtype=torch.float64, device=inputs.device)
    draws = rows.uniforms(torch.arange(longest, device=inputs.device), Stream.DRAFT)
    density = rows.density
    for k, index in rows.draft_passes():
        whole = len(index) == len(rows.draft_lengths_list)
        logits = draft(k, index, inputs[index, k])
        if k == longest:
            break
        log_probs = (density if whole else density.rows(index)).log_probs(logits)
        tokens = sample_categorical(log_probs, draws[index, k])
        if rows.any_greedy:
            tokens = torch.where(rows.greedy[index], logits.argmax(-1), tokens)
        inputs[index, k + 1] = tokens
        log_q[index, k] = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1).to(torch.float64)
    # Rows in their last pass have drawn a token too many.
    beyond = torch.arange(longest + 1, device=inputs.device) > rows.draft_lengths.unsqueeze(1)
    return inputs.masked_fill(beyond, 0), log_q


def _bonus(rows: Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Step 4: each row's token after its drafted ones, int64 [n_rows], and log c, float64 [n_rows]."""
    after_draft = logits[torch.arange(len(logits), device=logits.device), rows.draft_lengths]
    log_probs, log_c = power_density(rows.density.log_probs(after_draft), rows.powers)
    draws = rows.uniforms(rows.draft_lengths.unsqueeze(1), Stream.BONUS).squeeze(1)
    return sample_categorical(log_probs, draws), log_c.to(torch.float64)
