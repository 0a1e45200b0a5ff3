"""One server with a pool of 1,500 KV slots for all tests of this folder.

It runs under SGLang's strict memory checks, and admission promises more KV than there is, so groups shrink and retract
under load. After every test the pool must be empty.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.models import perturbed, tiny_llama, word_tokenizer
from tests.server.kv.small_pool import CONTEXT, POOL, ROWS, VOCAB, Client, K, N, wait_for
from tests.server.running_server import STRICT_CHECKS, Server


@pytest.fixture(scope="package")
def kv_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kv")
    target, draft = folder / "target", folder / "draft"
    tiny_llama(target, VOCAB, seed=0, max_position=CONTEXT)
    word_tokenizer(target, VOCAB)
    perturbed(target, draft, noise=0.15, seed=1)
    server = Server.start(
        folder / "log.txt",
        *("--model-path", str(target), "--draft-model-path", str(draft), "--dtype", "float32"),
        *("--n-particles", str(N), "--draft-length", str(K), "--max-particles", str(N)),
        *("--max-total-tokens", str(POOL), "--context-length", str(CONTEXT), "--chunked-prefill-size", "64"),
        *("--max-running-requests", str(ROWS), "--served-model-name", "tiny"),
        environment=STRICT_CHECKS
        | {
            "OMP_NUM_THREADS": "1",
            # Admission expects no request to grow by more than this: it admits more than the pool can hold.
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32",
        },
    )
    yield server
    with httpx.Client(base_url=server.url, timeout=60) as http:
        Client(http).assert_empty()
    server.kill()


@pytest.fixture
def client(kv_server: Server) -> Iterator[Client]:
    """A client of the server; the server must be alive and idle afterwards.

    Under the strict checks an idle server whose pool is not whole stops.
    """
    with kv_server.client(timeout=60) as http:
        client = Client(http)
        yield client
        wait_for(client.is_idle, 10, "the server did not become idle")
