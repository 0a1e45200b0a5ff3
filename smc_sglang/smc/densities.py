"""From logits to the target and proposal densities p~ and q~, token by token inside a block.

:class:`Density` is the one place where the rows' sampling parameters live: both models' logits pass through the
same one. First the logits are shaped (penalties, bans, bias), then the temperature makes them a law, then the law
is truncated (top-k, top-p, min-p)::

    logits = density.shaped(logits, drafted, n_drafted)
    log_p, log_q = density.target(logits), density.proposal(logits)

A grammar's mask is applied before the truncation, to both. With `global` semantics only the proposal is masked: the
target is then p~ of the whole vocabulary, and what the mask leaves of it (:meth:`Density.bonus`).

Where p~ is truncated, q~ is a defensive mixture of the truncated and the whole law: SMC is right only where the
proposal covers the target, and a draft that truncates by itself would miss tokens that the target keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Protocol, Self

import torch
from torch import Tensor

EPSILON = 0.05  # the whole law's share in the proposal of a truncated row
ALL_TOKENS = 1 << 30  # top-k of a row that keeps every token
_CANDIDATES = 256  # tokens that truncation looks at first, where sorting a whole vocabulary is slow


class _ByRow:
    """A dataclass whose fields are tensors over rows."""

    def rows(self, index: Tensor) -> Self:
        """The parameters of some rows."""
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})  # type: ignore[arg-type]


class Shaper(Protocol):
    """Something that changes logits before they become a law."""

    def rows(self, index: Tensor) -> Self: ...

    def apply(self, logits: Tensor, drafted: Tensor, n_drafted: Tensor) -> Tensor:
        """The logits of one position per row, changed.

        Args:
            logits: float32 [n_rows, vocab]; may be changed in place.
            drafted: int64 [n_rows, k], tokens of the block at hand.
            n_drafted: int64 [n_rows]: how many of them come before the position; the rest is not looked at.
        """


class Masks(Protocol):
    """What the rows' grammars allow."""

    def rows(self, index: Tensor) -> Self: ...

    def allowed(self, drafted: Tensor, k: int) -> Tensor:
        """The tokens that may come next, bool [n_rows, vocab]: none where the vocabulary has no word to go on with.

        Args:
            drafted: int64 [n_rows, k], the block's tokens before the position.
        """


@dataclass(frozen=True, eq=False)
class Bias(_ByRow):
    """Logit bias; -inf is a ban."""

    bias: Tensor  # float32 [n_rows, vocab]

    def apply(self, logits: Tensor, drafted: Tensor, n_drafted: Tensor) -> Tensor:
        return logits.add_(self.bias)


@dataclass(frozen=True, eq=False)
class Penalties(_ByRow):
    """Frequency, presence and repetition penalties on the output so far, the block's own tokens included.

    As SGLang computes them: the first two are subtracted (per occurrence, and once), the third divides positive
    logits and multiplies negative ones.
    """

    counts: Tensor  # float32 [n_rows, vocab], occurrences in the output before the block
    frequency: Tensor  # float32 [n_rows]
    presence: Tensor  # float32 [n_rows]
    repetition: Tensor  # float32 [n_rows], 1: none

    def apply(self, logits: Tensor, drafted: Tensor, n_drafted: Tensor) -> Tensor:
        before = torch.arange(drafted.shape[1], device=drafted.device) < n_drafted.unsqueeze(1)
        counts = self.counts.scatter_add(1, drafted, before.to(self.counts.dtype))
        seen = counts > 0
        logits.sub_(self.frequency.unsqueeze(1) * counts + self.presence.unsqueeze(1) * seen)
        factor = torch.where(seen, self.repetition.unsqueeze(1), 1.0)
        return torch.where(logits < 0, logits * factor, logits / factor)


@dataclass(frozen=True, eq=False)
class MinLength(_ByRow):
    """No finishing token before a minimum of tokens."""

    missing: Tensor  # int64 [n_rows], tokens that are missing at the block's start
    stops: Tensor  # bool [n_rows, vocab], the tokens that would finish the row

    def apply(self, logits: Tensor, drafted: Tensor, n_drafted: Tensor) -> Tensor:
        too_early = (n_drafted < self.missing).unsqueeze(1)
        return logits.masked_fill_(self.stops & too_early, -torch.inf)


