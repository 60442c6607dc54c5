"""The systemd unit of docs/production.md, and its settings file."""

import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from preblock.service.core.settings import Settings
from tests.support.paths import PREBLOCK, ROOT

TEXT = (ROOT / "docs/production.md").read_text(encoding="utf-8")
(UNIT,) = re.findall(r"^```ini\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_unit_agrees_with_image_and_settings(tmp_path: Path) -> None:
    (tunables,) = re.findall(
        r"^ENV (GLIBC_TUNABLES=\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert f"Environment={tunables}\n" in UNIT
    unit = RawConfigParser(strict=False)
    unit.read_string(UNIT)
    assert f"stop_grace_period: {unit['Service']['timeoutstopsec']}s" in (ROOT / "docker-compose.yml").read_text()
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
