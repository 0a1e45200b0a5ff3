"""Each request's sampling parameters, as the density of its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from smc_sglang.engine.finish import stop_ids
from smc_sglang.engine.grammar import GrammarMasks
from smc_sglang.engine.group import Particle, ParticleGroup, role
from smc_sglang.smc.densities import ALL_TOKENS, Bias, Density, MinLength, Penalties, Shaper, Truncation

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

BAN = -100.0  # OpenAI's logit_bias from which on a token can never be chosen


def sampling_of(req: Req) -> SamplingParams:
    """What the client asked for; a parent's own parameters are its population's while it is queued."""
    own = role(req)
    return own.client_params if isinstance(own, ParticleGroup) else req.sampling_params


def grammar_of(req: Req) -> Any:
    """The grammar whose state is after `req`'s output tokens; None without one."""
    own = role(req)
    return own.grammar if isinstance(own, ParticleGroup) and own.grammar is not None else req.grammar


def density_of(reqs: Sequence[Req], draft_lengths: Sequence[int], vocab_size: int, device: Any) -> Density:
    """The rows' density; parts that no row needs are left out.

    Args:
        draft_lengths: of each row in the block at hand.
        vocab_size: width of the logits.
    """
    sampling = [sampling_of(req) for req in reqs]
    shapers = (
        _penalties(reqs, sampling, vocab_size, device),
        _min_length(reqs, sampling, vocab_size, device),
        _bias(sampling, vocab_size, device),
    )
    return Density(
        temperatures=torch.tensor([own.temperature for own in sampling], dtype=torch.float32, device=device),
        truncation=_truncation(sampling, device),
        shapers=tuple(shaper for shaper in shapers if shaper is not None),
        masks=GrammarMasks.of(
            [grammar_of(req) for req in reqs], [req.output_ids for req in reqs], draft_lengths, vocab_size, device
        ),
        is_global=_is_global(reqs, device),
    )


def _is_global(reqs: Sequence[Req], device: Any) -> torch.Tensor | None:
    def is_global(req: Req) -> bool:
        own = role(req)
        group = own.group if isinstance(own, Particle) else own
        return (
            isinstance(group, ParticleGroup)
            and group.params.mode == "smc"
            and group.params.grammar_semantics == "global"
            and grammar_of(req) is not None
        )

    rows = [is_global(req) for req in reqs]
    return torch.tensor(rows, device=device) if any(rows) else None


def _truncation(sampling: list[SamplingParams], device: Any) -> Truncation | None:
    # Greedy rows (top_k 1) take the argmax: nothing to truncate.
    greedy = [own.top_k == 1 for own in sampling]
    top_ks = [ALL_TOKENS if one else min(own.top_k, ALL_TOKENS) for one, own in zip(greedy, sampling, strict=True)]
    top_ps = [1.0 if one else own.top_p for one, own in zip(greedy, sampling, strict=True)]
    min_ps = [0.0 if one else own.min_p for one, own in zip(greedy, sampling, strict=True)]
    if min(top_ks) == ALL_TOKENS and min(top_ps) == 1.0 and max(min_ps) == 0.0:
        return None
    return Truncation(
        top_ks=torch.tensor(top_ks, dtype=torch.int64, device=device),
        top_ps=torch.tensor(top_ps, dtype=torch.float32, device=device),
        min_ps=torch.tensor(min_ps, dtype=torch.float32, device=device),
    )


def _penalties(reqs: Sequence[Req], sampling: list[SamplingParams], vocab_size: int, device: Any) -> Shaper | None:
    def penalised(own: SamplingParams) -> bool:
        return bool(own.frequency_penalty or own.presence_penalty or own.repetition_penalty != 1.0)

    if not any(penalised(own) for own in sampling):
        return None
    counts = torch.zeros(len(reqs), vocab_size)
    for row, (req, own) in enumerate(zip(reqs, sampling, strict=True)):
        if penalised(own) and req.output_ids:
            counts[row] = torch.bincount(torch.tensor(req.output_ids), minlength=vocab_size)

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(own, name) for own in sampling], dtype=torch.float32, device=device)

    return Penalties(
        counts.to(device), column("frequency_penalty"), column("presence_penalty"), column("repetition_penalty")
    )


def _min_length(reqs: Sequence[Req], sampling: list[SamplingParams], vocab_size: int, device: Any) -> Shaper | None:
    missing = [max(own.min_new_tokens - len(req.output_ids), 0) for req, own in zip(reqs, sampling, strict=True)]
    if not any(missing):
        return None
    stops = torch.zeros(len(reqs), vocab_size, dtype=torch.bool)
    for row, (req, own) in enumerate(zip(reqs, sampling, strict=True)):
        if missing[row]:
            stops[row, [token for token in stop_ids(req, own) if token < vocab_size]] = True
    return MinLength(torch.tensor(missing, device=device), stops.to(device))


def _bias(sampling: list[SamplingParams], vocab_size: int, device: Any) -> Shaper | None:
    if not any(own.logit_bias for own in sampling):
        return None
    bias = torch.zeros(len(sampling), vocab_size)
    for row, own in enumerate(sampling):
        for token, value in (own.logit_bias or {}).items():
            bias[row, int(token)] = -torch.inf if value <= BAN else value
    return Bias(bias.to(device))
