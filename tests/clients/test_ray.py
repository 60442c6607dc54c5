"""The application of `deploy/ray` on three nodes of Ray in one machine: `make test-ray` makes the environment."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

import preblock
from preblock.client.errors import StreamClosed
from preblock.client.sync_client import Client
from preblock.client.sync_stream import DecodeStream
from tests.support.artifacts import Floats, make_repository, read_tables
from tests.support.load import STORED_GPT, Load, expected, step
from tests.support.paths import ROOT
from tests.support.servers import Server, free_port, serve
from tests.support.waiting import wait_until

PYTHON = ROOT / ".venv/ray/bin/python"
JUDGE = ROOT / "tests/clients/judges/ray_cluster.py"
IDS = [[1, 2, 3], [4, 5, 6]]
STREAMS = 9
RETRIES = 10
"""Ray's proxy notices a lost node after seconds."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "deploy/ray"))),
    "RAY_USAGE_STATS_ENABLED": "0",
    # The only proxy, on the head, would otherwise send everything to the replica of its own node.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
}
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with Ray; `make test-ray` makes it"),
    pytest.mark.timeout(600),
]


class RayCluster:
    """A running judge."""

    def __init__(self, address: str, process: "subprocess.Popen[str]") -> None:
        self.address, self._process = address, process

    def ask(self, command: str) -> int:
        """Send a command, and return the number of running replicas."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.replicas()

    def replicas(self) -> int:
        """Return the number in the next line of the judge."""
        assert self._process.stdout is not None
        return int(json.loads(self._process.stdout.readline()))


@pytest.fixture(scope="module")
def ray_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("ray"), gpt=STORED_GPT)


@pytest.fixture(scope="module")
def ray_tables(ray_repository: Path) -> dict[str, Floats]:
    return read_tables(ray_repository / "gpt" / "1")


@pytest.fixture(scope="module")
def bare(ray_repository: Path) -> Iterator[Server]:
    with serve(ray_repository) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(ray_repository: Path) -> Iterator[RayCluster]:
    port = free_port()
    command = [str(PYTHON), str(JUDGE), str(port), str(ray_repository)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        running = RayCluster(f"http://127.0.0.1:{port}", process)
        assert running.replicas() == 1
        yield running
        process.communicate("end\n", 120)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (
            "embed?shape=64,600",
            (np.arange(64 * 600) % 50).astype("<i8").tobytes(),
            {"Content-Type": "application/octet-stream", "Accept": "application/x-npy"},
        ),
        (
            "decode",
            json.dumps({"input_ids": [1, 2, 3]}).encode(),
            {"Content-Type": "application/json", "Accept": "text/event-stream"},
        ),
        ("embed", b'{"input_ids": [[50]]}', {"Content-Type": "application/json"}),
    ],
    ids=["large", "events", "invalid"],
)
def test_answers_equal_those_of_a_bare_server(
    cluster: RayCluster, bare: Server, path: str, body: bytes, headers: dict[str, str]
) -> None:
    through_ray, direct = (
        httpx.post(f"{address}/models/gpt/{path}", content=body, headers=headers | {"X-Request-Id": "same"}, timeout=60)
        for address in (cluster.address, bare.address)
    )
    assert through_ray.content == direct.content
    assert through_ray.status_code == direct.status_code
    assert through_ray.headers["Content-Type"] == direct.headers["Content-Type"]


def run_python(code: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-c", code, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, input=given, capture_output=True, text=True, check=False)


def test_ray_reads_the_configuration() -> None:
    code = "import sys, yaml; from ray.serve.schema import ServeDeploySchema; "
    code += "ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin))"
    text = (ROOT / "deploy/ray/serve.yaml").read_text()
    for given, status in ((text, 0), (text.replace("shutdown_timeout_s: 25", "shutdown_timeout_s: -1"), 1)):
        assert run_python(code, given=given).returncode == status


def test_illegal_settings_are_refused_before_replicas_start() -> None:
    code = "import json, sys, preblock_ray; preblock_ray.build(json.loads(sys.argv[1]))"
    for argument, message in (
        ({"workers": 2}, "workers: got 2, expected 1: Ray starts replicas instead"),
        ({"grpc_port": 8001}, "grpc_port: got 8001, expected none: Ray's proxy serves HTTP"),
        ({"repositry": "/models"}, "repositry"),
    ):
        done = run_python(code, json.dumps(argument))
        assert done.returncode == 1
        assert message in done.stderr


def test_no_call_is_lost_while_replicas_come_and_a_node_goes(
    cluster: RayCluster, ray_tables: dict[str, Floats]
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(preblock.connect(cluster.address, retries=RETRIES))
        loads = [Load(lambda: embed(client, ray_tables)) for _ in range(2)]

        def open_streams(resume: bool) -> list[Load]:
            streams = [stack.enter_context(client.decode("gpt", resume=resume)) for _ in range(STREAMS)]
            take = step if resume else step_or_fail
            return [Load(lambda stream=stream: take(stream, ray_tables)) for stream in streams]  # type: ignore[misc]

        ending: list[Load] = []
        try:
            loads += open_streams(resume=True)
            wait_until(lambda: cluster.ask("replicas") == 3, 120, 0.5)
            # Only new streams reach the new replicas.
            loads += open_streams(resume=True)
            ending += open_streams(resume=False)
            wait_until(lambda: all(load.done > 10 for load in [*loads, *ending]), 60)
            cluster.ask("remove")
            wait_until(lambda: any(load.failures for load in ending), 120)
            done = [load.done for load in loads]
            wait_until(lambda: all(load.done > before + 10 for load, before in zip(loads, done, strict=True)), 180)
            wait_until(lambda: cluster.ask("replicas") == 2, 60, 0.5)
        finally:
            for load in [*loads, *ending]:
                load.end()
        assert not [failure for load in loads for failure in load.failures]
    wait_until(lambda: cluster.ask("replicas") == 1, 120, 0.5)


def embed(client: Client, tables: dict[str, Floats]) -> int:
    assert np.array_equal(client.embed(IDS, model="gpt").vectors, expected(tables, IDS))
    return 200


def step_or_fail(stream: DecodeStream, tables: dict[str, Floats]) -> int:
    """Take a step; return 0 if the stream has ended."""
    try:
        return step(stream, tables)
    except StreamClosed:
        return 0
