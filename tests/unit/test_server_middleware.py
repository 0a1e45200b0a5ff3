"""Reports on the way out, refusals before the status line, error shapes: a small app, a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route as Path
from starlette.testclient import TestClient

from server.exchange import CURRENT, Exchange, observe
from server.intake import Intake, Route
from server.middleware import OpenAIErrors, SmcExchange, splice
from smc_sglang.config import SmcConfig

CHAT, NATIVE = "/v1/chat/completions", "/generate"
ROUTES = {
    CHAT: Route(CHAT, frozenset({"stream", "model", "temperature", "custom_params"}), openai=True),
    NATIVE: Route(NATIVE, frozenset({"stream", "sampling_params"}), openai=False),
}
STOP = {"type": "stop"}
JSON = (b"content-type", b"application/json")


def output(text: str, *, index: int | None = None, finish: Any = None, report: Any = None) -> dict[str, Any]:
    meta = {"id": "r", "finish_reason": finish} | ({"smc": report} if report is not None else {})
    return {"text": text, "meta_info": meta} | ({} if index is None else {"index": index})


class Engine:
    """Yields what the test scripted; an exception in the script is raised."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script
        self.closed = False

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed = True

    async def _send_one_request(self, tokenized: Any) -> None:
        raise AssertionError("the script sends nothing")


def client(engine: Engine, usage: bool = False) -> TestClient:
    """An app that turns the engine's outputs into events the way SGLang's routes do."""
    observe(engine)

    async def events(body: Any) -> AsyncIterator[str]:
        try:
            async for step in engine.generate_request(body):
                finish = step["meta_info"]["finish_reason"]
                if finish and finish.get("status_code"):
                    yield 'data: {"error":{"message":"in the stream"}}\n\n'
                    break
                yield f"data: {json.dumps({'text': step['text'], 'finish': bool(finish)})}\n\n"
        except ValueError as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        if usage:
            yield 'data: {"choices":[],"usage":{}}\n\n'
        yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(events(body), media_type="text/event-stream")
        try:
            step = await anext(engine.generate_request(body))
        except ValueError as error:
            return JSONResponse({"object": "error", "message": str(error), "code": 400}, 400)
        return JSONResponse({"answer": step, "model": body.get("model")})

    async def echo(request: Request) -> Response:
        return PlainTextResponse("gone", 410)

    intake = Intake(SmcConfig(), lambda: "tiny")
    app = Starlette(
        routes=[
            Path(CHAT, answer, methods=["POST"]),
            Path(NATIVE, answer, methods=["POST"]),
            Path("/x", echo),
        ],
        middleware=[Middleware(SmcExchange, routes=ROUTES, intake=intake)],
    )
    return TestClient(OpenAIErrors(app, ROUTES))


