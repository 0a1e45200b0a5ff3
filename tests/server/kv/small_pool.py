"""Requests to a server with 1,500 KV slots, how their answers are read, and a look into the server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.server.asking import CHAT, COMPLETIONS, GENERATE

ROUTES = [CHAT, COMPLETIONS, GENERATE]
VOCAB, CONTEXT, POOL, ROWS, N, K = 64, 2048, 1500, 16, 8, 4
CYCLE = 0.25  # s; far above one scheduler step of this server, on a slow machine too
FAST = 5.0  # s, for a refusal or a tiny answer


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
