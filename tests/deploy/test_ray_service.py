"""The manifest of KubeRay and the configuration of Ray Serve agree with each other and with the code."""

import ast
from typing import Any

import kubernetes_validate
import pytest
import yaml

from preblock.service.core.settings import Settings
from tests.deploy.test_kubernetes import BASE, CUSTOM, VERSIONS, documents, unknown_fields
from tests.support.paths import ROOT

FOLDER = ROOT / "deploy/ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text())
(SERVICE,) = documents(FOLDER / "ray-service.yaml")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
TEMPLATES = [group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]
(APPLICATION,) = SERVE["applications"]


def test_ray_service_has_known_fields() -> None:
    known = CUSTOM["RayService"] | {"apiVersion": None, "kind": None, "metadata": None}
    assert list(unknown_fields(SERVICE, known)) == []
    assert SERVICE["apiVersion"] == "ray.io/v1"


@pytest.mark.parametrize("template", TEMPLATES)
def test_pods_fit_the_schemas_of_kubernetes(template: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
    for version in (VERSIONS[0], VERSIONS[-1]):
        kubernetes_validate.validate(pod, version, strict=True)
    (claim,) = documents(BASE / "volume-claim.yaml")
    (volume,) = template["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == APPLICATION["args"]["repository"]


def test_ray_service_serves_the_same_configuration() -> None:
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE


def test_arguments_are_settings() -> None:
    assert set(APPLICATION["args"]) <= set(Settings.model_fields)
    Settings(**APPLICATION["args"])


def test_names_are_those_of_the_module() -> None:
    module, _, builder = APPLICATION["import_path"].partition(":")
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    assert builder in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    options = next(
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "name"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "serve.deployment"
    )
    (deployment,) = APPLICATION["deployments"]
    assert deployment["name"] == options["name"]


def test_every_file_names_the_same_version_of_ray() -> None:
    version = CLUSTER["rayVersion"]
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"rayproject/ray:{version}-" in dockerfile
    assert f"ray[serve]=={version}" in dockerfile
    assert f"RAY := ray[serve]=={version}" in (ROOT / "Makefile").read_text()


def test_pod_ends_after_its_replica() -> None:
    (deployment,) = APPLICATION["deployments"]
    (worker,) = CLUSTER["workerGroupSpecs"]
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > deployment["graceful_shutdown_timeout_s"]
