"""What a user could run instead, on the same checkpoints and prompts."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from smc_sglang.demo import DemoPair

# Not in the lock file: each needs its own build of torch or a compiler.
OPTIONAL = {
    "vllm": "PyPI's wheel is built for CUDA, the CPU wheel is not on PyPI",
    "llama_cpp": "PyPI has its sources only, and it reads GGUF files",
}


def measure(
    pair: DemoPair, prompts: Sequence[str], new_tokens: int, temperature: float, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Tokens per second of each peer, the median over `prompts`; peers that are not there say why."""
    peers: dict[str, dict[str, Any]] = {}
    for name, runner in _transformers(pair, new_tokens, temperature, dtype).items():
        runner(prompts[0])  # warms up
        speeds = [runner(prompt) for prompt in prompts]
        peers[name] = {
            "tok_s": statistics.median(speeds),
            "spread": [min(speeds), max(speeds)],
            "version": version("transformers"),
            "note": f"eager, {dtype}".replace("torch.", ""),
        }
    for name, reason in OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        note = f"installed ({version(name)}), not run by this benchmark" if found else f"not run: {reason}"
        peers[name] = {"tok_s": None, "version": None, "note": note}
    return peers


def _transformers(
    pair: DemoPair, new_tokens: int, temperature: float, dtype: torch.dtype
) -> dict[str, Callable[[str], float]]:
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for path in (pair.target, pair.draft))
    draft.generation_config.num_assistant_tokens = 8
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0

    def runner(**how: Any) -> Callable[[str], float]:
        def run(prompt: str) -> float:
            inputs = tokenizer(prompt, return_tensors="pt")
            start = time.perf_counter()
            with torch.inference_mode():
                output = target.generate(
                    **inputs,
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    pad_token_id=tokenizer.eos_token_id,
                    **how,
                )
            return (output.shape[1] - inputs.input_ids.shape[1]) / (time.perf_counter() - start)

        return run

    return {"transformers": runner(), "transformers assisted K=8": runner(assistant_model=draft)}
