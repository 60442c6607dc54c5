"""The table of errors in `docs/http.md`, and a broken artifact at each protocol."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.grpc.errors import STATUS as GRPC_STATUS
from preblock.service.api.http.errors import STATUS, status_of
from preblock.service.artifacts.names import GRAPH
from preblock.service.core import errors
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT
from tests.support.protocols import (
    Clients,
    RequestRefused,
    call_grpc,
    connect,
    refusal_of,
)
from tests.support.servers import serve

INSIDE = re.compile(r"onnxruntime|onnx\.|Traceback|preblock\.|\.py\b|Error\b|Exception|/tmp|/home|0x[0-9a-f]{6}")
"""Internals without a place in messages."""
PATHS = {"native": "/models/gpt/embed", "/v2": "/v2/models/gpt/infer", "/v1": "/v1/embeddings"}
LOAD = "/v2/repository/models/gpt/load"


def table() -> dict[str, dict[str, str]]:
    """Return the codes of the document, by kind and protocol."""
    text = (ROOT / "docs/http.md").read_text()
    rows = re.findall(r"^\| `([A-Z]\w+)` \|(.*)\|$", text.partition("## Errors")[2].partition("\n## ")[0], re.M)
    found = {}
    for kind, rest in rows:
        _, *codes = (cell.strip() for cell in rest.split("|"))
        found[kind] = dict(zip((*PATHS, "gRPC"), codes, strict=True))
    return found


TABLE = table()
NEVER = {("Conflict", "/v1"), ("Misdirected", "gRPC"), ("UnsupportedFormat", "gRPC")}
NEVER |= {("NotAcceptable", protocol) for protocol in ("/v2", "/v1", "gRPC")}
NEVER |= {("ProviderError", protocol) for protocol in (*PATHS, "gRPC")}
"""Kinds without a code at a protocol."""


def test_error_table_states_the_codes_of_every_kind() -> None:
    assert set(TABLE) == {kind.__name__ for kind in STATUS}
    assert {(kind, name) for kind, codes in TABLE.items() for name, code in codes.items() if not code} == NEVER
    for name, codes in TABLE.items():
        kind = getattr(errors, name)
        error = kind.__new__(kind)
        error.field = "input_ids"
        statuses = {protocol: str(status_of(error, path)) for protocol, path in PATHS.items()}
        statuses["gRPC"] = GRPC_STATUS[kind].name
        assert codes == {protocol: code and statuses[protocol] for protocol, code in codes.items()}, name


def check(error: RequestRefused, protocol: str) -> None:
    assert str(error.status).removeprefix("StatusCode.") == TABLE["ArtifactError"][protocol]
    assert error.kind in ("", "ArtifactError")
    assert error.message
    assert not INSIDE.search(error.message)


@pytest.fixture
def broken_clients(tiny_repository: Path, tmp_path: Path) -> Iterator[Clients]:
    """Connect to a server whose `changed` has another tokenizer, and whose `gpt` has a version without a graph."""
    root = shutil.copytree(tiny_repository, tmp_path / "repository")
    changed = copy_artifact("bert", root, "changed")
    with serve(root, "--model-control", "explicit", "--load-model", "*") as server, connect(server) as clients:
        (changed / "tokenizer.json").write_text("{}")
        shutil.copytree(root / "gpt/1", root / "gpt/2")
        (root / "gpt/2" / GRAPH).unlink()
        (root / "gpt/2" / GRAPH).write_bytes(b"no graph")
        yield clients


def test_broken_artifact_is_named_without_internals(broken_clients: Clients) -> None:
    for protocol, path, body in (
        ("native", "/models/changed/embed", {"text": "a"}),
        ("/v2", LOAD, {}),
        ("/v1", "/v1/embeddings", {"model": "changed", "input": "a", "pooling": "mean"}),
    ):
        check(refusal_of(broken_clients.http.post(path, json=body)), protocol)
    load = service_pb2.RepositoryModelLoadRequest(model_name="gpt")
    with pytest.raises(RequestRefused) as raised:
        call_grpc(broken_clients, "RepositoryModelLoad", load)
    check(raised.value, "gRPC")
    states = broken_clients.http.post("/v2/repository/index").json()
    (reason,) = (state["reason"] for state in states if state["name"] == "gpt" and state["reason"])
    assert reason.startswith("gpt/2/")
    assert not INSIDE.search(reason)
