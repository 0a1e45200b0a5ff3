"""SGLang's pools and radix tree as its scheduler builds them, without a model.

Everything is SGLang's own: `ReqToTokenPool`, a KV pool of one small layer, `TokenToKVPoolAllocator`, the unified
radix cache over either tree core, and `Req`s that take SGLang's steps in SGLang's order (match, lock, allocate,
write the row, checkpoint). Where a forward pass would write K/V, :attr:`Pools.tags` is written: one number per
slot that stands for the whole token path of that position, so that K/V computed after another prefix is caught too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from radix_patch import ParticleTree
from smc_sglang.platform.hooks import assign_slots
from smc_sglang.platform.kv_pool import TorchKVPool

CORES = ("rust", "python")


@contextmanager
def published_config() -> Iterator[None]:
    """SGLang's process-wide configuration, of a server that runs a speculative algorithm."""
    with get_context().override_server_args(device="cpu", speculative_algorithm="STANDALONE", page_size=1):
        yield


class Pools:
    """One scheduler's memory. Needs :func:`published_config`."""

    def __init__(
        self,
        core: str,
        *,
        n_rows: int,
        row_width: int,
        n_slots: int,
        heads: int = 1,
        head_dim: int = 2,
        layers: int = 1,
    ) -> None:
        self.rows = ReqToTokenPool(n_rows, row_width, device="cpu", enable_memory_saver=False)
        self.kv = TorchKVPool(
            size=n_slots,
            page_size=1,
            dtype=torch.bfloat16,
            head_num=heads,
            head_dim=head_dim,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = TokenToKVPoolAllocator(
            n_slots, dtype=torch.bfloat16, device="cpu", kvcache=self.kv, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_core_backend=core,
        )
        self.cache = create_unified_radix_cache(
            TreeCacheBuildContext(
                server_args=get_context().server_args,
                params=params,
                is_hybrid_swa=False,
                is_hybrid_ssm=False,
                enable_hierarchical_cache=False,
                disable_radix_cache=False,
                tp_worker=None,
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
            )
        )
        # SGLang falls back to the Python core with no more than a log line.
        assert self.cache._tree_core_backend == core, f"{core} is not available here"
        self.tree = ParticleTree(self.rows, self.allocator, self.cache)
        self.n_rows, self.n_slots = n_rows, n_slots
        self.tags = np.full(n_slots + 1, -1, dtype=np.int64)  # slot 0 is SGLang's padding
        self._tables = self.rows.req_to_token.numpy()

    # -- what is held ----------------------------------------------------------------------------------------

    def row(self, req: Req) -> np.ndarray:
        """The row of `req_to_token` that `req` holds, int32 [row_width]: a view."""
        return self._tables[req.kv.req_pool_idx]

    def free(self) -> np.ndarray:
        return self.tree.free_slots().numpy()

    def in_tree(self) -> np.ndarray:
        return self.tree.tree_slots().numpy()

    # -- an ordinary request, in SGLang's order ---------------------------------------------------------------

    def match(self, req: Req) -> None:
        """Admission: adopt what the tree holds of the prompt, and lock it."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)

    def has_room(self, n_slots: int) -> bool:
        """Whether `n_slots` can be allocated; evicts for it, as SGLang's check does."""
        return self.allocator.check_decode_capacity(num_tokens=n_slots, tree_cache=self.cache)

    def prefill(self, req: Req, n_tokens: int, tags: Sequence[int]) -> None:
        """Run the next `n_tokens` of a matched request, and checkpoint what has been computed.

        Args:
            tags: of all its tokens.
        """
        first = not req.kv.holds_kv
        if not first:
            req.init_next_round_input()
        start, end = req.prefix_len, req.prefix_len + n_tokens
        req.extend_end = end
        prefix = self.cache.prefix_device_indices(req) if first else None
        alloc_req_slots(self.rows, [req], self.cache)
        slots = alloc_token_slots(self.cache, n_tokens)
        if prefix is not None:
            self.rows.write((req.kv.req_pool_idx, slice(0, start)), prefix)
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        self.tags[slots.numpy()] = tags[start:end]
        checkpoint_kv_cache(req, self.cache)

    # -- decoding, by blocks ----------------------------------------------------------------------------------

    def block_demand(self, reqs: Sequence[Req], width: int) -> int:
        """Slots that :meth:`allocate_blocks` would take."""
        return page_aligned_decode_alloc_lens(reqs, reserve=width, page_size=1)[2]

    def allocate_blocks(self, reqs: Sequence[Req], width: int) -> None:
        """Give every row the slots of its next block, as SGLang's speculative decoding does."""
        now, then, demand = page_aligned_decode_alloc_lens(reqs, reserve=width, page_size=1)
        if demand:
            assign_slots(
                torch.tensor([req.kv.req_pool_idx for req in reqs]),
                self.rows.req_to_token,
                torch.tensor(now),
                torch.tensor(then),
                alloc_token_slots(self.cache, demand),
                len(reqs),
            )
        for req, length in zip(reqs, then, strict=True):
            req.kv.kv_allocated_len = length

    def write_block(self, req: Req, tags: Sequence[int]) -> None:
        """Stand in for the forward pass: K/V of a block, at the row's end."""
        start = req.kv.kv_committed_len
        self.tags[self.row(req)[start : start + len(tags)]] = tags

    def release(self, req: Req, *, publish: bool) -> None:
        """What SGLang does with a request that has finished (publish) or was aborted."""
        release_kv_cache(req, self.cache, checkpoint=publish)

    def flush(self) -> None:
        """`Scheduler.flush_cache`, which SGLang allows when it is idle."""
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()


def new_req(rid: str, prompt: Sequence[int], *, extra_key: str | None = None, cache_salt: str | None = None) -> Req:
    return Req(
        rid=rid,
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=SamplingParams(max_new_tokens=1 << 20),
        vocab_size=1 << 20,
        extra_key=extra_key,
        cache_salt=cache_salt,
    )
