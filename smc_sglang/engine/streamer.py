"""Who is streamed, and how the `smc` report travels to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from smc_sglang.engine.group import Particle, ParticleGroup, Solo, role

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

REPORT = "smc"  # its key in meta_info


class SmcOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer; of a group only the parent speaks, and only when the coordinator lets it."""

    has_additional_customized_info: ClassVar[bool] = True

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        super().stream_output([req for req in reqs if _speaks(req)], return_logprob, skip_req)

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[list[dict[str, Any]]]]:
        """One list per request: its report with its last output, nothing before."""
        return {REPORT: [[report] if (report := _report(req)) is not None else [] for req in reqs]}


def _speaks(req: Req) -> bool:
    own = role(req)
    if isinstance(own, Particle):
        return False
    return not isinstance(own, ParticleGroup) or own.speaking or req.finished()


def _report(req: Req) -> dict[str, Any] | None:
    own = role(req)
    return own.report(req) if req.finished() and isinstance(own, Solo | ParticleGroup) else None
