"""Importance weights of groups of particles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """Log weights since the last resampling, and what follows from them.

    Checked once, when built: NaN and +inf raise ValueError. -inf is legal: a particle that the target
    excludes.
    """

    log_weights: Tensor  # float64 [..., n_particles]

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_weights", self.log_weights.to(torch.float64))
        # One reduction: a NaN compares as False, so does +inf.
        if not bool((self.log_weights < torch.inf).all()):
            raise ValueError("A log weight is NaN or +inf")

    @classmethod
    def uniform(cls, *shape: int, device: torch.device | str | None = None) -> Weights:
        """Equal weights: log w = 0."""
        return cls._valid(torch.zeros(shape, dtype=torch.float64, device=device))

    def __getitem__(self, group: int) -> Weights:
        """The weights of one group of a batch of groups."""
        return self._valid(self.log_weights[group])

    def add(self, increments: Tensor) -> Weights:
        """Weights after log w += `increments` [..., n_particles]."""
        return Weights(self.log_weights + increments)

    def reset(self, where: Tensor) -> Weights:
        """Weights with log w = 0 in the groups `where` (bool [...])."""
        return self._valid(self.log_weights.masked_fill(where.unsqueeze(-1), 0.0))

    @property
    def n(self) -> int:
        """Particles per group."""
        return self.log_weights.shape[-1]

    @cached_property
    def degenerate(self) -> Tensor:
        """bool [...]: no particle has weight. `normalized` and `ess` are then 0, `log_mean` is -inf."""
        return self.log_weights.amax(-1).isneginf()

    @cached_property
    def normalized(self) -> Tensor:
        """W_i, float64 [..., n_particles]."""
        total = self._scaled.sum(-1, keepdim=True)
        return self._scaled / total.masked_fill(total == 0, 1.0)

    @cached_property
    def ess(self) -> Tensor:
        """Effective sample size 1 / sum W_i^2, float64 [...]: exactly n where all weights are equal."""
        # Not from W: 1/n may have no exact float, and a threshold of 1 would then resample equal weights.
        square = self._scaled.square().sum(-1)
        return self._scaled.sum(-1).square() / square.masked_fill(square == 0, 1.0)

    @cached_property
    def log_mean(self) -> Tensor:
        """logsumexp(log w) - log N, float64 [...]: what a resampling adds to log Z^."""
        return self._shift.squeeze(-1) + (self._scaled.sum(-1) / self.n).log()

    @cached_property
    def _shift(self) -> Tensor:
        """The largest log weight of each group, [..., 1]; 0 where that is -inf."""
        return self.log_weights.amax(-1, keepdim=True).masked_fill(self.degenerate.unsqueeze(-1), 0.0)

    @cached_property
    def _scaled(self) -> Tensor:
        """w_i / max w, [..., n_particles]."""
        return (self.log_weights - self._shift).exp()

    @classmethod
    def _valid(cls, log_weights: Tensor) -> Weights:
        """Log weights that are valid by construction; checking them would wait for the device."""
        self = object.__new__(cls)
        object.__setattr__(self, "log_weights", log_weights)
        return self
