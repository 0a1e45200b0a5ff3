"""Every logit that the engine samples from or weighs with, against an independent forward of the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.tiny import TinyEngine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "smc",
    [
        {"n_particles": 4, "draft_length": 4, "resample_threshold": 1.0},
        {"n_particles": 7, "draft_length": 8, "resample_threshold": 1.0, "power": 2.0},
        {"n_particles": 3, "draft_length": 1, "resample_threshold": 1.0},
        {"n_particles": 1, "draft_length": 3},
        {"mode": "off"},
        {"mode": "exact", "n_particles": 1, "draft_length": 8},
        {"mode": "exact", "n_particles": 4, "draft_length": 4},
    ],
    ids=["n4-k4", "n7-k8-power2", "n3-k1", "n1-k3", "off", "exact-n1-k8", "exact-n4-k4"],
)
def test_logits_equal_a_plain_forward(tiny: TinyEngine, smc: dict[str, Any]) -> None:
    prompts = [[1, 5, 6, 7], [1, 5, 6, 9, 10, 11], list(range(2, 60)) * 2]
    sampling = [{"temperature": 1.0, "max_new_tokens": 40, "seed": i, "smc": smc} for i in range(len(prompts))]
    rows = tiny.recorded(lambda: tiny.generate_many(prompts, sampling))
    assert len(rows) >= 20
    _check(rows, tiny)


def test_logits_of_a_mixed_batch(tiny: TinyEngine) -> None:
    """Groups of several N and K, greedy and autoregressive rows in one batch, all resampling at random."""
    prompts = [[1, 5, 6, 7 + i] for i in range(6)]
    sampling: list[dict[str, Any]] = [
        {"temperature": 1.0, "smc": {"n_particles": 4, "draft_length": 8, "resample_threshold": 1.0}},
        {"temperature": 0.7, "smc": {"n_particles": 2, "draft_length": 3, "resample_threshold": 1.0}},
        {"temperature": 0.0},
        {"temperature": 0.0, "smc": {"mode": "off"}},
        {"temperature": 1.3, "smc": {"mode": "off"}},
        {"temperature": 1.0, "smc": {"n_particles": 5, "draft_length": 1, "resample_threshold": 1.0}},
    ]
    for index, one in enumerate(sampling):
        one |= {"max_new_tokens": 30 + 3 * index, "seed": index}
    rows = tiny.recorded(lambda: tiny.generate_many(prompts, sampling))
    assert {len(row["block"]) for row in rows} >= {9}
    _check(rows, tiny)


def test_logits_after_cached_prompts(tiny: TinyEngine) -> None:
    """What comes from the tree, written by another request's prefill or particles, serves both models."""
    prompt = list(range(2, 40))
    sampling = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True, "smc": {"resample_threshold": 1.0}}
    first = tiny.generate(prompt, seed=1, **sampling)
    turns = [prompt, [*prompt, *first["output_ids"], 3, 4], [*prompt, *first["output_ids"][:11], 9]]
    answers: list[dict[str, Any]] = []
    rows = tiny.recorded(
        lambda: answers.extend(tiny.generate_many(turns, [sampling | {"seed": i} for i in range(len(turns))]))
    )
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [37, 38 + 29, 38 + 11]
    _check(rows, tiny)


def _check(rows: list[dict[str, Any]], tiny: TinyEngine) -> None:
    models = {
        name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for name, path in (("target", tiny.target), ("draft", tiny.draft))
    }
    longest = max(len(row["block"]) for row in rows)
    for row in rows:
        block = row["block"]
        if row["draft"] is not None and len(block) == longest:
            assert len(row["draft"]) == longest - 1, "the pass for the last token's KV made logits"
        tokens = torch.tensor([row["context"] + block])
        for name, model in models.items():
            seen = row[name]
            if seen is None:
                continue
            with torch.no_grad():
                expected = model(tokens).logits[0, len(row["context"]) :]
            n = min(len(seen), len(block))
            torch.testing.assert_close(seen[:n].float(), expected[:n], atol=1e-3, rtol=0)
