"""Matrix products on the CPU with weights in oneDNN's own layout.

Torch's plain product reads the weights as they are, row by row, and rearranges them again in every call. Packed once,
a bfloat16 product costs about two thirds of it at a handful of tokens, a float32 one a fifth to a half
(docs/performance.md), and a block of tokens costs little more than one. Each weight is stored once, packed, except an
embedding that is also the output layer: looking up its rows needs the plain one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch.nn.parameter import Parameter

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)
_TOKENS = 64  # the batch that oneDNN chooses its layout for; the same one serves any


class PackedLinear(UnquantizedLinearMethod):
    """A linear layer whose `weight` is packed."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, layer.weight, bias)


class PackedHead(UnquantizedEmbeddingMethod):
    """An output layer. SGLang multiplies by `weight` itself where it knows the method by name; not here."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x.to(layer.packed.dtype), layer.packed, bias)


def product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias.

    Args:
        x: [..., n_in].
        packed: W, [n_out, n_in] in oneDNN's layout.
        bias: [n_out].
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def product_plus(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """x W^T + bias + other, rounded once. `other`: [..., n_out]; the rest as in :func:`product`."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, "add")
    return result


def pack(weight: torch.Tensor) -> torch.Tensor:
    """W [n_out, n_in] in oneDNN's layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
    return packed


def pack_model(model: torch.nn.Module) -> int:
    """Pack every linear layer of a loaded model, in place; returns how many."""
    if not torch.backends.mkldnn.is_available():
        logger.warning("this torch has no oneDNN: matrix products run several times slower")
        return 0
    linears = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    linears = [layer for layer in linears if _packable(layer, UnquantizedLinearMethod)]
    for layer in linears:
        layer.weight = Parameter(pack(layer.weight), requires_grad=False)
        layer.quant_method = PackedLinear()
    head: Any = getattr(model, "lm_head", None)
    if not _packable(head, UnquantizedEmbeddingMethod):
        return len(linears)
    head.packed = pack(head.weight)
    head.quant_method = PackedHead()
    if isinstance(head, ParallelLMHead):  # else it is the embedding
        head.weight = Parameter(head.packed, requires_grad=False)
    return len(linears) + 1


def _packable(layer: Any, method: type) -> bool:
    """Whether `layer` multiplies in this plain way by a matrix that oneDNN can pack."""
    if type(getattr(layer, "quant_method", None)) is not method:
        return False
    weight = layer.weight
    return weight.dtype in _DTYPES and weight.dim() == 2 and not weight.is_mkldnn and weight.device.type == "cpu"
