"""Servers on Unix sockets: the same answers as over TCP, and the files of the sockets."""

import asyncio
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import pytest

import preblock
from preblock.bench.workload import LoadTarget
from preblock.client.errors import ConnectionFailed, RequestError
from preblock.service.server.addresses import UnixListener
from tests.cli.command_line import failing
from tests.support.open_inference import infer_message, open_stub
from tests.support.paths import PREBLOCK
from tests.support.processes import workers
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

IDS = [[1, 2, 3], [4, 5, 6]]
EMBED: dict[str, Any] = {"url": "http://localhost/models/gpt/embed", "json": {"input_ids": IDS}}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="preblock ") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def unix(folder: Path, tiny_repository: Path) -> Iterator[Server]:
    """A server on `http.sock` and `grpc%20.sock`; the banner has the syntax of a shell and of gRPC."""
    paths = "--uds", str(folder / "http.sock"), "--grpc-uds", str(folder / "grpc%20.sock")
    with serve(tiny_repository, *paths) as server:
        yield server


def open_http(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))


def test_http_and_grpc_over_unix_socket_match_tcp(unix: Server, folder: Path, tiny_server: Server) -> None:
    with open_http(folder / "http.sock") as http:
        answer, index = http.post(**EMBED), http.get("http://any.example/")
    expected = httpx.post(f"{tiny_server.address}/models/gpt/embed", json=EMBED["json"])
    assert (answer.status_code, answer.content) == (200, expected.content)
    assert index.json()["protocols"]["grpc_port"] is None
    address = f"unix:{quote(str(folder / 'grpc%20.sock'))}"
    assert f"gRPC on {address}" in unix.banner
    with open_stub(address) as ours, open_stub(tiny_server.grpc) as theirs:
        found, told = (stub.ModelInfer(infer_message(IDS), timeout=30) for stub in (ours, theirs))
    assert found.raw_output_contents == told.raw_output_contents


def test_banner_command_over_unix_socket_works(unix: Server, folder: Path) -> None:
    command = unix.banner.splitlines()[-1].strip()
    assert command.startswith(f"curl --unix-socket '{folder / 'http.sock'}' http://localhost/models/")
    answer = subprocess.run(["sh", "-c", f"{command} --fail --silent"], capture_output=True, text=True, check=True)
    assert '"shape":[1,4,4]' in answer.stdout


def test_clients_and_streams_over_unix_socket_match_tcp(unix: Server, tiny_server: Server) -> None:
    async def ask(address: str) -> list[Any]:
        async with preblock.connect_async(address) as client, client.decode("gpt", rows=2) as stream:
            return [(await client.embed(IDS, model="gpt")).vectors, await stream.step([[5], [6]])]

    answers = [asyncio.run(ask(address)) for address in (unix.address, tiny_server.address)]
    with preblock.connect(unix.address) as client, client.decode("gpt", rows=2) as stream:
        answers.append([client.embed(IDS, model="gpt").vectors, stream.step([[5], [6]])])
    assert len({b"".join(vectors.tobytes() for vectors in answer) for answer in answers}) == 1


@pytest.mark.usefixtures("unix")
def test_serve_with_unusable_socket_fails_and_keeps_it(folder: Path, tiny_repository: Path, tmp_path: Path) -> None:
    file, http, calls = tmp_path / "file", folder / "http.sock", folder / "grpc%20.sock"
    file.write_text("mine")
    for options, message in (
        (["--uds", http], f"the socket {http} is already in use"),
        (["--grpc-uds", calls], f"the socket {calls} is already in use"),
        (["--uds", file], f"{file} exists, and is not a socket"),
        (["--grpc-uds", file], f"{file} exists, and is not a socket"),
        (["--workers", "2", "--grpc-uds", file], "--grpc-uds works with one worker, and workers is 2: gRPC cannot "),
        (["--uds", file, "--grpc-uds", file], f"--uds and --grpc-uds are both {file}; each needs its own socket"),
    ):
        arguments = ("serve", "--repository", tiny_repository, "--port", "0", *options)
        assert failing(*arguments, code=1).startswith(message)
    with open_http(http) as client:
        assert client.post(**EMBED).status_code == 200
    assert (file.read_text(), {path.name for path in folder.iterdir()}) == ("mine", {http.name, calls.name})


