"""Which token of a block finishes a row, on tensors."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from smc_sglang.engine.finish import finish_at_first, valid_lengths
from tests.models import EOS, word_tokenizer

STOP = frozenset({0, 3})


def _valid(tokens: list[list[int]], lengths: list[int], stops: list[frozenset[int]], remaining: list[int]) -> tuple:
    valid, finished = valid_lengths(torch.tensor(tokens), torch.tensor(lengths), stops, torch.tensor(remaining))
    return valid.tolist(), finished.tolist()


def test_first_stop_token_counts_and_nothing_after_it() -> None:
    assert _valid([[5, 3, 0, 5]], [4], [STOP], [99]) == ([2], [True])


def test_padding_never_stops() -> None:
    assert _valid([[5, 5, 3, 0]], [2], [STOP], [99]) == ([2], [False])


def test_length_and_stop_in_one_block() -> None:
    assert _valid([[5, 5, 3, 5]], [4], [STOP], [2]) == ([2], [True])
    assert _valid([[5, 3, 5, 5]], [4], [STOP], [2]) == ([2], [True])
    assert _valid([[5, 5, 5, 5]], [4], [STOP], [4]) == ([4], [True])


def test_rows_have_their_own_stops() -> None:
    tokens = [[3, 1, 1], [3, 1, 1], [3, 7, 1]]
    stops = [STOP, frozenset(), frozenset({7})]
    assert _valid(tokens, [3, 3, 3], stops, [9, 9, 9]) == ([1, 3, 2], [True, False, True])


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("words")
    word_tokenizer(path, 64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.additional_stop_token_ids = None
    return tokenizer


ENDINGS = {
    "the second stop string is met first": ([8, 7, 6, 5], {"stop": ["t5", "t7"]}),
    "a stop token is met before a stop string": ([8, 9, 6, 5], {"stop": ["t5"], "stop_token_ids": [9]}),
    "EOS is met before a stop string": ([8, EOS, 6, 5], {"stop": ["t5"]}),
    "the length is reached before a stop string": ([8, 7, 6, 5], {"stop": ["t5"], "max_new_tokens": 4}),
    "a stop string is met before a regex": ([8, 7, 6, 5], {"stop": ["t6"], "stop_regex": ["t[5]"]}),
    "a regex is met before a stop string": ([8, 7, 6, 5], {"stop": ["t6"], "stop_regex": ["t[7]"]}),
    "a stop string reaches over the block's start": ([4, 7, 5, 6], {"stop": ["t5", "t3 t4"]}),
    "EOS does not count": ([8, EOS, 6, 5], {"stop": ["t5"], "ignore_eos": True}),
    "nothing is met": ([8, 7, 6, 4], {"stop": ["t5"]}),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_block_finishes_where_it_would_token_by_token(case: str, words: Any) -> None:
    block, given = ENDINGS[case]
    sampling = SamplingParams(**{"max_new_tokens": 50} | given)
    sampling.normalize(words)

    def request() -> Any:
        req = Req("0", "", array("q", [2]), sampling, eos_token_ids={EOS}, vocab_size=64)
        req.tokenizer = words
        req.output_ids = array("q", [3, 3])
        return req

    one_by_one = request()
    for token in block:
        one_by_one.output_ids.append(token)
        Req.update_finish_state(one_by_one)
        if one_by_one.finished():
            break
    at_once = request()
    at_once.output_ids.extend(block)
    finish_at_first(Req.update_finish_state, at_once, len(block))
    assert list(at_once.output_ids) == [3, 3, *block]
    assert list(at_once.output_ids_through_stop) == list(one_by_one.output_ids_through_stop)
    assert at_once.finished() == one_by_one.finished()
    if at_once.finished():
        assert at_once.finished_reason.to_json() == one_by_one.finished_reason.to_json()
