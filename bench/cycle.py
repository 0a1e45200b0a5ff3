"""Where a cycle's time goes, as the benchmarks measure it: hooks on our own functions in the scheduler's process.

Importing this module registers them; they measure only where the environment variable below names a file. SGLang
spawns its scheduler, and a spawned process imports what the benchmark's own module imports.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

LOG = "SMC_BENCH_CYCLE_LOG"
PARTS = ("draft", "score", "weigh", "resample", "host")

_spent: Counter[str] = Counter()
_last: list[float] = []  # when the last cycle was committed


def _timed(name: str) -> Callable[..., Any]:
    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            _spent[name] += time.perf_counter() - start

    return hook


def _committed(_: None, coordinator: Any, batch: Any, result: Any) -> None:
    """After a cycle: one line of JSON, seconds by part. The first cycle after a pause has no beginning."""
    now = time.perf_counter()
    if path := os.environ.get(LOG):
        is_cycle = getattr(result, "block", None) is not None
        if is_cycle and _last:
            whole, launch = now - _last[0], _spent["launch"]
            line = {
                "draft": _spent["draft"],
                "score": _spent["score"],
                "weigh": launch - _spent["draft"] - _spent["score"],
                "resample": _spent["resample"],
                "host": whole - launch - _spent["resample"],
                "whole": whole,
                "rows": int(result.block.tokens.shape[0]),
                "width": int(result.block.tokens.shape[1]),
            }
            with Path(path).open("a") as log:
                log.write(json.dumps(line) + "\n")
        _last[:] = [now] if is_cycle and not batch.is_empty() else []
    _spent.clear()


_WORKER = "smc_sglang.engine.worker"
for _target, _name in {
    f"{_WORKER}._BlockForwards.draft": "draft",
    f"{_WORKER}._BlockForwards.score": "score",
    f"{_WORKER}.SmcWorker._cycle": "launch",
    "smc_sglang.engine.coordinator.Coordinator._resample": "resample",
}.items():
    HookRegistry.register(_target, _timed(_name), HookType.AROUND)
HookRegistry.register("smc_sglang.engine.coordinator.Coordinator.commit", _committed, HookType.AFTER)


def medians(path: Path) -> dict[str, float]:
    """Median ms of each part over the cycles that were logged; empties the log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.write_text("")
    return {part: 1e3 * statistics.median(line[part] for line in lines) for part in (*PARTS, "whole")} if lines else {}
