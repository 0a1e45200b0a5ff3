"""What a request gets: determinism, greedy identity, stop conditions, refusals, and KV given back."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tests.engine.tiny import CONTEXT, POOL, TinyEngine, idle_pool, sampling_params

pytestmark = pytest.mark.engine

PROMPT = [1, 5, 6, 7, 8]


def test_greedy_equals_plain_decoding(tiny: TinyEngine) -> None:
    prompts = [[1, 5 + i, 6, 7, 8] for i in range(8)]
    plain = tiny.generate_many(prompts, [{"temperature": 0, "max_new_tokens": 40, "smc": {"mode": "off"}}] * 8)
    for draft_length in (1, 4, 8):
        greedy = {"temperature": 0, "max_new_tokens": 40, "smc": {"draft_length": draft_length}}
        for ours, theirs in zip(tiny.generate_many(prompts, [greedy] * 8), plain, strict=True):
            assert ours["output_ids"] == theirs["output_ids"]
            assert ours["meta_info"]["smc"]["mode"] == "exact"
            assert theirs["meta_info"]["smc"]["mode"] == "off"


def test_parallel_requests_equal_their_solo_answers(tiny: TinyEngine) -> None:
    """Eight requests of different N, K, seed and length, in one batch and alone."""
    shapes = [(1, 4), (2, 8), (4, 1), (4, 4), (8, 3), (3, 8), (5, 2), (4, 4)]
    prompts = [[1, *range(5, 8 + index)] for index in range(8)]
    sampling = [
        {
            "temperature": 0.9,
            "max_new_tokens": 20 + 2 * index,
            "seed": index,
            "smc": {"n_particles": n, "draft_length": k, "return_particles": True},
        }
        for index, (n, k) in enumerate(shapes)
    ]
    solo = [tiny.generate(prompt, **one) for prompt, one in zip(prompts, sampling, strict=True)]
    for together, alone in zip(tiny.generate_many(prompts, sampling), solo, strict=True):
        assert together["output_ids"] == alone["output_ids"]
        particles, expected = (answer["meta_info"]["smc"]["particles"] for answer in (together, alone))
        assert [one["output_ids"] for one in particles] == [one["output_ids"] for one in expected]
        assert [one["weight"] for one in particles] == pytest.approx([one["weight"] for one in expected], abs=1e-3)


def test_seeds(tiny: TinyEngine) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    seeded = [tiny.generate(PROMPT, seed=7, **sampling)["output_ids"] for _ in range(3)]
    assert seeded[0] == seeded[1] == seeded[2]
    unseeded = {tuple(tiny.generate(PROMPT, **sampling)["output_ids"]) for _ in range(5)}
    assert len(unseeded) > 1
    assert tiny.generate(PROMPT, seed=-(2**63), **sampling)["output_ids"] != seeded[0]


def test_report(tiny: TinyEngine) -> None:
    smc = {"n_particles": 4, "draft_length": 4, "return_particles": True}
    answer = tiny.generate(PROMPT, temperature=1.0, max_new_tokens=40, ignore_eos=True, seed=1, smc=smc)
    report = answer["meta_info"]["smc"]
    assert (report["mode"], report["n_particles"], report["draft_length"]) == ("smc", 4, 4)
    # 1 token from the prefill, then 5 a cycle.
    assert report["cycles"] == 8
    assert report["tokens_per_cycle"] == pytest.approx(40 / 8)
    assert 1.0 <= report["mean_ess"] <= 4.0
    assert report["resamples"] > 0
    assert 0.0 < report["kv_saved"] < 1.0
    assert sum(particle["weight"] for particle in report["particles"]) == pytest.approx(1.0)
    assert answer["output_ids"] in [particle["output_ids"] for particle in report["particles"]]


def test_streams_hold_back_no_more_than_asked(tiny: TinyEngine) -> None:
    """Whatever is streamed is what the whole answer says, and after each cycle at most `max_stream_lag` tokens wait."""
    sampling = {"temperature": 1.5, "max_new_tokens": 100, "ignore_eos": True, "sampling_seed": 5}
    smc = {"n_particles": 8, "draft_length": 4, "resample_threshold": 0.0}

    def streamed(lag: int | None) -> tuple[list[int], list[list[int]]]:
        params = sampling_params(smc | {"max_stream_lag": lag}, **sampling)
        chunks = tiny.engine.generate(input_ids=PROMPT, sampling_params=params, stream=True)
        outputs = [list(chunk["output_ids"]) for chunk in chunks]  # SGLang goes on filling the list
        whole = tiny.generate(PROMPT, smc=smc | {"max_stream_lag": lag}, **sampling)["output_ids"]
        assert outputs[-1] == whole
        assert all(whole[: len(output)] == output for output in outputs)
        return whole, outputs

    whole, unbounded = streamed(None)
    assert len(unbounded) <= 3  # eight particles that are never resampled agree on next to nothing
    for lag in (1, 7, 40):
        _, outputs = streamed(lag)
        sizes = [len(output) for output in outputs]
        # The longest particle gains K + 1 = 5 tokens a cycle: nothing is held back for longer than `lag` allows.
        assert all(after - before <= 5 + lag for before, after in itertools.pairwise(sizes))
        assert sizes[0] == 1  # the first token comes with the prompt
        assert len(sizes) >= 100 / (5 + lag) - 1
    assert streamed(400)[0] == whole  # a bound that is never reached changes nothing


def test_finish_conditions(tiny: TinyEngine) -> None:
    for n, k in ((1, 1), (4, 4), (4, 8)):
        common = {"temperature": 1.0, "smc": {"n_particles": n, "draft_length": k}}
        for length in (1, 2, 3, 7):
            answer = tiny.generate(PROMPT, max_new_tokens=length, ignore_eos=True, seed=length, **common)
            assert len(answer["output_ids"]) == length
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
        for seed in range(6):
            answer = tiny.generate(PROMPT, max_new_tokens=60, stop_token_ids=[9, 10, 11], seed=seed, **common)
            ids = answer["output_ids"]
            stops = {9, 10, 11, 0}
            assert not stops & set(ids[:-1])
            if answer["meta_info"]["finish_reason"]["type"] == "stop":
                assert ids[-1] in stops
            # Token 12's text, as a string that only decoding finds.
            text = tiny.engine.tokenizer_manager.tokenizer.decode([12])
            answer = tiny.generate(PROMPT, max_new_tokens=60, stop=[text.strip()], seed=seed, **common)
            assert text.strip() not in answer["text"]


def test_stop_strings_are_weighed_like_stop_tokens(tiny: TinyEngine) -> None:
    """The decision taken on the host (stop strings) and on the device (stop tokens) is the same one."""
    for seed in range(5):
        common = {"temperature": 1.0, "max_new_tokens": 40, "seed": seed, "smc": {"return_particles": True}}
        text = tiny.engine.tokenizer_manager.tokenizer.decode([12]).strip()
        by_token = tiny.generate(PROMPT, stop_token_ids=[12], **common)["meta_info"]["smc"]
        by_string = tiny.generate(PROMPT, stop=[text], **common)["meta_info"]["smc"]
        assert by_token["log_z"] == pytest.approx(by_string["log_z"], abs=1e-6)
        ids = [[one["output_ids"] for one in report["particles"]] for report in (by_token, by_string)]
        assert ids[0] == ids[1]


def test_stream_never_takes_back(tiny: TinyEngine) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 50, "ignore_eos": True, "sampling_seed": 3}
    whole = tiny.engine.generate(input_ids=PROMPT, sampling_params=sampling)
    seen: list[list[int]] = []
    for chunk in tiny.engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True):
        seen.append(list(chunk["output_ids"]))
    assert len(seen) > 1
    for earlier, later in itertools.pairwise(seen):
        assert later[: len(earlier)] == earlier
    assert seen[-1] == whole["output_ids"]
    assert "smc" in chunk["meta_info"]


@pytest.mark.parametrize("length", range(CONTEXT - 14, CONTEXT - 6))
def test_up_to_the_context_end(tiny: TinyEngine, length: int) -> None:
    prompt = [2 + i % 60 for i in range(length)]
    answer = tiny.generate(
        prompt,
        temperature=1.0,
        ignore_eos=True,
        max_new_tokens=CONTEXT - length,
        seed=1,
        smc={"n_particles": 4, "draft_length": 8},
    )
    # SGLang keeps one position free.
    assert CONTEXT - length - 2 <= len(answer["output_ids"]) <= CONTEXT - length
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_extremes_in_one_batch(tiny: TinyEngine) -> None:
    """N = 64, N = 1, K = 1, max_tokens = 1, a prompt of one token and one in several prefill chunks."""
    requests: list[tuple[list[int], dict[str, Any]]] = [
        ([5], {"max_new_tokens": 12, "smc": {"n_particles": 64, "draft_length": 4}}),
        ([6], {"max_new_tokens": 1, "smc": {"n_particles": 64, "draft_length": 8}}),
        ([7], {"max_new_tokens": 20, "smc": {"n_particles": 1, "draft_length": 1}}),
        ([8] * 200, {"max_new_tokens": 5, "smc": {"n_particles": 3, "draft_length": 1}}),
        ([9], {"max_new_tokens": 1, "smc": {"n_particles": 1, "draft_length": 1}}),
        ([10], {"max_new_tokens": 2, "smc": {"n_particles": 2, "draft_length": 8}}),
    ]
    prompts = [prompt for prompt, _ in requests]
    sampling = [{"temperature": 1.0, "ignore_eos": True, "seed": 1} | one for _, one in requests]
    together = tiny.generate_many(prompts, sampling)
    alone = tiny.generate_many_alone(list(zip(prompts, sampling, strict=True)))
    for answer, solo, one in zip(together, alone, sampling, strict=True):
        assert len(answer["output_ids"]) == one["max_new_tokens"]
        if not answer["meta_info"]["smc"]["shrinks"]:
            assert answer["output_ids"] == solo["output_ids"]
    idle_pool(tiny.engine)


def test_salted_requests_share_with_their_own_salt_only(tiny: TinyEngine) -> None:
    idle_pool(tiny.engine)
    prompt = [2 + i % 50 for i in range(80)]
    sampling = sampling_params(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=3)

    def ask(salt: str | None) -> tuple[int, list[int]]:
        answer = tiny.engine.generate(input_ids=prompt, sampling_params=sampling, cache_salt=salt)
        return answer["meta_info"]["cached_tokens"], answer["output_ids"]

    cached, answers = zip(*(ask(salt) for salt in ("a", "b", None, "a")), strict=True)
    assert cached == (0, 0, 0, 79)
    assert len({tuple(answer) for answer in answers}) == 1


def test_cached_and_cold_answers_are_the_same(tiny: TinyEngine) -> None:
    prompt = [2 + i % 50 for i in range(100)]
    sampling = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True, "seed": 5}
    idle_pool(tiny.engine)
    cold = tiny.generate(prompt, **sampling)
    warm = tiny.generate(prompt, **sampling)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == 99
    assert warm["output_ids"] == cold["output_ids"]
    # The whole answer is in the tree, too: the next turn of a chat starts from it.
    turn = tiny.generate(prompt + cold["output_ids"] + [3], **sampling)
    assert turn["meta_info"]["cached_tokens"] >= 100 + 29


def test_plain_answers_are_not_offered_to_the_draft(tiny: TinyEngine) -> None:
    """Only the target ran on what mode `off` decodes: it stays out of the tree, and a later draft is right."""
    off = tiny.generate(PROMPT, temperature=1.0, max_new_tokens=30, ignore_eos=True, seed=2, smc={"mode": "off"})
    turn = PROMPT + off["output_ids"] + [3]
    after = tiny.generate(turn, temperature=1.0, max_new_tokens=2, seed=2)
    assert after["meta_info"]["cached_tokens"] <= len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"regex": "a+"}, ["grammar", "vocabulary"]),
        ({"regex": "("}, ["regex"]),
        ({"json_schema": "{"}, ["json"]),
        ({"smc": {"n_particles": 0}}, ["smc.n_particles", "1"]),
        ({"smc": {"n_particles": 65}}, ["smc.n_particles", "64"]),
        ({"smc": {"n_particles": 2.5}}, ["smc.n_particles"]),
        ({"smc": {"draft_length": 9}}, ["smc.draft_length", "8"]),
        ({"smc": {"particles": 2}}, ["smc.particles", "n_particles"]),
        ({"smc": {"mode": "fast"}}, ["smc.mode"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"logit_bias": {"64": 1.0}}, ["logit_bias", "63"]),
        ({"min_new_tokens": 9}, ["min_new_tokens"]),
        ({"smc": {"power": 2.0, "mode": "off"}}, ["smc.power"]),
        ({"smc": {"power": 2.0, "mode": "exact"}}, ["smc.power"]),
        ({"smc": {"max_stream_lag": 0}}, ["smc.max_stream_lag", "1"]),
        ({"smc": {"grammar_semantics": "global", "mode": "exact"}}, ["smc.grammar_semantics"]),
        ({"smc": {"resample_threshold": 1.5}}, ["smc.resample_threshold"]),
        ({"smc": {"n_particles": 64}, "max_new_tokens": 60}, ["KV slots", str(POOL)]),
    ],
    ids=str,
)
def test_refusals_name_the_field(tiny: TinyEngine, sampling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as error:
        tiny.generate(PROMPT, **({"temperature": 1.0, "max_new_tokens": 8} | sampling))
    assert all(word in str(error.value) for word in words)
    assert tiny.generate(PROMPT, temperature=1.0, max_new_tokens=3)["output_ids"]


def test_an_empty_prompt_is_refused(tiny: TinyEngine) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        tiny.generate([], temperature=1.0, max_new_tokens=3)
    assert tiny.generate(PROMPT, temperature=1.0, max_new_tokens=3)["output_ids"]


def test_pool_is_whole_after_a_mix(tiny: TinyEngine) -> None:
    """Stop strings, EOS, lengths, aborts and refusals, under pressure; then nothing is held."""
    loop = tiny.engine.loop

    async def one(index: int) -> str:
        n, k = ((1, 4), (4, 4), (8, 8), (2, 1))[index % 4]
        sampling: dict[str, Any] = {
            "temperature": 1.0 if index % 5 else 0.0,
            "max_new_tokens": 1 + 7 * (index % 6),
            "sampling_seed": index,
            "ignore_eos": index % 3 == 0,
            "custom_params": {"smc": {"n_particles": n, "draft_length": k, "mode": "off" if index % 7 == 6 else "smc"}},
        }
        if index % 4 == 1:
            sampling["stop"] = [tiny.engine.tokenizer_manager.tokenizer.decode([12]).strip()]
        if index % 11 == 10:
            sampling["top_p"] = 0.0
        prompt = [2 + (index * 7 + i) % 60 for i in range(1 + index % 40)]
        stream = await tiny.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True, rid=f"mix-{index}"
        )
        last: dict[str, Any] = {}
        async for chunk in stream:
            last = chunk
            if index % 6 == 5:
                tiny.engine.tokenizer_manager.abort_request(f"mix-{index}")
        return str(last["meta_info"]["finish_reason"]["type"])

    async def all_of_them() -> list[str | BaseException]:
        return await asyncio.gather(*(one(index) for index in range(66)), return_exceptions=True)

    for _ in range(2):
        outcomes = loop.run_until_complete(all_of_them())
        kinds = {outcome if isinstance(outcome, str) else type(outcome).__name__ for outcome in outcomes}
        assert kinds <= {"stop", "length", "abort", "ValueError"}, kinds
        assert {"stop", "length", "ValueError"} <= kinds
        idle_pool(tiny.engine)
    assert tiny.generate(PROMPT, temperature=1.0, max_new_tokens=5)["output_ids"]


def test_groups_shrink_and_return_under_pressure(tiny: TinyEngine) -> None:
    """SGLang admits more than the pool can hold: groups get smaller, leave and return; every answer is complete."""
    # Without resampling the particles of a group soon share little more than the prompt.
    smc = {"n_particles": 8, "resample_threshold": 0.0}
    sampling = [
        {"temperature": 1.0, "max_new_tokens": 240, "ignore_eos": True, "seed": i, "smc": smc} for i in range(24)
    ]
    answers = tiny.generate_many([[1, 5, 6, 7, 8 + i] for i in range(24)], sampling)
    assert [len(answer["output_ids"]) for answer in answers] == [240] * 24
    reports = [answer["meta_info"]["smc"] for answer in answers]
    assert any(report["shrinks"] > 0 for report in reports)
    assert any(report["retractions"] > 0 for report in reports)
    assert all(report["kv_tokens_peak"] <= POOL for report in reports)
    assert {report["n_particles"] for report in reports} == {8}
    idle_pool(tiny.engine)
