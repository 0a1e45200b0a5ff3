"""Grammars on the tiny engine: every answer is in its language, whatever the block, the mode and the neighbours."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.tiny import TinyEngine, idle_pool, sampling_params

pytestmark = pytest.mark.engine

PROMPT = [1, 5, 6, 7]
LANGUAGES = {  # the tokenizer's words are joined without spaces: t5t9
    "(t9|t1[0-9]){1,12}": {},
    "(t5t6|t7t8t9){0,4}t11": {},
    "t12t13t14t15t16t17t18t19t9": {},
    "t5?": {"min_new_tokens": 2},  # the language's words are shorter
    "(t7){3,9}": {"logit_bias": {"7": -100}},  # the only word is banned
}
MODES: dict[str, dict[str, Any]] = {
    "smc": {"temperature": 1.0, "smc": {"resample_threshold": 1.0}},
    "global": {"temperature": 1.0, "smc": {"grammar_semantics": "global", "draft_length": 8, "n_particles": 8}},
    "power": {"temperature": 1.0, "smc": {"power": 2.0}},
    "truncated": {"temperature": 1.0, "top_k": 3, "top_p": 0.8},
    "truncated-global": {"temperature": 1.0, "top_k": 3, "smc": {"grammar_semantics": "global"}},
    "exact": {"temperature": 1.0, "smc": {"mode": "exact", "draft_length": 8}},
    "off": {"temperature": 1.0, "smc": {"mode": "off"}},
    "ignore-eos": {"temperature": 1.0, "ignore_eos": True},
    "stop": {"temperature": 1.0, "stop": ["t2 t2"]},
}


def words(tiny: TinyEngine, output: list[int]) -> str:
    return tiny.engine.tokenizer_manager.tokenizer.decode(output, skip_special_tokens=True).replace(" ", "")


@pytest.mark.parametrize("language", list(LANGUAGES))
def test_answers_are_in_the_language(tiny: TinyEngine, language: str) -> None:
    requests = [
        mode | LANGUAGES[language] | {"regex": language, "max_new_tokens": 30, "seed": seed}
        for mode in MODES.values()
        for seed in range(6)
    ]
    answers = tiny.generate_many([PROMPT] * len(requests), requests)
    for request, answer in zip(requests, answers, strict=True):
        assert re.fullmatch(language, words(tiny, answer["output_ids"])), (request, answer)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert answer["output_ids"].count(0) == 1
        assert answer["output_ids"][-1] == 0, "the grammar's end is EOS"
    assert idle_pool(tiny.engine)["token_usage"] in (0, None)


def test_particles_in_a_dead_end_have_no_weight(tiny: TinyEngine) -> None:
    """t3 may begin t33, but no word of the vocabulary begins with 3: who draws it cannot go on."""
    smc = {"n_particles": 16, "draft_length": 4}
    requests = [
        {"temperature": 1.5, "regex": "t9(t33|t1[0-9]){6}", "max_new_tokens": 30, "seed": seed, "smc": smc}
        for seed in range(8)
    ]
    for answer in tiny.generate_many([PROMPT] * len(requests), requests):
        assert re.fullmatch("t9(t33|t1[0-9]){6}", words(tiny, answer["output_ids"]))
    assert idle_pool(tiny.engine)["token_usage"] in (0, None)


def test_an_answer_is_its_solo_answer_beside_others(tiny: TinyEngine) -> None:
    requests = [
        (PROMPT, mode | {"regex": language, "max_new_tokens": 20, "seed": 3})
        for mode in MODES.values()
        for language in ("(t9|t1[0-9]){1,12}", "(t5t6|t7t8t9)*t11")
    ]
    requests += [([1, 9, 8], {"temperature": 1.0, "max_new_tokens": 40, "seed": 5})]  # without a grammar
    together = tiny.generate_many([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    alone = tiny.generate_many_alone(requests)
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("n", [1, 4])
def test_greedy_is_plain_decoding(tiny: TinyEngine, n: int, k: int) -> None:
    requests = [{"temperature": 0.0, "max_new_tokens": 25, "regex": "(t9|t1[0-9]|t5t6){2,}"}]
    requests += [requests[0] | {"smc": smc} for smc in ({"mode": "off"}, {"n_particles": n, "draft_length": k})]
    answers = tiny.generate_many([PROMPT] * 3, requests)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1


def test_n_answers_have_matchers_of_their_own(tiny: TinyEngine) -> None:
    params = sampling_params(regex="(t9|t1[0-9]){1,12}", n=5, temperature=1.0, max_new_tokens=30, seed=1)
    answers = tiny.engine.generate(input_ids=PROMPT, sampling_params=params)
    assert len({answer["text"] for answer in answers}) > 1
    assert all(re.fullmatch("(t9|t1[0-9]){1,12}", words(tiny, answer["output_ids"])) for answer in answers)


@pytest.mark.parametrize(
    "fault",
    [{"regex": "a+"}, {"regex": "t5("}, {"ebnf": "root ::= nothing"}, {"json_schema": "{"}, {"structural_tag": "{}"}],
)
def test_an_invalid_grammar_is_refused_and_hurts_nobody(tiny: TinyEngine, fault: dict[str, Any]) -> None:
    good = {"temperature": 1.0, "max_new_tokens": 30, "seed": 1}
    alone = tiny.generate(PROMPT, **good)
    with pytest.raises(ValueError, match=r"grammar|structural"):
        tiny.generate(PROMPT, **good, **fault)
    assert tiny.generate(PROMPT, **good)["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"smc_mode": "exact"}, {"smc_mode": "off"}])
def test_global_needs_weights(tiny: TinyEngine, sampling: dict[str, Any]) -> None:
    smc = {"grammar_semantics": "global"} | ({"mode": sampling["smc_mode"]} if "smc_mode" in sampling else {})
    with pytest.raises(ValueError, match="grammar_semantics"):
        tiny.generate(PROMPT, temperature=sampling.get("temperature", 1.0), regex="t5", smc=smc)
