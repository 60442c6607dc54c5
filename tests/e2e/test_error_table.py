"""The table of errors in `docs/http.md`, row by row: each kind is provoked at each protocol of its row."""

import re
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from preblock.service.api.http.errors import STATUS
from preblock.service.artifacts.names import GRAPH
from tests.e2e.refused_requests import KEY, LOAD, PROTOCOLS, PROVOKE, Place, Provoke
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT
from tests.support.protocols import connect
from tests.support.servers import serve

INSIDE = re.compile(r"onnxruntime|onnx\.|Traceback|preblock\.|\.py\b|Error\b|Exception|/tmp|/home|0x[0-9a-f]{6}")
"""Internals without a place in messages."""


def table() -> dict[str, dict[str, str]]:
    """Return the codes of the document, by kind and protocol."""
    text = (ROOT / "docs/http.md").read_text()
    rows = re.findall(r"^\| `([A-Z]\w+)` \|(.*)\|$", text.partition("## Errors")[2].partition("\n## ")[0], re.M)
    found = {}
    for kind, rest in rows:
        _, *codes = (cell.strip() for cell in rest.split("|"))
        found[kind] = dict(zip(PROTOCOLS, codes, strict=True))
    return found


@pytest.fixture(scope="module")
def place(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("errors") / "repository")
    changed = copy_artifact("bert", root, "changed")
    options = ("--model-control", "explicit", "--load-model", "*")
    keys = root.parent / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "bert"\nsha256 = "{sha256(KEY.encode()).hexdigest()}"\nmodels = ["bert"]\n')
    with (
        serve(root, *options, PREBLOCK_MAX_QUEUE_SIZE="1") as server,
        connect(server) as clients,
        serve(tiny_repository, "--api-keys-file", str(keys)) as asking,
        connect(asking) as guarded,
        serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01") as seldom,
        connect(seldom) as sparing,
    ):
        (changed / "tokenizer.json").write_text("{}")
        # A later version, impossible to open.
        shutil.copytree(root / "gpt/1", root / "gpt/2")
        (root / "gpt/2" / GRAPH).unlink()
        (root / "gpt/2" / GRAPH).write_bytes(b"no graph")
        yield Place(clients, server, guarded, sparing)


def test_error_table_lists_every_kind_and_protocol() -> None:
    assert set(table()) == {kind.__name__ for kind in STATUS}
    assert {kind: {protocol for protocol, code in codes.items() if code} for kind, codes in table().items()} == {
        kind: set(protocols) for kind, protocols in PROVOKE.items()
    }


@pytest.mark.parametrize(
    ("kind", "protocol", "provoke"),
    [
        pytest.param(kind, protocol, provoke, id=f"{kind}-{protocol}")
        for kind, protocols in PROVOKE.items()
        for protocol, provoke in protocols.items()
    ],
)
def test_error_kind_has_documented_status_per_protocol(
    place: Place, kind: str, protocol: str, provoke: Provoke
) -> None:
    error = provoke(place)
    assert str(error.status).removeprefix("StatusCode.") == table()[kind][protocol]
    assert error.kind in ("", kind)
    assert error.message
    assert not INSIDE.search(error.message)


def test_repository_index_reason_hides_internals(place: Place) -> None:
    place.clients.http.post(LOAD)
    states = place.clients.http.post("/v2/repository/index").json()
    (reason,) = (state["reason"] for state in states if state["name"] == "gpt" and state["reason"])
    assert reason.startswith("gpt/2/")
    assert not INSIDE.search(reason)
