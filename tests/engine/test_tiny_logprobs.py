"""Returned log-probabilities, against a plain forward of the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny import TinyEngine, idle_pool, sampling_params

pytestmark = pytest.mark.engine

PROMPT = [1, 5, 6, 7, 20, 21]
RESAMPLED = {"resample_threshold": 1.0}
REQUESTS: dict[str, dict[str, Any]] = {
    "smc": {"temperature": 0.8, "smc": RESAMPLED},
    "power": {"temperature": 1.0, "smc": RESAMPLED | {"power": 2.0, "n_particles": 7, "draft_length": 8}},
    "truncated": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "smc": RESAMPLED},
    "penalised": {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {"9": 3.0}, "smc": RESAMPLED},
    "grammar": {"temperature": 1.0, "regex": "(t9|t1[0-9])+", "smc": RESAMPLED},
    "exact": {"temperature": 1.3, "smc": {"mode": "exact"}},
    "exact-n1": {"temperature": 1.0, "smc": {"mode": "exact", "n_particles": 1, "draft_length": 8}},
    "greedy": {"temperature": 0.0},
    "off": {"temperature": 1.0, "smc": {"mode": "off"}},
    "one-token": {"temperature": 1.0, "max_new_tokens": 1},
}


@pytest.fixture(scope="module")
def model(tiny: TinyEngine) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    """After each token, float32 [len(tokens), vocab]."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check(model: Any, answer: dict[str, Any], prompt: list[int] = PROMPT, top: int = 3) -> None:
    meta, output = answer["meta_info"], answer["output_ids"]
    laws = log_probs(model, prompt + output)[len(prompt) - 1 : -1]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == output
    given = torch.tensor([value for value, _, _ in meta["output_token_logprobs"]])
    torch.testing.assert_close(given, laws.gather(1, torch.tensor(output)[:, None])[:, 0], atol=1e-3, rtol=0)
    assert len(meta["output_top_logprobs"]) == len(output)
    for law, entries in zip(laws, meta["output_top_logprobs"], strict=True):
        values, tokens = law.topk(top)
        assert [token for _, token, _ in entries] == tokens.tolist()
        torch.testing.assert_close(torch.tensor([value for value, _, _ in entries]), values, atol=1e-3, rtol=0)
    for law, entries in zip(laws, meta["output_token_ids_logprobs"], strict=True):
        assert [token for _, token, _ in entries] == [4, 40]
        torch.testing.assert_close(torch.tensor([v for v, _, _ in entries]), law[[4, 40]], atol=1e-3, rtol=0)


def ask(tiny: TinyEngine, requests: list[dict[str, Any]], prompt: list[int] = PROMPT, **fields: Any) -> Any:
    params = [sampling_params(**({"max_new_tokens": 30, "seed": i} | request)) for i, request in enumerate(requests)]
    return tiny.engine.generate(
        input_ids=[prompt] * len(params),
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=3,
        token_ids_logprob=[4, 40],
        **fields,
    )


def test_all_modes_at_once(tiny: TinyEngine, model: Any) -> None:
    answers = ask(tiny, list(REQUESTS.values()))
    assert answers[0]["meta_info"]["smc"]["resamples"] > 1
    for answer in answers:
        check(model, answer)
    alone = [ask(tiny, [request | {"seed": i}])[0] for i, request in enumerate(REQUESTS.values())]
    assert [answer["output_ids"] for answer in alone] == [answer["output_ids"] for answer in answers]
    assert idle_pool(tiny.engine)["token_usage"] in (0, None)


@pytest.mark.parametrize("name", ["smc", "exact", "greedy"])
def test_the_prompt_too(tiny: TinyEngine, model: Any, name: str) -> None:
    prompt = [2 + i * 7 % 60 for i in range(90)]  # more than a chunk
    [answer] = ask(tiny, [REQUESTS[name]], prompt, logprob_start_len=0)
    check(model, answer, prompt)
    first, *rest = answer["meta_info"]["input_token_logprobs"]
    assert first[0] is None
    laws = log_probs(model, prompt)
    expected = laws[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([value for value, _, _ in rest]), expected, atol=1e-3, rtol=0)


def test_asking_changes_no_answer_and_others_need_not_ask(tiny: TinyEngine, model: Any) -> None:
    params = [sampling_params(**request, seed=7) | {"max_new_tokens": 30} for request in REQUESTS.values()]
    plain = tiny.engine.generate(input_ids=[PROMPT] * len(params), sampling_params=params)
    asking = [index % 2 == 0 for index in range(len(params))]
    mixed = tiny.engine.generate(
        input_ids=[PROMPT] * len(params),
        sampling_params=params,
        return_logprob=asking,
        top_logprobs_num=[3 if asks else 0 for asks in asking],
        token_ids_logprob=[[4, 40] if asks else None for asks in asking],
    )
    assert [answer["output_ids"] for answer in mixed] == [answer["output_ids"] for answer in plain]
    for asks, answer in zip(asking, mixed, strict=True):
        if asks:
            check(model, answer)
        else:
            assert "output_token_logprobs" not in answer["meta_info"]


def test_streamed_entries_are_those_of_the_whole_answer(tiny: TinyEngine) -> None:
    def run(stream: bool) -> list[dict[str, Any]]:
        params = sampling_params(temperature=0.8, max_new_tokens=40, ignore_eos=True, seed=3, smc=RESAMPLED)
        answer = tiny.engine.generate(
            input_ids=PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=2, stream=stream
        )
        return list(answer) if stream else [answer]

    [whole], chunks = run(False), run(True)
    assert len(chunks) > 2
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert chunks[-1]["meta_info"][name] == whole["meta_info"][name]
        lengths = [len(chunk["meta_info"][name]) for chunk in chunks]
        assert lengths == sorted(lengths)
