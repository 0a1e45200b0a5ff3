"""Four resampling schemes with one signature: (weights, uniforms) -> ancestors.

`weights` [..., n] are non-negative, of any sum; the shape of `uniforms` [..., m] says how many offspring are
wanted, so m != n shrinks or grows a group. All are unbiased: E[#{i: A[i] = j}] = m * W_j; and none chooses a
weight of 0. See Chopin & Papaspiliopoulos, "An Introduction to Sequential Monte Carlo", chapter 9.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smc_sglang.smc.rng import invert_cdf

Scheme = Callable[[Tensor, Tensor], Tensor]


def multinomial(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Independent draws from W."""
    return invert_cdf(weights, uniforms)


def stratified(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One draw in each of m equal strata of [0, 1)."""
    m = uniforms.shape[-1]
    return invert_cdf(weights, (_steps(uniforms) + uniforms) / m)


def systematic(weights: Tensor, uniforms: Tensor) -> Tensor:
    """A comb of m teeth, moved by the first uniform: m * W_j offspring of each j, give or take 1."""
    m = uniforms.shape[-1]
    return invert_cdf(weights, (_steps(uniforms) + uniforms[..., :1]) / m)


def residual(weights: Tensor, uniforms: Tensor) -> Tensor:
    """floor(m * W_j) certain offspring of each j, the rest drawn independently from what is left over."""
    m = uniforms.shape[-1]
    weights = weights.to(torch.float64)
    total = weights.sum(-1, keepdim=True)
    expected = m * weights / total.masked_fill(total == 0, 1.0)
    certain = expected.floor()
    ends = certain.cumsum(-1)  # the certain offspring of j are the places before ends[j]
    places = _steps(uniforms).expand_as(uniforms).contiguous()
    by_certainty = torch.searchsorted(ends, places, right=True).clamp(max=weights.shape[-1] - 1)
    by_chance = invert_cdf(expected - certain, uniforms)
    return torch.where(places < ends[..., -1:], by_certainty, by_chance)


SCHEMES: dict[str, Scheme] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
}


def arrange(ancestors: Tensor) -> Tensor:
    """The same offspring in an order that moves the fewest particles.

    Every j that has offspring keeps its own place, A[j] = j; the further copies fill the places of those that
    have none. So no particle that is copied from is ever overwritten, and the moves can be done in any order.

    Args:
        ancestors: int64 [..., n], each in 0..n-1.
    """
    n = ancestors.shape[-1]
    ordered = ancestors.sort(-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    dead = torch.ones_like(first).scatter(-1, ancestors, False)
    # As many further copies as dead places: the r-th copy goes to the r-th dead place.
    copies = ordered.gather(-1, first.to(torch.uint8).argsort(dim=-1, stable=True))
    rank = (dead.cumsum(-1) - 1).clamp(min=0)
    return torch.where(dead, copies.gather(-1, rank), torch.arange(n, device=ancestors.device))


def _steps(uniforms: Tensor) -> Tensor:
    return torch.arange(uniforms.shape[-1], dtype=torch.float64, device=uniforms.device)
