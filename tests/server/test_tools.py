"""Tools, and the `openai` client's ways of asking. Case B50 of the issue trackers."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from smc_sglang.cli import DEMO_NAME
from tests.server.asking import CHAT, QUESTION, api_url, joined, post, streamed, text_of

pytestmark = pytest.mark.engine


def tool(name: str, strict: bool = True, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


WEATHER, TIME = (
    tool("get_weather", city={"type": "string", "maxLength": 12}),
    tool("get_time", zone={"enum": ["CET", "JST"]}),
)
ASK_TOOLS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather in Paris and time in Tokyo?"}],
    "tools": [WEATHER, TIME],
    "max_tokens": 80,
    "temperature": 0.5,
    "seed": 2,
}
FORCED = [{"type": "function", "function": {"name": "get_time"}}, "required"]


def calls(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments) of an answer's calls."""
    made = answer["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


def streamed_calls(chunks: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, arguments) of the calls that the deltas of a stream make together."""
    made: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                parts = made.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    return [(name, arguments) for _, (name, arguments) in sorted(made.items())]


def same(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> bool:
    """SGLang's stream keeps the arguments as they were written; the whole answer writes them anew."""
    return [(name, json.loads(text)) for name, text in one] == [(name, json.loads(text)) for name, text in other]


@pytest.mark.parametrize("draft_length", [1, 8])
@pytest.mark.parametrize("choice", FORCED, ids=["named", "required"])
def test_a_forced_call(http: httpx.Client, choice: Any, draft_length: int) -> None:
    body = ASK_TOOLS | {"tool_choice": choice, "smc": {"draft_length": draft_length}}
    answer = post(http, CHAT, body)
    made = calls(answer)
    assert made
    reason = answer["choices"][0]["finish_reason"]
    assert reason in ("tool_calls", "length")  # a small model goes on calling until it is cut
    for name, text in made:
        arguments = json.loads(text)
        if choice != "required":
            assert name == "get_time"
        assert set(arguments) == ({"zone"} if name == "get_time" else {"city"})
    chunks = streamed(http, CHAT, body)
    assert same(streamed_calls(chunks)[: len(made)], made)  # the stream also has the beginning of a call that was cut
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_no_tools_on_request(http: httpx.Client) -> None:
    answer = post(http, CHAT, ASK_TOOLS, tool_choice="none", max_tokens=12)
    assert calls(answer) == []
    assert text_of(answer)


@pytest.mark.parametrize("choice", FORCED, ids=["named", "required"])
def test_a_call_that_is_cut(http: httpx.Client, choice: Any) -> None:
    answer = post(http, CHAT, ASK_TOOLS, tool_choice=choice, max_tokens=4)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (
        streamed(http, CHAT, ASK_TOOLS, tool_choice=choice, max_tokens=4)[-1]["choices"][0]["finish_reason"] == "length"
    )


TWO_CALLS = (
    r"Let me look\.\n"
    r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,6}\}"\}\}\n</tool_call>\n'
    r'<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
)


@pytest.mark.parametrize("draft_length", [1, 8])
def test_calls_in_free_text(http: httpx.Client, draft_length: int) -> None:
    """The model's own format, two calls, a brace in an argument and a tool without any, in blocks of every size."""
    smc = {"draft_length": draft_length, "max_stream_lag": 1}
    tools = [tool("get_weather", strict=False, city={"type": "string"}), tool("now", strict=False)]
    body = ASK_TOOLS | {"tools": tools, "regex": TWO_CALLS, "max_tokens": 120, "smc": smc}
    answer = post(http, CHAT, body)
    made = calls(answer)
    assert [name for name, _ in made] == ["get_weather", "now"]
    assert re.fullmatch(r"[A-Z][a-z]+}", json.loads(made[0][1])["city"])
    assert json.loads(made[1][1]) == {}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    chunks = streamed(http, CHAT, body)
    assert same(streamed_calls(chunks), made)
    assert joined(chunks).strip() == text_of(answer).strip() == "Let me look."


# -- the openai client ---------------------------------------------------------------------------------------


class City(BaseModel):
    """Bounded, so that the answer ends whatever the model says."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def test_the_async_client(http: httpx.Client) -> None:
    arguments: Any = {"model": DEMO_NAME, "messages": QUESTION, "max_tokens": 16, "temperature": 0.7, "seed": 5}
    expected = text_of(post(http, CHAT, arguments))

    async def ask() -> tuple[list[str | None], str]:
        async with openai.AsyncOpenAI(base_url=api_url(http), api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**arguments) for _ in range(4)))
            stream = await client.chat.completions.create(**arguments, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            return [answer.choices[0].message.content for answer in answers], text

    answers, text = asyncio.run(ask())
    assert answers == [expected] * 4
    assert text == expected


@pytest.mark.parametrize("semantics", ["local", "global"])
def test_the_client_parses(http: httpx.Client, semantics: str) -> None:
    with openai.OpenAI(base_url=api_url(http), api_key="none", max_retries=0, timeout=120) as client:
        arguments: Any = {
            "model": DEMO_NAME,
            "messages": [{"role": "user", "content": "Describe Paris."}],
            "response_format": City,
            "max_tokens": 300,
            "temperature": 0.7,
            "seed": 2,
            "extra_body": {"smc": {"grammar_semantics": semantics}},
        }
        answer = client.chat.completions.parse(**arguments).choices[0]
        assert isinstance(answer.message.parsed, City)
        with client.chat.completions.stream(**arguments) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.content == answer.message.content


def test_the_client_calls_tools(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=api_url(http), api_key="none", max_retries=0, timeout=120) as client:
        arguments: Any = ASK_TOOLS | {"model": DEMO_NAME, "tool_choice": "required"}
        answer = client.chat.completions.create(**arguments)
        made = answer.choices[0].message.tool_calls
        assert made
        turn = answer.choices[0].message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in made]
        messages = [*ASK_TOOLS["messages"], turn, *results]
        last = client.chat.completions.create(**arguments | {"messages": messages, "tool_choice": "none"})
        assert last.choices[0].message.content
