"""docker-compose.yml and the files around it, read as text; `make smoke` runs them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from preblock.service.core.settings import Settings
from preblock.service.observability.tracing import FLUSH_TIMEOUT_SECONDS
from tests.support.paths import ROOT
from tests.support.servers import Server

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SMOKE = (ROOT / "deploy/smoke.sh").read_text(encoding="utf-8")
PROXY = (ROOT / "deploy/haproxy/haproxy.cfg").read_text(encoding="utf-8")
COMMANDS = [
    line
    for name in ("docs/deploy.md", "docs/production.md")
    for block in re.findall(r"^```sh\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("docker ", "deploy/", "    exporter "))
]
NOT_RUN = ("docker compose --profile gpu up gpu", *(line for line in COMMANDS if " hf:" in line))
"""Needs a GPU: `make smoke` has Compose read it. The others need a hub."""


@pytest.mark.parametrize("name", ["Dockerfile", "deploy/ray/Dockerfile"])
def test_copied_files_are_sent_to_the_build(name: str) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"]
    copied = re.findall(r"^COPY (?!--from)(?:--chown=\S+ )?(\S+) \S+$", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    assert "." in copied
    for path in set(copied) - {"."}:
        assert (ROOT / path).exists()
        assert any(Path(path).is_relative_to(entry) for entry in sent), path


@pytest.mark.parametrize("name", SERVICES)
def test_compose_container_is_confined_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    if name != "exporter":
        assert service["healthcheck"]
        assert service["stop_grace_period"]
        assert service["restart"] == "unless-stopped"
    if "build" in service:
        assert service["build"]["args"]["BASE_IMAGE"] == COMPOSE["x-service"]["build"]["args"]["BASE_IMAGE"]
    else:
        assert re.fullmatch(r"[0-9]+:[0-9]+", service["user"])
        assert not service["user"].startswith("0:")


def test_image_health_check_ignores_proxies(tiny_server: Server) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
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
    assert f"docker stop --time {given} " in (ROOT / "deploy/roll.sh").read_text()


def test_registry_images_are_pinned() -> None:
    defaults = dict(re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", (ROOT / "docker-compose.yml").read_text()))
    assert set(defaults) == {"BASE_IMAGE", "PROXY_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"}
    for image in defaults.values():
        assert re.search(r":v?\d+\.\d+\.\d+(-[a-z]+)*$", image)
    assert f"ARG BASE_IMAGE={defaults['BASE_IMAGE']}\n" in (ROOT / "Dockerfile").read_text()


def test_replicas_publish_no_ports_and_gpu_is_reserved() -> None:
    assert "ports" not in SERVICES["replica"]
    reserved = {name for name, service in SERVICES.items() if "deploy" in service}
    assert reserved == {"gpu"}
    device = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["capabilities"] == ["gpu"]
    assert SERVICES["gpu"]["environment"]["PREBLOCK_PROVIDER"] == "cuda"


def test_prometheus_starts_without_grafana() -> None:
    assert SERVICES["prometheus"]["profiles"] == ["observe"]
    assert SERVICES["grafana"]["profiles"] == ["dashboard"]
    assert "depends_on" not in SERVICES["prometheus"]


def test_mounted_files_exist() -> None:
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
    idle = Settings.model_fields["stream_idle_timeout_seconds"].default
    for kind in ("client", "server", "tunnel"):
        found = re.search(rf"^    timeout {kind} (\d+)s$", PROXY, re.MULTILINE)
        assert found
        assert int(found[1]) > idle


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


def test_smoke_script_without_docker_is_skipped(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "curl"):
        found = shutil.which(program)
        assert found
        (tmp_path / program).symlink_to(found)
    done = subprocess.run(
        [ROOT / "deploy/smoke.sh"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "skipped: docker is not installed\n", "")


@pytest.mark.parametrize("script", sorted((ROOT / "deploy").glob("*.sh")), ids=lambda script: script.name)
def test_deploy_script_is_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    assert os.access(script, os.X_OK) == script.read_text().startswith("#!")


def test_derived_image_adds_an_extra_to_the_built_one() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```dockerfile\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    steps = [line.split(maxsplit=1) for line in block.splitlines()]
    assert [step for step, _ in steps] == ["FROM", "USER", "RUN", "USER"]
    assert SERVICES["service"]["image"].startswith(f"{steps[0][1]}:")
    assert f"\nUSER {steps[3][1]}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (extra,) = re.findall(r"'preblock\[(\w+)\]'", steps[2][1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "preblock[torch]" in project["optional-dependencies"][extra]
