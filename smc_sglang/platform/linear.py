"""Matrix products on the CPU with weights in oneDNN's own layout.

Torch's plain product reads the weights as they are, row by row, and rearranges them again in every call. Packed once,
a bfloat16 product costs about two thirds of it at a handful of tokens, a float32 one a fifth to a half
(docs/performance.md), and a block of tokens costs little more than one. Each weight is stored once, packed, except an
embedding that is also the output layer: looking up its rows needs the plain one.

A model that loads within :func:`int8_weights` has its matrices rounded to eight bits: half the memory to read at a
handful of tokens. That is for drafts only, whose law is whatever they are sampled from.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch.nn.parameter import Parameter

from smc_sglang.platform.machine import multiplies_bfloat16

logger = logging.getLogger(__name__)

_TOKENS = 64  # the batch that oneDNN chooses its layout for; the same one serves any
_as_int8: ContextVar[bool] = ContextVar("as_int8", default=False)
_steady: dict[tuple[Any, ...], int] = {}  # least tokens by shape and dtype


class PackedLinear(UnquantizedLinearMethod):
    """A linear layer whose `weight` is packed."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed: Matrix = layer.packed
        return packed.times(x, bias)


class PackedHead(UnquantizedEmbeddingMethod):
    """An output layer. SGLang multiplies by `weight` itself where it knows the method by name; not here."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed: Matrix = layer.packed
        return packed.times(x.to(packed.dtype), bias)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """W, [n_out, n_in], in oneDNN's own layout.

    A token's product is the same whatever else is in its batch, so one seed is one answer alone and in company: oneDNN
    sums a few tokens in another order than many, and a smaller batch is padded to the size where that ends.
    """

    weight: torch.Tensor
    least_tokens: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedMatrix:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
        return cls(packed, _least_tokens(packed))

    @staticmethod
    def dtypes() -> tuple[torch.dtype, ...]:
        """Of weights that oneDNN has a layout for on this CPU."""
        return (torch.float32, torch.bfloat16) if multiplies_bfloat16() else (torch.float32,)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias.

        Args:
            x: [n_tokens, n_in].
            bias: [n_out].
        """
        n_tokens = len(x)
        if n_tokens < self.least_tokens:
            return _times(self._padded(x), self.weight, bias)[:n_tokens]
        return _times(x, self.weight, bias)

    def times_plus(self, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        """x W^T + bias + other, rounded once. `other`: [n_tokens, n_out]; the rest as in :meth:`times`."""
        n_tokens = len(x)
        if n_tokens < self.least_tokens:
            return _times_plus(self._padded(x), self.weight, bias, self._padded(other))[:n_tokens]
        return _times_plus(x, self.weight, bias, other)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, self.least_tokens - len(x)))


@dataclass(frozen=True, eq=False)
class Int8Matrix:
    """W, [n_out, n_in], rounded: row i is scales[i] times whole numbers from -127 to 127. Else as `PackedMatrix`.

    Products are in bfloat16, whatever the model's dtype: in float32 torch's kernel takes ten times as long.
    """

    weight: torch.Tensor  # int8 [n_out, n_in]
    scales: torch.Tensor  # bfloat16 [n_out]
    dtype: torch.dtype
    least_tokens: int = 1

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Matrix:
        weight = weight.detach()
        # The scale is rounded first, so that the whole numbers fit the one that is used.
        scales = (weight.abs().amax(1).float() / 127).clamp(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
        steps = (weight.float() / scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
        return cls(steps.to(torch.int8), scales, weight.dtype)

    @staticmethod
    def dtypes() -> tuple[torch.dtype, ...]:
        """Of weights that can be rounded."""
        return torch.float32, torch.bfloat16

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = torch._weight_int8pack_mm(x.to(torch.bfloat16), self.weight, self.scales).to(self.dtype)
        return product if bias is None else product.add_(bias)

    def times_plus(self, x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        return self.times(x, bias).add_(other)


Matrix: TypeAlias = PackedMatrix | Int8Matrix


@contextmanager
def int8_weights() -> Iterator[None]:
    """Models that load inside have the matrices of their linear layers in eight bits; see :func:`pack_model`."""
    token = _as_int8.set(True)
    try:
        yield
    finally:
        _as_int8.reset(token)


def _times(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _times_plus(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, "add")
    return result


def _least_tokens(packed: torch.Tensor) -> int:
    """Tokens from which on a product no longer depends on their number; float32 or bfloat16 [n_out, n_in].

    One token alone is known to differ, in too few elements for a sample to show it. Larger numbers are tried: which
    way oneDNN goes is the machine's affair.
    """
    shape = (*packed.shape, packed.dtype)
    if shape not in _steady:
        x = torch.randn(_TOKENS, packed.shape[1], generator=torch.Generator().manual_seed(0)).to(packed.dtype)
        whole = _times(x, packed, None)
        least = 2
        for n_tokens in (2, 4, 8, 16, 32):
            if not torch.equal(_times(x[:n_tokens], packed, None), whole[:n_tokens]):
                least = 2 * n_tokens
        _steady[shape] = least
    return _steady[shape]


def pack_model(model: torch.nn.Module) -> int:
    """Pack every linear layer of a loaded model, in place; returns how many.

    Raises:
        ValueError: there is none, within :func:`int8_weights`.
    """
    if _as_int8.get():
        if not (n_packed := _pack(model, Int8Matrix)):
            raise ValueError("the draft has no plain linear layers in bfloat16 or float32 that could be rounded")
        return n_packed
    if not torch.backends.mkldnn.is_available():
        logger.warning("this torch has no oneDNN: matrix products run several times slower")
        return 0
    return _pack(model, PackedMatrix)


def _pack(model: torch.nn.Module, matrix: type[Matrix]) -> int:
    linears = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
    linears = [layer for layer in linears if _packable(layer, UnquantizedLinearMethod, matrix.dtypes())]
    for layer in linears:
        layer.packed = matrix.of(layer.weight)
        layer.weight = Parameter(layer.packed.weight, requires_grad=False)
        layer.quant_method = PackedLinear()
    head: Any = getattr(model, "lm_head", None)
    if not _packable(head, UnquantizedEmbeddingMethod, matrix.dtypes()):
        return len(linears)
    head.packed = matrix.of(head.weight)
    head.quant_method = PackedHead()
    if isinstance(head, ParallelLMHead):  # else it is the embedding
        head.weight = Parameter(head.packed.weight, requires_grad=False)
    return len(linears) + 1


def _packable(layer: Any, method: type, dtypes: Collection[torch.dtype]) -> bool:
    """Whether `layer` multiplies in this plain way by a matrix that can be packed."""
    if type(getattr(layer, "quant_method", None)) is not method:
        return False
    weight = layer.weight
    return weight.dim() == 2 and not weight.is_mkldnn and weight.device.type == "cpu" and weight.dtype in dtypes
