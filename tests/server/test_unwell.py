"""A busy engine, one that is stuck, and one that is dead: what the others notice (the last test ends the server)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.server.asking import GENERATE
from tests.server.running_server import Server
from tests.server.thinker import CHUNK, CONTEXT

pytestmark = pytest.mark.engine

NOTICED = 8.0  # s; the server's health check waits 3 s for a stuck engine (20 s by default)


def _body(new_tokens: int, prompt: int = 4, **changes: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": [2] * prompt, "sampling_params": sampling} | changes


def _ask(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return client.post(GENERATE, json=body)


def _health(server: Server) -> int:
    return httpx.get(f"{server.url}/health", timeout=30).status_code


def _engine(server: Server) -> psutil.Process:
    """The process that holds the models."""
    (found,) = [
        process
        for process in psutil.Process(server.process.pid).children()
        if "scheduler" in "".join(process.cmdline())
    ]
    return found


@contextmanager
def _polling(server: Server) -> Iterator[list[int]]:
    """Asks for /health and /v1/models over and over; the status codes so far."""
    codes: list[int] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.2):
            codes.append(_health(server))
            codes.append(httpx.get(f"{server.url}/v1/models", timeout=30).status_code)

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield codes
        finally:
            stop.set()
        polling.result()


def test_a_busy_engine_is_healthy(thinking: Server) -> None:
    """A hundred requests at once: most of them wait for rows."""
    with thinking.client(timeout=120) as client, _polling(thinking) as codes, ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: _ask(client, _body(60)), range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert {len(answer.json()["output_ids"]) for answer in answers} == {60}
    assert len(codes) > 2
    assert set(codes) == {200}


def test_a_long_prompt_stops_nobodys_stream_for_more_than_a_chunk(thinking: Server) -> None:
    """While a prompt of thirty chunks is read, the one who streams gets a cycle after every chunk."""
    prompt = CONTEXT - 100
    with thinking.client(timeout=60) as client:
        pieces_before = pieces_during = 0
        with client.stream("POST", GENERATE, json=_body(900, stream=True, smc={"n_particles": 1})) as response:
            late: Any = None
            with ThreadPoolExecutor(1) as pool:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if pieces_before < 3:
                        pieces_before += 1
                    elif late is None:
                        # Nobody has sent this prompt before, so none of it is in the cache.
                        late = pool.submit(_ask, client, _body(1) | {"input_ids": [3] * prompt})
                    elif not late.done():
                        pieces_during += 1
    assert late.result().status_code == 200
    assert pieces_during >= prompt / CHUNK * 0.8


def test_a_waiting_long_prompt_gets_its_turn(thinking: Server) -> None:
    """First come, first served: who sends short requests all the time does not keep a long one out."""
    done = threading.Event()
    with thinking.client(timeout=60) as client, ThreadPoolExecutor(9) as pool:

        def flood() -> int:
            n = 0
            while not done.is_set():
                assert _ask(client, _body(8)).status_code == 200
                n += 1
            return n

        floods = [pool.submit(flood) for _ in range(8)]
        time.sleep(0.5)
        answer = pool.submit(_ask, client, _body(4) | {"input_ids": [4] * (CONTEXT - 100)})
        try:
            assert answer.result(timeout=30).status_code == 200
        finally:
            done.set()
        assert sum(one.result() for one in floods) > 8


def test_a_stuck_engine_is_not_healthy_until_it_goes_on(thinking: Server) -> None:
    engine = _engine(thinking)
    with thinking.client(timeout=60) as client, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(_ask, client, _body(200))
        engine.suspend()
        start = time.monotonic()
        try:
            assert _health(thinking) == 503
            assert time.monotonic() - start < NOTICED
        finally:
            engine.resume()
        assert pending.result().status_code == 200
        assert _health(thinking) == 200


def test_a_dead_engine_ends_the_server_and_every_answer(thinking: Server) -> None:
    with httpx.Client(base_url=thinking.url, timeout=60) as client, ThreadPoolExecutor(2) as pool:
        plain = pool.submit(_ask, client, _body(1500))
        with client.stream("POST", GENERATE, json=_body(1500, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            _engine(thinking).send_signal(signal.SIGKILL)
            start = time.monotonic()
            try:
                rest = "".join(lines)
            except httpx.TransportError:
                rest = ""
        with suppress(httpx.TransportError):
            assert plain.result().status_code >= 500
        assert "[DONE]" not in rest
    assert thinking.process.wait(timeout=NOTICED) != 0
    assert time.monotonic() - start < NOTICED
