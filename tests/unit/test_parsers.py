"""Stream parsers of SGLang's, fed with blocks: whatever the cuts, the same text, calls and reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.plugins import load_plugins

from smc_sglang.engine.parsers import pieces

load_plugins()  # applies the hooks

TOOLS = [
    Tool(type="function", function=Function(name=name, parameters={"type": "object", "properties": {}}))
    for name in ("get_weather", "now")
]
FREE = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa}ris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARRAY = '[{"name": "get_weather", "parameters": {"city": "Pa}ris, "}}, {"name": "now", "parameters": {}}]'


def blocks(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def made(calls: list[Any]) -> list[tuple[str, Any]]:
    parts: dict[int, list[str]] = {}
    for call in calls:
        part = parts.setdefault(call.tool_index, ["", ""])
        part[0] += call.name or ""
        part[1] += call.parameters or ""
    return [(name, json.loads(arguments)) for _, (name, arguments) in sorted(parts.items())]


@pytest.mark.parametrize("size", [1, 3, 7, 20, 60, 400])
def test_calls_in_free_text(size: int) -> None:
    parser = FunctionCallParser(TOOLS, "qwen25")
    text, calls = "", []
    for block in blocks(FREE, size):
        more_text, more_calls = parser.parse_stream_chunk(block)
        text, calls = text + more_text, calls + more_calls
    more_text, more_calls = parser.parse_stream_end()
    assert made(calls + more_calls) == [("get_weather", {"city": "Pa}ris"}), ("now", {})]
    assert (text + more_text).strip() == "Let me look."


@pytest.mark.parametrize("size", [1, 3, 7, 20, 60, 400])
def test_forced_calls(size: int) -> None:
    parser = JsonArrayParser()
    calls: list[Any] = []
    for block in blocks(ARRAY, size):
        calls += parser.parse_streaming_increment(block, TOOLS).calls
    calls += parser.finish(TOOLS).calls
    assert made(calls) == [("get_weather", {"city": "Pa}ris, "}), ("now", {})]


@pytest.mark.parametrize("size", [1, 3, 7, 20, 60])
def test_reasoning(size: int) -> None:
    parser = ReasoningParser("qwen3", stream_reasoning=True, force_reasoning=True)
    reasoning, text = "", ""
    for block in blocks("<think>3 < 4, I think</think>It is four.", size):
        more_reasoning, more_text = parser.parse_stream_chunk(block)
        reasoning, text = reasoning + (more_reasoning or ""), text + (more_text or "")
    assert reasoning.strip() == "3 < 4, I think"
    assert text == "It is four."


def test_pieces_are_the_whole() -> None:
    assert "".join(pieces(FREE)) == FREE
    assert pieces("") == [""]
