"""Requests within and outside of the OpenAPI document against the server. Oracle: schemathesis.

`make fuzz` sends more of them, others in every run.
"""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

import tests.support.profiles  # noqa: F401
from tests.service.api.http.schemas.test_openapi import ROUTES

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


THERE = {"name": "bert", "version": "1", "model": "bert", "static_model": "bert", "region": "vectors"}
"""Half of the requests name existing models, where the document says "a string"."""


@pytest.fixture(scope="module")
def described(tiny_http: httpx.Client) -> BaseSchema:
    return schemathesis.openapi.from_dict(tiny_http.get("/openapi.json").json())


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_response_matches_openapi_document(
    described: BaseSchema, tiny_http: httpx.Client, method: str, path: str
) -> None:
    operation = described[path][method]
    good, bad = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @given(case=good | bad, there=booleans())
    @settings(suppress_health_check=list(HealthCheck))
    def ask(case: schemathesis.Case[Any], there: bool) -> None:
        if there:
            case.path_parameters = {name: THERE[name] for name in case.path_parameters}
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = THERE["model"]
        case.call_and_validate(str(tiny_http.base_url), checks=CHECKS, timeout=60)

    ask()
