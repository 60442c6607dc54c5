"""The table of errors in `docs/http.md`."""

import re

from preblock.service.api.grpc.errors import STATUS as GRPC_STATUS
from preblock.service.api.http.errors import STATUS, status_of
from preblock.service.core import errors
from tests.support.paths import ROOT

PATHS = {"native": "/models/gpt/embed", "/v2": "/v2/models/gpt/infer", "/v1": "/v1/embeddings"}


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
