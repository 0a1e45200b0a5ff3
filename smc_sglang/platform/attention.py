"""Attention on the CPU: prefill, decoding, and the scoring pass over blocks of drafted tokens.

A forward is planned once and run in every layer. Short rows with one query token each go through a compiled loop, all
in one call. Otherwise rows with equally many query and KV tokens make a bucket: one gather of keys, one of values and
one call of torch's fused attention. The particles of a group have equal lengths, so a group is one bucket. What all its
rows share at their beginning, above all the prompt, is read once for all of them where it is long enough; the two parts
are put together by their log-sum-exps.

A row's result does not depend on the other requests in the forward: how it is computed follows from its own shape and
its own group.

Buckets are not padded to one another's length: with 8 rows of 200 to 1000 tokens the padded call took 1.2 to 4
times as long as eight exact ones, for the masked part is computed too and a mask per row is read besides (heads
9/3, 30/10 and 32/8, float32 and bfloat16, one thread).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, ReqToTokenPool

from smc_sglang.platform import kernels
from smc_sglang.platform.kernels import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


_SHARED_READS = 768  # KV tokens that reading a common beginning once must save: below, the second call costs more
_TOLD_APART = 128  # KV tokens from which on rows of other requests are no longer in one bucket
_SHORT = 256  # KV tokens of one row that one thread has read before a fused attention has begun
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Bucket:
    """Rows of one forward with `n_queries` query tokens and `n_keys` KV tokens each, queries included."""

    n_rows: int
    n_queries: int
    n_keys: int
    slots: torch.Tensor  # int32 [n_rows * n_own_keys], KV slots of what comes after `shared`, row-major
    tokens: torch.Tensor | None  # int64 [n_rows * n_queries], their tokens in the batch; None: the whole batch
    shared: torch.Tensor | None = None  # int32 [n_shared], KV slots of the rows' common beginning, where that is long
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def attend(self, queries: Buffer, keys: Buffer, values: Buffer, scaling: float, out: Buffer) -> None:
        """Causal attention of every row's queries, which are its last tokens.

        Heads that share a KV head are folded into the query axis, so keys and values are never repeated.

        Args:
            queries: [n_tokens, n_heads, head_dim].
            keys, values: the layer's pools, [n_slots, n_kv_heads, head_dim].
            out: [n_tokens, n_heads * head_dim]; the bucket's tokens are overwritten.
        """
        pools = keys.tensor, values.tensor
        if self.tokens is None:
            out.tensor.copy_(self._attend(queries.tensor, *pools, scaling))
        else:
            out.tensor[self.tokens] = self._attend(queries.tensor[self.tokens], *pools, scaling)

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Queries and result of the bucket's tokens alone."""
        n_heads, n_kv_heads = queries.shape[1], keys.shape[1]
        fold = n_heads // n_kv_heads
        folded = (
            queries.reshape(self.n_rows, self.n_queries, n_kv_heads, fold, -1)
            .permute(0, 2, 3, 1, 4)
            .reshape(self.n_rows, n_kv_heads, fold * self.n_queries, -1)
        )
        own, own_mass = _flash(
            folded,
            self._gather(keys),
            self._gather(values),
            attn_mask=self._mask(fold, queries.dtype),
            scale=scaling,
        )
        output = own
        if self.shared is not None:
            output = self._with_shared(folded, keys, values, scaling, self.shared, own, own_mass)
        return (
            output.unflatten(2, (fold, self.n_queries)).permute(0, 3, 1, 2, 4).reshape(self.n_rows * self.n_queries, -1)
        )

    def _with_shared(
        self,
        folded: torch.Tensor,  # [n_rows, n_kv_heads, n_folded, head_dim]
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        shared_slots: torch.Tensor,
        own: torch.Tensor,  # [n_rows, n_kv_heads, n_folded, head_dim], attention to the rows' own part
        own_mass: torch.Tensor,  # float32 [n_rows, n_kv_heads, n_folded], its log-sum-exp
    ) -> torch.Tensor:
        """Attention to both parts: every query of every row sees the whole common beginning."""
        n_rows, n_kv_heads, n_folded, _ = folded.shape
        stacked = folded.transpose(0, 1).reshape(1, n_kv_heads, n_rows * n_folded, -1)
        shared, shared_mass = _flash(
            stacked,
            keys.index_select(0, shared_slots).transpose(0, 1).unsqueeze(0),
            values.index_select(0, shared_slots).transpose(0, 1).unsqueeze(0),
            scale=scaling,
        )
        shared = shared.view(n_kv_heads, n_rows, n_folded, -1).transpose(0, 1)
        shared_mass = shared_mass.view(n_kv_heads, n_rows, n_folded).transpose(0, 1)
        weight = torch.sigmoid(shared_mass - own_mass).unsqueeze(-1)
        return torch.lerp(own, shared, weight.to(own.dtype))

    def _gather(self, pool: torch.Tensor) -> torch.Tensor:
        """The rows' own keys or values, [n_rows, n_kv_heads, n_own_keys, head_dim]."""
        return pool.index_select(0, self.slots).unflatten(0, (self.n_rows, -1)).transpose(1, 2)

    def _mask(self, fold: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Added to the scores, [fold * n_queries, n_own_keys]; None where every query sees every key."""
        if self.n_queries == 1:
            return None
        if (fold, dtype) not in self._masks:
            n_own_keys = self.n_keys - (0 if self.shared is None else len(self.shared))
            hidden = torch.ones(self.n_queries, n_own_keys, dtype=torch.bool)
            # Query j sees the tokens before the block and the block's tokens up to itself.
            hidden = hidden.triu(diagonal=n_own_keys - self.n_queries + 1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._masks[fold, dtype] = mask.repeat(fold, 1)
        return self._masks[fold, dtype]


@dataclass
class ShortRows:
    """Rows of one forward with one query token each and few KV tokens."""

    slots: torch.Tensor  # int32 [sum(lengths)], KV slots of row after row
    lengths: torch.Tensor  # int64 [n_rows], KV tokens of each row
    tokens: torch.Tensor  # int64 [n_rows], their tokens in the batch

    def __post_init__(self) -> None:
        self._arrays = tuple(map(kernels.array, (self.slots, self.lengths, self.tokens)))

    def attend(self, queries: Buffer, keys: Buffer, values: Buffer, scaling: float, out: Buffer) -> None:
        """As :meth:`Bucket.attend`."""
        kernels.attend(queries.array, keys.array, values.array, *self._arrays, scaling, out.array)


@dataclass(frozen=True)
class Shapes:
    """What one forward computes: every row's query tokens attend to its KV, their own included.

    Args:
        n_queries: [n_rows], each row's query tokens in this forward.
        n_keys: [n_rows], each row's tokens so far, its queries included.
        first_tokens: [n_rows], where each row's queries begin in the batch.
        n_tokens: tokens in the batch. Those that belong to no row are padding, and their attention is 0.
    """

    n_queries: Sequence[int]
    n_keys: Sequence[int]
    first_tokens: Sequence[int]
    n_tokens: int

    @classmethod
    def end_to_end(cls, n_queries: Sequence[int], n_keys: Sequence[int]) -> Shapes:
        """Row after row without padding."""
        ends = list(accumulate(n_queries))
        return cls(n_queries, n_keys, [0, *ends[:-1]], ends[-1])


def plan(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    shapes: Shapes,
    requests: Sequence[str] | None = None,
    short: int = _SHORT,
) -> list[Bucket | ShortRows]:
    """Group a forward's rows by shape.

    Args:
        req_to_token: int32 [n_pool_rows, row_width], the KV slot of every token of every row.
        rows: int64 [n_rows], the forward's rows in it.
        requests: [n_rows], the request that each row belongs to; None: they are all of one.
        short: KV tokens up to which a single query is a short row.
    """
    members: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    of_short: list[int] = []
    for row, (queries, keys) in enumerate(zip(shapes.n_queries, shapes.n_keys, strict=True)):
        if queries == 1 and keys <= short:
            of_short.append(row)
            continue
        # Long rows are told apart by their requests: what a group shares is common to its bucket, and where its
        # attention is split does not depend on who else is there, so neither does the last bit of its result.
        members[queries, keys, requests[row] if requests and keys > _TOLD_APART else ""].append(row)
    first_tokens = torch.tensor(shapes.first_tokens)
    planned: list[Bucket | ShortRows] = []
    if of_short:
        lengths = torch.tensor([shapes.n_keys[row] for row in of_short])
        table = req_to_token[rows[of_short], : int(lengths.max())]
        slots = table[torch.arange(table.shape[1]) < lengths[:, None]]
        planned.append(ShortRows(slots, lengths, first_tokens[of_short]))
    for (queries, keys, _), indices in members.items():
        of_bucket = torch.tensor(indices)
        tokens = None
        if len(indices) * queries < shapes.n_tokens:
            tokens = (first_tokens[of_bucket, None] + torch.arange(queries)).flatten()
        slots = req_to_token[rows[of_bucket], :keys]
        n_shared = _n_shared(slots[:, : keys - queries]) if keys > _TOLD_APART else 0
        shared = slots[0, :n_shared] if n_shared else None
        planned.append(Bucket(len(indices), queries, keys, slots[:, n_shared:].flatten(), tokens, shared))
    return planned


def _n_shared(slots: torch.Tensor) -> int:
    """Tokens at the beginning of all rows that are worth reading once; int32 [n_rows, n_cached]."""
    n_rows, n_cached = slots.shape
    if (n_rows - 1) * n_cached < _SHARED_READS:
        return 0
    differs = (slots != slots[0]).any(0)
    common = int(differs.int().argmax()) if bool(differs.any()) else n_cached
    return common if (n_rows - 1) * common >= _SHARED_READS else 0


class TorchCpuAttention(AttentionBackend):
    """SGLang's attention interface on buckets. One instance per model; both models share the rows."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: MHATokenToKVPool) -> None:
        super().__init__()
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        self.forward_metadata: list[Bucket | ShortRows] = []
        self._kv: dict[int, tuple[Buffer, Buffer]] = {}
        self._padded = False
        self._short = 0
        if token_to_kv_pool.dtype in kernels.DTYPES and token_to_kv_pool.v_head_dim == token_to_kv_pool.head_dim:
            kernels.compile_kernels(token_to_kv_pool.dtype)
            self._short = _SHORT

    @classmethod
    def for_model(cls, model_runner: ModelRunner) -> TorchCpuAttention:
        """The backend of one loaded model.

        Raises:
            NotImplementedError: one sentence naming what the model's attention needs and this backend lacks.
        """
        pool = model_runner.token_to_kv_pool
        for problem in unsupported(model_runner.model, pool, model_runner.dtype):
            raise NotImplementedError(
                f"{model_runner.model_config.model_path} cannot run on the torch CPU platform: {problem}"
            )
        return cls(model_runner.req_to_token_pool, pool)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one forward over all layers."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = []
            return
        shapes = _shapes(forward_batch)
        self._padded = sum(shapes.n_queries) < shapes.n_tokens
        self.forward_metadata = plan(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            shapes,
            _requests(forward_batch),
            self._short,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            q: [n_tokens, n_heads * head_dim].
            k, v: [n_tokens, n_kv_heads, head_dim], written to the batch's slots first if `save_kv_cache`.
        Returns:
            [n_tokens, n_heads * head_dim]
        Raises:
            NotImplementedError: the model passes arguments that belong to another kind of attention.
        """
        if extras:
            raise NotImplementedError(f"the torch CPU platform has no attention with {', '.join(sorted(extras))}")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        queries = q.contiguous().view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(queries), layer.tp_q_head_num * layer.v_head_dim)
        self.attend(Buffer(queries), layer, Buffer(out))
        return out

    forward_decode = forward_extend

    def attend(self, queries: Buffer, layer: RadixAttention, out: Buffer) -> None:
        """Attention of one layer, whose KV is stored already, without SGLang's detours.

        Args:
            queries: [n_tokens, n_heads, head_dim].
            out: [n_tokens, n_heads * head_dim], overwritten.
        """
        if self._padded:
            out.tensor.zero_()
        keys, values = self.kv(layer.layer_id)
        for rows in self.forward_metadata:
            rows.attend(queries, keys, values, layer.scaling, out)

    def kv(self, layer_id: int) -> tuple[Buffer, Buffer]:
        """A layer's pools of keys and values, [n_slots, n_kv_heads, head_dim]. They stay where they are."""
        if layer_id not in self._kv:
            keys, values = self.token_to_kv_pool.get_kv_buffer(layer_id)
            self._kv[layer_id] = Buffer(keys), Buffer(values)
        return self._kv[layer_id]

    def support_triton(self) -> bool:
        return False


def _requests(forward_batch: ForwardBatch) -> list[str] | None:
    """The request of every row: a particle is named after it, `request#index`."""
    return None if forward_batch.rids is None else [rid.rpartition("#")[0] or rid for rid in forward_batch.rids]


def _shapes(forward_batch: ForwardBatch) -> Shapes:
    lengths = forward_batch.seq_lens.tolist()
    if forward_batch.forward_mode.is_decode():
        return Shapes.end_to_end([1] * len(lengths), lengths)
    if forward_batch.forward_mode.is_target_verify():
        # `seq_lens` ends before the block here, and no `extend_*` field is set.
        width = forward_batch.spec_info.draft_token_num
        # All rows take part with the widest one's block: what is behind their own is padding.
        widths = getattr(forward_batch.spec_info, "widths", None) or [width] * len(lengths)
        n_keys = [length + own for length, own in zip(lengths, widths, strict=True)]
        return Shapes(widths, n_keys, range(0, len(lengths) * width, width), len(lengths) * width)
    if forward_batch.extend_seq_lens is None:
        raise NotImplementedError(f"the torch CPU platform has no {forward_batch.forward_mode.name} forward")
    return Shapes.end_to_end(forward_batch.extend_seq_lens.tolist(), lengths)


def unsupported(model: torch.nn.Module, pool: Any, dtype: torch.dtype) -> Iterator[str]:
    """What a model of this dtype, with this KV pool, needs and buckets do not have."""
    if not isinstance(pool, MHATokenToKVPool):
        yield f"its KV pool is a {type(pool).__name__}, and only plain multi-head attention is supported"
        return
    if pool.dtype != dtype:
        yield f"its KV is stored as {pool.dtype}: leave --kv-cache-dtype out"
    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        if layer.logit_cap:
            yield "its attention caps logits"
        if layer.sliding_window_size > -1:
            yield "it has sliding-window attention"
        if layer.is_cross_attention:
            yield "it has cross-attention"
        if layer.attn_type != AttentionType.DECODER:
            yield f"its attention is of type {layer.attn_type.value}, not causal"
