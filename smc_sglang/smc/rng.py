"""Counter-based uniforms: every random number is a pure function of (seed, particle, position, stream).

Nothing is carried from one draw to the next, so what a particle draws does not depend on what else is in the
batch, on the order of the rows, or on how often a step was redone.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

_MASK64 = (1 << 64) - 1
_BLOCK = 256  # tokens summed at once in sampling
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64


class Stream(IntEnum):
    """What a uniform is used for: numbers of different streams are independent."""

    DRAFT = 1  # a drafted token, by its own position
    BONUS = 2  # a token from the target: the bonus, or the first token
    RESAMPLE = 3
    SETTLE = 4  # the final draw of one particle
    SHRINK = 5  # resampling to another number of particles
    ACCEPT = 6  # acceptance of a drafted token in mode `exact`
    CHILD = 7  # seeds of a request's children
    LINEAGE = 8  # the lineage that a group goes on with when it may not hold back more
    NARROW = 9  # resampling within it


def uniforms(seeds: Tensor, particles: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Uniforms on [0, 1), one for each combination of seed, particle and position.

    Args:
        seeds, particles, positions: int64, broadcast against one another.
    Returns:
        float64 of the broadcast shape: multiples of 2^-53, never 1.
    """
    state = _mix(seeds ^ _signed(stream * _GOLDEN))
    state = _mix(state ^ particles)
    state = _mix(state ^ positions)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The int64 seed of child `index` of a request with `seed` (several answers to one prompt)."""
    state = _mix(torch.tensor(_signed(seed ^ (Stream.CHILD * _GOLDEN)), dtype=torch.int64))
    return int(_mix(state ^ index))


def sample_categorical(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row, drawn by inverting the distribution function.

    A token of probability 0 is never drawn while its row has any other; rows without a law (NaN, or -inf
    throughout) give some token in range. Rows need not be normalised.

    Args:
        log_probs: [..., vocab], -inf legal.
        uniforms: float64 [...], in [0, 1).
    Returns:
        int64 [...].
    """
    # The exponential in the dtype that came: several times cheaper than in float64, log_probs being no finer.
    masses, points = log_probs.exp(), uniforms.unsqueeze(-1)
    if masses.shape[-1] <= _BLOCK:
        return invert_cdf(masses, points).squeeze(-1)
    # First a block of tokens, then a token in it: float64 sums of all tokens would cost more than the rest.
    blocks = pad(masses, (0, -masses.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block_masses = blocks.sum(-1, dtype=torch.float64)
    block = invert_cdf(block_masses, points)
    ends = block_masses.cumsum(-1)
    end, mass = ends.gather(-1, block), block_masses.gather(-1, block)
    points = ((points * ends[..., -1:] - (end - mass)) / mass).clamp(0, 1)
    within = invert_cdf(blocks.take_along_dim(block.unsqueeze(-1), dim=-2).squeeze(-2), points)
    return (block * _BLOCK + within).squeeze(-1).clamp(max=masses.shape[-1] - 1)


def invert_cdf(masses: Tensor, points: Tensor) -> Tensor:
    """The index at each of `points` in the distribution proportional to `masses`.

    Args:
        masses: [..., n], non-negative, of any sum.
        points: float64 [..., m], in [0, 1]; leading dimensions as those of `masses`.
    Returns:
        int64 [..., m]: the first index whose cumulative mass exceeds point * total, so that an index of mass
        0 is never chosen, not even at 0 or where rounding carries a point up to the total. Rows without mass
        or with a NaN give some index in range.
    """
    # In float64: a float32 sum over a vocabulary is coarse, and ends visibly off the total.
    cumulative = masses.to(torch.float64).cumsum(-1).contiguous()
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, (points * total).contiguous(), right=True)
    last_with_mass = torch.searchsorted(cumulative, total)
    return torch.minimum(index, last_with_mass).clamp(max=masses.shape[-1] - 1)


def _mix(x: Tensor) -> Tensor:
    """One step of splitmix64 (Steele, Lea & Flood 2014), a bijection of 64 bits."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value
