"""The example for vLLM, against a stand-in: it reads the field as vLLM does.

The stand-in proves the sent bytes, not their use by vLLM.
"""

import base64
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import preblock
from tests.support.paths import ROOT
from tests.support.servers import Server


class StandIn(BaseHTTPRequestHandler):
    """Answers like a vLLM or SGLang with one model, always the same, except for vectors where `wrong` is set."""

    seen: list[dict[str, Any]]
    wrong = False

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "theirs", "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(request)
        text = "no" if self.wrong and "prompt_embeds" in request else "yes"
        answers = {
            "/v1/completions": {"object": "text_completion", "choices": [{"index": 0, "text": text}]},
            "/v1/chat/completions": {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]},
            "/generate": [{"text": text}],  # SGLang
        }
        self._answer(answers[self.path])

    def _answer(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def stand_in() -> Iterator[tuple[str, type[StandIn]]]:
    class Fresh(StandIn):
        seen: list[dict[str, Any]] = []  # noqa: RUF012 - one list for one test

    with HTTPServer(("127.0.0.1", 0), Fresh) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Fresh
        server.shutdown()
        thread.join()


def run(
    *arguments: str, example: str = "vllm_prompt_embeds.py", folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)


def test_vllm_example_sends_prompt_embeds(tiny_server: Server, stand_in: tuple[str, type[StandIn]]) -> None:
    address, handler = stand_in
    done = run(tiny_server.address, "gpt", address, "3", "1", "4", "--tokens", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "'yes'\n", "")
    by_vectors, by_ids = handler.seen
    assert by_ids == {"model": "theirs", "max_tokens": 5, "temperature": 0, "prompt": [3, 1, 4]}
    # As vLLM reads it: no pickle, and a tensor (tokens, width).
    prompt = base64.b64decode(by_vectors.pop("prompt_embeds"), validate=True)
    tensor = torch.load(io.BytesIO(prompt), weights_only=True, map_location="cpu")
    assert by_vectors == {"model": "theirs", "max_tokens": 5, "temperature": 0, "prompt": None}
    with preblock.connect(tiny_server.address) as client:
        expected = client.embed([3, 1, 4], model="gpt", output="token_embeddings").to_torch()
    assert (tensor.dtype, tensor.shape) == (torch.float32, (3, 4))
    assert torch.equal(tensor, expected[0])
    assert np.isfinite(tensor.float().numpy()).all()


def test_vllm_example_fails_on_differing_completion(tiny_server: Server, stand_in: tuple[str, type[StandIn]]) -> None:
    address, handler = stand_in
    handler.wrong = True
    done = run(tiny_server.address, "gpt", address, "3")
    assert done.returncode == 1
    assert "the completion from ids differs: 'yes'" in done.stderr
