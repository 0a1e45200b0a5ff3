"""Single properties of particles over SGLang's real pools and tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from radix_patch import ParticleTree
from radix_patch.accounting import check_ownership
from tests.tree.pools import CORES, Pools, new_req


class Population:
    """N particles of one prompt of distinct tokens, as after `Coordinator._fork`, that decode blocks of 3."""

    def __init__(self, core: str, n: int = 2, **namespace: str) -> None:
        self.pools = Pools(core, n_rows=8, row_width=32, n_slots=100)
        self.tree = self.pools.tree
        self.parent = new_req("parent", range(1, 6), **namespace)
        self.pools.match(self.parent)
        self.pools.prefill(self.parent, 5, [0] * 5)
        self.particles = [new_req(f"p{index}", range(1, 6), **namespace) for index in range(n)]
        for particle in self.particles:
            particle.output_ids.append(6)
        self.tree.fork(self.parent, self.particles)

    def decode(self, *blocks: Sequence[int]) -> None:
        """Commit one block for each particle, as SGLang does; the tree is not told."""
        self.pools.allocate_blocks(self.particles, 3)
        for particle, block in zip(self.particles, blocks, strict=True):
            particle.output_ids.extend(block)
            particle.kv.kv_committed_len += 3

    def become(self, particle: Req, source: Req) -> None:
        self.tree.move(particle, source)
        particle.output_ids = source.output_ids[:]
        particle.full_untruncated_fill_ids = source.output_ids[:0]

    def row(self, index: int) -> list[int]:
        particle = self.particles[index]
        return self.pools.row(particle)[: particle.kv.kv_committed_len].tolist()


@pytest.mark.parametrize("core", CORES)
def test_a_resample_moves_a_pointer_and_no_kv(core: str) -> None:
    """The copy's own slots return to the pool, none is taken, and no byte of K/V changes."""
    group = Population(core)
    group.decode((1, 1, 1), (2, 2, 2))
    loser, source = group.particles
    own = group.row(0)[5:]
    buffers = [*group.pools.kv.k_buffer, *group.pools.kv.v_buffer]
    for buffer in buffers:
        buffer.copy_(torch.randn_like(buffer))
    before, n_free = [buffer.clone() for buffer in buffers], group.pools.allocator.available_size()

    group.become(loser, source)

    assert group.pools.allocator.available_size() == n_free + 3
    assert set(own) <= set(group.pools.free().tolist())
    assert group.row(0) == group.row(1)
    assert loser.lock.node == source.lock.node
    assert all(torch.equal(buffer, old) for buffer, old in zip(buffers, before, strict=True))
    check_ownership(group.tree, group.particles)


@pytest.mark.parametrize("core", CORES)
def test_twins_that_draft_the_same_hold_it_once(core: str) -> None:
    group = Population(core)
    group.decode((1, 2, 3), (1, 2, 4))  # the K/V of the block: 6, 1, 2
    n_free = group.pools.allocator.available_size()
    group.tree.extend(group.particles)
    assert group.row(0) == group.row(1)
    assert group.pools.allocator.available_size() == n_free + 3

    group.decode((5, 5, 5), (5, 5, 5))  # of 3, 5, 5 and 4, 5, 5: no twins any more
    group.tree.extend(group.particles)
    assert set(group.row(0)[8:]).isdisjoint(group.row(1)[8:])
    assert group.pools.allocator.available_size() == n_free + 3 - 6


@pytest.mark.parametrize("core", CORES)
def test_a_block_without_a_twin_stays_private(core: str) -> None:
    """Nothing enters the tree for a particle that is neither copied nor finished."""
    group = Population(core, n=1)
    for token in range(3):
        group.decode((token, token, token))
    assert group.pools.in_tree().size == 5
    assert group.particles[0].kv.cache_protected_len == 5


@pytest.mark.parametrize("core", CORES)
def test_a_move_writes_the_row_from_the_divergence_on_only(core: str) -> None:
    group = Population(core)
    group.decode((1, 2, 3), (1, 2, 4))
    group.tree.extend(group.particles)
    group.decode((5, 5, 5), (6, 6, 6))
    loser, source = group.particles
    row = group.pools.row(loser)
    row[:8] = -1  # what both share is not touched; anything else would show
    group.become(loser, source)
    assert row[:8].tolist() == [-1] * 8
    assert row[8:11].tolist() == group.row(1)[8:]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("finished_first", [True, False])
def test_a_finished_particle_is_revived_with_a_new_row(core: str, finished_first: bool) -> None:
    group = Population(core)
    group.decode((1, 1, 1), (2, 2, 2))
    finished, source = group.particles if finished_first else group.particles[::-1]
    group.tree.finish(finished)
    assert finished.lock is None
    assert group.tree.n_free_rows == 7
    group.become(finished, source)
    assert group.tree.n_free_rows == 6
    assert group.row(0) == group.row(1)
    check_ownership(group.tree, group.particles)


