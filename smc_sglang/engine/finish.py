"""Which token of a block finishes its row: on tensors where it can be known there, else by SGLang on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams


def needs_host(req: Req) -> bool:
    """Whether only decoded text tells if `req` has finished."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def finish_at_first(original: Callable[[Req, int], None], req: Req, new_accepted_len: int = 1) -> None:
    """Hook on `Req.update_finish_state`: a block finishes where it would have finished token by token.

    SGLang looks for one condition after another in the whole block (stop strings in their order, then stop tokens):
    the one that it finds first need not be the one that is met first.
    """
    as_it_is = req.finished() or req.to_finish or new_accepted_len == 1 or not needs_host(req)
    original(req, new_accepted_len)
    if as_it_is or not req.finished():
        return
    tokens, reason, length = req.output_ids, req.finished_reason, req.finished_len
    grammar, req.grammar = req.grammar, None  # it has accepted the whole block and cannot judge a part
    try:
        for n in range(len(tokens) - new_accepted_len + 1, length or len(tokens)):
            req.finished_reason, req.finished_len, req.output_ids = None, None, tokens[:n]
            original(req, 1)
            if req.finished():
                return
        req.finished_reason, req.finished_len = reason, length
    finally:
        req.output_ids, req.grammar = tokens, grammar


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
