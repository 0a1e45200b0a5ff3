"""What the engine says about the HTTP request at hand, beside its tokens: reports and refusals.

The middleware opens an :class:`Exchange` per request and finds in it what passed through
`TokenizerManager.generate_request`. A `ContextVar` connects the two, so SGLang's serving classes, which sit
between them, stay as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_POLL = 0.2  # s between two looks at whether a client is still there
REPORT = "smc"  # the key in `meta_info`, and of the response


@dataclass
class Exchange:
    """One HTTP request's reports, by choice index, and the engine's refusal, if any."""

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None  # HTTP status, sentence
    rids: set[str] = field(default_factory=set)  # of everything that was sent to the engine: one per answer
    _seen: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)

    def note(self, index: int, meta_info: dict[str, Any]) -> None:
        """Take in one output of choice `index`; unpacks `meta_info["smc"]` in place.

        SGLang collects a request's customised info in a list, one entry per output that carried some; ours is
        carried by the last output only.
        """
        self._seen.add(index)
        report = meta_info.get(REPORT)
        if isinstance(report, list):
            report = report[-1] if report else None
            meta_info[REPORT] = report
        finish = meta_info.get("finish_reason")
        if not finish:
            return
        self._finished.add(index)
        if report is not None:
            self.reports[index] = report
        if finish.get("type") == "abort" and finish.get("status_code"):
            self.refusal = int(finish["status_code"]), str(finish.get("message", "the request was aborted"))

    @property
    def complete(self) -> bool:
        """Whether every choice that has spoken has finished and a report is there."""
        return bool(self.reports) and self._seen == self._finished

    @property
    def report(self) -> Any:
        """The response's `smc`: one object for one choice, else a list by choice index (null: no report)."""
        if self._seen <= {0}:
            return self.reports.get(0)
        return [self.reports.get(index) for index in range(max(self._seen) + 1)]


CURRENT: ContextVar[Exchange | None] = ContextVar("smc_exchange", default=None)


def observe(tokenizer_manager: Any) -> None:
    """Make every `generate_request` of this manager tell the current exchange what it yields and refuses.

    A request whose client has gone is aborted at once. (SGLang itself waits: two seconds after a stream has broken
    off, and for the next output or four seconds otherwise.)
    """
    generate, send = tokenizer_manager.generate_request, tokenizer_manager._send_one_request

    async def send_one_request(tokenized: Any) -> None:
        if (exchange := CURRENT.get()) is not None:
            exchange.rids.add(tokenized.rid)
        await send(tokenized)

    async def generate_request(obj: Any, request: Any = None) -> AsyncIterator[Any]:
        exchange = CURRENT.get() or Exchange()
        try:
            aborted = _aborted_without_client(tokenizer_manager, obj, request, exchange)
            async with aborted, aclosing(generate(obj, request)) as outputs:
                async for output in outputs:
                    # Without streaming, several prompts or choices come as one list.
                    choices = output if isinstance(output, list) else [output]
                    for position, choice in enumerate(choices):
                        exchange.note(choice.get("index", position), choice["meta_info"])
                    yield output
        except ValueError as error:
            exchange.refusal = int(getattr(error, "status_code", 400)), str(error)
            raise

    tokenizer_manager.generate_request = generate_request
    tokenizer_manager._send_one_request = send_one_request


@asynccontextmanager
async def _aborted_without_client(manager: Any, obj: Any, request: Any, exchange: Exchange) -> AsyncIterator[None]:
    """Abort `obj` in the engine when its client leaves, seen by polling or as the end of its stream."""
    if request is None or obj.background:
        yield
        return

    def abort() -> None:
        for rid in exchange.rids.union(obj.rid if isinstance(obj.rid, list) else [obj.rid]):
            if rid in manager.rid_to_state:
                manager.abort_request(rid)

    async def watch() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(_POLL)
        abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except (GeneratorExit, asyncio.CancelledError):  # the server has stopped reading the stream
        abort()
        raise
    finally:
        watcher.cancel()
