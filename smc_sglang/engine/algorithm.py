"""The speculative algorithm `SMC`, as SGLang's registry sees it: its server arguments and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from smc_sglang.config import SmcConfig
from smc_sglang.engine import hooks
from smc_sglang.platform import plugin as torch_cpu_platform

DEFAULT_RUNNING_REQUESTS = 64  # rows, each one particle

# Server arguments that change what happens to KV, batches or prompts in ways that groups of particles do not know.
_REFUSED = {
    "disable_radix_cache": "particles share their prompt's KV through the radix tree",
    "enable_hierarchical_cache": "host copies of particle branches are not implemented",
    "enable_lmcache": "external KV caches hold one model's KV, particles need both",
    "enable_flexkv": "external KV caches hold one model's KV, particles need both",
    "enable_unified_cache_external_linker": "external KV caches hold one model's KV, particles need both",
    "enable_hisparse": "sparse KV offloading is not implemented for particles",
    "enable_mixed_chunk": "prefill and decode rows cannot share a pass",
    "enable_lora": "the draft has no adapters: log q would be another model's",
    "enable_dp_attention": "groups cannot be split over attention ranks",
    "enable_pdmux": "prefill multiplexing is not implemented for particles",
    "enable_two_batch_overlap": "a group cannot be split over two batches",
    "enable_session_radix_cache": "sessions hold single requests' KV, not a group's",
    "enable_streaming_session": "sessions hold single requests' KV, not a group's",
    "strip_thinking_cache": "finished particles leave their whole path in the tree",
    "speculative_adaptive": "the draft length is a request's own (smc.draft_length)",
    "dllm_algorithm": "diffusion models do not draft token by token",
}


class SmcAlgorithm(CustomSpecAlgo):
    """What SGLang asks a speculative algorithm; the rest is `CustomSpecAlgo`'s defaults."""

    def is_standalone(self) -> bool:
        """A separate draft model: the KV pool is then sized for both models."""
        return True

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Check the server's arguments and fill in what follows from the draft length.

        Raises:
            RuntimeError: another SGLang version, or a hook that did not apply.
            ValueError: one sentence naming the argument and why.
        """
        hooks.require()
        for problem in _problems(server_args):
            raise ValueError(problem)
        config = _resolve_config(server_args)
        if config.draft_int8 and torch_cpu_platform.activate() is None:
            raise ValueError("--draft-int8 is for the torch CPU platform only: leave it out")
        server_args.speculative_num_steps = config.longest_draft
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = config.longest_draft + 1
        server_args.page_size = 1
        # The two halves of a cycle run one after the other for now.
        server_args.disable_overlap_schedule = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = max(DEFAULT_RUNNING_REQUESTS, config.max_particles)
        elif server_args.max_running_requests < config.n_particles:
            raise ValueError(
                f"--max-running-requests {server_args.max_running_requests} is below n_particles={config.n_particles}: "
                "each particle is one running request"
            )
        if server_args.attention_backend is None and server_args.device == "cuda":
            server_args.attention_backend = "flashinfer"
        _check_vocabularies(server_args)


def register() -> None:
    """Register the algorithm under the name that --speculative-algorithm takes."""

    @SpeculativeAlgorithm.register(hooks.ALGORITHM, supports_overlap=False, spec_class=SmcAlgorithm)
    def _worker(_: Any) -> type:
        hooks.require()  # the scheduler's own process
        from smc_sglang.engine.worker import SmcWorker

        return SmcWorker


def _problems(server_args: Any) -> Iterator[str]:
    if not server_args.speculative_draft_model_path:
        yield "--speculative-algorithm SMC needs --speculative-draft-model-path"
    if server_args.page_size not in (None, 1):
        yield f"--page-size {server_args.page_size} is not supported: particles share KV token by token, use 1"
    if server_args.disaggregation_mode != "null":
        yield f"--disaggregation-mode {server_args.disaggregation_mode} is not supported: leave it out"
    if server_args.enable_priority_scheduling and not server_args.disable_priority_preemption:
        yield (
            "priority preemption would retract single particles of a group: add --disable-priority-preemption "
            "to --enable-priority-scheduling"
        )
    if server_args.grammar_backend == "outlines":
        yield "--grammar-backend outlines cannot look ahead along a draft: use xgrammar (the default) or llguidance"
    for name in ("pp_size", "attn_cp_size", "dcp_size"):
        if getattr(server_args, name, 1) > 1:
            yield f"--{name.replace('_', '-')} {getattr(server_args, name)} is not supported: use 1"
    for name, reason in _REFUSED.items():
        if getattr(server_args, name, None):
            yield f"--{name.replace('_', '-')} is not supported with --speculative-algorithm SMC: {reason}"


def _resolve_config(server_args: Any) -> SmcConfig:
    """The server's SmcConfig: exported by our CLI or Engine, or made from SGLang's own arguments."""
    steps = server_args.speculative_num_steps
    config = SmcConfig.current()
    if steps is not None and steps != config.longest_draft:
        if SmcConfig.is_exported():
            raise ValueError(
                f"--speculative-num-steps {steps} contradicts draft_length={config.longest_draft}: leave it out"
            )
        config = SmcConfig(draft_length=steps)
    config.export()
    return config


def _check_vocabularies(server_args: Any) -> None:
    """Refuse a draft whose tokens mean something else than the target's.

    Padding behind the tokenizer's ids may differ: such ids are nobody's tokens, and the worker cuts them off.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

    target, draft = server_args.model_path, server_args.speculative_draft_model_path
    trust = server_args.trust_remote_code
    sizes = [get_config(path, trust_remote_code=trust).get_text_config().vocab_size for path in (target, draft)]
    comparable = not server_args.skip_tokenizer_init and _has_tokenizer(draft)
    vocabularies = []
    if comparable:
        vocabularies = [get_tokenizer(path, trust_remote_code=trust).get_vocab() for path in (target, draft)]
    only_padded = comparable and max(vocabularies[0].values()) < min(sizes)
    if sizes[0] != sizes[1] and not only_padded:
        raise ValueError(
            f"the draft {draft} has a vocabulary of {sizes[1]} tokens and the target {target} one of {sizes[0]}: "
            "they must be the same"
        )
    if not comparable:
        return
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"the tokenizer of the draft {draft} maps tokens to other ids than that of the target {target}: "
            "they must be the same"
        )


def _has_tokenizer(path: str) -> bool:
    """False only for a local checkpoint without tokenizer files, which uses the target's."""
    return not os.path.isdir(path) or any("token" in name for name in os.listdir(path))
