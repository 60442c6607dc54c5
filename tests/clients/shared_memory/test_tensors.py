"""Tensors in shared memory, through tritonclient. Oracle: the same request over TCP."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import serialize_byte_tensor

from tests.clients.shared_memory.conftest import in_files
from tests.clients.shared_memory.shared_client import IDS, Client, clients_of
from tests.support.servers import serve


def test_shared_tensors_have_the_bits_of_tcp(memory_client: Client) -> None:
    expected = memory_client.over_tcp()
    memory_client.region("ids", IDS)
    empty = np.zeros(expected.size + 2, np.float32)
    target = memory_client.region("vectors", empty)
    output = memory_client.output("vectors", expected.nbytes + 4, 4)
    for _ in range(2):
        answer = memory_client.infer("gpt", [memory_client.shared_input("ids", IDS.nbytes)], outputs=[output])
        assert target.content() == bytes(4) + expected.tobytes() + bytes(4)
        target.fill(empty)
    described, shape = answer.get_output("embeddings"), list(expected.shape)
    named = {"region": "vectors", "offset": 4, "byte_size": expected.nbytes}
    if memory_client.http:
        parameters = {f"shared_memory_{name}": value for name, value in named.items()}
        assert described == {"name": "embeddings", "datatype": "FP32", "shape": shape, "parameters": parameters}
    else:
        assert (described.datatype, list(described.shape)) == ("FP32", shape)
        told = {name: described.parameters[f"shared_memory_{name}"] for name in named}
        assert [told["region"].string_param, told["offset"].int64_param] == ["vectors", 4]
        assert told["byte_size"].int64_param == expected.nbytes
        assert list(answer.get_response().raw_output_contents) == [b""]


def test_inputs_and_outputs_share_one_region(memory_client: Client) -> None:
    expected, size = memory_client.over_tcp(), memory_client.over_tcp().nbytes
    content = np.zeros(IDS.nbytes + size + 16, np.uint8)
    content[: IDS.nbytes] = IDS.reshape(-1).view(np.uint8)
    target = memory_client.region("all", content)
    outputs = [
        memory_client.output("all", 16, IDS.nbytes + size, "lengths"),
        memory_client.output("all", size, IDS.nbytes),
    ]
    memory_client.infer("gpt", [memory_client.shared_input("all", IDS.nbytes)], outputs=outputs)
    assert target.content() == IDS.tobytes() + expected.tobytes() + np.array([3, 3]).tobytes()


@in_files
def test_shared_and_plain_tensors_mix(memory_client: Client) -> None:
    """A repeated request reads its offset again."""
    memory_client.region("ids", IDS)
    offset = memory_client.region("offset", np.array([0]))
    target = memory_client.region("vectors", np.zeros_like(memory_client.over_tcp()))
    inputs = [
        memory_client.shared_input("ids", IDS.nbytes),
        memory_client.shared_input("offset", 8, [1], name="offset"),
    ]
    outputs = [
        memory_client.output("vectors", target.size),
        memory_client.module.InferRequestedOutput("next_offset"),
    ]
    for number in (0, 3):
        offset.fill(np.array([number]))
        answer = memory_client.infer("gpt", inputs, outputs=outputs)
        assert target.content() == memory_client.over_tcp(parameters={"offset": number}).tobytes()
        assert answer.as_numpy("next_offset").tolist() == [number + 3, number + 3]
    plain = memory_client.infer("gpt", inputs)
    assert plain.as_numpy("embeddings").tobytes() == target.content()


@pytest.mark.parametrize(("dtype", "offset"), [("FP32", 0), ("FP32", 4), ("FP16", 2)])
def test_large_shared_output_has_the_bits_of_tcp(memory_client: Client, dtype: str, offset: int) -> None:
    parameters = {"dtype": dtype}
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    expected = memory_client.over_tcp(ids, "wide", parameters=parameters)
    target = memory_client.region("vectors", np.zeros(offset + expected.nbytes + 4, np.uint8))
    outputs = [memory_client.output("vectors", expected.nbytes, offset)]
    memory_client.infer("wide", [memory_client.plain_input(ids)], outputs=outputs, parameters=parameters)
    assert target.content() == bytes(offset) + expected.tobytes() + bytes(4)


@in_files
def test_texts_may_be_shared(memory_client: Client) -> None:
    texts = np.array([b"hello", b"a b"], object)
    content = np.frombuffer(serialize_byte_tensor(texts).item(), np.uint8)
    memory_client.region("text", content)
    shared = memory_client.shared_input("text", content.nbytes, [2], name="text", datatype="BYTES")
    plain = memory_client.module.InferInput("text", [2], "BYTES").set_data_from_numpy(texts)
    outputs = [memory_client.module.InferRequestedOutput(name) for name in ("embeddings", "lengths")]
    found, expected = (memory_client.infer("bert", [given], outputs=outputs) for given in (shared, plain))
    for name in ("embeddings", "lengths"):
        assert found.as_numpy(name).tobytes() == expected.as_numpy(name).tobytes()


@in_files
def test_shrunk_region_is_an_error_and_server_goes_on(memory_client: Client) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    source, target = memory_client.region("ids", ids), memory_client.region("vectors", np.zeros((*ids.shape, 768), "f"))
    inputs = [memory_client.shared_input("ids", ids.nbytes, ids.shape)]
    outputs = [memory_client.output("vectors", target.size)]
    memory_client.infer("wide", inputs, outputs=outputs)
    for where, memory, end in (
        ("outputs[0]", target, target.size - 1),
        ("inputs[0]", source, source.size - 1),
        ("inputs[0]", source, 0),
    ):
        with Path("/dev/shm", memory.key).open("r+b") as file:
            file.truncate(end)
        status, error = memory_client.refusal("wide", inputs, outputs=outputs)
        assert status == memory_client.status_of(400, "INVALID_ARGUMENT")
        assert error.startswith(f"{where}.parameters: file of the region ")
        assert f"got {end} bytes, expected at least {memory.size} bytes, as at its registration" in error
    assert memory_client.over_tcp().size


def test_bad_ranges_are_refused(memory_client: Client) -> None:
    size, output, shared = memory_client.over_tcp().nbytes, memory_client.output, memory_client.shared_input
    for name, content in (("ids", IDS), ("wrong ids", np.array([[1, -1, 7]])), ("vectors", np.zeros(2 * size, "u1"))):
        memory_client.region(name, content)
    ids, end = shared("ids", IDS.nbytes), "parameters: shared_memory_offset + shared_memory_byte_size: got"
    few = f"outputs[0].parameters.shared_memory_byte_size: got {size - 1}, expected at least {size}, the bytes of "
    beyond = f"outputs[0].{end} {2 * size + 1}, expected at most {2 * size}, the bytes of the region vectors"
    same = "outputs[1].parameters: got the same bytes for embeddings and lengths, expected separate bytes"
    for tensor, outputs, message in (
        (ids, [output("vectors", size - 1)], few),
        (ids, [output("vectors", size, size + 1)], beyond),
        (ids, [output("vectors", size), output("vectors", 16, size - 1, "lengths")], same),
        (shared("ids", IDS.nbytes - 8), [], "input_ids: got 40 bytes, expected 48 bytes"),
        (shared("ids", IDS.nbytes, datatype="INT32"), [], "input_ids: got 48 bytes, expected 24 bytes"),
        (shared("ids", IDS.nbytes, offset=8), [], f"inputs[0].{end} 56, expected at most 48"),
        (shared("wrong ids", 24, (1, 3)), [], "input_ids[0][1]: got -1, expected 0 to 6"),
        (shared("nope", 8), [], "inputs[0].parameters.shared_memory_region: got nope, expected "),
        (ids, [output("nope", size)], "outputs[0].parameters.shared_memory_region: got nope, expected "),
    ):
        status = (404, "NOT_FOUND") if "nope" in message else (400, "INVALID_ARGUMENT")
        found = memory_client.refusal("gpt", [tensor], outputs=outputs or None)
        assert (found[0], found[1][: len(message)]) == (memory_client.status_of(*status), message)
    assert memory_client.over_tcp().nbytes == size


def test_shared_input_over_the_limit_of_a_body_is_refused(tiny_repository: Path) -> None:
    options = "--max-shared-memory-bytes", "4096", "--max-body-bytes", "1000"
    with serve(tiny_repository, *options) as server, clients_of(server, tritonclient.http) as client:
        client.region("ids", np.zeros((1, 126), np.int64))
        status, error = client.refusal("gpt", [client.shared_input("ids", 1008, [1, 126])])
        assert (status, error) == ("413", "inputs: got 1008 bytes in shared memory, expected at most 1000 bytes")
