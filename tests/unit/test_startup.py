"""What does not start, and what it says: SGLang's real argument resolution on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from smc_sglang.config import SmcConfig
from smc_sglang.engine import hooks
from tests.models import perturbed, tiny_llama, word_tokenizer

load_plugins()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = folder / "target", folder / "draft"
    tiny_llama(target, 64)
    word_tokenizer(target, 64)
    perturbed(target, draft, noise=0.1, seed=1)
    return target, draft


def resolve(target: Path, draft: Path | None, **arguments: Any) -> Any:
    server_args = ServerArgs(
        model_path=str(target),
        speculative_algorithm="SMC",
        speculative_draft_model_path=None if draft is None else str(draft),
        **arguments,
    )
    server_args.resolve_once()
    return server_args


@pytest.fixture(autouse=True)
def _no_exported_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMC_SGLANG_CONFIG", "{}")
    monkeypatch.delenv("SMC_SGLANG_CONFIG")


def test_block_width_follows_the_draft_length(pair: tuple[Path, Path]) -> None:
    resolved = resolving_view(resolve(*pair, speculative_num_steps=5))
    assert resolved.speculative_num_draft_tokens == 6
    assert resolved.disable_overlap_schedule is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"page_size": 16}, "--page-size 16"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_priority_scheduling": True}, "--disable-priority-preemption"),
        ({"max_running_requests": 2}, "--max-running-requests 2"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused(pair: tuple[Path, Path], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(*pair, **arguments)


def test_eight_bits_are_of_the_cpu_platform(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    SmcConfig(draft_int8=True).export()
    resolve(*pair)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")  # SGLang's own CPU platform
    with pytest.raises(ValueError, match="--draft-int8 is for the torch CPU platform only"):
        resolve(*pair)


def test_a_draft_is_needed(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="speculative-draft-model-path"):
        resolve(pair[0], None)


def test_another_vocabulary_is_refused_with_both_names(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tiny_llama(tmp_path / "other", 80)
    with pytest.raises(ValueError, match="vocabulary of 80") as error:
        resolve(pair[0], tmp_path / "other")
    assert str(pair[0]) in str(error.value)
    assert str(tmp_path / "other") in str(error.value)


def test_padding_behind_the_tokenizers_ids_may_differ(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tiny_llama(tmp_path / "other", 80)
    word_tokenizer(tmp_path / "other", 64)
    resolve(pair[0], tmp_path / "other")
    word_tokenizer(tmp_path / "other", 70)  # here the target lacks six words
    with pytest.raises(ValueError, match="tokenizer"):
        resolve(pair[0], tmp_path / "other")


def test_another_tokenizer_is_refused_with_both_names(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same size, two tokens swapped."""
    other = tmp_path / "other"
    perturbed(pair[0], other, noise=0.1, seed=1)
    word_tokenizer(other, 64)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"t5"', '"x"').replace('"t6"', '"t5"').replace('"x"', '"t6"'))
    with pytest.raises(ValueError, match="tokenizer") as error:
        resolve(pair[0], other)
    assert str(other) in str(error.value)


def test_another_sglang_version_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "version", lambda _: "0.6.0")
    with pytest.raises(RuntimeError, match=r"0\.6\.0 is installed: pip install sglang==0\.5\.23"):
        hooks.require()


def test_a_hook_that_did_not_apply_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.verify() == []
    target = hooks.hooks()[0].target
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    (problem,) = hooks.verify()
    assert target in problem
