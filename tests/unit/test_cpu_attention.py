"""The CPU attention backend on SGLang's own pools, against softmax attention written out per row and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from smc_sglang.engine.scoring import ScoreInput
from smc_sglang.platform.attention import Bucket, Shapes, TorchCpuAttention, plan, unsupported
from smc_sglang.platform.hooks import assign_slots
from smc_sglang.platform.kv_pool import TorchKVPool

HEADS, KV_HEADS, HEAD_DIM, SLOTS, ROWS, WIDTH = 6, 2, 16, 4000, 12, 400
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Rows with a cached prefix each, and the query tokens of one forward."""

    backend: TorchCpuAttention
    layer: RadixAttention
    rows: torch.Tensor  # int64 [n_rows], in no particular order
    prefixes: list[int]
    n_queries: list[int]
    slots: list[torch.Tensor]  # per row, int64 [prefix + n_queries], scattered over the pool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    widths: list[int] | None = None  # of the blocks, where some are shorter than the number of queries

    @classmethod
    def make(
        cls, prefixes: list[int], n_queries: list[int], dtype: torch.dtype = torch.float32, n_shared: int = 0
    ) -> Case:
        generator = torch.Generator().manual_seed(len(prefixes) + sum(prefixes))
        table = ReqToTokenPool(ROWS, WIDTH, "cpu", enable_memory_saver=False)
        pool = TorchKVPool(
            SLOTS,
            page_size=1,
            dtype=dtype,
            head_num=KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
            enable_kv_cache_copy=True,
        )
        for buffers in (pool.k_buffer, pool.v_buffer):
            for buffer in buffers:
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        rows = torch.randperm(ROWS, generator=generator)[: len(prefixes)] + 1
        free = torch.randperm(SLOTS - 1, generator=generator) + 1
        lengths = [prefix + queries for prefix, queries in zip(prefixes, n_queries, strict=True)]
        slots = list(free[: sum(lengths)].split(lengths))
        for own in slots[1:]:
            own[:n_shared] = slots[0][:n_shared]
        for row, own in zip(rows.tolist(), slots, strict=True):
            table.req_to_token[row, : len(own)] = own.to(torch.int32)

        def tensor(heads: int) -> torch.Tensor:
            return torch.randn(sum(n_queries), heads, HEAD_DIM, generator=generator).to(dtype)

        layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=1)
        q, k, v = tensor(HEADS), tensor(KV_HEADS), tensor(KV_HEADS)
        return cls(TorchCpuAttention(table, pool), layer, rows, prefixes, n_queries, slots, q, k, v)

    def only(self, row: int, width: int) -> Case:
        """One row by itself, with the first `width` of its query tokens."""
        first = sum(self.n_queries[:row])
        own, kept = slice(row, row + 1), slice(first, first + width)
        slots = [self.slots[row][: self.prefixes[row] + width]]
        q, k, v = self.q[kept], self.k[kept], self.v[kept]
        return Case(self.backend, self.layer, self.rows[own], self.prefixes[own], [width], slots, q, k, v)

    def run(self, mode: ForwardMode) -> torch.Tensor:
        """One layer of one forward as SGLang calls it; [n_tokens, heads, head_dim]."""
        lengths = torch.tensor([len(own) for own in self.slots])
        fields: dict[str, Any] = {}
        if mode.is_target_verify():
            lengths = torch.tensor(self.prefixes)
            fields["spec_info"] = ScoreInput(None, self.n_queries[0], None, self.widths)
        elif not mode.is_decode():
            fields["extend_seq_lens"] = torch.tensor(self.n_queries, dtype=torch.int32)
            fields["extend_prefix_lens"] = torch.tensor(self.prefixes, dtype=torch.int32)
        new = [own[prefix:] for own, prefix in zip(self.slots, self.prefixes, strict=True)]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.rows),
            input_ids=torch.zeros(len(self.q), dtype=torch.int64),
            req_pool_indices=self.rows,
            seq_lens=lengths,
            out_cache_loc=torch.cat(new),
            seq_lens_sum=int(lengths.sum()),
            **fields,
        )
        self.backend.init_forward_metadata(batch)
        output = self.backend.forward(self.q.flatten(1), self.k, self.v, self.layer, batch)
        assert output.shape == (len(self.q), HEADS * HEAD_DIM)
        return output.unflatten(1, (HEADS, HEAD_DIM))

    def reference(self) -> torch.Tensor:
        """Token by token and head by head, in float64, from the pool's content before the forward."""
        pool = self.backend.token_to_kv_pool
        keys, values = pool.get_key_buffer(1).double(), pool.get_value_buffer(1).double()
        new_slots = torch.cat([own[prefix:] for own, prefix in zip(self.slots, self.prefixes, strict=True)])
        keys[new_slots], values[new_slots] = self.k.double(), self.v.double()
        outputs, token = [], 0
        for own, prefix, queries in zip(self.slots, self.prefixes, self.n_queries, strict=True):
            for j in range(queries):
                seen = own[: prefix + j + 1]
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    scores = keys[seen, kv_head] @ self.q[token, head].double() * HEAD_DIM**-0.5
                    outputs.append(scores.softmax(0) @ values[seen, kv_head])
                token += 1
        return torch.stack(outputs).view(token, HEADS, HEAD_DIM)

    def check(self, mode: ForwardMode) -> None:
        expected = self.reference()
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(self.run(mode).double(), expected, rtol=tolerance, atol=tolerance)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("prefixes", [[40] * 4, [7, 120, 64, 7, 1]], ids=["one group", "ragged"])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_the_scoring_pass_sees_the_prefix_and_the_block_up_to_itself(
    prefixes: list[int], width: int, dtype: torch.dtype
) -> None:
    Case.make(prefixes, [width] * len(prefixes), dtype).check(ForwardMode.TARGET_VERIFY)


