"""Particles as rows of SGLang's running batch: how they come into it, and what they go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from smc_sglang.engine.scoring import PendingInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


def join_running(scheduler: Scheduler, reqs: list[Req]) -> None:
    """Let particles decode with the running batch from the next step on."""
    if not reqs:
        return
    newcomers = decode_batch(scheduler, reqs)
    running = scheduler.running_batch
    if running.is_empty():
        newcomers.batch_is_full = running.batch_is_full
        scheduler.running_batch = newcomers
    else:
        running.merge_batch(newcomers)


def decode_batch(scheduler: Scheduler, reqs: list[Req]) -> ScheduleBatch:
    """A decode batch of particles, as SGLang builds one after a prefill."""
    batch = ScheduleBatch.init_new(
        reqs,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    device = batch.device
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs], dtype=torch.int64)
    batch.seq_lens_cpu = torch.tensor([req.kv.kv_committed_len for req in reqs], dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.multimodal_inputs = [None] * len(reqs)
    if batch.return_logprob:
        batch.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        batch.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
    batch.spec_info = PendingInput(_pending(batch))
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    return batch


def refresh_pending(batch: ScheduleBatch) -> None:
    """Rows whose particle became a copy continue from their ancestor's last token."""
    if not batch.is_empty():
        batch.spec_info.bonus_tokens = _pending(batch)


def _pending(batch: ScheduleBatch) -> torch.Tensor:
    """Each row's last token, int64 [n_rows]."""
    return torch.tensor([req.output_ids[-1] for req in batch.reqs], dtype=torch.int64, device=batch.device)
