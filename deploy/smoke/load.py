"""Request vectors until SIGTERM. Exit with 1 if a request was lost, or its vectors changed.

    python load.py HOST:PORT KIND...

JSON kinds: `embed` for the native API, `infer` for the Open Inference Protocol, `openai` for OpenAI's. `tensors` sends
bytes to the native API, `large` enough of them for a streamed response. `grpc` uses the port after HTTP's. No request
is retried.
"""

import http.client
import json
import random
import signal
import sys
import threading
import time
from array import array
from collections import Counter

import grpc

from preblock.service.codecs.v2 import open_inference_pb2 as pb

CLIENTS = 6
PATHS = {"embed": "/models/minilm/embed", "infer": "/v2/models/minilm/infer", "openai": "/v1/embeddings"}
BYTES = "application/octet-stream"
ROWS = {"tensors": 1, "large": 64}

end = threading.Event()
lock = threading.Lock()
known: dict[str, object] = {}
versions: Counter[str] = Counter()
lost: list[str] = []
slowest = 0.0


def main() -> None:
    """Send requests from several threads, and print the totals."""
    address, *kinds = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    clients = [threading.Thread(target=ask, args=(address, kinds, seed)) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    answered = ", ".join(f"{count} by version {version}" for version, count in sorted(versions.items()))
    print(f"{sum(versions.values())} answered ({answered}), {len(lost)} lost; the slowest took {slowest:.2f} s")
    print(*lost[:10], sep="\n")
    sys.exit(1 if lost or not versions else 0)


def ask(address: str, kinds: list[str], seed: int) -> None:
    """Send one request after another, and replace the connection now and then."""
    draw = random.Random(seed)
    connection = http.client.HTTPConnection(address, timeout=30)
    host, _, port = address.rpartition(":")
    channel = grpc.insecure_channel(f"{host}:{int(port) + 1}", [("grpc.use_local_subchannel_pool", 1)])
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    while not end.is_set():
        kind, length = draw.choice(kinds), draw.choice([1, 3, 32, 128])
        if draw.random() < 0.2:
            connection.close()
        begin, ids = time.monotonic(), list(range(1000, 1000 + length))
        try:
            found = called(infer, ids) if kind == "grpc" else answer(connection, kind, ids)
        except (OSError, http.client.HTTPException, ValueError, grpc.RpcError) as error:
            lose(f"{kind} of {length} tokens: {error!r}")
            connection.close()
        else:
            note(f"{kind} {length}", found, time.monotonic() - begin)
        time.sleep(0.01)


def answer(connection: http.client.HTTPConnection, kind: str, ids: list[int]) -> dict[str, object]:
    """Return the answer to ids of one row.

    Raises:
        ValueError: the status is not 200.

    """
    if kind in ROWS:
        return answer_bytes(connection, ROWS[kind], ids)
    body: dict[str, object] = {"input_ids": [ids]}
    if kind == "infer":
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, len(ids)], "data": ids}
        body = {"inputs": [tensor], "outputs": [{"name": "embeddings"}]}
    if kind == "openai":
        body = {"model": "minilm", "input": ids, "pooling": "mean"}
    connection.request("POST", PATHS[kind], json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise ValueError(f"{response.status} {content[:200]!r}")
    found: dict[str, object] = json.loads(content)
    return found


def answer_bytes(connection: http.client.HTTPConnection, rows: int, ids: list[int]) -> dict[str, object]:
    """Return the answer to `rows` rows of the same ids, sent as bytes."""
    path, body = f"{PATHS['embed']}?shape={rows},{len(ids)}", array("q", ids * rows).tobytes()
    connection.request("POST", path, body, {"Content-Type": BYTES, "Accept": BYTES})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise ValueError(f"{response.status} {content[:200]!r}")
    return {"version": response.headers["Preblock-Version"], "embeddings": content}


def called(infer: grpc.UnaryUnaryMultiCallable, ids: list[int]) -> dict[str, object]:
    """Return the answer over gRPC."""
    sent = pb.ModelInferRequest(model_name="minilm", raw_input_contents=[array("q", ids).tobytes()])
    sent.inputs.add(name="input_ids", datatype="INT64", shape=[1, len(ids)])
    sent.outputs.add(name="embeddings")
    found = pb.ModelInferResponse.FromString(infer(sent.SerializeToString(), timeout=30))
    return {"version": found.model_version, "embeddings": found.raw_output_contents[0]}


def note(request: str, found: dict[str, object], seconds: float) -> None:
    """Count an answer, and compare its vectors with the first answer; every version has the same vectors."""
    global slowest
    vectors = found.get("embeddings") or found.get("outputs") or found.get("data")
    with lock:
        versions[str(found.get("version") or found.get("model_version"))] += 1
        slowest = max(slowest, seconds)
    if known.setdefault(request, vectors) != vectors:
        lose(f"{request}: other bits than before")


def lose(why: str) -> None:
    """Count a lost request."""
    with lock:
        lost.append(why)


main()
