"""The law of the whole engine's answers, against exact enumeration on a model of five tokens.

p and q come from a plain transformers forward of the two checkpoints, the laws from the algorithm on paper.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from tests.models import perturbed, tiny_llama, word_tokenizer

pytestmark = pytest.mark.engine

VOCAB, EOS = 5, 0
PROMPT = [1, 3, 2, 4]
N_REQUESTS = 3000
Sequence = tuple[int, ...]


class Enumerable:
    """An engine on five tokens, and its two next-token laws."""

    def __init__(self, engine: Any, target: Path, draft: Path) -> None:
        self.engine = engine
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
        """N_REQUESTS answers of independent requests, and their log Z^ (0 where there is none)."""
        smc = sampling.pop("smc")
        params = [
            sampling | {"sampling_seed": seed * N_REQUESTS + i, "custom_params": {"smc": smc}}
            for i in range(N_REQUESTS)
        ]
        outputs = self.engine.generate(input_ids=[PROMPT] * N_REQUESTS, sampling_params=params)
        log_z = np.array([output["meta_info"]["smc"]["log_z"] or 0.0 for output in outputs])
        return [tuple(output["output_ids"]) for output in outputs], log_z


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enumerable]:
    import smc_sglang

    folder = tmp_path_factory.mktemp("enumerable")
    target, draft = folder / "target", folder / "draft"
    tiny_llama(target, VOCAB, seed=3, max_position=64)
    word_tokenizer(target, VOCAB)
    perturbed(target, draft, noise=0.5, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a model this small only loses by more
        engine = smc_sglang.Engine(
            model_path=str(target),
            draft_model_path=str(draft),
            n_particles=4,
            draft_length=2,
            dtype="float32",
            max_total_tokens=20_000,
            max_running_requests=256,
            log_level="error",
        )
    yield Enumerable(engine, target, draft)
    engine.shutdown()


def enumerate_law(length: int, next_token: Any) -> dict[Sequence, float]:
    """The law of sequences that end at EOS or after `length` tokens."""
    law: dict[Sequence, float] = {}

    def walk(answer: Sequence, mass: float) -> None:
        if answer and (answer[-1] == EOS or len(answer) == length):
            law[answer] = mass
            return
        for token, p in enumerate(next_token(answer)):
            walk((*answer, token), mass * float(p))

    walk((), 1.0)
    return law


def group_law(model: Enumerable, n: int, power: float) -> dict[Sequence, float]:
    """The law of a group of `n` at max_new_tokens 3 and K = 1: x_0 ~ p^a / c, x_1 ~ q, x_2 ~ p^a / c.

    Everything is decided in one cycle, so no resampling comes in, and the particles' (x_0, x_1) and weights can be
    enumerated. At power 1 the group shares x_0.
    """

    def raised(answer: Sequence) -> tuple[np.ndarray, float]:
        mass = model.next_token("p", answer) ** power
        return mass / mass.sum(), float(mass.sum())

    first, _ = raised(())
    heads: dict[Sequence, tuple[float, float]] = {}  # (x_0,) or (x_0, x_1): probability, weight
    for x0 in range(VOCAB):
        if x0 == EOS:
            heads[(x0,)] = float(first[x0]), 1.0
            continue
        p, q = model.next_token("p", (x0,)), model.next_token("q", (x0,))
        for x1 in range(VOCAB):
            weight = float(p[x1] ** power / q[x1]) * (1.0 if x1 == EOS else raised((x0, x1))[1])
            heads[x0, x1] = float(first[x0] * q[x1]), weight

    chosen: Counter[Sequence] = Counter()
    families = [[head for head in heads if head[0] == x0] for x0 in range(VOCAB)] if power == 1 else [list(heads)]
    for family in families:
        total = sum(heads[head][0] for head in family)
        for members in itertools.product(family, repeat=n):
            probability = total * np.prod([heads[head][0] / total for head in members])
            weights = np.array([heads[head][1] for head in members])
            for head, share in zip(members, weights / weights.sum(), strict=True):
                chosen[head] += probability * share

    law: dict[Sequence, float] = {}
    for head, mass in chosen.items():
        if head[-1] == EOS:
            law[head] = mass
        else:
            law |= {(*head, token): mass * float(p) for token, p in enumerate(raised(head)[0])}
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


def test_one_particle_is_k_from_the_draft_and_one_from_the_target(model: Enumerable) -> None:
    answers, _ = model.answers(1, temperature=0.8, max_new_tokens=3, smc={"n_particles": 1, "draft_length": 1})
    alternating = enumerate_law(3, lambda a: model.next_token("q" if len(a) == 1 else "p", a, 0.8))
    assert_law(answers, alternating)
    with pytest.raises(AssertionError):  # the test tells p from this law
        assert_law(answers, enumerate_law(3, lambda a: model.next_token("p", a, 0.8)))


def test_plain_decoding_is_at_the_target(model: Enumerable) -> None:
    answers, _ = model.answers(2, temperature=0.8, max_new_tokens=3, smc={"mode": "off"})
    assert_law(answers, enumerate_law(3, lambda a: model.next_token("p", a, 0.8)))


def test_four_particles(model: Enumerable) -> None:
    answers, _ = model.answers(3, temperature=1.0, max_new_tokens=3, smc={"n_particles": 4, "draft_length": 1})
    assert_law(answers, group_law(model, 4, 1.0))


def test_power(model: Enumerable) -> None:
    smc = {"n_particles": 2, "draft_length": 1, "power": 2.0}
    answers, _ = model.answers(4, temperature=1.0, max_new_tokens=3, smc=smc)
    assert_law(answers, group_law(model, 2, 2.0))


@pytest.mark.parametrize("resampling", ["systematic", "residual"])
def test_z_weighs_answers_to_the_target(model: Enumerable, resampling: str) -> None:
    """E[Z^ 1{answer = s}] = p(s) for every s, exactly, through resampling over many cycles."""
    smc = {"n_particles": 4, "draft_length": 2, "resample_threshold": 0.9, "resampling": resampling}
    answers, log_z = model.answers(5, temperature=1.0, max_new_tokens=8, smc=smc)
    z = np.exp(log_z)
    error = z.std() / len(z) ** 0.5
    assert error < 0.03
    assert abs(z.mean() - 1) < 4 * error
    # By the first three tokens, whose law can be enumerated.
    law = enumerate_law(3, lambda a: model.next_token("p", a))
    for start, p in law.items():
        if p < 0.02:
            continue
        share = z * np.array([answer[:3] == start for answer in answers])
        assert abs(share.mean() - p) < 4 * share.std() / len(z) ** 0.5
