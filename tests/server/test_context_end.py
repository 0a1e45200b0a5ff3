"""Draft = target on 128 positions: blocks at the context end, and answers that a wrong KV cell would give away.

Every weight is equal here, so an answer is a plain sample of the target, whatever N, K and resampling are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.twins import CONTEXT, VOCAB, N

pytestmark = pytest.mark.engine

# SGLang keeps a margin of its own: prompts are shorter than this, and an answer leaves two positions free.
PROMPT_LIMIT, MARGIN = CONTEXT - 6, 2
N_REPLIES, REPLY = 100, 60


@pytest.fixture
def client(twin_http: httpx.Client) -> Iterator[httpx.Client]:
    """A client of the server, which must be alive and idle afterwards."""
    yield twin_http
    assert twin_http.post("/flush_cache").status_code == 200


def prompt_of(n_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=n_tokens)


def generate(
    client: httpx.Client, prompt: list[int], smc: dict[str, Any], logprobs: bool = False, **sampling: Any
) -> httpx.Response:
    body = {"input_ids": prompt, "sampling_params": {"ignore_eos": True} | sampling, "smc": smc}
    body["return_logprob"] = logprobs
    return client.post("/generate", json=body)


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# -- the last positions --------------------------------------------------------------------------------------


def assert_ends_at_the_context(response: httpx.Response, n_prompt: int, max_tokens: int) -> None:
    if n_prompt >= PROMPT_LIMIT:
        assert response.status_code == 400, response.text
        assert str(PROMPT_LIMIT) in response.json()["error"]["message"]
        return
    answer = answered(response)
    n_tokens = min(max_tokens, CONTEXT - MARGIN - n_prompt)
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == n_tokens
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("n_prompt", range(112, 128))
def test_an_answer_ends_at_the_same_place_before_the_context_end(client: httpx.Client, n_prompt: int) -> None:
    wanted = CONTEXT - n_prompt
    response = generate(client, prompt_of(n_prompt, 0), {}, max_new_tokens=wanted)
    assert_ends_at_the_context(response, n_prompt, wanted)
    assert response.status_code == 400 or response.json()["meta_info"]["smc"]["n_particles"] == N


@pytest.mark.parametrize("mode", ["smc", "off"])
def test_four_answers_end_at_once(client: httpx.Client, mode: str) -> None:
    lengths = range(112, 128)
    with ThreadPoolExecutor(4) as pool:
        responses = pool.map(
            lambda n: generate(client, prompt_of(n, 1), {"mode": mode}, max_new_tokens=CONTEXT - n), lengths
        )
        for n_prompt, response in zip(lengths, responses, strict=True):
            assert_ends_at_the_context(response, n_prompt, CONTEXT - n_prompt)
        same_length = pool.map(lambda s: generate(client, prompt_of(118, s), {}, max_new_tokens=10), range(4))
        for response in same_length:
            assert_ends_at_the_context(response, 118, 10)


@pytest.mark.parametrize("draft_length", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_max_tokens_an_answer_fills_the_context(
    client: httpx.Client, draft_length: int, temperature: float
) -> None:
    body = {
        "messages": [{"role": "user", "content": "t7 t8 t9"}],
        "ignore_eos": True,
        "temperature": temperature,
        "smc": {"draft_length": draft_length},
    }
    answer = answered(client.post("/v1/chat/completions", json=body))
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == CONTEXT - MARGIN - 3
    assert answer["choices"][0]["finish_reason"] == "length"


# -- what the answers are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [3, 60, 112])
def test_greedy_answers_are_those_of_plain_decoding(client: httpx.Client, n_prompt: int) -> None:
    prompt = prompt_of(n_prompt, 2)
    greedy = {"temperature": 0.0, "max_new_tokens": min(60, CONTEXT - n_prompt)}
    plain = answered(generate(client, prompt, {"mode": "off"}, **greedy))
    assert len(plain["output_ids"]) == min(60, CONTEXT - MARGIN - n_prompt)
    for n_particles in (1, 8):
        for draft_length in (1, 4, 8):
            smc = {"n_particles": n_particles, "draft_length": draft_length, "resample_threshold": 1.0}
            assert answered(generate(client, prompt, smc, **greedy))["output_ids"] == plain["output_ids"]


@dataclass
class Rescored:
    """Replies under the model: log p of each token, and its mean given what came before, -H(p). float64 [n, REPLY]."""

    log_p: np.ndarray
    mean: np.ndarray

    @classmethod
    @torch.no_grad()
    def by(cls, model: Any, prompts: torch.Tensor, replies: torch.Tensor) -> Rescored:
        logits = model(torch.cat([prompts, replies], 1)).logits[:, prompts.shape[1] - 1 : -1]
        laws = torch.log_softmax(logits.double(), -1)
        return cls(laws.gather(-1, replies[..., None])[..., 0].numpy(), (laws.exp() * laws).sum(-1).numpy())

    @property
    def surprise(self) -> tuple[float, float]:
        """Mean of log p - E log p over all tokens, and its standard error: 0 for samples of the model."""
        per_reply = (self.log_p - self.mean).mean(1)
        return float(per_reply.mean()), float(per_reply.std() / len(per_reply) ** 0.5)

    @property
    def level(self) -> tuple[float, float]:
        """Mean log p per token, and its standard error."""
        per_reply = self.log_p.mean(1)
        return float(per_reply.mean()), float(per_reply.std() / len(per_reply) ** 0.5)


@torch.no_grad()
def sampled(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    """Ancestral samples."""
    generator = torch.Generator().manual_seed(0)
    tokens = prompts
    for _ in range(REPLY):
        law = torch.softmax(model(tokens).logits[:, -1].double(), -1)
        tokens = torch.cat([tokens, torch.multinomial(law, 1, generator=generator)], 1)
    return tokens[:, prompts.shape[1] :]


def apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Distance of two means in standard errors."""
    return (one[0] - other[0]) / (one[1] ** 2 + other[1] ** 2) ** 0.5


