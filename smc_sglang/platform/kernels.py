"""The decoder's small operators as compiled loops: one call each, where torch takes some 25 operators per layer.

At a few tokens a torch operator is its launch: a norm takes 15 us in torch and 1 here. Every kernel runs on the
calling thread, row after row, so a token's result does not depend on what else is in its batch. Sums are in float32,
and a result is rounded once. Numba compiles them for the CPU at hand when a model is loaded, and keeps them on disk.

The arrays are numpy's views of tensors (:func:`array`): contiguous, and for bfloat16, which numpy has no type for, of
its bits. `Element` arrays are of the model's dtype, all of one call of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

DTYPES = (torch.bfloat16, torch.float32)

Element: TypeAlias = np.uint16 | np.float32  # bfloat16's bits, or float32

# No flag that would drop a NaN or an infinity.
_FLAGS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}


def array(tensor: torch.Tensor) -> NDArray[Any]:
    """A contiguous tensor's memory as kernels take it."""
    assert tensor.is_contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass(eq=False)
class Buffer:
    """A contiguous tensor that is used many times; its array is made once."""

    tensor: torch.Tensor

    @cached_property
    def array(self) -> NDArray[Any]:
        return array(self.tensor)


def compile_kernels(dtype: torch.dtype) -> None:
    """Have all kernels ready for one of :data:`DTYPES`: about three seconds the first time on a machine."""
    x = array(torch.zeros(1, 2, dtype=dtype))
    pool, whole = x.reshape(1, 1, 2), np.zeros(1, np.int64)
    norm(x, x[0], 1e-6, x)
    turn(x.repeat(3, 1), np.zeros((1, 2), np.float32), whole, whole, pool, pool, pool)
    attend(pool, pool, pool, whole.astype(np.int32), whole + 1, whole, 1.0, x)
    gate(x.repeat(2, 1), x)


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(cache=True, **_FLAGS)(function)
    except RuntimeError:  # no folder of this machine can be written to
        return njit(**_FLAGS)(function)


@_kernel
def norm(x: NDArray[Element], weight: NDArray[Element], eps: float, out: NDArray[Element]) -> None:
    """x / rms(x) * weight, row by row; x, out: [n_tokens, width], weight: [width]."""
    n_tokens, width = x.shape
    for i in range(n_tokens):
        squares = np.float32(0)
        for j in range(width):
            squares += _widen(x[i, j]) * _widen(x[i, j])
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for j in range(width):
            _store(out, (i, j), _widen(x[i, j]) * scale * _widen(weight[j]))


@_kernel
def turn(
    qkv: NDArray[Element],
    cos_sin: NDArray[np.float32],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    queries: NDArray[Element],
    keys: NDArray[Element],
    values: NDArray[Element],
) -> None:
    """Turn queries and keys by their positions (rotary embedding in halves) and store the tokens' KV.

    Args:
        qkv: [n_tokens, (n_heads + 2 n_kv_heads) * head_dim], queries, keys and values side by side.
        cos_sin: [n_positions, head_dim], half of it cosines.
        positions, slots: [n_tokens].
        queries: [n_tokens, n_heads, head_dim], overwritten.
        keys, values: a layer's pools, [n_slots, n_kv_heads, head_dim].
    """
    n_tokens, n_heads, head_dim = queries.shape
    n_kv_heads, half = keys.shape[1], head_dim // 2
    for i in range(n_tokens):
        heads = qkv[i].reshape(n_heads + 2 * n_kv_heads, head_dim)
        cos, sin = cos_sin[positions[i], :half], cos_sin[positions[i], half:]
        for head in range(n_heads):
            _turn_head(heads[head], cos, sin, queries[i, head])
        for head in range(n_kv_heads):
            _turn_head(heads[n_heads + head], cos, sin, keys[slots[i], head])
        values[slots[i]] = heads[n_heads + n_kv_heads :]


