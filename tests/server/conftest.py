"""One real server for all HTTP tests: the embedded demo pair, started the way a user starts it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.server.running_server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server.start(tmp_path_factory.mktemp("server") / "log.txt", "--draft-length", "4")
    try:
        yield running
        assert running.stop(signal.SIGTERM) == 0, running.tail()
    finally:
        running.kill()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A client of the server; the server must be alive afterwards."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    assert server.process.poll() is None, server.tail()
