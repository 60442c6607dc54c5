"""Registration, status, limits and keys of regions of shared memory."""

import base64
import os
import secrets
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http

from preblock.service.core.auth import new_key
from tests.clients.shared_memory.conftest import in_files, on_gpus
from tests.clients.shared_memory.shared_client import IDS, MAX_BYTES, MODULES, Client, SystemMemory, clients_of
from tests.support.gpu_memory import GpuMemory, StandInMemory
from tests.support.servers import Server, serve

LARGE = 2**22
"""Bytes of memory that no GPU allocates together with other memory."""


def test_status_lists_the_regions_until_they_are_unregistered(memory_client: Client) -> None:
    first, second = memory_client.allocate(LARGE), memory_client.allocate(64)
    first.fill(IDS)
    memory_client.register("first", first, 32)
    memory_client.register("second", second, 64)
    memory_client.register("again", first, LARGE)
    assert memory_client.regions() == {"first": 32, "second": 64, "again": LARGE}
    assert memory_client.regions("first") == {"first": 32}
    memory_client.shared("unregister", "first")
    memory_client.shared("unregister", "first")  # as in Triton
    assert memory_client.regions().keys() == {"second", "again"}
    status, message = memory_client.refusal("first", method="get")
    assert status == memory_client.status_of(404, "NOT_FOUND")
    assert message == "name: got first, expected the name of a registered region"
    expected = memory_client.over_tcp().tobytes()
    answer = memory_client.infer("gpt", [memory_client.shared_input("again", IDS.nbytes)])
    assert answer.as_numpy("embeddings").tobytes() == expected
    memory_client.shared("unregister")
    assert memory_client.regions() == {}
    memory_client.register("first", first, LARGE)  # the mapping of a GPU was closed, and opens again
    answer = memory_client.infer("gpt", [memory_client.shared_input("first", IDS.nbytes)])
    assert answer.as_numpy("embeddings").tobytes() == expected


@in_files
def test_key_may_begin_with_a_slash_and_region_with_an_offset(memory_client: Client) -> None:
    memory = memory_client.allocate(8 + IDS.nbytes)
    memory.fill(IDS)
    memory_client.shared("register", "part", f"/{memory.key}", IDS.nbytes, 8)
    answer = memory_client.infer("gpt", [memory_client.shared_input("part", 16, (1, 2))])
    assert answer.as_numpy("embeddings").tobytes() == memory_client.over_tcp(IDS[:1, 1:]).tobytes()


@on_gpus
def test_regions_of_files_and_gpus_share_names_and_limit(memory_client: Client) -> None:
    """But to unregister one kind leaves the other."""
    file, memory = SystemMemory(MAX_BYTES), memory_client.allocate(64)
    memory_client.client.register_system_shared_memory("file", file.key, MAX_BYTES - 63)
    file.free()
    memory_client.shared("unregister", "file")
    memory_client.shared("unregister")
    memory_client.register("small", memory, 63)
    memory_client.client.unregister_system_shared_memory("small")
    assert memory_client.regions() == {"small": 63}
    assert memory_client.refusal("file", method="get")[0] == memory_client.status_of(404, "NOT_FOUND")
    same = memory_client.registration("file", memory, 32)
    assert memory_client.refusal(*same, method="register")[1].startswith("the region file is registered already")
    more = memory_client.registration("more", memory, 1)
    status, error = memory_client.refusal(*more, method="register")
    assert status == memory_client.status_of(503, "UNAVAILABLE")
    assert error.startswith(f"byte_size: got 1 bytes beside {MAX_BYTES}, expected at most {MAX_BYTES} bytes")


def test_extensions_are_listed_where_they_are_allowed(memory_client: Client, tiny_server: Server) -> None:
    extension = f"{memory_client.kind}_shared_memory"
    metadata = memory_client.get_server_metadata(**({} if memory_client.http else {"as_json": True}))
    assert extension in metadata["extensions"]
    assert extension not in httpx.get(f"{tiny_server.address}/v2").json()["extensions"]


