"""Grammars inside a block: which tokens a row's grammar allows after each of its drafted ones.

SGLang compiles grammars and advances each request's matcher (`Req.grammar`) over the tokens that are committed. Here
a fork of it walks ahead along the draft, so nothing has to be rolled back, and particles get forks of their
ancestors'. A fork of xgrammar's matcher takes 1-2 µs whatever the answer's length; replaying 50 tokens takes 40.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

_WORD = 32  # tokens per int32 of a mask


def forked(grammar: Any, tokens: Sequence[int]) -> Any:
    """An independent copy of a request's grammar, in the same state.

    Args:
        tokens: what it has accepted, for back ends that can only start again.
    """
    if isinstance(grammar, XGrammarGrammar):
        fork = copy.copy(grammar)
        fork.matcher, fork.accepted_tokens = grammar.matcher.fork(), list(grammar.accepted_tokens)
        return fork
    if isinstance(grammar, GuidanceGrammar):
        fork = grammar.copy()  # its matcher, in the state it is in
        fork.finished = grammar.finished
        return fork
    if isinstance(grammar, ReasonerGrammarObject):
        fork = copy.copy(grammar)
        for name in ("_thinking_match_history", "_opening"):
            setattr(fork, name, list(getattr(grammar, name)))
        # Only what comes after the reasoning has gone to the grammar inside.
        inner = tokens if grammar.reasoning_in_grammar else tokens[len(tokens) - max(grammar.tokens_after_end, 0) :]
        fork.grammar = None if grammar.grammar is None else forked(grammar.grammar, inner)
        return fork
    fork = grammar.copy()
    for token in tokens:
        fork.accept_token(token)
    return fork


class GrammarMasks:
    """The allowed tokens of a batch's rows at each offset of one block; `Masks` of :mod:`smc_sglang.smc.densities`."""

    def __init__(self, walks: list[_Walk | None], bits: torch.Tensor, vocab_size: int, device: Any) -> None:
        self._walks = walks
        self._bits = bits  # int32 [n_rows, offsets, words], set where allowed
        self._rows = list(range(len(walks)))  # of the batch, which this object is about
        self._vocab_size, self._device = vocab_size, device

    @classmethod
    def of(
        cls,
        grammars: Sequence[Any],
        outputs: Sequence[Sequence[int]],
        draft_lengths: Sequence[int],
        vocab_size: int,
        device: Any,
    ) -> GrammarMasks | None:
        """None where no row has a grammar.

        Args:
            grammars: SGLang's grammar object of each row, or None.
            outputs: the tokens that each has accepted.
            draft_lengths: of each row; beyond its block a row may say anything.
        """
        handle = next((grammar for grammar in grammars if grammar is not None), None)
        if handle is None:
            return None
        n_rows, offsets = len(grammars), max(draft_lengths) + 1
        bits = handle.allocate_vocab_mask(vocab_size, n_rows * offsets, "cpu").view(n_rows, offsets, -1)
        walks = [
            None if grammar is None else _Walk(forked(grammar, output), bits[row], draft_lengths[row])
            for row, (grammar, output) in enumerate(zip(grammars, outputs, strict=True))
        ]
        return cls(walks, bits, vocab_size, device)

    def rows(self, index: torch.Tensor) -> Self:
        part = copy.copy(self)
        part._rows = [self._rows[i] for i in index.tolist()]
        return part

    @property
    def dead_ends(self) -> list[int]:
        """Rows whose grammar no token goes on from, as far as the block has been looked at."""
        return [row for row, walk in enumerate(self._walks) if walk is not None and walk.stuck]

    def allowed(self, drafted: torch.Tensor, k: int) -> torch.Tensor:
        paths = drafted[:, :k].tolist()
        for row, path in zip(self._rows, paths, strict=True):
            if (walk := self._walks[row]) is not None:
                walk.to(path)
        words = self._bits[self._rows, k].to(self._device, non_blocking=True)
        bits = (words.unsqueeze(-1) >> torch.arange(_WORD, device=words.device)) & 1
        return bits.flatten(1)[:, : self._vocab_size].bool()


class _Walk:
    """One row's grammar on its way along the draft."""

    def __init__(self, grammar: Any, bits: torch.Tensor, draft_length: int) -> None:
        self._grammar = grammar
        self._bits = bits  # int32 [offsets, words], all set
        self._limit = draft_length
        self._filled = 0  # offsets whose masks are known
        self.stuck = False  # no token goes on from here

    def to(self, path: Sequence[int]) -> None:
        """Fill in the masks up to the offset after `path`."""
        while self._filled <= min(len(path), self._limit):
            if self._filled > 0 and not self._ended:
                self._grammar.accept_token(path[self._filled - 1])
            if not self._ended:
                self._grammar.fill_vocab_mask(self._bits, self._filled)
                self.stuck = not bool(self._bits[self._filled].any())
            self._filled += 1

    @property
    def _ended(self) -> bool:
        """What comes now does not count."""
        return self.stuck or self._grammar.is_terminated()
