"""MLServer's types and codecs, over HTTP and gRPC; run in an environment of its own with the addresses of a server."""

import json
import sys
import urllib.request
from typing import Any

import grpc
import numpy as np
from mlserver import types
from mlserver.codecs import NumpyCodec
from mlserver.grpc import converters
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

HTTP, GRPC = sys.argv[1:]
IDS = np.array([[1, 2, 3], [4, 5, 6]])


def ask(path: str, body: str | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(HTTP + path, None if body is None else body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        content: bytes = answer.read()
    return content


def vectors(answer: types.InferenceResponse) -> str:
    return str(NumpyCodec.decode_output(answer.outputs[0]).astype(np.float32).tobytes().hex())


def ask_grpc(stub: Any) -> list[str]:
    """Return the vectors for the same types over gRPC, for ids in the message and as bytes."""
    sent = [
        converters.ModelInferRequestConverter.from_types(asked, model_name="gpt", use_raw=raw) for raw in (False, True)
    ]
    return [vectors(converters.ModelInferResponseConverter.to_types(stub.ModelInfer(message))) for message in sent]


tensor = NumpyCodec.encode_input("input_ids", IDS)
asked = types.InferenceRequest(id="7", inputs=[tensor], parameters=types.Parameters(content_type="np"))
answer = types.InferenceResponse.model_validate_json(ask("/v2/models/gpt/infer", asked.model_dump_json()))
model = types.MetadataModelResponse.model_validate_json(ask("/v2/models/gpt"))
index = types.RepositoryIndexResponse.model_validate_json(ask("/v2/repository/index", "{}"))
found: dict[str, Any] = {
    "inputs": [described.name for described in model.inputs],
    "index": [[item.name, item.version, str(item.state)] for item in index.root],
    "vectors": [vectors(answer)],
}
with grpc.insecure_channel(GRPC) as channel:
    found["vectors"] += ask_grpc(GRPCInferenceServiceStub(channel))
print(json.dumps(found))  # noqa: T201 - the output of a script
