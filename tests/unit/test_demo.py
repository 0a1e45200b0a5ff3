"""The demo pair: a cache that is whole or absent, and two checkpoints that do their job.

The cache is tested with a builder that writes two small files; the real pair is built once per machine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bench.draft_search import PROMPTS, acceptance, own_text
from smc_sglang import demo

# Importing gguf's SWIG-made dependency warns once per process, and not on every Python.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")

QUIET = Console(quiet=True)


class SmallBuilder:
    """Writes `target/weights` and `draft/weights`; counts its builds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.builds = 0
        self.seconds = seconds

    def __call__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.builds += 1
        for name in ("target", "draft"):
            report(name)
            (folder / name).mkdir(parents=True)
            (folder / name / "weights").write_bytes(name.encode() * 100)
            time.sleep(self.seconds)


def test_an_intact_cache_is_used_as_it_is(tmp_path: Path) -> None:
    build = SmallBuilder()
    for _ in range(2):
        demo.ensure_built(tmp_path / "demo", build, QUIET)
    assert build.builds == 1
    assert demo.is_intact(tmp_path / "demo", full=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.lock"]


def _delete(folder: Path) -> None:
    (folder / "draft" / "weights").unlink()


def _truncate(folder: Path) -> None:
    (folder / "target" / "weights").write_bytes(b"target")


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _cut_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])


def _empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("damage", [_delete, _truncate, _no_manifest, _cut_manifest, _empty_manifest])
def test_a_broken_cache_is_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    build, folder = SmallBuilder(), tmp_path / "demo"
    demo.ensure_built(folder, build, QUIET)
    damage(folder)
    assert not demo.is_intact(folder)
    demo.ensure_built(folder, build, QUIET)
    assert build.builds == 2
    assert demo.is_intact(folder, full=True)


def test_a_changed_byte_is_found_by_the_full_check_only(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo.ensure_built(folder, SmallBuilder(), QUIET)
    weights = folder / "target" / "weights"
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    assert demo.is_intact(folder)
    assert not demo.is_intact(folder, full=True)


def test_a_killed_build_leaves_no_cache(tmp_path: Path) -> None:
    folder = tmp_path / "demo"

    def killed(staged: Path, report: Callable[[str], None]) -> None:
        SmallBuilder()(staged, report)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.ensure_built(folder, killed, QUIET)
    assert not folder.exists()
    demo.ensure_built(folder, SmallBuilder(), QUIET)  # over what the killed one left
    assert demo.is_intact(folder, full=True)


def test_of_several_at_once_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    # Threads stand for processes: each opens the lock file itself, and the lock belongs to the open file.
    build, folder = SmallBuilder(seconds=0.1), tmp_path / "demo"
    intact = []

    def ensure() -> None:
        demo.ensure_built(folder, build, QUIET)
        intact.append(demo.is_intact(folder, full=True))

    threads = [threading.Thread(target=ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.builds == 1
    assert intact == [True] * 4


def test_without_the_wheel_the_error_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WHEEL", "no-such-wheel")
    with pytest.raises(demo.DemoError, match=r"^the demo pair needs .* no-such-wheel: run `pip install"):
        demo.ensure_demo_pair(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_default_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / "smc-sglang"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.default_cache_dir() == tmp_path / ".cache" / "smc-sglang"


# --- The real pair ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> demo.DemoPair:
    return demo.ensure_demo_pair(progress=False)


@pytest.fixture(scope="module")
def tokenizer(pair: demo.DemoPair) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(pair.target)


def _model(path: Path) -> PreTrainedModel:
    # float32: on CPUs without bfloat16 instructions it is several times faster.
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def target(pair: demo.DemoPair) -> PreTrainedModel:
    return _model(pair.target)


def test_both_are_plain_checkpoints(pair: demo.DemoPair) -> None:
    for folder, layers in ((pair.target, 30), (pair.draft, len(demo.DRAFT_LAYERS))):
        config = json.loads((folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_hidden_layers"] == layers
        assert config["dtype"] == "bfloat16"
        assert config["max_position_embeddings"] == 8192
        assert config["tie_word_embeddings"] is True
        assert "quantization_config" not in config
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == config["eos_token_id"] == 2
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (pair.target, pair.draft)]
    assert tokenizers[0] == tokenizers[1]


def test_the_tokenizer_round_trips(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "def f(x):\n    return x ** 2  # naïve, 12345 € 漢字 🎲\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_target_knows_its_capitals(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = target.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_the_draft_is_close_to_the_target(
    pair: demo.DemoPair, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = own_text(target, tokenizer, PROMPTS[:2], new_tokens=16)
    assert acceptance(target, text) == pytest.approx(1.0, abs=1e-4)
    assert acceptance(_model(pair.draft), text) > 0.45
