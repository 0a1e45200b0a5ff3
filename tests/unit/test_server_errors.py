"""Error bodies: every shape that SGLang uses becomes OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from server.errors import RequestError, convert, describe_validation, error_response

FIELDS = frozenset({"temperature", "max_tokens", "smc", "messages", "prompt", "seed"})


@pytest.mark.parametrize(
    ("status", "body", "message", "param", "code"),
    [
        (
            400,
            {"object": "error", "message": "temperature must be low", "type": "BadRequest", "code": 400},
            "temperature must be low",
            "temperature",
            None,
        ),
        (400, {"error": {"message": "top_p must be in (0, 1]"}}, "top_p must be in (0, 1]", None, None),
        (401, {"error": "Unauthorized"}, "Unauthorized", None, "invalid_api_key"),
        (404, {"detail": "Not Found"}, "Not Found", None, None),
        (400, {"error": "unknown field `tempurature`"}, "unknown field `tempurature`", None, None),
        (
            404,
            {"error": {"message": "no such model", "param": "model", "code": "model_not_found"}},
            "no such model",
            "model",
            "model_not_found",
        ),
        (400, {"message": "smc.n_particles must be 1"}, "smc.n_particles must be 1", "smc.n_particles", None),
        (
            400,
            {"message": "max_new_tokens must be at least 0"},
            "max_tokens must be at least 0",
            "max_tokens",
            None,
        ),
        (400, {"message": "Messages cannot be empty."}, "Messages cannot be empty.", "messages", None),
    ],
)
def test_convert(status: int, body: Any, message: str, param: str | None, code: str | None) -> None:
    error = json.loads(convert(status, json.dumps(body).encode(), FIELDS, openai_names=True))["error"]
    assert error == {"message": message, "type": "invalid_request_error", "param": param, "code": code}


def test_convert_plain_text_of_a_crash() -> None:
    error = json.loads(convert(500, b"Internal Server Error", FIELDS, openai_names=True))["error"]
    assert error == {"message": "Internal Server Error", "type": "server_error", "param": None, "code": None}


def test_convert_is_idempotent() -> None:
    once = error_response(404, "no", "model", "model_not_found").body
    assert convert(404, bytes(once), FIELDS, openai_names=True) == once


def test_native_route_keeps_native_names() -> None:
    body = convert(400, b'{"message": "max_new_tokens must be at least 0"}', FIELDS, openai_names=False)
    assert json.loads(body)["error"]["message"].startswith("max_new_tokens")


class _Message(BaseModel):
    role: str


class _Body(BaseModel):
    messages: list[_Message] = Field(default_factory=list)
    stop: str | list[str] | None = None
    temperature: float = 1.0


def _refusal(body: dict[str, Any]) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(_Body).validate_python(body)
    return describe_validation([{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()])


def test_wrong_type_names_field_and_value() -> None:
    error = _refusal({"temperature": "hot"})
    assert str(error) == "temperature must be a valid number, unable to parse string as a number, got 'hot'"
    assert (error.status, error.param) == (400, "temperature")


def test_union_is_one_sentence() -> None:
    assert str(_refusal({"stop": 5})) == "stop must be a valid string or a valid list, got 5"


def test_nested_field_is_named_by_its_path() -> None:
    error = _refusal({"messages": [{"role": "user"}, {}]})
    assert (str(error), error.param) == ("messages[1].role is required", "messages[1].role")


def test_long_values_are_cut() -> None:
    assert len(str(_refusal({"temperature": "x" * 10_000}))) < 250
