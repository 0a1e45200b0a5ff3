"""Entry point of SGLang's platform plugins: loaded in every SGLang process."""

from __future__ import annotations

import os

import torch

_PLATFORM = "smc_sglang.platform.cpu.TorchCpuPlatform"


def activate() -> str | None:
    """The torch CPU platform where nothing faster is there, and None where SGLang's own platforms serve.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's CPU engine, which needs kernels built from source.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _has_accelerator():
        return None
    return _PLATFORM


def _has_accelerator() -> bool:
    """Whether torch sees a device that SGLang has a platform for."""
    return (
        torch.cuda.is_available()  # CUDA and ROCm
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        # Added to torch by their vendors' extensions.
        or any(hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "musa", "hpu"))
    )
