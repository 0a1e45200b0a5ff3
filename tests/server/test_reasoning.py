"""Reasoning parsers: SGLang's own kits, run as they are shipped, on a model that thinks before it answers."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sglang.test.kits.reasoning_kit import ReasoningTokenUsageMixin, SeparateReasoningMixin

from tests.server.asking import CHAT, QUESTION, post, streamed
from tests.server.running_server import Server
from tests.server.thinker import ANSWERS, PARSER, THOUGHTS, target_of

pytestmark = pytest.mark.engine

KITS: tuple[Any, ...] = (ReasoningTokenUsageMixin, SeparateReasoningMixin)
TESTS = [(kit, name) for kit in KITS for name in dir(kit) if name.startswith("test_")]


@pytest.fixture(scope="module")
def outcomes(thinking: Server) -> Iterator[dict[str, Future[None]]]:
    """All tests of the kits, running at once."""
    model = str(target_of(thinking))
    given = {"base_url": thinking.url, "model": model, "api_key": "none", "reasoning_parser_name": PARSER}

    def run(kit: Any, name: str) -> None:
        case: Any = type(kit.__name__, (kit, unittest.TestCase), given)
        if hasattr(case, "init_reasoning_token_verifier"):
            case.init_reasoning_token_verifier()
        case(name).debug()

    with ThreadPoolExecutor(len(TESTS)) as pool:
        yield {name: pool.submit(run, kit, name) for kit, name in TESTS}


@pytest.mark.parametrize("name", [name for _, name in TESTS])
def test_a_kit_of_sglangs(outcomes: dict[str, Future[None]], name: str) -> None:
    outcomes[name].result()


def test_reasoning_and_answer_are_told_apart_in_a_stream_as_in_one_piece(thinking: Server) -> None:
    chat = {"model": "default", "messages": QUESTION, "max_tokens": 1024, "seed": 3}
    with thinking.client(timeout=60) as client:
        message = post(client, CHAT, chat)["choices"][0]["message"]
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed(client, CHAT, chat)]
    for part, ids in (("reasoning_content", THOUGHTS), ("content", ANSWERS)):
        # SGLang leaves the opening tag in where a text does not begin with it: this tokenizer's begin with a space.
        words = message[part].removeprefix(" <think>").split()
        assert words
        assert set(words) <= {f"t{i}" for i in ids}
        assert "".join(delta.get(part) or "" for delta in deltas).split() == words
