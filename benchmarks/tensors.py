"""Rates of tensor requests over HTTP, against a bare ASGI application with canned answers of the same size.

    python -m benchmarks.tensors
    python -m benchmarks.tensors --with keys tls tracing proxies lines pages

Serves gpt2-small of `model_repository`, and in another process a bare ASGI application in the same server with the same
settings. Both run on one core; `wrk` (https://github.com/wg/wrk, install it first) runs on another. In each round both
take turns, protocol by protocol and shape by shape. Prints medians: requests per second of the bare application, and
the ratio of each protocol. Exits with 1 if a ratio is below its floor.

`--with` turns on optional features of `benchmarks/guards.py`. TLS and trusted proxies are parts of the server, so the
bare application has them too. `--ids` adds a unique X-Request-Id to each request.
"""

import argparse
import io
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import uvicorn

from benchmarks.guards import GUARDS, guarded
from benchmarks.streams import CLIENT_CORE, MODEL, SERVER_CORE, WIDTH, running
from preblock.service.core.settings import Settings
from preblock.service.server.addresses import bind
from preblock.service.server.run import configure

SHAPES = ((1, 1), (1, 128), (8, 128), (32, 512))
CONNECTIONS = 4
FLOORS: dict[int, dict[str, tuple[float, ...]]] = {
    4: {"native": (0.55, 0.55, 0.85, 0.65), "V2": (0.45, 0.48, 0.80, 0.65)},
    64: {"native": (0.9,), "V2": (0.9,)},
}
"""Least ratio to the bare application, by connections and protocol, for the first shapes of `SHAPES`."""
NPY, BYTES = "application/x-npy", "application/octet-stream"


class Protocol(NamedTuple):
    """A request: path, body and headers."""

    path: str
    body: bytes
    headers: dict[str, str]


def native(ids: Any) -> Protocol:
    """Return a request of the native API, with `.npy` in both directions."""
    body = io.BytesIO()
    np.save(body, ids)
    return Protocol(f"/models/{MODEL}/embed", body.getvalue(), {"Content-Type": NPY, "Accept": NPY})


def open_inference(ids: Any) -> Protocol:
    """Return a request of the Open Inference Protocol, with binary tensors in both directions."""
    tensor = {"name": "input_ids", "shape": ids.shape, "datatype": "INT64"}
    document = {
        "inputs": [tensor | {"parameters": {"binary_data_size": ids.nbytes}}],
        "outputs": [{"name": "embeddings", "parameters": {"binary_data": True}}],
    }
    header = orjson.dumps(document)
    headers = {"Content-Type": BYTES, "Inference-Header-Content-Length": str(len(header))}
    return Protocol(f"/v2/models/{MODEL}/infer", header + ids.tobytes(), headers)


def with_headers(protocol: Protocol, headers: dict[str, str]) -> Protocol:
    """Return a request with further headers."""
    return protocol._replace(headers=protocol.headers | headers)


PROTOCOLS = {"native": native, "V2": open_inference}


async def bare(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Read the body of a request, and answer with the canned bytes of its path."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    content = CANNED[scope["path"]]
    headers = [(b"content-type", BYTES.encode()), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


CANNED = {f"/{batch}/{length}": bytes(4 * batch * length * WIDTH) for batch, length in SHAPES}


def serve_bare() -> None:
    """Serve the bare application, and print its port."""
    listener = bind("port", "127.0.0.1", 0)
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(configure(Settings(port=0), bare)).run(sockets=[listener])


IDS = """
local number = 0
request = function()
  number = number + 1
  wrk.headers["X-Request-Id"] = number
  return wrk.format()
end
"""
"""Lua code to add a unique `X-Request-Id` to each request."""


def script(folder: Path, name: str, protocol: Protocol, more: str = "") -> Path:
    """Write a request as a Lua script for wrk, with `more` at its end."""
    body = "".join(f"\\{byte:03d}" for byte in protocol.body)
    headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in protocol.headers.items())
    file = folder / f"{name}.lua"
    file.write_text(f'wrk.method = "POST"\nwrk.body = "{body}"\n{headers}{more}')
    return file


def rate(port: int, path: str, lua: Path, seconds: float, connections: int, scheme: str = "http") -> float:
    """Return the requests per second of wrk."""
    command = ["taskset", "-c", CLIENT_CORE, "wrk", "-t", 1, "-c", connections, "-d", f"{seconds:g}s", "-s", lua]
    command += ["--timeout", "60s"]
    command.append(f"{scheme}://127.0.0.1:{port}{path}")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(done.stdout)
    answered = float(re.findall(r"Requests/sec:\s+(\S+)", done.stdout)[0])
    if not answered:  # 50 MB over TLS on a busy machine
        raise RuntimeError(f"--seconds: got {seconds:g}, in which nothing was answered at {path}")
    return answered


def main() -> None:
    """Serve, measure, and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), metavar="N", help="measure the first N shapes only")
    parser.add_argument("--with", nargs="+", choices=GUARDS, default=[], dest="guards", help="features to turn on")
    parser.add_argument("--ids", action="store_true", help="add a unique X-Request-Id to each request")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        serve_bare()
        return
    preblock = Path(sys.executable).parent / "preblock"
    scheme = "https" if "tls" in options.guards else "http"
    pinned = ("taskset", "-c", SERVER_CORE)
    random = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        guarded(options.guards, Path(folder)) as headers,
        running(*pinned, preblock, "serve", "--port", 0) as (_, port),
        running(*pinned, sys.executable, "-m", "benchmarks.tensors", "--bare") as (_, bare_port),
    ):
        protocols = {
            (shape, name): with_headers(protocol(random.integers(0, 50257, shape)), headers)
            for shape in SHAPES[: options.shapes]
            for name, protocol in PROTOCOLS.items()
        }
        found: dict[tuple[tuple[int, int], str], list[tuple[float, float]]] = {case: [] for case in protocols}
        for _ in range(options.rounds):
            for (shape, name), protocol in protocols.items():
                lua = script(Path(folder), name, protocol, IDS if options.ids else "")
                how = lua, options.seconds, options.connections, scheme
                floor = rate(bare_port, f"/{shape[0]}/{shape[1]}", *how)
                ours = rate(port, protocol.path, *how)
                found[shape, name].append((floor, ours / floor))
    on = f", with {' '.join([*options.guards, *['ids'] * options.ids])}" if options.guards or options.ids else ""
    print(f"{options.connections} connections{on}, load {os.getloadavg()[0]:.1f}")
    missed = False
    for (shape, name), rounds in found.items():
        floors, ratios = zip(*rounds, strict=True)
        ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
        least = dict(zip(SHAPES, FLOORS.get(options.connections, {}).get(name, ()), strict=False)).get(shape, 0)
        missed |= ratio < least
        held = f", {'missed' if ratio < least else 'held'}: at least {least}" if least else ""
        print(f"{shape} {name}: {ratio:.2f} of {statistics.median(floors):.0f}/s ({spread}){held}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