def stream(engine: Engine, path: str = CHAT, usage: bool = False) -> list[Any]:
    """The parsed data events of a streamed answer; the last is checked to be [DONE]."""
    response = client(engine, usage).post(path, json={"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("report", [{"cycles": 3}, [{"cycles": 3}]], ids=["object", "list of one"])
def test_report_of_a_plain_answer(report: Any) -> None:
    response = client(Engine([output("hi", finish=STOP, report=report)])).post(CHAT, json={})
    assert response.json()["smc"] == {"cycles": 3}
    assert response.json()["answer"]["meta_info"]["smc"] == {"cycles": 3}
    assert int(response.headers["content-length"]) == len(response.content)


def test_answer_without_report_is_untouched() -> None:
    response = client(Engine([output("hi", finish=STOP)])).post(CHAT, json={})
    assert set(response.json()) == {"answer", "model"}


def test_native_route_keeps_it_in_meta_info() -> None:
    response = client(Engine([output("hi", finish=STOP, report=[{"cycles": 3}])])).post(NATIVE, json={})
    assert "smc" not in response.json()
    assert response.json()["answer"]["meta_info"]["smc"] == {"cycles": 3}


def test_report_is_on_the_last_event_of_a_stream() -> None:
    events = stream(Engine([output("a"), output("b"), output("c", finish=STOP, report={"cycles": 2})]))
    assert [event["text"] for event in events] == ["a", "b", "c"]
    assert [event.get("smc") for event in events] == [None, None, {"cycles": 2}]


def test_with_include_usage_it_is_on_the_usage_event() -> None:
    events = stream(Engine([output("a"), output("b", finish=STOP, report={"cycles": 2})]), usage=True)
    assert events[-1] == {"choices": [], "usage": {}, "smc": {"cycles": 2}}
    assert all("smc" not in event for event in events[:-1])


def test_several_choices_give_a_list_by_index() -> None:
    script = [
        output("b0", index=1, finish=STOP, report={"cycles": 1}),  # complete for a moment: one choice seen
        output("a0", index=0),
        output("c0", index=2, finish=STOP),
        output("a1", index=0, finish=STOP, report={"cycles": 5}),
    ]
    events = stream(Engine(script))
    assert [event["text"] for event in events] == ["b0", "a0", "c0", "a1"]
    assert events[-1]["smc"] == [{"cycles": 5}, {"cycles": 1}, None]


def test_several_choices_without_streaming() -> None:
    exchange = Exchange()
    for index in (0, 1):
        exchange.note(index, {"finish_reason": STOP, "smc": {"cycles": index}})
    assert exchange.report == [{"cycles": 0}, {"cycles": 1}]


@pytest.mark.anyio
async def test_no_event_waits_before_the_end() -> None:
    """Event by event: each is sent before the engine is asked for the next, until the report is there."""
    sent: list[bytes] = []
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        exchange = CURRENT.get()
        assert exchange is not None
        for text in ("a", "b", "c"):
            exchange.note(0, {"finish_reason": STOP, "smc": {}} if text == "c" else {})
            event = f'data: {{"text":"{text}"}}\n\n'.encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            seen.append(len(sent))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(message["body"])

    layer = SmcExchange(app, ROUTES, Intake(SmcConfig(), lambda: "tiny"))
    await layer({"type": "http", "method": "POST", "path": CHAT, "headers": [JSON]}, receive, send)
    assert seen == [1, 2, 2]
    assert sent[-1] == b'data: {"text":"c","smc":{}}\n\ndata: [DONE]\n\n'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("path", [CHAT, NATIVE])
@pytest.mark.parametrize("streams", [False, True])
def test_engine_refusal_is_400_also_for_streams(path: str, streams: bool) -> None:
    engine = Engine([ValueError("temperature must be low")])
    response = client(engine).post(path, json={"stream": streams})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == "temperature must be low"
    assert response.json()["error"]["param"] == ("temperature" if path == CHAT else None)
    assert engine.closed


def test_scheduler_refusal_before_the_first_token_is_an_http_error() -> None:
    abort = {"type": "abort", "message": "the pool is too small", "status_code": 503}
    response = client(Engine([output("", finish=abort)])).post(CHAT, json={"stream": True})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert response.json()["error"]["message"] == "the pool is too small"


def test_refusal_in_mid_stream_stays_in_the_stream() -> None:
    events = stream(Engine([output("a"), ValueError("too late")]))
    assert events == [{"text": "a", "finish": False}, {"error": {"message": "too late"}}]


def test_scheduler_abort_in_mid_stream_stays_in_the_stream() -> None:
    abort = {"type": "abort", "message": "m", "status_code": 503}
    events = stream(Engine([output("a"), output("", finish=abort)]))
    assert events == [{"text": "a", "finish": False}, {"error": {"message": "in the stream"}}]


def test_bad_body_never_reaches_the_app() -> None:
    engine = Engine([AssertionError("reached")])
    response = client(engine).post(CHAT, json={"smc": {"n_particles": 1000}, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "smc.n_particles"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_accepted(kind: str) -> None:
    response = client(Engine([])).post(NATIVE, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"content-type must be application/json, got {kind}"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", CHAT, 405, "Method Not Allowed"),
        ("GET", "/x", 410, "gone"),
    ],
)
def test_other_errors_have_the_same_shape(method: str, path: str, status: int, message: str) -> None:
    response = client(Engine([])).request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("body", [b'{"a":1}', b'{"a":1}\n', b'data: {"a":{"b":[]}}\n\n'])
def test_splice_adds_a_last_member(body: bytes) -> None:
    spliced = splice(body, {"log_z": float("-inf")})
    assert json.loads(spliced.removeprefix(b"data: "))["smc"] == {"log_z": None}
    assert spliced.endswith(b'"smc":{"log_z":null}' + body[body.rindex(b"}") :])