@DTYPES
@pytest.mark.parametrize("prefixes", [[40] * 4, [7, 120, 64, 7, 0]], ids=["one group", "ragged"])
def test_decode(prefixes: list[int], dtype: torch.dtype) -> None:
    Case.make(prefixes, [1] * len(prefixes), dtype).check(ForwardMode.DECODE)


@DTYPES
@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize("n_shared", [120, 290, 300])
def test_a_long_common_beginning_is_read_once(n_shared: int, width: int, dtype: torch.dtype) -> None:
    """Eight particles of one prompt; up to all that is cached can be common."""
    case = Case.make([300] * 8, [width] * 8, dtype, n_shared)
    case.check(ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE)
    (bucket,) = case.backend.forward_metadata
    assert bucket.shared is not None
    assert bucket.shared.tolist() == case.slots[0][:n_shared].tolist()
    assert len(bucket.slots) == 8 * (300 + width - n_shared)


def test_a_short_common_beginning_is_not() -> None:
    for rows, n_shared in ((8, 40), (2, 300)):
        case = Case.make([300] * rows, [1] * rows, n_shared=n_shared)
        case.check(ForwardMode.DECODE)
        assert [bucket.shared for bucket in case.backend.forward_metadata] == [None]


@DTYPES
@pytest.mark.parametrize(
    ("prefixes", "n_queries"),
    [([0], [50]), ([0, 0], [20, 20]), ([30, 0, 5, 64], [10, 33, 1, 10])],
    ids=["whole prompt", "two equal prompts", "cached prefixes and chunks"],
)
def test_extend(prefixes: list[int], n_queries: list[int], dtype: torch.dtype) -> None:
    Case.make(prefixes, n_queries, dtype).check(ForwardMode.EXTEND)


def test_prefill_and_decode_rows_in_one_pass() -> None:
    Case.make([16, 40, 40], [12, 1, 1]).check(ForwardMode.MIXED)


def test_rows_of_equal_shape_share_a_bucket() -> None:
    table = torch.arange(5 * 40, dtype=torch.int32).view(5, 40)
    buckets = plan(table, torch.tensor([4, 0, 2, 1]), Shapes.end_to_end([3, 3, 2, 3], [20, 20, 20, 30]))
    assert all(isinstance(bucket, Bucket) for bucket in buckets)
    assert [(b.n_rows, b.n_queries, b.n_keys) for b in buckets] == [(2, 3, 20), (1, 2, 20), (1, 3, 30)]
    assert [b.tokens.tolist() for b in buckets] == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    assert buckets[0].slots.tolist() == [*range(160, 180), *range(20)]
    alone = plan(table, torch.tensor([4, 0]), Shapes.end_to_end([3, 3], [20, 20]))
    assert [b.tokens for b in alone] == [None]


