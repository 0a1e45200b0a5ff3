"""SGLang's own app, extended: what can be asked without an engine behind it."""

from __future__ import annotations

import re
import warnings
from typing import Any, get_args

import pytest

with warnings.catch_warnings():  # SGLang's modules warn about kernels that a machine does not have
    warnings.simplefilter("ignore")
    from sglang.srt.entrypoints import http_server

from fastapi import FastAPI
from starlette.testclient import TestClient

from server.app import build, routes
from server.launch import LaunchError, check_options
from server.models import SmcReport, SmcServerConfig
from smc_sglang.config import Mode, SmcConfig, SmcRequest

PATHS = ["/v1/chat/completions", "/v1/completions", "/generate"]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build()


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    return TestClient(app).get("/openapi.json").json()


def test_it_is_sglangs_app_built_once(app: FastAPI) -> None:
    assert app is http_server.app
    assert build() is app
    assert set(routes()) == set(PATHS)


def test_document_is_ours(document: dict[str, Any]) -> None:
    assert document["info"]["title"] == "smc-sglang"
    assert "/v1/smc/config" in document["paths"]


@pytest.mark.parametrize("path", PATHS)
def test_requests_document_smc(document: dict[str, Any], path: str) -> None:
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert schema["properties"]["smc"] == {"$ref": "#/components/schemas/SmcRequest"}


def test_request_object_has_ranges_and_defaults(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["SmcRequest"]["properties"]
    config = SmcConfig()
    assert set(fields) == set(SmcRequest.model_fields)
    n_particles = fields["n_particles"]
    assert (n_particles["type"], n_particles["minimum"], n_particles["maximum"], n_particles["default"]) == (
        "integer",
        1,
        config.max_particles,
        config.n_particles,
    )
    assert fields["draft_length"]["maximum"] == config.longest_draft
    assert fields["mode"]["enum"] == list(get_args(Mode))
    assert fields["resample_threshold"]["default"] == config.resample_threshold
    assert all(field["description"] for field in fields.values())


def test_responses_document_the_report(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert set(schemas["SmcReport"]["properties"]) == set(SmcReport.model_fields)
    chat = document["paths"][PATHS[0]]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert chat["allOf"][0] == {"$ref": "#/components/schemas/ChatCompletionResponse"}
    assert {"$ref": "#/components/schemas/SmcReport"} in chat["allOf"][1]["properties"]["smc"]["oneOf"]


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def references(node: Any) -> set[str]:
        if isinstance(node, list):
            return set().union(*map(references, node))
        if not isinstance(node, dict):
            return set()
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))

    assert {reference.rsplit("/", 1)[1] for reference in references(document)} <= set(schemas)


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    identifiers = [operation["operationId"] for operation in operations]
    assert len(identifiers) > 50
    assert len(identifiers) == len(set(identifiers))


def test_unknown_paths_are_openai_errors(app: FastAPI) -> None:
    response = TestClient(app).get("/v1/nothing")
    assert response.status_code == 404
    assert response.json() == {
        "error": {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}
    }


def test_server_config_of_a_local_draft(tmp_path: Any) -> None:
    config = SmcServerConfig.of(SmcConfig(max_particles=5), "tiny", str(tmp_path))
    assert config.draft_model == tmp_path.name
    assert (config.limits.n_particles, config.limits.draft_length) == (5, 8)
    assert config.defaults.n_particles == 4
    assert config.modes == ["smc", "exact", "off"]
    assert set(config.versions) == {"smc-sglang", "sglang", "torch"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--no-such-option"], "--no-such-option is neither"),
        (["--speculative-num-step", "3"], "--speculative-num-step is neither"),
        (["--mem-fraction-static", "much"], "--mem-fraction-static: invalid float value: 'much'"),
        (["--load-format", "telepathy"], "invalid choice: 'telepathy'"),
    ],
)
def test_bad_options_of_sglang_are_one_sentence(arguments: list[str], says: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(says)) as refused:
        check_options(["--model-path", "m", *arguments])
    assert "\n" not in str(refused.value)


def test_good_options_of_sglang_pass() -> None:
    check_options(["--model-path", "m", "--mem-fraction-static", "0.5", "--enable-metrics"])
