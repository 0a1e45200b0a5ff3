"""Speed against fidelity: `off`, `exact` and `smc` over N and K on the benchmark pairs, beside a user's other choices.

    python -m bench.frontier [--pairs demo wide-0.66 wide-0.83] [--runs 5] [--tokens 100] [--no-peers]

Every run takes one prompt through all settings in turn, in one engine; the first run warms up. Printed, and written to
bench/results/latest.json with a plot beside it: tokens per second (median and spread over the runs), where a cycle's
time goes, ESS, how often groups were resampled, KV saved, the target's mean log-probability per token of what was
said, and the share of the cost model's limit that was reached (bench/limit.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import bench.cycle as cycle
import smc_sglang
from bench import peers
from bench.limit import Limit, Products
from bench.pairs import ensure_pair
from smc_sglang.demo import DemoPair
from smc_sglang.platform.linear import Int8Matrix, PackedMatrix
from smc_sglang.platform.machine import multiplies_bfloat16

HERE = Path(__file__).parent
PROMPTS = (HERE / "prompts.txt").read_text().splitlines()
RESULTS = HERE / "results"
INT8 = "+int8"  # after a pair's name: with the draft's weights in eight bits
TEMPERATURE, WARM_UPS = 0.8, 1
EXACT_K = (2, 4, 8)
GRID = [(n, k) for k in (4, 8) for n in (1, 2, 4, 8)]  # (N, K)
BATCHES = (4, 8)
BATCHED = (4, 8)  # N, K of the batched runs
GROWTH_N, GROWTH_CONTEXT = (1, 2, 4, 6, 8, 16), (64, 256, 1024, 3072)


@dataclass
class Setting:
    """One way to decode, and what was seen of it."""

    smc: dict[str, Any]
    batch: int = 1
    speeds: list[float] = field(default_factory=list)  # tokens per second
    reports: list[dict[str, Any]] = field(default_factory=list)
    logliks: list[float] = field(default_factory=list)  # nats per token, one value per answer
    parts: list[dict[str, float]] = field(default_factory=list)  # ms

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def mean(self, value: str) -> float:
        return statistics.mean(report[value] for report in self.reports)

    def loglik(self) -> tuple[float, float]:
        """Mean and its standard error."""
        values = self.logliks
        return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0

    def summary(self) -> dict[str, Any]:
        parts = {
            part: statistics.median(p[part] for p in self.parts if p) for part in (self.parts[0] if self.parts else {})
        }
        return {"tok_s": self.speed, "spread": [min(self.speeds), max(self.speeds)], "ms_per_cycle": parts}


class Bench:
    """One pair in one engine."""

    def __init__(self, pair: DemoPair, new_tokens: int, dtype: torch.dtype, draft_int8: bool) -> None:
        self._log = Path(os.environ[cycle.LOG])
        self._new_tokens = new_tokens
        self.engine = smc_sglang.Engine(
            model_path=str(pair.target),
            draft_model_path=str(pair.draft),
            dtype=str(dtype).removeprefix("torch."),
            max_total_tokens=32_768,
            draft_length=8,
            draft_int8=draft_int8,
            max_particles=16,
            log_level="error",
        )

    def run(self, setting: Setting, prompts: Sequence[str], seed: int, *, keep: bool, score: bool = True) -> None:
        """Generate; note the speed and what came with it if `keep`."""
        cycle.medians(self._log)
        sampling = {
            "temperature": TEMPERATURE,
            "max_new_tokens": self._new_tokens,
            "ignore_eos": True,
            "sampling_seed": seed,
            "custom_params": {"smc": setting.smc},
        }
        start = time.perf_counter()
        answers = self.engine.generate(list(prompts), [sampling] * len(prompts))
        seconds = time.perf_counter() - start
        if not keep:
            return
        setting.speeds.append(len(prompts) * self._new_tokens / seconds)
        setting.parts.append(cycle.medians(self._log))
        setting.reports += [answer["meta_info"]["smc"] for answer in answers]
        if score:
            setting.logliks += [self._loglik(p, answer) for p, answer in zip(prompts, answers, strict=True)]

    def _loglik(self, prompt: str, answer: dict[str, Any]) -> float:
        """The target's own mean log-probability of an answer's tokens."""
        ids = self.engine.tokenizer_manager.tokenizer.encode(prompt)
        judged = self.engine.generate(
            input_ids=ids + answer["output_ids"],
            sampling_params={"max_new_tokens": 0, "custom_params": {"smc": {"mode": "off"}}},
            return_logprob=True,
            logprob_start_len=len(ids),
        )
        return statistics.mean(value for value, *_ in judged["meta_info"]["input_token_logprobs"] if value is not None)

    def ms_per_cycle(self, n: int, context: int) -> float:
        """At K = 8, after a prompt of `context` tokens."""
        words = (" ".join(PROMPTS) + " ") * (context // 300 + 1)
        ids = self.engine.tokenizer_manager.tokenizer.encode(words)[:context]
        sampling = {
            "temperature": TEMPERATURE,
            "max_new_tokens": self._new_tokens,
            "ignore_eos": True,
            "custom_params": {"smc": {"n_particles": n, "draft_length": 8}},
        }
        self.engine.generate(input_ids=ids, sampling_params=sampling)
        cycle.medians(self._log)
        self.engine.generate(input_ids=ids, sampling_params=sampling | {"sampling_seed": 1})
        return cycle.medians(self._log)["whole"]


def measure(name: str, runs: int, new_tokens: int, dtype: torch.dtype, with_peers: bool) -> dict[str, Any]:
    """Everything about one pair, as it goes into the JSON file."""
    plain = name.removesuffix(INT8)
    pair, draft_int8 = ensure_pair(plain), name != plain
    print(f"\n{name}: {new_tokens} tokens per answer, {runs} runs, temperature {TEMPERATURE}")
    draft = Products(pair.draft, dtype, Int8Matrix.of if draft_int8 else PackedMatrix.of)
    limit = Limit(Products(pair.target, dtype), draft)
    bench = Bench(pair, new_tokens, dtype, draft_int8)
    off = Setting({"mode": "off"})
    exact = {k: Setting({"mode": "exact", "n_particles": 1, "draft_length": k}) for k in EXACT_K}
    smc = {(n, k): Setting({"n_particles": n, "draft_length": k}) for n, k in GRID}
    n, k = BATCHED
    batched = {
        (mode, size): Setting({"mode": "off"} if mode == "off" else {"n_particles": n, "draft_length": k}, size)
        for size in BATCHES
        for mode in ("off", "smc")
    }
    for run in range(runs + WARM_UPS):
        limit.measure(GRID)
        for setting in (off, *exact.values(), *smc.values()):
            bench.run(setting, [PROMPTS[run % len(PROMPTS)]], run, keep=run >= WARM_UPS)
    for run in range(2 + WARM_UPS):
        for setting in batched.values():
            bench.run(setting, PROMPTS[: setting.batch], run, keep=run >= WARM_UPS, score=False)
    growth = {
        "ms_per_cycle_by_n": {n: bench.ms_per_cycle(n, 64) for n in GROWTH_N},
        "ms_per_cycle_by_context": {context: bench.ms_per_cycle(4, context) for context in GROWTH_CONTEXT},
    }
    bench.engine.shutdown()
    result = _result(off, exact, smc, batched, limit) | {"growth": growth}
    if with_peers and not draft_int8:  # they would be the same
        result["peers"] = peers.measure(pair, PROMPTS[:runs], new_tokens, TEMPERATURE, dtype)
    _print(name, result)
    return result


def _result(
    off: Setting,
    exact: dict[int, Setting],
    smc: dict[tuple[int, int], Setting],
    batched: dict[tuple[str, int], Setting],
    limit: Limit,
) -> dict[str, Any]:
    best_k = max(exact, key=lambda k: exact[k].speed)
    base, _ = off.loglik()
    rows = []
    for (n, k), setting in smc.items():
        loglik, error = setting.loglik()
        rows.append(
            {
                "n_particles": n,
                "draft_length": k,
                **setting.summary(),
                "x_off": setting.speed / off.speed,
                "limit_tok_s": limit.smc(n, k),
                "share_of_limit": setting.speed / limit.smc(n, k),
                "mean_ess": setting.mean("mean_ess"),
                "resample_rate": setting.mean("resamples") / max(setting.mean("cycles"), 1),
                "kv_saved": setting.mean("kv_saved"),
                "loglik": loglik,
                "loglik_gap": loglik - base,
                "loglik_error": error,
            }
        )
    return {
        "off_tok_s": off.speed,
        "off": off.summary()
        | {"share_of_limit": off.speed / limit.off(), "loglik": base, "loglik_error": off.loglik()[1]},
        "exact_best": {"draft_length": best_k, "tok_s": exact[best_k].speed, "loglik": exact[best_k].loglik()[0]},
        "exact": [
            {"draft_length": k, **s.summary(), "tokens_per_cycle": s.mean("tokens_per_cycle")} for k, s in exact.items()
        ],
        "smc": rows,
        "batched": [{"mode": mode, "batch": size, **setting.summary()} for (mode, size), setting in batched.items()],
        "products_ms": limit.products_ms,
    }


def _print(name: str, result: dict[str, Any]) -> None:
    table = Table(title=f"{name} (ms are medians per cycle)")
    columns = ("tok/s", "spread", "x off", "of limit", *cycle.PARTS, "whole", "ESS", "resampled", "KV saved", "log p")
    table.add_column("setting")
    for column in columns:
        table.add_column(column, justify="right")

    def add(setting: str, row: dict[str, Any]) -> None:
        def show(key: str, form: str) -> str:
            return format(row[key], form) if key in row else ""

        table.add_row(
            setting,
            show("tok_s", ".1f"),
            "{:.1f} .. {:.1f}".format(*row["spread"]),
            f"{row['tok_s'] / result['off_tok_s']:.2f}",
            show("share_of_limit", ".0%"),
            *(f"{row['ms_per_cycle'].get(part, float('nan')):.1f}" for part in (*cycle.PARTS, "whole")),
            show("mean_ess", ".2f"),
            show("resample_rate", ".2f"),
            show("kv_saved", ".0%"),
            f"{show('loglik', '.2f')} ± {show('loglik_error', '.2f')}" if "loglik" in row else "",
        )

    add("off", result["off"])
    for row in result["exact"]:
        add(f"exact K={row['draft_length']}", row)
    for row in result["smc"]:
        add(f"smc N={row['n_particles']} K={row['draft_length']}", row)
    for row in result["batched"]:
        add(f"{row['mode']}, batch {row['batch']}", row)
    console = Console(width=180)
    console.print(table)
    for peer, seen in result.get("peers", {}).items():
        console.print(f"{peer}: {peers.describe(seen)}")
    for curve, values in result["growth"].items():
        console.print(f"{curve}: " + ", ".join(f"{x}: {ms:.0f}" for x, ms in values.items()))


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed against fidelity, one panel per pair."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = results["pairs"]
    figure, panels = plt.subplots(1, len(pairs), figsize=(5 * len(pairs), 4), squeeze=False)
    for panel, (name, pair) in zip(panels[0], pairs.items(), strict=True):
        for k in sorted({row["draft_length"] for row in pair["smc"]}):
            rows = [row for row in pair["smc"] if row["draft_length"] == k]
            panel.errorbar(
                [row["x_off"] for row in rows],
                [row["loglik_gap"] for row in rows],
                yerr=[row["loglik_error"] for row in rows],
                marker="o",
                label=f"smc K={k}",
            )
            for row in rows:
                panel.annotate(f"N={row['n_particles']}", (row["x_off"], row["loglik_gap"]))
        panel.plot([1.0], [0.0], "k*", label="off")
        best = pair["exact_best"]
        panel.plot([best["tok_s"] / pair["off_tok_s"]], [0.0], "ks", label=f"exact K={best['draft_length']}")
        panel.set(title=name, xlabel="tokens per second, x off", ylabel="log p per token, less off's")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)


def machine(dtype: torch.dtype) -> dict[str, Any]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16": multiplies_bfloat16(),
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "sglang", "transformers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["demo", "wide-0.66", "wide-0.66" + INT8, "wide-0.83"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100, help="per answer: a first one, and eleven cycles of K = 8")
    parser.add_argument("--no-peers", action="store_true")
    chosen = parser.parse_args()
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    RESULTS.mkdir(exist_ok=True)
    latest = RESULTS / "latest.json"
    results: dict[str, Any] = json.loads(latest.read_text()) if latest.exists() else {"pairs": {}}
    results["machine"] = machine(dtype)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[cycle.LOG] = str(Path(folder) / "cycles.jsonl")
        for name in chosen.pairs:
            measured = measure(name, chosen.runs, chosen.tokens, dtype, not chosen.no_peers)
            # Of a pair that is not chosen, the last result stays.
            results["pairs"][name] = {"date": f"{datetime.date.today()}", "tokens": chosen.tokens, **measured}
            latest.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, RESULTS / "frontier.svg")


if __name__ == "__main__":
    main()
