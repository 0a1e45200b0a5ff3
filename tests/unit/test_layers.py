"""The house's layers: an arrow of imports never points up."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each package may import besides the standard library; own packages by their prefix.
LAYERS = {
    "smc_sglang/smc": {"torch", "smc_sglang.smc"},
    "smc_sglang/config.py": {"pydantic"},
    "smc_sglang/hook.py": {"sglang"},
    "smc_sglang/platform": {"torch", "numpy", "numba", "sglang", "smc_sglang.hook", "smc_sglang.platform"},
    "radix_patch": {"torch", "numpy", "sglang", "radix_patch"},
    "smc_sglang/engine": {
        "torch",
        "prometheus_client",
        "sglang",
        "radix_patch",
        "smc_sglang.config",
        "smc_sglang.hook",
        "smc_sglang.smc",
        "smc_sglang.platform",
        "smc_sglang.engine",
    },
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def _files(layer: str) -> list[Path]:
    path = ROOT / layer
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_from_below(layer: str) -> None:
    import sys

    files = _files(layer)
    assert files
    for path in files:
        for name in _imports(path):
            if name.split(".")[0] in sys.stdlib_module_names:
                continue
            assert any(name == allowed or name.startswith(allowed + ".") for allowed in LAYERS[layer]), (
                f"{path.relative_to(ROOT)} imports {name}"
            )


def test_the_mathematics_does_not_load_sglang() -> None:
    import subprocess
    import sys

    code = "import sys, smc_sglang.smc.step; assert not [m for m in sys.modules if m.startswith('sglang')]"
    subprocess.run([sys.executable, "-c", code], check=True)
