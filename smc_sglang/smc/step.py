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
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from smc_sglang.smc.densities import Density
from smc_sglang.smc.rejection import Accepted, greedy_acceptance, multi_draft_acceptance
from smc_sglang.smc.resampling import Scheme
from smc_sglang.smc.rng import Stream, invert_cdf, sample_categorical, uniforms
from smc_sglang.smc.weights import Weights

PADDING = -1  # in Block.tokens, after a row's last committed token

# draft(k, rows int64 [r], tokens int64 [r]) -> logits [r, vocab]: one pass of the draft model over the given
# rows, with the input token of each at block offset k (offset 0 is the pending token). The pass after the last drafted
# token is for its KV alone: nobody looks at its logits.
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
    density: Density  # how each row's logits become p~ and q~
    greedy: Tensor  # bool, temperature 0: exact acceptance, no weights
    powers: Tensor  # float32, alpha
    seeds: Tensor  # int64
    particles: Tensor  # int64, index in the group
    positions: Tensor  # int64, of the first token that this block produces: the counter of its uniforms
    any_greedy: bool = True  # False where the host knows that no row is greedy: saves a pass over all logits
    keeps_laws: bool = False  # True where exact acceptance may be asked for

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

    def replaced(self, rows: Tensor, accepted: Accepted, owner: Tensor) -> Block:
        """The block in which `rows` (int64 [r]) commit what group owner[i] (int64 [r]) has accepted."""
        drafted = self.tokens[accepted.rows]
        column = torch.arange(drafted.shape[1], device=drafted.device)
        length = accepted.lengths.unsqueeze(1)
        after = torch.where(column == length, accepted.last.unsqueeze(1), PADDING)
        tokens = torch.where(column < length, drafted, after)
        return Block(
            self.tokens.index_copy(0, rows, tokens[owner]),
            self.lengths.index_copy(0, rows, accepted.lengths[owner] + 1),
            self.log_increments.index_fill(0, rows, 0.0),
        )


@dataclass(eq=False)
class Laws:
    """The laws of one block: what was drafted from, and what the target says."""

    rows: Rows
    drafted: Tensor  # int64 [n_rows, width - 1]
    proposals: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # by offset: rows and log q~ of these rows
    logits: Tensor = field(init=False)  # the target's, [n_rows, width, vocab]

    def proposal(self, k: int) -> Tensor:
        """log q~ at offset k, float32 [n_rows, vocab]; of no meaning for rows that draft nothing there.

        Needs `Rows.keeps_laws`.
        """
        index, log_probs = self.proposals[k]
        return log_probs.new_zeros(self.logits.shape[0], log_probs.shape[-1]).index_copy_(0, index, log_probs)

    def target(self, k: int) -> Tensor:
        """log p~ after k drafted tokens, float32 [n_rows, vocab]."""
        density = self.rows.density
        return density.target(density.shaped(self.logits[:, k], self.drafted[:, :k], k))


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

    At power 1 the group shares one draw, which is exact. At other powers, and where the target is not masked by the
    grammar, a shared draw would keep the group from its target for good, so each particle has its own.

    Args:
        logits: [n_rows, vocab], one row per group.
        rows: the groups; `pending` and `draft_lengths` are not used.
    Returns:
        Tokens int64 [n_rows, n_particles], and the log weight log c that all particles of a group get,
        float64 [n_rows].
    """
    nothing = torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    judgement = rows.density.judge(logits, nothing, 0)
    log_probs, log_c = judgement.bonus(rows.powers, rows.density.is_global)
    index = torch.arange(n_particles, device=logits.device)
    shared = rows.powers == 1
    if rows.density.is_global is not None:
        shared = shared & ~rows.density.is_global
    particles = torch.where(shared.unsqueeze(1), 0, index) + rows.particles.unsqueeze(1)
    draws = uniforms(rows.seeds.unsqueeze(1), particles, rows.positions.unsqueeze(1), Stream.BONUS)
    greedy = rows.greedy.unsqueeze(1)
    tokens = torch.where(greedy, judgement.shaped.argmax(-1, keepdim=True), invert_cdf(log_probs.exp(), draws))
    return tokens, log_c.to(torch.float64).masked_fill(rows.greedy, 0.0)


def propose_and_score(rows: Rows, draft: Draft, score: Score) -> tuple[Block, Laws]:
    """Steps 1, 2 and 4 of the cycle: K_i draft tokens and a bonus per row, with their weight increments.

    Greedy rows commit the drafted tokens that are the target's argmax and then its own choice.
    """
    inputs, laws, log_q = _propose(rows, draft)
    drafted = inputs[:, 1:]
    laws.logits = score(inputs)  # [n_rows, width, vocab]
    log_p, last, log_c, choices = _judge(rows, laws)

    n_drafted = rows.draft_lengths
    if choices is not None:
        n_accepted, choice = greedy_acceptance(drafted, choices, rows.draft_lengths)
        n_drafted = torch.where(rows.greedy, n_accepted, n_drafted)
        last = torch.where(rows.greedy, choice, last)
    column = torch.arange(inputs.shape[1], device=inputs.device)
    is_drafted, is_last = column < n_drafted.unsqueeze(1), column == n_drafted.unsqueeze(1)
    gain = rows.powers.unsqueeze(1) * log_p - log_q
    increments = torch.where(is_drafted, pad(gain, (0, 1)), torch.where(is_last, log_c.unsqueeze(1), 0.0))
    tokens = torch.where(is_drafted, pad(drafted, (0, 1)), torch.where(is_last, last.unsqueeze(1), PADDING))
    return Block(tokens, n_drafted + 1, increments.masked_fill(rows.greedy.unsqueeze(1), 0.0)), laws


def accept_exactly(laws: Laws, members: Tensor) -> Accepted:
    """Mode `exact`: what groups of identical particles commit, by rejection sampling over all of their chains.

    Args:
        members: int64 [n_groups, m], each group's rows, -1 at the end where there are fewer.
    """
    rows, drafted = laws.rows, laws.drafted
    offsets = torch.arange(drafted.shape[1], device=drafted.device)
    first = members[:, 0]
    return multi_draft_acceptance(
        members,
        drafted,
        rows.draft_lengths[first],
        laws.proposal,
        laws.target,
        rows.uniforms(offsets, Stream.ACCEPT)[members.clamp(min=0)],
        rows.uniforms(offsets.new_zeros(1), Stream.BONUS)[first, 0],
    )


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


def narrow(weights: Weights, kept: Tensor, scheme: Scheme, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Resample within `kept`, a set of particles that was drawn with probability sum_{i in kept} W_i.

    The draw's probability and the kept share of the weight cancel, so log Z^ takes in the mean of all weights and
    stays unbiased.

    Args:
        kept: bool [..., n_particles].
        uniforms: float64 [..., n_particles].
    Returns:
        Ancestors int64 [..., n_particles], whose log weights are then 0, and the increment of log Z^, float64 [...].
    """
    return scheme(weights.normalized.masked_fill(~kept, 0.0), uniforms), weights.log_mean


