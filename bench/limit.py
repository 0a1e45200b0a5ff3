"""The cost model's limit: what a cycle would take if nothing but the matrix products of both models cost time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig

from smc_sglang.platform.linear import PackedMatrix


class Matrix(Protocol):
    """A weight matrix W, however it is stored."""

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T."""


class Products:
    """A model's matrix products on random weights."""

    def __init__(
        self, checkpoint: Path, dtype: torch.dtype, matrix: Callable[[torch.Tensor], Matrix] = PackedMatrix.of
    ) -> None:
        config = AutoConfig.from_pretrained(checkpoint)
        hidden, inner = config.hidden_size, config.intermediate_size
        head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        layer = [(hidden, queries + 2 * kv), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
        shapes = layer * config.num_hidden_layers + [(hidden, config.vocab_size)]
        self._dtype = dtype
        self._matrices = [(n_in, matrix(torch.randn(n_out, n_in).mul_(0.02).to(dtype))) for n_in, n_out in shapes]

    def seconds(self, n_tokens: int, runs: int = 3) -> float:
        """Median time of one pass over `n_tokens` tokens."""
        inputs = {n_in: torch.randn(n_tokens, n_in).to(self._dtype) for n_in, _ in self._matrices}
        times = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            for n_in, matrix in self._matrices:
                matrix.times(inputs[n_in])
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


class Limit:
    """Tokens per second that a pair could reach at most, by N and K."""

    def __init__(self, target: Products, draft: Products) -> None:
        self._models = {"target": target, "draft": draft}
        self._seconds: dict[tuple[str, int], list[float]] = {}

    def measure(self, settings: list[tuple[int, int]]) -> None:
        """Time what these (N, K) need, once more; the median of all calls counts."""
        wanted = {("target", 1)}
        for n, k in settings:
            wanted |= {("target", n * (k + 1)), ("draft", n)}
        for model, n_tokens in sorted(wanted):
            self._seconds.setdefault((model, n_tokens), []).append(self._models[model].seconds(n_tokens))

    def pass_seconds(self, model: str, n_tokens: int) -> float:
        return statistics.median(self._seconds[model, n_tokens])

    @property
    def products_ms(self) -> dict[str, float]:
        """Every pass that was timed, by model and tokens."""
        return {f"{model} {tokens}": 1e3 * self.pass_seconds(model, tokens) for model, tokens in sorted(self._seconds)}

    def off(self) -> float:
        """One token at a time."""
        return 1 / self.pass_seconds("target", 1)

    def smc(self, n: int, k: int) -> float:
        """K draft passes and one scoring pass give K + 1 tokens."""
        return (k + 1) / (self.pass_seconds("target", n * (k + 1)) + k * self.pass_seconds("draft", n))
