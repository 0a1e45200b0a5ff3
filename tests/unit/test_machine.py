"""What the CPU at hand can do: its quota, and its answer while SGLang is not there yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smc_sglang.platform.machine import cpu_quota


@pytest.mark.parametrize(("text", "expected"), [("max 100000\n", None), ("150000 100000\n", 2)])
def test_cpu_quota(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path / "cpu.max") == expected
    assert cpu_quota(tmp_path / "absent") is None


def test_it_is_asked_without_sglang() -> None:
    """SGLang imports the platform while it is itself half imported: what the bench asks must not begin that circle."""
    question = "import sys, smc_sglang.platform.machine as m; m.multiplies_bfloat16(); exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", question], check=False).returncode == 0
