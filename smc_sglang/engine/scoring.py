"""The scoring pass's inputs: one TARGET_VERIFY forward over a fixed block per row, without a mask.

The block of a row is W = K + 1 tokens: the pending token and the K drafted ones. They attend causally to the row's
committed KV and to one another, which is exactly a batched paged prefill (FlashInfer's
`BatchPrefillWithPagedKVCacheWrapper`) of W query tokens over `committed + W` KV tokens, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class ScoreInput(SpecInput):
    """`spec_info` of the scoring pass.

    Args:
        positions: int64 [n_rows * width], absolute position of every block token, row-major.
        width: W, block tokens per row.
        req_to_token: int32 [n_pool_rows, row_width], SGLang's row table.
        widths: [n_rows], each row's own block; what is behind it up to `width` is padding. None: all are `width`.
    """

    tree_topk = 1  # a chain, to the backends that ask

    def __init__(
        self,
        positions: torch.Tensor | None,
        width: int,
        req_to_token: torch.Tensor | None,
        widths: Sequence[int] | None = None,
    ) -> None:
        # The type without per-backend shortcuts: FlashInfer plans it from the arrays below alone.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.draft_token_num = width
        self.widths = widths
        self.num_tokens_per_req = width
        self.num_tokens_for_logprob_per_req = width
        self.capture_hidden_mode = CaptureHiddenMode.NULL
        self._req_to_token = req_to_token

    @classmethod
    def for_graph_capture(cls, width: int, req_to_token: torch.Tensor | None = None) -> ScoreInput:
        """A stand-in while CUDA graphs are captured; SGLang points all its rows at the padding row."""
        return cls(positions=None, width=width, req_to_token=req_to_token)

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: torch.Tensor, paged_kernel_lens: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """FlashInfer's arrays for this block: (kv_indices, kv_indptr, qo_indptr, no mask).

        Args:
            req_pool_indices: [n_rows], each row's index in `req_to_token`.
            paged_kernel_lens: [n_rows], committed tokens per row (the block excluded).
        """
        if self._req_to_token is None:
            raise RuntimeError("a graph stand-in without a row table cannot plan attention")
        n_rows = req_pool_indices.numel()
        kv_indptr, kv_indices = paged_kv(self._req_to_token, req_pool_indices, paged_kernel_lens + self.draft_token_num)
        qo_indptr = torch.arange(n_rows + 1, dtype=torch.int32, device=kv_indptr.device) * self.draft_token_num
        return kv_indices, kv_indptr, qo_indptr, None


def paged_kv(
    req_to_token: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV slots of several rows, end to end, in FlashInfer's CSR form (page size 1).

    Args:
        req_to_token: int32 [n_pool_rows, row_width].
        rows: [n], indices into `req_to_token`.
        lengths: [n], KV tokens of each row.
    Returns:
        kv_indptr int32 [n + 1] and kv_indices int32 [sum(lengths)].
    """
    kv_indptr = torch.zeros(rows.numel() + 1, dtype=torch.int32, device=rows.device)
    kv_indptr[1:] = torch.cumsum(lengths, dim=0)
    owner = torch.repeat_interleave(rows, lengths)
    starts = torch.repeat_interleave(kv_indptr[:-1].long(), lengths)
    columns = torch.arange(owner.numel(), device=rows.device) - starts
    return kv_indptr, req_to_token[owner, columns].to(torch.int32)


class PendingInput(SpecInput):
    """What a row carries from one cycle to the next: its pending token, committed but not yet run.

    `bonus_tokens` int64 [n_rows]; the other fields are read by SGLang's relay and stay empty.
    """

    topk_p = topk_index = hidden_states = dsa_topk_indices = future_indices = None

    def __init__(self, bonus_tokens: torch.Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None, **_: Any) -> None:
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: PendingInput) -> None:
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
