"""Two ASGI layers around SGLang's routes.

:class:`OpenAIErrors` is the outermost layer of the app, since SGLang's API-key check answers above all
others. :class:`SmcExchange` is the innermost, below CORS, authentication and request metrics: it sees plain
bodies of clients that were let in, and what it refuses is counted like any other response.

Both are plain ASGI: the `receive` channel reaches SGLang untouched, which is how it notices that a client has
gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import RequestError, convert, error_response
from server.exchange import CURRENT, REPORT, Exchange
from server.intake import Intake, Route

# Routes with an error shape of their own: Anthropic's, System One's, Ollama's, and probes.
FOREIGN = ("/v1/messages", "/v1/systemone", "/api/", "/health", "/ready", "/metrics")
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_NUMPY = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY  # what SGLang's own responses allow


def local_path(scope: Scope) -> str:
    """The request's path below the server's root path."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def splice(json_object: bytes, report: Any) -> bytes:
    """A serialised JSON object with `smc` as its last member, without parsing it."""
    end = json_object.rindex(b"}")
    member = b',"' + REPORT.encode() + b'":' + orjson.dumps(report, option=_NUMPY)
    return json_object[:end] + member + json_object[end:]


class OpenAIErrors:
    """Gives every error body the shape that OpenAI's clients read."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Route]) -> None:
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or local_path(scope).startswith(FOREIGN):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def reply(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send(scope, start, body, send)

        await self.app(scope, receive, reply)

    async def _send(self, scope: Scope, start: Message, body: bytes, send: Send) -> None:
        if body:
            route = self.routes.get(local_path(scope))
            fields = route.known if route else frozenset()
            openai_names = local_path(scope).startswith("/v1/")
            body = convert(start["status"], body, fields, openai_names=openai_names)
            headers = MutableHeaders(raw=start["headers"])
            headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        await send(start)
        await send({"type": "http.response.body", "body": body})


class SmcExchange:
    """Checks the body on the way in and puts the engine's report into the response on the way out."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Route], intake: Intake) -> None:
        self.app, self.routes, self.intake = app, routes, intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        takes_smc = scope["type"] == "http" and scope["method"] in ("POST", "PUT")
        route = self.routes.get(local_path(scope)) if takes_smc else None
        if route is None:
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return
        media_type = Headers(scope=scope).get("content-type", "").split(";")[0].strip().lower()
        try:
            if media_type != "application/json":
                raise RequestError(f"content-type must be application/json, got {media_type or 'none'}")
            body = self.intake.rewrite(route, body)
        except RequestError as error:
            await error.response()(scope, receive, send)
            return
        exchange = Exchange()
        token = CURRENT.set(exchange)
        try:
            reply = _Reply(exchange, scope, send, inject=route.openai)
            await self.app(_resized(scope, len(body)), _replay(body, receive), reply)
        finally:
            CURRENT.reset(token)


class _Reply:
    """The `send` of one response.

    A stream's status line waits for its first event, so that what the engine refuses is an HTTP error and not
    an event after 200. Once all choices have finished, the last event is held until the one after it is
    known: the event before `[DONE]` gets the report. Nothing is held while tokens are still to come.
    """

    def __init__(self, exchange: Exchange, scope: Scope, send: Send, *, inject: bool) -> None:
        self.exchange, self.scope, self.send, self.inject = exchange, scope, send, inject
        self.start: Message | None = None
        self.held = b""  # a whole JSON body, or the last event of a stream
        self.streams = self.refused = False

    async def __call__(self, message: Message) -> None:
        if self.refused:
            return
        if message["type"] == "http.response.start":
            self.start = message
            content_type = MutableHeaders(raw=message["headers"]).get("content-type", "")
            self.streams = content_type.startswith("text/event-stream")
            return
        if message["type"] != "http.response.body":
            await self.send(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        await (self._event(body, more) if self.streams else self._json(body, more))

    async def _json(self, body: bytes, more: bool) -> None:
        self.held += body
        if more:
            return
        assert self.start is not None  # ASGI: the start message comes first
        if self.inject and self.start["status"] == 200 and self.exchange.report is not None:
            self.held = splice(self.held, self.exchange.report)
            MutableHeaders(raw=self.start["headers"])["content-length"] = str(len(self.held))
        await self.send(self.start)
        await self.send({"type": "http.response.body", "body": self.held})

    async def _event(self, event: bytes, more: bool) -> None:
        if self.start is not None:
            if self.exchange.refusal is not None:
                self.refused = True
                await error_response(*self.exchange.refusal)(self.scope, _never, self.send)
                return
            await self.send(self.start)
            self.start = None
        if event.startswith(_DONE):
            ready, self.held = self._with_report() + event, b""
        elif more and self.inject and self.exchange.complete:
            ready, self.held = self.held, event
        else:
            ready, self.held = self.held + event, b""
        if ready or not more:
            await self.send({"type": "http.response.body", "body": ready, "more_body": more})

    def _with_report(self) -> bytes:
        if not self.held or self.held.startswith(_ERROR):
            return self.held
        return splice(self.held, self.exchange.report)


async def _never() -> Message:
    raise RuntimeError("an error response reads nothing")


async def _read(receive: Receive) -> bytes | None:
    """The whole request body; None when the client left before it was complete."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that delivers `body` once and then what the client really sends: its disconnect."""
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _resized(scope: Scope, length: int) -> Scope:
    headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}
