"""Check the alerts, the settings and every query with promtool; skipped without promtool."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.test_observe import QUERIES
from tests.support.paths import ROOT
from tests.support.servers import Server

FOLDER = ROOT / "deploy/prometheus"
pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")


def promtool(*arguments: object, given: str | None = None) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], check=False, capture_output=True, text=True, input=given, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_alert_rules_pass_their_tests() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules.test.yml")


def test_promtool_accepts_prometheus_config(tmp_path: Path) -> None:
    """Check the settings with a key in place of the secret."""
    (tmp_path / "metrics").write_text("key")
    settings = (FOLDER / "prometheus.yml").read_text()
    assert "/run/secrets/metrics" in settings
    (tmp_path / "prometheus.yml").write_text(settings.replace("/run/secrets/metrics", str(tmp_path / "metrics")))
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    promtool("check", "config", tmp_path / "prometheus.yml")


def test_promtool_accepts_every_query(tmp_path: Path) -> None:
    """Write the queries as rules, because promtool checks them without a server."""
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(QUERIES.values())]
    for wrong in ([], [{"record": "query:wrong", "expr": "sum by (protocol (up)"}]):
        (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules + wrong}]}))
        if wrong:
            with pytest.raises(AssertionError, match="parse error"):
                promtool("check", "rules", tmp_path / "queries.yml")
        else:
            promtool("check", "rules", tmp_path / "queries.yml")


def test_promtool_accepts_server_metrics(tiny_server: Server) -> None:
    httpx.post(f"{tiny_server.address}/models/gpt/embed", json={"input_ids": [1]}).raise_for_status()
    promtool("check", "metrics", given=httpx.get(f"{tiny_server.address}/metrics").text)
