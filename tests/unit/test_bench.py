"""What the benchmarks rest on: a wide model that computes what the narrow one does, and the cost model's limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import peers
from bench.limit import Limit
from bench.pairs import noisy, widened
from tests.models import tiny_llama


@pytest.mark.parametrize("tied", [False, True])
def test_a_widened_model_computes_the_same(tmp_path: Path, tied: bool) -> None:
    tiny_llama(tmp_path, 64, hidden=64, heads=4, kv_heads=2)
    narrow = LlamaForCausalLM.from_pretrained(tmp_path)
    if tied:
        narrow.config.tie_word_embeddings = True
        narrow.tie_weights()
    sizes = {"hidden_size": 160, "intermediate_size": 320, "num_attention_heads": 10, "num_key_value_heads": 5}
    wide = widened(narrow, sizes)
    assert wide.config.hidden_size == 160
    tokens = torch.arange(2, 50).view(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(wide(tokens).logits, narrow(tokens).logits, rtol=1e-4, atol=1e-4)
    # Its zeros are where they cancel what is new, nowhere else.
    assert bool((wide.model.layers[0].mlp.gate_proj.weight != 0).all())


def test_noise_leaves_vectors_alone(tmp_path: Path) -> None:
    tiny_llama(tmp_path, 64)
    plain, noised = LlamaForCausalLM.from_pretrained(tmp_path), noisy(tmp_path, 0.1)
    assert torch.equal(plain.model.norm.weight, noised.model.norm.weight)
    before, after = (model.lm_head.weight.detach().float() for model in (plain, noised))
    assert float((after - before).std() / before.std()) == pytest.approx(0.1, rel=0.1)


def test_the_limit_is_a_cycles_products_and_nothing_else() -> None:
    class Fixed:
        def __init__(self, per_token: float) -> None:
            self.per_token = per_token

        def seconds(self, n_tokens: int) -> float:
            return 1.0 + self.per_token * n_tokens

    target: Any = Fixed(0.1)
    draft: Any = Fixed(0.0)
    limit = Limit(target, draft)
    limit.measure([(4, 8), (1, 2)])
    assert limit.off() == pytest.approx(1 / 1.1)
    assert limit.smc(4, 8) == pytest.approx(9 / (1 + 3.6 + 8))
    assert limit.smc(1, 2) == pytest.approx(3 / (1 + 0.3 + 2))


def test_a_peer_that_is_not_there_or_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    peer = peers.Environment("peer", "script.py", ())
    with pytest.raises(RuntimeError, match="--install"):
        peer.ask({})
    peer.python.parent.mkdir(parents=True)
    peer.python.symlink_to(sys.executable)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no such model')")
    assert peers._ask(peer, {}) == {"tok_s": None, "version": None, "note": "not run: it failed: no such model"}
    script.write_text("import json, sys; print('log'); print(json.dumps(json.load(sys.stdin)))")
    seen = peers._ask(peer, {"speeds": [3.0, 1.0, 2.0], "version": "7", "note": "bfloat16"})
    assert peers.describe(seen) == "2.0 tokens/s (1.0 .. 3.0), 7, bfloat16"
    monkeypatch.setattr(peers, "TIME_LIMIT", 0.5)
    script.write_text("import time; time.sleep(60)")
    assert peers._ask(peer, {})["note"] == "not run: it was stopped after 0.5 s"
