"""Mixed load on a KV pool of 2,048 tokens, with clients that leave: every answer is whole and the pool is, too."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.tiny import POOL, TinyEngine, idle_pool, sampling_params

pytestmark = pytest.mark.engine

N_REQUESTS, CONCURRENCY, ROUNDS = 200, 16, 4


@dataclass(frozen=True)
class Request:
    """One request of the load; `leaves_after` outputs its client goes, if it is not None."""

    prompt: list[int]
    sampling: dict[str, Any]
    leaves_after: int | None

    @classmethod
    def draw(cls, rng: random.Random, seed: int) -> Request:
        # Few-shot prompts that share prefixes, and now and then a long one of its own.
        prompt = [1, *(2 + i % 50 for i in range(rng.choice((1, 8, 40, 90)))), *rng.choices(range(2, 60), k=3)]
        sampling: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.8, 1.0)),
            "max_new_tokens": rng.choice((1, 2, 5, 9, 30, 150)),
            "seed": seed,
            "ignore_eos": rng.random() < 0.8,
            "smc": {
                "n_particles": rng.choice((1, 4, 8)),
                "draft_length": rng.choice((1, 4, 8)),
                "resample_threshold": rng.choice((0.0, 0.5)),  # 0: little is shared but the prompt
            },
        }
        if rng.random() < 0.2:
            sampling["stop_token_ids"] = [9, 10]
        if rng.random() < 0.1:
            sampling["smc"]["mode"] = "off"
        return cls(prompt, sampling, rng.randrange(4) if rng.random() < 0.3 else None)


async def _answer(tiny: TinyEngine, request: Request, rid: str, places: asyncio.Semaphore) -> dict[str, Any]:
    """The last output of a streamed request; its client may leave while it is queued, or after some outputs."""
    async with places:
        stream = await tiny.engine.async_generate(
            input_ids=request.prompt, sampling_params=sampling_params(**request.sampling), stream=True, rid=rid
        )
        if request.leaves_after == 0:
            asyncio.get_running_loop().call_later(0.005, tiny.engine.tokenizer_manager.abort_request, rid)
        n_outputs = 0
        last: dict[str, Any] = {}
        async for output in stream:
            spoken = last.get("output_ids", [])
            assert output["output_ids"][: len(spoken)] == spoken, "a stream has taken something back"
            last = output
            n_outputs += 1
            if n_outputs == request.leaves_after:
                tiny.engine.tokenizer_manager.abort_request(rid)
        return last


async def _load(tiny: TinyEngine, requests: list[Request], name: str) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(CONCURRENCY)
    return await asyncio.gather(
        *(_answer(tiny, request, f"{name}-{i:03d}", places) for i, request in enumerate(requests))
    )


def test_two_hundred_mixed_requests_four_times(tiny: TinyEngine) -> None:
    assert POOL == 2048
    rng = random.Random(0)
    requests = [Request.draw(rng, seed) for seed in range(N_REQUESTS)]
    solo = tiny.generate_many_alone([(request.prompt, request.sampling) for request in requests])
    shrunk = retracted = aborted = undisturbed = 0
    for turn in range(ROUNDS):
        answers = tiny.engine.loop.run_until_complete(_load(tiny, requests, f"soak{turn}"))
        for request, answer, alone in zip(requests, answers, solo, strict=True):
            finish = answer["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                assert request.leaves_after is not None, finish
                aborted += 1
                continue
            assert finish == alone["meta_info"]["finish_reason"] or request.sampling["temperature"] > 0
            report = answer["meta_info"]["smc"]
            shrunk += report["shrinks"] > 0
            retracted += report["retractions"] > 0
            if finish["type"] == "length":
                assert len(answer["output_ids"]) == request.sampling["max_new_tokens"]
            # Pressure changes which particles live, not what a greedy or an undisturbed request answers.
            if request.sampling["temperature"] == 0 or not (report["shrinks"] or report["retractions"]):
                assert answer["output_ids"] == alone["output_ids"], (request, report)
                undisturbed += 1
        idle_pool(tiny.engine)
    # `pytest -s` shows how hard it was.
    print(f"{aborted} aborted, {shrunk} shrunk, {retracted} retracted, {undisturbed} as alone")
    assert aborted > 50
    assert undisturbed > 300
    assert shrunk > 0
