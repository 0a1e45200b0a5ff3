"""Entry point of SGLang's general plugins: loaded in every SGLang process."""

from __future__ import annotations

from importlib.metadata import version


def activate() -> None:
    """Register the algorithm and the hooks.

    On another SGLang version nothing is patched; asking for the algorithm then says what to install.
    """
    from smc_sglang.engine import algorithm, hooks

    algorithm.register()
    if version("sglang") == hooks.SUPPORTED_SGLANG:
        hooks.register()
