"""The second part of a cycle's launch half: from scored blocks to weights and ancestors, for whole groups.

Works on tensors, for all groups of a batch that share N and a resampling scheme at once. It runs inside the worker
when the device can tell which tokens finish a particle, and in the commit half when only the host can (stop
strings): the same function either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smc_sglang.engine.group import ParticleGroup
from smc_sglang.smc import step
from smc_sglang.smc.resampling import SCHEMES
from smc_sglang.smc.rng import Stream, invert_cdf, uniforms
from smc_sglang.smc.weights import Weights

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class Verdict:
    """What one cycle did to one group."""

    weights: Weights  # [n_particles], after resampling if there was one
    ancestors: list[int] | None  # particle i becomes a copy of ancestors[i]; None: no resampling
    log_z_increment: float
    ess: float  # before resampling
    broken: bool = False  # a NaN: the group cannot go on
    degenerate: bool = False  # no particle of finite weight: the block has to be redone
    exact: bool = False  # the block came from exact acceptance: all particles are copies of one, weights do not count


@dataclass(frozen=True)
class GroupRows:
    """Where a group's particles are in the batch, and from which positions its randomness is drawn."""

    group: ParticleGroup
    rows: list[int]  # [n_particles], batch row of each particle; -1 when it has finished
    position: int  # output tokens before this block: the counter of the resampling uniforms


def decide(
    members: Sequence[GroupRows], log_increments: torch.Tensor, valid: torch.Tensor, finished: torch.Tensor
) -> dict[ParticleGroup, Verdict]:
    """Weigh and resample every group of a batch.

    Args:
        members: the groups and their rows.
        log_increments: float64 [n_rows, width], per committed token.
        valid: int64 [n_rows], tokens of each row up to and with the finishing one.
        finished: bool [n_rows], whether the row's particle finished in this block.
    """
    # One more row for the particles that are in no row: nothing added, finished.
    log_increments = torch.cat([log_increments, log_increments.new_zeros(1, log_increments.shape[1])])
    valid = torch.cat([valid, valid.new_zeros(1)])
    finished = torch.cat([finished, finished.new_ones(1)])

    alike: dict[tuple[int, str], list[GroupRows]] = defaultdict(list)
    for member in members:
        alike[len(member.rows), member.group.params.resampling].append(member)

    verdicts: dict[ParticleGroup, Verdict] = {}
    for (_, scheme), bucket in alike.items():
        rows = torch.tensor([member.rows for member in bucket], device=valid.device)
        verdicts |= _decide_alike(bucket, scheme, log_increments[rows], valid[rows], finished[rows])
    return verdicts


def _decide_alike(
    bucket: list[GroupRows],
    scheme: str,
    log_increments: torch.Tensor,  # [n_groups, n_particles, width]
    valid: torch.Tensor,  # [n_groups, n_particles]
    finished: torch.Tensor,  # [n_groups, n_particles]
) -> dict[ParticleGroup, Verdict]:
    groups = [member.group for member in bucket]
    device = valid.device
    nan = log_increments.isnan().any(dim=(1, 2))
    before = Weights(torch.stack([group.weights.log_weights for group in groups]))  # type: ignore[union-attr]
    weights = step.weigh(before, log_increments.masked_fill(nan[:, None, None], 0.0), valid)

    # A group that is done is settled from its weights as they are: resampling first would only add noise.
    thresholds = torch.tensor(
        [group.params.resample_threshold for group in groups], dtype=torch.float64, device=device
    ).masked_fill(finished.all(dim=1), 0.0)
    resampled = step.resample(weights, thresholds, SCHEMES[scheme], _uniforms(bucket, device))

    broken, degenerate = nan.tolist(), weights.degenerate.tolist()
    did, ancestors = resampled.resampled.tolist(), resampled.ancestors.tolist()
    log_z, ess = resampled.log_z_increment.tolist(), resampled.ess.tolist()
    return {
        group: Verdict(
            weights=resampled.weights[i],
            ancestors=ancestors[i] if did[i] else None,
            log_z_increment=log_z[i],
            ess=ess[i],
            broken=broken[i],
            degenerate=degenerate[i],
        )
        for i, group in enumerate(groups)
    }


def accept_exactly(
    members: Sequence[GroupRows], chains: Sequence[list[int]], block: step.Block, laws: step.Laws
) -> tuple[step.Block, dict[ParticleGroup, Verdict]]:
    """Let groups commit what exact acceptance over some of their rows gives; all particles become the winner's copies.

    Args:
        chains: of each group, the rows that had the same tokens before the block.
    Returns:
        The block in which all live rows of these groups hold the accepted tokens.
    """
    longest = max(len(rows) for rows in chains)
    device = block.tokens.device
    padded = torch.tensor([rows + [-1] * (longest - len(rows)) for rows in chains], device=device)
    accepted = step.accept_exactly(laws, padded)
    live = [[row for row in member.rows if row >= 0] for member in members]
    owner = torch.tensor([i for i, rows in enumerate(live) for _ in rows], device=device)
    index = torch.tensor([row for rows in live for row in rows], device=device)
    # A law that is not a number is one of the logits': no token that follows from it may be committed.
    nan = block.log_increments[index].isnan().any(1)
    broken = torch.zeros(len(members), dtype=torch.int64, device=device).index_add_(0, owner, nan.long()).tolist()
    verdicts = {}
    for i, (member, winner) in enumerate(zip(members, accepted.rows.tolist(), strict=True)):
        n = len(member.rows)
        verdicts[member.group] = Verdict(
            weights=Weights.uniform(n, device=device),
            ancestors=[member.rows.index(winner)] * n,
            log_z_increment=0.0,
            ess=float(n),
            broken=broken[i] > 0,
            exact=True,
        )
    return block.replaced(index, accepted, owner), verdicts


def identical_chains(member: GroupRows, reqs: Sequence[Req]) -> list[int]:
    """The rows to redo a degenerate block from: those of one particle, drawn by the weights from before the block, and
    of all others with the same tokens."""
    group = member.group
    assert group.weights is not None
    uniform = _uniforms([member], group.weights.log_weights.device)[0, :1]
    drawn = member.rows[int(invert_cdf(group.weights.normalized, uniform))]
    return [row for row in member.rows if row >= 0 and reqs[row].output_ids == reqs[drawn].output_ids]


def _uniforms(bucket: list[GroupRows], device: torch.device) -> torch.Tensor:
    """float64 [n_groups, n_particles], from each group's own seed and position."""
    n = len(bucket[0].rows)
    seeds = torch.tensor([[member.group.seed] for member in bucket], dtype=torch.int64, device=device)
    positions = torch.tensor([[member.position] for member in bucket], dtype=torch.int64, device=device)
    return uniforms(seeds, torch.arange(n, device=device), positions, Stream.RESAMPLE)
