"""A real server as a process, started the way a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

START_LIMIT = 540.0  # s; a cold first start also builds the demo pair
STOP_LIMIT = 10.0  # s
# SGLang's and our own checks of every KV slot's owner, after each step.
STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass
class Server:
    """A running `smc-sglang serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(cls, log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Server:
        """Start a server on a free port, with `environment` beside this process', and wait until it is healthy."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "smc_sglang.cli", "serve", "--port", str(port), *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | dict(environment or {}),
            )
        server = cls(process, f"http://127.0.0.1:{port}", log)
        try:
            server._wait_until_healthy()
        except BaseException:
            server.kill()
            raise
        return server

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server exited with {self.process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=30).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        pytest.fail(f"the server was not healthy within {START_LIMIT:.0f} s:\n{self.tail()}")

    @contextmanager
    def client(self, timeout: float) -> Iterator[httpx.Client]:
        """A client; the server must be alive afterwards."""
        with httpx.Client(base_url=self.url, timeout=timeout) as client:
            yield client
        assert self.process.poll() is None, self.tail()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, how: signal.Signals) -> int:
        """Send `how` to the server alone; its exit code. All of its processes must have ended in time."""
        return self._end(lambda: self.process.send_signal(how), how.name)

    def interrupt(self) -> int:
        """Ctrl-C in the server's terminal: SIGINT to every process of its group; the server's exit code."""
        return self._end(lambda: os.killpg(self.process.pid, signal.SIGINT), "Ctrl-C")

    def _end(self, tell: Callable[[], None], how: str) -> int:
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert len(family) >= 2, "a server has a scheduler and a detokenizer"
        tell()
        try:
            code = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not stop within {STOP_LIMIT:.0f} s of {how}:\n{self.tail()}")
        _, alive = psutil.wait_procs(family, timeout=1)
        # An orphan that has ended stays a zombie until init reaps it, which not every container's init does.
        survivors = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not survivors, f"processes survived {how}: {survivors}"
        return code

    def kill(self) -> None:
        """End what is left of the server, however it is."""
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
        self.process.wait()
