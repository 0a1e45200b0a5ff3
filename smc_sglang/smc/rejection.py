"""Acceptance of drafted tokens where the target has no randomness of its own: temperature 0."""

from __future__ import annotations

import torch
from torch import Tensor


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