def settle(weights: Weights, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The answer: one particle, drawn with probability W_i (a posterior sample, not the argmax).

    Args:
        uniforms: float64 [...].
    Returns:
        Its index, int64 [...], and the increment of log Z^, float64 [...].
    """
    index = invert_cdf(weights.normalized, uniforms.unsqueeze(-1)).squeeze(-1)
    return index, weights.log_mean


def _propose(rows: Rows, draft: Draft) -> tuple[Tensor, Laws, Tensor]:
    """Step 1: draft K_i tokens per row.

    Returns:
        The target's input, int64 [n_rows, width]: pending, drafted, zeros; the laws that were drafted from; and
        log q~ of the drafted, float64 [n_rows, width - 1].
    """
    longest = rows.longest_draft
    inputs = pad(rows.pending.unsqueeze(1), (0, longest))
    drafted = inputs[:, 1:]
    log_q = torch.zeros(drafted.shape, dtype=torch.float64, device=inputs.device)
    draws = rows.uniforms(torch.arange(longest, device=inputs.device), Stream.DRAFT)
    laws = Laws(rows, drafted)
    for k, index in rows.draft_passes():
        whole = len(index) == len(rows.draft_lengths_list)
        density = rows.density if whole else rows.density.rows(index)
        logits = draft(k, index, inputs[index, k])
        if k == longest:
            break
        logits = density.shaped(logits, drafted[index, :k], k)
        log_probs = density.proposal(logits)
        tokens = sample_categorical(log_probs, draws[index, k])
        if rows.any_greedy:
            tokens = torch.where(rows.greedy[index], logits.argmax(-1), tokens)
        inputs[index, k + 1] = tokens
        log_q[index, k] = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1).to(torch.float64)
        if rows.keeps_laws:
            laws.proposals.append((index, log_probs))
    # Rows in their last pass have drawn a token too many.
    beyond = torch.arange(longest + 1, device=inputs.device) > rows.draft_lengths.unsqueeze(1)
    return inputs.masked_fill_(beyond, 0), laws, log_q


def _judge(rows: Rows, laws: Laws) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Steps 2 and 4, position by position (all laws of a block at once would be its largest tensor).

    Returns:
        log p~ of the drafted tokens, float64 [n_rows, width - 1]; each row's token after its drafted ones, int64
        [n_rows], with its log c, float64 [n_rows]; and where a row is greedy the target's choices, int64
        [n_rows, width].
    """
    drafted, logits = laws.drafted, laws.logits
    n_rows, width = logits.shape[:2]
    log_p = torch.zeros(drafted.shape, dtype=torch.float64, device=logits.device)
    last = torch.zeros(n_rows, dtype=torch.int64, device=logits.device)
    log_c = torch.zeros(n_rows, dtype=torch.float64, device=logits.device)
    choices = []
    draws = rows.uniforms(rows.draft_lengths.unsqueeze(1), Stream.BONUS).squeeze(1)
    for k in range(width):
        judgement = rows.density.judge(logits[:, k], drafted[:, :k], k)
        if rows.any_greedy:
            choices.append(judgement.shaped.argmax(-1))
        if k < width - 1:
            log_p[:, k] = judgement.whole.gather(1, drafted[:, k : k + 1]).squeeze(1).to(torch.float64)
        ending = [row for row, length in enumerate(rows.draft_lengths_list) if length == k]
        if ending:
            index = torch.tensor(ending, device=logits.device)
            law, log_mass = judgement.bonus(rows.powers, rows.density.is_global, index)
            last[index], log_c[index] = sample_categorical(law, draws[index]), log_mass.to(torch.float64)
    return log_p, last, log_c, torch.stack(choices, dim=1) if choices else None
