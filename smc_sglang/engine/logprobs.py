"""The target's log-probabilities of answer tokens, from the scoring pass, for requests that ask for them.

They are the model's own, before temperature, truncation, penalties and grammar. SGLang's result processing stores what
:func:`of_block` and :func:`of_first_tokens` compute in each row's `Req`; particles inherit it with their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import compute_spec_logprobs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Of a request's `logprob`: one entry per output token each, or none at all.
_LISTS = tuple(f"output_{what}_logprobs_{part}" for what in ("token", "top", "token_ids") for part in ("val", "idx"))


def use_the_models_own() -> None:
    """Let SGLang take log-probabilities before the temperature, in this process."""
    envs.SGLANG_RETURN_ORIGINAL_LOGPROB.set(True)


def of_block(batch: ScheduleBatch, logits_output: Any, tokens: torch.Tensor) -> None:
    """Add to `logits_output` what SGLang stores for a block.

    Args:
        logits_output: of the scoring pass; its logits are [n_rows * width, vocab].
        tokens: int64 [n_rows, width], as committed; what is below 0 has no meaning.
    """
    compute_spec_logprobs(batch, logits_output, tokens.clamp(min=0).reshape(-1), chain_stride=tokens.shape[1])


def of_first_tokens(batch: ScheduleBatch, logits_output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Add to `logits_output` what SGLang stores for the first of the tokens drawn after a prefill.

    Args:
        tokens: int64 [n_requests, n].
    Returns:
        Log-probabilities of all of them, float32 [n_requests, n].
    """
    compute_spec_logprobs(batch, logits_output, tokens[:, 0].contiguous(), chain_stride=1)
    logits_output.next_token_logprobs = logits_output.next_token_logprobs.squeeze(1)
    return logits_output.next_token_logits.float().log_softmax(-1).gather(1, tokens)


def inherit(req: Req, source: Req, start: int, end: int | None = None) -> None:
    """Let `req` continue, from its `start`-th token on, with what `source` has up to `end`."""
    if not req.return_logprob:
        return
    for name in _LISTS:
        getattr(req.logprob, name)[start:] = getattr(source.logprob, name)[start:end]
