"""A pool of 1,500 KV slots over HTTP: what cannot fit, what leaves early, what is shared, and that nothing leaks.

The server runs under SGLang's strict memory checks, and admission promises more KV than there is, so groups shrink and
retract under load. After every test the pool must be empty.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import psutil
import pytest

from tests.models import perturbed, tiny_llama, word_tokenizer
from tests.server.running_server import STRICT_CHECKS, Server

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = [CHAT, COMPLETIONS, GENERATE]
VOCAB, CONTEXT, POOL, ROWS, N, K = 64, 2048, 1500, 16, 8, 4
CYCLE = 0.25  # s; far above one scheduler step of this server, on a slow machine too
FAST = 5.0  # s, for a refusal or a tiny answer


@pytest.fixture(scope="module")
def kv_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kv")
    target, draft = folder / "target", folder / "draft"
    tiny_llama(target, VOCAB, seed=0, max_position=CONTEXT)
    word_tokenizer(target, VOCAB)
    perturbed(target, draft, noise=0.15, seed=1)
    server = Server.start(
        folder / "log.txt",
        *("--model-path", str(target), "--draft-model-path", str(draft), "--dtype", "float32"),
        *("--n-particles", str(N), "--draft-length", str(K), "--max-particles", str(N)),
        *("--max-total-tokens", str(POOL), "--context-length", str(CONTEXT), "--chunked-prefill-size", "64"),
        *("--max-running-requests", str(ROWS), "--served-model-name", "tiny"),
        environment=STRICT_CHECKS
        | {
            "OMP_NUM_THREADS": "1",
            # Admission expects no request to grow by more than this: it admits more than the pool can hold.
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32",
        },
    )
    yield server
    with httpx.Client(base_url=server.url, timeout=60) as http:
        Client(http).assert_empty()
    server.kill()


@pytest.fixture
def client(kv_server: Server) -> Iterator[Client]:
    """A client of the server; the server must be alive and idle afterwards.

    Under the strict checks an idle server whose pool is not whole stops.
    """
    with kv_server.client(timeout=60) as http:
        client = Client(http)
        yield client
        wait_for(client.is_idle, 10, "the server did not become idle")


# -- requests ------------------------------------------------------------------------------------------------


def tokens(n: int, seed: int = 0) -> list[int]:
    """A random prompt, of other words than any other seed's."""
    return random.Random(seed).choices(range(2, VOCAB), k=n)


def body(path: str, prompt: list[int], max_tokens: int, *, seed: int = 1, **fields: Any) -> dict[str, Any]:
    """A request of any of the routes: `max_tokens` tokens at temperature 1, whatever they are.

    Args:
        fields: more fields of the request; `sampling`, a dict, goes where the route takes sampling parameters.
    """
    sampling = fields.pop("sampling", {})
    if path == GENERATE:
        params = {"max_new_tokens": max_tokens, "sampling_seed": seed, "ignore_eos": True} | sampling
        return {"input_ids": prompt, "sampling_params": params} | fields
    text = " ".join(f"t{token}" for token in prompt)
    place = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return place | {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, "temperature": 1.0} | sampling | fields


@dataclass(frozen=True)
class Answer:
    """What the tests look at in an answer of any route."""

    text: str
    n_tokens: int
    finish: str
    cached: int
    smc: dict[str, Any]

    @classmethod
    def of(cls, path: str, answer: dict[str, Any]) -> Answer:
        if path == GENERATE:
            meta = answer["meta_info"]
            report, finish = meta.get("smc"), meta["finish_reason"]["type"]
            return cls(answer["text"], meta["completion_tokens"], finish, meta.get("cached_tokens", 0), report)
        choice, usage = answer["choices"][0], answer["usage"]
        return cls(
            choice["message"]["content"] if path == CHAT else choice["text"],
            usage["completion_tokens"],
            choice["finish_reason"],
            usage["prompt_tokens_details"]["cached_tokens"],
            answer["smc"],
        )


