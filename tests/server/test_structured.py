"""Structured generation as clients ask for it. Cases B02, B04, B06 and B08 of the issue trackers."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from tests.server.asking import (
    ASK,
    CHAT,
    COMPLETE,
    COMPLETIONS,
    GENERATE,
    NATIVE,
    at_once,
    joined,
    post,
    refused,
    streamed,
    text_of,
)

pytestmark = pytest.mark.engine

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# -- valid answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smc", [{}, {"grammar_semantics": "global"}, {"mode": "exact"}, {"mode": "off"}], ids=str)
def test_a_schema_is_kept(http: httpx.Client, smc: dict[str, Any]) -> None:
    """In every mode, streamed and not: the same text, and it is an instance of the schema."""
    body = ASK | {"response_format": schema_format(CITY), "max_tokens": 60, "smc": smc | {"n_particles": 4}}
    answer = post(http, CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    value = json.loads(text_of(answer))
    assert isinstance(value["city"], str)
    assert isinstance(value["population"], int)
    assert set(value) == {"city", "population"}
    assert joined(streamed(http, CHAT, body)) == text_of(answer)


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("regex", "[a-f]{6}", r"[a-f]{6}"),
        ("ebnf", 'root ::= "yes" | "no"', r"yes|no"),
        ("json_schema", json.dumps({"enum": ["red", "blue"]}), r'"red"|"blue"'),
    ],
)
def test_a_grammar_on_every_route(http: httpx.Client, field: str, value: str, pattern: str) -> None:
    native = NATIVE | {"sampling_params": NATIVE["sampling_params"] | {field: value}}
    assert re.fullmatch(pattern, post(http, GENERATE, native)["text"])
    for path, body in ((COMPLETIONS, COMPLETE), (CHAT, ASK)):
        if field in ("regex", "ebnf"):
            assert re.fullmatch(pattern, text_of(post(http, path, body, **{field: value})))
    if field == "json_schema":
        chat = ASK | {"response_format": schema_format(json.loads(value))}
        assert re.fullmatch(pattern, text_of(post(http, CHAT, chat)))


def test_a_structural_tag(http: httpx.Client) -> None:
    """Free text; whatever comes after the trigger is held to the schema."""
    shape = {
        "type": "structural_tag",
        "structures": [{"begin": "The", "schema": CITY, "end": "."}],
        "triggers": ["The"],
    }
    text = text_of(post(http, CHAT, ASK, response_format=shape, temperature=0, max_tokens=64))
    assert text.startswith("The")
    assert json.loads(text[len("The") : text.index("}") + 1])["city"]


def test_three_json_objects(http: httpx.Client) -> None:
    body = ASK | {"n": 3, "response_format": schema_format(CITY), "max_tokens": 60}
    answer = post(http, CHAT, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(json.loads(text_of(answer, index)) for index in range(3))


def test_json_object(http: httpx.Client) -> None:
    ask = "Tell me about Rome as a JSON object with the keys city and country."
    messages = [{"role": "user", "content": ask}]
    body = ASK | {"messages": messages, "temperature": 0, "max_tokens": 200, "response_format": {"type": "json_object"}}
    answer = post(http, CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert isinstance(json.loads(text_of(answer)), dict)
    assert joined(streamed(http, CHAT, body)) == text_of(answer)


def test_grammars_beside_plain_requests(http: httpx.Client) -> None:
    """B02: constrained requests never touch their neighbours' rows."""
    plain = [
        COMPLETE | {"prompt": f"{i} {word} is", "temperature": 0, "max_tokens": 12}
        for i, word in enumerate(("Berlin", "A cat", "Water", "The sun", "Paris"))
    ]
    alone = [text_of(post(http, COMPLETIONS, body)) for body in plain]
    value = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    jobs: list[tuple[str, int, dict[str, Any]]] = [("plain", i, body) for i, body in enumerate(plain)]
    jobs += [("json", i, COMPLETE | {"json_schema": json.dumps(value), "max_tokens": 40, "seed": i}) for i in range(5)]
    jobs += [("regex", i, COMPLETE | {"regex": "[a-f]{6}", "seed": i}) for i in range(5)]

    def run(job: tuple[str, int, dict[str, Any]]) -> None:
        kind, i, body = job
        text = text_of(post(http, COMPLETIONS, body))
        if kind == "plain":
            assert text == alone[i]
        elif kind == "regex":
            assert re.fullmatch("[a-f]{6}", text)
        else:
            assert isinstance(json.loads(text)["a"], bool)

    for seed in range(2):
        random.Random(seed).shuffle(jobs)
        at_once(run, jobs)
        assert http.get("/health").status_code == 200


