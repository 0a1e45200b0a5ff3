"""One real server for all HTTP tests: the embedded demo pair, started the way a user starts it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from smc_sglang.demo import ensure_demo_pair
from tests.server import thinker
from tests.server import twins as twins_of
from tests.server.running_server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = ["--draft-length", "4", "--max-draft-length", "8", "--tool-call-parser", "qwen25"]
    running = Server.start(log, *options)
    try:
        yield running
        assert running.stop(signal.SIGTERM) == 0, running.tail()
    finally:
        running.kill()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of the server; the server must be alive afterwards."""
    with server.client(timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def target() -> Path:
    """The demo target's checkpoint."""
    return ensure_demo_pair(progress=False).target


@pytest.fixture(scope="session")
def tokenizer(target: Path) -> PreTrainedTokenizerBase:
    """The demo pair's tokenizer."""
    return AutoTokenizer.from_pretrained(target)


@pytest.fixture
def twin_http(twins: Server) -> Iterator[httpx.Client]:
    """A client of the twins, which answer at once."""
    with twins.client(timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def twin_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twins") / "model"
    twins_of.write(path)
    return path


@pytest.fixture(scope="session")
def twins(twin_checkpoint: Path) -> Iterator[Server]:
    """A server whose draft is its target, in float32 and with a context of 128 tokens."""
    server = twins_of.start(twin_checkpoint)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of :mod:`tests.server.thinker`."""
    path = tmp_path_factory.mktemp("thinker")
    thinker.write(path)
    running = thinker.start(path)
    try:
        yield running
        assert running.process.poll() is not None or running.stop(signal.SIGTERM) == 0, running.tail()
    finally:
        running.kill()
