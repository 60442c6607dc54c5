"""Keys and limits at a real server, by real clients: who may ask, how much at once, and how often."""

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

import preblock
from preblock.client.errors import RequestError
from preblock.service.core.auth import new_key, read_keys
from tests.support.decode_protocols import step_frame
from tests.support.open_inference import open_stub
from tests.support.paths import PREBLOCK, ROOT
from tests.support.processes import fork_servers, workers
from tests.support.protocols import connect
from tests.support.servers import Server, serve

UNLISTED = "/metrics", "/docs/x", "/nope", "/v1/models/gpt:1"
"""Paths that need a key too, beside those of the OpenAPI document."""
METHODS = {
    "ModelInfer": {"model_name": "gpt"},
    "ModelReady": {"name": "gpt"},
    "ModelMetadata": {"name": "gpt"},
    "ModelConfig": {"name": "gpt"},
    "ModelStatistics": {"name": "gpt"},
    "RepositoryModelLoad": {"model_name": "gpt"},
    "RepositoryModelUnload": {"model_name": "gpt"},
}


def add_key(file: Path, name: str, *models: str, admin: bool = False) -> str:
    """Make a key, add its entry to `file`, and return it."""
    key, entry = new_key(name, models, admin)
    with file.open("a") as keys:
        keys.write(entry)
    return key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return keys for `bert`, for all models, and of administrators; `file` holds their entries."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    scopes = {"bert": (("b*",), False), "all": ((), False), "admin": ((), True), "bert-admin": (("bert",), True)}
    made = {name: add_key(file, name, *models, admin=admin) for name, (models, admin) in scopes.items()}
    return made | {"file": str(file)}


@pytest.fixture(scope="module")
def guarded(tiny_repository: Path, keys: dict[str, str]) -> Iterator[Server]:
    with serve(
        tiny_repository, "--api-keys-file", keys["file"], "--model-control", "explicit", "--load-model", "*"
    ) as server:
        yield server