class Client:
    """An HTTP client that knows how to look into the server."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def post(self, path: str, request: dict[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=request, **options)

    def ask(self, path: str, *arguments: Any, **fields: Any) -> Answer:
        """The answer to :func:`body`'s request, which must succeed."""
        response = self.post(path, body(path, *arguments, **fields))
        assert response.status_code == 200, response.text
        return Answer.of(path, response.json())

    def metrics(self) -> dict[str, float]:
        """The `smc_*` metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("smc_")}

    def load(self) -> dict[str, Any]:
        """SGLang's own view, at most a second old while requests run, and of now when the server is idle."""
        load: dict[str, Any] = self.http.get("/v1/loads").json()["loads"][0]
        return load

    def is_idle(self) -> bool:
        """SGLang flushes its cache only when no request is running or waiting."""
        return self.http.post("/flush_cache").status_code == 200

    def assert_empty(self, limit: float = 10.0) -> None:
        """The server becomes idle, and then no slot, row or particle is in use."""
        wait_for(self.is_idle, limit, "the server did not become idle")
        flushed = time.time()
        wait_for(lambda: self.load()["timestamp"] > flushed, 10, "SGLang's load is not refreshed")
        load = self.load()
        assert (load["num_used_tokens"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
        gauges = {name: value for name, value in self.metrics().items() if not name.endswith("_total")}
        assert gauges.keys() == {
            "smc_particles_live",
            "smc_kv_slots_in_use",
            "smc_kv_slots_shared",
            "smc_kv_saved_ratio",
        }
        assert not any(gauges.values()), gauges


def wait_for(condition: Callable[[], bool], limit: float, problem: str) -> float:
    """Poll until `condition()`; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit, f"{problem} within {limit:.2f} s"
        time.sleep(0.01)
    return time.monotonic() - start


@contextmanager
def in_background(client: Client, *requests: tuple[str, dict[str, Any]]) -> Iterator[list[Future[httpx.Response]]]:
    """(path, body) pairs on their way, all at once; they have been answered when the block ends."""
    with ThreadPoolExecutor(len(requests)) as pool:
        yield [pool.submit(client.post, path, request) for path, request in requests]


def running(client: Client) -> bool:
    """Whether anything is decoding. (The gauges say so up to a second later.)"""
    return not client.is_idle()


def started(client: Client) -> None:
    wait_for(lambda: running(client), FAST, "no request has started")


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


# -- clients that leave --------------------------------------------------------------------------------------

# What a client leaves in the middle of: prompt, max_tokens, seconds after which it goes.
STAGES = {"arrival": (20, 180, 0.02), "prefill": (1400, 10, 0.06), "decode": (20, 180, 0.25)}
SLOW = {"draft_length": 1}  # a request that others have to wait for


def leave(client: Client, path: str, request: dict[str, Any], after: float, *, streams: bool) -> None:
    """Send a request and close the connection `after` seconds, while the server is at work."""
    if not streams:
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, request, timeout=after)
        return
    start = time.monotonic()
    timeout = httpx.Timeout(60, read=after)
    try:
        with client.http.stream("POST", path, json=request | {"stream": True}, timeout=timeout) as response:
            for _ in response.iter_lines():
                if time.monotonic() - start > after:
                    break
            else:
                pytest.fail("the answer was complete before its client left")
    except httpx.ReadTimeout:
        pass


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_leaves_frees_its_particles_within_a_second(
    client: Client, path: str, stage: str, streams: bool
) -> None:
    n_prompt, max_tokens, after = STAGES[stage]
    smc = SLOW | {"resample_threshold": 0.0}  # little is shared: each particle holds KV of its own
    leave(client, path, body(path, tokens(n_prompt, 41), max_tokens, smc=smc), after, streams=streams)
    took = wait_for(client.is_idle, 1.0 + CYCLE, "the request of a client that left goes on")
    print(f"{path} {stage} {'stream' if streams else 'plain'}: {took:.3f} s")
    start = time.monotonic()
    assert client.ask(path, tokens(1200, 42), 5, smc={"n_particles": N}).n_tokens == 5  # it needs the space
    assert time.monotonic() - start < FAST


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_a_queued_client_that_leaves_never_runs(client: Client, streams: bool) -> None:
    """Two groups of eight hold all rows; they are answered as they would be alone."""
    smc = SLOW | {"resample_threshold": 1.0}  # much is shared: both fit
    holders = [body(GENERATE, tokens(20, seed), 180, seed=seed, smc=smc) for seed in (51, 52)]
    alone = [client.post(GENERATE, request).json()["output_ids"] for request in holders]
    with in_background(client, *((GENERATE, request) for request in holders)) as answers:
        wait_for(lambda: client.load()["num_running_reqs"] == 2 * N, FAST, "the rows are not all taken")
        leave(client, CHAT, body(CHAT, tokens(20, 53), 180, smc=SLOW), 0.1, streams=streams)
        assert not any(answer.done() for answer in answers), "it was not queued"
    assert [answer.result().json()["output_ids"] for answer in answers] == alone
    assert client.is_idle(), "what was queued ran after all"


def test_another_clients_answer_is_unaffected_by_those_that_leave(client: Client) -> None:
    request = body(GENERATE, tokens(20, 61), 500, smc=SLOW | {"n_particles": 2})
    alone = client.post(GENERATE, request).json()["output_ids"]
    for streams in (False, True):
        with in_background(client, (GENERATE, request)) as [answer]:
            for n_prompt, max_tokens, after in ((20, 100, 0.02), (500, 10, 0.03), (20, 100, 0.1)):
                leaving = body(CHAT, tokens(n_prompt, 62), max_tokens, smc=SLOW | {"n_particles": 4})
                leave(client, CHAT, leaving, after, streams=streams)
            assert not answer.done()
        assert answer.result().json()["output_ids"] == alone


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


# -- pause, abort, flush -------------------------------------------------------------------------------------


def pause(client: Client, mode: str) -> None:
    assert client.post("/pause_generation", {"mode": mode}).status_code == 200


def resume(client: Client) -> None:
    assert client.post("/continue_generation", {}).status_code == 200


def test_pausing_with_retraction_withdraws_groups_as_one(client: Client) -> None:
    """While the server is paused the pool can be emptied; then all are answered, the greedy ones as if undisturbed."""
    requests = [
        body(GENERATE, tokens(20, 91), 160, sampling={"temperature": 0.0}),
        body(GENERATE, tokens(20, 92), 160, smc={"mode": "off"}),
        body(GENERATE, tokens(20, 93), 120),
    ]
    alone = [client.post(GENERATE, request).json()["output_ids"] for request in requests]
    with in_background(client, *((GENERATE, request) for request in requests)) as answers:
        started(client)
        time.sleep(0.1)
        pause(client, "retract")
        try:
            wait_for(client.is_idle, 1.0 + CYCLE, "KV was held over the pause")
            time.sleep(0.3)
            assert not any(answer.done() for answer in answers)
        finally:
            resume(client)
    again = [answer.result().json() for answer in answers]
    assert [answer["output_ids"] for answer in again[:2]] == alone[:2]
    assert len(again[2]["output_ids"]) == 120
    assert again[2]["meta_info"]["smc"]["retractions"] == 1
    assert again[2]["output_ids"][0] == alone[2][0]  # all particles start with it


def test_pausing_in_place_changes_no_answer(client: Client) -> None:
    request = body(GENERATE, tokens(20, 93), 100)
    alone = client.post(GENERATE, request).json()["output_ids"]
    with in_background(client, (GENERATE, request)) as [answer]:
        started(client)
        pause(client, "in_place")
        try:
            assert not client.is_idle()
            time.sleep(0.5)
            assert not answer.done()
        finally:
            resume(client)
    assert answer.result().json()["output_ids"] == alone


def test_a_client_that_leaves_while_paused_is_forgotten(client: Client) -> None:
    leaving, staying = body(GENERATE, tokens(20, 94), 100), body(GENERATE, tokens(20, 95), 30)
    with in_background(client, (GENERATE, staying)) as [answer]:
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave, client, GENERATE, leaving, 0.5, streams=False)
            started(client)
            pause(client, "retract")
            left.result()
        time.sleep(1.0)
        resume(client)
    assert len(answer.result().json()["output_ids"]) == 30


def finish_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    finish: str = response.json()["meta_info"]["finish_reason"]["type"]
    return finish


def test_aborting_one_request_ends_its_whole_group(client: Client) -> None:
    smc = SLOW | {"resample_threshold": 1.0}
    kept = body(GENERATE, tokens(20, 97), 150, rid="kept", smc=smc)
    alone = client.post(GENERATE, kept).json()["output_ids"]
    aborted = body(GENERATE, tokens(20, 96), 180, rid="aborted", smc=smc)
    with in_background(client, (GENERATE, aborted), (GENERATE, kept)) as [ends, goes_on]:
        wait_for(lambda: client.load()["num_running_reqs"] == 2 * N, FAST, "they do not run")
        assert client.post("/abort_request", {"rid": "aborted"}).status_code == 200
        assert finish_of(ends.result(timeout=1.0 + CYCLE)) == "abort"
        assert not goes_on.done()
    assert goes_on.result().json()["output_ids"] == alone


@pytest.mark.parametrize("how", ["abort_all", "pause"])
def test_aborting_all_ends_what_runs_and_what_waits(client: Client, how: str) -> None:
    requests = [body(GENERATE, tokens(20, 100 + i), 150, seed=i) for i in range(5)] + [body(GENERATE, tokens(1400), 10)]
    with in_background(client, *((GENERATE, request) for request in requests)) as answers:
        wait_for(lambda: client.load()["num_running_reqs"] >= N, FAST, "nothing runs")
        start = time.monotonic()
        if how == "pause":
            pause(client, "abort")
            resume(client)
        else:
            assert client.post("/abort_request", {"abort_all": True}).status_code == 200
        assert {finish_of(answer.result()) for answer in answers} == {"abort"}
        assert time.monotonic() - start < 1.0 + CYCLE
    assert client.is_idle()


def test_a_busy_server_does_not_flush(client: Client) -> None:
    request = body(GENERATE, tokens(20, 111), 60)
    alone = client.post(GENERATE, request).json()["output_ids"]
    with in_background(client, (GENERATE, request)) as [answer]:
        started(client)
        while not answer.done():
            client.is_idle()
    assert json.loads(answer.result().text)["output_ids"] == alone