@in_files
def test_bad_registration_of_a_file_is_rejected(memory_client: Client) -> None:
    key = memory_client.allocate(64).key
    memory_client.shared("register", "there", key, 64)
    cases: list[tuple[dict[str, Any], str]] = [
        *(
            ({"key": bad}, f"key: got {bad}, expected the name of POSIX shared memory, without a slash after its start")
            for bad in ("", "../etc/passwd", "/..", "a\0b")
        ),
        ({"key": "x" * 256}, "key: got xxxx"),
        ({"key": "sem.preblock"}, "key: got sem.preblock, expected the name of shared memory, not of a semaphore"),
        ({"key": "preblock-no-such"}, "key: got preblock-no-such, expected shared memory that this server may read"),
        ({"byte_size": 0}, "byte_size: got 0, expected 1 or more"),
        ({"byte_size": 65}, ": got 64 bytes, expected at least 65 bytes, offset and byte_size together"),
        ({"offset": 1}, ": got 64 bytes, expected at least 65 bytes, offset and byte_size together"),
        ({"name": "n" * 129}, "expected 1 to 128 bytes without a slash"),
        ({"name": "there"}, "the region there is registered already; unregister it first"),
    ]
    for fields, message in cases:
        options = {"name": "new", "key": key, "byte_size": 64} | fields
        status, error = memory_client.refusal(**options, method="register")
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT"), fields
        assert message in error
    assert memory_client.over_tcp().size


@in_files
def test_other_kinds_of_files_are_rejected(memory_client: Client) -> None:
    """The server does not wait for the other end of a pipe."""
    path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
    for make, reason in (
        (partial(path.symlink_to, "/etc/hostname"), "expected shared memory that this server may read and write"),
        (partial(os.mkfifo, path), "got another kind of file, expected at least 1 bytes"),
    ):
        make()
        try:
            status, error = memory_client.refusal("new", path.name, 1, method="register")
        finally:
            path.unlink()
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT")
        assert reason in error


@on_gpus
def test_bad_registration_of_gpu_memory_is_rejected(memory_client: Client) -> None:
    large, freed = memory_client.allocate(LARGE), memory_client.allocate(LARGE)
    freed.free()
    shown = base64.b64decode(freed.handle).hex()[:80]
    for fields, message in (
        ({"raw_handle": base64.b64encode(bytes(63))}, "raw_handle: got 63 bytes, expected 64 bytes, a CUDA IPC handle"),
        ({"raw_handle": base64.b64encode(b"\xff" * 64)}, f"raw_handle: got {'ff' * 40}…, expected a handle of memory"),
        ({"raw_handle": freed.handle}, f"raw_handle: got {shown}…, expected a handle of "),
        ({"device_id": -1}, "device_id: got -1, expected 0 to "),
        ({"device_id": 99}, "device_id: got 99, expected 0 to "),
        ({"byte_size": 0}, "byte_size: got 0, expected 1 or more"),
        ({"byte_size": 2 * LARGE}, f"byte_size: got {2 * LARGE}, expected at most {LARGE}, the bytes of the memory"),
        ({"name": "n" * 129}, "expected 1 to 128 bytes without a slash"),
    ):
        options: dict[str, Any] = {"name": "new", "raw_handle": large.handle, "device_id": 0, "byte_size": 64} | fields
        status, error = memory_client.refusal(**options, method="register")
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT"), fields
        assert message in error
    assert memory_client.regions() == {}
    assert memory_client.over_tcp().size


def test_bad_body_of_a_gpu_registration_is_rejected(driver_server: Server) -> None:
    for body, message in (
        ("{}", 'raw_handle: got nothing, expected an object {"b64": text in base64}'),
        ('{"raw_handle": "AAAA"}', 'raw_handle: got AAAA, expected an object {"b64": text in base64}'),
        ('{"raw_handle": {"b64": "AA"}}', "raw_handle.b64: got AA, expected base64 with padding"),
        ('{"raw_handle": {"b64": 1}}', "raw_handle: got {'b64': 1}, expected an object {\"b64\": text in base64}"),
        ('{"raw_handle": {"b64": "A$"}}', "raw_handle.b64: got A$, expected base64"),
        ('{"raw_handle": {"b64": "", "x": 1}}', "raw_handle: got {'b64': '', 'x': 1}, expected an object"),
        ('{"raw_handle": {"b64": ""}, "device_id": "0"}', "device_id: got '0', expected a 64-bit integer"),
        ('{"offset": 1}', "unknown field offset; expected raw_handle, device_id, byte_size"),
    ):
        answer = httpx.post(f"{driver_server.address}/v2/cudasharedmemory/region/x/register", content=body)
        assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text


