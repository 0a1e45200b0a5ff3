"""Admission into the running batch: a group needs a row for each of its particles, all through its life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from smc_sglang.engine.group import ParticleGroup, role

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from smc_sglang.engine.coordinator import Coordinator


class SmcPrefillAdder(PrefillAdder):
    """SGLang's prefill admission, counting rows by population (its KV: `ParticleGroup.queue`)."""

    coordinator: Coordinator  # set by :func:`for_coordinator`

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        admitted = self.can_run_list
        wanted = sum(_population(own) for own in (*admitted, req)) - sum(own.kv.holds_kv for own in admitted)
        running = self.running_batch.reqs if self.running_batch is not None else ()
        if wanted > self.coordinator.n_free_rows - self.coordinator.rows_promised(running):
            return AddReqResult.NO_TOKEN
        return super().add_one_req(req, *args, **kwargs)


def for_coordinator(coordinator: Coordinator) -> type[SmcPrefillAdder]:
    """The adder class that SGLang instantiates for every prefill batch of this scheduler."""
    return type("SmcPrefillAdder", (SmcPrefillAdder,), {"coordinator": coordinator})


def _population(req: Req) -> int:
    own = role(req)
    return own.params.n_particles if isinstance(own, ParticleGroup) else 1
