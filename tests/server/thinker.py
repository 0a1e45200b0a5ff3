"""A server whose model thinks before it answers, and whose draft differs in what may differ: padding and end token."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig

from tests.models import EOS, markov_llama, perturbed, word_tokenizer
from tests.server.running_server import STRICT_CHECKS, Server

VOCAB, THINK, THINK_END = 25, 3, 4  # word 2 is what a prompt is read as
THOUGHTS, ANSWERS = range(5, 15), range(15, 25)
DRAFT_VOCAB, DRAFT_EOS = 40, 7  # the ids from VOCAB on are padding
PARSER = "qwen3"
CONTEXT, CHUNK = 2048, 64


def write(path: Path) -> None:
    """Write a model that says `<think>`, some 20 words, `</think>`, some 20 other words, and ends; and its draft."""
    generator = torch.Generator().manual_seed(0)
    transitions = torch.zeros(VOCAB, VOCAB)
    transitions[:, THINK] = 1.0
    for before, inside, after in ((THINK, THOUGHTS, THINK_END), (THINK_END, ANSWERS, EOS)):
        words = [before, *inside]
        transitions[words] = 0.0
        transitions[words, inside.start : inside.stop] = torch.rand(len(words), len(inside), generator=generator) + 0.5
        transitions[inside.start : inside.stop, after] = 0.5
    # The draft's padding is as likely as its words: whoever does not cut it off says it.
    padded = torch.full((DRAFT_VOCAB, DRAFT_VOCAB), 0.5)
    padded[:VOCAB, :VOCAB] = transitions
    for name, law in (("target", transitions), ("draft", padded)):
        markov_llama(path / name, law / law.sum(dim=1, keepdim=True), max_position=CONTEXT)
        word_tokenizer(path / name, VOCAB, {THINK: "<think>", THINK_END: "</think>"})
    perturbed(path / "draft", path / "draft", noise=0.05, seed=1)
    config = AutoConfig.from_pretrained(path / "draft")
    config.eos_token_id = DRAFT_EOS
    config.save_pretrained(path / "draft")
    (path / "draft" / "generation_config.json").write_text(json.dumps({"eos_token_id": DRAFT_EOS}))


def start(path: Path) -> Server:
    return Server.start(
        path / "log.txt",
        *("--model-path", str(path / "target"), "--draft-model-path", str(path / "draft"), "--dtype", "float32"),
        *("--reasoning-parser", PARSER, "--max-total-tokens", "40000", "--chunked-prefill-size", str(CHUNK)),
        "--draft-int8",
        environment=STRICT_CHECKS | {"OMP_NUM_THREADS": "1", "SGLANG_HEALTH_CHECK_TIMEOUT": "3"},
    )


def target_of(server: Server) -> Path:
    return server.log.parent / "target"
