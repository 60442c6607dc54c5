"""Registration, status, limits and keys of regions of shared memory."""

import os
import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import tritonclient.http

from preblock.service.core.auth import new_key
from tests.clients.shared_memory.shared_client import IDS, MAX_BYTES, Client, clients_of
from tests.support.servers import Server, serve


def test_status_lists_the_regions_until_they_are_unregistered(memory_client: Client) -> None:
    first, second = memory_client.create("first", 64), memory_client.create("second", 64)
    memory_client.register_system_shared_memory("first", f"/{first._shm_key}", 32, 8)
    memory_client.register_system_shared_memory("second", second._shm_key, 64)
    memory_client.register_system_shared_memory("again", second._shm_key, 16, offset=16)

    def regions(name: str = "") -> dict[str, tuple[str, int, int]]:
        if memory_client.http:
            found = memory_client.get_system_shared_memory_status(name)
        else:
            document = memory_client.get_system_shared_memory_status(name, as_json=True)
            found = document.get("regions", {}).values()
        return {item["name"]: (item["key"], int(item.get("offset", 0)), int(item["byte_size"])) for item in found}

    everything = {
        "first": (f"/{first._shm_key}", 8, 32),
        "second": (second._shm_key, 0, 64),
        "again": (second._shm_key, 16, 16),
    }
    assert regions() == everything
    assert regions("first") == {"first": everything["first"]}
    memory_client.unregister_system_shared_memory("first")
    memory_client.unregister_system_shared_memory("first")  # as in Triton
    assert regions().keys() == {"second", "again"}
    status, message = memory_client.refusal("first", method="get_system_shared_memory_status")
    assert status == memory_client.status_of(404, "NOT_FOUND")
    assert message == "name: got first, expected the name of a registered region"
    memory_client.unregister_system_shared_memory()
    assert regions() == {}


def test_extension_is_listed_where_it_is_allowed(memory_client: Client, tiny_server: Server) -> None:
    metadata = memory_client.get_server_metadata(**({} if memory_client.http else {"as_json": True}))
    assert "system_shared_memory" in metadata["extensions"]
    assert "system_shared_memory" not in httpx.get(f"{tiny_server.address}/v2").json()["extensions"]


REGISTRATIONS: list[tuple[dict[str, Any], str]] = [
    ({"key": ""}, "key: got , expected the name of POSIX shared memory, without a slash after its start"),
    ({"key": "../etc/passwd"}, "key: got ../etc/passwd, expected the name of POSIX shared memory, without a slash"),
    ({"key": "/.."}, "key: got /.., expected the name of POSIX shared memory, without a slash after its start"),
    ({"key": "a/b"}, "key: got a/b, expected the name of POSIX shared memory, without a slash after its start"),
    ({"key": "x" * 256}, "key: got xxxx"),
    ({"key": "a\0b"}, "key: got a\0b, expected the name of POSIX shared memory, without a slash after its start"),
    ({"key": "sem.preblock"}, "key: got sem.preblock, expected the name of shared memory, not of a semaphore"),
    ({"key": "preblock-no-such"}, "key: got preblock-no-such, expected shared memory that this server may read and"),
    ({"byte_size": 0}, "byte_size: got 0, expected 1 or more"),
    ({"byte_size": 65}, ": got 64 bytes, expected at least 65 bytes, offset and byte_size together"),
    ({"offset": 1}, ": got 64 bytes, expected at least 65 bytes, offset and byte_size together"),
    ({"name": "n" * 129}, "expected 1 to 128 bytes without a slash"),
    ({"name": "there"}, "the region there is registered already; unregister it first"),
]


@pytest.mark.parametrize(("fields", "message"), REGISTRATIONS, ids=[str(case[0])[:30] for case in REGISTRATIONS])
def test_bad_registration_is_rejected(memory_client: Client, fields: dict[str, Any], message: str) -> None:
    key = memory_client.create("there", 64)._shm_key
    memory_client.register_system_shared_memory("there", key, 64)
    options = {"name": "new", "key": key, "byte_size": 64} | fields
    status, error = memory_client.refusal(**options, method="register_system_shared_memory")
    assert status == memory_client.status_of(400, "INVALID_ARGUMENT")
    assert message in error
    assert memory_client.over_tcp().size


def test_special_file_is_rejected(memory_client: Client) -> None:
    for make in (Path.mkdir, lambda path: path.symlink_to("/etc/hostname")):
        path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
        make(path)
        try:
            status, error = memory_client.refusal("new", path.name, 1, method="register_system_shared_memory")
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT")
        assert error == f"key: got {path.name}, expected shared memory that this server may read and write"


def test_pipe_is_rejected_without_blocking(memory_client: Client) -> None:
    path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
    os.mkfifo(path)
    try:
        _, error = memory_client.refusal("new", path.name, 1, method="register_system_shared_memory")
    finally:
        path.unlink()
    assert error.endswith("got another kind of file, expected at least 1 bytes, offset and byte_size together")


