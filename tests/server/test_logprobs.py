"""Log-probabilities in all of their shapes. Case B18 of the issue trackers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.asking import ASK, CHAT, COMPLETE, COMPLETIONS, post, refused, streamed
from tests.server.twins import VOCAB

pytestmark = pytest.mark.engine

PROMPT = "t5 t6 t7 t8"
SMILE = [{"role": "user", "content": "Write one smiling emoji and nothing else."}]


@pytest.fixture(scope="module")
def model(twin_checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(twin_checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def laws(model: Any, tokens: list[int]) -> torch.Tensor:
    """log p of what comes after each token, [len(tokens), vocab]."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def ids(tokens: list[str]) -> list[int]:
    """The ids of the twins' tokens: `t7` is 7."""
    special = {"<eos>": 0, "<bos>": 1}
    return [special[word] if (word := token.strip()) in special else int(word.removeprefix("t")) for token in tokens]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("smc", [{"n_particles": 4}, {"mode": "exact"}, {"mode": "off"}], ids=str)
def test_they_are_the_targets(twin_http: httpx.Client, model: Any, smc: dict[str, Any], stream: bool) -> None:
    body: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 20, "ignore_eos": True, "smc": smc}
    # SGLang's chat stream leaves out the entries of a step without any text (docs/api.md): there is none here.
    body["skip_special_tokens"] = False
    chat = body | {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 5}
    complete = body | {"prompt": PROMPT, "logprobs": 5}
    if stream:
        chunks = streamed(twin_http, CHAT, chat)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
        entries = [entry for part in parts for entry in part["content"]]
    else:
        entries = post(twin_http, CHAT, chat)["choices"][0]["logprobs"]["content"]
    output = ids([entry["token"] for entry in entries])
    assert len(output) == 20
    prompt = twin_http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    law = laws(model, prompt + output)[len(prompt) - 1 : -1]
    assert [entry["logprob"] for entry in entries] == pytest.approx(law[torch.arange(20), output].tolist(), abs=1e-2)
    for entry, row in zip(entries, law, strict=True):
        top = [one["logprob"] for one in entry["top_logprobs"]]
        assert top == pytest.approx(row.topk(5).values.tolist(), abs=1e-2)
        assert sum(map(math.exp, top)) <= 1 + 1e-6

    if stream:
        chunks = streamed(twin_http, COMPLETIONS, complete)
        told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
        values = [value for part in told for value in part["token_logprobs"]]
        words = [word for part in told for word in part["tokens"]]
    else:
        part = post(twin_http, COMPLETIONS, complete)["choices"][0]["logprobs"]
        values, words = part["token_logprobs"], part["tokens"]
        assert [len(one) for one in part["top_logprobs"]] == [5] * 20
    output = ids(words)
    law = laws(model, prompt + output)[len(prompt) - 1 : -1]
    assert values == pytest.approx(law[torch.arange(20), output].tolist(), abs=1e-2)


def test_echo_tells_the_prompts_too(twin_http: httpx.Client, model: Any) -> None:
    body = {"prompt": PROMPT, "temperature": 1, "logprobs": 5, "echo": True, "max_tokens": 6, "ignore_eos": True}
    choice = post(twin_http, COMPLETIONS, body)["choices"][0]
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert told["token_logprobs"][0] is None
    tokens = ids(told["tokens"])
    law = laws(model, tokens)[:-1]
    assert len(tokens) == 4 + 6
    assert told["token_logprobs"][1:] == pytest.approx(law[torch.arange(9), tokens[1:]].tolist(), abs=1e-2)
    assert all(token < VOCAB for token in tokens)


def test_bytes_of_partial_characters_join(http: httpx.Client) -> None:
    body = ASK | {"messages": SMILE, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    choice = post(http, CHAT, body, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12
    told = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert told.rstrip("\ufffd") == choice["message"]["content"].rstrip("\ufffd")
    assert max(map(ord, told)) > 0xFFFF, "an emoji is several tokens here"
    chunks = streamed(http, CHAT, body, ignore_eos=True)
    parts = [choice["logprobs"]["content"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
    again = [entry for part in parts for entry in part]
    assert [entry["token"] for entry in again] == [entry["token"] for entry in entries]


@pytest.mark.parametrize("top", [0, 20])
def test_the_number_of_alternatives(http: httpx.Client, top: int) -> None:
    entries = post(http, CHAT, ASK, logprobs=True, top_logprobs=top, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [top] * 4
    told = post(http, COMPLETIONS, COMPLETE, logprobs=top, max_tokens=4)["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == 4


def test_too_many_alternatives_are_refused(http: httpx.Client) -> None:
    for top in (50, -1):
        assert refused(http, CHAT, ASK, logprobs=True, top_logprobs=top)["param"] == "top_logprobs"
        assert refused(http, COMPLETIONS, COMPLETE, logprobs=top)["param"] == "logprobs"
