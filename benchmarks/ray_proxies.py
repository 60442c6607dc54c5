"""The service behind the proxies of Ray Serve, beside its own server.

    python -m benchmarks.ray_proxies [--rounds N] [--seconds S]

Needs the environment of `make test-ray`. Serves gpt2-small of `model_repository` on one core three times: by `preblock
serve`, and by the application of `deploy/ray` behind the default proxy and behind Ray's HAProxy. The load of `preblock
bench` runs on another core, over 4 connections. All take turns in each round. Prints the medians of requests per second
and of the median latency; `steps` are steps of decode streams.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.servers import PREBLOCK, descendants
from benchmarks.streams import MODEL, SERVER_CORE, be_the_client, running
from preblock.bench.load import measure
from preblock.bench.workload import LoadTarget
from preblock.client import connect
from tests.support.servers import free_port

RAY_PYTHON = Path(".venv/ray/bin/python")
SERVE = """
import sys
import ray
from preblock_ray import deployment
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 2**20)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
options = {"autoscaling_config": None, "num_replicas": 1}
serve.run(deployment({"repository": sys.argv[2]}).options(**options).bind(), route_prefix="/", blocking=True)
"""
"""The program of Ray; its arguments are a port and a repository."""
CASES = (("npy", (1, 1)), ("npy", (1, 128)), ("npy", (8, 128)), ("npy", (32, 512)), ("steps", (1, 1)))
START_SECONDS = 180


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    if not RAY_PYTHON.exists():
        sys.exit(f"{RAY_PYTHON}: missing; `make test-ray` makes it")
    be_the_client()
    with ExitStack() as stack:
        command = ("taskset", "-c", SERVER_CORE, PREBLOCK, "serve", "--port", 0, "--log-level", "warning")
        addresses = {"preblock serve": f"http://127.0.0.1:{stack.enter_context(running(*command))[1]}"}
        addresses["Ray, default proxy"] = stack.enter_context(serve_with_ray("0"))
        addresses["Ray, HAProxy"] = stack.enter_context(serve_with_ray("1"))
        with connect(addresses["preblock serve"]) as client:
            model = client.model(MODEL)
        print(f"load {os.getloadavg()[0]:.1f}; medians of {options.rounds} rounds of {options.seconds:g} s")
        print("| case |", " | ".join(addresses), "|")
        print("|---" * (1 + len(addresses)) + "|")
        for protocol, shape in CASES:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in addresses}
            for _ in range(options.rounds):
                for name in random.sample(list(addresses), len(addresses)):
                    target = LoadTarget(addresses[name], MODEL)
                    result = measure(target, model, protocol, shape, seconds=options.seconds)
                    if result.errors:
                        sys.exit(f"{name}, {protocol} {shape}: {result.messages}")
                    found[name].append((result.rates["requests"], result.milliseconds["p50"]))
            cells = (map(statistics.median, zip(*figures, strict=True)) for figures in found.values())
            print(f"| {protocol} {shape} |", " | ".join(f"{rate:,.0f}/s, {ms:.3g} ms" for rate, ms in cells), "|")


@contextmanager
def serve_with_ray(has_haproxy: str) -> Iterator[str]:
    """Start a cluster of Ray on one core, and return the address of its proxy."""
    port = free_port()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (Path.cwd(), Path.cwd() / "deploy/ray"))),
        "RAY_SERVE_ENABLE_HA_PROXY": has_haproxy,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    repository = str(Path("model_repository").resolve())
    command = ["taskset", "-c", str(SERVER_CORE), str(RAY_PYTHON), "-c", SERVE, str(port), repository]
    process = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        with connect(f"http://127.0.0.1:{port}") as client:
            while not client.ready(MODEL):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("Ray does not serve")
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        family = descendants(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for pid in family:  # some outlive their parent
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


if __name__ == "__main__":
    main()
