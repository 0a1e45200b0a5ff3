"""What sampling parameters do over HTTP. Cases B20, B22, B24 and B26 of the issue trackers."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from tests.server.asking import ASK, CHAT, COMPLETE, COMPLETIONS, post, refused, text_of

pytestmark = pytest.mark.engine


def at_once(bodies: list[dict[str, Any]], http: httpx.Client, path: str = COMPLETIONS) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: post(http, path, body), bodies))


# -- seeds (B20) ---------------------------------------------------------------------------------------------


def test_a_seed_gives_one_answer_whatever_else_runs(http: httpx.Client) -> None:
    body = COMPLETE | {"temperature": 1, "max_tokens": 30, "seed": 7}
    alone = {text_of(post(http, COMPLETIONS, body)) for _ in range(3)}
    assert len(alone) == 1
    others = [body | {"seed": seed} for seed in range(1, 6)]
    unseeded = [{key: value for key, value in body.items() if key != "seed"} for _ in range(5)]
    for _ in range(2):
        first, *rest = at_once([body, *others, *unseeded], http)
        assert {text_of(first)} == alone
        assert len({text_of(answer) for answer in rest}) == len(rest)


def test_answers_of_one_seed_differ_and_come_again(http: httpx.Client) -> None:
    body = COMPLETE | {"temperature": 1, "max_tokens": 16, "seed": 7, "n": 4}
    first, again = ([choice["text"] for choice in post(http, COMPLETIONS, body)["choices"]] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4
    assert text_of(post(http, COMPLETIONS, body, n=1)) == first[0]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_any_integer_is_a_seed(http: httpx.Client, seed: int) -> None:
    assert len({text_of(post(http, COMPLETIONS, COMPLETE, seed=seed)) for _ in range(2)}) == 1


# -- penalties (B22) -----------------------------------------------------------------------------------------

HELLO: dict[str, Any] = {"prompt": "hello hello hello hello hello hello", "temperature": 0, "max_tokens": 48}


def test_penalties_see_the_block_they_are_in(http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    """In blocks of nine tokens, fewer repeats the higher the penalty. (That the answer is plain decoding's is tested on
    float32, in tests/engine/test_tiny_sampling.py.)"""
    settings: list[dict[str, Any]] = [{"frequency_penalty": value} for value in (-2, 0, 2)]
    settings += [{"presence_penalty": 2}, {"repetition_penalty": 1.5}]
    answers = at_once([HELLO | setting | {"smc": {"draft_length": 8}} for setting in settings], http)
    texts = [text_of(answer) for answer in answers]
    tokens = [tokenizer.encode(text) for text in texts]
    repeats = [len(one) - len(set(one)) for one in tokens]
    assert repeats[0] >= repeats[1] > repeats[2]
    assert max(Counter(tokens[2]).values()) < max(Counter(tokens[1]).values()) <= max(Counter(tokens[0]).values())
    assert repeats[3] < repeats[1]
    assert repeats[4] < repeats[1]


@pytest.mark.parametrize(
    ("field", "value"), [("frequency_penalty", -3), ("presence_penalty", 3), ("repetition_penalty", 0)]
)
def test_penalties_out_of_range(http: httpx.Client, field: str, value: float) -> None:
    assert field in refused(http, COMPLETIONS, HELLO, **{field: value})["message"]


# -- temperature (B24) ---------------------------------------------------------------------------------------

CHOICE: dict[str, Any] = {"prompt": "The answer to your question is:", "max_tokens": 1}


def two_way_law(http: httpx.Client, ids: dict[str, int], temperature: float) -> float:
    """Probability of ` no` between the two, by the target's own log-probabilities."""
    values = {}
    for word, token in ids.items():
        body = CHOICE | {"logit_bias": {str(token): 100}, "temperature": 0, "logprobs": 1}
        choice = post(http, COMPLETIONS, body)["choices"][0]
        assert choice["text"] == word
        values[word] = choice["logprobs"]["token_logprobs"][0]
    return 1 / (1 + math.exp((values[" yes"] - values[" no"]) / temperature))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, None])
def test_the_temperature_is_the_requests_own(
    http: httpx.Client, tokenizer: PreTrainedTokenizerBase, temperature: float | None
) -> None:
    """400 answers in one batch with others of other temperatures; without one it is 1."""
    own = {} if temperature is None else {"temperature": temperature}
    ids = {word: tokenizer.encode(word)[0] for word in (" yes", " no")}
    two_way = CHOICE | {"logit_bias": {str(token): 100 for token in ids.values()}}
    bodies = [two_way | own | {"seed": 100 + i, "n": 100} for i in range(4)]
    beside = [two_way | {"temperature": other, "n": 4} for other in (0, 3.0)]
    *answers, greedy, _ = at_once([*bodies, *beside], http)
    expected = two_way_law(http, ids, temperature or 1.0)
    counts = Counter(choice["text"] for answer in answers for choice in answer["choices"])
    assert set(counts) <= {" yes", " no"}
    share = counts[" no"] / 400
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    assert {choice["text"] for choice in greedy["choices"]} == {" no" if expected > 0.5 else " yes"}


def test_top_k_alone_is_not_greedy(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, {"prompt": "Once upon a time", "top_k": 50, "max_tokens": 6, "n": 20})
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
    for n, best_of in ((2, 4), (2, 1), (3, 2)):
        if best_of == 1:
            continue  # asks for nothing: docs/api.md
        assert refused(http, COMPLETIONS, COMPLETE, n=n, best_of=best_of)["param"] == "best_of"