def test_sampled_answers_are_the_targets(client: httpx.Client, twin_checkpoint: Path) -> None:
    """100 replies of 60 tokens, eight in flight, for N = 1 and for N = 8 resampled after every block."""
    model = AutoModelForCausalLM.from_pretrained(twin_checkpoint, dtype=torch.float32).eval()
    prompts = [prompt_of(12, seed) for seed in range(N_REPLIES)]
    reference = Rescored.by(model, torch.tensor(prompts), sampled(model, torch.tensor(prompts)))
    rescored = {}
    for n_particles in (1, 8):
        # Multinomial: equal weights are resampled to themselves by the other schemes, and nothing would be copied.
        smc = {"n_particles": n_particles, "resample_threshold": 1.0, "resampling": "multinomial"}
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(
                    lambda seed, smc=smc: answered(
                        generate(client, prompts[seed], smc, logprobs=True, max_new_tokens=REPLY, sampling_seed=seed)
                    ),
                    range(N_REPLIES),
                )
            )
        reports = [answer["meta_info"]["smc"] for answer in answers]
        assert all(abs(report["log_z"]) < 1e-3 for report in reports)
        assert n_particles == 1 or np.mean([report["resamples"] for report in reports]) > 1
        replies = torch.tensor([answer["output_ids"] for answer in answers])
        rescored[n_particles] = Rescored.by(model, torch.tensor(prompts), replies)
        told = [[value for value, _, _ in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
        assert np.abs(np.array(told) - rescored[n_particles].log_p).max() < 1e-2
        # A token drawn after a wrong KV cell is less likely than its law promises, from there on.
        mean, error = rescored[n_particles].surprise
        assert abs(mean) < 4 * error, f"N={n_particles}"
        assert abs(apart(rescored[n_particles].level, reference.level)) < 4, f"N={n_particles}"
        foreign = replies.clone()
        foreign[:, 20] = replies.roll(1, 0)[:, 20]
        mean, error = Rescored.by(model, torch.tensor(prompts), foreign).surprise
        assert mean < -4 * error, "one foreign cell would be seen"
    assert apart(rescored[8].level, rescored[1].level) > -4
