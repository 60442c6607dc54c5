"""The queries of the dashboard and of the alerts, compared with the metrics of a running server.

promql_parser reads the queries, prometheus-client the metrics, and promtool all files, where it is installed.
`make smoke` queries a real Prometheus.
"""

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggregateExpr, Call, Expr, MatrixSelector, VectorSelector
from websockets.sync.client import connect

from preblock.service.core import errors
from preblock.service.observability.metrics import STAGES
from tests.support.paths import ROOT
from tests.support.servers import Server, serve

DEPLOY = ROOT / "deploy"
RULES: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/preblock.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    .replace("$__rate_interval", "1m")
    .replace("$instance", ".*")
    for panel in PANELS
    for target in panel["targets"]
}
KNOWN = {
    "outcome": {"ok", "success", "fail", "internal_error", "cancelled"}
    | {kind for kind, value in vars(errors).items() if isinstance(value, type)},
    "stage": {*STAGES},
    "job": {"preblock"},
    "instance": {".*"},
    "kind": {"anonymous"},
}
"""Values of labels in queries."""


@pytest.fixture(scope="module")
def exposed(tiny_repository: Path) -> dict[str, set[str]]:
    """The labels of each series after requests over several protocols, with the labels added by Prometheus."""
    with serve(tiny_repository) as server, httpx.Client(base_url=server.address) as client:
        body = {"input_ids": [[1, 2]]}
        with connect(f"{server.socket}/models/gpt/decode") as stream:
            stream.send(json.dumps({"input_ids": [1]}))
            stream.recv()
        assert client.post("/models/gpt/embed", json={"input_ids": [[-1]]}).status_code == 422
        for _ in range(20):  # concurrent requests, until some share a run
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda _: client.post("/models/gpt/embed", json=body).raise_for_status(), range(64)))
            text = client.get("/metrics").text
            if "preblock_model_batched_stages_total{" in text:
                break
    added = {"job", "instance", "service"}
    found = {"up": added}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        found[sample.name] = {*sample.labels, *added}
    return found


def parts(query: str | Expr) -> list[Expr]:
    """Return every part of a query, or of a part of one."""
    found: list[Expr] = []
    promql_parser.walk(promql_parser.parse(query) if isinstance(query, str) else query, found.append)
    return found


def selectors(query: str | Expr) -> list[VectorSelector]:
    """Return the series of a query, or of a part of one."""
    found = parts(query)
    inner = [part.vector_selector for part in found if isinstance(part, MatrixSelector)]
    return [part for part in found if isinstance(part, VectorSelector)] + inner


def check(query: str, exposed: dict[str, set[str]]) -> None:
    """Check that a query reads metrics and labels of the server, and takes the rate of counters only."""
    read = selectors(query)
    assert read
    for selector in read:
        assert selector.name in exposed
        for matcher in selector.matchers.matchers:
            assert matcher.name in exposed[str(selector.name)]
            assert set(matcher.value.split("|")) <= KNOWN[matcher.name]
    for part in parts(query):
        if isinstance(part, AggregateExpr) and part.modifier is not None:
            for selector in selectors(part.expr):
                assert set(part.modifier.labels) <= exposed[str(selector.name)]
    rates = [part for part in parts(query) if isinstance(part, Call) and part.func.name == "rate"]
    rated = {selector.name for call in rates for argument in call.args for selector in selectors(argument)}
    assert rated == {selector.name for selector in read if str(selector.name).endswith(("_total", "_bucket"))}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_query_reads_exposed_metrics(query: str, exposed: dict[str, set[str]]) -> None:
    check(query, exposed)


def test_every_alert_has_firing_test_case() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus/rules.test.yml").read_text())["tests"]
    cases = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]
    assert {name for name, fires in cases if fires} == {rule["alert"] for rule in RULES}


def test_every_alert_links_to_its_runbook_section() -> None:
    page = (ROOT / "docs/production.md").read_text(encoding="utf-8")
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    settings = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert settings["global"]["external_labels"]["runbooks"].startswith("https://")
    for rule in RULES:
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert address == "{{ or $externalLabels.runbooks `docs/production.md` }}"
        assert anchor == rule["alert"].lower()
        assert anchor in anchors


def test_dashboard_queries_its_own_datasource_and_instance() -> None:
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    for panel in PANELS:
        assert {item["datasource"]["uid"] for item in (panel, *panel["targets"])} == {"${datasource}"}
        for target in panel["targets"]:
            for selector in selectors(target["expr"].replace("$__rate_interval", "1m")):
                assert "$instance" in {matcher.value for matcher in selector.matchers.matchers}


FOLDER = ROOT / "deploy/prometheus"
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")


def promtool(*arguments: object, given: str | None = None) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], check=False, capture_output=True, text=True, input=given, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_promtool_alert_rules_pass_their_tests() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules.test.yml")


@NEEDS_PROMTOOL
def test_promtool_accepts_prometheus_config(tmp_path: Path) -> None:
    """Check the settings with a key in place of the secret."""
    (tmp_path / "metrics").write_text("key")
    settings = (FOLDER / "prometheus.yml").read_text()
    assert "/run/secrets/metrics" in settings
    (tmp_path / "prometheus.yml").write_text(settings.replace("/run/secrets/metrics", str(tmp_path / "metrics")))
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    promtool("check", "config", tmp_path / "prometheus.yml")


@NEEDS_PROMTOOL
def test_promtool_accepts_server_metrics(tiny_server: Server) -> None:
    httpx.post(f"{tiny_server.address}/models/gpt/embed", json={"input_ids": [1]}).raise_for_status()
    promtool("check", "metrics", given=httpx.get(f"{tiny_server.address}/metrics").text)
