"""The server as its users meet it: over HTTP, with a real engine and the embedded demo pair."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.models import SmcReport, SmcServerConfig
from smc_sglang.cli import DEMO_NAME
from tests.server.asking import (
    ASK,
    CHAT,
    COMPLETE,
    COMPLETIONS,
    GENERATE,
    NATIVE,
    PLAIN,
    QUESTION,
    api_url,
    events,
    joined,
    post,
    refused,
    streamed,
)

pytestmark = pytest.mark.engine

# -- answers -------------------------------------------------------------------------------------------------


def test_chat_answers_and_reports(http: httpx.Client) -> None:
    answers = [post(http, CHAT, ASK, seed=seed) for seed in (1, 2, 3)]
    assert any("Paris" in answer["choices"][0]["message"]["content"] for answer in answers)
    for answer in answers:
        assert answer["model"] == DEMO_NAME
        report = SmcReport.model_validate(answer["smc"])
        assert (report.mode, report.n_particles, report.draft_length) == ("smc", 4, 4)
        assert report.cycles >= 1
        assert 1 <= report.mean_ess <= 4
        assert report.particles is None


def test_same_seed_same_answer_and_stream(http: httpx.Client) -> None:
    plain = post(http, CHAT, ASK)
    again = post(http, CHAT, ASK)
    chunks = streamed(http, CHAT, ASK)
    text = plain["choices"][0]["message"]["content"]
    assert again["choices"][0]["message"]["content"] == text
    assert joined(chunks) == text
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes[-1] == plain["choices"][0]["finish_reason"]
    assert set(finishes[:-1]) == {None}


def test_stream_reports_on_its_last_event(http: httpx.Client) -> None:
    chunks = streamed(http, CHAT, ASK)
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert SmcReport.model_validate(chunks[-1]["smc"]).mode == "smc"
    assert all("smc" not in chunk for chunk in chunks[:-1])


def test_stream_with_usage_reports_on_the_usage_event(http: httpx.Client) -> None:
    plain = post(http, CHAT, ASK)
    chunks = streamed(http, CHAT, ASK, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert chunks[-1]["smc"]["cycles"] == plain["smc"]["cycles"]
    assert all("smc" not in chunk for chunk in chunks[:-1])


def test_particles_on_request(http: httpx.Client) -> None:
    answer = post(http, CHAT, ASK, smc={"n_particles": 3, "return_particles": True})
    report = SmcReport.model_validate(answer["smc"])
    assert report.particles is not None
    assert len(report.particles) == 3
    assert sum(particle.weight for particle in report.particles) == pytest.approx(1)
    assert answer["choices"][0]["message"]["content"] in [particle.text for particle in report.particles]


def test_server_defaults_apply(http: httpx.Client) -> None:
    report = post(http, CHAT, ASK, smc=None)["smc"]
    assert (report["n_particles"], report["draft_length"]) == (4, 4)


def test_mode_off(http: httpx.Client) -> None:
    answer = post(http, CHAT, ASK, smc={"mode": "off"})
    assert answer["choices"][0]["message"]["content"]
    assert answer["smc"]["mode"] == "off"
    assert answer["smc"]["n_particles"] == 1


def test_completions(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, COMPLETE)
    chunks = streamed(http, COMPLETIONS, COMPLETE)
    assert answer["model"] == DEMO_NAME
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == answer["choices"][0]["text"]
    assert SmcReport.model_validate(answer["smc"]).cycles == SmcReport.model_validate(chunks[-1]["smc"]).cycles


def test_completions_of_several_prompts_report_each(http: httpx.Client) -> None:
    answer = post(http, COMPLETIONS, COMPLETE, prompt=["One, two,", "A, B,"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [SmcReport.model_validate(report).mode for report in answer["smc"]] == ["smc", "smc"]
    chunks = streamed(http, COMPLETIONS, COMPLETE, prompt=["One, two,", "A, B,"])
    assert len(chunks[-1]["smc"]) == 2


def test_generate_reports_in_meta_info(http: httpx.Client) -> None:
    answer = post(http, GENERATE, NATIVE, smc={"n_particles": 2})
    assert answer["meta_info"]["smc"]["n_particles"] == 2
    assert "smc" not in answer
    chunks = streamed(http, GENERATE, NATIVE, smc={"n_particles": 2})
    assert chunks[-1]["text"] == answer["text"]
    assert chunks[-1]["meta_info"]["smc"] == answer["meta_info"]["smc"]


def test_one_token(http: httpx.Client) -> None:
    answer = post(http, CHAT, ASK, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert SmcReport.model_validate(answer["smc"]).mode == "smc"


def test_stop_string(http: httpx.Client) -> None:
    greedy = {"temperature": 0, "smc": None}
    text = post(http, CHAT, ASK, **greedy)["choices"][0]["message"]["content"]
    stop = text[4:9]
    cut = post(http, CHAT, ASK, **greedy, stop=[stop])
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    sampled = post(http, CHAT, ASK, stop=["a", "e"])["choices"][0]
    assert not {"a", "e"} & set(sampled["message"]["content"])


# -- clients and other routes --------------------------------------------------------------------------------


def test_openai_client(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=api_url(http), api_key="none", max_retries=0, timeout=120) as client:
        smc = {"smc": {"n_particles": 2}}
        arguments: Any = {
            "model": DEMO_NAME,
            "messages": QUESTION,
            "max_tokens": 12,
            "seed": 3,
            "temperature": 0.7,
        }
        answer = client.chat.completions.create(**arguments, extra_body=smc)
        assert answer.model_extra is not None
        assert answer.model_extra["smc"]["n_particles"] == 2
        with client.chat.completions.create(**arguments, extra_body=smc, stream=True) as stream:
            chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].model_extra is not None
        assert chunks[-1].model_extra["smc"]["n_particles"] == 2
        for streams in (False, True):
            with pytest.raises(openai.BadRequestError) as refusal:
                client.chat.completions.create(**arguments, extra_body={"smc": {"n_particles": 0}}, stream=streams)
            assert refusal.value.param == "smc.n_particles"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(**arguments | {"model": "no-such-model"})
        assert missing.value.code == "model_not_found"
        assert [model.id for model in client.models.list()] == [DEMO_NAME]


def test_server_config(http: httpx.Client) -> None:
    config = SmcServerConfig.model_validate(http.get("/v1/smc/config").json())
    assert config.model == DEMO_NAME
    assert config.draft_model
    assert (config.defaults.n_particles, config.defaults.draft_length) == (4, 4)
    assert (config.limits.n_particles, config.limits.draft_length) == (64, 8)
    schema = http.get("/openapi.json").json()["components"]["schemas"]["SmcRequest"]
    assert schema["properties"]["draft_length"]["maximum"] == 8


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/v1/models", "/docs", "/metrics"])
def test_sglangs_own_routes(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


# -- refusals ------------------------------------------------------------------------------------------------

SMC_FAULTS = [
    ({"smc": {"n_particles": 0}}, "smc.n_particles"),
    ({"smc": {"n_particles": 65}}, "smc.n_particles"),
    ({"smc": {"n_particles": "4"}}, "smc.n_particles"),
    ({"smc": {"draft_length": 0}}, "smc.draft_length"),
    ({"smc": {"draft_length": 9}}, "smc.draft_length"),
    ({"smc": {"max_stream_lag": 0}}, "smc.max_stream_lag"),
    ({"smc": {"resample_threshold": 2}}, "smc.resample_threshold"),
    ({"smc": {"resampling": "best"}}, "smc.resampling"),
    ({"smc": {"power": 0}}, "smc.power"),
    ({"smc": {"mode": "fast"}}, "smc.mode"),
    ({"smc": {"partikles": 4}}, "smc.partikles"),
    ({"smc": []}, "smc"),
    ({"tempurature": 0}, "tempurature"),
]
OPENAI_FAULTS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"n": 100_000}, "n"),
    ({"n": 0}, "n"),
    ({"top_k": -5, "temperature": 0}, "top_k"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"model": 5}, "model"),
]
FAULTS = [
    *((path, fault, field) for path in PLAIN for fault, field in SMC_FAULTS),
    *((path, fault, field) for path in (CHAT, COMPLETIONS) for fault, field in OPENAI_FAULTS),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": ["Hi", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"best_of": 4}, "best_of"),
    (GENERATE, {"sampling_params": {"tempurature": 0}}, "tempurature"),
    (GENERATE, {"sampling_params": {"temperature": -1}}, "temperature"),
    (GENERATE, {"sampling_params": {"n": 0}}, "n"),
    (GENERATE, {"sampling_params": {"temperature": "hot"}}, "temperature"),
    (GENERATE, {"sampling_params": 5}, "sampling_params"),
]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("path", "fault", "field"), FAULTS)
def test_a_bad_request_is_400_and_names_the_field(
    http: httpx.Client, path: str, fault: dict[str, Any], field: str, streams: bool
) -> None:
    error = refused(http, path, PLAIN[path] | {"stream": streams} | fault)
    assert field.split(".")[-1] in error["message"].lower()


@pytest.mark.parametrize("path", list(PLAIN))
def test_requests_after_the_bad_ones_are_fine(http: httpx.Client, path: str) -> None:
    post(http, path, PLAIN[path])


@pytest.mark.parametrize("path", list(PLAIN))
def test_malformed_json(http: httpx.Client, path: str) -> None:
    response = http.post(path, content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model(http: httpx.Client, path: str) -> None:
    response = http.post(path, json=PLAIN[path] | {"model": "no-such-model"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert post(http, path, PLAIN[path], model="default")["model"] == DEMO_NAME


@pytest.mark.parametrize(
    "field",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"functions": []},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, field: dict[str, Any]) -> None:
    for path in (CHAT, COMPLETIONS):
        post(http, path, PLAIN[path], max_tokens=1, **field)


@pytest.mark.parametrize("content", ["", " ", [], None])
def test_a_message_without_content_is_answered_or_refused(http: httpx.Client, content: Any) -> None:
    """The template's own tokens are a prompt."""
    body = ASK | {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    assert http.post(CHAT, json=body).status_code in (200, 400)
    assert post(http, COMPLETIONS, COMPLETE, prompt=" ", max_tokens=2)["usage"]["completion_tokens"] == 2
    post(http, CHAT, ASK, max_tokens=1)


def generated(http: httpx.Client) -> float:
    """Tokens of answers, by /metrics."""
    text = http.get("/metrics", headers={"Accept": "text/plain"}, follow_redirects=True).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"smc_resamples", "smc_particles_live", "smc_group_shrinks"} <= families.keys()
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in families)
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert not {"rid", "user"} & labels
    samples = families["sglang:generation_tokens"].samples
    return float(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def test_metrics_count_answers_not_drafts(http: httpx.Client) -> None:
    """B46: the counter of generated tokens is the sum of what the answers' usage says, not N times it."""
    before = generated(http)
    bodies = [ASK | {"seed": seed, "max_tokens": 8 + seed, "smc": {"n_particles": 1 + seed}} for seed in range(4)]
    total = sum(post(http, CHAT, body)["usage"]["completion_tokens"] for body in bodies)
    refused(http, CHAT, ASK, temperature=-1)
    assert generated(http) - before == total


# -- clients that leave --------------------------------------------------------------------------------------


def is_idle(http: httpx.Client) -> bool:
    """SGLang flushes its cache only when no request is running or waiting."""
    return http.post("/flush_cache").status_code == 200


def test_a_client_that_leaves_ends_its_request(http: httpx.Client) -> None:
    body = ASK | {"stream": True, "ignore_eos": True, "max_tokens": 1000}
    with http.stream("POST", CHAT, json=body) as response:
        next(events(response))
        assert not is_idle(http)
    deadline = time.monotonic() + 15  # SGLang aborts two seconds after the client has gone
    while not is_idle(http):
        assert time.monotonic() < deadline, "the request of a client that left goes on"
        time.sleep(0.5)
    assert http.get("/health").status_code == 200
    post(http, CHAT, ASK)
