"""Tensors in shared memory, through tritonclient. Oracle: the same request over TCP."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import serialize_byte_tensor, shared_memory

from tests.clients.shared_memory.shared_client import IDS, Client, clients_of
from tests.support.servers import serve


def test_shared_tensors_have_the_bits_of_tcp(memory_client: Client) -> None:
    expected = memory_client.over_tcp()
    memory_client.region("ids", IDS)
    target = memory_client.region("vectors", np.zeros(expected.size + 2, np.float32))
    output = memory_client.output("vectors", expected.nbytes + 4, 4)
    for _ in range(2):
        answer = memory_client.infer(
            "gpt", [memory_client.shared_input("ids", IDS.nbytes)], outputs=[output], request_id="7"
        )
        found = shared_memory.get_contents_as_numpy(target, np.float32, [expected.size + 2])
        assert found[1:-1].tobytes() == expected.tobytes()
        assert (found[0], found[-1]) == (0, 0)
        shared_memory.set_shared_memory_region(target, [np.zeros_like(found)])
    described = answer.get_output("embeddings")
    if memory_client.http:
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


def test_shared_and_plain_tensors_mix(memory_client: Client) -> None:
    expected = memory_client.over_tcp(parameters={"offset": 1})
    memory_client.region("ids", IDS)
    plain = memory_client.infer("gpt", [memory_client.shared_input("ids", IDS.nbytes)], parameters={"offset": 1})
    assert plain.as_numpy("embeddings").tobytes() == expected.tobytes()
    target = memory_client.region("vectors", np.zeros_like(expected))
    offset = memory_client.module.InferInput("offset", [1], "INT64").set_data_from_numpy(np.array([1]))
    outputs = [
        memory_client.output("vectors", expected.nbytes),
        memory_client.module.InferRequestedOutput("next_offset"),
    ]
    answer = memory_client.infer("gpt", [memory_client.shared_input("ids", IDS.nbytes), offset], outputs=outputs)
    found = shared_memory.get_contents_as_numpy(target, np.float32, expected.shape)
    assert found.tobytes() == expected.tobytes()
    assert answer.as_numpy("next_offset").tolist() == [4, 4]


def test_repeated_request_reads_its_shared_offset_again(memory_client: Client) -> None:
    region = memory_client.region("offset", np.array([0]))
    for offset in (0, 3):
        shared_memory.set_shared_memory_region(region, [np.array([offset])])
        inputs = [memory_client.plain_input(IDS), memory_client.shared_input("offset", 8, [1], name="offset")]
        answer = memory_client.infer("gpt", inputs, outputs=[memory_client.module.InferRequestedOutput("embeddings")])
        expected = memory_client.over_tcp(parameters={"offset": offset})
        assert answer.as_numpy("embeddings").tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
def test_large_shared_output_has_the_bits_of_tcp(memory_client: Client, dtype: str) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    expected = memory_client.over_tcp(ids, "wide", parameters={"dtype": dtype})
    target = memory_client.region("vectors", np.zeros_like(expected))
    outputs = [memory_client.output("vectors", expected.nbytes)]
    memory_client.infer("wide", [memory_client.plain_input(ids)], outputs=outputs, parameters={"dtype": dtype})
    found = shared_memory.get_contents_as_numpy(target, expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_text_and_row_outputs_may_be_shared(memory_client: Client) -> None:
    texts = np.array([b"hello", b"world"], object)
    content = np.frombuffer(serialize_byte_tensor(texts).item(), np.uint8)
    memory_client.region("text", content)
    target = memory_client.region("lengths", np.zeros(2, np.int64))
    inputs = [memory_client.shared_input("text", content.nbytes, [2], name="text", datatype="BYTES")]
    outputs = [
        memory_client.output("lengths", 16, name="lengths"),
        memory_client.module.InferRequestedOutput("embeddings"),
    ]
    answer = memory_client.infer("bert", inputs, outputs=outputs)
    plain = memory_client.module.InferInput("text", [2], "BYTES").set_data_from_numpy(texts)
    expected = memory_client.infer(
        "bert", [plain], outputs=[outputs[1], memory_client.module.InferRequestedOutput("lengths")]
    )
    found = shared_memory.get_contents_as_numpy(target, np.int64, [2])
    if memory_client.http:
        assert answer.as_numpy("embeddings").size
    assert found.tolist() == expected.as_numpy("lengths").tolist()


def test_shrunk_region_is_an_error_and_server_goes_on(memory_client: Client) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    vectors = np.zeros((*ids.shape, 768), np.float32)
    source, target = memory_client.region("ids", ids), memory_client.region("vectors", vectors)
    inputs = [memory_client.shared_input("ids", ids.nbytes, ids.shape)]
    outputs = [memory_client.output("vectors", vectors.nbytes)]
    memory_client.infer("wide", inputs, outputs=outputs)
    for handle, end in ((target, vectors.nbytes - 1), (source, ids.nbytes - 1), (source, 0)):
        with Path("/dev/shm", handle._shm_key).open("r+b") as file:
            file.truncate(end)
        status, error = memory_client.refusal("wide", inputs, outputs=outputs)
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT")
        where = "outputs[0]" if handle is target else "inputs[0]"
        needed = vectors.nbytes if handle is target else ids.nbytes
        name = handle._triton_shm_name
        assert error == (
            f"{where}.parameters: file of the region {name}: got {end} bytes, expected at least {needed} bytes, "
            "as at its registration"
        )
    assert memory_client.over_tcp().size


def test_bad_ranges_are_refused(memory_client: Client) -> None:
    nbytes = memory_client.over_tcp().nbytes
    memory_client.region("ids", IDS)
    memory_client.region("vectors", np.zeros(2 * nbytes, np.uint8))
    ids, invalid = memory_client.shared_input("ids", IDS.nbytes), memory_client.status_of(400, "INVALID_ARGUMENT")
    cases = [
        (
            [ids],
            [memory_client.output("vectors", nbytes - 1)],
            f"outputs[0].parameters.shared_memory_byte_size: got {nbytes - 1}, "
            f"expected at least {nbytes}, the bytes of the output embeddings",
        ),
        (
            [ids],
            [memory_client.output("vectors", nbytes, nbytes + 1)],
            "outputs[0].parameters: shared_memory_offset + "
            f"shared_memory_byte_size: got {2 * nbytes + 1}, expected at most {2 * nbytes}, "
            "the bytes of the region vectors",
        ),
        (
            [ids],
            [memory_client.output("vectors", nbytes), memory_client.output("vectors", 16, nbytes - 1, "lengths")],
            "outputs[1].parameters: got the same bytes for embeddings and lengths, expected separate bytes",
        ),
        (
            [memory_client.shared_input("ids", IDS.nbytes - 8)],
            [],
            "input_ids: got 40 bytes, expected 48 bytes for shape [2, 3]",
        ),
        (
            [memory_client.shared_input("ids", IDS.nbytes, datatype="INT32")],
            [],
            "input_ids: got 48 bytes, expected 24 bytes for shape [2, 3]",
        ),
        (
            [memory_client.shared_input("ids", IDS.nbytes, offset=8)],
            [],
            "inputs[0].parameters: shared_memory_offset + "
            "shared_memory_byte_size: got 56, expected at most 48, the bytes of the region ids",
        ),
    ]
    for inputs, outputs, message in cases:
        assert memory_client.refusal("gpt", inputs, outputs=outputs or None) == (invalid, message)
    missing = memory_client.status_of(404, "NOT_FOUND")
    for inputs, outputs, where in (
        ([memory_client.shared_input("nope", 8)], [], "inputs[0]"),
        ([ids], [memory_client.output("nope", nbytes)], "outputs[0]"),
    ):
        expected = f"{where}.parameters.shared_memory_region: got nope, expected the name of a registered region"
        assert memory_client.refusal("gpt", inputs, outputs=outputs or None) == (missing, expected)
    assert memory_client.over_tcp().nbytes == nbytes


def test_shared_input_over_the_limit_of_a_body_is_refused(tiny_repository: Path) -> None:
    options = "--max-shared-memory-bytes", "4096", "--max-body-bytes", "1000"
    with serve(tiny_repository, *options) as server, clients_of(server, tritonclient.http) as client:
        client.region("ids", np.zeros((1, 126), np.int64))
        status, error = client.refusal("gpt", [client.shared_input("ids", 1008, [1, 126])])
        assert (status, error) == ("413", "inputs: got 1008 bytes in shared memory, expected at most 1000 bytes")
