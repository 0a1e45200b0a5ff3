"""Temperature 0 on the demo pair: 200 prompts, every N and K, streamed and not, against plain decoding.

In float32, so that a difference can be told from a tie: where two answers part, the target's own logits of the two
tokens must be as good as equal.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.asking import GENERATE, at_once
from tests.server.running_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOPICS = ("rain", "bread", "Rome", "horses", "music", "the sea", "glass", "winter", "trains", "bees")
OPENINGS = (
    "{} is",
    "The best thing about {} is that",
    "Write a short poem about {}.",
    "Q: What is {}?\nA:",
    "In 1900, {}",
    "Once upon a time there was a child who loved {}.",
    "Three facts about {}:\n1.",
    "def {}_count(items):\n    ",
    '{{"topic": "{}", "text": "',
    "Dear Sir, I am writing to you about {}",
    "People often ask why {}",
    "{}, {}, {}, {},",
    "How do I learn about {}? First,",
    "The history of {} begins",
    "My grandmother used to say that {}",
    "| topic | value |\n|---|---|\n| {} |",
    "Le mot « {} » se traduit par",
    "2 + 2 = 4, 4 + 4 = 8, and {}",
    "Review of a film about {}: ★★",
    "To be or not to be {}, that is",
)
PROMPTS = [opening.format(*[topic] * 4) for opening, topic in itertools.product(OPENINGS, TOPICS)]
NEW_TOKENS = 16
TIE = 1e-4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    running = Server.start(tmp_path_factory.mktemp("greedy") / "log.txt", "--dtype", "float32")
    try:
        with running.client(timeout=600) as client:
            yield client
        assert running.stop(signal.SIGTERM) == 0, running.tail()
    finally:
        running.kill()


def _answers(client: httpx.Client, smc: dict[str, Any], *, stream: bool = False) -> list[list[int]]:
    """The output tokens of every prompt."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}

    def ask(prompt: str) -> list[int]:
        body = {"text": prompt, "sampling_params": sampling, "smc": smc, "stream": stream}
        response = client.post(GENERATE, json=body)
        assert response.status_code == 200, response.text
        if not stream:
            return response.json()["output_ids"]
        return json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["output_ids"]

    return at_once(ask, PROMPTS)


@pytest.fixture(scope="module")
def plain(client: httpx.Client) -> list[list[int]]:
    return _answers(client, {"mode": "off"})


@pytest.fixture(scope="module")
def judge(target: Path) -> Any:
    """Logits of the next token after a text and tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    model = model.float()

    def logits(prompt: str, output: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokenizer.encode(prompt) + output])).logits[0, -1]

    return logits


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("n_particles", [1, 4])
def test_greedy_answers_are_plain_decodings(
    client: httpx.Client, plain: list[list[int]], judge: Any, n_particles: int, draft_length: int, stream: bool
) -> None:
    smc = {"n_particles": n_particles, "draft_length": draft_length}
    ties = 0
    for prompt, ours, theirs in zip(PROMPTS, _answers(client, smc, stream=stream), plain, strict=True):
        if ours == theirs:
            continue
        at = next(i for i, (one, other) in enumerate(itertools.zip_longest(ours, theirs)) if one != other)
        logits = judge(prompt, theirs[:at])
        assert abs(logits[ours[at]] - logits[theirs[at]]) < TIE, (prompt, ours, theirs)
        ties += 1
    print(f"{len(PROMPTS)} prompts, N={n_particles}, K={draft_length}: {ties} ties")
