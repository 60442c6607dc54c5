"""The examples for engines with embedding input: the engines' own code reads the payloads.

No engine runs here: a stand-in answers. It proves the sent bytes, not their use. `tests/data/engines` holds code of
engines, with its sources.
"""

import base64
import ctypes
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import preblock
from tests.support.paths import ROOT
from tests.support.servers import Server

ENGINES = ROOT / "tests/data/engines"


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


def run(example: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)


def token_vectors(server: Server) -> Any:
    """Return the vectors of the ids 3, 1 and 4."""
    with preblock.connect(server.address) as client:
        return client.embed([3, 1, 4], model="gpt", output="token_embeddings").to_torch()[0]


def function_of(file: Path, name: str) -> Any:
    """Return a function of an engine's code, or of an example."""
    names: dict[str, Any] = {"__name__": "module"}
    exec(file.read_text(), names)
    return names[name]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`safe_load_prompt_embeds` of vLLM for a width, with functions of Python and torch for those that it imports."""
    names: dict[str, dict[str, Any]] = {
        "exceptions": {"VLLMValidationError": ValueError},
        "utils.async_utils": {"make_async": lambda function: function},
        "utils.sparse_utils": {
            "check_sparse_tensor_invariants_threadsafe": torch.sparse.check_sparse_tensor_invariants,
            "safe_to_dense": lambda tensor, **_: tensor.to_dense(),
        },
    }
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in names.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace(**members))
    monkeypatch.setitem(sys.modules, "pybase64", base64)  # both take `validate`
    read = function_of(ENGINES / "vllm_embed_utils.txt", "safe_load_prompt_embeds")
    model = {"enable_prompt_embeds": True, "dtype": torch.bfloat16, "hf_text_config": None}
    return lambda width, prompt: read(SimpleNamespace(**model, get_hidden_size=lambda: width), prompt)


def test_vllm_chat_example_sends_vectors_without_special_tokens(
    model_server: Server, stand_in: tuple[str, type[StandIn]], vllm: Any
) -> None:
    address, handler = stand_in
    done = run("vllm_chat.py", model_server.address, "minilm", address, "Hello, world!")
    assert (done.returncode, done.stdout, done.stderr) == (0, "yes\n", "")
    (request,) = handler.seen
    ((message),) = request["messages"]
    (part,) = message["content"]
    assert (message["role"], part["type"]) == ("user", "prompt_embeds")
    tensor = vllm(384, part["data"])
    with preblock.connect(model_server.address) as client:
        expected = client.text("Hello, world!", model="minilm", special_tokens=False, output="token_embeddings")
    assert torch.equal(tensor, expected.to_torch()[0].bfloat16())


@pytest.mark.parametrize("whole", [False, True])
def test_sglang_example_payload_is_one_prompt(
    tiny_server: Server, stand_in: tuple[str, type[StandIn]], whole: bool
) -> None:
    address, handler = stand_in
    done = run("sglang_input_embeds.py", tiny_server.address, "gpt", address, "3", "1", "4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "'yes'\n", "")
    (request,) = handler.seen
    given = request["input_embeds"][0] if whole else request["input_embeds"]
    parsed = SimpleNamespace(text=None, input_ids=None, input_embeds=given)
    function_of(ENGINES / "sglang_io_struct.txt", "_determine_batch_size")(parsed)
    assert (parsed.is_single, parsed.batch_size) == (whole, 1)
    assert torch.equal(torch.tensor(request["input_embeds"][0]), token_vectors(tiny_server))


def test_engine_examples_fail_in_one_line(tiny_server: Server, stand_in: tuple[str, type[StandIn]]) -> None:
    address, handler = stand_in
    handler.wrong = True
    for example, arguments, said in (
        ("vllm_chat.py", ("gpt", address, "Hello"), "Preblock: "),
        ("vllm_prompt_embeds.py", ("gpt", address, "3"), "the completion from ids differs: 'yes'"),
    ):
        done = run(example, tiny_server.address, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), example
        assert done.stderr.startswith(said)


def batch_type() -> type[ctypes.Structure]:
    """Return `llama_batch` as its header declares it."""
    text = (ENGINES / "llama_batch.txt").read_text()
    kinds: dict[str, Any] = {"int32_t": ctypes.c_int32, "int8_t": ctypes.c_int8, "float": ctypes.c_float}
    for known, name in re.findall(r"typedef (\w+) (\w+);", text):
        kinds[name] = kinds[known]
    fields = []
    for kind, stars, name in re.findall(r"^ {8}(\w+)\s*(\**)\s+(\w+);", text, re.MULTILINE):
        field = kinds[kind]
        for _ in stars:
            field = ctypes.POINTER(field)
        fields.append((name, field))
    return type("llama_batch", (ctypes.Structure,), {"_fields_": fields})


def test_llama_cpp_finds_the_rows_in_its_batch(tiny_server: Server, tmp_path: Path) -> None:
    done = run("llama_cpp_rows.py", tiny_server.address, "gpt", "3", "1", "4", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "prompt.f32: 3 rows of 4 values, token_embeddings\n", "")
    rows = np.fromfile(tmp_path / "prompt.f32", np.float32).reshape(3, 4)
    assert np.array_equal(rows, token_vectors(tiny_server).numpy())
    kind = batch_type()
    names = ["n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"]
    assert [name for name, *_ in kind._fields_] == names
    # As `llama_batch_init(3, 4, 1)`: all arrays for tokens of vectors, and no ids.
    sequences = [(ctypes.c_int32 * 1)() for _ in range(3)]
    pointer = ctypes.POINTER(ctypes.c_int32)
    batch: Any = kind(
        embd=(ctypes.c_float * 12)(),
        pos=(ctypes.c_int32 * 3)(7, 7, 7),
        n_seq_id=(ctypes.c_int32 * 3)(),
        seq_id=(pointer * 3)(*(ctypes.cast(sequence, pointer) for sequence in sequences)),
        logits=(ctypes.c_int8 * 3)(7, 7, 7),
    )
    function_of(ROOT / "examples" / "llama_cpp_rows.py", "fill")(batch, rows)
    assert (batch.n_tokens, bool(batch.token)) == (3, False)
    assert np.array_equal(np.ctypeslib.as_array(batch.embd, (3, 4)), rows)
    assert [batch.pos[:3], batch.n_seq_id[:3], batch.logits[:3]] == [[0, 1, 2], [1, 1, 1], [0, 0, 1]]
    assert [batch.seq_id[token][0] for token in range(3)] == [0, 0, 0]


def test_vllm_example_sends_prompt_embeds(tiny_server: Server, stand_in: tuple[str, type[StandIn]], vllm: Any) -> None:
    address, handler = stand_in
    done = run("vllm_prompt_embeds.py", tiny_server.address, "gpt", address, "3", "1", "4", "--tokens", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "'yes'\n", "")
    by_vectors, by_ids = handler.seen
    asked = {"model": "theirs", "max_tokens": 5, "temperature": 0}
    assert by_ids == asked | {"prompt": [3, 1, 4]}
    tensor = vllm(4, by_vectors.pop("prompt_embeds"))
    assert by_vectors == asked | {"prompt": None}
    assert torch.equal(tensor, token_vectors(tiny_server).bfloat16())
