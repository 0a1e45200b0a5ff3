"""Reasoning parsers: SGLang's own kit, run as it is shipped, on a model that always thinks before it answers."""

from __future__ import annotations

import signal
import unittest
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.test.kits.reasoning_kit import ReasoningTokenUsageMixin, SeparateReasoningMixin

from tests.models import EOS, markov_llama, perturbed, word_tokenizer
from tests.server.asking import CHAT, QUESTION, post, streamed
from tests.server.running_server import STRICT_CHECKS, Server

pytestmark = pytest.mark.engine

VOCAB, THINK, THINK_END = 25, 3, 4  # word 2 is what a prompt is read as
THOUGHTS, ANSWERS = range(5, 15), range(15, 25)
PARSER = "qwen3"
KITS: tuple[Any, ...] = (ReasoningTokenUsageMixin, SeparateReasoningMixin)
TESTS = [(kit, name) for kit in KITS for name in dir(kit) if name.startswith("test_")]


def thinker(path: Path) -> None:
    """Write a target and its draft that say `<think>`, some 20 words, `</think>`, some 20 other words, and end."""
    transitions = torch.zeros(VOCAB, VOCAB)
    transitions[:, THINK] = 1.0
    for before, inside, after in ((THINK, THOUGHTS, THINK_END), (THINK_END, ANSWERS, EOS)):
        words = [before, *inside]
        transitions[words] = 0.0
        transitions[words, inside.start : inside.stop] = 1.0
        transitions[inside.start : inside.stop, after] = 0.5
    markov_llama(path / "target", transitions / transitions.sum(dim=1, keepdim=True))
    perturbed(path / "target", path / "draft", noise=0.05, seed=1)
    for model in ("target", "draft"):
        word_tokenizer(path / model, VOCAB, {THINK: "<think>", THINK_END: "</think>"})


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("thinker")
    thinker(models)
    running = Server.start(
        models / "log.txt",
        *("--model-path", str(models / "target"), "--draft-model-path", str(models / "draft"), "--dtype", "float32"),
        *("--reasoning-parser", PARSER, "--max-total-tokens", "40000"),
        environment=STRICT_CHECKS | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield running
        assert running.stop(signal.SIGTERM) == 0, running.tail()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def outcomes(thinking: Server) -> Iterator[dict[str, Future[None]]]:
    """All tests of the kits, running at once."""
    model = str(thinking.log.parent / "target")
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
