"""Which token of a block finishes a row, on tensors."""

from __future__ import annotations

import torch

from smc_sglang.engine.finish import valid_lengths

STOP = frozenset({0, 3})


def _valid(tokens: list[list[int]], lengths: list[int], stops: list[frozenset[int]], remaining: list[int]) -> tuple:
    valid, finished = valid_lengths(torch.tensor(tokens), torch.tensor(lengths), stops, torch.tensor(remaining))
    return valid.tolist(), finished.tolist()


def test_first_stop_token_counts_and_nothing_after_it() -> None:
    assert _valid([[5, 3, 0, 5]], [4], [STOP], [99]) == ([2], [True])


def test_padding_never_stops() -> None:
    assert _valid([[5, 5, 3, 0]], [2], [STOP], [99]) == ([2], [False])


def test_length_and_stop_in_one_block() -> None:
    assert _valid([[5, 5, 3, 5]], [4], [STOP], [2]) == ([2], [True])
    assert _valid([[5, 3, 5, 5]], [4], [STOP], [2]) == ([2], [True])
    assert _valid([[5, 5, 5, 5]], [4], [STOP], [4]) == ([4], [True])


def test_rows_have_their_own_stops() -> None:
    tokens = [[3, 1, 1], [3, 1, 1], [3, 7, 1]]
    stops = [STOP, frozenset(), frozenset({7})]
    assert _valid(tokens, [3, 3, 3], stops, [9, 9, 9]) == ([1, 3, 2], [True, False, True])
