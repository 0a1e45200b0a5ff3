"""What sampling parameters do over HTTP. Cases B20, B22, B24 and B26 of the issue trackers."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.server.asking import ASK, CHAT, COMPLETE, COMPLETIONS, at_once, post, refused, text_of

pytestmark = pytest.mark.engine

WORDS: dict[str, Any] = {"prompt": "t5 t17 t9 t30"}


def completed(http: httpx.Client, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return at_once(lambda body: post(http, COMPLETIONS, body), bodies)


# -- seeds (B20) ---------------------------------------------------------------------------------------------


def test_a_seed_gives_one_answer_whatever_else_runs(twin_http: httpx.Client) -> None:
    body = WORDS | {"temperature": 1, "max_tokens": 30, "seed": 7, "ignore_eos": True}
    alone = {text_of(post(twin_http, COMPLETIONS, body)) for _ in range(3)}
    assert len(alone) == 1
    others = [body | {"seed": seed} for seed in range(1, 6)]
    unseeded = [{key: value for key, value in body.items() if key != "seed"} for _ in range(5)]
    for _ in range(2):
        first, *rest = completed(twin_http, [body, *others, *unseeded])
        assert {text_of(first)} == alone
        assert len({text_of(answer) for answer in rest}) == len(rest)


def test_answers_of_one_seed_differ_and_come_again(twin_http: httpx.Client) -> None:
    body = WORDS | {"temperature": 1, "max_tokens": 16, "seed": 7, "n": 4, "ignore_eos": True}
    first, again = ([choice["text"] for choice in post(twin_http, COMPLETIONS, body)["choices"]] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4
    assert text_of(post(twin_http, COMPLETIONS, body, n=1)) == first[0]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_any_integer_is_a_seed(twin_http: httpx.Client, seed: int) -> None:
    assert len({text_of(post(twin_http, COMPLETIONS, WORDS, seed=seed)) for _ in range(2)}) == 1


# -- penalties (B22) -----------------------------------------------------------------------------------------

HELLO: dict[str, Any] = {"prompt": "t5 t5 t5 t5", "temperature": 0, "max_tokens": 48, "ignore_eos": True}


def test_penalties_see_the_block_they_are_in(twin_http: httpx.Client) -> None:
    """In blocks of nine tokens, plain decoding's answer, and fewer repeats the higher the penalty."""
    settings: list[dict[str, Any]] = [{"frequency_penalty": value} for value in (-2, 0, 2)]
    settings += [{"presence_penalty": 2}, {"repetition_penalty": 1.5}]
    repeats = []
    for setting in settings:
        drafted, plain = (
            text_of(post(twin_http, COMPLETIONS, HELLO | setting, smc=smc))
            for smc in ({"draft_length": 8}, {"mode": "off"})
        )
        assert drafted == plain, setting
        repeats.append(48 - len(set(drafted.split())))
    assert repeats[0] > repeats[1] > repeats[2]
    assert repeats[3] < repeats[1]
    assert repeats[4] < repeats[1]


@pytest.mark.parametrize(
    ("field", "value"), [("frequency_penalty", -3), ("presence_penalty", 3), ("repetition_penalty", 0)]
)
def test_penalties_out_of_range(twin_http: httpx.Client, field: str, value: float) -> None:
    assert field in refused(twin_http, COMPLETIONS, HELLO, **{field: value})["message"]


# -- temperature (B24) ---------------------------------------------------------------------------------------

CHOICE: dict[str, Any] = {"prompt": "t5 t6 t7", "max_tokens": 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, None])
def test_the_temperature_is_the_requests_own(twin_http: httpx.Client, temperature: float | None) -> None:
    """Two tokens to choose from: 400 answers in one batch with others of other temperatures; without one it is 1."""
    told = post(twin_http, COMPLETIONS, CHOICE, temperature=0, logprobs=20)["choices"][0]["logprobs"]
    (first, log_p), (second, log_q) = list(told["top_logprobs"][0].items())[2:4]
    two_way = CHOICE | {"logit_bias": {word.strip().removeprefix("t"): 100 for word in (first, second)}}
    own = {} if temperature is None else {"temperature": temperature}
    bodies = [two_way | own | {"seed": 100 + i, "n": 100, "smc": {"n_particles": 1 + i}} for i in range(4)]
    beside = [two_way | {"temperature": other, "n": 4} for other in (0, 3.0)]
    *answers, greedy, _ = completed(twin_http, [*bodies, *beside])
    counts = Counter(choice["text"].strip() for answer in answers for choice in answer["choices"])
    assert set(counts) <= {first.strip(), second.strip()}
    expected = 1 / (1 + math.exp((log_q - log_p) / (temperature or 1.0)))
    assert 0.5 < expected < 0.99
    assert abs(counts[first.strip()] / 400 - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    assert {choice["text"].strip() for choice in greedy["choices"]} == {first.strip()}


def test_top_k_alone_is_not_greedy(twin_http: httpx.Client) -> None:
    answer = post(twin_http, COMPLETIONS, WORDS | {"top_k": 50, "max_tokens": 6, "n": 20})
    assert len({choice["text"] for choice in answer["choices"]}) > 10


# -- several answers (B26) -----------------------------------------------------------------------------------


def test_answers_come_in_order(http: httpx.Client) -> None:
    for path, body, prompts in ((CHAT, ASK, 1), (COMPLETIONS, COMPLETE | {"prompt": ["A dog", "A cat"]}, 2)):
        answer = post(http, path, body, n=2, max_tokens=6, ignore_eos=True)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * prompts))
        assert answer["usage"]["completion_tokens"] == 6 * 2 * prompts
        single = post(http, path, body, n=1, max_tokens=6, ignore_eos=True)
        assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]


def test_greedy_answers_are_the_same(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, COMPLETE, n=8, temperature=0)
    assert len({choice["text"] for choice in answer["choices"]}) == 1


def test_far_too_many_answers_are_refused_at_once(http: httpx.Client) -> None:
    start = time.monotonic()
    for n in (300, 100_000):
        assert refused(http, COMPLETIONS, COMPLETE, n=n, max_tokens=1)["param"] == "n"
    assert time.monotonic() - start < 1


def test_best_of(http: httpx.Client) -> None:
    assert post(http, COMPLETIONS, COMPLETE, best_of=1)
    for n, best_of in ((2, 4), (3, 2)):
        assert refused(http, COMPLETIONS, COMPLETE, n=n, best_of=best_of)["param"] == "best_of"
