"""Triton's system shared memory with tritonclient and its unmodified utilities. Oracle: the same requests over TCP."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from preblock.service.core.auth import new_key
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve

IDS = np.array([[1, 2, 3], [4, 5, 6]])
MAX_BYTES = 2**24


class Client:
    """A client of tritonclient, and its regions."""

    def __init__(self, module: Any, address: str, stack: ExitStack) -> None:
        self.module, self._stack = module, stack
        self.client = stack.enter_context(module.InferenceServerClient(address))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    @property
    def http(self) -> bool:
        return self.module is tritonclient.http

    def create(self, name: str, size: int) -> Any:
        """Create shared memory of `size` bytes for the region `name`, without registering it."""
        handle = shared_memory.create_shared_memory_region(name, f"preblock-test-{secrets.token_hex(8)}", size)
        self._stack.callback(shared_memory.destroy_shared_memory_region, handle)
        return handle

    def region(self, name: str, content: NDArray[Any]) -> Any:
        """Create and register a region with `content`."""
        handle = self.create(name, content.nbytes)
        shared_memory.set_shared_memory_region(handle, [content])
        self.client.register_system_shared_memory(name, handle._shm_key, content.nbytes)
        return handle

    def shared_input(self, region: str, size: int, shape: Any = IDS.shape, offset: int = 0, **options: str) -> Any:
        named = {"name": "input_ids", "datatype": "INT64"} | options
        tensor = self.module.InferInput(named["name"], list(shape), named["datatype"])
        return tensor.set_shared_memory(region, size, offset)

    def plain_input(self, ids: NDArray[np.int64] = IDS) -> Any:
        return self.module.InferInput("input_ids", list(ids.shape), "INT64").set_data_from_numpy(ids)

    def output(self, region: str, size: int, offset: int = 0, name: str = "embeddings") -> Any:
        output = self.module.InferRequestedOutput(name)
        output.set_shared_memory(region, size, offset)
        return output

    def over_tcp(self, ids: NDArray[np.int64] = IDS, model: str = "gpt", **options: Any) -> NDArray[Any]:
        outputs = [self.module.InferRequestedOutput("embeddings")]
        answer = self.client.infer(model, [self.plain_input(ids)], outputs=outputs, **options)
        vectors: NDArray[Any] = answer.as_numpy("embeddings")
        return vectors

    def refusal(self, *args: Any, method: str = "infer", **options: Any) -> tuple[str, str]:
        """Return status and message of the error of a call."""
        with pytest.raises(InferenceServerException) as raised:
            getattr(self.client, method)(*args, **options)
        return str(raised.value.status()), str(raised.value.message())

    def status_of(self, http: int, grpc: str) -> str:
        return str(http) if self.http else f"StatusCode.{grpc}"


@contextmanager
def clients_of(server: Server, module: Any) -> Iterator[Client]:
    address = server.address.removeprefix("http://") if module is tritonclient.http else server.grpc
    httpx.get(f"{server.address}/readyz").raise_for_status()
    with ExitStack() as stack:
        client = Client(module, address, stack)
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture(scope="module")
def shared_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("shared")
    for model in tiny_repository.iterdir():
        (root / model.name).symlink_to(model)
    copy_artifact("gpt-50x768x700", root, "wide")
    with serve(root, "--max-shared-memory-bytes", str(MAX_BYTES)) as server:
        yield server


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def client(request: pytest.FixtureRequest, shared_server: Server) -> Iterator[Client]:
    with clients_of(shared_server, request.param) as opened:
        yield opened


def test_shared_tensors_have_the_bits_of_tcp(client: Client) -> None:
    expected = client.over_tcp()
    client.region("ids", IDS)
    target = client.region("vectors", np.zeros(expected.size + 2, np.float32))
    output = client.output("vectors", expected.nbytes + 4, 4)
    for _ in range(2):
        answer = client.infer("gpt", [client.shared_input("ids", IDS.nbytes)], outputs=[output], request_id="7")
        found = shared_memory.get_contents_as_numpy(target, np.float32, [expected.size + 2])
        assert found[1:-1].tobytes() == expected.tobytes()
        assert (found[0], found[-1]) == (0, 0)
        shared_memory.set_shared_memory_region(target, [np.zeros_like(found)])
    described = answer.get_output("embeddings")
    if client.http:
        parameters = {"shared_memory_region": "vectors", "shared_memory_offset": 4}
        parameters |= {"shared_memory_byte_size": expected.nbytes}
        assert described == {
            "name": "embeddings",
            "datatype": "FP32",
            "shape": list(expected.shape),
            "parameters": parameters,
        }
    else:
        assert (described.datatype, list(described.shape)) == ("FP32", list(expected.shape))
        assert described.parameters["shared_memory_region"].string_param == "vectors"
        assert described.parameters["shared_memory_offset"].int64_param == 4
        assert described.parameters["shared_memory_byte_size"].int64_param == expected.nbytes
        assert list(answer.get_response().raw_output_contents) == [b""]


def test_shared_and_plain_tensors_mix(client: Client) -> None:
    expected = client.over_tcp(parameters={"offset": 1})
    client.region("ids", IDS)
    plain = client.infer("gpt", [client.shared_input("ids", IDS.nbytes)], parameters={"offset": 1})
    assert plain.as_numpy("embeddings").tobytes() == expected.tobytes()
    target = client.region("vectors", np.zeros_like(expected))
    offset = client.module.InferInput("offset", [1], "INT64").set_data_from_numpy(np.array([1]))
    outputs = [client.output("vectors", expected.nbytes), client.module.InferRequestedOutput("next_offset")]
    answer = client.infer("gpt", [client.shared_input("ids", IDS.nbytes), offset], outputs=outputs)
    found = shared_memory.get_contents_as_numpy(target, np.float32, expected.shape)
    assert found.tobytes() == expected.tobytes()
    assert answer.as_numpy("next_offset").tolist() == [4, 4]


def test_repeated_request_reads_its_shared_offset_again(client: Client) -> None:
    region = client.region("offset", np.array([0]))
    for offset in (0, 3):
        shared_memory.set_shared_memory_region(region, [np.array([offset])])
        inputs = [client.plain_input(IDS), client.shared_input("offset", 8, [1], name="offset")]
        answer = client.infer("gpt", inputs, outputs=[client.module.InferRequestedOutput("embeddings")])
        expected = client.over_tcp(parameters={"offset": offset})
        assert answer.as_numpy("embeddings").tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
def test_large_shared_output_has_the_bits_of_tcp(client: Client, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    expected = client.over_tcp(ids, "wide", parameters={"dtype": dtype})
    target = client.region("vectors", np.zeros_like(expected))
    outputs = [client.output("vectors", expected.nbytes)]
    client.infer("wide", [client.plain_input(ids)], outputs=outputs, parameters={"dtype": dtype})
    found = shared_memory.get_contents_as_numpy(target, expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_text_and_row_outputs_may_be_shared(client: Client) -> None:
    texts = np.array([b"hello", b"world"], object)
    content = np.frombuffer(serialize_byte_tensor(texts).item(), np.uint8)
    client.region("text", content)
    target = client.region("lengths", np.zeros(2, np.int64))
    inputs = [client.shared_input("text", content.nbytes, [2], name="text", datatype="BYTES")]
    outputs = [client.output("lengths", 16, name="lengths"), client.module.InferRequestedOutput("embeddings")]
    answer = client.infer("bert", inputs, outputs=outputs)
    plain = client.module.InferInput("text", [2], "BYTES").set_data_from_numpy(texts)
    expected = client.infer("bert", [plain], outputs=[outputs[1], client.module.InferRequestedOutput("lengths")])
    found = shared_memory.get_contents_as_numpy(target, np.int64, [2])
    if client.http:
        assert answer.as_numpy("embeddings").size
    assert found.tolist() == expected.as_numpy("lengths").tolist()


def test_status_lists_the_regions_until_they_are_unregistered(client: Client) -> None:
    first, second = client.create("first", 64), client.create("second", 64)
    client.register_system_shared_memory("first", f"/{first._shm_key}", 32, 8)
    client.register_system_shared_memory("second", second._shm_key, 64)
    client.register_system_shared_memory("again", second._shm_key, 16, offset=16)

    def regions(name: str = "") -> dict[str, tuple[str, int, int]]:
        if client.http:
            found = client.get_system_shared_memory_status(name)
        else:
            document = client.get_system_shared_memory_status(name, as_json=True)
            found = document.get("regions", {}).values()
        return {item["name"]: (item["key"], int(item.get("offset", 0)), int(item["byte_size"])) for item in found}

    everything = {
        "first": (f"/{first._shm_key}", 8, 32),
        "second": (second._shm_key, 0, 64),
        "again": (second._shm_key, 16, 16),
    }
    assert regions() == everything
    assert regions("first") == {"first": everything["first"]}
    client.unregister_system_shared_memory("first")
    client.unregister_system_shared_memory("first")  # as in Triton
    assert regions().keys() == {"second", "again"}
    status, message = client.refusal("first", method="get_system_shared_memory_status")
    assert status == client.status_of(404, "NOT_FOUND")
    assert message == "name: got first, expected the name of a registered region"
    client.unregister_system_shared_memory()
    assert regions() == {}


def test_extension_is_listed_where_it_is_allowed(client: Client, tiny_server: Server) -> None:
    metadata = client.get_server_metadata(**({} if client.http else {"as_json": True}))
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
def test_bad_registration_is_rejected(client: Client, fields: dict[str, Any], message: str) -> None:
    key = client.create("there", 64)._shm_key
    client.register_system_shared_memory("there", key, 64)
    options = {"name": "new", "key": key, "byte_size": 64} | fields
    status, error = client.refusal(**options, method="register_system_shared_memory")
    assert status == client.status_of(400, "INVALID_ARGUMENT")
    assert message in error
    assert client.over_tcp().size


def test_special_file_is_rejected(client: Client) -> None:
    for make in (Path.mkdir, lambda path: path.symlink_to("/etc/hostname")):
        path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
        make(path)
        try:
            status, error = client.refusal("new", path.name, 1, method="register_system_shared_memory")
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        assert status == client.status_of(400, "INVALID_ARGUMENT")
        assert error == f"key: got {path.name}, expected shared memory that this server may read and write"


def test_pipe_is_rejected_without_blocking(client: Client) -> None:
    path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
    os.mkfifo(path)
    try:
        _, error = client.refusal("new", path.name, 1, method="register_system_shared_memory")
    finally:
        path.unlink()
    assert error.endswith("got another kind of file, expected at least 1 bytes, offset and byte_size together")


def test_bytes_and_number_of_regions_are_bounded(client: Client) -> None:
    key = client.create("all", MAX_BYTES + 1)._shm_key
    status, error = client.refusal("new", key, MAX_BYTES + 1, method="register_system_shared_memory")
    assert status == client.status_of(413, "RESOURCE_EXHAUSTED")
    assert error == f"byte_size: got {MAX_BYTES + 1} bytes, expected at most {MAX_BYTES} bytes for all regions together"
    client.register_system_shared_memory("most", key, MAX_BYTES - 300)
    status, error = client.refusal("new", key, 301, method="register_system_shared_memory")
    assert status == client.status_of(503, "UNAVAILABLE")
    assert (
        error
        == f"byte_size: got 301 bytes beside {MAX_BYTES - 300}, expected at most {MAX_BYTES} bytes for all regions"
    )
    for number in range(255):
        client.register_system_shared_memory(str(number), key, 1)
    status, error = client.refusal("new", key, 1, method="register_system_shared_memory")
    assert status == client.status_of(503, "UNAVAILABLE")
    assert error == "regions: got more than 256, expected at most 256"


def test_shrunk_region_is_an_error_and_server_goes_on(client: Client) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    vectors = np.zeros((*ids.shape, 768), np.float32)
    source, target = client.region("ids", ids), client.region("vectors", vectors)
    inputs = [client.shared_input("ids", ids.nbytes, ids.shape)]
    outputs = [client.output("vectors", vectors.nbytes)]
    client.infer("wide", inputs, outputs=outputs)
    for handle, end in ((target, vectors.nbytes - 1), (source, ids.nbytes - 1), (source, 0)):
        with Path("/dev/shm", handle._shm_key).open("r+b") as file:
            file.truncate(end)
        status, error = client.refusal("wide", inputs, outputs=outputs)
        assert status == client.status_of(400, "INVALID_ARGUMENT")
        where = "outputs[0]" if handle is target else "inputs[0]"
        needed = vectors.nbytes if handle is target else ids.nbytes
        name = handle._triton_shm_name
        assert error == (
            f"{where}.parameters: file of the region {name}: got {end} bytes, expected at least {needed} bytes, "
            "as at its registration"
        )
    assert client.over_tcp().size


def test_bad_ranges_are_refused(client: Client) -> None:
    nbytes = client.over_tcp().nbytes
    client.region("ids", IDS)
    client.region("vectors", np.zeros(2 * nbytes, np.uint8))
    ids, invalid = client.shared_input("ids", IDS.nbytes), client.status_of(400, "INVALID_ARGUMENT")
    cases = [
        (
            [ids],
            [client.output("vectors", nbytes - 1)],
            f"outputs[0].parameters.shared_memory_byte_size: got {nbytes - 1}, "
            f"expected at least {nbytes}, the bytes of the output embeddings",
        ),
        (
            [ids],
            [client.output("vectors", nbytes, nbytes + 1)],
            "outputs[0].parameters: shared_memory_offset + "
            f"shared_memory_byte_size: got {2 * nbytes + 1}, expected at most {2 * nbytes}, "
            "the bytes of the region vectors",
        ),
        (
            [ids],
            [client.output("vectors", nbytes), client.output("vectors", 16, nbytes - 1, "lengths")],
            "outputs[1].parameters: got the same bytes for embeddings and lengths, expected separate bytes",
        ),
        (
            [client.shared_input("ids", IDS.nbytes - 8)],
            [],
            "input_ids: got 40 bytes, expected 48 bytes for shape [2, 3]",
        ),
        (
            [client.shared_input("ids", IDS.nbytes, datatype="INT32")],
            [],
            "input_ids: got 48 bytes, expected 24 bytes for shape [2, 3]",
        ),
        (
            [client.shared_input("ids", IDS.nbytes, offset=8)],
            [],
            "inputs[0].parameters: shared_memory_offset + "
            "shared_memory_byte_size: got 56, expected at most 48, the bytes of the region ids",
        ),
    ]
    for inputs, outputs, message in cases:
        assert client.refusal("gpt", inputs, outputs=outputs or None) == (invalid, message)
    missing = client.status_of(404, "NOT_FOUND")
    for inputs, outputs, where in (
        ([client.shared_input("nope", 8)], [], "inputs[0]"),
        ([ids], [client.output("nope", nbytes)], "outputs[0]"),
    ):
        expected = f"{where}.parameters.shared_memory_region: got nope, expected the name of a registered region"
        assert client.refusal("gpt", inputs, outputs=outputs or None) == (missing, expected)
    assert client.over_tcp().nbytes == nbytes


def test_shared_input_over_the_limit_of_a_body_is_refused(tiny_repository: Path) -> None:
    options = "--max-shared-memory-bytes", "4096", "--max-body-bytes", "1000"
    with serve(tiny_repository, *options) as server, clients_of(server, tritonclient.http) as client:
        client.region("ids", np.zeros((1, 126), np.int64))
        status, error = client.refusal("gpt", [client.shared_input("ids", 1008, [1, 126])])
        assert (status, error) == ("413", "inputs: got 1008 bytes in shared memory, expected at most 1000 bytes")


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


def test_page_of_another_origin_cannot_register(shared_server: Server) -> None:
    answer = httpx.post(
        f"{shared_server.address}/v2/systemsharedmemory/region/x/register",
        content='{"key": "x", "byte_size": 1}',
        headers={"Origin": "https://pages.example"},
    )
    assert answer.status_code == 403
