"""Particles as nodes of SGLang's RadixAttention tree.

Who owns the KV of a live particle, by position in its row of `req_to_token` (the same slot indices address
the target's and the draft's KV):

    [0, cache_protected_len)                 the tree; the particle holds a lock on the node that ends there
    [cache_protected_len, kv_committed_len)  the particle alone: its private tail
    [kv_committed_len, kv_allocated_len)     the particle alone: the block in flight; empty between two cycles

A finished particle owns nothing: its path is left in the tree, evictable, and its row is free. This is SGLang's
own convention for an ordinary request, so its accounting, eviction and leak checks hold for particles unchanged;
:func:`radix_patch.accounting.check_ownership` asserts it.

A private tail becomes the tree's only when that saves slots: when another particle may hold the same tokens
(:meth:`ParticleTree.extend`), when it is about to be shared (:meth:`ParticleTree.move`) or when the particle
finishes. So live particles of a group share a slot wherever they share their tokens, which is the least that any
engine can hold; and copying a particle moves int32 row entries and one tree lock, and no K/V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class ParticleTree:
    """Fork, extend, move, finish, shrink and release the KV of particles. Page size is 1."""

    def __init__(self, req_to_token_pool: Any, allocator: Any, tree_cache: Any) -> None:
        if tree_cache.page_size != 1:
            raise ValueError(f"particles share KV token by token: page_size must be 1, got {tree_cache.page_size}")
        self._pool = req_to_token_pool
        self._allocator = allocator
        self._tree = tree_cache

    # -- rows ------------------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Rows of `req_to_token`, free and in use."""
        return int(self._pool.size)

    @property
    def n_free_rows(self) -> int:
        return int(self._pool.available_size())

    def slots(self, particle: Req, start: int, end: int) -> torch.Tensor:
        """KV slots of positions [start, end) of a live particle, int32 [end - start]."""
        return self._row(particle)[start:end]

    def locked_slots(self, particle: Req) -> torch.Tensor:
        """KV slots of the tree path that a live particle's lock keeps, int64 [cache_protected_len]."""
        return self._tree.path_device_indices(particle.lock.node)

    def tree_slots(self) -> torch.Tensor:
        """KV slots that the tree owns, int64."""
        return self._tree.all_values_flatten()

    def free_slots(self) -> torch.Tensor:
        """KV slots that nobody owns, int64."""
        return self._allocator.get_all_free_pages()

    # -- operations ------------------------------------------------------------------------------------

    def fork(self, parent: Req, particles: Sequence[Req]) -> None:
        """Let `particles` start where `parent`'s prefill ended. The first takes over the parent's row.

        The prompt must be in the tree (SGLang's prefill puts it there); afterwards the parent holds nothing.
        """
        if parent.kv.cache_protected_len != parent.kv.kv_committed_len:
            self._publish(parent)
        prompt, lock, node = parent.kv.kv_committed_len, parent.lock, parent.last_node
        rows = self._pool.alloc_rows(len(particles) - 1)
        if rows is None:
            raise RuntimeError(
                f"admission let {parent.rid} in without {len(particles)} free rows; {self.n_free_rows} are free"
            )
        source = self._row(parent)[:prompt]
        first, *others = particles
        first.kv, first.lock, parent.lock = parent.detach_kv(), lock, None
        for particle, row in zip(others, rows, strict=True):
            self._pool.req_to_token[row, :prompt] = source
            self._adopt(particle, row, length=prompt, node=node)
        for particle in particles:
            particle.last_node = node
            particle.prefix_len = particle.extend_end = prompt

    def extend(self, twins: Iterable[Req]) -> None:
        """Take in the blocks that live `twins`, particles with the same tokens before them, have just committed.

        Where two of them drafted the same tokens, one node holds them and the duplicate's slots return to the
        pool. (The first token of a block is pending before it: twins always share that one.) The block of a
        particle without a twin needs nothing: it is the end of its private tail.
        """
        for particle in twins:
            self._publish(particle)

    def move(self, particle: Req, source: Req) -> None:
        """Resample: make `particle` (live or finished) share all of the live `source`'s committed KV.

        Moves row entries from where the two diverge, and one lock; no K/V. A live particle keeps the slots of
        its block in flight.
        """
        self._publish(source)
        end = source.kv.kv_committed_len
        if particle.kv.holds_kv:
            if particle.kv.kv_committed_len != end:
                raise RuntimeError(f"live particles of a group have one length: {particle.rid}, {source.rid}")
            # Up to here both rows are the same path of the tree.
            start = min(_shared_tokens(particle, source), particle.kv.cache_protected_len)
            lock = self._tree.lock(source.last_node)  # before unlocking: an unlocked leaf may be evicted at once
            self._tree.free_kv_row(particle.kv, [(particle.kv.cache_protected_len, end)])
            self._tree.unlock(particle.lock)
            particle.lock, particle.last_node = lock, source.last_node
            particle.kv.cache_protected_len = particle.kv.cache_inserted_len = end
        else:
            rows = self._pool.alloc_rows(1)
            if rows is None:
                raise RuntimeError(f"no row is left for {particle.rid}; admission must count finished particles")
            start = 0
            self._adopt(particle, rows[0], length=end, node=source.last_node)
        self._row(particle)[start:end] = self._row(source)[start:end]

    def finish(self, particle: Req) -> None:
        """Give a live particle's whole path to the tree, evictable, and its row back."""
        release_kv_cache(particle, self._tree, checkpoint=True)

    def shrink(self, dropped: Iterable[Req]) -> None:
        """Drop live particles of a population that becomes smaller: their private tails return to the pool."""
        for particle in dropped:
            self.release(particle)

    def release(self, particle: Req) -> None:
        """Give up a live particle's row, lock and private slots; nothing of them stays."""
        release_kv_cache(particle, self._tree, checkpoint=False)

    # -- helpers ---------------------------------------------------------------------------------------

    def _publish(self, particle: Req) -> None:
        """Give a live particle's private tail to the tree.

        Tokens that the tree already holds are taken from there: the duplicate's slots return to the pool and the
        row is pointed at the tree's.
        """
        kv, end = particle.kv, particle.kv.kv_committed_len
        start = kv.cache_protected_len
        if start == end:
            return
        particle.refresh_fill_ids()
        row = self._row(particle)
        result = self._tree.insert(
            InsertParams(
                key=RadixKey(
                    particle.full_untruncated_fill_ids[:end],
                    particle.extra_key,
                    cache_salt=particle.cache_salt,
                ),
                value=row[:end].to(torch.int64, copy=True),
                prev_prefix_len=start,
                inserted_len=kv.cache_inserted_len,
                priority=particle.priority or 0,
            )
        )
        node = result.last_device_node
        lock = self._tree.lock(node)  # before unlocking: an unlocked leaf may be evicted at once
        if result.prefix_len > start:
            row[start:end] = self._tree.path_device_indices(node)[start:end].to(row.dtype)
        self._tree.unlock(particle.lock)
        particle.lock, particle.last_node = lock, node
        kv.cache_protected_len = kv.cache_inserted_len = end

    def _row(self, particle: Req) -> torch.Tensor:
        return self._pool.req_to_token[particle.kv.req_pool_idx]

    def _adopt(self, particle: Req, row: int, *, length: int, node: Any) -> None:
        """Bind a fresh row to `particle`; the tree owns its first `length` positions."""
        kv = particle.kv
        kv.req_pool_idx = row
        kv.kv_committed_len = kv.kv_allocated_len = length
        kv.cache_protected_len = kv.cache_inserted_len = length
        particle.lock, particle.last_node = self._tree.lock(node), node


def _shared_tokens(particle: Req, other: Req) -> int:
    """How many tokens two particles of one prompt have in common before they diverge."""
    n = min(len(particle.output_ids), len(other.output_ids))
    differs = np.asarray(particle.output_ids)[:n] != np.asarray(other.output_ids)[:n]
    return len(particle.origin_input_ids) + (int(differs.argmax()) if differs.any() else n)