def test_bytes_and_number_of_regions_are_bounded(memory_client: Client) -> None:
    memory = memory_client.allocate(MAX_BYTES + 1)
    status, error = memory_client.refusal(*memory_client.registration("new", memory, MAX_BYTES + 1), method="register")
    assert status == memory_client.status_of(413, "RESOURCE_EXHAUSTED")
    assert error == f"byte_size: got {MAX_BYTES + 1} bytes, expected at most {MAX_BYTES} bytes for all regions together"
    memory_client.register("most", memory, MAX_BYTES - 300)
    status, error = memory_client.refusal(*memory_client.registration("new", memory, 301), method="register")
    assert status == memory_client.status_of(503, "UNAVAILABLE")
    for number in range(255):
        memory_client.register(str(number), memory, 1)
    status, error = memory_client.refusal(*memory_client.registration("new", memory, 1), method="register")
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
        assert client.regions().keys() == {"used"}


def test_unregistered_memory_is_released_after_an_error(
    memory_client: Client, region_server: Server, memory: Any
) -> None:
    if memory is GpuMemory:
        pytest.skip("only memory of files has a name")
    region = memory_client.region("ids", IDS)
    name = region.key if memory is SystemMemory else base64.b64decode(region.handle).rstrip(b"\0").decode()
    memory_client.refusal("gpt", [memory_client.shared_input("ids", IDS.nbytes, offset=1)])

    def used() -> bool:
        process = Path(f"/proc/{region_server.pid}")
        names = [file.resolve().name for file in (process / "fd").iterdir()]
        return name in names or name in (process / "maps").read_text()

    assert used()
    memory_client.shared("unregister", "ids")
    assert not used()


@pytest.mark.parametrize("module", MODULES, ids=["http", "grpc"])
def test_shared_memory_is_off_by_default(tiny_server: Server, module: Any) -> None:
    message = "shared memory is off; the setting max_shared_memory_bytes of the server allows it"
    address = tiny_server.address.removeprefix("http://") if module is tritonclient.http else tiny_server.grpc
    for kind, registration in ((SystemMemory, ("x", "x", 1)), (StandInMemory, ("x", b"A" * 88, 0, 1))):
        with ExitStack() as stack:
            client = Client(module, address, stack, kind)
            expected = client.status_of(403, "PERMISSION_DENIED"), message
            assert client.refusal(*registration, method="register") == expected
            assert client.refusal(method="unregister") == expected
            assert client.refusal(method="get") == expected
            assert client.refusal("gpt", [client.shared_input("x", 48)]) == expected
            assert client.refusal("gpt", [client.plain_input()], outputs=[client.output("x", 48)]) == expected


def test_each_key_has_its_regions_and_leaves_memory(tiny_repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    made = {name: new_key(name, (), False) for name in ("alice", "bob")}
    file.write_text("".join(entry for _, entry in made.values()))
    options = "--max-shared-memory-bytes", "1200", "--api-keys-file", str(file)
    with serve(tiny_repository, *options) as server, ExitStack() as stack:
        client = Client(tritonclient.http, server.address.removeprefix("http://"), stack)
        memory = client.allocate(1200)
        headers: list[Any] = [{"headers": {"Authorization": f"Bearer {secret}"}} for secret, _ in made.values()]
        alice, bob = headers

        def refused(size: int, who: dict[str, Any]) -> tuple[str, str]:
            return client.refusal(*client.registration("one more", memory, size), method="register", **who)

        assert refused(601, alice) == ("413", "byte_size: got 601 bytes, expected at most 600 bytes for one key")
        client.register("large", memory, 500, **alice)
        message = "byte_size: this key would hold 601 bytes, and leave 599 to other keys"
        assert refused(101, alice) == ("503", message)
        client.register("large", memory, 350, **bob)
        assert refused(1, alice)[0] == "503"
        client.shared("unregister", **alice)
        assert (client.regions(**alice), client.regions(**bob)) == ({}, {"large": 350})
        client.shared("unregister", **bob)
        for number in range(128):
            client.register(str(number), memory, 1, **alice)
        assert refused(1, alice) == ("503", "regions: this key would hold 129 regions, and leave 127 to other keys")