@dataclass(frozen=True, eq=False)
class Truncation(_ByRow):
    """top-k, top-p and min-p. Each looks at the law before the other two, as in SGLang's sampler."""

    top_ks: Tensor  # int64 [n_rows], ALL_TOKENS: all
    top_ps: Tensor  # float32 [n_rows], 1: all. The most likely tokens until their mass exceeds it
    min_ps: Tensor  # float32 [n_rows], 0: all. Tokens of at least this share of the most likely one's mass

    def apply(self, log_probs: Tensor) -> Tensor:
        """The truncated law, renormalised: float32 [n_rows, vocab], -inf outside."""
        vocab = log_probs.shape[-1]
        width = vocab if log_probs.is_cuda else min(vocab, _CANDIDATES)
        kept, settled = self._kept(log_probs, width)
        if width < vocab and not settled.all():
            rest = (~settled).nonzero().squeeze(1)
            kept[rest] = self.rows(rest)._kept(log_probs[rest], vocab)[0]
        truncated = log_probs.masked_fill(~kept, -torch.inf)
        return truncated - truncated.logsumexp(-1, keepdim=True)

    def _kept(self, log_probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Which of the `width` most likely tokens are kept, bool [n_rows, vocab], and the rows where that is all."""
        values, index = log_probs.topk(width, dim=-1)
        masses = values.to(torch.float64).exp()
        mass_before = masses.cumsum(-1) - masses
        rank = torch.arange(width, device=values.device)
        enough = torch.where(self.top_ps < 1, self.top_ps.to(torch.float64), torch.inf)
        kept = (
            (rank < self.top_ks.unsqueeze(1))
            & (mass_before <= enough.unsqueeze(1))
            & (values >= values[:, :1] + self.min_ps.log().unsqueeze(1))
        )
        settled = ~kept[:, -1] | (self.top_ks <= width)
        return torch.zeros_like(log_probs, dtype=torch.bool).scatter_(1, index, kept), settled

    @property
    def active(self) -> Tensor:
        """Rows that are truncated at all, bool [n_rows]."""
        return (self.top_ps < 1) | (self.min_ps > 0) | (self.top_ks < ALL_TOKENS)


@dataclass(frozen=True, eq=False)
class Density:
    """How each row's logits become p~ and q~."""

    temperatures: Tensor  # float32 [n_rows]
    truncation: Truncation | None = None  # None: no row is truncated
    shapers: tuple[Shaper, ...] = ()  # in the order in which they apply
    masks: Masks | None = None  # None: no row has a grammar
    is_global: Tensor | None = None  # bool [n_rows], rows whose target is not masked; None: no such row

    def rows(self, index: Tensor) -> Density:
        """The parameters of some rows."""
        return Density(
            self.temperatures[index],
            None if self.truncation is None else self.truncation.rows(index),
            tuple(shaper.rows(index) for shaper in self.shapers),
            None if self.masks is None else self.masks.rows(index),
            None if self.is_global is None else self.is_global[index],
        )

    @property
    def may_vanish(self) -> bool:
        """Whether p~ of a token that q~ proposes can be 0."""
        return self.truncation is not None or bool(self.shapers)

    def shaped(self, logits: Tensor, drafted: Tensor, k: int) -> Tensor:
        """The logits that the law is made of; their argmax is the greedy choice.

        Args:
            logits: [n_rows, vocab], one position per row.
            drafted: int64 [n_rows, k], the block's tokens before the position.
        """
        return self._masked(self._unmasked(logits, drafted, k), drafted, k)

    def _unmasked(self, logits: Tensor, drafted: Tensor, k: int) -> Tensor:
        if not self.shapers:
            return logits
        n_drafted = torch.full((len(logits),), k, device=logits.device)
        logits = logits.to(torch.float32, copy=True)
        for shaper in self.shapers:
            logits = shaper.apply(logits, drafted, n_drafted)
        return logits

    def _masked(self, logits: Tensor, drafted: Tensor, k: int) -> Tensor:
        if self.masks is None:
            return logits
        banned = ~self.masks.allowed(drafted, k)
        banned &= ~banned.all(-1, keepdim=True)  # a dead end: something has to be drawn, see `judge`
        masked = logits.to(torch.float32).masked_fill(banned, -torch.inf)
        # Where all that the grammar allows is banned otherwise (min_tokens, logit_bias), the grammar wins.
        stuck = (masked.amax(-1, keepdim=True) == -torch.inf) & ~banned
        return masked.masked_fill(stuck, 0.0)

    def target(self, logits: Tensor) -> Tensor:
        """log p~ of shaped logits, float32 [n_rows, vocab]."""
        log_probs = log_density(logits, self.temperatures)
        if self.truncation is None:
            return log_probs
        active = self.truncation.active.unsqueeze(1)
        return torch.where(active, self.truncation.apply(log_probs), log_probs)

    def judge(self, logits: Tensor, drafted: Tensor, k: int) -> Judgement:
        """What the target says at one position per row. For the arguments see :meth:`shaped`."""
        unmasked = self._unmasked(logits, drafted, k)
        shaped = self._masked(unmasked, drafted, k)
        log_probs = self.target(shaped)
        if self.masks is None:
            return Judgement(shaped, log_probs, log_probs, log_probs)
        allowed = self.masks.allowed(drafted, k)
        whole = log_probs
        if self.is_global is not None:
            whole = torch.where(self.is_global.unsqueeze(1), self.target(unmasked), log_probs)
        whole = whole.masked_fill(~allowed.any(-1, keepdim=True), -torch.inf)  # a dead end has no weight
        return Judgement(shaped, log_probs, whole, whole.masked_fill(~allowed, -torch.inf))

    def proposal(self, logits: Tensor) -> Tensor:
        """log q~ of shaped logits, float32 [n_rows, vocab]."""
        log_probs = log_density(logits, self.temperatures)
        if self.truncation is None:
            return log_probs
        mixture = torch.logaddexp(
            self.truncation.apply(log_probs) + math.log1p(-EPSILON), log_probs + math.log(EPSILON)
        )
        return torch.where(self.truncation.active.unsqueeze(1), mixture, log_probs)


@dataclass(frozen=True, eq=False)
class Judgement:
    """The target's laws at one position per row; all float32 [n_rows, vocab].

    They differ only in rows with `global` semantics: there `whole` is p~ before the grammar, which is what a drafted
    token weighs, and `allowed` is what the grammar leaves of it, which the bonus token comes from. At a dead end of a
    grammar both are empty.
    """

    shaped: Tensor  # logits
    log_probs: Tensor  # masked and renormalised
    whole: Tensor
    allowed: Tensor

    def bonus(self, powers: Tensor, is_global: Tensor | None, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The law of the bonus token and its log weight; see :func:`power_density`.

        Args:
            powers: float32 [n_rows].
            is_global: as in :class:`Density`.
            index: int64 [r], the rows that are asked for; None: all.
        """
        allowed, own = self.allowed, self.log_probs
        if index is not None:
            powers, allowed, own = powers[index], allowed[index], own[index]
            is_global = None if is_global is None else is_global[index]
        if allowed is own:
            return power_density(allowed, powers)
        whole = allowed.amax(-1) > -torch.inf
        partial = ~whole if is_global is None else ~whole | is_global
        log_probs, log_c = power_density(allowed, powers, partial)
        # Nothing of p~ is left: any allowed token will do, its weight is 0.
        return torch.where(whole.unsqueeze(1), log_probs, own), log_c


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


def power_density(log_p: Tensor, powers: Tensor, partial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The bonus token's density p~^alpha / c, with c = sum_v p~(v)^alpha.

    Args:
        log_p: log p~, [..., vocab].
        powers: alpha > 0, [...].
        partial: bool [...], rows of which log_p is only a part, so that it does not sum to 1.
    Returns:
        log (p~^alpha / c) [..., vocab] and log c [...]: exactly log_p and 0 where alpha is 1 and log_p whole.
    """
    raised = powers.unsqueeze(-1) * log_p
    whole = powers == 1 if partial is None else (powers == 1) & ~partial
    log_c = raised.logsumexp(-1).masked_fill(whole, 0.0)
    return raised - log_c.unsqueeze(-1), log_c
