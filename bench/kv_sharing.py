"""KV saved against copying, beside the least that any engine could hold.

    python bench/kv_sharing.py

Real text on the embedded demo pair. After every cycle it looks at the KV slots of every group's live particles:

* saved: 1 - (distinct slots) / (sum of the particles' lengths); copying engines hold the sum.
* limit: the same for the nodes of the particles' own prefix tree: one slot per distinct token path.
* held / limit: distinct slots over those nodes, mean and largest of all cycles. 1.00 cannot be beaten.
* in flight: slots of the blocks being drafted, which nobody can share yet, as a share of the slots held.

The paper (arXiv 2604.15672) reports 72.3% saved in its setting.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import smc_sglang
from radix_patch.accounting import usage
from smc_sglang.demo import ensure_demo_pair
from smc_sglang.engine.group import block_width

NEW_TOKENS, PER_SETTING, TEMPERATURE = 64, 2, 0.8
SETTINGS = [  # (N, K, about how many prompt tokens)
    *((n, 8, prompt) for prompt in (32, 256, 1024) for n in (2, 4, 8, 16)),
    *((8, k, 256) for k in (2, 4)),
]
TEXT = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text()
_LOG = "SMC_BENCH_KV_LOG"  # where the scheduler's process writes what it sees


def _record(_: None, coordinator: Any, group: Any) -> None:
    """After a cycle of `group`: one line of JSON."""
    live = [particle.req for particle in group.live]
    if not live or _LOG not in os.environ:
        return
    held = usage(coordinator._tree, live)
    line = {
        "rid": group.parent.rid,
        "held": held.distinct,
        "lengths": held.lengths,
        "limit": prefix_tree_nodes([*req.origin_input_ids, *req.output_ids[:-1]] for req in live),
        "in_flight": sum(block_width(req) for req in live),
    }
    with Path(os.environ[_LOG]).open("a") as log:
        log.write(json.dumps(line) + "\n")


# SGLang spawns its scheduler, and a spawned process imports this module, too: the hook is then applied there.
HookRegistry.register("smc_sglang.engine.coordinator.Coordinator._account", _record, HookType.AFTER)


def prefix_tree_nodes(sequences: Iterable[list[int]]) -> int:
    """Distinct non-empty prefixes of some token sequences."""
    tree: dict[tuple[int, int], int] = {}
    for tokens in sequences:
        node = -1
        for token in tokens:
            node = tree.setdefault((node, token), len(tree))
    return len(tree)


def main() -> None:
    pair = ensure_demo_pair()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "kv.jsonl")
        os.environ[_LOG] = str(log)
        engine = smc_sglang.Engine(
            model_path=str(pair.target),
            draft_model_path=str(pair.draft),
            max_particles=16,
            log_level="error",
            max_total_tokens=32_768,
        )
        tokenizer = engine.tokenizer_manager.tokenizer
        text = tokenizer.encode(TEXT)
        question = tokenizer.encode("<|im_start|>user\nExplain this text in simple words:\n")
        answer = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")
        print("| N | K | prompt | saved | limit | held / limit, mean | largest | in flight | resampled | mean ESS |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for n, k, prompt in SETTINGS:
            log.write_text("")
            room = prompt - len(question) - len(answer)
            # Other text for every request: only a group's own particles share.
            prompts = [question + text[i * 50 : i * 50 + room] + answer for i in range(PER_SETTING)]
            sampling = {
                "temperature": TEMPERATURE,
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
                "custom_params": {"smc": {"n_particles": n, "draft_length": k}},
            }
            answers = engine.generate(
                input_ids=prompts, sampling_params=[sampling | {"sampling_seed": i} for i in range(PER_SETTING)]
            )
            print(row(n, k, prompt, [json.loads(line) for line in log.read_text().splitlines()], answers), flush=True)
        engine.shutdown()


def row(n: int, k: int, prompt: int, cycles: list[dict[str, int]], answers: list[dict[str, Any]]) -> str:
    """One line of the table."""

    def mean(value: Any) -> float:
        return statistics.fmean(value(cycle) for cycle in cycles)

    reports = [answer["meta_info"]["smc"] for answer in answers]
    resampled = sum(report["resamples"] for report in reports) / sum(report["cycles"] for report in reports)
    return (
        f"| {n} | {k} | {prompt} "
        f"| {mean(lambda c: 1 - c['held'] / c['lengths']):.1%} | {mean(lambda c: 1 - c['limit'] / c['lengths']):.1%} "
        f"| {mean(lambda c: c['held'] / c['limit']):.3f} | {max(c['held'] / c['limit'] for c in cycles):.3f} "
        f"| {mean(lambda c: c['in_flight'] / c['held']):.1%} | {resampled:.0%} "
        f"| {statistics.fmean(report['mean_ess'] for report in reports):.2f} |"
    )


if __name__ == "__main__":
    main()
