"""A server whose draft is its target, on a tiny checkpoint in float32: its answers can be checked to the last digit."""

from __future__ import annotations

from pathlib import Path

from tests.models import tiny_llama, word_tokenizer
from tests.server.running_server import STRICT_CHECKS, Server

VOCAB, CONTEXT, N, K = 64, 128, 4, 8


def write(path: Path) -> None:
    """The checkpoint. Its laws are peaked: one foreign KV cell changes them visibly."""
    tiny_llama(path, VOCAB, seed=0, max_position=CONTEXT, scale=5.0)
    word_tokenizer(path, VOCAB)


def start(checkpoint: Path) -> Server:
    return Server.start(
        checkpoint.parent / "log.txt",
        *("--model-path", str(checkpoint), "--draft-model-path", str(checkpoint), "--dtype", "float32"),
        *("--n-particles", str(N), "--draft-length", str(K), "--max-particles", "8"),
        *("--context-length", str(CONTEXT), "--max-total-tokens", "8192"),
        environment=STRICT_CHECKS | {"OMP_NUM_THREADS": "1"},
    )
