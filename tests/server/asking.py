"""Requests that the server tests share, and how their answers are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from smc_sglang.cli import DEMO_NAME

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ASK: dict[str, Any] = {
    "model": DEMO_NAME,
    "messages": QUESTION,
    "temperature": 0.7,
    "max_tokens": 24,
    "seed": 7,
    "smc": {"n_particles": 4, "draft_length": 4},
}
COMPLETE: dict[str, Any] = {
    "prompt": "The capital of France is",
    "temperature": 0.7,
    "max_tokens": 12,
    "seed": 1,
}
NATIVE: dict[str, Any] = {
    "text": "The capital of France is",
    "sampling_params": {"temperature": 0.7, "max_new_tokens": 12, "sampling_seed": 1},
}
PLAIN = {CHAT: ASK, COMPLETIONS: COMPLETE, GENERATE: NATIVE}


def api_url(http: httpx.Client) -> str:
    """What the `openai` client wants to know."""
    return f"{str(http.base_url).rstrip('/')}/v1"


def at_once(run: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """Sixteen jobs at a time; their results in order."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(run, jobs))


def post(http: httpx.Client, path: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The answer to a request that must succeed; a change to None leaves the field out."""
    response = http.post(path, json=_given(body | changes))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(http: httpx.Client, path: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The error object of a request that must be a 400 in OpenAI's shape: one sentence."""
    response = http.post(path, json=body | changes)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    return error


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data events of a stream, which must end with [DONE]."""
    done = False
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            assert not done, "data after [DONE]"
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line.removeprefix("data: "))
    assert done, "a stream ends with [DONE]"


def streamed(http: httpx.Client, path: str, body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """All events of a stream that must succeed; a change to None leaves the field out."""
    with http.stream("POST", path, json=_given(body | changes) | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        return list(events(response))


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a chat or completion stream."""
    text = ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
    return text


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    """The text of one choice of an answer, or of `/generate`'s answer."""
    if "choices" not in answer:
        return str(answer["text"])
    choice = answer["choices"][index]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