@_kernel
def attend(
    queries: NDArray[Element],
    keys: NDArray[Element],
    values: NDArray[Element],
    slots: NDArray[np.int32],
    lengths: NDArray[np.int64],
    tokens: NDArray[np.int64],
    scaling: float,
    out: NDArray[Element],
) -> None:
    """Attention of one token per row to all that its row holds.

    Args:
        queries: [n_tokens, n_heads, head_dim].
        keys, values: a layer's pools, [n_slots, n_kv_heads, head_dim].
        slots: [sum(lengths)], the KV slots of row after row.
        lengths: [n_rows], KV tokens of each row, at least 1.
        tokens: [n_rows], each row's token in the batch.
        out: [n_tokens, n_heads * head_dim]; these tokens are overwritten.
    """
    _, n_heads, head_dim = queries.shape
    n_kv_heads = keys.shape[1]
    fold = n_heads // n_kv_heads
    query = np.empty((n_heads, head_dim), np.float32)
    total = np.empty((n_heads, head_dim), np.float32)
    weights = np.empty((n_heads, lengths.max()), np.float32)
    start = 0
    for row in range(len(lengths)):
        of_row, token = slots[start : start + lengths[row]], tokens[row]
        start += lengths[row]
        for head in range(n_heads):
            for d in range(head_dim):
                query[head, d] = _widen(queries[token, head, d]) * np.float32(scaling)
                total[head, d] = np.float32(0)
        for j in range(len(of_row)):
            for kv_head in range(n_kv_heads):
                key = keys[of_row[j], kv_head]
                for head in range(kv_head * fold, (kv_head + 1) * fold):
                    score = np.float32(0)
                    for d in range(head_dim):
                        score += query[head, d] * _widen(key[d])
                    weights[head, j] = score
        for head in range(n_heads):
            _softmax(weights[head, : len(of_row)])
        for j in range(len(of_row)):
            for kv_head in range(n_kv_heads):
                value = values[of_row[j], kv_head]
                for head in range(kv_head * fold, (kv_head + 1) * fold):
                    for d in range(head_dim):
                        total[head, d] += weights[head, j] * _widen(value[d])
        for head in range(n_heads):
            for d in range(head_dim):
                _store(out, (token, head * head_dim + d), total[head, d])


@_kernel
def gate(gate_up: NDArray[Element], out: NDArray[Element]) -> None:
    """silu(gate) * up; gate_up: [n_tokens, 2 * width], out: [n_tokens, width]."""
    n_tokens, width = out.shape
    for i in range(n_tokens):
        for j in range(width):
            x = _widen(gate_up[i, j])
            _store(out, (i, j), x / (np.float32(1) + _exp(-x)) * _widen(gate_up[i, width + j]))


# -- inside kernels ------------------------------------------------------------------------------------------


def _widen(x: Any) -> Any:
    """An element in float32."""


@overload(_widen, inline="always")
def _choose_widen(x: Any) -> Any:
    def same(x: Any) -> Any:
        return x

    def of_bits(x: Any) -> Any:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    return same if x == types.float32 else of_bits


def _store(out: Any, index: Any, x: Any) -> None:
    """Set an element from float32: to the nearest, ties to even."""


@overload(_store, inline="always")
def _choose_store(out: Any, index: Any, x: Any) -> Any:
    def same(out: Any, index: Any, x: Any) -> None:
        out[index] = x

    def as_bits(out: Any, index: Any, x: Any) -> None:
        bits = np.float32(x).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        out[index] = np.uint16(np.uint32(bits + odd + np.uint32(0x7FFF)) >> np.uint32(16))

    return same if out.dtype == types.float32 else as_bits


@njit(**_FLAGS)
def _turn_head(head: Any, cos: Any, sin: Any, out: Any) -> None:
    half = len(cos)
    for d in range(half):
        first, second = _widen(head[d]), _widen(head[half + d])
        _store(out, d, first * cos[d] - second * sin[d])
        _store(out, half + d, second * cos[d] + first * sin[d])


@njit(inline="always", **_FLAGS)
def _softmax(x: Any) -> None:
    highest = x[0]
    for j in range(1, len(x)):
        highest = max(highest, x[j])
    mass = np.float32(0)
    for j in range(len(x)):
        x[j] = _exp(x[j] - highest)
        mass += x[j]
    for j in range(len(x)):
        x[j] /= mass


@njit(inline="always", **_FLAGS)
def _exp(x: Any) -> Any:
    """e^x in float32, to about one unit in the last place, as arithmetic that vectorises: 2^n e^r, n whole, with e^r a
    polynomial (Cephes' expf). Below the least normal number it stays there; NaN is NaN."""
    within = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = np.floor(within * np.float32(1.44269504) + np.float32(0.5))
    r = within - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    result = (p * r * r + r + np.float32(1)) * power
    return result if x == x else x
