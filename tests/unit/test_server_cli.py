"""The command line, up to the point where SGLang starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from smc_sglang.cli import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_version() -> None:
    code, text = run("-V")
    assert code == 0
    assert text.startswith("smc-sglang 0.")


def test_help_lists_the_defaults() -> None:
    code, text = run("serve", "--help")
    assert code == 0
    assert "--n-particles" in text
    assert "[default: 4]" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--n-particles", "0"], "--n-particles must be greater than or equal to 1, got 0"),
        (["--draft-length", "65"], "--draft-length must be less than or equal to 64, got 65"),
        (["--resample-threshold", "1.5"], "--resample-threshold must be less than or equal to 1, got 1.5"),
        (["--max-draft-length", "4"], "draft_length=8 is above max_draft_length=4"),
        (["--n-particles", "65"], "n_particles=65 is above max_particles=64"),
        (["--speculative-num-steps", "3"], "--speculative-num-steps cannot be used here: use --draft-length"),
        (
            ["--speculative-algorithm=EAGLE"],
            "--speculative-algorithm cannot be used here: this server runs SMC",
        ),
        (["--model-path", "x"], "--model-path and --draft-model-path belong together"),
        (["--draft-model-path", "x"], "--model-path and --draft-model-path belong together"),
    ],
)
def test_a_conflict_is_one_sentence_and_exit_2(arguments: list[str], sentence: str) -> None:
    code, text = run("serve", *arguments)
    assert code == 2
    assert text.startswith(f"smc-sglang: {sentence}")
    assert text.count("\n") == 1


def test_help_imports_neither_sglang_nor_torch() -> None:
    script = "import sys, smc_sglang.cli; assert not {'sglang', 'torch', 'server'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
