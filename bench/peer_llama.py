"""llama.cpp, run by the Python of its own environment (bench/peers.py): a request on stdin, one JSON line on stdout."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def converted(checkpoint: Path, folder: Path) -> Path:
    """The Llama checkpoint in bfloat16 as a GGUF file without a vocabulary, written unless it is there."""
    path = folder / f"{checkpoint.parent.name}-{checkpoint.name}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    staged = path.with_suffix(f".{os.getpid()}.partial")
    writer = gguf.GGUFWriter(staged, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, weight in tensors(checkpoint / "model.safetensors"):
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[stem]}.weight"
        else:
            target = f"{NAMES[stem]}.weight"
        n_heads = heads.get(stem.rpartition(".")[2])
        if n_heads:  # rotary pairs lie side by side, not half a head apart
            rows, columns = weight.shape
            weight = weight.reshape(n_heads, 2, rows // n_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        if weight.ndim == 1:
            writer.add_tensor(target, (weight.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(weight).view(np.uint8)
            writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    staged.rename(path)
    return path


def tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Name and bits of every tensor of a safetensors file in bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is in {entry['dtype']}"
            start, end = entry["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


class Draft(LlamaDraftModel):
    """A second model's greedy continuation."""

    def __init__(self, model: llama_cpp.Llama, length: int) -> None:
        self._model, self._length = model, length

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        tokens = self._model.generate(input_ids.tolist(), temp=0.0)  # keeps the KV of a common prefix
        return np.array(list(itertools.islice(tokens, self._length)), dtype=np.intc)


def main() -> None:
    request = json.load(sys.stdin)
    prompts, threads, draft_length = request["token_ids"], request["threads"], request["draft_length"]

    def load(checkpoint: str, **how: Any) -> llama_cpp.Llama:
        return llama_cpp.Llama(
            str(converted(Path(checkpoint), Path(request["folder"]))),
            n_ctx=max(map(len, prompts)) + request["new_tokens"] + (draft_length or 0) + 1,
            n_threads=threads,
            n_threads_batch=threads,
            seed=0,
            verbose=False,
            **how,
        )

    note = "bfloat16 weights, float16 KV cache"
    if draft_length:
        draft = load(request["draft"])
        engine = load(request["target"], draft_model=Draft(draft, draft_length))
        note += ", drafts greedy and never shorter, kept while the target's sample is the same; the loop is Python's"
    else:
        engine = load(request["target"])

    def run(ids: list[int]) -> tuple[float, list[int]]:
        engine.reset()  # no prompt is found in the KV cache
        if draft_length:
            draft.reset()
        start = time.perf_counter()
        generated = engine.generate(ids, top_k=0, top_p=1.0, min_p=0.0, temp=request["temperature"])
        tokens = list(itertools.islice(generated, request["new_tokens"]))
        return len(tokens) / (time.perf_counter() - start), tokens

    run(prompts[0])  # warms up
    speeds, tokens = zip(*map(run, prompts), strict=True)
    print(json.dumps({"speeds": speeds, "tokens": tokens, "version": llama_cpp.__version__, "note": note}))


if __name__ == "__main__":
    main()
