"""Reloads and the end of a server, by real signals."""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from websockets.sync.client import connect

from tests.e2e.test_transport import is_ready_over_grpc
from tests.support.artifacts import make_repository
from tests.support.connections import RawConnection, dial, http_request
from tests.support.paths import PREBLOCK
from tests.support.processes import alive, children, fork_servers
from tests.support.processes import workers as workers_of
from tests.support.servers import read_banner, serve
from tests.support.tls import TlsFiles
from tests.support.waiting import wait_until

SECONDS = 30
LARGE, WIDTH = (22, 500), 768
"""Rows and tokens of a request with an answer of 34 MB: more than any buffer holds."""
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with wide vectors, and little else to open."""
    return make_repository(tmp_path_factory.mktemp("life"), gpt="gpt-50x768x700")


def request(rows: int = LARGE[0], length: int = LARGE[1]) -> bytes:
    """Return a request for vectors; a large one by default."""
    return http_request(f"/models/gpt/embed?shape={rows},{length}", bytes(8 * rows * length), BYTES)


@pytest.mark.parametrize(("workers", "number"), [("1", signal.SIGTERM), ("2", signal.SIGTERM), ("2", signal.SIGINT)])
def test_signal_to_each_process_finishes_requests(models: Path, workers: str, number: signal.Signals) -> None:
    """As a terminal sends it, or a service manager, to the parent first. The second request is known."""
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", workers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            address = read_banner(process)[1]
            with RawConnection(address) as client:
                assert len(client.ask(request())[2]) == 4 * WIDTH * LARGE[0] * LARGE[1]
                client.send(request())
                client.stream.recv(10, socket.MSG_PEEK)
                family = [process.pid, *children(process.pid), *workers_of(process.pid)]
                for member in family:
                    with suppress(ProcessLookupError):  # a worker without a request has ended
                        os.kill(member, number)
                    time.sleep(0.2)
                time.sleep(1)
                if workers == "1":  # else the parent listens until its workers have ended
                    with pytest.raises(ConnectionRefusedError):
                        dial(address)
                assert process.poll() is None
                assert len(client.answer()[2]) == 4 * WIDTH * LARGE[0] * LARGE[1]
            assert process.wait(SECONDS) == 0
            wait_until(lambda: not any(map(alive, family)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("late", [1, 8])
def test_partial_fast_path_request_is_finished_on_shutdown(models: Path, late: int) -> None:
    """Their last bytes, or all of their bodies, come when the end has begun."""
    small = request(1, 1)
    with serve(models) as server, RawConnection(server.address) as client:
        for _ in range(3):
            assert len(client.ask(small)[2]) == 4 * WIDTH
        client.send(small[:-late])
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert len(client.ask(small[-late:])[2]) == 4 * WIDTH
        assert server.process.wait(SECONDS) == 0


def test_requests_cut_at_shutdown_are_no_errors(models: Path) -> None:
    """One waits for its body, one for its client to read. `serve` finds tracebacks in the log."""
    half = http_request("/models/gpt/embed", b"{}", {"Sec-Fetch-Site": "none"})[:-1]
    with (
        serve(models, "--shutdown-timeout-seconds", "1") as server,
        dial(server.address, SECONDS) as body,
        connect(f"{server.socket}/models/gpt/decode?rows=300", max_size=None) as unread,
        ThreadPoolExecutor() as threads,
    ):
        body.sendall(half)
        step = json.dumps({"input_ids": [[1]] * 300})
        threads.submit(lambda: deque(map(unread.send, repeat(step, 600)), maxlen=0))
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0
        assert body.recv(1) == b""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_second_sigterm_stops_server_immediately(models: Path, tmp_path: Path, workers: str) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", workers]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = httpx.URL(read_banner(process)[1])
        httpx.get(address.join("/readyz"), timeout=SECONDS)
        family = [*children(process.pid), *workers_of(process.pid)]
        with dial(address) as stream:
            stream.sendall(request())  # without a reader of the answer
            stream.recv(10, socket.MSG_PEEK)
            process.send_signal(signal.SIGTERM)
            time.sleep(1.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(alive, family)))
    assert list(tmp_path.iterdir()) == []


def test_sigterm_before_workers_start_stops_server(models: Path, tmp_path: Path) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: fork_servers(process.pid), pause=0.005)
        (server,) = fork_servers(process.pid)
        os.kill(server, signal.SIGSTOP)  # it would import for a while
        time.sleep(0.5)
        process.terminate()
        os.kill(server, signal.SIGCONT)  # Python 3.13 waits at its end for the holders of the resource tracker
        assert process.wait(SECONDS) == 0
        wait_until(lambda: not alive(server))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_is_ignored(models: Path, workers: str) -> None:
    with serve(models, "--workers", workers) as server, httpx.Client(base_url=server.address, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        before = workers_of(server.pid)
        server.process.send_signal(signal.SIGHUP)
        for child in before:  # as a closed terminal sends it
            os.kill(child, signal.SIGHUP)
        time.sleep(1)
        assert client.get("/readyz").status_code == 200
        assert workers_of(server.pid) == before


def test_certificate_is_reloaded_without_restart(models: Path, tmp_path: Path) -> None:
    tls = TlsFiles(tmp_path)

    def shown() -> set[bytes | None]:
        return {tls.shown(server.address), tls.shown(f"https://{server.grpc}", "h2")}

    first = ssl.PEM_cert_to_DER_cert(tls.certificate.read_text())
    with (
        serve(models, *tls.options) as server,
        httpx.Client(base_url=server.address, verify=tls.context()) as old,
    ):
        assert old.get("/readyz").status_code == 200
        assert shown() == {first}
        issued = tls.write_certificate()
        time.sleep(2)
        assert shown() == {first}  # the certificate and the key are not of each other
        second = tls.write_key(issued)
        wait_until(lambda: shown() == {second}, pause=0.2)
        assert old.get("/readyz").status_code == 200


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_client_ca_is_reloaded(models: Path, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """The server accepts the new authority only, also for resumed sessions."""
    tls, others, signers = TlsFiles(tmp_path), trustme.CA(), tmp_path / "signers.pem"
    clients = {signer: signer.issue_cert("client.example") for signer in (tls.ca, others)}
    contexts = {signer: tls.context(client) for signer, client in clients.items()}
    for context in contexts.values():
        context.maximum_version = version

    def let_in(signer: trustme.CA, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        """Return the session of an accepted client, or None."""
        with dial(server.address, SECONDS) as plain:
            try:
                with contexts[signer].wrap_socket(plain, server_hostname="localhost", session=session) as stream:
                    stream.sendall(http_request("/livez", headers={"Connection": "close"}, method="GET"))
                    return stream.session if stream.recv(100).startswith(b"HTTP/1.1 200") else None
            except (ssl.SSLError, ConnectionError):  # with TLS 1.3 a client learns of it when it reads
                return None

    def let_in_over_grpc(signer: trustme.CA) -> bool:
        try:
            return is_ready_over_grpc(server, tls, clients[signer])
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE  # noqa: PT017
            return False

    def let_in_only(*accepted: trustme.CA) -> None:
        for signer in clients:
            assert (let_in(signer) is not None) == let_in_over_grpc(signer) == (signer in accepted)

    def write(content: bytes) -> None:
        draft = tmp_path / "draft.pem"
        draft.write_bytes(content)
        draft.rename(signers)

    write(tls.ca.cert_pem.bytes())
    with serve(models, *tls.options, "--tls-client-ca", str(signers)) as server:
        session = let_in(tls.ca)
        let_in_only(tls.ca)
        write(b"nothing that is a certificate")
        time.sleep(2)
        let_in_only(tls.ca)
        write(others.cert_pem.bytes())
        time.sleep(2)
        let_in_only(others)
        assert let_in(tls.ca, session) is None
