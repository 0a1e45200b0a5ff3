"""What SGLang does with Triton or its own CPU kernels on paths that ask no platform: torch instead.

Only registered where the torch CPU platform is active. What has a seam (attention, KV pool, device, defaults)
is in :mod:`smc_sglang.platform.cpu`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from smc_sglang.hook import Hook


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated KV slots into the rows of their requests.

    Args:
        req_pool_indices: int64 [batch_size], each request's row.
        req_to_token: int32 [n_pool_rows, row_width], changed in place.
        start_offset, end_offset: [batch_size], row i gets its columns start_offset[i] up to end_offset[i].
        out_cache_loc: int64 [sum(end_offset - start_offset)], the slots, request after request.
    """
    counts = end_offset - start_offset
    rows = torch.repeat_interleave(req_pool_indices, counts)
    # Column of the j-th slot: j less the slots of the requests before it, from its own request's start on.
    shifts = start_offset - (torch.cumsum(counts, dim=0) - counts)
    columns = torch.arange(rows.numel(), device=rows.device) + torch.repeat_interleave(shifts, counts)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def _keep_threads(**_: Any) -> None:
    """Threads are set in :meth:`TorchCpuPlatform.init_backend`, and collectives go through gloo."""


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        HookType.REPLACE,
        assign_slots,
        "speculative decoding writes its slot reserve into the rows with a Triton kernel on every platform",
    ),
    Hook(
        "sglang.srt.distributed.bootstrap._init_cpu_threads_env",
        HookType.REPLACE,
        _keep_threads,
        "on ARM, SGLang binds threads through kernels that are not in its wheels; elsewhere it only warns",
    ),
)
