"""What leaves a pool of 1,500 KV slots early: clients that go, pauses, aborts, flushes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.asking import CHAT, GENERATE
from tests.server.kv.small_pool import CYCLE, FAST, ROUTES, Client, N, body, in_background, started, tokens, wait_for

pytestmark = pytest.mark.engine

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
