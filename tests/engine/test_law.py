"""The law of the whole engine's answers, against exact enumeration on a model of five tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.enumerable import (
    EOS,
    VOCAB,
    Enumerable,
    Sequence,
    assert_law,
    assert_z_weighs_answers_to_the_target,
    enumerate_law,
    running,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enumerable]:
    with running(tmp_path_factory.mktemp("enumerable")) as enumerable:
        yield enumerable


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


def test_one_particle_is_k_from_the_draft_and_one_from_the_target(model: Enumerable) -> None:
    answers, _ = model.answers(1, temperature=0.8, max_new_tokens=3, smc={"n_particles": 1, "draft_length": 1})
    alternating = enumerate_law(3, lambda a: model.next_token("q" if len(a) == 1 else "p", a, 0.8))
    assert_law(answers, alternating)
    with pytest.raises(AssertionError):  # the test tells p from this law
        assert_law(answers, enumerate_law(3, lambda a: model.next_token("p", a, 0.8)))


def test_plain_decoding_is_at_the_target(model: Enumerable) -> None:
    answers, _ = model.answers(2, temperature=0.8, max_new_tokens=3, smc={"mode": "off"})
    assert_law(answers, enumerate_law(3, lambda a: model.next_token("p", a, 0.8)))


def truncated(p: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The `top_k` most likely tokens, up to the first one that takes their mass beyond `top_p`."""
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    kept = order[(np.arange(len(p)) < top_k) & (before <= top_p)]
    law = np.zeros_like(p)
    law[kept] = p[kept] / p[kept].sum()
    return law


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 3), (2, 1), (4, 3), (8, 1), (8, 3)])
def test_exact_is_at_the_target(model: Enumerable, n: int, k: int) -> None:
    """For every N and K, with temperature, top_k and top_p."""
    sampling = {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "max_new_tokens": 4}
    answers, _ = model.answers(10 + n + k, **sampling, smc={"mode": "exact", "n_particles": n, "draft_length": k})
    law = enumerate_law(4, lambda a: truncated(model.next_token("p", a, 0.8), 4, 0.9))
    assert_law(answers, {answer: mass for answer, mass in law.items() if mass > 0})
    assert {report["mode"] for report in model.reports} == {"exact"}
    assert {report["log_z"] for report in model.reports} == {None}


def shaped(model: Enumerable, name: str, answer: Sequence) -> np.ndarray:
    """The law under SHAPED, with penalties by what `answer` holds."""
    logits = np.log(model.next_token(name, answer))
    logits[2] += 1.5
    for token, count in Counter(answer).items():
        logits[token] -= 1.0 * count + 0.5
    if len(answer) < 2:
        logits[EOS] = -np.inf
    mass = np.exp(logits)
    return mass / mass.sum()


# A bias added after the penalties or before them is the same here: only the multiplicative one does not commute.
SHAPED = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": {"2": 1.5}, "min_new_tokens": 2}


def test_penalties_bias_and_minimum_define_the_target(model: Enumerable) -> None:
    smc = {"mode": "exact", "n_particles": 2, "draft_length": 3}
    answers, _ = model.answers(40, temperature=1.0, max_new_tokens=4, smc=smc, **SHAPED)
    law = enumerate_law(4, lambda a: shaped(model, "p", a))
    assert_law(answers, {answer: mass for answer, mass in law.items() if mass > 0})


def test_penalties_bias_and_minimum_define_the_proposal(model: Enumerable) -> None:
    """N = 1 is K tokens from q~ and one from p~."""
    smc = {"n_particles": 1, "draft_length": 1}
    answers, log_z = model.answers(41, temperature=1.0, max_new_tokens=4, smc=smc, **SHAPED)
    law = enumerate_law(4, lambda a: shaped(model, "q" if len(a) % 2 else "p", a))
    assert_law(answers, {answer: mass for answer, mass in law.items() if mass > 0})
    assert abs(np.exp(log_z).mean() - 1) < 4 * np.exp(log_z).std() / len(log_z) ** 0.5


def test_truncation_is_never_crossed(model: Enumerable) -> None:
    """Mode `smc`, where the proposal reaches beyond p~: no token of an answer does, whatever has to be redone."""
    smc = {"n_particles": 2, "draft_length": 3, "resample_threshold": 0.5}
    answers, _ = model.answers(30, temperature=1.0, top_k=2, max_new_tokens=6, smc=smc)
    for answer in set(answers):
        for i, token in enumerate(answer):
            assert truncated(model.next_token("p", answer[:i]), 2, 1.0)[token] > 0
    fallbacks = [report for report in model.reports if report["fallbacks"]]
    assert 0 < len(fallbacks) < len(answers)
    assert {report["log_z"] for report in fallbacks} == {None}


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
    assert_z_weighs_answers_to_the_target(model, answers, log_z)


