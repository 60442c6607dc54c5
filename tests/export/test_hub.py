"""Export from a hub: huggingface_hub itself, against a small hub of our own on this machine."""

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import BertModel

from preblock.export.exporter import export
from preblock.export.verification import verify
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import DATA, GRAPH
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository, changed_in_place, fingerprint
from tests.support import commands
from tests.support.artifacts import copy_artifact

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/some-model"


@dataclass
class Hub:
    """The files of the hub, and the requested paths."""

    folder: Path
    address: str = ""
    asked: list[str] = field(default_factory=list)

    def downloads(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.asked if path.startswith(f"GET /{REPOSITORY}/resolve/"))


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does: the commit of a revision, the files of a commit, and each file."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: object) -> None:
        self.hub = hub
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        api, files = f"/api/models/{REPOSITORY}", sorted(self.hub.folder.iterdir())
        if path in [f"{api}/revision/{revision}" for revision in ("main", "v1.0", COMMIT)]:
            siblings = [{"rfilename": file.name} for file in files]
            self.answer(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"{api}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": etag(file)} for file in files
            ]
            self.answer(json.dumps(tree).encode())
        elif (file := self.hub.folder / path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")).is_file():
            self.answer(file.read_bytes(), {"ETag": f'"{etag(file)}"', "X-Repo-Commit": COMMIT})
        else:
            known = path.startswith((api + "/", f"/{REPOSITORY}/"))
            code = "RevisionNotFound" if known else "RepoNotFound"
            self.answer(b"{}", {"X-Error-Code": code, "X-Error-Message": "not here"}, 404)

    do_HEAD = do_GET

    def answer(self, content: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the tiny checkpoint and files not needed by a front-end."""
    shutil.copytree(tiny_checkpoint, tmp_path / "hub")
    for name in ("pytorch_model.bin", "README.md", "tf_model.h5", "optimizer.safetensors"):
        (tmp_path / "hub" / name).write_bytes(b"not wanted")
    hub = Hub(tmp_path / "hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def run(
    hub: Hub, home: Path, function: Callable[..., None], *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a function in a process of its own: huggingface_hub reads its settings once."""
    environment = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    return commands.run(function, *arguments, environment=environment)


def test_hub_export_matches_folder_export(hub: Hub, tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = ("export", f"hf:{REPOSITORY}@v1.0", "--name", "m", "--repository", tmp_path / "hubs")
    done = run(hub, tmp_path / "home", commands.preblock, *command)
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    found = read(Manifest, tmp_path / "hubs" / "m" / "1" / "manifest.json")
    expected = export(str(tiny_checkpoint), "m", tmp_path / "folders").manifest
    assert found.model_copy(update={"source": expected.source}) == expected
    assert found.source == Source(
        kind="hub", name=REPOSITORY, revision=COMMIT, config_sha256=expected.source.config_sha256
    )


def test_hub_revision_is_recorded_as_commit_and_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    sources = [f"hf:{REPOSITORY}{revision}" for revision in ("", "@main", "@v1.0", f"@{COMMIT}")]
    done = run(hub, tmp_path / "home", commands.load, *sources)
    assert done.stdout.splitlines() == [COMMIT] * 4, done.stderr
    assert hub.downloads() == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def shard(hub: Hub) -> dict[str, str]:
    """Split the weights of the hub into several files, and return the file of each weight."""
    BertModel.from_pretrained(hub.folder).save_pretrained(hub.folder, max_shard_size="1KB")
    (hub.folder / "model.safetensors").unlink()
    files: dict[str, str] = json.loads((hub.folder / "model.safetensors.index.json").read_text())["weight_map"]
    return files


SMALL, INDEX = ("config.json", "tokenizer.json", "tokenizer_config.json"), "model.safetensors.index.json"


def downloads_of(hub: Hub, home: Path) -> set[str]:
    """Return the downloaded files beside the small ones."""
    done = run(hub, home, commands.load, f"hf:{REPOSITORY}")
    assert done.stdout.splitlines() == [COMMIT], done.stderr
    assert {*SMALL} <= {*hub.downloads()}
    return {*hub.downloads()} - {*SMALL}


def test_only_shards_of_front_end_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    files = shard(hub)
    needed = {file for name, file in files.items() if name.startswith("embeddings.")}
    assert needed < set(files.values())
    assert downloads_of(hub, tmp_path / "home") == {INDEX, *needed}


def test_single_file_of_hub_wins_over_its_index(hub: Hub, tmp_path: Path) -> None:
    """transformers also reads it: the files of the index may hold other weights."""
    weights = (hub.folder / "model.safetensors").read_bytes()
    shard(hub)
    (hub.folder / "model.safetensors").write_bytes(weights)
    assert downloads_of(hub, tmp_path / "home") == {INDEX, "model.safetensors"}


def test_only_files_named_in_frontend_toml_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    files = shard(hub)
    weight = "encoder.layer.0.intermediate.dense.weight"
    (hub.folder / "frontend.toml").write_text(f'[[steps]]\nkind = "tokens"\nweight = "{weight}"\n')
    assert downloads_of(hub, tmp_path / "home") == {INDEX, "frontend.toml", files[weight]}


def test_unknown_model_type_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    done = run(hub, tmp_path / "home", commands.load, f"hf:{REPOSITORY}")
    message = "model_type is 'other', known neither to the family table nor to transformers"
    assert message in done.stderr.splitlines()[-1]
    assert hub.downloads() == ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:owner/other", "Repository Not Found"),
        (f"hf:{REPOSITORY}@nowhere", "Revision Not Found"),
        ("hf:owner/--", "'owner/--'"),
        (f"hf:{REPOSITORY}", ""),
    ],
    ids=["repository", "revision", "name", "unreachable"],
)
def test_missing_hub_repository_fails_with_one_line(hub: Hub, source: str, message: str, tmp_path: Path) -> None:
    hub.address = hub.address if message else "http://127.0.0.1:9"
    command = ("export", source, "--name", "m", "--repository", tmp_path / "r")
    done = run(hub, tmp_path / "home", commands.preblock, *command)
    assert (done.returncode, done.stdout) == (1, "")
    reading, error = done.stderr.splitlines()
    assert reading == f"m: reading {source}"
    assert error.startswith(f"preblock: {source}: ")
    assert message in error
    assert not (tmp_path / "r").exists()


def serve(hub: Hub, folder: Path, revision: str = "") -> list[str]:
    """Serve the repository of the hub on a wrong port, and return the lines before the error about the port."""
    options = ("--name", "m", "--repository", folder / "r", "--uds", folder / "none" / "socket")
    done = run(hub, folder / "home", commands.preblock, "serve", f"hf:{REPOSITORY}{revision}", *options)
    *lines, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    return lines if "none/socket" in last else [*lines, last]


def test_served_hub_repository_is_exported_once(hub: Hub, tmp_path: Path) -> None:
    assert serve(hub, tmp_path)[-1] == f"m: exported hf:{REPOSITORY} as version 1"
    asked = len(hub.asked)
    for revision, requests in (("@v1.0", 1), (f"@{COMMIT}", 0)):
        assert serve(hub, tmp_path, revision) == [f"m: version 1 is the export of hf:{REPOSITORY}{revision} already"]
        assert len(hub.asked) == asked + requests
        asked = len(hub.asked)
    assert "Revision Not Found" in serve(hub, tmp_path, "@nowhere")[-1]
    hub.address = "http://127.0.0.1:9"
    told = f"m: warning: the hub cannot be asked for a newer commit than {COMMIT}: "
    for cached in (True, False):
        if not cached:
            shutil.rmtree(tmp_path / "home")
        already, warning = serve(hub, tmp_path)
        assert already == f"m: version 1 is the export of hf:{REPOSITORY} already"
        assert warning.startswith(told)
    assert f"hf:{REPOSITORY}@v2.0: " in serve(hub, tmp_path, "@v2.0")[-1]  # an unknown commit
    assert [folder.name for folder in (tmp_path / "r" / "m").iterdir()] == ["1"]


def test_artifact_in_hub_cache_loads_until_a_link_leaves(hub: Hub, tmp_path: Path) -> None:
    hub.folder = copy_artifact("gpt", tmp_path / "source")
    done = run(hub, tmp_path / "home", commands.download, REPOSITORY)
    snapshot = Path(done.stdout.strip())
    assert all(file.is_symlink() for file in snapshot.iterdir()), done.stderr
    version = tmp_path / "models/gpt/1"
    version.parent.mkdir(parents=True)
    version.symlink_to(snapshot)
    model = Repository(tmp_path / "models").get("gpt")
    assert isinstance(model, TokenModel)
    assert model.position_rows is not None
    verify(version)

    before, blob = fingerprint(version), (version / DATA).resolve()
    blob.write_bytes(blob.read_bytes())
    assert changed_in_place(before, fingerprint(version))
    (version / GRAPH).unlink()
    (version / GRAPH).symlink_to(hub.folder / GRAPH)
    with pytest.raises(ArtifactError) as error:
        Repository(tmp_path / "models")
    assert error.value.field == "gpt/1/model.onnx"
    assert error.value.got.startswith("a link to /")
    assert str(error.value).endswith(f"{hub.folder / GRAPH}, expected {error.value.expected}")
