"""Exact acceptance of drafted tokens: by equality at temperature 0, by rejection sampling above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smc_sglang.smc.rng import invert_cdf

_ROUNDING = 1e-9  # mass below which a residual is float32's rounding


@dataclass(frozen=True, eq=False)
class Accepted:
    """What groups commit in mode `exact`."""

    lengths: Tensor  # int64 [n_groups], accepted drafted tokens, 0..K_i
    rows: Tensor  # int64 [n_groups], a batch row whose block begins with them
    last: Tensor  # int64 [n_groups], the token after them: from the residual, or the target where all were accepted


def multi_draft_acceptance(
    members: Tensor,
    drafted: Tensor,
    draft_lengths: Tensor,
    proposal: Callable[[int], Tensor],
    target: Callable[[int], Tensor],
    accept_uniforms: Tensor,
    last_uniforms: Tensor,
) -> Accepted:
    """Rejection sampling over several chains drafted from one prefix: what is committed is distributed as p~.

    At each depth the chains that match what was accepted so far are tried in order: a chain's token c is accepted with
    probability min(1, r(c) / q~(c)), where r is p~ at first and becomes normalise(max(r - q~, 0)) with every
    rejection. If none is accepted the last r gives one token, and the cycle ends.

    Source: SpecTr (Sun et al. 2023) and SpecInfer (Miao et al. 2024); with one chain it is the speculative sampling of
    Leviathan et al. 2023 and Chen et al. 2023.

    Args:
        members: int64 [n_groups, m], batch rows of each group's chains in their order, -1 at the end where there are
            fewer; at least one.
        drafted: int64 [n_rows, k].
        draft_lengths: int64 [n_groups], K_i <= k, the same for all chains of a group.
        proposal: offset -> log q~ that `drafted` at this offset came from, float32 [n_rows, vocab].
        target: offset -> log p~ after as many drafted tokens, float32 [n_rows, vocab].
        accept_uniforms: float64 [n_groups, m, k].
        last_uniforms: float64 [n_groups].
    """
    n_groups, n_chains = members.shape
    rows = members[:, 0].clone()  # one that still matches
    viable = members >= 0
    going = torch.ones(n_groups, dtype=torch.bool, device=members.device)
    lengths, last = torch.zeros_like(draft_lengths), torch.zeros_like(draft_lengths)
    for depth in range(drafted.shape[1] + 1):
        if not bool(going.any()):  # waits for the device: a pass over the vocabulary costs more
            break
        law = _masses(target(depth), rows)
        drafting = going & (draft_lengths > depth)
        accepted = torch.zeros_like(going)
        if bool(drafting.any()):
            q = _masses(proposal(depth), rows)
            residual, p = law, law
            tokens = drafted[members.clamp(min=0), depth]  # [n_groups, n_chains]
            token = tokens[:, 0]
            for chain in range(n_chains):
                candidate = tokens[:, chain : chain + 1]
                trying = drafting & ~accepted & viable[:, chain]
                threshold = accept_uniforms[:, chain, depth] * q.gather(1, candidate).squeeze(1)
                accepts = trying & (threshold < residual.gather(1, candidate).squeeze(1))
                accepted |= accepts
                token = torch.where(accepts, candidate.squeeze(1), token)
                rows = torch.where(accepts, members[:, chain], rows)
                rejects = (trying & ~accepts).unsqueeze(1)
                residual = torch.where(rejects, _without(residual, q, p), residual)
            law = torch.where(drafting.unsqueeze(1), residual, law)
            viable = viable & (tokens == token.unsqueeze(1))
            lengths = lengths + accepted
        ends = going & ~accepted
        last = torch.where(ends, invert_cdf(law, last_uniforms.unsqueeze(1)).squeeze(1), last)
        going = accepted
    return Accepted(lengths, rows, last)


def _masses(log_probs: Tensor, rows: Tensor) -> Tensor:
    """float64 [len(rows), vocab], normalised."""
    return torch.softmax(log_probs[rows].to(torch.float64), dim=-1)


def _without(law: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """normalise(max(law - q, 0)): the law after a token from q was rejected.

    Where nothing but rounding is left, the rejection was itself rounding's, and p~ takes its place.
    """
    rest = (law - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > _ROUNDING, rest / total.clamp(min=_ROUNDING), p)


def greedy_acceptance(drafted: Tensor, target_argmax: Tensor, draft_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens while they are the target's argmax: the output is that of plain decoding.

    Args:
        drafted: int64 [n_rows, k], padded after each row's draft length.
        target_argmax: int64 [n_rows, k + 1], the target's choice after 0..k drafted tokens.
        draft_lengths: int64 [n_rows].
    Returns:
        The number of accepted tokens, int64 [n_rows], and the target's own token after them, int64 [n_rows].
    """
    k = drafted.shape[1]
    is_drafted = torch.arange(k, device=drafted.device) < draft_lengths.unsqueeze(1)
    agrees = is_drafted & (drafted == target_argmax[:, :k])
    n_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    return n_accepted, target_argmax.gather(1, n_accepted.unsqueeze(1)).squeeze(1)
