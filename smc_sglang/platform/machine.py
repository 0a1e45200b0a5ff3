"""What the CPU at hand can do. Without SGLang, which asks the platform while it is itself being imported."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this CPU.

    Without AVX-512 it has no layout for such weights, and torch converts around every product: several times slower
    than float32.
    """
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def thread_count() -> int:
    """Threads for torch's operators: torch's own choice, within a container's CPU quota.

    Torch honours OMP_NUM_THREADS and the affinity mask and counts a core once, but does not see quotas, and
    more threads than a quota grants are throttled together and wait for one another.
    """
    chosen = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return chosen
    return min(chosen, cpu_quota(_CGROUP_CPU_QUOTA) or chosen)


def cpu_quota(path: Path) -> int | None:
    """CPUs that a cgroup v2 quota grants, rounded up; None without one. The file reads `max|quota period`."""
    if not path.is_file():
        return None
    quota, period = path.read_text().split()
    return None if quota == "max" else -(-int(quota) // int(period))
