"""The matrix products of both models of a pair alone, ms by tokens: plain, packed, and with weights of eight bits.

python -m bench.products [--pair wide-0.66] [--tokens 1 4 9 36 72] [--runs 5]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.limit import Products
from bench.pairs import ensure_pair
from smc_sglang.platform.linear import Int8Matrix, PackedMatrix


@dataclass(frozen=True, eq=False)
class PlainMatrix:
    """W as it comes from a checkpoint."""

    weight: torch.Tensor

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="wide-0.66")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 9, 36, 72])
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    pair = ensure_pair(chosen.pair)
    table = Table("model", "weights", *map(str, chosen.tokens), title=f"{chosen.pair}: ms of the products of n tokens")
    for model, checkpoint in (("draft", pair.draft), ("target", pair.target)):
        kinds = {
            f"{str(dtype).removeprefix('torch.')}, {name}": Products(checkpoint, dtype, matrix)
            for dtype in (torch.bfloat16, torch.float32)
            for name, matrix in (("plain", PlainMatrix), ("packed", PackedMatrix.of), ("eight bits", Int8Matrix.of))
            if model == "draft" or (dtype == torch.bfloat16 and name != "eight bits")
            if name != "packed" or dtype in PackedMatrix.dtypes()
        }
        for kind, times in _alternating(kinds, chosen.tokens, chosen.runs).items():
            table.add_row(model, kind, *(f"{1e3 * statistics.median(own):.1f}" for own in times))
    Console(width=120).print(table)


def _alternating(kinds: dict[str, Products], tokens: list[int], runs: int) -> dict[str, list[list[float]]]:
    """Seconds by kind, number of tokens and run."""
    seconds: dict[str, list[list[float]]] = {kind: [[] for _ in tokens] for kind in kinds}
    for _ in range(runs):
        for place, n_tokens in enumerate(tokens):
            for kind, products in kinds.items():
                seconds[kind][place].append(products.seconds(n_tokens, runs=1))
    return seconds


if __name__ == "__main__":
    main()
