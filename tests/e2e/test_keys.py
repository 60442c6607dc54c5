"""Keys at every protocol, by real clients: none, a key for some models, a key of an administrator."""

import hashlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
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

import preblock
from preblock.client.errors import RequestError
from preblock.service.core.auth import new_key, read_keys
from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS
from tests.support.open_inference import open_stub
from tests.support.paths import PREBLOCK, ROOT
from tests.support.processes import fork_servers, workers
from tests.support.protocols import refusal_of
from tests.support.servers import Server, serve

PATHS = [
    ("POST", "/models/gpt/embed"),
    ("POST", "/models/gpt/versions/1/embed"),
    ("POST", "/models/gpt/bias"),
    ("POST", "/models/gpt/decode"),
    ("GET", "/models/gpt"),
    ("GET", "/models/gpt/versions/1"),
    ("POST", "/v2/models/gpt/infer"),
    ("GET", "/v2/models/gpt"),
    ("GET", "/v2/models/gpt/ready"),
    ("GET", "/v2/models/gpt/config"),
    ("GET", "/v2/models/gpt/stats"),
    ("POST", "/v2/repository/models/gpt/load"),
    ("POST", "/v2/repository/models/gpt/unload"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models/gpt"),
    ("GET", "/v1/models/gpt:1"),
]
OTHERS = [("GET", path) for path in ("/models", "/v2", "/v1/models", "/metrics", "/docs/x", "/nope")]
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


def test_request_without_valid_key_returns_401(guarded: Server) -> None:
    for method, path in PATHS + OTHERS:
        for key in (None, "wrong"):
            response = ask(guarded, method, path, key)
            assert (response.status_code, response.headers.get("WWW-Authenticate")) == (401, "Bearer"), path
            assert "wrong" not in response.text
            assert refusal_of(response).kind in ("", "Unauthenticated")


def test_model_outside_key_scope_returns_403(guarded: Server, keys: dict[str, str]) -> None:
    for method, path in PATHS:
        response = ask(guarded, method, path, keys["bert"])
        assert response.status_code == 403, path
        assert re.search("model: got gpt|may not use the model gpt", response.text)
        assert refusal_of(response).kind in ("", "Forbidden")
        assert ask(guarded, method, path.replace("gpt", "none"), keys["bert"]).status_code == 403, path


def test_unknown_model_error_lists_models_in_key_scope(guarded: Server, keys: dict[str, str]) -> None:
    response = ask(guarded, "GET", "/models/bort", keys["bert"])
    assert response.status_code == 404
    assert response.json()["expected"] == "bert"
    assert ask(guarded, "POST", "/v2/repository/models/bert2/unload", keys["bert"]).status_code == 403
    assert "expected bert" in ask(guarded, "GET", "/v2/models/bort", keys["bert"]).text


def test_openapi_security_matches_required_keys(guarded: Server, keys: dict[str, str]) -> None:
    """Paths of health and documentation need none. A path that is sent unchanged leaves no folder of files."""
    document = ask(guarded, "GET", "/openapi.json", None).json()
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert document["security"] == [{"key": []}]
    open_paths = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_key = operation.get("security", document["security"]) != []
            open_paths |= set() if needs_key else {path}
            for key in (None, "wrong", keys["all"]):
                response = ask(guarded, method.upper(), path, key)
                assert (response.status_code == 401) == (needs_key and key != keys["all"]), path
    assert open_paths >= {"/livez", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"}
    for path in ("/docs", "/openapi.json", "/docs/static/swagger-ui-bundle.js"):
        assert ask(guarded, "GET", path, None).status_code == 200, path
    for path in ("%2e%2e/%2e%2e/models", "../../models", "/models"):
        connection = HTTPConnection(httpx.URL(guarded.address).netloc.decode(), timeout=60)
        with closing(connection):
            connection.request("GET", f"/docs/static/{path}")
            assert connection.getresponse().status == 404, path


def test_model_lists_hold_models_in_key_scope(guarded: Server, keys: dict[str, str]) -> None:
    for key, expected in (("bert", {"bert"}), ("all", {"bert", "gpt"})):
        for method, path, part, name in (
            ("GET", "/models", "", "name"),
            ("POST", "/v2/repository/index", "", "name"),
            ("GET", "/v1/models", "data", "id"),
            ("GET", "/v2/models/stats", "model_stats", "name"),
        ):
            document = ask(guarded, method, path, keys[key]).json()
            assert {row[name] for row in (document[part] if part else document)} == expected, path


def test_model_control_without_admin_key_returns_403(guarded: Server, keys: dict[str, str]) -> None:
    def change(verb: str, key: str, model: str = "bert") -> int:
        return ask(guarded, "POST", f"/v2/repository/models/{model}/{verb}", keys[key]).status_code

    assert [change("unload", key) for key in ("bert", "all")] == [403, 403]
    assert change("unload", "bert-admin", "gpt") == 403
    assert [change(verb, key) for key in ("admin", "bert-admin") for verb in ("unload", "load")] == [200] * 4


def test_openai_client_with_key_reaches_only_its_models(guarded: Server, keys: dict[str, str]) -> None:
    """A thread reads a large body, and finds its model."""

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(api_key=key, base_url=f"{guarded.address}/v1", max_retries=0)

    ids = [[1]] * 8000
    with client(keys["bert"]) as allowed:
        assert len(allowed.embeddings.create(model="bert", input=ids, extra_body={"pooling": "last"}).data) == len(ids)
        with pytest.raises(openai.PermissionDeniedError):
            allowed.embeddings.create(model="gpt", input=ids)
    with client("wrong") as refused, pytest.raises(openai.AuthenticationError):
        refused.embeddings.create(model="bert", input=ids)


def test_client_with_key_works_for_calls_and_streams(guarded: Server, keys: dict[str, str]) -> None:
    with preblock.connect(guarded.address, key=keys["bert"]) as client, preblock.connect(guarded.address) as other:
        assert client.embed([1, 2], model="bert").vectors.shape == (1, 2, 4)
        with client.decode("bert") as stream:
            assert stream.step([1]).shape == (1, 1, 4)
        refused: list[tuple[str, Callable[[], object]]] = [
            ("Forbidden", lambda: client.embed([1], model="gpt")),
            ("Forbidden", client.decode("gpt").__enter__),
            ("Unauthenticated", other.models),
            ("Unauthenticated", other.decode("bert").__enter__),
        ]
        for kind, call in refused:
            with pytest.raises(RequestError) as raised:
                call()
            assert raised.value.kind == kind
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


def test_key_file_change_reaches_every_worker(tiny_repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old = add_key(file, "old")
    with serve(tiny_repository, "--workers", "2", PREBLOCK_API_KEYS_FILE=str(file)) as server:
        assert {ask(server, "GET", "/models", old).status_code for _ in range(8)} == {200}
        draft = tmp_path / "draft.toml"
        new = add_key(draft, "new")
        draft.replace(file)
        time.sleep(2)  # as documented
        assert {ask(server, "GET", "/models", new).status_code for _ in range(8)} == {200}
        assert {ask(server, "GET", "/models", old).status_code for _ in range(8)} == {401}


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


def test_pipes_in_place_of_watched_files_block_nothing(tiny_repository: Path, tmp_path: Path) -> None:
    file, settings = tmp_path / "keys.toml", tmp_path / "preblock.toml"
    key, entry = new_key("alice", (), admin=False)
    file.write_text(entry)
    settings.write_text("max_request_rows = 2\n")
    options = "--api-keys-file", str(file), "--config-file", str(settings)
    with serve(tiny_repository, *options) as server, httpx.Client(base_url=server.address, timeout=1) as client:
        for watched in (file, settings):
            watched.unlink()
            os.mkfifo(watched)
        until = time.monotonic() + 3 * POLL_INTERVAL_SECONDS
        while time.monotonic() < until:
            assert client.get("/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert client.get("/livez").status_code == 200


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
