"""`smc` in the OpenAPI document: the request with this server's limits and defaults, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.intake import SMC
from server.models import OpenAIErrorBody, SmcReport
from smc_sglang.config import SmcConfig, SmcRequest

_REF = "#/components/schemas/{model}"


def extend(document: dict[str, Any], config: SmcConfig, answers: Mapping[str, type[BaseModel] | None]) -> None:
    """Add `smc` to the documented requests and responses of an OpenAPI document, in place.

    Args:
        document: FastAPI's; its request bodies are references to component schemas.
        answers: path -> the model of its response without `smc`; None where the report is in `meta_info`.
    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["SmcRequest"] = request_schema(config)
    models: list[type[BaseModel]] = [
        SmcReport,
        OpenAIErrorBody,
        *(model for model in answers.values() if model),
    ]
    modes: list[tuple[type[BaseModel], Literal["serialization"]]] = [(m, "serialization") for m in models]
    _, definitions = models_json_schema(modes, ref_template=_REF)
    for name, schema in definitions["$defs"].items():
        schemas.setdefault(name, schema)
    for path, answer in answers.items():
        for operation in document["paths"][path].values():
            body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            properties = schemas[body.rsplit("/", 1)[1]]["properties"]
            properties[SMC] = {"$ref": _REF.format(model="SmcRequest")}
            operation["responses"] = _responses(answer)
    _number_operations(document)


def _number_operations(document: dict[str, Any]) -> None:
    """Make operation ids unique, as the standard asks and client generators rely on."""
    seen: set[str] = set()
    for operations in document["paths"].values():
        for method, operation in operations.items():
            if operation["operationId"] in seen:
                operation["operationId"] += f"_{method}"
            seen.add(operation["operationId"])


def request_schema(config: SmcConfig) -> dict[str, Any]:
    """JSON schema of the request object, each field with its default and its upper limit on this server."""
    schema = SmcRequest.model_json_schema()
    defaults = config.model_dump() | {"grammar_semantics": "local", "return_particles": False}
    limits = {"n_particles": config.max_particles, "draft_length": config.longest_draft}
    for name, field in schema["properties"].items():
        # Null means "the server's default", like absence: document the other alternative only.
        field.update(field.pop("anyOf")[0])
        field["default"] = defaults.get(name)
        if name in limits:
            field["maximum"] = limits[name]
    return schema


def _responses(answer: type[BaseModel] | None) -> dict[str, Any]:
    report = {"$ref": _REF.format(model="SmcReport")}
    one_or_many = {"oneOf": [report, {"type": "array", "items": {"oneOf": [report, {"type": "null"}]}}]}
    if answer is None:
        ok: dict[str, Any] = {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "output_ids": {"type": "array", "items": {"type": "integer"}},
                "meta_info": {"type": "object", "properties": {SMC: report}},
            },
        }
    else:
        base = {"$ref": _REF.format(model=answer.__name__)}
        ok = {"allOf": [base, {"type": "object", "properties": {SMC: one_or_many}}]}
    error = {"schema": {"$ref": _REF.format(model="OpenAIErrorBody")}}
    return {
        "200": {"description": "The answer and its report.", "content": {"application/json": {"schema": ok}}},
        "4XX": {"description": "The request is refused.", "content": {"application/json": error}},
    }
