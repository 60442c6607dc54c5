"""The manifests of Kubernetes, KServe and KubeRay: schemas, and agreement with the code and with each other.

kubernetes-validate holds the OpenAPI schemas of Kubernetes. kubectl renders the kustomization where it is installed.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import promql_parser
import pytest
import yaml

from preblock.service.core.settings import Settings
from tests.support.paths import ROOT
from tests.support.servers import Server

BASE = ROOT / "deploy/kubernetes"
COMPONENTS = sorted(folder.name for folder in (BASE / "components").iterdir())
KSERVE = ROOT / "deploy/kserve"
VERSIONS = ["1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"]
CUSTOM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data/custom_resources.yaml").read_text())
Document = dict[str, Any]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def documents(file: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def files() -> list[Path]:
    return sorted(file for file in BASE.rglob("*.yaml") if file.name != "kustomization.yaml")


def render(folder: Path) -> list[Document]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(rendered: list[Document], kind: str) -> list[Document]:
    return [document for document in rendered if document["kind"] == kind]


def deployment() -> Document:
    (found,) = documents(BASE / "deployment.yaml")
    return found


def container() -> Document:
    (found,) = deployment()["spec"]["template"]["spec"]["containers"]
    return dict(found)


def runtime() -> Document:
    """Return the container of KServe."""
    (found,) = documents(KSERVE / "runtime.yaml")
    return dict(found["spec"]["containers"][0])


def overlay(folder: Path, component: str) -> Path:
    """Return a kustomization of the base and a component, below a folder with a copy of both."""
    shutil.copytree(BASE, folder / "base")
    shutil.move(folder / "base/components", folder / "components")
    text = f"resources: [../base]\ncomponents: [../components/{component}]\n"
    (folder / "overlay").mkdir()
    (folder / "overlay/kustomization.yaml").write_text(text)
    return folder / "overlay"


def unknown_fields(value: Any, known: Any, place: str = "") -> Iterator[str]:
    """Yield the fields that a custom resource does not have."""
    if isinstance(value, dict) and isinstance(known, dict):
        for name, inner in value.items():
            if name not in known:
                yield f"{place}.{name}"
            else:
                yield from unknown_fields(inner, known[name], f"{place}.{name}")
    elif isinstance(value, list) and isinstance(known, list):
        for inner in value:
            yield from unknown_fields(inner, known[0], f"{place}[]")


def check(document: Document, versions: list[str] = VERSIONS[-1:]) -> None:
    """Compare a document with the schemas of Kubernetes, or with the fields of a custom resource."""
    if document["kind"] in CUSTOM:
        known = CUSTOM[document["kind"]] | {"apiVersion": None, "kind": None, "metadata": None}
        assert list(unknown_fields(document, known)) == []
        return
    for version in versions:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("file", files(), ids=str)
def test_manifest_matches_newest_schemas(file: Path) -> None:
    for document in documents(file):
        check(document)


@needs_kubectl
def test_rendered_base_matches_schemas_and_its_labels() -> None:
    rendered = render(BASE)
    assert len(rendered) == 7
    for document in rendered:
        check(document, VERSIONS)
    (deployed,) = of_kind(rendered, "Deployment")
    selectors = [d["spec"]["selector"] for d in of_kind(rendered, "Service")]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in of_kind(rendered, "PodDisruptionBudget")]
    selectors += [d["spec"]["podSelector"]["matchLabels"] for d in of_kind(rendered, "NetworkPolicy")]
    selectors += [deployed["spec"]["selector"]["matchLabels"]]
    assert len(selectors) == 5
    labels = deployed["spec"]["template"]["metadata"]["labels"]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


@needs_kubectl
@pytest.mark.parametrize("component", COMPONENTS)
def test_component_renders_with_base(component: str, tmp_path: Path) -> None:
    rendered = render(overlay(tmp_path, component))
    for document in rendered:
        check(document)
    (deployed,) = of_kind(rendered, "Deployment")
    assert len(of_kind(rendered, "HorizontalPodAutoscaler")) == (component != "keda")
    assert len(of_kind(rendered, "ScaledObject")) == (component == "keda")
    (container,) = deployed["spec"]["template"]["spec"]["containers"]
    gpu = component == "gpu"
    assert container["image"].startswith("preblock-gpu:") == gpu
    assert ({"name": "PREBLOCK_PROVIDER", "value": "cuda"} in container["env"]) == gpu
    assert container["resources"]["limits"].get("nvidia.com/gpu") == ("1" if gpu else None)
    if component == "monitoring":
        (monitor,) = of_kind(rendered, "ServiceMonitor")
        selector, services = monitor["spec"]["selector"]["matchLabels"], of_kind(rendered, "Service")
        assert len(services) == 2
        assert sum(selector.items() <= service["metadata"]["labels"].items() for service in services) == 1
        assert not any("app.kubernetes.io/component" in service["spec"]["selector"] for service in services)


@needs_kubectl
def test_documented_overlay_renders(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    text = (ROOT / "docs/scaling.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "kustomization.yaml").write_text(text)
    rendered = render(tmp_path)
    assert {"ScaledObject", "ServiceMonitor", "PrometheusRule"} <= {document["kind"] for document in rendered}
    assert {document["metadata"]["namespace"] for document in rendered} == {"embeddings"}
    (deployed,) = of_kind(rendered, "Deployment")
    assert deployed["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/preblock:0.1.0"


def test_probe_paths_return_200(tiny_server: Server) -> None:
    for probe, path in (("startupProbe", "/livez"), ("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert container()[probe]["httpGet"] == {"path": path, "port": "http"}
        assert runtime()[probe]["httpGet"] == {"path": path, "port": 8080}
        assert httpx.get(tiny_server.address + path, timeout=60).status_code == 200


def test_variables_and_ports_are_those_of_settings() -> None:
    known = {f"PREBLOCK_{name.upper()}" for name in Settings.model_fields}
    assert {entry["name"] for entry in (*container()["env"], *runtime()["env"])} <= known
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    environment = {entry["name"]: entry["value"] for entry in container()["env"]}
    assert ports == {"http": Settings().port, "grpc": int(environment["PREBLOCK_GRPC_PORT"])}
    for service in documents(BASE / "service.yaml"):
        assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    (policy,) = documents(BASE / "network-policy.yaml")
    assert [port["port"] for port in policy["spec"]["ingress"][0]["ports"]] == [*ports]


def test_pod_is_confined_and_has_time_to_end() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    pause = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause + Settings().shutdown_timeout_seconds + 10
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text()
    # Else a kubelet refuses an image whose user is a name.
    assert runtime()["securityContext"]["runAsNonRoot"] is True
    assert f"\nUSER {pod['securityContext']['runAsUser']}:" in (ROOT / "Dockerfile").read_text()
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["enableServiceLinks"] is False


def test_references_between_objects_resolve() -> None:
    (claim,) = documents(BASE / "volume-claim.yaml")
    (job,) = documents(BASE / "export-job.yaml")
    for pod in (deployment()["spec"]["template"]["spec"], job["spec"]["template"]["spec"]):
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (scaler,) = documents(BASE / "horizontal-pod-autoscaler.yaml")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]
    (scaled,) = documents(BASE / "components/keda/scaled-object.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]


def test_kubernetes_rules_match_prometheus_rules() -> None:
    (rule,) = documents(BASE / "components/monitoring/prometheus-rule.yaml")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())


def test_autoscaling_queries_use_exposed_metrics(tiny_server: Server) -> None:
    (scaled,) = documents(BASE / "components/keda/scaled-object.yaml")
    (service,) = documents(KSERVE / "inference-service.yaml")
    external = service["spec"]["predictor"]["autoScaling"]["metrics"][0]["external"]
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert external["metric"]["query"] == query
    promql_parser.parse(query)
    exposed = httpx.get(f"{tiny_server.address}/metrics", timeout=60).text
    for name in ("preblock_requests_running", "preblock_queue_depth"):
        assert name in query
        assert f"\n{name}" in exposed


def test_kserve_alias_matches_service_name() -> None:
    (service,) = documents(KSERVE / "inference-service.yaml")
    (argument,) = service["spec"]["predictor"]["model"]["args"]
    assert argument.startswith(f"--alias={service['metadata']['name']}=")
    (runtime,) = documents(KSERVE / "runtime.yaml")
    formats = [entry["name"] for entry in runtime["spec"]["supportedModelFormats"]]
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
    assert json.dumps(runtime).count("8080") == 6  # one port in annotations, arguments and probes


FOLDER = ROOT / "deploy/ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text())
(SERVICE,) = documents(FOLDER / "ray-service.yaml")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
TEMPLATES = [group["template"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]
(APPLICATION,) = SERVE["applications"]


def test_ray_service_fits_schemas_settings_and_its_configuration() -> None:
    check(SERVICE)
    assert SERVICE["apiVersion"] == "ray.io/v1"
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == SERVE
    assert set(APPLICATION["args"]) <= set(Settings.model_fields)
    Settings(**APPLICATION["args"])
    (claim,) = documents(BASE / "volume-claim.yaml")
    for template in TEMPLATES:
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}, [VERSIONS[0], VERSIONS[-1]])
        (volume,) = template["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = template["spec"]["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == APPLICATION["args"]["repository"]
    (deployment,), (worker,) = APPLICATION["deployments"], CLUSTER["workerGroupSpecs"]
    grace = worker["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > deployment["graceful_shutdown_timeout_s"]


def test_names_are_those_of_the_module() -> None:
    module, _, builder = APPLICATION["import_path"].partition(":")
    (deployment,) = APPLICATION["deployments"]
    source = (FOLDER / f"{module}.py").read_text()
    assert f"\ndef {builder}(" in source
    assert f'@serve.deployment(\n        name="{deployment["name"]}",\n' in source


def test_every_file_names_the_same_version_of_ray() -> None:
    version = CLUSTER["rayVersion"]
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"rayproject/ray:{version}-" in dockerfile
    assert f"ray[serve]=={version}" in dockerfile
    assert f"RAY := ray[serve]=={version}" in (ROOT / "Makefile").read_text()
