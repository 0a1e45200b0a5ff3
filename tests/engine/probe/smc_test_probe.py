"""A test-only SGLang plugin: records what both models computed in every cycle, resamples at random on demand, and
plays KV pressure.

It hooks the project's own code through SGLang's registry, in the scheduler's process, so the engine under test is the
one that users run. A group with `resample_threshold` 1 is resampled in every cycle with random ancestors: nothing but
right KV pointers can then keep its logits right.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

PADDING_SLOT = 0
FORCED = 1.0
_counter = itertools.count()
_random = random.Random(0)
_refusals: int | None = None  # how often the pool still says that the next step does not fit; None: not retracting


def activate() -> None:
    forwards = "smc_sglang.engine.worker._BlockForwards"
    HookRegistry.register(f"{forwards}.draft", _record_draft, HookType.AFTER)
    HookRegistry.register(f"{forwards}.score", _record_score, HookType.AFTER)
    HookRegistry.register("smc_sglang.smc.step.resample", _resample, HookType.AROUND)
    if os.environ.get("SMC_TEST_PRESSURE"):
        check = "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem"
        HookRegistry.register(check, _fits, HookType.AROUND)
        HookRegistry.register("smc_sglang.engine.coordinator.Coordinator.retract", _retract, HookType.AROUND)


def _record_draft(logits: torch.Tensor, forwards: Any, k: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    passes = forwards.__dict__.setdefault("probe_passes", {})
    for row, row_logits in zip(rows.tolist(), logits, strict=True):
        if len(row_logits):  # not of a pass for the KV alone
            passes[row, k] = row_logits.clone()


def _record_score(logits: torch.Tensor, forwards: Any, tokens: torch.Tensor) -> None:
    folder = os.environ.get("SMC_TEST_PROBE")
    if not folder or not Path(folder, "on").exists():
        return
    passes = forwards.__dict__.get("probe_passes", {})
    records = []
    for row, req in enumerate(forwards._batch.reqs):
        width = int((forwards._slots[row] != PADDING_SLOT).sum())  # the rest pads it to the longest block
        drafted = [passes[row, k] for k in range(tokens.shape[1]) if (row, k) in passes]
        records.append(
            {
                "rid": req.rid,
                "context": [*req.origin_input_ids, *req.output_ids[:-1]],  # tokens with KV
                "block": tokens[row, :width].tolist(),
                "target": logits[row, :width].clone(),
                "draft": torch.stack(drafted) if drafted else None,
            }
        )
    path = Path(folder, f"{next(_counter):06d}.pt")
    torch.save(records, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def _resample(original: Any, weights: Any, thresholds: torch.Tensor, scheme: Any, uniforms: torch.Tensor) -> Any:
    result = original(weights, thresholds, scheme, uniforms)
    forced = thresholds == FORCED
    if not forced.any():
        return result
    n = uniforms.shape[-1]
    anyone = (uniforms * n).long()
    return dataclasses.replace(
        result,
        ancestors=torch.where(forced[..., None], anyone, result.ancestors),
        resampled=result.resampled | forced,
    )


def _fits(original: Any, batch: Any, *args: Any) -> bool:
    """In every other step the pool is said to be full; while groups make room, a few times more."""
    global _refusals
    if _refusals is None:
        return bool(_random.random() < 0.5 and original(batch, *args))
    if _refusals > 0:
        _refusals -= 1
        return False
    return bool(original(batch, *args))


def _retract(original: Any, coordinator: Any, sglang: Any, batch: Any) -> Any:
    global _refusals
    # 0 is SGLang's own test of retraction: one request has to go. At 0.6 every group of four is down to one particle,
    # and some have left.
    _refusals = int(_random.choice((0.0, 0.2, 0.6)) * len(batch.reqs))
    try:
        return original(coordinator, sglang, batch)
    finally:
        _refusals = None
