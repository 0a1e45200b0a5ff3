"""SGLang's app with `smc`: routes, middleware, error shapes and documentation.

Nothing of SGLang's is replaced. Three attributes of the app are wrapped: its lifespan (the tokenizer manager
exists only then), `build_middleware_stack` (to stand outside SGLang's API-key check) and `openapi`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sglang.api.v1.api_types import JsonContractError, SamplingParams
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.middleware import Middleware
from starlette.responses import Response

from server.errors import RequestError, describe_validation
from server.exchange import observe
from server.intake import Intake, Route, unknown_field
from server.middleware import OpenAIErrors, SmcExchange, local_path
from server.models import SmcServerConfig
from server.openapi import extend
from smc_sglang.config import SmcConfig

_CHAT, _COMPLETIONS, _GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
# Where `smc` is accepted -> the documented response (None: the report is in `meta_info`).
_ANSWERS = {_CHAT: ChatCompletionResponse, _COMPLETIONS: CompletionResponse, _GENERATE: None}
_DESCRIPTION = """SMC speculative decoding on SGLang.

Every request to `/v1/chat/completions`, `/v1/completions` and `/generate` may carry an `smc` object
(OpenAI's client: `extra_body={"smc": {...}}`), and every answer reports how it came about in `smc`.
`GET /v1/smc/config` tells this server's defaults and limits."""


def routes() -> dict[str, Route]:
    """The routes that take `smc`, by path, with the fields that SGLang reads."""
    # `reasoning` is read by a validator of SGLang's model and is no field of it.
    chat = frozenset(ChatCompletionRequest.model_fields) | {"reasoning"}
    native = frozenset(field.name for field in dataclasses.fields(GenerateReqInput))
    known = [
        Route(_CHAT, chat, openai=True),
        Route(_COMPLETIONS, frozenset(CompletionRequest.model_fields), openai=True),
        Route(_GENERATE, native, openai=False, check_sampling=_check_sampling),
    ]
    return {route.path: route for route in known}


def _check_sampling(params: dict[str, Any]) -> None:
    """SGLang checks the whole object and does not say which field is wrong: ask field by field."""
    for field, value in params.items():
        if field not in SamplingParams.__struct_fields__:
            raise unknown_field(field, SamplingParams.__struct_fields__, "sampling_params")
        try:
            SamplingParams.from_json_value({field: value})
        except JsonContractError as error:
            name = f"sampling_params.{field}"
            raise RequestError(f"{name}: {error}", param=name) from None


@cache
def build() -> FastAPI:
    """SGLang's app, extended once per process for `SmcConfig.current()`."""
    app: FastAPI = http_server.app
    config = SmcConfig.current()
    known = routes()
    app.title, app.version, app.description = "smc-sglang", version("smc-sglang"), _DESCRIPTION
    app.add_api_route("/v1/smc/config", _config_route(config), methods=["GET"], tags=["smc"])
    _refuse_invalid_bodies(app, known)
    app.user_middleware.append(Middleware(SmcExchange, routes=known, intake=Intake(config, _served_model)))
    app.router.lifespan_context = _observing(app.router.lifespan_context)
    _wrap(app, "build_middleware_stack", lambda build_stack: OpenAIErrors(build_stack(), known))
    _wrap(app, "openapi", _documented(config))
    return app


def _config_route(config: SmcConfig) -> Callable[[], SmcServerConfig]:
    def smc_config() -> SmcServerConfig:
        """Defaults and limits of the `smc` request object, and what is served."""
        draft = http_server.get_global_state().tokenizer_manager.server_args.speculative_draft_model_path
        return SmcServerConfig.of(config, _served_model(), draft)

    return smc_config


def _served_model() -> str:
    name: str = http_server.get_global_state().tokenizer_manager.served_model_name
    return name


def _refuse_invalid_bodies(app: FastAPI, known: dict[str, Route]) -> None:
    """A body that does not fit SGLang's model gets one sentence on our routes, SGLang's handler on others."""
    others: Any = app.exception_handlers[RequestValidationError]

    async def refuse(request: Request, error: RequestValidationError) -> Response:
        if local_path(request.scope) in known:
            return describe_validation(error.errors()).response()
        answer: Response = await others(request, error)
        return answer

    app.exception_handlers[RequestValidationError] = refuse


def _observing(
    lifespan: Callable[[Any], AbstractAsyncContextManager[Any]],
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def observing(app: Any) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            manager = http_server.get_global_state().tokenizer_manager
            observe(manager)
            _stop_promptly(manager)
            yield state

    return observing


def _stop_promptly(manager: Any) -> None:
    """Start SGLang's orderly shutdown at SIGTERM, and not at the next of its looks, one each five seconds."""
    shut_down = manager.sigterm_watchdog

    async def watch() -> None:
        while not manager.gracefully_exit:
            await asyncio.sleep(0.2)
        await shut_down()

    manager.sigterm_watchdog = watch


def _documented(config: SmcConfig) -> Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]:
    def document(openapi: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with warnings.catch_warnings():
            # SGLang's routes with two methods share one operation id; `extend` sets that right.
            warnings.filterwarnings("ignore", "Duplicate Operation ID")
            schema = openapi()
        if "SmcRequest" not in schema["components"]["schemas"]:  # FastAPI builds the document once
            extend(schema, config, _ANSWERS)
        return schema

    return document


def _wrap(app: FastAPI, method: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replace a parameterless method of the app by `around(method)`."""
    original = getattr(app, method)
    setattr(app, method, lambda: around(original))
