"""The generated messages, and requests with raw contents as views. Oracles: tritonclient's messages, protoc, protobuf.

Our messages and theirs register the same names, and a process can hold a name only once. So ours have another process.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from tests.support.paths import ROOT


def numbers_of(messages: Iterable[Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Return messages and their enumerations by name, with the numbers and types of their fields, or their values."""
    found: dict[str, dict[str, Any]] = {}
    for message in messages:
        name = prefix + message.name
        found[name] = {
            field.name: (field.number, field.type, field.label, field.type_name, field.HasField("oneof_index"))
            for field in message.field
        }
        for kind in message.enum_type:
            found[f"{name}.{kind.name}"] = {value.name: value.number for value in kind.value}
        found |= numbers_of(message.nested_type, f"{name}.")
    return found


def test_protobuf_messages_match_tritonclient(tmp_path: Path) -> None:
    proto = "preblock/service/codecs/v2/open_inference.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={tmp_path}/ours", proto]
    subprocess.run(command, check=True, cwd=ROOT)
    (ours,) = FileDescriptorSet.FromString((tmp_path / "ours").read_bytes()).file
    theirs = [FileDescriptorProto.FromString(m.DESCRIPTOR.serialized_pb) for m in (service_pb2, model_config_pb2)]
    assert {file.package for file in (ours, *theirs)} == {"inference"}
    (service,) = ours.service
    assert len(service.method) == 18
    assert all(method in [*theirs[0].service[0].method] for method in service.method)
    messages = numbers_of(ours.message_type)
    known = numbers_of(message for file in theirs for message in file.message_type)
    assert len(messages) >= 40
    assert all(numbers.items() <= known[name].items() for name, numbers in messages.items())
    lacking = {name for name, numbers in messages.items() if known[name].keys() - numbers.keys()}
    # Their missing fields have no meaning for this server.
    assert lacking == {"ModelConfig", "ModelInput", "ModelOutput", "ModelVersionPolicy", "ModelInstanceGroup"}


@pytest.mark.parametrize("name", ["codecs/v2/open_inference", "artifacts/onnx_subset"])
def test_generated_protobuf_module_is_current(name: str, tmp_path: Path) -> None:
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"preblock/service/{name}.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs], check=True, cwd=ROOT)
    for module in (f"{name}_pb2.py", f"{name}_pb2.pyi"):
        assert (tmp_path / "preblock/service" / module).read_text() == (ROOT / "service" / module).read_text()


SCRIPT = """
import random
from google.protobuf.message import DecodeError
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.protobuf import MAX_SPLIT_FIELDS, MIN_SPLIT_BYTES, read_request
from preblock.service.core.errors import Malformed

def parse(message):
    try:
        fields = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return None
    raw = list(fields.raw_input_contents)
    del fields.raw_input_contents[:]
    return fields.SerializeToString(deterministic=True), raw

def read(message):
    try:
        fields, raw = read_request(message)
    except Malformed:
        return None
    kinds.add(type(raw).__name__)
    raw = [bytes(content) for content in raw]
    del fields.raw_input_contents[:]
    return fields.SerializeToString(deterministic=True), raw

def draw():
    message = pb.ModelInferRequest(model_name="gpt", id=random.choice(["", "7", "x" * 300]))
    for name in random.sample(["input_ids", "offset", "attention_mask"], random.randrange(4)):
        message.inputs.add(name=name, datatype="INT64", shape=[1, random.choice([3, 2**20])])
        message.raw_input_contents.append(random.randbytes(random.choice([0, 8, MIN_SPLIT_BYTES])))
    message.parameters["sequence_id"].int64_param = -1
    # Unknown fields of every wire type: 9 varint, 10 and 11 of fixed width, 12 bytes, 13 a group.
    unknown = [b"\\x48\\x96\\x01", b"\\x51" + bytes(8), b"\\x5d" + bytes(4), b"\\x62\\x01a", b"\\x6b\\x6c"]
    parts = [message.SerializeToString(), *random.sample(unknown, random.randrange(3))]
    random.shuffle(parts)
    return b"".join(parts) + b"\\x3a\\x80\\x80\\x04" + bytes(MIN_SPLIT_BYTES)

random.seed(0)
kinds, refused = set(), 0
for _ in range(300):
    message = draw()
    assert parse(message) == read(message)
    for _ in range(5):
        changed = bytearray(message)
        for _ in range(random.randrange(1, 4)):
            changed[random.choice([random.randrange(80), random.randrange(len(changed))])] = random.randrange(256)
        changed = bytes(changed)[: random.choice([len(changed), random.randrange(len(changed))])]
        expected = parse(changed)
        refused += expected is None
        assert read(changed) == expected, changed[:100]
empty = b"\\x3a\\x00" * MIN_SPLIT_BYTES  # more entries than `MAX_SPLIT_FIELDS`
assert read(empty) == parse(empty)
for endless in (b"\\x48" + b"\\x96" * 11, b"\\x48\\x96"):  # an integer of too many bytes, and one cut off
    message = draw()[::1] + endless
    assert read(message) is parse(message) is None
long_tag = b"\\xba\\x80\\x80\\x80\\x80\\x80\\x00" + b"\\x80\\x80\\x04" + bytes(MIN_SPLIT_BYTES)
assert read(long_tag) is parse(long_tag) is None
assert kinds == {"list", "RepeatedScalarContainer"} and refused > 100, (kinds, refused)
print("ok")
"""


def test_read_request_equals_protobuf_for_any_bytes() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("ok\n", "")
