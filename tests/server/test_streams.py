"""What a stream says, and in which pieces. Cases B10, B12, B14 and B16 of the issue trackers."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from tests.server.asking import ASK, CHAT, COMPLETE, COMPLETIONS, at_once, joined, post, streamed, text_of

pytestmark = pytest.mark.engine

WORDS = "t5 t17 t9 t30"
GREEDY: dict[str, Any] = {
    "prompt": WORDS,
    "temperature": 0,
    "max_tokens": 40,
    "skip_special_tokens": False,
    "smc": {"draft_length": 8},
}
REPLACEMENT = "\ufffd"


# -- stop strings (B10, B12) ---------------------------------------------------------------------------------


def test_a_stop_string_cuts_wherever_it_is(twin_http: httpx.Client) -> None:
    """Pieces of one, three and ten characters, across token and block edges; plain and streamed, with logprobs."""
    text = text_of(post(twin_http, COMPLETIONS, GREEDY))
    pieces = [text[at : at + size] for size in (1, 3, 10) for at in range(0, 60, 4)]
    pieces = [piece for piece in pieces if piece == piece.strip()]  # the twins' tokens know no blanks

    def check(piece: str) -> None:
        body = GREEDY | {"stop": [piece], "logprobs": 1}
        choice = post(twin_http, COMPLETIONS, body)["choices"][0]
        expected = text[: text.index(piece)]
        assert choice["text"] == expected
        assert choice["finish_reason"] == "stop"
        # The entries end with the token that completed the stop string.
        tokens = choice["logprobs"]["tokens"]
        assert piece.replace(" ", "") in "".join(tokens)
        assert piece.replace(" ", "") not in "".join(tokens[:-1])
        assert "".join(tokens).startswith(expected.replace(" ", ""))
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
        assert joined(streamed(twin_http, COMPLETIONS, body)) == expected

    at_once(check, list(dict.fromkeys(pieces)))


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_part_of_a_stop_string_is_streamed(twin_http: httpx.Client, path: str, temperature: float) -> None:
    body = {"prompt": WORDS} if path == COMPLETIONS else {"messages": [{"role": "user", "content": WORDS}]}
    body |= {"temperature": temperature, "max_tokens": 32, "ignore_eos": True, "seed": 1}
    text = text_of(post(twin_http, path, body))
    middle = len(text) // 2
    stop, near_miss = text[middle : middle + 7], text[middle : middle + 6] + "\x01"
    for given, expected in ((stop, text[: text.index(stop)]), (near_miss, text)):
        assert text_of(post(twin_http, path, body, stop=[given])) == expected
        chunks = streamed(twin_http, path, body, stop=[given])
        assert joined(chunks) == expected
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["stop" if given == stop else reasons[-1]]


# -- characters of several tokens (B14) ----------------------------------------------------------------------


def test_no_half_characters(http: httpx.Client) -> None:
    """Cuts of a text full of characters that are several tokens long."""
    exotic = (
        "\u4f60\u597d\u4e16\u754c \U0001f469\u200d\U0001f469\u200d\U0001f467 \uc0bc\uacb9\uc0b4 caf\u00e9 \U0001d518 "
    )
    body = {"prompt": exotic * 4, "temperature": 0, "smc": {"draft_length": 4}}
    whole = text_of(post(http, COMPLETIONS, body, max_tokens=48))
    assert sum(not char.isascii() for char in whole) >= 8, "the model repeats the prompt"

    def check(max_tokens: int) -> None:
        plain = text_of(post(http, COMPLETIONS, body, max_tokens=max_tokens))
        chunks = streamed(http, COMPLETIONS, body, max_tokens=max_tokens)
        assert joined(chunks) == plain
        # What the cut leaves of a character is the only part that may not be one.
        assert REPLACEMENT not in plain.rstrip(REPLACEMENT)
        assert whole.startswith(plain.rstrip(REPLACEMENT))
        deltas = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        assert all(REPLACEMENT not in delta for delta in deltas[:-2])

    at_once(check, range(1, 25, 2))


def test_lone_bytes_keep_coming(http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
    """A token that is no character by itself, over and over: chunks keep coming, in time linear in their number."""
    lone = tokenizer.convert_tokens_to_ids("\u00e4")  # byte 0xe4, the first of three
    assert tokenizer.decode([lone]) == REPLACEMENT
    body = COMPLETE | {"temperature": 0, "logit_bias": {str(lone): 100}, "ignore_eos": True}
    seconds = {}
    for n in (50, 100):
        start = time.monotonic()
        chunks = streamed(http, COMPLETIONS, body, max_tokens=n)
        seconds[n] = time.monotonic() - start
        assert len(chunks) > n / 10
    assert joined(chunks) == text_of(post(http, COMPLETIONS, body, max_tokens=100))
    assert seconds[100] < 3 * seconds[50]


# -- frames (B16) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize(
    ("path", "changes", "n_choices"),
    [(CHAT, {"n": 3}, 3), (COMPLETIONS, {"prompt": ["One, two,", "A, B,"], "n": 2}, 4)],
    ids=["chat", "completions"],
)
def test_frames(http: httpx.Client, path: str, changes: dict[str, Any], n_choices: int, usage: bool | None) -> None:
    """One role, one finish and one text per choice; usage in an event of its own, and only when asked for."""
    body = (ASK if path == CHAT else COMPLETE) | changes | {"max_tokens": 8}
    plain = post(http, path, body)
    options = None if usage is None else {"include_usage": usage}
    chunks = streamed(http, path, body, stream_options=options)
    assert [choice["index"] for choice in plain["choices"]] == list(range(n_choices))
    for index in range(n_choices):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [
            plain["choices"][index]["finish_reason"]
        ]
        assert own[-1]["finish_reason"]
        assert joined(chunks, index) == text_of(plain, index)
        if path == CHAT:
            assert own[0]["delta"].get("role") == "assistant"
            assert [choice["delta"].get("role") for choice in own].count("assistant") == 1
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    if usage:
        assert with_usage == chunks[-1:]
        assert chunks[-1]["choices"] == []
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [chunks[-1]["usage"][count] for count in counts] == [plain["usage"][count] for count in counts]
    else:
        assert not with_usage
        assert all(chunk["choices"] for chunk in chunks)


def test_usage_counts_a_prompt_once(http: httpx.Client) -> None:
    one, three = (post(http, CHAT, ASK, n=n, max_tokens=8, ignore_eos=True)["usage"] for n in (1, 3))
    assert one["prompt_tokens"] == three["prompt_tokens"]
    assert (one["completion_tokens"], three["completion_tokens"]) == (8, 24)


# -- how much waits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [None, 4])
def test_text_comes_while_it_is_made(http: httpx.Client, lag: int | None) -> None:
    """The first token is there before the first cycle, and a bound on what waits makes the pieces come evenly."""
    body = ASK | {"max_tokens": 48, "ignore_eos": True, "smc": {"n_particles": 4, "draft_length": 4}}
    if lag:
        body["smc"]["max_stream_lag"] = lag
    plain = post(http, CHAT, body)
    chunks = streamed(http, CHAT, body)
    assert joined(chunks) == text_of(plain)
    if lag:
        assert len([chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]) >= 8
    start = time.monotonic()
    with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        times = [time.monotonic() - start for line in response.iter_lines() if line.startswith("data: {")]
    assert times[1] < times[-1] / 3
