"""Java's own HTTP client: on http:// addresses it offers HTTP/2 in the headers of its requests."""

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.servers import Server

PROGRAM = Path(__file__).with_name("JavaClient.java")


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK: apt-get install default-jdk-headless")
def test_java_client_receives_the_responses_of_httpx(tiny_server: Server) -> None:
    body = {"input_ids": [[1, 2], [3, 4]], "encoding": "float"}
    urls = [f"{tiny_server.address}/models/{model}/embed" for model in ("gpt", "bert", "gpt")]
    command = ["java", str(PROGRAM), json.dumps(body), *urls]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [httpx.post(url, json=body).raise_for_status().text for url in urls]