# -- ends (B06, B08) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["logit_bias", "stop_token_ids"])
def test_no_end_inside_an_unfinished_object(http: httpx.Client, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """B06: a bias towards each id that ends a turn, or such an id as the request's own stop."""
    for end in ("<|im_end|>", "<|endoftext|>"):
        token = tokenizer.convert_tokens_to_ids(end)
        extra = {"logit_bias": {str(token): 100}} if where == "logit_bias" else {"stop_token_ids": [token]}
        body = ASK | {"response_format": schema_format(CITY), "temperature": 0, "max_tokens": 80} | extra
        text = text_of(post(http, CHAT, body))
        assert set(json.loads(text)) == {"city", "population"}
        assert end not in text


def test_a_cut_object_is_a_legal_prefix(http: httpx.Client) -> None:
    """B08a."""
    schema = {"type": "object", "properties": {"note": {"type": "string", "minLength": 50}}, "required": ["note"]}
    answer = post(http, CHAT, ASK, response_format=schema_format(schema), max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert '{"note":"'.startswith(re.sub(r"\s", "", text_of(answer))[:9])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_an_unlikely_language(http: httpx.Client, temperature: float) -> None:
    """B08b: eight characters that the prompt does not suggest, several tokens each."""
    answer = post(http, COMPLETIONS, COMPLETE, regex="[\u4e00-\u9fff]{8}", temperature=temperature, max_tokens=40)
    text = text_of(answer)
    assert len(text) == 8
    assert all("\u4e00" <= character <= "\u9fff" for character in text)


def test_the_shorter_match_does_not_always_win(http: httpx.Client) -> None:
    """B08c: `ab` and `abcd` come as often as with one particle and one drafted token."""

    def share(seed: int, **smc: Any) -> float:
        messages = [{"role": "user", "content": "Reply with the letters ab, nothing else."}]
        body = {"messages": messages, "regex": "ab|abcd", "temperature": 1, "seed": seed, "n": 48}
        answer = post(http, CHAT, body, smc=smc)
        texts = Counter(choice["message"]["content"] for choice in answer["choices"])
        assert set(texts) <= {"ab", "abcd"}
        return texts["abcd"] / 48

    four, one = share(1, n_particles=4, draft_length=8), share(2, mode="exact", n_particles=1, draft_length=1)
    assert 0.5 < one < 0.98
    assert abs(four - one) < 4 * (2 * one * (1 - one) / 48) ** 0.5


def test_a_ban_yields_to_the_grammar(http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    """B08d: all ten digits banned, and a grammar that allows nothing else."""
    bans = {str(token): -100 for digit in "0123456789" for token in tokenizer.encode(digit)}
    answer = post(http, COMPLETIONS, COMPLETE, regex="[0-9]{2}", logit_bias=bans, logprobs=1)
    assert re.fullmatch("[0-9]{2}", text_of(answer))
    assert all(math.isfinite(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"])


# -- refusals (B04) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    "schema",
    ["not a schema", {"type": "strnig"}, {"$ref": "#/$defs/missing"}, {"type": "string", "pattern": "(["}],
    ids=str,
)
def test_a_bad_schema_is_refused(http: httpx.Client, schema: Any, stream: bool) -> None:
    error = refused(http, CHAT, ASK, response_format=schema_format(schema), stream=stream)
    assert error["param"] == "response_format" or error["param"].startswith("response_format.")
    post(http, CHAT, ASK, max_tokens=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"regex": "(unclosed"},
        {"ebnf": "root ::= undefined_rule"},
        {"response_format": {"type": "xml"}},
        {"regex": "a", "ebnf": 'root ::= "a"'},
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused(http: httpx.Client, changes: dict[str, Any]) -> None:
    for path, body in ((CHAT, ASK), (COMPLETIONS, COMPLETE)):
        error = refused(http, path, body, **changes)
        assert any(field in (error["param"] or error["message"]) for field in changes)
        post(http, path, body, max_tokens=1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "integer", "multipleOf": 7},
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    ],
    ids=lambda schema: list(schema)[1],
)
def test_a_keyword_that_is_not_enforced(http: httpx.Client, schema: dict[str, Any]) -> None:
    """B04: enforced, or refused; never silently dropped."""
    response = http.post(CHAT, json=ASK | {"response_format": schema_format(schema), "max_tokens": 40})
    if response.status_code == 200:
        value = json.loads(text_of(response.json()))
        assert all(key.startswith("x") for key in value)
        assert "patternProperties" in schema
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("response_format")


# -- the frontier of what a prompt can ask -------------------------------------------------------------------


def test_whitespace_is_bounded(http: httpx.Client) -> None:
    """A model that would rather go on with blanks cannot: docs/api.md, "Structured generation"."""
    spaces = {"\n": 20, " ": 20}
    tokens = {}
    for text, bias in spaces.items():
        tokens |= {str(token): bias for token in _tokens_of(http, text)}
    body = ASK | {"response_format": schema_format(CITY), "max_tokens": 200, "logit_bias": tokens}
    answer = post(http, CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    json.loads(text_of(answer))
    assert 10 < max(map(len, re.findall(r"\s+", text_of(answer)))) <= 16


def _tokens_of(http: httpx.Client, text: str) -> list[int]:
    return list(http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])
