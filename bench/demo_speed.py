"""Tokens per second of `off` and `smc` on the embedded demo pair, alternating in one engine.

    python bench/demo_speed.py

Prints the median of the runs, their spread, and the speed against `off` in the same run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import smc_sglang
from smc_sglang.demo import ensure_demo_pair

PROMPT = "<|im_start|>user\nWrite a short story about a lighthouse keeper.<|im_end|>\n<|im_start|>assistant\n"
NEW_TOKENS, RUNS = 32, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "smc N=4 K=4": {"n_particles": 4, "draft_length": 4},
    "smc N=4 K=8": {"n_particles": 4, "draft_length": 8},
}


def main() -> None:
    pair = ensure_demo_pair()
    engine = smc_sglang.Engine(
        model_path=str(pair.target),
        draft_model_path=str(pair.draft),
        log_level="error",
        max_total_tokens=16_384,
    )
    speeds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    ess: dict[str, float] = {}
    for run in range(RUNS + 1):
        for name, smc in SETTINGS.items():
            sampling = {
                "temperature": 0.7,
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
                "sampling_seed": run,
                "custom_params": {"smc": smc},
            }
            start = time.perf_counter()
            answer = engine.generate(PROMPT, sampling)
            if run:  # the first round warms up
                speeds[name].append(NEW_TOKENS / (time.perf_counter() - start))
                ess[name] = answer["meta_info"]["smc"]["mean_ess"]
    engine.shutdown()

    base = statistics.median(speeds["off"])
    print(f"{'setting':14} {'tokens/s':>9} {'spread':>15} {'x off':>6} {'mean ESS':>9}")
    for name, values in speeds.items():
        median = statistics.median(values)
        spread = f"{min(values):.1f} .. {max(values):.1f}"
        print(f"{name:14} {median:9.1f} {spread:>15} {median / base:6.2f} {ess[name]:9.2f}")


if __name__ == "__main__":
    main()
