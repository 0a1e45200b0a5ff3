"""A server that asks for a key, stopped by Ctrl-C. (SIGTERM is how the shared server is stopped.)"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from smc_sglang.cli import DEMO_NAME
from tests.server.running_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server.start(tmp_path_factory.mktemp("guarded") / "log.txt", "--api-key", "secret")
    yield server
    server.kill()


def test_without_the_key_it_is_an_openai_401(guarded: Server) -> None:
    for path in ("/v1/chat/completions", "/generate"):
        response = httpx.post(guarded.url + path, json={"smc": {"n_particles": 0}}, timeout=60)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_with_the_key_it_answers(guarded: Server) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret", max_retries=0, timeout=120) as client:
        answer = client.completions.create(model=DEMO_NAME, prompt="One, two,", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_ctrl_c_ends_it_cleanly(guarded: Server) -> None:
    assert guarded.interrupt() == 0, guarded.tail()
    log = guarded.log.read_text()
    assert f"smc-sglang is ready: {guarded.url}/v1 (model {DEMO_NAME}, N=4, K=8)" in log
    assert "Traceback" not in log
