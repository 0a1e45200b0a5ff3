"""One row of the table of everything that is touched in SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


@dataclass(frozen=True)
class Hook:
    """A patch of one SGLang function, method or class, and why it is needed."""

    target: str  # dotted path
    kind: HookType
    function: Callable[..., Any]
    reason: str
