"""Sequential Monte Carlo speculative decoding for unmodified SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smc_sglang.config import SmcConfig, SmcParams, SmcRequest

if TYPE_CHECKING:
    from smc_sglang.engine.offline import Engine

__all__ = ["Engine", "SmcConfig", "SmcParams", "SmcRequest"]


def __getattr__(name: str) -> Any:
    if name == "Engine":  # imports SGLang, which takes seconds
        from smc_sglang.engine.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
