"""KV in use, KV saved against copying, and the check that every slot has its owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix_patch.particle_tree import ParticleTree


@dataclass(frozen=True)
class KvUsage:
    """KV slots of some live particles, between two cycles."""

    lengths: int = 0  # sum of the particles' lengths: what copying would hold
    distinct: int = 0  # slots that they really hold
    shared: int = 0  # of these, slots that more than one of them uses

    @property
    def saved(self) -> float:
        """1 - distinct / lengths; 0 for no particles."""
        return 1.0 - self.distinct / self.lengths if self.lengths else 0.0


def usage(tree: ParticleTree, particles: Sequence[Req], *, common: int = 0) -> KvUsage:
    """The KV of `particles`.

    Args:
        common: positions [0, common) are known to be one path of the tree, for all of them: not looked at.
    """
    if not particles:
        return KvUsage()
    rows = [tree.slots(particle, common, particle.kv.kv_committed_len) for particle in particles]
    _, users = torch.cat(rows).unique(return_counts=True)
    return KvUsage(
        lengths=sum(particle.kv.kv_committed_len for particle in particles),
        distinct=common + users.numel(),
        shared=(common if len(particles) > 1 else 0) + int((users > 1).sum()),
    )


def check_ownership(tree: ParticleTree, particles: Iterable[Req]) -> None:
    """Assert the ownership rules of :mod:`radix_patch.particle_tree` for live particles (all groups at once).

    Costs a walk over all their slots: for tests and debugging.

    Raises:
        AssertionError: one sentence naming the particle.
    """
    private: list[torch.Tensor] = []
    for particle in particles:
        kv, rid = particle.kv, particle.rid
        assert 0 <= kv.cache_protected_len <= kv.kv_committed_len <= kv.kv_allocated_len, f"{rid}: ranges overlap"
        locked = tree.locked_slots(particle)
        ours = tree.slots(particle, 0, kv.cache_protected_len)
        assert torch.equal(locked.to(ours.dtype), ours), f"{rid}: its row is not the tree path that it locks"
        private.append(tree.slots(particle, kv.cache_protected_len, kv.kv_allocated_len))
    if not private:
        return
    slots, owners = torch.cat(private).unique(return_counts=True)
    assert bool((owners == 1).all()), f"slots {slots[owners > 1].tolist()} are private to more than one particle"
    in_tree = tree.tree_slots()
    assert not torch.isin(slots, in_tree.to(slots.dtype)).any(), "a private slot is also the tree's"
    assert not torch.isin(slots, tree.free_slots().to(slots.dtype)).any(), "a private slot is also free"
