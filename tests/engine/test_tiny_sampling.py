"""Sampling parameters inside blocks: what they forbid never happens, and greedy answers follow them to the letter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny import VOCAB, TinyEngine, idle_pool, sampling_params

pytestmark = pytest.mark.engine

PROMPT = [1, 5, 6, 7, 8]
EOS = 0
SHAPED: dict[str, Any] = {
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.3,
    "logit_bias": {"7": 2.0, "9": -100, "12": -3.0},
    "min_new_tokens": 30,
}


def by_hand(tiny: TinyEngine, n_tokens: int) -> list[int]:
    """The greedy answer under SHAPED, one plain forward per token."""
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    output: list[int] = []
    while len(output) < n_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output])).logits[0, -1, :VOCAB].clone()
        for token, count in Counter(output).items():
            logits[token] -= SHAPED["frequency_penalty"] * count + SHAPED["presence_penalty"]
            logits[token] *= SHAPED["repetition_penalty"] if logits[token] < 0 else 1 / SHAPED["repetition_penalty"]
        if len(output) < SHAPED["min_new_tokens"]:
            logits[EOS] = -torch.inf
        for token, bias in SHAPED["logit_bias"].items():
            logits[int(token)] += bias
        output.append(int(logits.argmax()))
        if output[-1] == EOS:
            break
    return output


def test_greedy_follows_penalties_bias_and_minimum(tiny: TinyEngine) -> None:
    expected = by_hand(tiny, 50)
    assert expected != tiny.generate(PROMPT, temperature=0, max_new_tokens=50)["output_ids"]
    for smc in ({"mode": "off"}, {"draft_length": 1}, {"draft_length": 4}, {"draft_length": 8}):
        assert tiny.generate(PROMPT, temperature=0, max_new_tokens=50, smc=smc, **SHAPED)["output_ids"] == expected


@pytest.mark.parametrize(
    "smc", [{"n_particles": 4, "draft_length": 8}, {"mode": "exact", "n_particles": 3}, {"mode": "off"}]
)
def test_bans_hold_at_every_position(tiny: TinyEngine, smc: dict[str, Any]) -> None:
    banned = {str(token): -100 for token in range(10, 60)}
    for seed in range(5):
        answer = tiny.generate(
            PROMPT, temperature=1.5, max_new_tokens=40, min_new_tokens=25, logit_bias=banned, seed=seed, smc=smc
        )
        assert not set(answer["output_ids"]) & set(range(10, 60))
        assert len(answer["output_ids"]) >= 25


def test_top_k_one_is_greedy(tiny: TinyEngine) -> None:
    greedy = tiny.generate(PROMPT, temperature=0, max_new_tokens=20)["output_ids"]
    assert tiny.generate(PROMPT, temperature=1.0, top_k=1, max_new_tokens=20)["output_ids"] == greedy
    # The law of one token by other means: nothing but redone blocks can give it.
    for smc in ({"n_particles": 4}, {"mode": "exact", "n_particles": 2}):
        answer = tiny.generate(PROMPT, temperature=1.0, top_p=1e-6, max_new_tokens=20, smc=smc)
        assert answer["output_ids"] == greedy


def test_n_answers_have_their_own_seeds(tiny: TinyEngine) -> None:
    sampling = sampling_params(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=5)

    def ask(n: int) -> list[list[int]]:
        answers = tiny.engine.generate(input_ids=PROMPT, sampling_params=sampling | {"n": n})
        return [answer["output_ids"] for answer in (answers if isinstance(answers, list) else [answers])]

    three = ask(3)
    assert len({tuple(answer) for answer in three}) == 3
    assert ask(3) == three
    assert ask(1) == three[:1]
    idle_pool(tiny.engine)


def test_modes_share_a_batch(tiny: TinyEngine) -> None:
    """Exact, smc, greedy and plain requests, with and without truncation and penalties: together as alone."""
    choices: list[dict[str, Any]] = [
        {"smc": {"mode": "exact", "n_particles": 4, "draft_length": 4}, "top_p": 0.8},
        {"smc": {"mode": "exact", "n_particles": 1, "draft_length": 8}},
        {"smc": {"n_particles": 4, "draft_length": 8}, "top_k": 5, "stop": ["t12"]},
        {"smc": {"n_particles": 3, "draft_length": 2}, "min_p": 0.1, "frequency_penalty": 1.0},
        {"smc": {"mode": "off"}, "top_p": 0.7},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"smc": {"mode": "exact", "n_particles": 2, "draft_length": 8}, "stop": ["t12"]},
    ]
    requests = [
        ([1, 5, 6, 7 + index], {"temperature": 1.0, "max_new_tokens": 30, "seed": index} | choice)
        for index, choice in enumerate(choices)
    ]
    together = tiny.generate_many([prompt for prompt, _ in requests], [one for _, one in requests])
    for answer, alone in zip(together, tiny.generate_many_alone(requests), strict=True):
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["meta_info"]["smc"]["fallbacks"] == alone["meta_info"]["smc"]["fallbacks"]
    idle_pool(tiny.engine)


def test_exact_collapse_streams_every_cycle(tiny: TinyEngine) -> None:
    sampling = sampling_params(
        temperature=1.0, max_new_tokens=40, ignore_eos=True, seed=3, smc={"mode": "exact", "n_particles": 4}
    )
    outputs = list(tiny.engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True))
    report = outputs[-1]["meta_info"]["smc"]
    assert len(outputs) >= report["cycles"]
    assert 40 / 5 <= report["cycles"] < 40  # some drafts were accepted
