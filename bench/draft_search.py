"""How good are layer-dropped drafts of the demo target? Prints acceptance and relative cost.

    python bench/draft_search.py            # the draft that ships
    python bench/draft_search.py --drop 6   # search: leave out the layer that hurts least, six times

Acceptance is sum_v min(p~(v), q~(v)), averaged over the positions of text that the target itself wrote: the
chance that speculative decoding keeps a drafted token, and 1 - TV(p~, q~). Cost is one draft pass over one
target pass for one token; the cost model turns it into SMC's speed-up where scoring a block costs no more.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from smc_sglang.demo import DRAFT_LAYERS, ensure_demo_pair

TEMPERATURE = 0.8
PROMPTS = (
    "Tell me about the Roman Empire.",
    "Write a poem about the sea.",
    "How do I cook rice?",
    "Write a Python function that computes the Fibonacci numbers.",
    "Explain gravity to a child.",
    "Write a story about a dragon who is afraid of fire.",
    "What is machine learning?",
    "List the steps to change a tyre.",
)


@dataclass(frozen=True)
class OwnText:
    """What the target wrote, and its laws there."""

    tokens: torch.Tensor  # [n_prompts, length] int64, padded on the left
    attention_mask: torch.Tensor  # [n_prompts, length]
    predicts: torch.Tensor  # [n_prompts, length] bool: the positions whose next token the target wrote
    laws: torch.Tensor  # [n_predicted, vocab] float32: p~ at those positions


@torch.inference_mode()
def own_text(
    target: Any, tokenizer: Any, prompts: tuple[str, ...] = PROMPTS, new_tokens: int = 64, seed: int = 0
) -> OwnText:
    """Sample an answer of at most `new_tokens` tokens to each of the prompts, at `TEMPERATURE`."""
    tokenizer.padding_side = "left"
    questions = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    start = questions["input_ids"].shape[1]
    torch.manual_seed(seed)
    tokens = target.generate(
        **questions, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=new_tokens
    )
    ended = (tokens[:, start:] == tokenizer.eos_token_id).int().cumsum(dim=1)
    # A token counts up to and including the first EOS; the position before it predicts it.
    written = torch.cat([torch.ones_like(ended[:, :1]), (ended == 0).int()[:, :-1]], dim=1).bool()
    predicts = torch.zeros_like(tokens, dtype=torch.bool)
    predicts[:, start - 1 : -1] = written
    mask = torch.cat([questions["attention_mask"], written.long()], dim=1)
    laws = _laws(target, tokens, mask, predicts)
    return OwnText(tokens, mask, predicts, laws)


def _laws(model: Any, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The next-token laws at the marked positions: [n_marked, vocab], float32."""
    hidden = model.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.softmax(model.lm_head(hidden[positions]).float() / TEMPERATURE, dim=-1)


@torch.inference_mode()
def acceptance(draft: Any, text: OwnText) -> float:
    """The draft's mean acceptance on the target's text, in [0, 1]."""
    laws = _laws(draft, text.tokens, text.attention_mask, text.predicts)
    return float(torch.minimum(text.laws, laws).sum(dim=-1).mean())


@torch.inference_mode()
def relative_cost(draft: Any, target: Any, repeats: int = 15) -> float:
    """r: the time of the draft's one-token pass over the target's.

    The two take turns, and the fastest pass of each counts: other load on the machine only ever adds time.
    """
    token = torch.tensor([[1]])
    fastest = {}
    for _ in range(repeats):
        for model in (draft, target):
            start = time.perf_counter()
            model(input_ids=token, use_cache=False)
            fastest[model] = min(fastest.get(model, math.inf), time.perf_counter() - start)
    return fastest[draft] / fastest[target]


def speed_up(draft_length: int, cost: float) -> float:
    """SMC over autoregressive decoding by the cost model: (K + 1) / (1 + (K + 1) r)."""
    return (draft_length + 1) / (1 + (draft_length + 1) * cost)


def greedy_search(n_drop: int, n_layers: int, score: Callable[[tuple[int, ...]], float]) -> None:
    """Leave out one layer after the other, each time the one that is missed least; print every choice."""
    kept = tuple(range(n_layers))
    for _ in range(n_drop):
        candidates = [tuple(layer for layer in kept if layer != left_out) for left_out in kept]
        best, kept = max((score(candidate), candidate) for candidate in candidates)
        dropped = sorted(set(range(n_layers)) - set(kept))
        print(f"{len(kept)} layers, acceptance {best:.3f}, without {dropped}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance and cost of layer-dropped drafts.")
    parser.add_argument("--drop", type=int, default=0, help="search for a draft with this many layers fewer")
    arguments = parser.parse_args()

    disable_progress_bar()
    pair = ensure_demo_pair()
    # float32 runs fast on every CPU, and the laws are compared without bfloat16's rounding.
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32).eval()
    text = own_text(target, AutoTokenizer.from_pretrained(pair.target))
    print(f"{int(text.predicts.sum())} tokens written by the target at temperature {TEMPERATURE}")

    cost = relative_cost(draft, target)
    print(
        f"the demo draft: {len(DRAFT_LAYERS)} layers, acceptance {acceptance(draft, text):.3f}, "
        f"relative cost {cost:.2f}, SMC speed-up by the cost model {speed_up(8, cost):.2f} at K = 8"
    )
    if arguments.drop:
        layers = target.model.layers

        def score(kept: tuple[int, ...]) -> float:
            target.model.layers = type(layers)(layers[index] for index in kept)
            return acceptance(target, text)

        greedy_search(arguments.drop, len(layers), score)


if __name__ == "__main__":
    main()
