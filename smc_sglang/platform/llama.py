"""Llama's decoder on the CPU: per layer four matrix products, and five compiled loops for what is between them.

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
from numpy.typing import NDArray
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaModel
from sglang.srt.runtime_context import get_parallel

from smc_sglang.platform import kernels
from smc_sglang.platform.attention import TorchCpuAttention
from smc_sglang.platform.kernels import Buffer, array
from smc_sglang.platform.linear import Matrix, PackedLinear

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One decoder layer's weights."""

    attention: Any  # SGLang's RadixAttention
    attention_norm: NDArray[Any]
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    mlp_norm: NDArray[Any]
    gate_up: Matrix
    down: Matrix

    @property
    def least_tokens(self) -> int:
        """Tokens from which on no product pads its input."""
        return max(matrix.least_tokens for matrix in (self.qkv, self.output, self.gate_up, self.down))

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            attention=attention.attn,
            attention_norm=array(layer.input_layernorm.weight.detach()),
            qkv=attention.qkv_proj.packed,
            qkv_bias=attention.qkv_proj.bias,
            output=attention.o_proj.packed,
            output_bias=attention.o_proj.bias,
            mlp_norm=array(layer.post_attention_layernorm.weight.detach()),
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
        self._norm = array(model.norm.weight.detach())
        self._least_tokens = max(layer.least_tokens for layer in self._layers)
        self._inner = model.config.intermediate_size
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
        n_tokens, eps, cos_sin = len(hidden), self._eps, self._cos_sin
        # Matrix products want some tokens more; nobody looks at what becomes of them.
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, max(0, self._least_tokens - n_tokens)))
        normed, gated = Buffer(hidden.new_empty(hidden.shape)), Buffer(hidden.new_empty(len(hidden), self._inner))
        queries = Buffer(hidden.new_empty(n_tokens, self._n_heads, self._head_dim))
        attended = hidden.new_zeros(len(hidden), self._n_heads * self._head_dim)
        of_tokens = Buffer(attended[:n_tokens])
        places = array(positions), array(forward_batch.out_cache_loc)
        for layer in self._layers:
            kernels.norm(array(hidden), layer.attention_norm, eps, normed.array)
            qkv = layer.qkv.times(normed.tensor, layer.qkv_bias)
            keys, values = backend.kv(layer.attention.layer_id)
            kernels.turn(array(qkv), cos_sin, *places, queries.array, keys.array, values.array)
            backend.attend(queries, layer.attention, of_tokens)
            hidden = layer.output.times_plus(attended, layer.output_bias, hidden)
            kernels.norm(array(hidden), layer.mlp_norm, eps, normed.array)
            kernels.gate(array(layer.gate_up.times(normed.tensor)), gated.array)
            hidden = layer.down.times_plus(gated.tensor, None, hidden)
        kernels.norm(array(hidden), self._norm, eps, normed.array)
        return normed.tensor[:n_tokens]

    @cached_property
    def _cos_sin(self) -> NDArray[Any]:
        """Cosines and sines by position, float32 [n_positions, head_dim].

        Made at the first pass: SGLang extends its table after a model is loaded.
        """
        return array(self._rotary.cos_sin_cache.float().contiguous())


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
