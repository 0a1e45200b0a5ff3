"""Llama's decoder on the CPU, layer after layer in as few torch operators as there are.

SGLang's layers ask at every step which kernel, quantisation and parallel layout is in use. At a few tokens of a small
model that costs twice what the matrix products cost (docs/performance.md). A model that needs none of it runs here:
the same weights, KV pool and attention, the same arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaModel
from sglang.srt.runtime_context import get_parallel
from torch.nn.functional import rms_norm, silu

from smc_sglang.platform.attention import TorchCpuAttention
from smc_sglang.platform.linear import PackedLinear, PackedMatrix

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One decoder layer's weights."""

    attention: Any  # SGLang's RadixAttention
    attention_norm: torch.Tensor
    qkv: PackedMatrix
    qkv_bias: torch.Tensor | None
    output: PackedMatrix
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: PackedMatrix
    down: PackedMatrix

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention.attn,
            attention_norm=layer.input_layernorm.weight,
            qkv=attention.qkv_proj.packed,
            qkv_bias=attention.qkv_proj.bias,
            output=attention.o_proj.packed,
            output_bias=attention.o_proj.bias,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=mlp.gate_up_proj.packed,
            down=mlp.down_proj.packed,
        )


class LlamaDecoder:
    """Stands in for `LlamaModel.forward`."""

    def __init__(self, model: LlamaModel, original: Callable[..., Any]) -> None:
        first = model.layers[0]
        attention = first.self_attn
        self._model, self._original = model, original
        self._layers = [_Layer.of(layer) for layer in model.layers]
        self._n_heads, self._n_kv_heads = attention.num_heads, attention.num_kv_heads
        self._head_dim = attention.head_dim
        self._rotary = attention.rotary_emb
        self._eps = first.input_layernorm.variance_epsilon

    @classmethod
    def install(cls, model: torch.nn.Module) -> bool:
        """Let a loaded causal model run here if it can; returns whether it does."""
        inner: Any = getattr(model, "model", None)
        if type(inner) is not LlamaModel:
            return False
        if (reason := next(_special(inner), None)) is not None:
            logger.info("SGLang's own layers run: %s", reason)
            return False
        inner.forward = cls(inner, inner.forward)
        return True

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Hidden states after the last norm, [n_tokens, hidden_size]."""
        backend = get_attn_backend()
        if not isinstance(backend, TorchCpuAttention) or self._model.layers_to_capture:
            return self._original(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden = self._model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        cos, sin = (table[positions] for table in self._turns)
        shape, eps = hidden.shape[-1:], self._eps
        n_turned, half = self._n_heads + self._n_kv_heads, self._head_dim // 2
        slots = forward_batch.out_cache_loc
        for layer in self._layers:
            qkv = layer.qkv.times(rms_norm(hidden, shape, layer.attention_norm, eps), layer.qkv_bias)
            heads = qkv.unflatten(-1, (-1, self._head_dim))
            turned = heads[:, :n_turned]
            turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin)
            attended = backend.attend(
                layer.attention, turned[:, : self._n_heads], turned[:, self._n_heads :], heads[:, n_turned:], slots
            )
            hidden = layer.output.times_plus(attended, layer.output_bias, hidden)
            gate, up = layer.gate_up.times(rms_norm(hidden, shape, layer.mlp_norm, eps)).chunk(2, -1)
            hidden = layer.down.times_plus(silu(gate).mul_(up), None, hidden)
        return rms_norm(hidden, shape, self._model.norm.weight, eps)

    @cached_property
    def _turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary factors by position, [n_positions, 1, head_dim] each: x cos + (x rolled by half a head) sin.

        Made at the first pass: SGLang extends its table after a model is loaded.
        """
        cos, sin = self._rotary.cos_sin_cache.to(self._model.norm.weight.dtype).unsqueeze(1).chunk(2, -1)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _special(model: Any) -> Iterator[str]:
    """Why a Llama needs SGLang's own layers."""
    if get_parallel().tp_size > 1 or not model.pp_group.is_first_rank or not model.pp_group.is_last_rank:
        yield "it is split over several processes"
    norms = [model.norm]
    for layer in model.layers:
        if type(layer) is not LlamaDecoderLayer:
            yield f"its layers are {type(layer).__name__}"
            return
        attention, mlp = layer.self_attn, layer.mlp
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if type(linear.quant_method) is not PackedLinear:
                yield "its weights are not packed"
        rotary = attention.rotary_emb
        plain = type(rotary).forward_native is RotaryEmbedding.forward_native
        if not plain or not rotary.is_neox_style or rotary.rotary_dim != attention.head_dim:
            yield "it has rotary embeddings of another kind"
    for norm in norms:
        if type(norm) is not RMSNorm or norm.variance_size_override is not None or norm.fp32_residual:
            yield "it has norms of another kind"
        if norm.variance_epsilon != norms[0].variance_epsilon:
            yield "its norms differ"
