"""Everything that is touched in SGLang, in one table, each row with its reason.

SGLang only logs a hook that fails to apply and goes on without it, so :func:`verify` compares the table with what
was really patched, and the server does not start otherwise. Seams that need no patch (the speculative algorithm,
the platform, the attention backend) are registered in :mod:`smc_sglang.engine.plugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from smc_sglang.engine.finish import finish_at_first
from smc_sglang.engine.parsers import parse_json_array, parse_reasoning, parse_tool_calls
from smc_sglang.hook import Hook

SUPPORTED_SGLANG = "0.5.23"
ALGORITHM = "SMC"  # the name that --speculative-algorithm takes

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def hooks() -> tuple[Hook, ...]:
    """The hooks of this process: the engine's, and the torch CPU platform's where that is active."""
    from smc_sglang.platform.hooks import HOOKS as cpu_hooks
    from smc_sglang.platform.plugin import activate as cpu_platform

    return _ENGINE_HOOKS + (cpu_hooks if cpu_platform() else ())


def register() -> None:
    """Hand the table to SGLang, which applies it when all plugins are loaded."""
    for hook in hooks():
        HookRegistry.register(hook.target, hook.function, hook.kind)


def verify() -> list[str]:
    """What is wrong with this process: one sentence per problem, none if all is well."""
    installed = version("sglang")
    if installed != SUPPORTED_SGLANG:
        return [
            f"smc-sglang works with sglang {SUPPORTED_SGLANG}, and {installed} is installed: "
            f"pip install sglang=={SUPPORTED_SGLANG}"
        ]
    return [
        f"SGLang did not apply the hook on {hook.target} ({hook.reason}): its log says why"
        for hook in hooks()
        if hook.target not in HookRegistry._patched
    ]


def require() -> None:
    """Raise RuntimeError with every problem that :func:`verify` finds."""
    if problems := verify():
        raise RuntimeError("; ".join(problems))


# -- scheduler process --------------------------------------------------------------------------------------------


def _attach_coordinator(_: None, scheduler: Any) -> None:
    from smc_sglang.engine.coordinator import Coordinator

    if _runs_smc(scheduler.server_args):
        scheduler.smc = Coordinator(scheduler)


def _enlist(_: None, scheduler: Any, req: Any) -> None:
    if (coordinator := getattr(scheduler, "smc", None)) is not None:
        coordinator.enlist(req)


def _commit(_: None, scheduler: Any, batch: Any, result: Any) -> None:
    if (coordinator := getattr(scheduler, "smc", None)) is not None:
        coordinator.commit(batch, result)


def _prefill_adder(original: type, scheduler: Any) -> type:
    from smc_sglang.engine.prefill import for_coordinator

    coordinator = getattr(scheduler, "smc", None)
    return original if coordinator is None else for_coordinator(coordinator)


def _output_streamer(original: type, scheduler: Any) -> type:
    from smc_sglang.engine.streamer import SmcOutputStreamer

    return SmcOutputStreamer if _runs_smc(scheduler.server_args) else original


def _retract(original: Callable[[Any], Any], batch: Any) -> Any:
    from smc_sglang.engine.group import Particle, role

    group = next((own.group for req in batch.reqs if isinstance(own := role(req), Particle)), None)
    return original(batch) if group is None else group.coordinator.retract(original, batch)


def _pause(original: Callable[..., None], scheduler: Any, request: Any) -> None:
    coordinator = getattr(scheduler, "smc", None)
    if coordinator is None or request.mode != "retract":
        return original(scheduler, request)
    parents = coordinator.withdraw_all(scheduler.running_batch)
    original(scheduler, request)
    for parent in parents:
        scheduler._add_request_to_queue(parent, is_retracted=True)
    return None


def _block_lengths(
    original: Callable[..., Any], reqs: list[Any], *, reserve: int, page_size: int
) -> tuple[list[int], list[int], int]:
    from smc_sglang.engine.group import block_width

    if not _spec_is_smc():
        return original(reqs, reserve=reserve, page_size=page_size)
    now = [req.kv.kv_allocated_len for req in reqs]
    then = [max(length, req.kv.kv_committed_len + block_width(req)) for length, req in zip(now, reqs, strict=True)]
    return now, then, sum(then) - sum(now)


def _block_demand(original: Callable[..., int], batch: Any, requests: list[Any], page_size: int) -> int:
    from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens

    if not _spec_is_smc():
        return original(batch, requests, page_size)
    return page_aligned_decode_alloc_lens(requests, reserve=0, page_size=page_size)[2]


def _spec_is_smc() -> bool:
    from sglang.srt.runtime_context import get_spec

    return (get_spec().speculative_algorithm or "").upper() == ALGORITHM


# -- both processes -----------------------------------------------------------------------------------------------


def _graph_dummy(
    original: Callable[..., Any],
    spec_algorithm: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    from smc_sglang.engine.algorithm import SmcAlgorithm
    from smc_sglang.engine.scoring import ScoreInput

    if not isinstance(spec_algorithm, SmcAlgorithm):
        return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
    return ScoreInput.for_graph_capture(num_tokens_per_req)


def _graph_input(original: Callable[[Any, int], Any], runner: Any, num_tokens: int) -> Any:
    from smc_sglang.engine.algorithm import SmcAlgorithm
    from smc_sglang.engine.scoring import ScoreInput

    if not isinstance(runner.model_runner.spec_algorithm, SmcAlgorithm):
        return original(runner, num_tokens)
    return ScoreInput.for_graph_capture(
        runner.speculative_num_draft_tokens, runner.model_runner.req_to_token_pool.req_to_token
    )


# -- tokenizer process --------------------------------------------------------------------------------------------


def _admit(tokenized: Any, manager: Any, request: Any, *_: Any, **__: Any) -> None:
    from smc_sglang.engine.admission import check

    if _runs_smc(manager.server_args) and hasattr(tokenized, "sampling_params"):
        check(request, tokenized.sampling_params, tokenized.input_ids)


def _send(manager: Any, tokenized: Any, *_: Any, **__: Any) -> None:
    from smc_sglang.engine.admission import send_as_child

    if _runs_smc(manager.server_args) and hasattr(tokenized, "sampling_params"):
        send_as_child(tokenized)


def _report(original: Callable[..., None], meta_info: dict[str, Any], state: Any, key: str, values: list[Any]) -> None:
    from smc_sglang.engine.streamer import REPORT

    if key != REPORT:
        return original(meta_info, state, key, values)
    if values:
        meta_info[REPORT] = values[-1]
    return None


def _runs_smc(server_args: Any) -> bool:
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


_ENGINE_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SCHEDULER}.init_batch_result_processor",
        HookType.AFTER,
        _attach_coordinator,
        "a scheduler of ours gets its coordinator once pools and tree exist",
    ),
    Hook(
        f"{_SCHEDULER}.init_req_max_new_tokens",
        HookType.AFTER,
        _enlist,
        "every new request passes here with its final max_new_tokens: it becomes a group or an ordinary row",
    ),
    Hook(
        f"{_SCHEDULER}.process_batch_result",
        HookType.AFTER,
        _commit,
        "the commit half of a cycle runs when SGLang has appended tokens and checked stop conditions",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        HookType.AROUND,
        finish_at_first,
        "of several stop conditions in one block the first in the text counts, not the first that SGLang looks for",
    ),
    Hook(
        f"{_SCHEDULER}.get_prefill_adder_class",
        HookType.AFTER,
        _prefill_adder,
        "a request is admitted only if its whole population has rows",
    ),
    Hook(
        f"{_SCHEDULER}.get_output_streamer_class",
        HookType.AFTER,
        _output_streamer,
        "particles are never streamed, parents only what their particles agree on; the report travels with the end",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        HookType.AROUND,
        _retract,
        "under KV pressure a group leaves the batch as one, never particle by particle",
    ),
    Hook(
        f"{_SCHEDULER}.pause_generation",
        HookType.AROUND,
        _pause,
        "pausing with retraction requeues requests one by one: groups are withdrawn first",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens",
        HookType.AROUND,
        _block_lengths,
        "a row reserves the slots of its next block and no more; SGLang's reserve is two blocks of the longest draft, "
        "for a scheduler that runs ahead",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        HookType.AROUND,
        _block_demand,
        "the same, where SGLang asks whether the next step fits",
    ),
    Hook(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        HookType.AROUND,
        _graph_dummy,
        "CUDA graphs of the scoring pass are captured without a mask, as they are replayed",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        HookType.AROUND,
        _graph_input,
        "the same, for the capture of each batch size",
    ),
    Hook(
        f"{_TOKENIZER}._create_tokenized_object",
        HookType.AFTER,
        _admit,
        "requests that would not be honoured are refused before they are scheduled",
    ),
    Hook(
        f"{_TOKENIZER}._send_one_request",
        HookType.BEFORE,
        _send,
        "the n answers to one prompt are sent with one seed: each gets its own",
    ),
    Hook(
        f"{_TOKENIZER}._accumulate_request_meta_info",
        HookType.AROUND,
        _report,
        "the smc report is one object per request, not a list that grows with the stream",
    ),
    Hook(
        "sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
        HookType.AROUND,
        parse_tool_calls,
        "parsers of a chat stream expect a token per call and lose text or calls of a block",
    ),
    Hook(
        "sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
        HookType.AROUND,
        parse_json_array,
        "the same, for forced calls",
    ),
    Hook(
        "sglang.srt.parser.reasoning_parser.ReasoningParser.parse_stream_chunk",
        HookType.AROUND,
        parse_reasoning,
        "the same, for reasoning",
    ),
)
