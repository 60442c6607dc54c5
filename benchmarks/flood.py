"""Measure a good client beside a flood of the largest bodies: `python -m benchmarks.flood [KIND …]`.

The client sends small requests to an idle server; to this server while another one is flooded, so that both share the
processors with the flood; and to the flooded server. The script prints the three p99, and the ratios of the third to
the others. It also prints the resident memory of the flooded server before the flood, at its peak and ten seconds
after it. It exits with 1 if the ratio to the idle server is above MAX_RATIO, or the memory has grown by more than
MAX_GROWTH_BYTES.
"""

import gzip
import multiprocessing
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx
import numpy as np
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event, StreamEnded, StreamReset, TrailersReceived
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.support.artifacts import copy_artifact
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, infer_message, open_stub
from tests.support.processes import status_bytes
from tests.support.servers import serve

LIMIT = 16 * 2**20
CONNECTIONS = 40
SECONDS = 20.0
MAX_RATIO, MAX_GROWTH_BYTES = 5.0, 100 * 2**20
TOO_LARGE = b"8"
"""Status RESOURCE_EXHAUSTED of gRPC."""
PATH, STREAM = "/models/gpt/embed", "/models/gpt/decode"


def numbers(size: int) -> bytes:
    """Return a JSON body of `size` bytes."""
    return (b'{"input_ids": [' + b"1," * ((size - 20) // 2) + b"1]}").ljust(size)


BODIES = {
    "gzip": lambda: gzip.compress(numbers(LIMIT), 1),
    "gzip-beyond": lambda: gzip.compress(numbers(4 * LIMIT), 1),
    "json": lambda: numbers(LIMIT),
}


def over_http(server: tuple[str, str], kind: str) -> None:
    """Send HTTP bodies of a kind without end, over one connection."""
    body = BODIES[kind]()
    headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if kind.startswith("gzip") else {})
    with httpx.Client(base_url=server[0], timeout=300) as http:
        while True:
            with suppress(httpx.HTTPError):
                http.post(PATH, content=body, headers=headers)


def over_grpc(server: tuple[str, str], _: str) -> None:
    """Send messages of the limit without end, over one connection."""
    message = infer_message(np.ones((1, LIMIT // 8 - 16)))
    with open_stub(server[1], OWN_CONNECTION, NO_LIMIT) as stub:
        while True:
            with suppress(grpc.RpcError):
                stub.ModelInfer(message, wait_for_ready=True)


def over_grpc_stream(server: tuple[str, str], _: str) -> None:
    """Send messages of the limit over one stream without end, each after the answer to the last one."""
    message = infer_message(np.ones((1, LIMIT // 8 - 16)))
    with open_stub(server[1], OWN_CONNECTION, NO_LIMIT) as stub:
        answered = threading.Semaphore()
        for _response in stub.ModelStreamInfer(message for _ in iter(answered.acquire, None)):
            answered.release()


def over_compressed_grpc(server: tuple[str, str], _: str) -> None:
    """Send one message without end, over one connection. It expands to the limit.

    A client of gRPC's library would compress each message again, and take the processors from the server.
    """
    message = gzip.compress(infer_message(np.ones((1, LIMIT // 8 - 16))).SerializeToString())
    body = b"\1" + len(message).to_bytes(4, "big") + message
    host, _, port = server[1].rpartition(":")
    headers = {":method": "POST", ":scheme": "http", ":path": "/inference.GRPCInferenceService/ModelInfer"}
    headers |= {":authority": host, "te": "trailers", "content-type": "application/grpc", "grpc-encoding": "gzip"}
    http = H2Connection()
    with socket.create_connection((host, int(port))) as connection:
        http.initiate_connection()
        while True:
            stream = http.get_next_available_stream_id()
            http.send_headers(stream, list(headers.items()))
            for start in range(0, len(body), http.max_outbound_frame_size):
                http.send_data(stream, body[start : start + http.max_outbound_frame_size])
            http.end_stream(stream)
            while not any(isinstance(event, StreamEnded) for event in events(http, connection)):
                pass


def events(http: H2Connection, connection: socket.socket) -> list[Event]:
    """Send the frames of a connection, and return the events of the next received bytes.

    Raises:
        RuntimeError: the server has refused a call for another reason than its size, or has ended it or the connection.

    """
    connection.sendall(http.data_to_send())
    data = connection.recv(2**16)
    if not data:
        raise RuntimeError("the server has closed the connection")
    found = http.receive_data(data)
    for event in found:
        statuses = dict(event.headers).get(b"grpc-status") if isinstance(event, TrailersReceived) else None
        if isinstance(event, StreamReset | ConnectionTerminated) or statuses not in (None, TOO_LARGE):
            raise RuntimeError(event)
    return found


def over_websocket(server: tuple[str, str], _: str) -> None:
    """Send messages of JSON to a decode stream without end, over one connection."""
    body = numbers(LIMIT).decode()
    while True:
        with suppress(OSError, WebSocketException), connect(server[0].replace("http", "ws", 1) + STREAM) as stream:
            while True:
                stream.send(body)
                stream.recv()


KINDS = {
    **dict.fromkeys(BODIES, over_http),
    "grpc": over_grpc,
    "grpc-stream": over_grpc_stream,
    "grpc-gzip": over_compressed_grpc,
    "websocket": over_websocket,
}


def flood(server: tuple[str, str], kind: str) -> None:
    """Send bodies of a kind over CONNECTIONS connections until this process is killed.

    Args:
        server: address of HTTP, and address of gRPC.
        kind: row of `KINDS`.

    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for thread in as_completed([pool.submit(KINDS[kind], server, kind) for _ in range(CONNECTIONS)]):
            print(thread.exception(), file=sys.stderr, flush=True)
            os._exit(1)  # the other threads do not end


def measure(address: str) -> float:
    """Return the p99 of small requests over SECONDS, in milliseconds."""
    seconds = []
    with httpx.Client(base_url=address, timeout=300) as http:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            began = time.perf_counter()
            http.post(PATH, json={"input_ids": [[1, 2]]}).raise_for_status()
            seconds.append(time.perf_counter() - began)
    return float(1000 * np.quantile(seconds, 0.99))


def run(repository: Path, kind: str) -> bool:
    """Measure one kind of flood, print a line, and return whether both limits hold."""
    with serve(repository) as idle, serve(repository) as flooded:
        pid = flooded.process.pid
        alone, before = measure(idle.address), status_bytes(pid, "VmRSS")
        attacker = multiprocessing.get_context("spawn").Process(
            target=flood, args=((flooded.address, flooded.grpc), kind)
        )
        attacker.start()
        time.sleep(3)
        beside, during = measure(idle.address), measure(flooded.address)
        if not attacker.is_alive():
            raise SystemExit("the flood has ended early")
        attacker.kill()
        attacker.join()
        time.sleep(10)
        after, peak = status_bytes(pid, "VmRSS"), status_bytes(pid, "VmHWM")
    sizes = " ".join(
        f"{name} {size // 2**20} MB" for name, size in (("before", before), ("peak", peak), ("after", after))
    )
    print(
        f"{kind:12} p99 alone {alone:.1f} ms, beside a flooded server {beside:.1f} ms, of the flooded server "
        f"{during:.1f} ms; ratios {during / alone:.1f}, {during / beside:.1f}; {sizes}",
        flush=True,
    )
    return during <= MAX_RATIO * alone and after - before <= MAX_GROWTH_BYTES


def main() -> None:
    """Measure the kinds of flood of the command line; default: all."""
    with TemporaryDirectory() as folder:
        copy_artifact("gpt", Path(folder), "gpt")
        results = [run(Path(folder), kind) for kind in sys.argv[1:] or KINDS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