@pytest.mark.parametrize(("lag", "threshold"), [(1, 0.5), (3, 0.0)])
def test_a_bound_on_the_tokens_held_back_is_unbiased(model: Enumerable, lag: int, threshold: float) -> None:
    """Going on within one lineage, drawn by weight, keeps E[Z^ 1{answer = s}] = p(s), beside resampling or alone."""
    smc = {"n_particles": 4, "draft_length": 2, "resample_threshold": threshold, "max_stream_lag": lag}
    answers, log_z = model.answers(7 + lag, temperature=1.0, max_new_tokens=8, smc=smc)
    assert_z_weighs_answers_to_the_target(model, answers, log_z)
    assert np.mean([report["resamples"] for report in model.reports]) > 0.05


# What the grammar forces after t2 is likely, what it forces after t3 is not: masking token by token sees neither.
LANGUAGE = {(2, 3, 2, EOS), (2, 4, 3, EOS), (3, 3, 3, EOS), (3, 2, 2, EOS), (4, 4, EOS)}
GRAMMAR = "t2t3t2|t2t4t3|t3t3t3|t3t2t2|t4t4"


def masked(model: Enumerable, name: str, answer: Sequence) -> np.ndarray:
    """p or q, masked by the grammar and renormalised; nothing where no word begins with `answer`."""
    allowed = [any(word[: len(answer) + 1] == (*answer, token) for word in LANGUAGE) for token in range(VOCAB)]
    law = model.next_token(name, answer)[:VOCAB] * allowed
    return law / max(law.sum(), 1e-300)


def local_law(model: Enumerable) -> dict[Sequence, float]:
    law = enumerate_law(4, lambda answer: masked(model, "p", answer))
    return {answer: mass for answer, mass in law.items() if mass > 0}


def global_masses(model: Enumerable) -> dict[Sequence, float]:
    """p of each word: the law is proportional to it, and its sum is the language's probability."""
    return {
        word: float(np.prod([model.next_token("p", word[:i])[token] for i, token in enumerate(word)]))
        for word in sorted(LANGUAGE)
    }


def total_variation(one: dict[Sequence, float], other: dict[Sequence, float]) -> float:
    return 0.5 * sum(abs(one.get(answer, 0.0) - other.get(answer, 0.0)) for answer in {*one, *other})


def grammar_answers(model: Enumerable, seed: int, **smc: Any) -> tuple[list[Sequence], np.ndarray]:
    answers, log_z = model.answers(seed, temperature=1.0, max_new_tokens=6, regex=GRAMMAR, smc=smc)
    assert set(answers) <= LANGUAGE
    return answers, log_z


def test_the_two_semantics_differ(model: Enumerable) -> None:
    masses = global_masses(model)
    conditional = {word: mass / sum(masses.values()) for word, mass in masses.items()}
    assert total_variation(conditional, local_law(model)) > 0.2


@pytest.mark.parametrize(("n", "k"), [(1, 2), (4, 3)])
def test_exact_is_at_the_locally_masked_law(model: Enumerable, n: int, k: int) -> None:
    answers, _ = grammar_answers(model, 50 + n, mode="exact", n_particles=n, draft_length=k)
    assert_law(answers, local_law(model))


@pytest.mark.parametrize(("n", "k"), [(4, 2), (16, 3)])
@pytest.mark.parametrize("semantics", ["local", "global"])
def test_z_weighs_answers_to_the_target_of_the_semantics(model: Enumerable, semantics: str, n: int, k: int) -> None:
    """E[Z^ 1{answer = s}] = p~(s), whose sum is 1 under `local` and the language's probability under `global`."""
    answers, log_z = grammar_answers(model, 60 + n, grammar_semantics=semantics, n_particles=n, draft_length=k)
    masses = local_law(model) if semantics == "local" else global_masses(model)
    z = np.exp(log_z)
    assert abs(z.mean() - sum(masses.values())) < 4 * z.std() / len(z) ** 0.5
    for word, mass in masses.items():
        share = z * np.array([answer == word for answer in answers])
        assert abs(share.mean() - mass) < 4 * share.std() / len(z) ** 0.5


def test_global_semantics_approach_the_conditional_law(model: Enumerable) -> None:
    masses = global_masses(model)
    conditional = {word: mass / sum(masses.values()) for word, mass in masses.items()}
    distance = {}
    for n in (1, 4, 32):
        answers, _ = grammar_answers(model, 70 + n, grammar_semantics="global", n_particles=n, draft_length=2)
        law = {word: count / len(answers) for word, count in Counter(answers).items()}
        distance[n] = total_variation(law, conditional)
    assert distance[1] > 0.2 > distance[4] > 2 * distance[32]
    assert distance[32] < 0.04
