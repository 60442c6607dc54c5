"""Servers started from the command line."""

import shutil
import socket
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest
import tritonclient.http
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from preblock.service.core.auth import new_key
from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.cli.command_line import failing
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, free_port, in_use, serve
from tests.support.waiting import wait_until

NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")


def test_serve_on_unusable_address_fails(tiny_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken, free = str(listener.getsockname()[1]), str(free_port())
        for options, message in (
            (["--port", taken], in_use(taken, "port")),
            (["--grpc-port", taken], in_use(taken, "grpc-port")),
            (["--port", free, "--grpc-port", free], f"--port and --grpc-port are both {free}; each needs its own port"),
            (["--host", "a..b"], "the host a..b is unknown: no name of a host"),
            (["--tei", "nope:1"], "tei: got nope, expected bert, gpt"),
        ):
            assert failing("serve", "--repository", tiny_repository, "--port", "0", *options, code=1) == message


@pytest.mark.skipif(cuda_unavailable_reason() is None, reason="CUDA works here")
def test_commands_without_cuda_fail_with_reason(tiny_repository: Path) -> None:
    for command in (["check"], ["serve"], ["verify", "gpt"]):
        message = failing(*command, "--repository", tiny_repository, "--provider", "cuda", code=1, PREBLOCK_PORT="0")
        assert message == f"provider cuda cannot be used: {cuda_unavailable_reason()}"


@NEEDS_CURL
def test_banner_curl_command_embeds_text(tiny_server: Server) -> None:
    line = tiny_server.banner.splitlines()[-1]
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    body = {"text": "Hello, world!", "encoding": "float"}
    expected = httpx.post(tiny_server.address + "/models/bert/embed", json=body, timeout=60)
    assert done.stdout == expected.text
    assert expected.json()["shape"][-1] == 4


@NEEDS_CURL
def test_banner_command_works_with_keys_and_tls(tmp_path: Path) -> None:
    certificate, pem = trustme.CA().issue_cert("another.example"), tmp_path / "server.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(pem)
    key, entry = new_key("alice", ("*",), admin=False)
    (tmp_path / "keys.toml").write_text(entry)
    copy_artifact("gpt", tmp_path / "models")
    options = "--tls-cert-file", str(pem), "--tls-key", str(pem), "--api-keys-file", str(tmp_path / "keys.toml")
    with serve(tmp_path / "models", *options) as server:
        line = server.banner.splitlines()[-1].replace("KEY", key)
        done = subprocess.run(f"{line} -sS --fail", shell=True, capture_output=True, text=True, check=True)
    assert '"shape":[1,3,4]' in done.stdout


def is_ready(server: Server) -> tuple[set[int], set[int], bool, int]:
    """Return the answers to all checks of liveness and readiness."""
    live = {httpx.get(f"{server.address}{path}").status_code for path in ("/livez", "/v2/health/live")}
    paths = ("/readyz", "/health", "/ping", "/v2/health/ready")
    ready = {httpx.get(f"{server.address}{path}").status_code for path in paths}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        grpc_ready = stub.ServerReady(service_pb2.ServerReadyRequest(), wait_for_ready=True).ready
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
    return live, ready, grpc_ready, health


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_empty_repository_is_served_once_it_has_a_model(mode: str, workers: str, tmp_path: Path) -> None:
    options = "--model-control", mode, "--model-poll-interval-seconds", "0.2", "--workers", workers
    with serve(tmp_path, *options, "--alias", "one=gpt") as server:
        served = {200}, {200}, True, health_pb2.HealthCheckResponse.SERVING
        if mode == "explicit":
            assert "No model is loaded; POST http://127.0.0.1:" in server.banner
            assert is_ready(server) == served  # else no request to load a model would arrive
        else:
            assert f"No model yet: the repository {tmp_path} is empty" in server.banner
            assert is_ready(server) == ({200}, {503}, False, health_pb2.HealthCheckResponse.NOT_SERVING)
        load = f"{server.address}/v2/repository/models/gpt/load"
        if mode == "explicit":
            assert httpx.post(load).status_code == 404
        copy_artifact("gpt", tmp_path)
        if mode == "explicit":
            httpx.post(load, timeout=60).raise_for_status()
        wait_until(lambda: [is_ready(server) for _ in range(4)] == [served] * 4, 60)
        assert httpx.post(f"{server.address}/models/one/embed", json={"input_ids": [1]}).status_code == 200


@pytest.mark.parametrize("workers", ["1", "2"])
def test_explicit_mode_loads_only_named_models(tiny_repository: Path, tmp_path: Path, workers: str) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "root")
    options = "--model-control", "explicit", "--workers", workers, "--alias", "words=bert"
    with serve(root, *options) as server:
        assert is_ready(server)[1] == {200}
        assert {model["ready"] for model in httpx.get(f"{server.address}/models", timeout=60).json()} == {False}
    with serve(root, *options, "--load-model", "words") as server:

        def served() -> set[tuple[str, ...]]:
            answers = [httpx.get(f"{server.address}/models", timeout=60).json() for _ in range(8)]
            return {tuple(model["name"] for model in answer if model["ready"]) for answer in answers}

        assert served() == {("bert", "words")}
        copy_artifact("gpt", root, "later")
        with tritonclient.http.InferenceServerClient(server.address.removeprefix("http://")) as client:
            client.load_model("gpt")
            assert served() == {("bert", "gpt", "words")}  # another model stays as it is
            client.load_model("later")
            client.unload_model("words")
        assert served() == {("gpt", "later")}
    explicit = ("serve", "--repository", root, "--port", "0", "--model-control", "explicit")
    message = failing(*explicit, "--load-model", "nope", code=1)
    assert message == "load_models: got nope, expected bert, gpt, later"
    message = failing("serve", "--load-model", "gpt", code=2)
    assert "--load-model: got gpt, expected no name, because model_control is none" in message


def test_unknown_model_error_says_how_to_load_it(tiny_repository: Path) -> None:
    for options, hint in (
        (["poll"], "a new export is served within about 5 s"),
        (
            ["explicit", "--load-model", "*"],
            "POST /v2/repository/models/NAME/load, or RepositoryModelLoad over gRPC, loads a model",
        ),
    ):
        with serve(tiny_repository, "--model-control", *options) as server:
            native = httpx.post(f"{server.address}/models/mine/embed", json={"input_ids": [1]})
            openai = httpx.post(f"{server.address}/v1/embeddings", json={"model": "mine", "input": "a"})
        assert native.json()["detail"] == f"model: got mine, expected bert, gpt; {hint}"
        assert openai.json()["error"]["message"].endswith(f"Available models: bert, gpt. ({hint})")
