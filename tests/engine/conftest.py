"""One engine per configuration: real SGLang on tiny float32 checkpoints, under SGLang's strict memory checks.

`Engine.shutdown` ends every child of this process, other engines included, so one lives at a time: the modules that
share `tiny` come last in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiny import CONTEXT, POOL, VOCAB, TinyEngine
from tests.models import perturbed, tiny_llama, word_tokenizer


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    """The general engine: a KV pool of 2,048 tokens, small enough to run full."""
    import smc_sglang

    folder = tmp_path_factory.mktemp("tiny")
    target, draft, records = folder / "target", folder / "draft", folder / "records"
    tiny_llama(target, VOCAB, seed=0, max_position=CONTEXT)
    word_tokenizer(target, VOCAB)
    perturbed(target, draft, noise=0.15, seed=1)
    records.mkdir()
    environment = {
        "OMP_NUM_THREADS": "1",  # a model this small only loses by more
        "SMC_TEST_PROBE": str(records),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        # Admission expects no request to grow by more than this: it admits more than the pool can hold.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        # SGLang spawns its scheduler, and a spawned process takes over sys.path: it finds the probe's entry point.
        patch.syspath_prepend(str(Path(__file__).parent / "probe"))
        engine = smc_sglang.Engine(
            model_path=str(target),
            draft_model_path=str(draft),
            n_particles=4,
            draft_length=4,
            max_draft_length=8,
            dtype="float32",
            max_total_tokens=POOL,
            chunked_prefill_size=64,
            max_running_requests=256,
            log_level="error",
        )
        yield TinyEngine(engine, target, draft, records)
        engine.shutdown()
