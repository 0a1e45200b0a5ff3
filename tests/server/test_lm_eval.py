"""The evaluation harness `lm_eval`, run by its command against our server: what it scores and what it generates."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from smc_sglang.cli import DEMO_NAME
from tests.server.running_server import Server

pytestmark = pytest.mark.engine

# Question, choices, and which of them is right.
QUIZ = [
    ("The capital of France is", [" Paris", " Madrid", " seven", " running"], 0),
    ("Two plus two is", [" blue", " four", " Rome"], 1),
    ("The sun rises in the", [" east", " spoon", " south"], 0),
    ("Water freezes at zero degrees", [" onion", " Celsius"], 1),
    ("A week has seven", [" days", " noses", " wheels", " keys"], 0),
    ("Cats and dogs are", [" numbers", " animals"], 1),
]
PLAIN = {"mode": "off"}
TASKS = {
    "quiz_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "quiz_write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def samples(server: Server, target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What `lm_eval` has logged of each task's documents, in their order."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "quiz.jsonl"
    documents = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUIZ]
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | source | task))  # JSON is YAML
    model = f"model={DEMO_NAME},base_url={server.url}/v1/completions,tokenizer={target},num_concurrent=8"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += [
        "--include_path",
        str(folder),
        "--tasks",
        ",".join(TASKS),
        "--log_samples",
        "--output_path",
        str(folder),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "cache")}
    run = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    logs = {name: next(folder.rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
    return {
        name: sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        for name, log in logs.items()
    }


def test_what_it_scores_is_the_targets_log_probability(samples: dict[str, Any], target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    right = 0
    for sample, (question, choices, answer) in zip(samples["quiz_choice"], QUIZ, strict=True):
        scores = []
        for choice, ((log_prob, _),) in zip(choices, sample["resps"], strict=True):
            start = len(tokenizer.encode(question))
            tokens = torch.tensor([tokenizer.encode(question + choice)])
            with torch.no_grad():
                law = torch.log_softmax(model(tokens).logits[0, :-1].double(), dim=-1)
            exact = law.gather(-1, tokens[0, 1:, None])[start - 1 :].sum().item()
            assert math.isclose(float(log_prob), exact, abs_tol=0.25 + 0.01 * abs(exact)), (
                question,
                choice,
            )  # bfloat16
            scores.append(float(log_prob))
        right += scores.index(max(scores)) == answer
        assert sample["acc"] == (scores.index(max(scores)) == answer)
    assert right >= 5


def test_what_it_generates_is_what_the_target_says(samples: dict[str, Any], server: Server) -> None:
    """At temperature 0, cut at its stop strings."""
    with server.client(timeout=60) as client:
        for sample, (question, _, _) in zip(samples["quiz_write"], QUIZ, strict=True):
            plain = {
                "prompt": question,
                "temperature": 0,
                "max_tokens": 12,
                "stop": ["\n", "."],
                "smc": {"mode": "off"},
            }
            text = client.post("/v1/completions", json=plain).json()["choices"][0]["text"]
            assert sample["resps"][0][0] == text
            assert "." not in text
