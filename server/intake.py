"""What a request body may say, decided before SGLang parses it.

SGLang accepts unknown fields and any model name, so a typo changes nothing and says nothing. Here:

* a top-level field that is neither SGLang's, nor `smc`, nor one of OpenAI's harmless ones is refused, with
  the nearest known name;
* an OpenAI field that this server cannot honour is accepted only with a value that asks for nothing;
* a model name must be the served one, or `default`, or absent; answers carry the served name;
* `smc` is validated and moved to where SGLang carries it to the engine: `custom_params["smc"]`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import RequestError
from smc_sglang.config import SmcConfig, SmcParams

SMC = "smc"
MAX_ANSWERS = 128  # n of one request; OpenAI's limit
MAX_ALTERNATIVES = 20  # top_logprobs, and logprobs of /v1/completions; OpenAI's limit
DEFAULT_MODEL = "default"  # SGLang's name for "no model given"

# OpenAI's fields that change nothing here, whatever they say.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Sent to /generate by SGLang's own clients, although it does not have them.
NATIVE_HARMLESS = frozenset({"stream_options"})
# OpenAI's fields that would change the answer and that are ignored or not supported yet -> the values that ask for
# nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Route:
    """One of the routes that take `smc`.

    Attributes:
        path: below the server's root path.
        fields: SGLang's top-level request fields.
        openai: OpenAI's protocol; False for SGLang's `/generate`.
        check_sampling: raises RequestError for a `sampling_params` object that SGLang's schema refuses.
    """

    path: str
    fields: frozenset[str]
    openai: bool
    check_sampling: Callable[[dict[str, Any]], None] | None = None

    @property
    def known(self) -> frozenset[str]:
        """Every top-level field that the route accepts."""
        return self.fields | {SMC} | (HARMLESS | NEUTRAL.keys() if self.openai else NATIVE_HARMLESS)


@dataclass(frozen=True)
class Intake:
    """Checks and rewrites request bodies.

    Attributes:
        served_model: the name that the server answers under; it can change while the server runs.
    """

    config: SmcConfig
    served_model: Callable[[], str]

    def rewrite(self, route: Route, body: bytes) -> bytes:
        """The body as SGLang is to see it.

        Raises:
            RequestError: one sentence naming the field.
        """
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the request body is not valid JSON: {error}") from None
        if not isinstance(request, dict):
            raise RequestError(f"the request body must be a JSON object, got {_kind(request)}")
        _check_fields(route, request)
        _check_prompts(request)
        if route.openai:
            self._check_openai(request)
            request["model"] = self._model(request.get("model"))
            self._place(request.pop(SMC, None), [request], "custom_params")
        else:
            self._place_native(route, request)
        return orjson.dumps(request)

    def _check_openai(self, request: dict[str, Any]) -> None:
        for field, accepted in NEUTRAL.items():
            value = request.get(field)
            if value is not None and value not in accepted:
                raise RequestError(f"{field} is not supported", param=field)
        for field in ("max_tokens", "max_completion_tokens"):  # SGLang's chat route takes 0 for "not given"
            _check_positive(request, field)
        _check_counts(request)
        for field in ("logprobs", "top_logprobs"):
            _check_alternatives(request, field)
        if request.get("stream_options") is not None and not request.get("stream"):
            raise RequestError("stream_options is allowed only when stream is true", param="stream_options")

    def _model(self, name: Any) -> Any:
        served = self.served_model()
        if name is None or name == DEFAULT_MODEL:
            return served
        if isinstance(name, str) and name != served:
            raise RequestError(
                f"model {name!r} does not exist; this server serves {served!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def _place_native(self, route: Route, request: dict[str, Any]) -> None:
        """`/generate` takes one `sampling_params` object for all prompts, or one per prompt."""
        smc = request.pop(SMC, None)
        params = request.get("sampling_params")
        if params is None:
            params = request["sampling_params"] = {}
        targets = params if isinstance(params, list) else [params]
        for target in targets:
            if not isinstance(target, dict):
                raise RequestError(f"sampling_params must be an object, got {_kind(target)}", param="sampling_params")
            if route.check_sampling is not None:
                route.check_sampling(target)
            if target.get("n", 1) is None:
                del target["n"]  # SGLang does not survive null here
            _check_counts(target)
        self._place(smc, targets, "sampling_params.custom_params")

    def _place(self, smc: Any, targets: list[dict[str, Any]], name: str) -> None:
        """Validate `smc` and put it into each target's `custom_params`, beside what the client put there."""
        for target in targets:
            custom = target.get("custom_params")
            if custom is not None and not isinstance(custom, dict):
                raise RequestError(f"{name} must be an object, got {_kind(custom)}", param=name.split(".")[0])
            inner = (custom or {}).get(SMC)
            if smc is not None and inner is not None:
                raise RequestError(f"smc is given twice: at the top level and in {name}", param=SMC)
            chosen = inner if smc is None else smc
            if chosen is None:
                continue
            self._validate(chosen)
            target["custom_params"] = {**(custom or {}), SMC: chosen}

    def _validate(self, smc: Any) -> None:
        try:
            SmcParams.resolve(smc, self.config)
        except ValueError as error:
            sentence = str(error)
            field = sentence.split(":")[0].split(" ")[0]
            raise RequestError(sentence, param=field if field.startswith("smc.") else SMC) from None


def _check_fields(route: Route, request: dict[str, Any]) -> None:
    for field in request:
        if field not in route.known:
            raise unknown_field(field, route.known, route.path)


def _check_positive(fields: dict[str, Any], field: str) -> None:
    value = fields.get(field)
    if isinstance(value, int) and value < 1:
        raise RequestError(f"{field} must be at least 1, got {value}", param=field)


def _check_counts(sampling: dict[str, Any]) -> None:
    """What SGLang does not look at: any n, and top_k where the temperature is 0."""
    _check_positive(sampling, "n")
    n = sampling.get("n")
    if isinstance(n, int) and n > MAX_ANSWERS:
        raise RequestError(f"n must be at most {MAX_ANSWERS}, got {n}", param="n")
    if sampling.get("top_k") != -1:
        _check_positive(sampling, "top_k")


def _check_alternatives(request: dict[str, Any], field: str) -> None:
    value = request.get(field)
    if isinstance(value, int) and not 0 <= value <= MAX_ALTERNATIVES:  # true and false are 1 and 0
        raise RequestError(f"{field} must be from 0 to {MAX_ALTERNATIVES}, got {value}", param=field)


def _check_prompts(request: dict[str, Any]) -> None:
    """Refuse a prompt without tokens: there is nothing to predict from."""
    for field in ("prompt", "text", "input_ids"):
        value = request.get(field)
        if value is None:
            continue
        several = isinstance(value, list) and value and not isinstance(value[0], int)
        if any(prompt in ("", []) for prompt in (value if several else [value])):
            raise RequestError(f"{field} must not be empty", param=field)


def unknown_field(field: str, known: Collection[str], owner: str) -> RequestError:
    """The refusal of a field that `owner` does not have, with the nearest that it has."""
    nearest = difflib.get_close_matches(field, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return RequestError(f"{field} is not a known field of {owner}{hint}", param=field)


def _kind(value: Any) -> str:
    """JSON's name for the type of a parsed value."""
    names = {str: "a string", bool: "a boolean", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")
