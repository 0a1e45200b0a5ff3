"""A running engine on tiny checkpoints, and what the tests ask of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB, CONTEXT, POOL = 64, 512, 2048


@dataclass
class TinyEngine:
    """An engine, its two checkpoints, and the folder in which the probe records cycles."""

    engine: Any
    target: Path
    draft: Path
    records: Path

    def generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        return self.generate_many([prompt], [sampling])[0]

    def generate_many(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each sampling dict may hold `smc`, the request's own smc object."""
        params = [sampling_params(**one) for one in sampling]
        return self.engine.generate(input_ids=prompts, sampling_params=params)

    def generate_many_alone(self, requests: list[tuple[list[int], dict[str, Any]]]) -> list[dict[str, Any]]:
        """The answer that each of (prompt, sampling) gets while it is the only request."""
        return [self.generate(prompt, **sampling) for prompt, sampling in requests]

    def recorded(self, run: Any) -> list[dict[str, Any]]:
        """The rows of every cycle that `run()` took."""
        for old in self.records.glob("*.pt"):
            old.unlink()
        (self.records / "on").touch()
        try:
            run()
        finally:
            (self.records / "on").unlink()
        return [row for path in sorted(self.records.glob("*.pt")) for row in torch.load(path)]


def sampling_params(smc: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """SGLang's sampling parameters with `smc`, the request's own smc object, and `seed` in their places."""
    if "seed" in sampling:
        sampling["sampling_seed"] = sampling.pop("seed")
    return sampling if smc is None else sampling | {"custom_params": {"smc": smc}}


def idle_pool(engine: Any) -> dict[str, Any]:
    """Flush the tree once the engine is idle; returns the pool's usage, which must then be zero."""
    deadline = time.monotonic() + 30
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the engine did not become idle"
        time.sleep(0.05)
    state = engine.get_server_info()["internal_states"][0]
    return state["memory_usage"] | {"token_usage": state.get("token_usage")}
