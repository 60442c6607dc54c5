"""How a client reaches a server: certificates, the caller's own httpx client, readiness, and control of the models."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import preblock
from preblock.client import errors
from preblock.client.access import read_access
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import STALL, FlakyProxy, canned
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, free_port, serve
from tests.support.tls import TlsFiles


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, tiny_repository: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """The address of a server with TLS that asks for a certificate, and files of its authority and of a client."""
    folder = tmp_path_factory.mktemp("tls")
    tls = TlsFiles(folder)
    client = tls.ca.issue_cert("client.example")
    contents = {
        "ca": tls.ca.cert_pem,
        "together": client.private_key_and_cert_chain_pem,
        "certificate": client.cert_chain_pems[0],
        "key": client.private_key_pem,
    }
    files = {name: folder / f"{name} of client.pem" for name in contents}
    for name, content in contents.items():
        content.write_to_path(str(files[name]))
    with serve(tiny_repository, *tls.options, "--tls-client-ca", str(files["ca"])) as running:
        yield running.address, files


def test_client_certificates_work_for_calls_and_streams(connect: Connect, secure: tuple[str, dict[str, Path]]) -> None:
    address, files = secure
    for verify, cert in (
        (files["ca"], files["together"]),
        (False, (str(files["certificate"]), str(files["key"]))),
    ):
        client = connect(address, verify=verify, cert=cert)
        vectors = client.embed([1, 2], model="gpt").vectors
        with client.decode("gpt") as stream:
            assert np.array_equal(stream.step([1, 2]), vectors)


def test_missing_certificate_raises_connection_error(connect: Connect, secure: tuple[str, dict[str, Path]]) -> None:
    """First no own certificate, then an unknown authority."""
    address, files = secure
    for options in ({"verify": files["ca"]}, {}):
        client = connect(address, retries=0, **options)
        with pytest.raises(errors.ConnectionFailed, match=address):
            client.models()
        with pytest.raises(errors.NoAnswer, match=address), client.decode("gpt"):
            pass


def test_unreadable_certificate_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    file.write_text("no certificate")
    for option in ("verify", "cert"):
        for given in (file, tmp_path / "missing.pem"):
            options: dict[str, Any] = {option: given}
            with raises_kind("Invalid", match=rf"^{option}: got {given} \(.+\), expected a file ") as raised:
                preblock.connect("https://127.0.0.1", **options)
            assert raised.value.field == option


def test_calls_use_given_httpx_client(tiny_server: Server) -> None:
    sent: list[httpx.Request] = []
    with httpx.Client(headers={"X-Own": "1"}, event_hooks={"request": [sent.append]}) as http_client:
        with preblock.connect(tiny_server.address, key="k", http_client=http_client) as client:
            vectors = client.embed([1], model="gpt").vectors
        assert http_client.get(f"{tiny_server.address}/livez").status_code == 200  # still open

    async def embed() -> None:
        async def note(request: httpx.Request) -> None:
            sent.append(request)

        async with httpx.AsyncClient(event_hooks={"request": [note]}) as own:
            async with preblock.connect_async(tiny_server.address, http_client=own) as client:
                assert np.array_equal((await client.embed([1], model="gpt")).vectors, vectors)
            assert not own.is_closed

    asyncio.run(embed())
    assert [request.url.path for request in sent] == ["/models/gpt/embed", "/livez", "/models/gpt/embed"]
    assert (sent[0].headers["X-Own"], sent[0].headers["Authorization"]) == ("1", "Bearer k")


def test_httpx_client_of_wrong_kind_is_rejected() -> None:
    for connect, other in ((preblock.connect, httpx.AsyncClient()), (preblock.connect_async, httpx.Client())):
        wrong: Any = other
        with raises_kind("Invalid") as raised:
            connect("http://host", http_client=wrong)
        assert raised.value.field == "http_client"


def test_address_in_message_hides_password() -> None:
    access = read_access("http://me:secret@host:1/under/", 1, None)
    assert (access.url, access.name) == ("http://me:secret@host:1/under", "http://host:1/under")


def test_ready_reports_server_and_model_state(connect: Connect, tiny_server: Server, flaky: FlakyProxy) -> None:
    client = connect(tiny_server.address)
    assert [client.ready(), client.ready("gpt"), client.ready("bert", 1)] == [True] * 3
    assert [client.ready("none"), client.ready("bert", 9)] == [False] * 2
    assert connect(f"http://127.0.0.1:{free_port()}").ready() is False
    flaky.script = [canned("503 Service Unavailable", b'{"status": "error"}'), STALL, canned("401 Unauthorized", b"{}")]
    refused = connect(flaky.address)
    assert [refused.ready(), connect(flaky.address, timeout=0.2).ready()] == [False, False]
    with pytest.raises(errors.RequestError):
        refused.ready()
    assert flaky.connections == 3


def test_client_unloads_and_loads_models(connect: Connect, tmp_path: Path, tiny_server: Server) -> None:
    copy_artifact("gpt", tmp_path)
    with serve(tmp_path, "--model-control", "explicit", "--load-model", "*") as server:
        client = connect(server.address)
        for change, ready in ((client.unload, False), (client.load, True)):
            change("gpt")
            assert client.ready("gpt") is ready
        with pytest.raises(errors.RequestError, match="none"):
            client.load("none")
    with raises_kind("Forbidden", match="model_control"):
        connect(tiny_server.address).load("gpt")
