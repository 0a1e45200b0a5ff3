"""SGLang's own serving benchmark against our HTTP server, one run per mode.

    python -m bench.serving [--pair wide-0.66] [--concurrency 1 4] [--tokens 48]
    python -m bench.serving --url http://node:30000 --tokenizer meta-llama/Llama-3.1-70B-Instruct

Without `--url` it serves one of the benchmark pairs itself. Each line of the table is one run of
`sglang.benchmark.serving` (chat completions, streamed, ends of text ignored), which differs from its neighbours in the
`smc` field only.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.pairs import ensure_pair

PROMPTS = (Path(__file__).parent / "prompts.txt").read_text().splitlines()
MODES: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "exact N=1 K=2": {"mode": "exact", "n_particles": 1, "draft_length": 2},
    "smc N=1 K=8": {"n_particles": 1, "draft_length": 8},
    "smc N=4 K=8": {"n_particles": 4, "draft_length": 8},
}
COLUMNS = {
    "tokens/s": "output_throughput",
    "first token, ms": "median_ttft_ms",
    "between tokens, ms": "median_tpot_ms",
    "whole answer, ms": "median_e2e_latency_ms",
}
_START_UP = 300  # seconds


@contextmanager
def served(pair: str) -> Iterator[tuple[str, str]]:
    """Address and tokenizer of a server of one of the benchmark pairs."""
    models = ensure_pair(pair)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "smc_sglang.cli", "serve", "--port", str(port), "--log-level", "error"),
        *("--model-path", str(models.target), "--draft-model-path", str(models.draft), "--max-draft-length", "8"),
    ]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_UP
        while not _healthy(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server of {pair} did not start")
            time.sleep(1)
        yield url, str(models.target)
    finally:
        server.terminate()
        server.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def dataset(path: Path, n_prompts: int) -> None:
    """The prompts as conversations, each told apart so that none is a prefix that is cached already."""
    with path.open("w") as file:
        for number in range(n_prompts):
            said = f"({number + 1}) Go on: {PROMPTS[number % len(PROMPTS)]}"
            turns = [{"content": said}, {"content": "..."}]
            file.write(json.dumps({"conversations": turns}) + "\n")


def run(url: str, tokenizer: str, smc: dict[str, Any], concurrency: int, tokens: int, folder: Path) -> dict[str, Any]:
    """One run of SGLang's benchmark; its own summary."""
    n_prompts = 4 * concurrency
    prompts, output = folder / "prompts.jsonl", folder / "result.jsonl"
    dataset(prompts, n_prompts)
    output.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai-chat", "--base-url", url),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(n_prompts)),
        *("--tokenizer", tokenizer, "--sharegpt-output-len", str(tokens), "--max-concurrency", str(concurrency)),
        *("--extra-request-body", json.dumps({"smc": smc, "temperature": 0.8}), "--flush-cache", "--disable-tqdm"),
        *("--output-file", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not output.exists():
        raise SystemExit(f"SGLang's benchmark failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if summary["completed"] < n_prompts:
        raise SystemExit(f"only {summary['completed']} of {n_prompts} requests came back")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="wide-0.66")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--tokenizer", help="of that server's model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=48)
    chosen = parser.parse_args()
    if (chosen.url is None) != (chosen.tokenizer is None):
        parser.error("--url and --tokenizer go together")
    with tempfile.TemporaryDirectory() as folder:
        if chosen.url:
            _measure(chosen.url, chosen.tokenizer, chosen, Path(folder), chosen.url)
            return
        with served(chosen.pair) as (url, tokenizer):
            _measure(url, tokenizer, chosen, Path(folder), chosen.pair)


def _measure(url: str, tokenizer: str, chosen: argparse.Namespace, folder: Path, title: str) -> None:
    table = Table("requests at once", "mode", *COLUMNS, title=f"sglang.benchmark.serving on {title}")
    for concurrency in chosen.concurrency:
        for mode, smc in MODES.items():
            run(url, tokenizer, smc, 1, 8, folder)  # warms up
            summary = run(url, tokenizer, smc, concurrency, chosen.tokens, folder)
            table.add_row(str(concurrency), mode, *(f"{summary[key]:.1f}" for key in COLUMNS.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
