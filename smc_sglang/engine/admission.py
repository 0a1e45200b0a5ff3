"""The one place that refuses a request: whatever would be ignored or changed is answered with a 4xx instead.

Runs where SGLang validates requests (the tokenizer manager), so HTTP, the offline engine and plain SGLang servers
share it. A request that passes can still be too large for the server's KV pool: the coordinator says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from smc_sglang.config import SmcConfig, SmcParams
from smc_sglang.smc.rng import derive_seed

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

_SENT = "smc_sent"  # in the custom parameters that the answers share: how many of them were sent
_SAMPLING = {
    "beam_width": "beam search",
    "watermark": "watermarking",
}
_REQUEST_FLAGS = {
    "return_hidden_states": "return_hidden_states",
    "return_routed_experts": "return_routed_experts",
    "return_sampling_mask": "return_sampling_mask",
    "lora_path": "lora_path",
    "custom_logit_processor": "custom_logit_processor",
    "input_embeds": "input_embeds",
    "positional_embed_overrides": "positional_embed_overrides",
    "session_params": "session_params",
    "image_data": "image_data",
    "video_data": "video_data",
    "audio_data": "audio_data",
}


def check(request: Any, sampling: SamplingParams, input_ids: Sequence[int] | None) -> None:
    """Refuse what this version does not honour.

    Args:
        request: SGLang's `GenerateReqInput` (one request).
        sampling: its sampling parameters, normalised.
        input_ids: its prompt; SGLang's scheduler does not survive an empty one.
    Raises:
        ValueError: one sentence that names the field and what to do.
    """
    if input_ids is None or len(input_ids) == 0:
        raise ValueError("The prompt has no tokens")
    params = SmcParams.resolve((sampling.custom_params or {}).get("smc"), SmcConfig.current())
    for problem in (
        *_smc_problems(params, sampling),
        *_sampling_problems(sampling),
        *_request_problems(request),
    ):
        raise ValueError(problem)


def send_as_child(tokenized: Any) -> None:
    """Give each of a request's `n` answers its own seed.

    SGLang sends the same tokenised request `n` times, all with the same sampling parameters, after one that only
    prefills the prompt (max_new_tokens 0).

    Args:
        tokenized: SGLang's `TokenizedGenerateReqInput`, about to be sent to the scheduler.
    """
    shared = tokenized.sampling_params
    if shared.n == 1 or shared.max_new_tokens == 0 or shared.sampling_seed is None:
        return
    shared.custom_params = shared.custom_params or {}
    index = shared.custom_params.get(_SENT, 0)
    shared.custom_params[_SENT] = index + 1
    own = tokenized.sampling_params = copy.copy(shared)
    own.custom_params = {name: value for name, value in shared.custom_params.items() if name != _SENT}
    if index > 0:  # the first answer is the one that n = 1 gives
        own.sampling_seed = derive_seed(shared.sampling_seed, index)


def _smc_problems(params: SmcParams, sampling: SamplingParams) -> Iterator[str]:
    greedy = sampling.top_k == 1
    if params.power != 1.0 and (params.mode != "smc" or greedy):
        yield f"smc.power={params.power:g} needs mode 'smc' and a temperature above 0"
    if params.grammar_semantics == "global" and (params.mode != "smc" or greedy):
        yield "smc.grammar_semantics 'global' needs mode 'smc' and a temperature above 0"


def _sampling_problems(sampling: SamplingParams) -> Iterator[str]:
    for name, what in _SAMPLING.items():
        if getattr(sampling, name):
            yield f"{name} ({what}) is not supported yet: leave it out"


def _request_problems(request: Any) -> Iterator[str]:
    for attribute, name in _REQUEST_FLAGS.items():
        if getattr(request, attribute, None):
            yield f"{name} is not supported yet: leave it out"
