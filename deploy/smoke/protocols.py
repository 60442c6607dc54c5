"""Send requests over every protocol through a proxy: `python protocols.py PROXY REPLICA`, two host names of the stack.

Compare some answers of the proxy with the answers of a replica.
"""

import http.client
import json
import queue
import struct
import sys
from collections.abc import Iterator

import grpc
import websockets.exceptions
from websockets.sync.client import connect

from preblock.service.codecs.v2 import open_inference_pb2 as wire

PROXY, REPLICA = sys.argv[1:]
HTTP, DIRECT, GRPC = f"{PROXY}:8080", f"{REPLICA}:8000", f"{PROXY}:8081"
IDS = [101, 7592, 2088, 102]
LARGEST = 128, 512


def main() -> None:
    """Run the check of each protocol, and exit with the names of the failed ones."""
    wrong = [
        protocol.__doc__
        for protocol in (native, large, websocket, events, lines, calls, streams, numbers)
        if not protocol()
    ]
    sys.exit(f"not through the proxy: {' '.join(map(str, wrong))}" if wrong else 0)


def ask(host: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Send a POST request, and return the status and the body."""
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read()


def native() -> bool:
    """JSON."""
    body = json.dumps({"input_ids": [IDS]}).encode()
    through, direct = (
        ask(host, "/models/minilm/embed", body, Content_Type="application/json") for host in (HTTP, DIRECT)
    )
    return through == direct and through[0] == 200


def large() -> bool:
    """65536 tokens in, 100 MB of vectors out."""
    rows, length = LARGEST
    ids = struct.pack(f"<{rows * length}q", *(1000 + index % 20000 for index in range(rows * length)))
    types = {"Content_Type": "application/octet-stream", "Accept": "application/octet-stream"}
    path = f"/models/minilm/embed?shape={rows},{length}"
    through, direct = (ask(host, path, ids, **types) for host in (HTTP, DIRECT))
    return through == direct and len(through[1]) == rows * length * 384 * 4


def websocket() -> bool:
    """A WebSocket, step by step."""
    with connect(f"ws://{HTTP}/models/minilm/decode") as stream:
        found = []
        for token in IDS:
            stream.send(json.dumps({"input_ids": [token]}))
            found.append(json.loads(stream.recv())["next_offset"])
        stream.send(json.dumps({"close": True}))
        try:
            while True:
                stream.recv()
        except websockets.exceptions.ConnectionClosedOK:
            return found == [[1], [2], [3], [4]]


def events() -> bool:
    """Server-sent events."""
    body = json.dumps({"input_ids": IDS}).encode()
    status, content = ask(
        HTTP, "/models/minilm/decode", body, Accept="text/event-stream", Content_Type="application/json"
    )
    return status == 200 and content.count(b"data:") == len(IDS) + 1 and b"event: end" in content


def lines() -> bool:
    """NDJSON lines; each is answered before the next is sent."""
    connection = http.client.HTTPConnection(HTTP, timeout=10)
    connection.putrequest("POST", "/models/minilm/decode")
    connection.putheader("Content-Type", "application/x-ndjson")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()

    def send(line: bytes) -> None:
        connection.send(b"%x\r\n%b\r\n" % (len(line), line))

    send(json.dumps({"input_ids": IDS[:1]}).encode() + b"\n")
    answer = connection.getresponse()
    found = [json.loads(answer.readline())["next_offset"]]
    for token in IDS[1:]:
        send(json.dumps({"input_ids": [token]}).encode() + b"\n")
        found.append(json.loads(answer.readline())["next_offset"])
    connection.send(b"0\r\n\r\n")
    return answer.status == 200 and found == [[1], [2], [3], [4]]


def request(ids: list[int]) -> wire.ModelInferRequest:
    """Return a request of the Open Inference Protocol."""
    tensor = wire.ModelInferRequest.InferInputTensor(name="input_ids", datatype="INT64", shape=[1, len(ids)])
    tensor.contents.int64_contents.extend(ids)
    output = wire.ModelInferRequest.InferRequestedOutputTensor(name="embeddings")
    return wire.ModelInferRequest(model_name="minilm", inputs=[tensor], outputs=[output])


def calls() -> bool:
    """gRPC calls."""
    with grpc.insecure_channel(GRPC) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            wire.ModelInferRequest.SerializeToString,
            wire.ModelInferResponse.FromString,
        )
        refused = grpc.StatusCode.OK
        try:
            call(request([-1]), timeout=10)
        except grpc.RpcError as error:
            refused = error.code()
        return len(call(request(IDS), timeout=10).raw_output_contents[0]) == len(IDS) * 384 * 4 and (
            refused == grpc.StatusCode.INVALID_ARGUMENT
        )


def streams() -> bool:
    """gRPC streams; each request is answered before the next is sent."""
    answers: queue.Queue[None] = queue.Queue()

    def steps() -> Iterator[wire.ModelInferRequest]:
        for index, token in enumerate(IDS):
            step = request([token])
            step.parameters["sequence_id"].int64_param = 7
            step.parameters["sequence_start"].bool_param = index == 0
            yield step
            answers.get(timeout=10)

    with grpc.insecure_channel(GRPC) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            wire.ModelInferRequest.SerializeToString,
            wire.ModelStreamInferResponse.FromString,
        )
        count = 0
        for answer in call(steps(), timeout=20):
            if answer.error_message:
                return False
            count += 1
            answers.put(None)
    return count == len(IDS)


def numbers() -> bool:
    """No metrics of an arbitrary replica."""
    connection = http.client.HTTPConnection(HTTP, timeout=10)
    connection.request("GET", "/metrics")
    return connection.getresponse().status == 404


main()