@pytest.mark.parametrize("core", CORES)
def test_the_path_of_a_finished_particle_is_found_again(core: str) -> None:
    group = Population(core)
    group.decode((1, 2, 3), (4, 5, 6))
    rows = group.row(0), group.row(1)
    for particle in group.particles:
        group.tree.finish(particle)
    for row, particle in zip(rows, group.particles, strict=True):
        again = new_req("again", [*particle.origin_input_ids, *particle.output_ids])
        group.pools.match(again)
        found = group.pools.cache.prefix_device_indices(again).tolist()
        assert found == [*rows[0][:6], *row[6:]]  # both hold 6; the slot of the first to finish was kept
        group.pools.cache.unlock(again.lock)
    assert group.pools.cache.protected_size() == 0


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("namespace", [{"cache_salt": "a"}, {"extra_key": "a"}])
def test_salts_and_extra_keys_isolate(core: str, namespace: dict[str, str]) -> None:
    """A particle's published path serves requests of its own namespace only."""
    group = Population(core, **namespace)
    group.decode((1, 1, 1), (1, 1, 1))
    group.tree.extend(group.particles)
    tokens = [*range(1, 6), 6, 1, 1, 1]
    for other, expected in ((namespace, 8), ({}, 0), ({"cache_salt": "b"}, 0), ({"extra_key": "b"}, 0)):
        req = new_req("other", tokens, **other)
        group.pools.match(req)
        assert req.prefix_len == expected
        group.pools.cache.unlock(req.lock)


@pytest.mark.parametrize("core", CORES)
def test_shrinking_returns_private_tails_to_the_pool(core: str) -> None:
    group = Population(core, n=4)
    group.decode(*((index, 0, 0) for index in range(4)))
    group.tree.extend(group.particles)  # the pending 6 is shared, what follows is not
    group.decode(*((1, 1, 1),) * 4)
    n_free = group.pools.allocator.available_size()
    group.tree.shrink(group.particles[1:])
    assert group.pools.allocator.available_size() == n_free + 3 * 3
    assert group.pools.cache.evictable_size() == 3 * 2  # what they had published stays, evictable
    assert group.tree.n_free_rows == 7
    check_ownership(group.tree, group.particles[:1])


@pytest.mark.parametrize("core", CORES)
def test_what_live_particles_lean_on_is_never_evicted(core: str) -> None:
    group = Population(core, n=3)
    group.decode((1, 1, 1), (1, 1, 1), (2, 2, 2))
    group.tree.extend(group.particles)
    group.become(group.particles[2], group.particles[0])
    rows = [group.row(index) for index in range(3)]
    group.pools.cache.evict(EvictParams(num_tokens=100))
    assert rows == [group.row(index) for index in range(3)]
    assert set(group.pools.in_tree().tolist()) == set(rows[0])
    check_ownership(group.tree, group.particles)


@pytest.mark.parametrize("core", CORES)
def test_two_groups_of_one_prompt_share_across_groups(core: str) -> None:
    """A published path is every request's, so another group's block of the same tokens adopts its slots."""
    group = Population(core, n=1)
    group.decode((1, 2, 3))
    group.tree.extend(group.particles)
    other = new_req("other", range(1, 6))
    group.pools.match(other)
    group.pools.prefill(other, 1, [0] * 5)
    first = new_req("other0", range(1, 6))
    first.output_ids.append(6)
    group.tree.fork(other, [first])
    group.particles.append(first)
    group.pools.allocate_blocks([first], 3)
    first.output_ids.extend((1, 2, 3))
    first.kv.kv_committed_len += 3
    group.tree.extend([first])
    assert group.row(0) == group.row(1)
    check_ownership(group.tree, group.particles)


def test_pages_of_more_than_one_token_are_refused() -> None:
    pools = Pools("python", n_rows=2, row_width=8, n_slots=8)
    pools.cache.page_size = 4
    with pytest.raises(ValueError, match="page_size must be 1, got 4"):
        ParticleTree(pools.rows, pools.allocator, pools.cache)


def test_an_ownership_violation_is_named() -> None:
    group = Population("rust")
    group.decode((1, 1, 1), (2, 2, 2))
    first, second = (group.pools.row(particle) for particle in group.particles)
    mine = first[5]
    first[5] = second[5]
    with pytest.raises(AssertionError, match="private to more than one"):
        check_ownership(group.tree, group.particles)
    first[5] = mine
    first[0], first[1] = first[1], first[0]
    with pytest.raises(AssertionError, match="p0: its row is not the tree path"):
        check_ownership(group.tree, group.particles)