def ask(server: Server, method: str, path: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    content: Any = {"model": "gpt", "input": [1], "pooling": "mean"} if path == "/v1/embeddings" else {}
    if path.endswith("/decode"):
        headers["Content-Type"] = "application/x-ndjson"
    return httpx.request(
        method, server.address + path, headers=headers, json=content if method == "POST" else None, timeout=60
    )


def test_every_route_needs_a_key_for_its_model(guarded: Server, keys: dict[str, str]) -> None:
    """Health and documentation need no key, as the OpenAPI document states."""
    document = ask(guarded, "GET", "/openapi.json", None).json()
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"], document["security"]) == ("http", "bearer", [{"key": []}])
    routes = [
        (method.upper(), path, operation.get("security", document["security"]) != [])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    open_paths = {path for _, path, needs_key in routes if not needs_key}
    assert open_paths >= {"/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"}
    routes += [("GET", path, True) for path in UNLISTED]
    routes += [("GET", path, False) for path in ("/docs", "/openapi.json", "/docs/static/swagger-ui-bundle.js")]
    named = 0
    for method, path, needs_key in routes:
        filled = re.sub(r"\{(name|model)\}", "gpt", path).replace("{version}", "1")
        for key in (None, "wrong", keys["all"]):
            response = ask(guarded, method, filled, key)
            refused = needs_key and key != keys["all"]
            assert (response.status_code == 401) == refused, filled
            if refused:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert "wrong" not in response.text
                assert response.json().get("title", "Unauthenticated") == "Unauthenticated"
        if needs_key and ("gpt" in filled or path == "/v1/embeddings"):
            named += 1
            foreign = ask(guarded, method, filled, keys["bert"])
            assert foreign.status_code == 403, filled
            assert re.search("model: got gpt|may not use the model gpt", foreign.text)
            assert foreign.json().get("title", "Forbidden") == "Forbidden"
            assert ask(guarded, method, filled.replace("gpt", "none"), keys["bert"]).status_code == 403, filled
    assert named > 20
    for path in ("%2e%2e/%2e%2e/models", "../../models", "/models"):  # sent unchanged, it leaves no folder of files
        with closing(HTTPConnection(httpx.URL(guarded.address).netloc.decode(), timeout=60)) as connection:
            connection.request("GET", f"/docs/static/{path}")
            assert connection.getresponse().status == 404, path


def test_lists_and_errors_name_models_in_key_scope(guarded: Server, keys: dict[str, str]) -> None:
    for key, expected in (("bert", {"bert"}), ("all", {"bert", "gpt"})):
        for method, path, part, name in (
            ("GET", "/models", "", "name"),
            ("POST", "/v2/repository/index", "", "name"),
            ("GET", "/v1/models", "data", "id"),
            ("GET", "/v2/models/stats", "model_stats", "name"),
        ):
            document = ask(guarded, method, path, keys[key]).json()
            assert {row[name] for row in (document[part] if part else document)} == expected, path
        unknown = ask(guarded, "GET", "/models/bort", keys[key])
        assert (unknown.status_code, unknown.json()["expected"]) == (404, ", ".join(sorted(expected)))


def test_model_control_without_admin_key_returns_403(guarded: Server, keys: dict[str, str]) -> None:
    def change(verb: str, key: str, model: str = "bert") -> int:
        return ask(guarded, "POST", f"/v2/repository/models/{model}/{verb}", keys[key]).status_code

    assert [change("unload", key) for key in ("bert", "all")] == [403, 403]
    assert change("unload", "bert-admin", "gpt") == 403
    assert [change(verb, key) for key in ("admin", "bert-admin") for verb in ("unload", "load")] == [200] * 4


def test_openai_client_with_key_reaches_only_its_models(guarded: Server, keys: dict[str, str]) -> None:
    """A thread reads a large body, and finds its model."""
    ids = [[1]] * 8000
    with openai.OpenAI(api_key=keys["bert"], base_url=f"{guarded.address}/v1", max_retries=0) as allowed:
        assert len(allowed.embeddings.create(model="bert", input=ids, extra_body={"pooling": "last"}).data) == len(ids)
        with pytest.raises(openai.PermissionDeniedError):
            allowed.embeddings.create(model="gpt", input=ids)


def test_client_with_key_works_for_calls_and_streams(guarded: Server, keys: dict[str, str]) -> None:
    with preblock.connect(guarded.address, key=keys["bert"]) as client:
        assert client.embed([1, 2], model="bert").vectors.shape == (1, 2, 4)
        with client.decode("bert") as stream:
            assert stream.step([1]).shape == (1, 1, 4)
        with pytest.raises(RequestError) as raised, client.decode("gpt"):
            pass
        assert raised.value.kind == "Forbidden"
    with pytest.raises(RequestError, match="key: a header cannot carry its characters"):
        preblock.connect(guarded.address, key="clé")


def test_grpc_without_valid_key_is_rejected(guarded: Server, keys: dict[str, str]) -> None:
    with open_stub(guarded.grpc) as stub:
        for method, fields in METHODS.items():
            message = getattr(service_pb2, f"{method}Request")(**fields)
            for key, code in ((None, "UNAUTHENTICATED"), ("wrong", "UNAUTHENTICATED"), ("bert", "PERMISSION_DENIED")):
                metadata = [("authorization", f"Bearer {keys.get(key, key)}")] if key else []
                with pytest.raises(grpc.RpcError) as raised:
                    getattr(stub, method)(message, metadata=metadata)
                assert raised.value.code().name == code, method


def test_tritonclient_with_key_reaches_its_models(guarded: Server, keys: dict[str, str]) -> None:
    headers = {"authorization": f"Bearer {keys['bert']}"}
    with tritonclient.grpc.InferenceServerClient(guarded.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        index = client.get_model_repository_index(headers=headers)
        assert {model.name for model in index.models} == {"bert"}
        with pytest.raises(InferenceServerException, match="the header Authorization is missing; send Bearer"):
            client.get_server_metadata()


def test_grpc_health_needs_no_key_but_reflection_does(guarded: Server) -> None:
    with grpc.insecure_channel(guarded.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()
        with pytest.raises(grpc.RpcError) as refused:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("origin", ["PREBLOCK_API_KEY", "preblock_api_key", "--api-key"])
def test_single_key_is_hidden_and_joins_the_file(tiny_repository: Path, tmp_path: Path, origin: str) -> None:
    key, file = "secret-of-this-test", tmp_path / "keys.toml"
    alice = add_key(file, "alice", "bert")
    option, variable = ((origin, key), {}) if origin.startswith("-") else ((), {origin: key})
    options = "--api-keys-file", str(file), *option
    with serve(tiny_repository, "--workers", "2", *options, **variable) as server:
        for _ in range(4):  # both workers
            with openai.OpenAI(api_key=key, base_url=f"{server.address}/v1", max_retries=0) as client:
                assert client.embeddings.create(model="gpt", input=[1], extra_body={"pooling": "last"}).data
        found = [ask(server, "GET", f"/models/{model}", alice).status_code for model in ("bert", "gpt")]
        assert found == [200, 403]
        assert ask(server, "GET", "/models", None).status_code == 401
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert ask(server, "GET", "/models", digest).status_code == 401
        others = [*fork_servers(server.pid), *workers(server.pid)]
        assert len(others) == 3
        shown = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in others for name in ("cmdline", "environ")]
        if variable:  # `ps` shows an option, as documented
            shown.append(Path(f"/proc/{server.pid}/environ").read_bytes())
        shown += [ask(server, "GET", path, key).content for path in ("/", "/metrics", "/inspect", "/openapi.json")]
    listed = subprocess.run(
        [PREBLOCK, "settings", *option], env=os.environ | variable, capture_output=True, check=True
    ).stdout
    assert re.search(rb"^api_key +\*+ +%b$" % origin.upper().replace("--API-KEY", "--api-key").encode(), listed, re.M)
    assert not any(text in part for text in (key.encode(), digest.encode()) for part in (*shown, listed))


def test_documented_key_commands_create_keys(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "production.md").read_text().partition("## Keys")[2]
    commands = [line for line in section.splitlines() if line.startswith("preblock key ")]
    for command in commands:
        done = subprocess.run([PREBLOCK, *shlex.split(command)[1:]], capture_output=True, text=True, check=True)
        key, _, entry = done.stdout.partition("\n\n")
        assert key not in entry
        with (tmp_path / "keys.toml").open("a") as file:
            file.write(entry)
    found = [(caller.name, caller.models, caller.admin) for caller in read_keys(tmp_path / "keys.toml")]
    assert found == [("alice", ("minilm", "gpt2-*"), False), ("operator", ("*",), True)]


def test_stream_over_limit_is_rejected_with_a_retry_time(tiny_repository: Path) -> None:
    with (
        serve(tiny_repository, PREBLOCK_MAX_CONCURRENT_STREAMS="1") as server,
        connect(server) as clients,
        connect_socket(f"{server.socket}/models/gpt/decode"),
    ):
        refused = clients.http.post("/models/gpt/decode", headers={"Content-Type": "application/x-ndjson"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as raised:
            list(clients.stub.ModelStreamInfer(iter(())))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(raised.value.trailing_metadata())["retry-after"] == "1"


def test_stream_and_its_steps_count_for_the_rate(tiny_repository: Path) -> None:
    waits = []
    with (
        serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.05") as server,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        for step in (step_frame([1]), '{"input_ids": [1]}'):
            stream.send(step)
            answer = stream.recv()
            problem = (
                json.loads(answer)["error"] if isinstance(answer, str) else json.loads(answer[answer.index(b"{") :])
            )
            assert (problem["title"], problem["status"]) == ("RateLimited", 429)
            waits.append(problem["retry_after"])
        refused = httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": [[1]]})
        assert (refused.status_code, refused.json()["expected"]) == (429, "at most 0.05 a second")
        with pytest.raises(InvalidStatus) as denied, connect_socket(f"{server.socket}/models/gpt/decode"):
            pass
        assert denied.value.response.status_code == 429
        waits += [int(headers["Retry-After"]) for headers in (refused.headers, denied.value.response.headers)]
        assert httpx.get(f"{server.address}/models").status_code == 200  # no request to a model
    assert all(1 <= wait <= 20 for wait in waits), waits


def test_fragmented_and_appended_rows_are_limited(tiny_repository: Path) -> None:
    with (
        serve(tiny_repository, "--max-request-tokens", "4", "--max-request-rows", "2") as server,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        long = step_frame([1, 2, 3, 4, 5])
        for sent, expected in (
            ([long[:9], long[9:]], "at most 4 tokens in a request"),
            ('{"append": [0]}', '"next_offset":[0,0]'),
            ('{"append": [0]}', "at most 2 rows in a request"),
            (step_frame([1, 2, 3, 4]), "2 rows"),  # one row for a stream of two
        ):
            stream.send(sent)
            answer = stream.recv()
            assert expected in (answer if isinstance(answer, str) else answer.decode(errors="replace")), sent
