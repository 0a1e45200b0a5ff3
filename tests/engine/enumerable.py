"""An engine on a model of five tokens whose laws can be enumerated.

p and q come from a plain transformers forward of the two checkpoints, the laws from the algorithm on paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from tests.models import perturbed, tiny_llama, word_tokenizer

VOCAB, EOS = 5, 0
PROMPT = [1, 3, 2, 4]
N_REQUESTS = 3000
Sequence = tuple[int, ...]


class Enumerable:
    """An engine on five tokens, and its two next-token laws."""

    def __init__(self, engine: Any, target: Path, draft: Path) -> None:
        self.engine = engine
        self.reports: list[dict[str, Any]] = []
        self._models = {
            name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for name, path in (("p", target), ("q", draft))
        }

    @cache  # noqa: B019  one object per session
    def next_token(self, name: str, answer: Sequence, temperature: float = 1.0) -> np.ndarray:
        """p or q after the prompt and `answer`, float64 [VOCAB]."""
        with torch.no_grad():
            logits = self._models[name](torch.tensor([[*PROMPT, *answer]])).logits[0, -1]
        return torch.softmax(logits.double() / temperature, -1).numpy()

    def answers(self, seed: int, **sampling: Any) -> tuple[list[Sequence], np.ndarray]:
        """N_REQUESTS answers of independent requests, and their log Z^ (0 where there is none).

        Their reports are in `self.reports`.
        """
        smc = sampling.pop("smc")
        params = [
            sampling | {"sampling_seed": seed * N_REQUESTS + i, "custom_params": {"smc": smc}}
            for i in range(N_REQUESTS)
        ]
        outputs = self.engine.generate(input_ids=[PROMPT] * N_REQUESTS, sampling_params=params)
        self.reports = [output["meta_info"]["smc"] for output in outputs]
        log_z = np.array([report["log_z"] or 0.0 for report in self.reports])
        return [tuple(output["output_ids"]) for output in outputs], log_z


@contextmanager
def running(folder: Path, *, noise: float = 0.5, environment: Mapping[str, str] | None = None) -> Iterator[Enumerable]:
    """An engine in `folder` with N = 4 and K = 2, and a draft that is as far from the target as `noise`."""
    import smc_sglang

    target, draft = folder / "target", folder / "draft"
    tiny_llama(target, VOCAB, seed=3, max_position=64)
    word_tokenizer(target, VOCAB)
    perturbed(target, draft, noise=noise, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a model this small only loses by more
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.syspath_prepend(str(Path(__file__).parent / "probe"))
        engine = smc_sglang.Engine(
            model_path=str(target),
            draft_model_path=str(draft),
            n_particles=4,
            draft_length=2,
            max_draft_length=3,
            dtype="float32",
            max_running_requests=256,
            max_total_tokens=20_000,
            log_level="error",
        )
    yield Enumerable(engine, target, draft)
    engine.shutdown()


def enumerate_law(length: int, next_token: Any, *, eos: int | None = EOS) -> dict[Sequence, float]:
    """The law of sequences that end at `eos` or after `length` tokens."""
    law: dict[Sequence, float] = {}

    def walk(answer: Sequence, mass: float) -> None:
        if len(answer) == length or (answer and answer[-1] == eos):
            law[answer] = mass
            return
        for token, p in enumerate(next_token(answer)):
            walk((*answer, token), mass * float(p))

    walk((), 1.0)
    return law


def assert_law(answers: list[Sequence], law: dict[Sequence, float]) -> None:
    """Pearson's chi-square; a wrong engine is far below this p-value at 3000 answers."""
    assert sum(law.values()) == pytest.approx(1.0)
    counts = Counter(answers)
    assert all(law.get(answer, 0.0) > 0 for answer in counts)
    common = [answer for answer, p in law.items() if p * len(answers) > 5]
    rare = [answer for answer in law if answer not in set(common)]
    observed = [counts[answer] for answer in common] + [sum(counts[answer] for answer in rare)]
    expected = [law[answer] * len(answers) for answer in common] + [sum(law[a] for a in rare) * len(answers)]
    if expected[-1] <= 5:
        observed, expected = [*observed[:-2], sum(observed[-2:])], [*expected[:-2], sum(expected[-2:])]
    assert chisquare(observed, expected).pvalue > 1e-3


def assert_z_weighs_answers_to_the_target(
    model: Enumerable, answers: list[Sequence], log_z: np.ndarray, *, eos: int | None = EOS
) -> None:
    """E[Z^] = 1 and E[Z^ 1{answer = s}] = p(s), by the first three tokens, whose law can be enumerated."""
    z = np.exp(log_z)
    error = z.std() / len(z) ** 0.5
    assert error < 0.03
    assert abs(z.mean() - 1) < 4 * error
    for start, p in enumerate_law(3, lambda a: model.next_token("p", a), eos=eos).items():
        if p < 0.02:
            continue
        share = z * np.array([answer[:3] == start for answer in answers])
        assert abs(share.mean() - p) < 4 * share.std() / len(z) ** 0.5
