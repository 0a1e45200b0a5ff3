"""vLLM on the CPU, run by its own environment's Python (bench/peers.py): a request on stdin, a JSON line on stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def prepare(threads: int) -> None:
    """Start this script anew with Intel's OpenMP, as vLLM's guide asks, and all of vLLM in this process."""
    if os.environ.get("OMP_NUM_THREADS") == str(threads) and "VLLM_ENABLE_V1_MULTIPROCESSING" in os.environ:
        return
    os.environ |= {
        "LD_PRELOAD": os.path.join(sys.prefix, "lib", "libiomp5.so"),
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def mend_temperature() -> None:
    """Give every drafted token its request's temperature.

    0.32.0's own function for the CPU leaves its result in a copy: the logits are divided by uninitialised memory, and
    the text is noise.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(values: Any, ends: Any, n_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return values.where(values != replace_from, replace_to).repeat_interleave(counts, output_size=n_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def main() -> None:
    request = json.loads(os.environ.get("PEER_REQUEST") or sys.stdin.read())
    os.environ["PEER_REQUEST"] = json.dumps(request)
    prepare(request["threads"])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout

    import vllm

    note = f"{request['dtype']}, torch.compile, KV cache in {request['dtype']}"
    speculative = None
    if request["draft_length"]:
        mend_temperature()
        speculative = {
            "method": "draft_model",
            "model": request["draft"],
            "num_speculative_tokens": request["draft_length"],
            "draft_sample_method": "probabilistic",
        }
        note += ", drafts sampled, exact; its temperature on the CPU mended"
    prompts = request["token_ids"]
    room = max(map(len, prompts)) + request["new_tokens"] + (request["draft_length"] or 0) + 1
    engine = vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=room,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    sampling = vllm.SamplingParams(
        temperature=request["temperature"], max_tokens=request["new_tokens"], ignore_eos=True
    )

    def run(ids: list[int]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        (output,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        return len(tokens) / (time.perf_counter() - start), tokens

    run(prompts[0])  # warms up
    runs = [run(ids) for ids in prompts]
    speeds, tokens = zip(*runs, strict=True)
    print(
        json.dumps({"speeds": speeds, "tokens": tokens, "version": vllm.__version__, "note": note}),
        file=answer,
        flush=True,
    )
    os._exit(0)  # its threads would keep the process


if __name__ == "__main__":
    main()
