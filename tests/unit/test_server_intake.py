"""What request bodies may say, and where `smc` goes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.errors import RequestError
from server.intake import Intake, Route
from smc_sglang.config import SmcConfig

CHAT = Route("/v1/chat/completions", frozenset({"messages", "model", "temperature", "custom_params"}), openai=True)
NATIVE = Route("/generate", frozenset({"text", "sampling_params"}), openai=False)


@pytest.fixture
def intake() -> Intake:
    return Intake(SmcConfig(max_particles=8), lambda: "tiny")


def rewritten(intake: Intake, route: Route, body: Any) -> Any:
    return json.loads(intake.rewrite(route, json.dumps(body).encode()))


def refusal(intake: Intake, route: Route, body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        intake.rewrite(route, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def test_smc_travels_beside_the_clients_own_custom_params(intake: Intake) -> None:
    body = {"messages": [], "smc": {"n_particles": 2}, "custom_params": {"mine": 1}}
    assert rewritten(intake, CHAT, body) == {
        "messages": [],
        "model": "tiny",
        "custom_params": {"mine": 1, "smc": {"n_particles": 2}},
    }


@pytest.mark.parametrize("params", [None, {}, {"temperature": 1}])
def test_generate_gets_it_in_sampling_params(intake: Intake, params: Any) -> None:
    body = rewritten(intake, NATIVE, {"text": "x", "smc": {"mode": "off"}, "sampling_params": params})
    assert body == {
        "text": "x",
        "sampling_params": {**(params or {}), "custom_params": {"smc": {"mode": "off"}}},
    }


def test_generate_with_one_sampling_params_per_prompt(intake: Intake) -> None:
    body = {"text": ["x", "y"], "smc": {"n_particles": 2}, "sampling_params": [{"temperature": 1}, {}]}
    params = rewritten(intake, NATIVE, body)["sampling_params"]
    assert [entry["custom_params"]["smc"] for entry in params] == [{"n_particles": 2}] * 2


@pytest.mark.parametrize("prompt", ["", [], ["Hi", ""], [[1, 2], []]])
def test_prompts_without_tokens_are_refused(intake: Intake, prompt: Any) -> None:
    assert refusal(intake, NATIVE, {"text": prompt}).param == "text"


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "you"]])
def test_prompts_with_tokens_pass(intake: Intake, prompt: Any) -> None:
    assert rewritten(intake, NATIVE, {"text": prompt})["text"] == prompt


def test_bodies_without_smc_get_no_custom_params(intake: Intake) -> None:
    assert rewritten(intake, CHAT, {"messages": [], "smc": None}) == {"messages": [], "model": "tiny"}


@pytest.mark.parametrize("model", [None, "default", "tiny"])
def test_served_model_is_filled_in(intake: Intake, model: Any) -> None:
    assert rewritten(intake, CHAT, {"messages": [], "model": model})["model"] == "tiny"


def test_unknown_model_is_404(intake: Intake) -> None:
    error = refusal(intake, CHAT, {"messages": [], "model": "gpt-x"})
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'gpt-x'" in str(error)
    assert "'tiny'" in str(error)


@pytest.mark.parametrize(
    ("smc", "param", "says"),
    [
        ({"n_particles": 9}, "smc.n_particles", "from 1 to 8"),
        ({"n_particles": 0}, "smc.n_particles", "greater than or equal to 1"),
        ({"n_particles": True}, "smc.n_particles", "integer"),
        ({"n_particles": "4"}, "smc.n_particles", "integer"),
        ({"draft_length": 65}, "smc.draft_length", "less than or equal to 64"),
        ({"resample_threshold": 1.5}, "smc.resample_threshold", "less than or equal to 1"),
        ({"mode": "fast"}, "smc.mode", "'smc'"),
        ({"particles": 3}, "smc.particles", "n_particles"),
        ([1], "smc", "object"),
        ("off", "smc", "object"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, NATIVE], ids=["chat", "generate"])
def test_bad_smc_names_field_and_range(intake: Intake, route: Route, smc: Any, param: str, says: str) -> None:
    error = refusal(intake, route, {"smc": smc})
    assert (error.status, error.param) == (400, param)
    assert says in str(error)


def test_smc_inside_custom_params_is_validated_too(intake: Intake) -> None:
    error = refusal(intake, CHAT, {"custom_params": {"smc": {"n_particles": 0}}})
    assert error.param == "smc.n_particles"
    body = rewritten(intake, CHAT, {"custom_params": {"smc": {"n_particles": 3}}})
    assert body["custom_params"] == {"smc": {"n_particles": 3}}


def test_smc_given_twice_is_refused(intake: Intake) -> None:
    error = refusal(intake, CHAT, {"smc": {}, "custom_params": {"smc": {}}})
    assert "given twice" in str(error)


@pytest.mark.parametrize("route", [CHAT, NATIVE], ids=["chat", "generate"])
@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"text"', b"\xff\xfe{}", b'{"seed": NaN}'])
def test_what_is_no_json_object_is_refused(intake: Intake, route: Route, body: bytes) -> None:
    assert "JSON" in str(refusal(intake, route, body))


def test_typo_names_the_nearest_field(intake: Intake) -> None:
    error = refusal(intake, CHAT, {"messages": [], "tempurature": 0})
    assert error.param == "tempurature"
    assert str(error).endswith("did you mean temperature?")


def test_typo_near_nothing(intake: Intake) -> None:
    assert str(refusal(intake, NATIVE, {"zzzzqq": 1})) == "zzzzqq is not a known field of /generate"


def test_harmless_openai_fields_pass(intake: Intake) -> None:
    body = {"user": "u", "metadata": {}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    assert rewritten(intake, CHAT, body).items() >= body.items()


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("functions", [], [{"name": "f"}]),
        ("best_of", 1, 4),
        ("suffix", "", "end"),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x"}),
    ],
)
def test_openai_fields_that_would_be_ignored(intake: Intake, field: str, neutral: Any, asking: Any) -> None:
    rewritten(intake, CHAT, {field: neutral})
    assert refusal(intake, CHAT, {field: asking}).param == field


def test_stream_options_need_a_stream(intake: Intake) -> None:
    route = Route("/v1/completions", frozenset({"stream", "stream_options"}), openai=True)
    options = {"include_usage": True}
    assert refusal(intake, route, {"stream_options": options}).param == "stream_options"
    assert rewritten(intake, route, {"stream": True, "stream_options": options})["stream_options"] == options


@pytest.mark.parametrize("value", [0, -1])
def test_no_tokens_is_refused(intake: Intake, value: int) -> None:
    route = Route("/v1/completions", frozenset({"max_tokens"}), openai=True)
    error = refusal(intake, route, {"max_tokens": value})
    assert (str(error), error.param) == (f"max_tokens must be at least 1, got {value}", "max_tokens")


@pytest.mark.parametrize("custom", [[], "x", 3])
def test_custom_params_must_be_an_object(intake: Intake, custom: Any) -> None:
    assert refusal(intake, CHAT, {"custom_params": custom, "smc": {}}).param == "custom_params"
    error = refusal(intake, NATIVE, {"sampling_params": {"custom_params": custom}, "smc": {}})
    assert error.param == "sampling_params"
