"""What sharing KV through SGLang's radix tree costs and saves: host time, bytes and slots, without a model.

    python -m bench.resample

On SGLang's real pools (CPU), for one group of N particles that commit 9 tokens per cycle (K = 8). Prints two tables:

1. a resample of half of the particles: row entries and a lock per particle, against copying their K/V;
2. when private tails enter the tree: only when that can save slots (`lazy`, what the engine does), or all of them
   in every cycle (`eager`). Both hold the same slots for live particles; `eager` also leaves dead branches behind.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

from radix_patch.accounting import usage
from smc_sglang.config import SmcConfig, SmcParams
from smc_sglang.engine.group import ParticleGroup
from smc_sglang.smc.resampling import arrange
from tests.tree.pools import CORES, Pools, new_req, published_config

WIDTH, CYCLES, ROUNDS = 9, 20, 7
EVERY = 4  # cycles between two resamplings in the first table
VOCAB = 32_000
LLAMA_8B = 2 * 32 * 8 * 128 * 2  # K/V bytes per token of Llama-3.1-8B in bfloat16
SMALL = {"layers": 30, "heads": 3, "head_dim": 64}  # SmolLM2-135M: its copying is really timed
SMALL_BYTES = 2 * 30 * 3 * 64 * 2


@dataclass
class Run:
    """One group over all its cycles; microseconds and counts by cycle."""

    core: str
    n: int
    prompt: int
    seed: int
    micros: list[float] = field(default_factory=list)
    resample_micros: list[float] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)  # row entries that one resample rewrites
    lengths: list[int] = field(default_factory=list)  # tokens of one particle
    held: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        length = self.prompt + (CYCLES + 1) * WIDTH
        self.pools = Pools(
            self.core, n_rows=self.n, row_width=length, n_slots=self.prompt + 2 * self.n * (CYCLES + 1) * WIDTH
        )
        params = SmcParams.resolve({"n_particles": self.n, "draft_length": WIDTH - 1}, SmcConfig())
        parent = new_req("r", self._tokens(self.prompt))
        self.pools.match(parent)
        self.pools.prefill(parent, self.prompt, [0] * self.prompt)
        parent.output_ids.append(0)
        self.group = ParticleGroup(None, parent, params, seed=0)
        self.group.fork([0] * self.n, torch.zeros(self.n))
        self.pools.tree.fork(parent, [particle.req for particle in self.group.particles])

    def cycle(self, *, resample: bool, duplicates: float, eager: bool) -> None:
        """A block for every particle (not timed), then what the engine does with it (timed)."""
        reqs = [particle.req for particle in self.group.particles]
        position = len(reqs[0].output_ids)
        self.pools.allocate_blocks(reqs, WIDTH)
        blocks: dict[bytes, list[int]] = {}  # one that was drafted after the same tokens
        for req in reqs:
            before = req.output_ids.tobytes()
            block = blocks[before] if before in blocks and self.random.random() < duplicates else self._tokens(WIDTH)
            blocks[before] = block
            req.output_ids.extend(block)
            req.kv.kv_committed_len += WIDTH
        ancestors = arrange(torch.tensor(self._halved())).tolist() if resample else list(range(self.n))
        tables = [self.pools.row(req).copy() for req in reqs]

        start = time.perf_counter()
        for index, ancestor in enumerate(ancestors):
            if index != ancestor:
                self.pools.tree.move(reqs[index], reqs[ancestor])
                self.group.particles[index].become(self.group.particles[ancestor])
        moved = time.perf_counter()
        self.pools.tree.extend(reqs if eager else [particle.req for particle in self.group.twins(position)])
        end = time.perf_counter()

        self.micros.append((end - start) * 1e6)
        self.resample_micros.append((moved - start) * 1e6)
        moves = [(index, req) for index, req in enumerate(reqs) if ancestors[index] != index]
        self.entries.append(sum(int((tables[index] != self.pools.row(req)).sum()) for index, req in moves))
        self.lengths.append(reqs[0].kv.kv_committed_len)
        self.held.append(usage(self.pools.tree, reqs).distinct)
        self.group.agree()

    @property
    def left_behind(self) -> int:
        """Slots of dead branches: evictable, but the pool's until they are evicted."""
        return int(self.pools.cache.evictable_size())

    def _halved(self) -> list[int]:
        survivors = self.random.sample(range(self.n), self.n // 2)
        return survivors * 2

    def _tokens(self, n: int) -> list[int]:
        return self.random.choices(range(1, VOCAB), k=n)


def copy_micros(n_tokens: int) -> float:
    """Microseconds that SGLang's torch mover takes for the K/V of one particle of the small shape."""
    pools = Pools("rust", n_rows=1, row_width=1, n_slots=2 * n_tokens, **SMALL)
    source, buffers = torch.arange(1, n_tokens + 1), (pools.kv.k_buffer, pools.kv.v_buffer)
    return statistics.median(
        _micros(lambda: move_kv_cache_native(*buffers, source + n_tokens, source)) for _ in range(5)
    )


def _micros(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def resample_table() -> None:
    print(f"\n### A resample of half of the particles (every {EVERY}th of {CYCLES} cycles of {WIDTH} tokens)\n")
    print(
        "Medians per group and resample, host state included. A copying engine moves the particles' K/V, at best from "
        f"where they diverge. 8B: Llama-3.1-8B in bfloat16, {LLAMA_8B // 1024} KiB per token. Timed: the "
        f"whole K/V of SmolLM2-135M, {SMALL_BYTES / 1024:.1f} KiB per token, in this machine's memory.\n"
    )
    print(
        "| core | N | prompt | moves | µs | row entries | bytes | 8B K/V from divergence | 8B K/V whole "
        "| timed copy, µs |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    copies = {prompt: copy_micros(prompt + CYCLES * WIDTH // 2) for prompt in (1024, 4096)}
    for core, n, prompt in itertools.product(CORES, (4, 8, 16), (1024, 4096)):
        runs = [Run(core, n, prompt, seed) for seed in range(ROUNDS)]
        for run in runs:
            for cycle in range(1, CYCLES + 1):
                run.cycle(resample=cycle % EVERY == 0, duplicates=0.0, eager=False)
        at = slice(EVERY - 1, None, EVERY)
        entries = statistics.median(entry for run in runs for entry in run.entries[at])
        length = statistics.median(length for run in runs for length in run.lengths[at])
        micros = statistics.median(micro for run in runs for micro in run.resample_micros[at])
        print(
            f"| {core} | {n} | {prompt} | {n // 2} | {micros:.0f} | {entries:.0f} | {4 * entries:.0f} "
            f"| {_mib(entries * LLAMA_8B)} | {_mib(n // 2 * length * LLAMA_8B)} | {n // 2 * copies[prompt]:.0f} |"
        )


def policy_table(n: int = 8) -> None:
    print(f"\n### When private tails enter the tree (N = {n})\n")
    print(
        "Microseconds per group and cycle, moves and the search for twins included: means over the cycles, medians "
        f"over {ROUNDS} runs of each policy in turn. Held: mean slots of the live particles; left: slots of dead "
        "branches after the last cycle.\n"
    )
    print(
        "| core | prompt | resample rate | duplicate rate | lazy µs | eager µs | lazy / eager "
        "| lazy held + left | eager held + left |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for core, prompt, rate, duplicates in itertools.product(CORES, (1024, 4096), (0.0, 0.25, 1.0), (0.0, 0.5)):
        runs: dict[bool, list[Run]] = {False: [], True: []}
        for seed, eager in itertools.product(range(ROUNDS), (False, True)):
            run, resampling = Run(core, n, prompt, seed), Random(seed)
            for _ in range(CYCLES):
                run.cycle(resample=resampling.random() < rate, duplicates=duplicates, eager=eager)
            runs[eager].append(run)
        lazy, every = (statistics.median(_per_run(runs[eager])) for eager in (False, True))
        print(
            f"| {core} | {prompt} | {rate:g} | {duplicates:g} | {lazy:.0f} | {every:.0f} | {lazy / every:.2f} "
            f"| {_slots(runs[False])} | {_slots(runs[True])} |"
        )


def _per_run(runs: list[Run]) -> list[float]:
    return [statistics.fmean(run.micros) for run in runs]


def _slots(runs: list[Run]) -> str:
    held = statistics.fmean(slots for run in runs for slots in run.held)
    return f"{held:.0f} + {statistics.fmean(run.left_behind for run in runs):.0f}"


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.0f} MiB"


def main() -> None:
    torch.set_num_threads(1)
    with published_config():
        for core in CORES:
            Run(core, 4, 1024, seed=0).cycle(resample=True, duplicates=0.5, eager=True)  # warms up
        resample_table()
        policy_table()


if __name__ == "__main__":
    main()
