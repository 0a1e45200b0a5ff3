"""The scoring pass's arrays, by a torch emulation of FlashInfer's batched paged prefill (page size 1, causal)."""

from __future__ import annotations

import pytest
import torch

from smc_sglang.engine.scoring import PendingInput, ScoreInput, paged_kv

HEADS, DIM, POOL = 3, 8, 500


def paged_prefill(
    q: torch.Tensor,  # [n_query_tokens, HEADS, DIM]
    k_cache: torch.Tensor,  # [POOL, HEADS, DIM]
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
) -> torch.Tensor:
    """`BatchPrefillWithPagedKVCacheWrapper(causal=True).run`: the last query of a row sees all its KV."""
    out = torch.empty_like(q)
    for row in range(len(qo_indptr) - 1):
        queries = q[qo_indptr[row] : qo_indptr[row + 1]]
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]].long()
        k, v = k_cache[slots], v_cache[slots]
        scores = torch.einsum("qhd,khd->hqk", queries, k) / DIM**0.5
        n_q, n_k = len(queries), len(slots)
        hidden = torch.arange(n_k)[None, :] > torch.arange(n_k - n_q, n_k)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[qo_indptr[row] : qo_indptr[row + 1]] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.parametrize("committed", [[5], [1, 17, 9], [12, 12, 12, 3]])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_attention_from_the_arrays_alone_equals_plain_attention(committed: list[int], width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(10, generator=generator)[: len(committed)]
    table = torch.full((10, 64), -1, dtype=torch.int32)
    slots = torch.randperm(POOL, generator=generator).to(torch.int32)
    k_cache = torch.randn(POOL, HEADS, DIM, generator=generator)
    v_cache = torch.randn(POOL, HEADS, DIM, generator=generator)
    q = torch.randn(len(committed) * width, HEADS, DIM, generator=generator)
    for i, length in enumerate(committed):
        table[rows[i], : length + width] = slots[i * 64 : i * 64 + length + width]

    lengths = torch.tensor(committed)
    block = ScoreInput(positions=None, width=width, req_to_token=table)
    kv_indices, kv_indptr, qo_indptr, mask = block.generate_attn_arg_prefill(
        req_pool_indices=rows,
        paged_kernel_lens=lengths,
        paged_kernel_lens_sum=int(lengths.sum()),
        translator=None,
        plan=None,
    )
    assert mask is None
    assert kv_indices.dtype == kv_indptr.dtype == qo_indptr.dtype == torch.int32
    assert (kv_indices >= 0).all()
    seen = paged_prefill(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices)

    for i, length in enumerate(committed):
        own = slots[i * 64 : i * 64 + length + width].long()
        for j in range(width):
            visible = own[: length + j + 1]
            scores = torch.einsum("hd,khd->hk", q[i * width + j], k_cache[visible]) / DIM**0.5
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v_cache[visible])
            torch.testing.assert_close(seen[i * width + j], expected, atol=1e-5, rtol=1e-5)


def test_ragged_rows_are_packed_end_to_end() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    indptr, indices = paged_kv(table, torch.tensor([2, 0, 3]), torch.tensor([3, 1, 0]))
    assert indptr.tolist() == [0, 3, 4, 4]
    assert indices.tolist() == [20, 21, 22, 0]


def test_pending_tokens_follow_their_rows() -> None:
    pending = PendingInput(torch.tensor([7, 8, 9]))
    pending.filter_batch(torch.tensor([2, 0]))
    pending.merge_batch(PendingInput(torch.tensor([5])))
    assert pending.bonus_tokens.tolist() == [9, 7, 5]
