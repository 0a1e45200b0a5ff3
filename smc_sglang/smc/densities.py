"""From logits to the target and proposal densities p~ and q~.

:class:`Density` is the one place where a row's sampling parameters live: both models' logits pass through the
same one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Density:
    """Each row's sampling parameters: every field is a tensor over rows."""

    temperatures: Tensor  # float32 [n_rows]

    def rows(self, index: Tensor) -> Density:
        """The parameters of some rows."""
        return Density(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def log_probs(self, logits: Tensor) -> Tensor:
        """log p~ of one position per row: [n_rows, vocab] -> float32 [n_rows, vocab]."""
        return log_density(logits, self.temperatures)

    def log_probs_of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """log p~ of given tokens at several positions per row.

        Args:
            logits: [n_rows, k, vocab].
            tokens: int64 [n_rows, k].
        Returns:
            float32 [n_rows, k].
        """
        # By position: the whole block's densities would be several times the largest tensor of the cycle.
        picked = [self.log_probs(logits[:, k]).gather(-1, tokens[:, k : k + 1]) for k in range(tokens.shape[1])]
        return torch.cat(picked, dim=1) if picked else logits.new_empty(tokens.shape, dtype=torch.float32)


def log_density(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(logits / temperature).

    Rows of temperature 0 are greedy: their law is a point mass that no importance weight can use, so they get
    the density at temperature 1 and it is for the caller to take their argmax instead.

    Args:
        logits: [..., vocab], -inf legal (but not everywhere in a row).
        temperatures: [...].
    Returns:
        float32 [..., vocab].
    """
    logits = logits.to(torch.float32)
    # Shifted before it is scaled: at low temperatures scaling first would blow up the logits' rounding.
    scale = torch.where(temperatures > 0, temperatures, 1.0).to(torch.float32).unsqueeze(-1)
    return torch.log_softmax((logits - logits.amax(-1, keepdim=True)).div_(scale), dim=-1)


def power_density(log_p: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """The bonus token's density p~^alpha / c, with c = sum_v p~(v)^alpha.

    Args:
        log_p: log p~, [..., vocab].
        powers: alpha > 0, [...].
    Returns:
        log (p~^alpha / c) [..., vocab] and log c [...]: exactly log_p and 0 where alpha is 1.
    """
    raised = powers.unsqueeze(-1) * log_p
    log_c = raised.logsumexp(-1).masked_fill(powers == 1, 0.0)
    return raised - log_c.unsqueeze(-1), log_c
