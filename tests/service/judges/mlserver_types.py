"""MLServer's types and codecs, over HTTP; run in an environment of its own with the address of a server."""

import json
import sys
import urllib.request
from typing import Any

import numpy as np
from mlserver import types
from mlserver.codecs import NumpyCodec

HTTP = sys.argv[1]
IDS = np.array([[1, 2, 3], [4, 5, 6]])


def ask(path: str, body: str | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(HTTP + path, None if body is None else body.encode(), headers)
    with urllib.request.urlopen(request) as answer:
        content: bytes = answer.read()
    return content


tensor = NumpyCodec.encode_input("input_ids", IDS)
asked = types.InferenceRequest(id="7", inputs=[tensor], parameters=types.Parameters(content_type="np"))
answer = types.InferenceResponse.model_validate_json(ask("/v2/models/gpt/infer", asked.model_dump_json()))
model = types.MetadataModelResponse.model_validate_json(ask("/v2/models/gpt"))
server = types.MetadataServerResponse.model_validate_json(ask("/v2"))
index = types.RepositoryIndexResponse.model_validate_json(ask("/v2/repository/index", "{}"))
found: dict[str, Any] = {
    "server": server.name,
    "inputs": [described.name for described in model.inputs],
    "index": [[item.name, item.version, str(item.state)] for item in index.root],
    "id": answer.id,
    "vectors": NumpyCodec.decode_output(answer.outputs[0]).astype(np.float32).tobytes().hex(),
}
print(json.dumps(found))  # noqa: T201 - what a script says
