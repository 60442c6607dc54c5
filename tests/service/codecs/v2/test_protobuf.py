"""The generated messages. Oracles: tritonclient's own messages, and protoc.

Our messages and theirs register the same names, and a process can hold a name only once. So each runs in its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

DESCRIBE = """
import json
from {module} import DESCRIPTOR

def fields(message, prefix=""):
    name = prefix + message.name
    yield name, {{
        field.name: [
            field.number, field.type, field.is_repeated,
            field.containing_oneof and field.containing_oneof.name, field.message_type and field.message_type.full_name,
            field.enum_type and {{value.name: value.number for value in field.enum_type.values}},
        ]
        for field in message.fields
    }}
    for nested in message.nested_types:
        yield from fields(nested, name + ".")

print(json.dumps({{
    "package": DESCRIPTOR.package,
    "messages": dict(
        pair for file in (DESCRIPTOR, *DESCRIPTOR.dependencies)
        for message in file.message_types_by_name.values() for pair in fields(message)
    ),
    "methods": {{
        method.full_name: [method.input_type.full_name, method.output_type.full_name,
                           method.client_streaming, method.server_streaming]
        for service in DESCRIPTOR.services_by_name.values() for method in service.methods
    }},
}}))
"""


def describe(module: str) -> Any:
    """Return the descriptor of `module`, read in a process of its own."""
    run = subprocess.run([sys.executable, "-c", DESCRIBE.format(module=module)], capture_output=True, check=True)
    return json.loads(run.stdout)


def test_protobuf_module_matches_tritonclient() -> None:
    ours, theirs = map(describe, ("preblock.service.codecs.v2.open_inference_pb2", "tritonclient.grpc.service_pb2"))
    assert ours["package"] == theirs["package"] == "inference"
    assert len(ours["methods"]) == 18
    assert ours["methods"].items() <= theirs["methods"].items()
    assert len(ours["messages"]) >= 40
    lacking = set()
    for name, fields in ours["messages"].items():
        assert fields.items() <= theirs["messages"][name].items(), name
        if theirs["messages"][name].keys() - fields.keys():
            lacking.add(name)
    # Their missing fields have no meaning for this server.
    assert lacking == {"ModelConfig", "ModelInput", "ModelOutput", "ModelVersionPolicy", "ModelInstanceGroup"}


def test_generated_protobuf_module_is_current(tmp_path: Path) -> None:
    proto = "preblock/service/codecs/v2/open_inference.proto"
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, proto], check=True, cwd=ROOT)
    written = {file.name: file.read_bytes() for file in (tmp_path / proto).parent.iterdir()}
    assert sorted(written) == ["open_inference_pb2.py", "open_inference_pb2.pyi"]
    assert written == {name: (ROOT / "service/codecs/v2" / name).read_bytes() for name in written}
