"""Random programs of particles over SGLang's real pools and tree, against a model that copies everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_patch.accounting import check_ownership, usage
from smc_sglang.config import SmcConfig, SmcParams
from smc_sglang.engine.group import Particle, ParticleGroup
from smc_sglang.smc.resampling import arrange
from tests.tree.pools import CORES, Pools, new_req

N_ROWS, ROW_WIDTH, N_SLOTS = 14, 64, 120
MAX_LENGTH = 48  # tokens of a particle, prompt included
ALPHABET = (7, 8, 9)
PROMPTS = ((7, 7, 8, 9, 7, 8, 8, 9, 9, 7), (7, 7, 8, 9, 9, 9, 7, 7, 8, 8), (8, 7, 7, 8, 9, 7, 8, 8, 9, 9))
NAMESPACES = ((None, None), ("a", None), (None, "a"), ("b", "a"), (None, "b"))  # (extra_key, cache_salt)
Namespace = tuple[str | None, str | None]
# What a step does, by how often; `advance` is the next prefill chunk, block or commit of some request.
ACTIONS = [
    *("advance",) * 14,
    *("arrive",) * 3,
    *("shrink", "withdraw", "abort", "evict", "look_up", "finish_and_flush"),
]


class Paths:
    """A number for every token path of every namespace: the nodes of a naive trie."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def of(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """The number of each prefix of `tokens` but the empty one."""
        path = []
        parent: Any = namespace
        for token in tokens:
            parent = self._numbers.setdefault((parent, token), len(self._numbers))
            path.append(parent)
        return path


@dataclass(eq=False)
class Request:
    """A group and what the test wants of it."""

    group: ParticleGroup
    namespace: Namespace
    width: int  # W, slots of a block
    blocks: dict[str, list[int]] | None = None  # tokens of the blocks in flight, by particle

    @property
    def parent(self) -> Req:
        return self.group.parent

    @property
    def forked(self) -> bool:
        return bool(self.group.particles)

    @property
    def between_cycles(self) -> bool:
        return self.forked and self.blocks is None

    @property
    def next_action(self) -> str:
        if not self.forked:
            return "prefill"
        return "draft" if self.blocks is None else "commit"

    @property
    def n_rows(self) -> int:
        """Rows that it may come to hold: finished particles can be revived."""
        return len(self.group.particles) or self.group.params.n_particles

    @property
    def holders(self) -> list[Req]:
        if self.forked:
            return [particle.req for particle in self.group.live]
        return [self.parent] if self.parent.kv.holds_kv else []


class Scheduler(RuleBasedStateMachine):
    """SGLang's scheduler as far as memory goes, with the coordinator's half of each cycle.

    The model is `self.tokens`: every particle's own list of tokens, copied as a whole when a particle is.
    """

    core: ClassVar[str]
    counts: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(self.core, n_rows=N_ROWS, row_width=ROW_WIDTH, n_slots=N_SLOTS)
        self.tree = self.pools.tree
        self.paths = Paths()
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}  # by rid, finished particles too; the last one has no K/V yet
        self.history: list[tuple[Namespace, list[int]]] = []  # what was computed at some time
        self.n_arrived = 0

    @rule(action=st.sampled_from(ACTIONS), random=st.randoms(use_true_random=True))
    def step(self, action: str, random: Random) -> None:
        """One step of the kind `action`, or of another where that is not possible now."""
        candidates = self._candidates(action)
        if not candidates:
            action = "advance" if self.requests else "arrive"
            candidates = self._candidates(action)
        request = random.choice(candidates)
        if action == "advance":
            assert request is not None
            action = request.next_action
        self.counts[action] += 1
        if request is None:
            getattr(self, action)(random)
        else:
            getattr(self, action)(request, random)

    def _candidates(self, action: str) -> list[Request] | list[None]:
        """Requests that `action` can happen to; [None] where it is possible and needs none."""
        match action:
            case "arrive":
                return [None] if len(self.requests) < 4 and self.free_rows() > 0 else []
            case "look_up":
                return [None] if self.history else []
            case "evict" | "finish_and_flush":
                return [None]
            case "shrink":
                return [request for request in self.requests if request.between_cycles and len(request.group.live) > 1]
            case "withdraw":
                return [request for request in self.requests if request.between_cycles]
        return list(self.requests)

    # -- requests ------------------------------------------------------------------------------------------

    def arrive(self, random: Random) -> None:
        prompt = list(random.choice(PROMPTS)[: random.randint(2, 10)])
        if random.random() < 0.2:
            prompt[-1] = random.choice(ALPHABET)
        extra_key, cache_salt = namespace = random.choice(NAMESPACES[: random.choice((1, 1, len(NAMESPACES)))])
        width = random.randint(2, 4)
        params = SmcParams.resolve(
            {"n_particles": random.randint(1, min(4, self.free_rows())), "draft_length": width - 1}, SmcConfig()
        )
        self.n_arrived += 1
        parent = new_req(f"r{self.n_arrived}", prompt, extra_key=extra_key, cache_salt=cache_salt)
        self.requests.append(Request(ParticleGroup(None, parent, params, seed=0), namespace, width))

    def prefill(self, request: Request, random: Random) -> None:
        """One chunk; with the last one the group forks."""
        parent = request.parent
        if not parent.kv.holds_kv:
            self.pools.match(parent)
            matched = self.pools.cache.prefix_device_indices(parent).numpy()
            tokens = [*parent.origin_input_ids, *parent.output_ids]
            assert self.pools.tags[matched].tolist() == self.paths.of(request.namespace, tokens)[: len(matched)]
        tokens = [*parent.origin_input_ids, *parent.output_ids]
        left = len(tokens) - parent.prefix_len
        n = left if random.random() < 0.5 else random.randint(1, left)
        if not self.pools.has_room(n):
            return self.abort(request, random)
        self.pools.prefill(parent, n, self.paths.of(request.namespace, tokens))
        self.tokens[parent.rid] = tokens[: parent.kv.kv_committed_len]
        if n == left:
            self._fork(request, random)
        return None

    def _fork(self, request: Request, random: Random) -> None:
        n = request.group.params.n_particles
        shared = random.choice(ALPHABET)
        first = [shared if random.random() < 0.6 else random.choice(ALPHABET) for _ in range(n)]
        prompt = self.tokens.pop(request.parent.rid)
        request.parent.output_ids.append(shared)
        request.group.fork(first, torch.zeros(n))
        self.tree.fork(request.parent, [particle.req for particle in request.group.particles])
        for particle, token in zip(request.group.particles, first, strict=True):
            self.tokens[particle.req.rid] = [*prompt, token]
            if random.random() < 0.05:
                particle.req.finished_reason = FINISH_LENGTH(length=0)
                self.tree.finish(particle.req)
        request.group.agree()
        if request.group.all_finished:
            self._forget(request)

    def draft(self, request: Request, random: Random) -> None:
        """All live particles of a group get a block of slots, and K/V in it; no room: the group shrinks or leaves."""
        live = [particle.req for particle in request.group.live]
        if not self.pools.has_room(self.pools.block_demand(live, request.width)):
            return self.shrink(request, random) if len(live) > 1 else self.withdraw(request, random)
        self.pools.allocate_blocks(live, request.width)
        request.blocks = {}
        for req in live:
            if request.blocks and random.random() < 0.4:  # as another one, often a twin
                drafted = list(random.choice(list(request.blocks.values())))
            else:
                drafted = random.choices(ALPHABET, k=request.width)
            request.blocks[req.rid] = drafted
            before = self.tokens[req.rid]
            paths = self.paths.of(request.namespace, before + drafted)
            self.pools.write_block(req, paths[len(before) - 1 : -1])
        return None

    def commit(self, request: Request, random: Random) -> None:
        """SGLang appends tokens and lets rows finish; then the coordinator's order: moves, twins, what is agreed."""
        group, position = request.group, len(request.group.live[0].req.output_ids)
        self._append(request, random)
        if random.random() < 0.5:
            n = len(group.particles)
            ancestors = arrange(torch.tensor(random.choices(range(n), k=n))).tolist()
            for particle, ancestor in zip(list(group.particles), ancestors, strict=True):
                if particle is not group.particles[ancestor]:
                    self._become(particle, group.particles[ancestor])
        self.tree.extend(particle.req for particle in group.twins(position))
        self._check_usage(group)
        group.agree()
        if group.all_finished:
            self._forget(request)

    def _append(self, request: Request, random: Random) -> None:
        assert request.blocks is not None
        blocks, request.blocks = request.blocks, None
        n = request.width if random.random() < 0.7 else random.randint(1, request.width)
        may_finish = random.choice((0.0, 0.1, 0.5))
        for req in [particle.req for particle in request.group.live]:
            committed, tokens = blocks[req.rid][:n], self.tokens[req.rid]
            full = len(tokens) + n + request.width > MAX_LENGTH
            req.output_ids.extend(committed)
            req.kv.kv_committed_len += n
            valid = n
            if full or random.random() < may_finish:
                valid = random.randint(1, n)
                req.finished_reason = FINISH_LENGTH(length=0)
                req.finished_len = len(req.output_ids) - n + valid
                self.pools.release(req, publish=True)
            tokens += committed[:valid]
            self.history.append((request.namespace, list(tokens)))

    def _become(self, particle: Particle, source: Particle) -> None:
        """As the coordinator does it, and in the model a copy."""
        if not source.finished:
            self.tree.move(particle.req, source.req)
        elif not particle.finished:
            self.tree.release(particle.req)
        particle.become(source)
        self.tokens[particle.req.rid] = list(self.tokens[source.req.rid])

    def shrink(self, request: Request, random: Random) -> None:
        """Resample to fewer particles: places of those without offspring are reused, live ones first."""
        group = request.group
        n = random.randint(1, len(group.particles) - 1)
        sources = random.choices(group.particles, k=n)
        survivors = list(dict.fromkeys(sources))
        spare = [particle for particle in group.particles if particle not in survivors]
        spare.sort(key=lambda particle: particle.finished)
        for source, count in Counter(sources).items():
            for _ in range(count - 1):
                particle = spare.pop(0)
                self._become(particle, source)
                survivors.append(particle)
        dropped = [particle.req for particle in spare if not particle.finished]
        self.tree.shrink(dropped)
        for req in dropped:
            req.finished_reason = FINISH_ABORT("dropped")
        group.renew(survivors)
        if group.all_finished:
            self._forget(request)

    def withdraw(self, request: Request, random: Random) -> None:
        """The group leaves with one particle's tokens, to be prefilled and forked again."""
        group = request.group
        chosen = random.choice(group.live)
        group.adopt_answer(chosen)
        self.tree.finish(chosen.req)
        chosen.req.finished_reason = FINISH_ABORT("withdrawn")
        for particle in group.live:
            self.tree.release(particle.req)
            particle.req.finished_reason = FINISH_ABORT("withdrawn")
        group.particles, group.weights = [], None
        request.parent.reset_for_retract()

    def abort(self, request: Request, random: Random) -> None:
        """In any state: waiting, between two chunks, between two cycles, with a block in flight."""
        in_tree = self.pools.in_tree().size
        if request.forked:
            for particle in request.group.live:
                self.tree.release(particle.req)
                particle.req.finished_reason = FINISH_ABORT("aborted")
        elif request.parent.kv.holds_kv:
            self.pools.release(request.parent, publish=False)
        else:
            self.pools.cache.unlock(request.parent.lock)  # matched, and then there was no room
        assert self.pools.in_tree().size == in_tree  # nothing of it is published
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.requests.remove(request)

    # -- the cache -----------------------------------------------------------------------------------------

    def evict(self, random: Random) -> None:
        self.pools.cache.evict(EvictParams(num_tokens=random.randint(1, 40)))

    def look_up(self, random: Random) -> None:
        """Whatever the tree offers for tokens is the K/V of these tokens, in their own namespace."""
        namespace, tokens = random.choice(self.history[-40:])
        if random.random() < 0.3:
            namespace = random.choice(NAMESPACES)
        extra_key, cache_salt = namespace
        key = RadixKey(new_req("", tokens).origin_input_ids, extra_key, cache_salt=cache_salt)
        result = self.pools.cache.match_prefix(MatchPrefixParams(key=key))
        found = self.pools.cache.path_device_indices(result.last_device_node).numpy()
        assert len(found) == result.device_prefix_len
        assert self.pools.tags[found].tolist() == self.paths.of(namespace, tokens)[: len(found)]

    def finish_and_flush(self, random: Random) -> None:
        """Everything leaves; then, as SGLang does when it is idle, the pools are flushed. Nothing may be missing."""
        for request in list(self.requests):
            self.abort(request, random)
        self.every_slot_has_one_owner()
        self.every_row_has_one_holder()
        self.pools.flush()
        assert np.array_equal(np.sort(self.pools.free()), np.arange(1, N_SLOTS + 1))
        assert self.tree.n_free_rows == N_ROWS

    # -- after every step ------------------------------------------------------------------------------------

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        holders = self.holders()
        check_ownership(self.tree, holders)
        in_tree = self.pools.in_tree()
        rows = [(req.kv, self.pools.row(req)) for req in holders]
        private = [row[kv.cache_protected_len : kv.kv_allocated_len] for kv, row in rows]
        owned = np.concatenate([self.pools.free(), in_tree, *private])
        assert np.array_equal(np.sort(owned), np.arange(1, N_SLOTS + 1)), "a slot is lost or has two owners"
        # Locks: the tree protects what the rows in use lean on, and not one slot more.
        locked = np.unique(
            np.concatenate([np.empty(0, np.int32), *(row[: kv.cache_protected_len] for kv, row in rows)])
        )
        assert self.pools.cache.protected_size() == locked.size
        assert self.pools.cache.evictable_size() == in_tree.size - locked.size

    @invariant()
    def every_row_has_one_holder(self) -> None:
        holders = self.holders()
        assert len({req.kv.req_pool_idx for req in holders}) == len(holders)
        assert self.tree.n_free_rows == N_ROWS - len(holders)
        for request in self.requests:
            for particle in request.group.particles:
                assert particle.finished is (particle.req.lock is None)
                assert particle.finished is not particle.req.kv.holds_kv
        assert all(req.last_node == req.lock.node for req in holders)
        if not holders:
            self.pools.cache.sanity_check()

    @invariant()
    def every_particle_has_the_kv_of_its_own_tokens(self) -> None:
        for request in self.requests:
            for req in request.holders:
                tokens, n = self.tokens[req.rid], req.kv.kv_committed_len
                assert n == len(tokens) - request.forked
                if request.forked:
                    assert [*req.origin_input_ids, *req.output_ids] == tokens
                paths = self.paths.of(request.namespace, tokens + (request.blocks or {}).get(req.rid, []))
                if request.blocks is not None:
                    n += request.width
                assert self.pools.tags[self.pools.row(req)[:n]].tolist() == paths[:n]

    @invariant()
    def a_group_holds_each_token_path_once(self) -> None:
        for request in self.requests:
            live = request.group.live
            slots, paths = set(), set()
            for req in (particle.req for particle in live):
                n = req.kv.kv_committed_len
                slots.update(self.pools.row(req)[:n].tolist())
                paths.update(self.paths.of(request.namespace, self.tokens[req.rid][:n]))
            assert len(slots) == len(paths)

    def _check_usage(self, group: ParticleGroup) -> None:
        """The short cut over what all agree on counts the same."""
        live = [particle.req for particle in group.live]
        if live:
            agreed = len(group.parent.origin_input_ids) + len(group.parent.output_ids) - 1
            common = min(agreed, live[0].kv.kv_committed_len)
            assert usage(self.tree, live, common=common) == usage(self.tree, live)

    def teardown(self) -> None:
        self.finish_and_flush(Random(0))

    # -- helpers -----------------------------------------------------------------------------------------------

    def holders(self) -> list[Req]:
        return [req for request in self.requests for req in request.holders]

    def free_rows(self) -> int:
        """Rows that no group may come to need."""
        return N_ROWS - sum(request.n_rows for request in self.requests)


# -- 10,000 steps ------------------------------------------------------------------------------------------


def run_steps(core: str, n_steps: int) -> Counter[str]:
    """Drive a scheduler through at least `n_steps` steps; returns how often each rule ran."""
    steps = 100
    machine = type("Machine", (Scheduler,), {"core": core, "counts": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_steps // steps + 3,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.counts.total() >= n_steps
    return machine.counts


@pytest.mark.parametrize("core", CORES)
def test_random_steps_against_copying_everything(core: str) -> None:
    """10,000 steps over both cores."""
    counts = run_steps(core, 5_000)
    print(dict(counts))
    assert min(counts.values()) > 20


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("core", CORES)
def test_100_000_random_steps(core: str) -> None:
    run_steps(core, 50_000)
