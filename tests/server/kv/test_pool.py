"""A pool of 1,500 KV slots over HTTP: what cannot fit, what is shared, and that nothing leaks."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import psutil
import pytest

from tests.server.asking import CHAT, GENERATE
from tests.server.kv.small_pool import FAST, POOL, ROUTES, Answer, Client, K, N, body, in_background, started, tokens
from tests.server.running_server import Server

pytestmark = pytest.mark.engine

# -- what cannot fit -----------------------------------------------------------------------------------------

IMPOSSIBLE = [(400, 1500), (1400, 20)]  # prompt tokens, max_tokens: not with N = 8


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("n_prompt", "max_tokens"), IMPOSSIBLE)
def test_a_population_that_never_fits_is_refused_at_once(
    client: Client, path: str, n_prompt: int, max_tokens: int, streams: bool
) -> None:
    start = time.monotonic()
    request = body(path, tokens(n_prompt), max_tokens, smc={"n_particles": N}, stream=streams)
    assert_names_the_limit(client.post(path, request))
    assert time.monotonic() - start < FAST
    assert client.ask(path, tokens(5), 5).n_tokens == 5
    assert time.monotonic() - start < 2 * FAST


def assert_names_the_limit(response: httpx.Response) -> None:
    assert response.status_code in (400, 503), response.text
    message = response.json()["error"]["message"]
    assert re.search(rf"KV slots.*{POOL}", message), message
    assert "lower max_tokens or smc.n_particles" in message


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("n_prompt", "max_tokens"),
    [
        (1400, 20),
        (400, 600),
        (400, 1500),
    ],
)
def test_the_servers_own_population_is_lowered_to_what_fits(
    client: Client, path: str, n_prompt: int, max_tokens: int
) -> None:
    answer = client.ask(path, tokens(n_prompt), max_tokens)
    assert answer.finish == "length"
    n = answer.smc["n_particles"]
    assert 1 <= n < N
    assert n_prompt + n * answer.n_tokens <= POOL
    assert n_prompt + (n + 1) * (answer.n_tokens + 2) > POOL, "one particle more would have fitted, too"
    assert n_prompt + max_tokens > POOL or answer.n_tokens == max_tokens


@pytest.mark.parametrize("path", ROUTES)
def test_eight_answers_wait_for_each_other(client: Client, path: str) -> None:
    """B30: eight groups of eight need more than six times the pool."""
    response = client.post(path, body(path, tokens(5), 200, sampling={"n": 8}))
    assert response.status_code == 200, response.text
    answers = response.json()
    if path == GENERATE:
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [200] * 8
    else:
        assert answers["usage"]["completion_tokens"] == 8 * 200
        assert [choice["finish_reason"] for choice in answers["choices"]] == ["length"] * 8


@pytest.mark.parametrize("smc", [{}, {"n_particles": 1}, {"n_particles": N}, {"mode": "off"}], ids=str)
@pytest.mark.parametrize("path", ROUTES)
def test_a_prompt_longer_than_the_pool_is_refused(client: Client, path: str, smc: dict[str, Any]) -> None:
    response = client.post(path, body(path, tokens(POOL + 100), 10, smc=smc))
    assert response.status_code == 400, response.text
    assert str(POOL - 6) in response.json()["error"]["message"]


def test_impossible_requests_do_not_hold_up_the_others(client: Client) -> None:
    """What runs, what waits and what is tiny is answered as if the impossible requests had not been there."""
    long = [body(GENERATE, tokens(20, seed), 60, seed=seed) for seed in range(3)]  # the third waits for rows
    alone = [client.post(GENERATE, request).json()["output_ids"] for request in long]
    tiny = client.ask(GENERATE, tokens(5), 5)
    with in_background(client, *((GENERATE, request) for request in long)) as answers:
        started(client)
        impossible = [
            (path, body(path, tokens(n_prompt), max_tokens, smc={"n_particles": N}))
            for path in ROUTES
            for n_prompt, max_tokens in IMPOSSIBLE
        ]
        start = time.monotonic()
        with in_background(client, *impossible) as refusals:
            assert client.ask(GENERATE, tokens(5), 5).text == tiny.text
        assert time.monotonic() - start < 2 * FAST
        for refusal in refusals:
            assert_names_the_limit(refusal.result())
    assert [answer.result().json()["output_ids"] for answer in answers] == alone


# -- nothing leaks -------------------------------------------------------------------------------------------

N_REQUESTS, CONCURRENCY, ROUNDS = 300, 8, 3
LEAVES_AFTER = 0.08  # s


@dataclass(frozen=True)
class Mixed:
    """One request of the mixed load, and how it has to end."""

    kind: str
    path: str
    request: dict[str, Any]

    @classmethod
    def draw(cls, rng: random.Random) -> Mixed:
        kind = rng.choice(["length", "length", "stop", "eos", "stream", "leaves", "leaves stream"] + ["refused"] * 2)
        path = rng.choice(ROUTES)
        max_tokens = rng.randint(1, 30)
        fields: dict[str, Any] = {"smc": {"n_particles": rng.choice((1, 2, 4, 8)), "draft_length": rng.randint(1, K)}}
        sampling: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.0))}
        if rng.random() < 0.1:
            fields["smc"] = {"mode": "off"}
        if kind == "stop":
            sampling["stop"] = ["t9", "t1", "t3"]
        elif kind == "refused":
            sampling |= rng.choice([{"n": 0}, {"temperature": -1}, {"top_p": 7}, {"top_k": -5}, {"min_p": 2}])
        elif kind.startswith("leaves"):
            max_tokens = 170
        sampling["ignore_eos"] = kind not in ("eos", "stop")
        fields["stream"] = kind.endswith("stream")
        prompt = tokens(rng.randint(1, 80), rng.randrange(1 << 30))
        if rng.random() < 0.3:
            prompt = tokens(80, 0)[: len(prompt)]  # a prefix that others have, too
        request = body(path, prompt, max_tokens, seed=rng.randrange(1 << 30), sampling=sampling, **fields)
        return cls(kind, path, request)

    def run(self, client: Client) -> str:
        """Send it; the answer must be the one that its kind gets."""
        if self.kind == "leaves":
            try:
                return f"{self.kind}: {client.post(self.path, self.request, timeout=LEAVES_AFTER).status_code}"
            except httpx.ReadTimeout:
                return f"{self.kind}: left"
        if self.request["stream"]:
            with client.http.stream("POST", self.path, json=self.request) as response:
                assert response.status_code == 200, response.read()
                lines = (line for line in response.iter_lines() if line)
                if self.kind == "leaves stream":
                    assert next(lines).startswith("data: {")
                    return f"{self.kind}: left"
                assert list(lines)[-1] == "data: [DONE]"
            return self.kind
        response = client.post(self.path, self.request)
        if self.kind == "refused":
            assert response.status_code == 400, (self, response.text)
            return self.kind
        assert response.status_code == 200, (self, response.text)
        answer = Answer.of(self.path, response.json())
        limit = self.request.get("max_tokens") or self.request["sampling_params"]["max_new_tokens"]
        assert (answer.finish == "length") == (answer.n_tokens == limit) or answer.finish == "stop"
        assert self.kind != "length" or answer.n_tokens == limit
        return f"{self.kind}: {answer.finish}"


def test_mixed_requests_leave_nothing_behind(client: Client, kv_server: Server) -> None:
    """300 requests, eight at a time, three times: the pool is empty after each round, and memory levels off."""
    [scheduler] = [
        process
        for process in psutil.Process(kv_server.process.pid).children(recursive=True)
        if "scheduler" in "".join(process.cmdline())
    ]
    rng = random.Random(0)
    resident = []
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            ends = Counter(pool.map(lambda mixed: mixed.run(client), [Mixed.draw(rng) for _ in range(N_REQUESTS)]))
        client.assert_empty()
        resident.append(scheduler.memory_info().rss / 2**20)
        print(dict(ends), f"{resident[-1]:.0f} MiB")  # `pytest -s` shows how hard it was
        assert min(ends[f"{kind}: left"] for kind in ("leaves", "leaves stream")) > 10
        assert min(ends["stop: stop"], ends["eos: stop"]) > 5
        assert ends["refused"] > 30
    assert resident[2] - resident[1] < 16, "MiB more after 300 requests of the kinds already seen"


def test_the_smallest_requests_share_one_batch(client: Client) -> None:
    """N = 1, K = 1, one token, a prompt of one token: together they are answered as each is alone."""
    requests: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
        (tokens(20, 1), {"max_new_tokens": 20}, {}),
        ([7], {"max_new_tokens": 20}, {}),
        (tokens(20, 2), {"max_new_tokens": 1}, {}),
        (tokens(33, 3), {"max_new_tokens": 20}, {"n_particles": 1}),
        (tokens(70, 4), {"max_new_tokens": 20}, {"draft_length": 1}),
        (tokens(5, 5), {"max_new_tokens": 2, "temperature": 0.0}, {}),
        (tokens(5, 6), {"max_new_tokens": 3}, {"mode": "off"}),
        ([9], {"max_new_tokens": 1}, {"n_particles": 1, "draft_length": 1}),
    ]
    params = [
        sampling | {"ignore_eos": True, "sampling_seed": seed, "custom_params": {"smc": smc}}
        for seed, (_, sampling, smc) in enumerate(requests)
    ]
    prompts = [prompt for prompt, _, _ in requests]
    alone = [
        client.post(GENERATE, {"input_ids": prompt, "sampling_params": one}).json()["output_ids"]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [len(answer) for answer in alone] == [one["max_new_tokens"] for one in params]
    assert client.is_idle()
    together = client.post(GENERATE, {"input_ids": prompts, "sampling_params": params}).json()
    assert [answer["output_ids"] for answer in together] == alone


# -- what is shared ------------------------------------------------------------------------------------------

SECRET = tokens(640, 7)  # twice that fits the pool


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_prompt_is_cached_for_its_own_tenant_only(client: Client, path: str, field: str) -> None:
    def cached(**tenant: str) -> int:
        answer = client.ask(path, SECRET, 4, **tenant)
        assert answer.finish == "length"
        return answer.cached

    warm = len(SECRET) - 1  # the last token is always computed
    assert cached(**{field: "a"}) == 0
    assert cached(**{field: "a"}) == warm
    assert cached(**{field: "b"}) == 0
    assert cached(**{field: "a"}) == warm
    assert cached() == 0
    assert cached() == warm


def test_another_tenants_prompt_takes_as_long_as_a_new_one(client: Client) -> None:
    def seconds(salt: str) -> float:
        """Time to first token."""
        request = body(CHAT, SECRET, 1, cache_salt=salt, stream=True)
        start = time.monotonic()
        with client.http.stream("POST", CHAT, json=request) as response:
            next(line for line in response.iter_lines() if line.startswith("data: {"))
            return time.monotonic() - start

    seconds("owner")
    own, others = zip(*((seconds("owner"), seconds(f"spy {turn}")) for turn in range(10)), strict=True)
    assert median(others) > 2 * median(own)
    # The first of the others met the owner's warm prompt, the last nine no more than that.
    assert min(others) > max(sorted(own)[:8])


@pytest.mark.parametrize("value", [5, {"a": 1}, ["a", "b"], True], ids=str)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_salt_that_is_no_string_is_refused(client: Client, path: str, field: str, value: Any) -> None:
    response = client.post(path, body(path, tokens(5), 2, **{field: value}))
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_misspelt_salt_is_refused(client: Client, path: str) -> None:
    response = client.post(path, body(path, tokens(5), 2, cache_sallt="a"))
    assert response.status_code == 400
    assert "did you mean cache_salt" in response.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["smc", "greedy"])
def test_the_next_turn_of_a_chat_prefills_only_its_new_tokens(client: Client, mode: str) -> None:
    more, sampling = tokens(7, 12), {"temperature": 0.0 if mode == "greedy" else 1.0}
    for seed in range(100, 110):
        question = tokens(100, seed)
        first = client.post(CHAT, body(CHAT, question, 12, seed=0, sampling=sampling)).json()
        text = first["choices"][0]["message"]["content"]
        if len(text.split()) == 12:
            break  # words only: text that is sent back is the same tokens
    else:
        pytest.fail("no answer without special tokens")
    second = body(CHAT, question, 12, seed=1)
    second["messages"] += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": " ".join(f"t{token}" for token in more)},
    ]
    answer = client.post(CHAT, second).json()
    assert answer["usage"]["prompt_tokens"] == 100 + 12 + 7
    # At most the answer's last token, which was never fed, has to be computed with the new ones.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100 + 12 - 1
    cold = client.post(CHAT, second | {"cache_salt": "cold"}).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"] == cold["choices"]


def test_few_shot_requests_share_their_examples(client: Client) -> None:
    examples = tokens(200, 21)
    prompts = [examples + tokens(10, 30 + i) for i in range(6)]
    cold = [client.ask(GENERATE, prompt, 10, seed=i, cache_salt=f"{i}") for i, prompt in enumerate(prompts)]
    assert {answer.cached for answer in cold} == {0}
    client.ask(GENERATE, prompts[0], 1)
    requests = [(GENERATE, body(GENERATE, prompt, 10, seed=i)) for i, prompt in enumerate(prompts)]
    with in_background(client, *requests) as answers:
        pass
    warm = [Answer.of(GENERATE, answer.result().json()) for answer in answers]
    assert min(answer.cached for answer in warm) >= len(examples)
    assert [answer.text for answer in warm] == [answer.text for answer in cold]


# -- metrics -------------------------------------------------------------------------------------------------


def test_metrics_tell_what_the_particles_hold(client: Client) -> None:
    prompt = tokens(50, 71)
    before = client.metrics()
    time.sleep(1.1)  # the gauges are set once a second
    request = body(GENERATE, prompt, 150, smc={"n_particles": N, "resample_threshold": 1.0})
    with in_background(client, (GENERATE, request)) as [answer]:
        samples = []
        while not answer.done():
            samples.append(client.metrics())
            time.sleep(0.05)
    report = answer.result().json()["meta_info"]["smc"]
    seen = [sample for sample in samples if sample["smc_particles_live"]]
    assert seen, "no particles were seen"
    for sample in seen:
        assert sample["smc_particles_live"] == N
        assert len(prompt) <= sample["smc_kv_slots_shared"] <= sample["smc_kv_slots_in_use"]
        assert sample["smc_kv_slots_in_use"] <= report["kv_tokens_peak"] < POOL
        lengths = sample["smc_kv_slots_in_use"] / (1 - sample["smc_kv_saved_ratio"])
        assert N * len(prompt) <= round(lengths) <= N * (len(prompt) + 150)
    after = client.metrics()
    assert after["smc_resamples_total"] - before["smc_resamples_total"] == report["resamples"] > 10
    assert after["smc_group_shrinks_total"] == before["smc_group_shrinks_total"]
    grown = [sample["smc_resamples_total"] for sample in samples]
    assert grown == sorted(grown)
    assert len(set(grown)) > 2


def test_groups_shrink_under_pressure_and_answer_in_full(client: Client) -> None:
    """Together they need four times the pool; admission promises it to them all."""
    before = client.metrics()
    requests = [
        (GENERATE, body(GENERATE, tokens(20, 80 + i), 120, seed=i, smc={"resample_threshold": 0.0})) for i in range(6)
    ]
    with in_background(client, *requests) as responses:
        pass
    answers = [Answer.of(GENERATE, response.result().json()) for response in responses]
    assert {(answer.n_tokens, answer.finish) for answer in answers} == {(120, "length")}
    shrinks = client.metrics()["smc_group_shrinks_total"] - before["smc_group_shrinks_total"]
    assert shrinks == sum(answer.smc["shrinks"] for answer in answers) > 0