def test_long_rows_of_other_requests_are_told_apart() -> None:
    """So that what a group shares is common to its bucket."""
    table = torch.arange(4 * 200, dtype=torch.int32).view(4, 200)
    for keys, sizes in ((180, [2, 1, 1]), (100, [4])):
        buckets = plan(table, torch.arange(4), Shapes.end_to_end([2] * 4, [keys] * 4), ["a", "a", "b", "c"])
        assert [bucket.n_rows for bucket in buckets] == sizes


@pytest.mark.parametrize("keys", [60, 120, 180, 250])
def test_a_group_is_read_alone_as_in_company(keys: int) -> None:
    """Another request with the same prompt does not move the point at which a group's attention is split."""
    table = torch.arange(16 * WIDTH, dtype=torch.int32).view(16, WIDTH)
    table[:, : keys - 20] = table[0, : keys - 20]
    table[:8, : keys - 5] = table[0, : keys - 5]
    alone, *_ = plan(table, torch.arange(8), Shapes.end_to_end([2] * 8, [keys] * 8), ["a"] * 8)
    both = Shapes.end_to_end([2] * 16, [keys] * 16)
    company, *_ = plan(table, torch.arange(16), both, ["a"] * 8 + ["b"] * 8)
    assert (alone.shared is None) == (company.shared is None)
    if alone.shared is not None:
        assert company.shared is not None
        assert len(alone.shared) == len(company.shared) == keys - 5


@pytest.mark.parametrize("width", [1, 9])
def test_a_row_alone_as_in_company(width: int) -> None:
    """To the bit, in bfloat16: single queries of short and long rows, and blocks beside wider ones.

    Torch's fused attention in float32 is not like that: which thread computes a head shows in the last bit.
    """
    case = Case.make([7, 40, 300, 40], [width] * 4, torch.bfloat16)
    mode = ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE
    for widths in ([width] * 4, [3, 5, 2, 4]) if width > 1 else ([1] * 4,):
        case.widths = widths
        company = case.run(mode).unflatten(0, (4, width))
        for row, own in enumerate(widths):
            assert torch.equal(case.only(row, own).run(mode), company[row, :own])
            assert not company[row, own:].any()


def test_a_short_row_alone_as_in_company_in_float32() -> None:
    case = Case.make([7, 40, 200], [1] * 3)
    company = case.run(ForwardMode.DECODE)
    for row in range(3):
        assert torch.equal(case.only(row, 1).run(ForwardMode.DECODE), company[row : row + 1])


def test_attention_of_another_kind_is_refused() -> None:
    case = Case.make([4], [1])
    with pytest.raises(NotImplementedError, match="sinks"):
        case.backend.forward_decode(case.q, case.k, case.v, case.layer, None, sinks=torch.zeros(HEADS))


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        ({"logit_cap": 30.0}, "caps logits"),
        ({"sliding_window_size": 128}, "sliding-window"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
    ],
)
def test_models_that_need_more_are_refused_when_they_load(needs: dict[str, Any], sentence: str) -> None:
    case = Case.make([4], [1])
    pool = case.backend.token_to_kv_pool
    supported = torch.nn.ModuleList([case.layer])
    assert list(unsupported(supported, pool, torch.float32)) == []
    needy = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=1, **needs)
    (problem,) = unsupported(torch.nn.ModuleList([case.layer, needy]), pool, torch.float32)
    assert sentence in problem
    (problem,) = unsupported(supported, pool, torch.bfloat16)
    assert "--kv-cache-dtype" in problem


def test_slots_are_written_into_the_columns_of_their_requests() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(1000, 2000, (6, 50), generator=generator, dtype=torch.int32)
    expected = table.clone()
    rows, start, end = torch.tensor([5, 1, 3, 0]), torch.tensor([10, 0, 7, 49]), torch.tensor([28, 18, 7, 50])
    slots = torch.randperm(900, generator=generator)[: int((end - start).sum())]
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        for column in range(first, last):
            expected[row, column] = slots[taken]
            taken += 1
    assign_slots(rows, table, start, end, slots, len(rows))
    assert torch.equal(table, expected)


def test_kv_moves_between_slots() -> None:
    pool = Case.make([4], [1]).backend.token_to_kv_pool
    source, target = torch.tensor([3, 9, 11]), torch.tensor([100, 7, 55])
    expected = [buffer[source].clone() for buffer in pool.k_buffer + pool.v_buffer]
    pool.move_kv_cache(target, source)
    for buffer, moved in zip(pool.k_buffer + pool.v_buffer, expected, strict=True):
        assert torch.equal(buffer[target], moved)
