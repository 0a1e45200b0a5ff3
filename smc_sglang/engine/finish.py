"""Which token of a block finishes its row: on tensors where it can be known there, else by SGLang on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


def needs_host(req: Req) -> bool:
    """Whether only decoded text tells if `req` has finished."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def stop_ids(req: Req, sampling: SamplingParams) -> frozenset[int]:
    """Every token id that finishes `req` under `sampling`, by SGLang's rules (`Req._check_token_based_finish`)."""
    if sampling.ignore_eos and req.grammar is None:  # a grammar ends with EOS
        return frozenset()
    ids = set(sampling.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return frozenset(token for token in ids if token is not None)


def valid_lengths(
    tokens: torch.Tensor, lengths: torch.Tensor, stops: list[frozenset[int]], remaining: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each row that count, and whether the row finishes with the last of them.

    Args:
        tokens: int64 [n_rows, width].
        lengths: int64 [n_rows], committed tokens.
        stops: per row, the token ids that finish it.
        remaining: int64 [n_rows], tokens until the row's max_new_tokens.
    Returns:
        valid int64 [n_rows] and finished bool [n_rows].
    """
    width = tokens.shape[1]
    stopping = torch.zeros_like(tokens, dtype=torch.bool)
    for ids in set(stops):
        if not ids:
            continue
        rows = torch.tensor([own == ids for own in stops], device=tokens.device)
        found = torch.isin(tokens, torch.tensor(sorted(ids), device=tokens.device))
        stopping |= found & rows[:, None]
    committed = torch.arange(width, device=tokens.device) < lengths[:, None]
    stopping &= committed
    # argmax finds the first True; without one the whole block counts.
    through_stop = torch.where(stopping.any(dim=1), stopping.long().argmax(dim=1) + 1, lengths)
    valid = torch.minimum(through_stop, remaining)
    finished = stopping.any(dim=1) | (lengths >= remaining)
    return valid, finished
