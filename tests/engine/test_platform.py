"""Plain SGLang on the torch CPU platform: what transformers says, whatever the scheduler does with the requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smc_sglang.platform.plugin import activate
from tests.models import tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(activate() is None, reason="this machine's accelerator has a platform of its own"),
]

VOCAB, CHUNK = 64, 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("platform") / "llama"
    tiny_llama(path, VOCAB, seed=3)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    """No device, no attention backend, no memory size: the platform's defaults."""
    import sglang

    engine = sglang.Engine(
        model_path=str(checkpoint),
        dtype="float32",
        skip_tokenizer_init=True,
        chunked_prefill_size=CHUNK,
        log_level="error",
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def greedy(reference: Any, prompt: list[int], n_tokens: int) -> list[int]:
    """The whole sequence anew for every token: no cache that could hide a mistake."""
    sequence = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(n_tokens):
            token = reference(sequence, use_cache=False).logits[0, -1].argmax()
            sequence = torch.cat([sequence, token.view(1, 1)], dim=1)
    return sequence[0, len(prompt) :].tolist()


def generate(engine: Any, prompts: list[list[int]], n_tokens: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=sampling)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_platforms_defaults_are_in_force(engine: Any) -> None:
    info = engine.get_server_info()
    assert info["device"] == "cpu"
    assert info["attention_backend"] == "smc_torch"
    assert info["disable_overlap_schedule"] is True
    assert info["max_total_tokens"] == info["max_total_num_tokens"] == 65_536


def test_parallel_requests_of_different_lengths_in_chunks(engine: Any, reference: Any) -> None:
    """Prompts of less than one and up to five chunks."""
    prompts = [prompt(length, seed) for seed, length in enumerate([1, 5, 31, 32, 33, 64, 100, 150])]
    outputs = generate(engine, prompts, 20)
    assert [output["output_ids"] for output in outputs] == [greedy(reference, own, 20) for own in prompts]


def test_requests_of_equal_length_share_their_passes(engine: Any, reference: Any) -> None:
    prompts = [prompt(40, seed) for seed in range(20, 24)]
    outputs = generate(engine, prompts, 12)
    assert [output["output_ids"] for output in outputs] == [greedy(reference, own, 12) for own in prompts]


def test_a_cached_prefix_gives_the_same_tokens(engine: Any, reference: Any) -> None:
    stem = prompt(80, 30)
    generate(engine, [stem], 4)
    prompts = [stem + prompt(length, 31 + length) for length in (1, 7, 45)]
    outputs = generate(engine, prompts, 12)
    assert all(output["meta_info"]["cached_tokens"] >= len(stem) for output in outputs)
    assert [output["output_ids"] for output in outputs] == [greedy(reference, own, 12) for own in prompts]


# -- server arguments, without an engine ---------------------------------------------------------------------


def resolved(**arguments: Any) -> Any:
    """SGLang's own resolution of server arguments."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**arguments)
    server_args.resolve_once()
    return resolving_view(server_args)


def test_the_users_own_values_stand(checkpoint: Path) -> None:
    chosen = {"max_total_tokens": 999, "mem_fraction_static": 0.3, "attention_backend": "torch_native"}
    server_args = resolved(model_path=str(checkpoint), **chosen)
    assert {name: getattr(server_args, name) for name in chosen} == chosen


@pytest.mark.parametrize("field", ["attention_backend", "speculative_draft_attention_backend"])
def test_a_backend_that_cannot_score_is_refused(checkpoint: Path, field: str) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} torch_native cannot score"):
        resolved(
            model_path=str(checkpoint),
            speculative_algorithm="SMC",
            speculative_draft_model_path=str(checkpoint),
            **{field: "torch_native"},
        )


def test_another_speculative_algorithm_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="not supported by TorchCpuPlatform"):
        resolved(
            model_path=str(checkpoint),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(checkpoint),
        )