def test_bytes_and_number_of_regions_are_bounded(memory_client: Client) -> None:
    key = memory_client.create("all", MAX_BYTES + 1)._shm_key
    status, error = memory_client.refusal("new", key, MAX_BYTES + 1, method="register_system_shared_memory")
    assert status == memory_client.status_of(413, "RESOURCE_EXHAUSTED")
    assert error == f"byte_size: got {MAX_BYTES + 1} bytes, expected at most {MAX_BYTES} bytes for all regions together"
    memory_client.register_system_shared_memory("most", key, MAX_BYTES - 300)
    status, error = memory_client.refusal("new", key, 301, method="register_system_shared_memory")
    assert status == memory_client.status_of(503, "UNAVAILABLE")
    assert (
        error
        == f"byte_size: got 301 bytes beside {MAX_BYTES - 300}, expected at most {MAX_BYTES} bytes for all regions"
    )
    for number in range(255):
        memory_client.register_system_shared_memory(str(number), key, 1)
    status, error = memory_client.refusal("new", key, 1, method="register_system_shared_memory")
    assert status == memory_client.status_of(503, "UNAVAILABLE")
    assert error == "regions: got more than 256, expected at most 256"


def test_idle_regions_are_released(tiny_repository: Path) -> None:
    options = "--max-shared-memory-bytes", "4096", "--shared-memory-idle-timeout-seconds", "1"
    with serve(tiny_repository, *options) as server, clients_of(server, tritonclient.http) as client:
        client.region("used", IDS)
        client.region("idle", IDS)
        began = time.monotonic()
        while time.monotonic() < began + 2.5:  # the server looks every second
            client.infer("gpt", [client.shared_input("used", IDS.nbytes)])
            time.sleep(0.1)
        assert [item["name"] for item in client.get_system_shared_memory_status()] == ["used"]


def test_refused_range_does_not_keep_its_file_open(memory_client: Client, shared_server: Server) -> None:
    key = memory_client.region("ids", IDS)._shm_key
    memory_client.refusal("gpt", [memory_client.shared_input("ids", IDS.nbytes, offset=1)])
    files = Path(f"/proc/{shared_server.pid}/fd")
    assert any(file.resolve().name == key for file in files.iterdir())
    memory_client.unregister_system_shared_memory("ids")
    assert not any(file.resolve().name == key for file in files.iterdir())


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_shared_memory_is_off_by_default(tiny_server: Server, module: Any) -> None:
    message = "shared memory is off; the setting max_shared_memory_bytes of the server allows it"
    address = tiny_server.address.removeprefix("http://") if module is tritonclient.http else tiny_server.grpc
    with ExitStack() as stack:
        client = Client(module, address, stack)
        expected = client.status_of(403, "PERMISSION_DENIED"), message
        assert client.refusal("x", "x", 1, method="register_system_shared_memory") == expected
        assert client.refusal(method="unregister_system_shared_memory") == expected
        assert client.refusal(method="get_system_shared_memory_status") == expected
        assert client.refusal("gpt", [client.shared_input("x", 48)]) == expected
        assert client.refusal("gpt", [client.plain_input()], outputs=[client.output("x", 48)]) == expected


def test_each_key_has_its_own_regions(tiny_repository: Path, tmp_path: Path) -> None:
    keys, file = {}, tmp_path / "keys.toml"
    for name in ("alice", "bob"):
        keys[name], entry = new_key(name, (), False)
        with file.open("a") as opened:
            opened.write(entry)
    options = "--max-shared-memory-bytes", "4096", "--api-keys-file", str(file)
    with serve(tiny_repository, *options) as server, ExitStack() as stack:
        client = Client(tritonclient.http, server.address.removeprefix("http://"), stack)
        key = client.create("ids", 64)._shm_key
        alice, bob = ({"headers": {"Authorization": f"Bearer {keys[name]}"}} for name in ("alice", "bob"))
        client.register_system_shared_memory("ids", key, 64, **alice)
        client.register_system_shared_memory("ids", key, 32, **bob)
        client.unregister_system_shared_memory(**bob)
        assert len(client.get_system_shared_memory_status(**alice)) == 1
        assert client.get_system_shared_memory_status(**bob) == []


def test_key_leaves_as_much_memory_as_it_takes(tiny_repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    made = {name: new_key(name, (), False) for name in ("alice", "bob")}
    file.write_text("".join(entry for _, entry in made.values()))
    options = "--max-shared-memory-bytes", "1200", "--api-keys-file", str(file)
    with serve(tiny_repository, *options) as server, ExitStack() as stack:
        client = Client(tritonclient.http, server.address.removeprefix("http://"), stack)
        key = client.create("memory", 1200)._shm_key
        alice, bob = ({"headers": {"Authorization": f"Bearer {secret}"}} for secret, _ in made.values())

        def refused(size: int, who: dict[str, Any]) -> tuple[str, str]:
            return client.refusal("one more", key, size, method="register_system_shared_memory", **who)

        assert refused(601, alice) == ("413", "byte_size: got 601 bytes, expected at most 600 bytes for one key")
        client.register_system_shared_memory("large", key, 500, **alice)
        message = "byte_size: this key would hold 601 bytes, and leave 599 to other keys"
        assert refused(101, alice) == ("503", message)
        client.register_system_shared_memory("large", key, 350, **bob)
        assert refused(1, alice)[0] == "503"
        client.unregister_system_shared_memory(**alice)
        client.unregister_system_shared_memory(**bob)
        for number in range(128):
            client.register_system_shared_memory(str(number), key, 1, **alice)
        assert refused(1, alice) == ("503", "regions: this key would hold 129 regions, and leave 127 to other keys")
        for number in range(64):
            client.register_system_shared_memory(str(number), key, 1, **bob)


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_page_of_another_origin_cannot_register(shared_server: Server, kind: str) -> None:
    answer = httpx.post(
        f"{shared_server.address}/v2/{kind}sharedmemory/region/x/register",
        content='{"key": "x", "byte_size": 1}',
        headers={"Origin": "https://pages.example"},
    )
    assert answer.status_code == 403
