"""One error shape, OpenAI's: `{"error": {"message", "type", "param", "code"}}`.

SGLang answers in several shapes (flat on its OpenAI routes, `{"error": {"message"}}` on `/generate`,
`{"error": "Unauthorized"}` from its API-key check, FastAPI's `detail` for unknown routes). OpenAI's clients
read `error.message`, `error.param` and `error.code`, so every shape is converted here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

# What SGLang calls a field on its native route -> what the OpenAI routes call it.
_OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_INTERNAL_NAME = re.compile(r"\b(" + "|".join(_OPENAI_NAMES) + r")\b")
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
# xgrammar prefixes what is wrong with a grammar by the time and its own source line.
_SOURCE_LINE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_GRAMMAR = re.compile(r"Failed to compile (json|regex|ebnf|structural_tag) grammar")
_FIELD_PART = re.compile(r"[a-z][a-z0-9_-]*$")
_UNION_TAGS = {
    "str",
    "int",
    "float",
    "bool",
    "dict",
}  # pydantic's names of union members in an error's location


class RequestError(ValueError):
    """A request that is refused before the engine sees it.

    Args:
        message: one sentence that names the field.
        param: the field.
        code: OpenAI's machine-readable reason, where it has one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def response(self) -> Response:
        return error_response(self.status, str(self), self.param, self.code)


def envelope(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object for an HTTP status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = code or _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    body = orjson.dumps(envelope(status, message, param, code))
    return Response(body, status, media_type="application/json")


def convert(status: int, body: bytes, fields: Collection[str], *, openai_names: bool) -> bytes:
    """An error body of any of SGLang's shapes, in OpenAI's.

    Args:
        fields: the request fields of the route: `param` is the first of them that the message starts with.
        openai_names: rename SGLang's internal field names in the message.
    """
    message, param, code = _parse(body)
    message = _SOURCE_LINE.sub("", message).strip()
    if param is None and (grammar := _GRAMMAR.match(message)):
        kind = grammar.group(1)
        param = (
            "response_format"
            if openai_names and kind in ("json", "structural_tag")
            else kind.replace("json", "json_schema")
        )
    if openai_names:
        message = _INTERNAL_NAME.sub(lambda match: _OPENAI_NAMES[match.group()], message)
    return orjson.dumps(envelope(status, message, param or leading_field(message, fields), code))


def leading_field(message: str, fields: Collection[str]) -> str | None:
    """The field that an error sentence starts with, such as `smc.n_particles must be ...`."""
    match = re.match(r"[A-Za-z][\w.]*", message)
    if match is None:
        return None
    name = match.group().rstrip(".").lower()
    return name if name.split(".")[0] in fields else None


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """FastAPI's list of validation errors as one sentence about the first field that is wrong."""
    field = _path(errors[0]["loc"])
    # A union reports once per member: collect what each would have accepted.
    wanted = dict.fromkeys(error["msg"] for error in errors if _path(error["loc"]) == field)
    if errors[0]["type"] == "missing":
        return RequestError(f"{field} is required", param=field)
    parts = [message.removeprefix("Input should be ").removeprefix("Value error, ") for message in wanted]
    must_be = all(message.startswith("Input should be ") for message in wanted)
    text = f"{field} must be {' or '.join(parts)}" if must_be else f"{field}: {'; '.join(parts)}"
    if "input" in errors[0]:
        text += f", got {_excerpt(errors[0]['input'])}"
    return RequestError(text, param=field)


def _excerpt(value: Any, longest: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _path(location: Sequence[str | int]) -> str:
    """`("body", "messages", 0, "SomeModel", "role")` -> `messages[0].role`."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD_PART.match(part) and part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path or "body"


def _parse(body: bytes) -> tuple[str, str | None, str | None]:
    """(message, param, code) of an error body."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip(), None, None
    if isinstance(payload, dict):
        inner = payload.get("error", payload)
        if isinstance(inner, dict):
            message = inner.get("message") or inner.get("detail") or "request failed"
            code = inner.get("code")
            return str(message), inner.get("param"), code if isinstance(code, str) else None
        return str(inner), None, None
    return str(payload), None, None
