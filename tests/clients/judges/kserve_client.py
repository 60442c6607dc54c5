"""KServe's clients, over HTTP and gRPC; run in an environment of its own with the addresses of a server and a model."""

import asyncio
import json
import sys
from typing import Any

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

IDS = np.array([[1, 2, 3], [4, 5, 6]])


def request(model: str, binary: bool, **more: Any) -> Any:
    tensor = InferInput("input_ids", [2, 3], "INT64")
    tensor.set_data_from_numpy(IDS, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=[tensor], request_id="7", **more)


def described(answer: Any) -> list[Any]:
    output = answer.outputs[0]
    return [answer.id, output.name, output.datatype, output.as_numpy().tobytes().hex()]


async def ask(http: str, grpc: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {"answers": []}
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as rest:
        found["http"] = [await rest.is_server_live(http), await rest.is_server_ready(http)]
        found["http"] += [await rest.is_model_ready(http, name) for name in (model, "nope")]
        for binary_in in (False, True):
            for binary_out in (False, True):
                asked = request(model, binary_in, parameters={"binary_data_output": binary_out})
                found["answers"].append(described(await rest.infer(http, asked, model_name=model)))
        try:
            await rest.infer(http, request(model, False), model_name="nope")
        except httpx.HTTPStatusError as error:
            found["refused"] = str(error)
    async with InferenceGRPCClient(grpc, retries=0) as client:
        found["grpc"] = [await client.is_server_live(), await client.is_server_ready()]
        found["grpc"] += [await client.is_model_ready(name) for name in (model, "nope")]
        typed = InferInput("input_ids", [2, 3], "INT64", data=IDS.ravel().tolist())
        for asked in (request(model, True), InferRequest(model_name=model, infer_inputs=[typed], request_id="7")):
            found["answers"].append(described(await client.infer(asked)))
    return found


print(json.dumps(asyncio.run(ask(*sys.argv[1:]))))  # noqa: T201 - the output of a script
