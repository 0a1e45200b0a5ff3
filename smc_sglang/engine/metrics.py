"""The server's `smc_*` metrics, beside SGLang's own in /metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from radix_patch.accounting import usage

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix_patch import ParticleTree

_INTERVAL = 1.0  # seconds between two looks at the KV of all particles; scrapes are rarer


class Metrics:
    """Counters and gauges of one scheduler; kept, but not exported, where SGLang's own are not collected."""

    def __init__(self, scheduler: Any) -> None:
        # Not imported earlier: SGLang first sets up its multiprocess mode.
        from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

        collected = scheduler.metrics_reporter.current_scheduler_metrics_enabled
        registry = REGISTRY if collected else CollectorRegistry()
        labels = {"model_name": scheduler.server_args.served_model_name}

        def counter(name: str, text: str) -> Any:
            return Counter(name, text, labels, registry=registry).labels(**labels)

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode="mostrecent").labels(**labels)

        self.resamples = counter("smc_resamples", "Cycles in which a group was resampled.")
        self.shrinks = counter("smc_group_shrinks", "Groups made smaller under KV pressure.")
        self._particles = gauge("smc_particles_live", "Particles that are decoding.")
        self._in_use = gauge("smc_kv_slots_in_use", "KV slots that decoding particles hold, each counted once.")
        self._shared = gauge("smc_kv_slots_shared", "Of these, slots that more than one particle uses.")
        self._saved = gauge("smc_kv_saved_ratio", "1 - slots in use / sum of the particles' lengths.")
        self._looked_at = 0.0

    def observe(self, tree: ParticleTree, particles: Iterable[Req]) -> None:
        """Set the gauges, at most once per interval, and whenever the last particle has gone."""
        live = list(particles)
        now = time.monotonic()
        if live and now - self._looked_at < _INTERVAL:
            return
        self._looked_at = now
        held = usage(tree, live)
        self._particles.set(len(live))
        self._in_use.set(held.distinct)
        self._shared.set(held.shared)
        self._saved.set(held.saved)
