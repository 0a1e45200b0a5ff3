"""Masks along a block and forks of a grammar, on SGLang's own back ends over a tokenizer of single letters."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from smc_sglang.engine.grammar import GrammarMasks, forked

# SGLang's use of xgrammar.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")

LETTERS = "abcdefgh"
VOCAB = 70  # more than two words of a mask; the ids after the letters are padding
EOS = 0
ID = {letter: i + 1 for i, letter in enumerate(LETTERS)}
ENDS = "ab(c|d)(e)?"
BACKENDS = ("xgrammar", "llguidance")


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("letters")
    inner = Tokenizer(models.BPE({"</s>": EOS} | ID, []))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.save_pretrained(path)
    return {
        "xgrammar": XGrammarGrammarBackend(tokenizer, VOCAB, model_eos_token_ids=[EOS]),
        "llguidance": GuidanceBackend(tokenizer, n_vocab=VOCAB, eos_token_ids=[EOS]),
    }


def _ids(text: str) -> array[int]:
    return array("q", [EOS if letter == "$" else ID[letter] for letter in text])


def _after(backend: Any, text: str, regex: str = ENDS) -> Any:
    """The grammar after `text`; `$` is EOS."""
    grammar = backend.dispatch_regex(regex).copy()
    for token in _ids(text):
        grammar.accept_token(token)
    return grammar


def _words(allowed: torch.Tensor) -> str:
    return "".join("$" if i == EOS else LETTERS[i - 1] for i in allowed.nonzero().flatten().tolist())


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_follow_the_draft(backends: dict[str, Any], name: str) -> None:
    grammar = _after(backends[name], "a")
    masks = GrammarMasks.of([None, grammar], [_ids("a"), _ids("a")], [3, 3], VOCAB, "cpu")
    assert masks is not None
    drafted = torch.tensor([[5, 5, 5], [ID["b"], ID["d"], ID["e"]]])
    seen = []
    for k in range(4):
        allowed = masks.allowed(drafted, k)
        assert allowed.shape == (2, VOCAB)
        assert bool(allowed[0].all()), "a row without a grammar may say anything"
        seen.append(_words(allowed[1]))
    assert seen == ["b", "cd", "$e", "$"]
    assert masks.dead_ends == []
    assert _words(GrammarMasks.of([grammar], [_ids("a")], [0], VOCAB, "cpu").allowed(drafted[:1], 0)[0]) == "b", (
        "the request's own grammar stays where it is"
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_after_its_end_a_row_may_always_say_something(backends: dict[str, Any], name: str) -> None:
    """What that is does not count: the row has finished. llguidance allows EOS only, xgrammar everything."""
    masks = GrammarMasks.of([_after(backends[name], "abc")], [_ids("abc")], [2], VOCAB, "cpu")
    assert masks is not None
    drafted = torch.tensor([[EOS, EOS]])
    assert _words(masks.allowed(drafted, 0)[0]) == "$e"
    assert bool(masks.allowed(drafted, 1)[0, EOS])
    assert bool(masks.allowed(drafted, 2)[0, EOS])
    assert masks.dead_ends == []


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_drop_out_are_left_behind(backends: dict[str, Any], name: str) -> None:
    grammars = [_after(backends[name], text) for text in ("a", "ab", "abc")]
    masks = GrammarMasks.of(grammars, [_ids("a"), _ids("ab"), _ids("abc")], [1, 2, 2], VOCAB, "cpu")
    assert masks is not None
    part = masks.rows(torch.tensor([1, 2]))
    drafted = torch.tensor([[ID["c"], ID["e"]], [ID["e"], EOS]])
    assert [_words(row) for row in part.allowed(drafted, 1)] == ["$e", "$"]


def test_a_dead_end_is_seen(backends: dict[str, Any]) -> None:
    """The language goes on with a letter that no word of the vocabulary has."""
    grammar = _after(backends["xgrammar"], "", "a(bc|x)")
    stuck = _after(backends["xgrammar"], "", "ax")
    masks = GrammarMasks.of([grammar, stuck], [_ids(""), _ids("")], [2, 2], VOCAB, "cpu")
    assert masks is not None
    drafted = torch.tensor([[ID["a"], ID["b"]], [ID["a"], ID["b"]]])
    assert _words(masks.allowed(drafted, 0)[1]) == "a"
    assert masks.dead_ends == []
    assert _words(masks.allowed(drafted, 1)[1]) == ""
    assert masks.dead_ends == [1]
    assert _words(masks.allowed(drafted, 2)[0]) == "c"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_fork_goes_its_own_way(backends: dict[str, Any], name: str) -> None:
    grammar = _after(backends[name], "ab")
    fork = forked(grammar, _ids("ab"))
    fork.accept_token(ID["d"])

    def next_words(one: Any) -> str:
        masks = GrammarMasks.of([one], [_ids("")], [0], VOCAB, "cpu")
        assert masks is not None
        return _words(masks.allowed(torch.empty(1, 0, dtype=torch.int64), 0)[0])

    assert next_words(grammar) == "cd"
    assert next_words(fork) == "$e"
    fork.accept_token(ID["e"])
    assert next_words(grammar) == "cd"
    assert next_words(forked(fork, _ids("abde"))) == "$"
    fork.accept_token(EOS)
    assert fork.is_terminated()
    assert forked(fork, _ids("abde$")).is_terminated()
    assert not grammar.is_terminated()


def test_no_grammar_no_masks() -> None:
    assert GrammarMasks.of([None, None], [_ids("a"), _ids("a")], [3, 3], VOCAB, "cpu") is None
