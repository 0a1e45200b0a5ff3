"""Tool-call and reasoning parsers of SGLang's chat stream, fed with blocks of tokens.

They are written for one token per call: of a longer piece they lose the text before a marker, or a second call.
Here each piece of a delta is parsed on its own, and what comes out is put together again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

_PIECE = re.compile(r"\s+|\w+|[^\w\s]")  # about a token: a word, a run of blanks, one sign


def pieces(delta: str) -> list[str]:
    """`delta` in pieces about as long as a token; one empty piece for an empty delta."""
    return _PIECE.findall(delta) or [delta]


def parse_tool_calls(original: Callable[[Any, str], tuple[str, list[Any]]], parser: Any, delta: str) -> Any:
    """Hook on `FunctionCallParser.parse_stream_chunk`: normal text and calls."""
    parsed = [original(parser, piece) for piece in pieces(delta)]
    return "".join(text or "" for text, _ in parsed), _joined(call for _, calls in parsed for call in calls)


def parse_json_array(original: Callable[[Any, str, Any], Any], parser: Any, delta: str, tools: Any) -> Any:
    """Hook on `JsonArrayParser.parse_streaming_increment`: one result of normal text and calls."""
    parsed = [original(parser, piece, tools) for piece in pieces(delta)]
    result = parsed[0]
    result.normal_text = "".join(one.normal_text or "" for one in parsed)
    result.calls = _joined(call for one in parsed for call in one.calls)
    return result


def parse_reasoning(original: Callable[[Any, str], tuple[str | None, str | None]], parser: Any, delta: str) -> Any:
    """Hook on `ReasoningParser.parse_stream_chunk`: reasoning text and normal text."""
    parsed = [original(parser, piece) for piece in pieces(delta)]
    return "".join(reasoning or "" for reasoning, _ in parsed), "".join(text or "" for _, text in parsed)


def _joined(calls: Iterable[Any]) -> list[Any]:
    """The same deltas of calls, those that go on with the one before put into one."""
    joined: list[Any] = []
    for call in calls:
        if joined and not call.name and call.tool_index == joined[-1].tool_index:
            joined[-1].parameters = (joined[-1].parameters or "") + (call.parameters or "")
        else:
            joined.append(call)
    return joined
