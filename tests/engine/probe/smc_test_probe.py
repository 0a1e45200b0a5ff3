"""A test-only SGLang plugin: records what both models computed in every cycle, and resamples at random on demand.

It hooks the project's own code through SGLang's registry, in the scheduler's process, so the engine under test is the
one that users run. A group with `resample_threshold` 1 is resampled in every cycle with random ancestors: nothing but
right KV pointers can then keep its logits right.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FORCED = 1.0
_counter = itertools.count()


def activate() -> None:
    forwards = "smc_sglang.engine.worker._BlockForwards"
    HookRegistry.register(f"{forwards}.draft", _record_draft, HookType.AFTER)
    HookRegistry.register(f"{forwards}.score", _record_score, HookType.AFTER)
    HookRegistry.register("smc_sglang.smc.step.resample", _resample, HookType.AROUND)


def _record_draft(logits: torch.Tensor, forwards: Any, k: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    passes = forwards.__dict__.setdefault("probe_passes", {})
    for row, row_logits in zip(rows.tolist(), logits, strict=True):
        passes[row, k] = row_logits.clone()


def _record_score(logits: torch.Tensor, forwards: Any, tokens: torch.Tensor) -> None:
    folder = os.environ.get("SMC_TEST_PROBE")
    if not folder or not Path(folder, "on").exists():
        return
    passes = forwards.__dict__.get("probe_passes", {})
    records = []
    for row, req in enumerate(forwards._batch.reqs):
        drafted = [passes[row, k] for k in range(tokens.shape[1]) if (row, k) in passes]
        records.append(
            {
                "rid": req.rid,
                "context": [*req.origin_input_ids, *req.output_ids[:-1]],  # tokens with KV
                "block": tokens[row].tolist(),
                "target": logits[row].clone(),
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
