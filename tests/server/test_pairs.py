"""A draft in eight bits that is padded to another vocabulary size and has another end token. (What else differs is
refused.)"""

from __future__ import annotations

import pytest

from tests.server.asking import GENERATE, at_once, post
from tests.server.running_server import Server
from tests.server.thinker import EOS, VOCAB

pytestmark = pytest.mark.engine


def test_at_temperature_0_it_is_the_target(thinking: Server) -> None:
    def ask(number: int, **smc: object) -> list[int]:
        body = {"input_ids": [2, 5 + number], "sampling_params": {"temperature": 0, "max_new_tokens": 40}, "smc": smc}
        return post(client, GENERATE, body)["output_ids"]

    with thinking.client(timeout=60) as client:
        for number in range(10):
            plain = ask(number, mode="off")
            assert ask(number) == plain
            assert ask(number, mode="exact") == plain


@pytest.mark.parametrize("mode", ["smc", "exact", "off"])
def test_what_is_sampled_is_the_targets_words_up_to_its_own_end(thinking: Server, mode: str) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 500}

    def ask(seed: int) -> dict:
        body = {"input_ids": [2], "sampling_params": sampling | {"sampling_seed": seed}, "smc": {"mode": mode}}
        return post(client, GENERATE, body)

    with thinking.client(timeout=60) as client:
        for answer in at_once(ask, range(70)):
            assert max(answer["output_ids"]) < VOCAB
            assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
