"""SGLang's count of reasoning tokens (`usage.reasoning_tokens`), taken of what a parent says.

SGLang counts where it appends tokens to a request. A parent's tokens come from its particles, and the one that
SGLang appends after the prefill is only one particle's: it must not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Req's own state of the count.
_STATE = ("reasoning_tokens", "_is_reasoning_over", "_think_start_match_len", "_think_end_match_len")


@dataclass
class ReasoningCount:
    """How far a parent's tokens have been counted, and SGLang's state there."""

    n_counted: int = 0
    state: tuple[Any, ...] = (0, False, 0, 0)

    def update(self, parent: Req, count: Callable[[Req, list[int]], None]) -> None:
        """Count the parent's new tokens.

        Args:
            count: SGLang's counter.
        """
        for name, value in zip(_STATE, self.state, strict=True):
            setattr(parent, name, value)
        tokens = parent.output_ids_through_stop
        count(parent, list(tokens[self.n_counted :]))
        self.n_counted = len(tokens)
        self.state = tuple(getattr(parent, name) for name in _STATE)
