"""The model pairs of the benchmarks, built once from the demo target and cached beside it.

    python -m bench.pairs

* `demo`: what `smc-sglang serve` serves without models.
* `wide-0.83`, `wide-0.66`: a target of 1.4 billion parameters that computes exactly what SmolLM2-135M-Instruct
  computes, so its text is real and its cost is that of its size; the drafts are SmolLM2-135M-Instruct with noise on
  every matrix, named after the share of their tokens that exact speculative decoding accepts at temperature 0.8.

A wide model is the narrow one in the first coordinates of a larger space. What is new computes on random weights and
is multiplied by zeros before it reaches the residual stream.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from smc_sglang.demo import DemoPair, default_cache_dir, ensure_built, ensure_demo_pair

WIDE = {
    "hidden_size": 1920,
    "intermediate_size": 5760,
    "num_attention_heads": 30,
    "num_key_value_heads": 10,
}
NOISE = {"wide-0.83": 0.05, "wide-0.66": 0.1}  # of each matrix' standard deviation
VERSION = 1  # of the recipe; change it with the recipe


def ensure_pair(name: str) -> DemoPair:
    """One of the pairs above, built first where it is not in the cache."""
    if name == "demo":
        return ensure_demo_pair()
    folder = default_cache_dir() / f"bench-{VERSION}"
    ensure_built(folder, _build, Console(file=sys.stderr), what="the wide pairs of the benchmarks")
    return DemoPair(folder / "wide", folder / name)


def _build(folder: Path, report: Callable[[str], None]) -> None:
    narrow_path = ensure_demo_pair().target
    narrow = AutoModelForCausalLM.from_pretrained(narrow_path, dtype=torch.float32)
    report("widening the target")
    widened(narrow).to(torch.bfloat16).save_pretrained(folder / "wide")
    for name, noise in NOISE.items():
        report(f"writing the draft of {name}")
        noisy(narrow_path, noise).to(torch.bfloat16).save_pretrained(folder / name)
    for path in [folder / "wide", *(folder / name for name in NOISE)]:
        for file in narrow_path.iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, path)
    report("checking")


def noisy(path: Path, noise: float, seed: int = 0) -> LlamaForCausalLM:
    """The model in float32, with Gaussian noise on every matrix.

    Args:
        noise: its standard deviation, as a part of the matrix' own.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def widened(narrow: LlamaForCausalLM, sizes: Mapping[str, int] = WIDE) -> LlamaForCausalLM:
    """A wider model that computes what `narrow` computes.

    Args:
        sizes: fields of its configuration; as many heads per KV head as `narrow` has.
    """
    old = narrow.config
    ratio = old.hidden_size / sizes["hidden_size"]
    config = LlamaConfig(
        **old.to_dict()
        | dict(sizes)
        | {
            "head_dim": old.hidden_size // old.num_attention_heads,
            # The mean square is taken over more coordinates, the new ones zero.
            "rms_norm_eps": old.rms_norm_eps * ratio,
        }
    )
    with torch.device("meta"):
        wide = LlamaForCausalLM(config)
    wide = wide.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    source = narrow.state_dict()
    with torch.no_grad():
        for name, weight in wide.state_dict().items():
            own = source[name]
            if weight.dim() == 1:
                weight.fill_(1.0)
                weight[: len(own)] = own * math.sqrt(ratio)
                continue
            writes = any(part in name for part in ("embed_tokens", "lm_head", "o_proj", "down_proj"))
            if writes:  # to the residual stream: nothing but what the narrow model writes
                weight.zero_()
            else:
                weight.normal_(std=float(own.std()), generator=generator)
            weight[: own.shape[0], : own.shape[1]] = own
        wide.tie_weights()
    # Rotary frequencies are buffers: `to_empty` has left them undefined.
    wide.model.rotary_emb = type(wide.model.rotary_emb)(config)
    return wide


def main() -> None:
    console = Console()
    for name in ("demo", *NOISE):
        pair = ensure_pair(name)
        console.print(f"{name}: target {pair.target}, draft {pair.draft}")


if __name__ == "__main__":
    main()
