"""What `max_stream_lag` buys and costs on the demo pair: how evenly text comes, against fidelity.

    python -m bench.stream_lag

For each N and bound, over the same prompts and seeds: tokens that come at once (mean and largest piece of a stream),
and the mean log-likelihood of the answers' tokens under the target (it falls towards that of the draft's law when the
group decides too early), with its standard error.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from smc_sglang.demo import ensure_demo_pair

PROMPTS = [
    "The history of bread begins",
    "To repair a bicycle tyre, first",
    "My grandmother's kitchen was",
    "The difference between weather and climate is",
    "In the year 1850, London",
    "A good teacher knows",
    "Water boils when",
    "The cat looked at the old man and",
]
N_SEEDS, LENGTH, K = 6, 64, 8


async def ask(engine: Any, prompt: str, seed: int, smc: dict[str, Any]) -> tuple[list[int], float]:
    """Sizes of the pieces of one stream, and the mean log-likelihood of its tokens."""
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": LENGTH,
        "ignore_eos": True,
        "sampling_seed": seed,
        "custom_params": {"smc": smc},
    }
    stream = await engine.async_generate(prompt=prompt, sampling_params=sampling, stream=True, return_logprob=True)
    sizes, before, meta = [], 0, {}
    async for chunk in stream:
        meta = chunk["meta_info"]
        sizes.append(meta["completion_tokens"] - before)
        before = meta["completion_tokens"]
    return [size for size in sizes if size], statistics.mean(value for value, _, _ in meta["output_token_logprobs"])


def main() -> None:
    import smc_sglang

    pair = ensure_demo_pair()
    engine = smc_sglang.Engine(
        model_path=str(pair.target), draft_model_path=str(pair.draft), draft_length=K, log_level="error"
    )

    async def run(smc: dict[str, Any]) -> list[tuple[list[int], float]]:
        jobs = [ask(engine, prompt, seed, smc) for prompt in PROMPTS for seed in range(N_SEEDS)]
        return await asyncio.gather(*jobs)

    print("  N  bound   mean piece  largest (mean)   log p per token")
    for n in (4, 8):
        for lag in (None, 64, 32, 16, 8, 1):
            answers = engine.loop.run_until_complete(run({"n_particles": n, "draft_length": K, "max_stream_lag": lag}))
            pieces = statistics.mean(size for sizes, _ in answers for size in sizes)
            largest = statistics.mean(max(sizes) for sizes, _ in answers)
            values = [value for _, value in answers]
            error = statistics.stdev(values) / len(values) ** 0.5
            fidelity = f"{statistics.mean(values):.3f} +- {error:.3f}"
            print(f"{n:3} {lag or 'none':>6} {pieces:12.1f} {largest:15.1f}   {fidelity}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
