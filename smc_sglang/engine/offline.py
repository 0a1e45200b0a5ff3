"""The offline engine: `sglang.Engine` with SMC decoding switched on."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine as SglangEngine

from smc_sglang.config import SmcConfig
from smc_sglang.engine import hooks


class Engine(SglangEngine):
    """`sglang.Engine` whose requests are decoded by Sequential Monte Carlo.

    Args:
        model_path: the target.
        draft_model_path: the draft; same tokenizer and vocabulary.
        **arguments: fields of :class:`smc_sglang.SmcConfig` (n_particles, draft_length, resample_threshold, ...)
            and of SGLang's `ServerArgs`.
    Raises:
        ValueError: one sentence naming an argument out of range or not supported.

    A request's own choices go into its sampling parameters:
    `engine.generate(prompt, {"temperature": 0.7, "custom_params": {"smc": {"n_particles": 8}}})`;
    its report is in `output["meta_info"]["smc"]`.
    """

    def __init__(self, *, model_path: str, draft_model_path: str, **arguments: Any) -> None:
        ours = {name: arguments.pop(name) for name in SmcConfig.model_fields if name in arguments}
        SmcConfig(**ours).export()
        super().__init__(
            model_path=str(model_path),
            speculative_algorithm=hooks.ALGORITHM,
            speculative_draft_model_path=str(draft_model_path),
            **arguments,
        )
