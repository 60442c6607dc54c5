"""The image, its compose file and the unit of systemd: they agree, and the service obeys their variables.

`make smoke` runs the containers. Oracle of the variable of glibc: its list of tunables.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from preblock.service.core.settings import Settings
from preblock.service.observability.tracing import FLUSH_TIMEOUT_SECONDS
from tests.families.library_models import TransformersModel, save
from tests.support.paths import PREBLOCK, ROOT
from tests.support.servers import Server, serve


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


COMPOSE: dict[str, Any] = yaml.safe_load(read("docker-compose.yml"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SMOKE = read("deploy/smoke.sh")
PROXY = read("deploy/haproxy/haproxy.cfg")
COMMANDS = [
    line
    for name in ("docs/deploy.md", "docs/production.md")
    for block in re.findall(r"^```sh\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("docker ", "deploy/", "    exporter "))
]
NOT_RUN = ("docker compose --profile gpu up gpu", *(line for line in COMMANDS if " hf:" in line))
"""Needs a GPU: `make smoke` has Compose read it. The others need a hub."""


def test_copied_files_are_sent_to_the_build() -> None:
    sent = [line[1:] for line in read(".dockerignore").splitlines() if line[0] == "!"]
    for name in ("Dockerfile", "deploy/ray/Dockerfile"):
        copied = re.findall(r"^COPY (?!--from)(?:--chown=\S+ )?(\S+) \S+$", read(name), re.MULTILINE)
        assert "." in copied
        for path in set(copied) - {"."}:
            assert (ROOT / path).exists()
            assert any(Path(path).is_relative_to(entry) for entry in sent), path


@pytest.mark.parametrize("name", SERVICES)
def test_compose_container_is_confined_and_bounded(name: str) -> None:
    service = SERVICES[name]
    confined = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    assert service.items() >= confined.items()
    assert service.keys() >= {"mem_limit", "pids_limit"}
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    if name != "exporter":
        assert service.keys() >= {"healthcheck", "stop_grace_period"}
        assert service["restart"] == "unless-stopped"
    if "build" in service:
        assert service["build"]["args"]["BASE_IMAGE"] == COMPOSE["x-service"]["build"]["args"]["BASE_IMAGE"]
    else:
        assert re.fullmatch(r"[1-9][0-9]*:[0-9]+", service["user"])


def test_image_health_check_ignores_proxies(tiny_server: Server) -> None:
    text = read("Dockerfile").replace("\\\n", "")
    (found,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    program, *arguments = json.loads(found)
    assert program == "python"
    port = str(httpx.URL(tiny_server.address).port)
    environment = {"http_proxy": "http://127.0.0.1:9", "PREBLOCK_PORT": port}

    def check(**variables: str) -> int:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment | variables, stderr=subprocess.DEVNULL, check=False).returncode

    assert check() == 0
    assert check(PREBLOCK_PORT="9") == 1


def test_stop_grace_period_exceeds_shutdown_time() -> None:
    given = int(SERVICES["service"]["stop_grace_period"].removesuffix("s"))
    grace = Settings.model_fields["shutdown_timeout_seconds"].default
    assert given > 2 * grace + FLUSH_TIMEOUT_SECONDS  # HTTP first, then gRPC
    assert f"docker stop --time {given} " in read("deploy/roll.sh")


def test_images_are_those_of_the_build_and_mounted_files_exist() -> None:
    defaults = dict(re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", read("docker-compose.yml")))
    assert set(defaults) == {"BASE_IMAGE", "PROXY_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"}
    assert all(re.search(r":v?\d+\.\d+\.\d+(-[a-z]+)*$", image) for image in defaults.values())
    assert f"ARG BASE_IMAGE={defaults['BASE_IMAGE']}\n" in read("Dockerfile")
    mounted = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()] == []


def test_proxy_retries_only_idempotent_requests(model_server: Server) -> None:
    """The proxy retries the routes of idempotent requests, among all routes of a server, and no others."""
    again = re.findall(r"^    acl again path_reg (\S+)$", PROXY, re.MULTILINE)
    exactly = re.findall(r"^    acl again path (\S+)$", PROXY, re.MULTILINE)
    methods = re.findall(r"^    acl again method (.+)$", PROXY, re.MULTILINE)
    assert (len(again), len(exactly), methods) == (1, 1, ["GET HEAD"])
    paths: dict[str, dict[str, object]] = httpx.get(f"{model_server.address}/openapi.json").json()["paths"]
    posts = [re.sub(r"\{\w+\}", "name", path) for path, methods in paths.items() if "post" in methods]
    assert {path for path in posts if re.search(again[0], path) or path in exactly} == {
        *(f"/models/name{version}/{what}" for version in ("", "/versions/name") for what in ("embed", "bias")),
        "/v1/embeddings",
    }


def test_proxy_timeouts_exceed_stream_idle_timeout() -> None:
    found = dict(re.findall(r"^    timeout (client|server|tunnel) (\d+)s$", PROXY, re.MULTILINE))
    assert len(found) == 3
    assert min(map(int, found.values())) > Settings.model_fields["stream_idle_timeout_seconds"].default


def test_smoke_test_runs_documented_commands() -> None:
    assert {*NOT_RUN, "docker compose up"} < set(COMMANDS)
    run = SMOKE.replace('"preblock:$IMAGE_TAG"', "preblock")
    as_run = {
        command: command.replace("docker compose", "compose").replace(" up", " up --detach") for command in COMMANDS
    }
    assert {command for command, written in as_run.items() if written not in run} == set(NOT_RUN)


@pytest.mark.parametrize("program", [("docker", "compose"), ("docker-compose",)], ids=" ".join)
@pytest.mark.parametrize("added", [(), ("deploy/keys.yml", "deploy/settings.yml")], ids=["alone", "with others"])
def test_compose_files_resolve_in_both_programs(program: tuple[str, ...], added: tuple[str, ...]) -> None:
    """Neither program needs an engine for `config`."""
    if shutil.which(program[0]) is None or subprocess.run([*program, "version"], capture_output=True).returncode != 0:
        pytest.skip(f"there is no {' '.join(program)} here")
    files = [part for file in ("docker-compose.yml", *added) for part in ("-f", file)]
    done = subprocess.run(
        [*program, *files, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    resolved = yaml.safe_load(done.stdout)["services"]
    assert set(resolved) >= {name for name, service in SERVICES.items() if "profiles" not in service}
    # Both programs escape the dollar sign again.
    assert resolved["exporter"]["entrypoint"] == SERVICES["exporter"]["entrypoint"]
    assert ("PREBLOCK_API_KEYS_FILE" in resolved["service"]["environment"]) == bool(added)


def test_deploy_scripts_are_valid_bash() -> None:
    for script in (ROOT / "deploy").glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
        assert os.access(script, os.X_OK) == script.read_text().startswith("#!"), script


def test_derived_image_adds_an_extra_to_the_built_one() -> None:
    text = read("docs/deploy.md")
    (block,) = re.findall(r"^```dockerfile\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    steps = [line.split(maxsplit=1) for line in block.splitlines()]
    assert [step for step, _ in steps] == ["FROM", "USER", "RUN", "USER"]
    assert SERVICES["service"]["image"].startswith(f"{steps[0][1]}:")
    assert f"\nUSER {steps[3][1]}\n" in read("Dockerfile")
    (extra,) = re.findall(r"'preblock\[(\w+)\]'", steps[2][1])
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert "preblock[torch]" in project["optional-dependencies"][extra]


(TUNABLES,) = re.findall(r"^ENV GLIBC_TUNABLES=(\S+)$", read("Dockerfile"), re.MULTILINE)
LOADERS = sorted(Path("/").glob("lib*/ld-linux-*.so.*"))


def test_make_serve_sets_glibc_variable_of_image() -> None:
    command = ["make", "--dry-run", "--print-data-base", "serve"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert f"\nserve: GLIBC_TUNABLES = {TUNABLES}\n" in recipe


@pytest.mark.skipif(not LOADERS, reason="there is no glibc here")
def test_glibc_variable_is_accepted() -> None:
    """Names unknown to glibc are ignored."""
    command, variables = (LOADERS[0], "--list-tunables"), {"GLIBC_TUNABLES": TUNABLES}
    listed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    for name, _, value in (part.partition("=") for part in TUNABLES.split(":")):
        assert f"{name}: {int(value):#x} " in listed


TEXT = read("docs/production.md")
(UNIT,) = re.findall(r"^```ini\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_unit_agrees_with_image_and_settings(tmp_path: Path) -> None:
    assert f"Environment=GLIBC_TUNABLES={TUNABLES}\n" in UNIT
    unit = RawConfigParser(strict=False)
    unit.read_string(UNIT)
    assert f"stop_grace_period: {unit['Service']['timeoutstopsec']}s" in read("docker-compose.yml")
    program, command, option, path = unit["Service"]["execstart"].split()
    assert (program, command, option) == ("/opt/preblock/bin/preblock", "serve", "--config-file")
    (file,) = re.findall(rf"^```toml\n# {path}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "preblock.toml").write_text(file)
    assert Settings(config_file=tmp_path / "preblock.toml").model_control == "poll"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_accepts_unit(tmp_path: Path) -> None:
    file = tmp_path / "preblock.service"
    file.write_text(UNIT.replace("/opt/preblock/bin/preblock", str(PREBLOCK)))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(folder: Path, checkpoint: Path) -> None:
    """Put a checkpoint into a cache of the hub, as `owner/name`."""
    repository = folder / "models--owner--name"
    for part in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, repository / "blobs" / blob)
        (repository / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{blob}")


def test_image_serves_hub_model_offline_from_its_cache(tmp_path: Path) -> None:
    """The user of the image has no home, and a cache mounted read-only takes no new file."""
    save("gpt2", tmp_path / "checkpoint")
    make_cache(tmp_path / "data", tmp_path / "checkpoint")
    before = sorted((tmp_path / "data").rglob("*"))
    variables = re.findall(r"(HF_\w+)=/data\b", read("Dockerfile"))
    assert variables == ["HF_HOME", "HF_HUB_CACHE"]
    environment = dict.fromkeys(variables, str(tmp_path / "data")) | {"HF_HUB_OFFLINE": "1", "HOME": "/proc/none"}
    with serve(tmp_path / "models", "hf:owner/name", **environment) as server:
        given = {"input_ids": [[3, 4, 5]], "encoding": "float"}
        found = httpx.post(f"{server.address}/models/name/embed", json=given).raise_for_status().json()
    expected = TransformersModel.load("gpt2", tmp_path / "checkpoint").first_block_input(np.array([[3, 4, 5]]))
    assert np.array_equal(np.float32(found["embeddings"]), expected)
    assert sorted((tmp_path / "data").rglob("*")) == before