def test_workers_share_socket_and_remove_its_file(tiny_repository: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "http.sock")
        with serve(tiny_repository, "--workers", "2", "--uds", str(path)) as server, open_http(path) as http:
            assert list(Path(name).iterdir()) == [path]
            expected = http.post(**EMBED).content
            wait_until(lambda: len(workers(server.pid)) == 2, 30)
            killed = workers(server.pid)[0]
            os.kill(killed, signal.SIGKILL)
            # Its connections stay open until its last thread has ended; before, it may be a zombie.
            wait_until(lambda: not Path(f"/proc/{killed}").exists(), 30)
            with preblock.connect(server.address) as client:
                assert client.embed(IDS, model="gpt").vectors.shape[:2] == (2, 3)
            assert http.post(**EMBED).content == expected
        assert not list(Path(name).iterdir())


def test_stale_sockets_are_replaced_and_removed(tiny_repository: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        http_path, grpc_path = Path(name, "http.sock"), Path(name, "grpc.sock")
        options = "--uds", str(http_path), "--grpc-uds", str(grpc_path)
        command = [PREBLOCK, "serve", "--repository", str(tiny_repository), *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: http_path.exists() and grpc_path.exists(), 60)
            process.kill()
        assert http_path.is_socket()
        assert grpc_path.is_socket()
        with serve(tiny_repository, *options), open_http(http_path) as http:
            assert http.post(**EMBED).status_code == 200
            with open_stub(f"unix:{grpc_path}") as stub:
                assert stub.ModelInfer(infer_message(IDS), timeout=30).raw_output_contents
        assert not list(Path(name).iterdir())


def test_unix_socket_clients_share_rate_limit(tiny_repository: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        http_path, grpc_path = Path(name, "http.sock"), Path(name, "grpc.sock")
        options = "--uds", str(http_path), "--grpc-uds", str(grpc_path), "--access-log-sample-rate", "1"
        with serve(tiny_repository, *options, "--rate-limit-per-second", "0.001"):
            with open_http(http_path) as first, open_http(http_path) as second:
                answers = [first.post(**EMBED), second.post(**EMBED)]
            assert [answer.status_code for answer in answers] == [200, 429]
            with open_stub(f"unix:{grpc_path}") as stub, pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
                stub.ModelInfer(infer_message(IDS), timeout=30)


def test_socket_mode_follows_umask(folder: Path) -> None:
    for mask, mode in ((0o077, 0o700), (0o007, 0o770)):
        path, before = folder / f"mode{mask}", os.umask(mask)
        try:
            with UnixListener("uds", path) as listener:
                assert not path.exists()
                listener.listen(1)
                assert stat.S_IMODE(path.stat().st_mode) == mode
        finally:
            os.umask(before)
        assert not path.exists()


def test_shutdown_keeps_socket_of_other_server(folder: Path) -> None:
    path = folder / "other"
    with UnixListener("uds", path) as ours:
        ours.listen(1)
        path.unlink()
        with UnixListener("uds", path) as other:
            other.listen(1)
            ours.__exit__()
            assert path.is_socket()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # httpcore does not close a socket without a connection
def test_client_error_names_path_of_missing_socket(folder: Path) -> None:
    address = f"http+unix://{quote(str(folder / 'none'), safe='')}/prefix"
    with preblock.connect(address, retries=0) as client:
        with pytest.raises(ConnectionFailed, match=f"cannot connect to {folder / 'none'} "):
            client.embed(IDS, model="gpt")
        with pytest.raises(ConnectionFailed, match=f"no connection to {folder / 'none'} "):
            client.decode("gpt", rows=1).__enter__()


def test_malformed_socket_addresses_are_rejected() -> None:
    cases: tuple[tuple[str | list[str], str], ...] = (
        ("http+unix:///run/a.sock", "an absolute path with %2F for each /"),
        ("http+unix://a.sock", "an absolute path with %2F for each /"),
        ("ftp+unix://%2Frun%2Fa.sock", "expected http://… or https://…"),
        (["http+unix://%2Frun%2Fa.sock", "http://b"], "expected one address, or several of TCP"),
    )
    for addresses, message in cases:
        with pytest.raises(RequestError, match=message):
            preblock.connect(addresses)
    with pytest.raises(RequestError, match="expected an address of TCP"):
        LoadTarget("http+unix://%2Frun%2Fa.sock", "gpt")
