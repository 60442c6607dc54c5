"""The examples for engines with embedding input: the engines' own code reads the payloads.

Neither engine runs here. `tests/data/engines` holds the code, with its sources.
"""

import base64
import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import preblock
from tests.clients.test_vllm import StandIn, run, stand_in
from tests.support.artifacts import copy_artifact
from tests.support.paths import ROOT
from tests.support.servers import Server, serve

__all__ = ["stand_in"]
ENGINES = ROOT / "tests/data/engines"


def engine_function(file: str, name: str) -> Any:
    """Return a function of an engine's code."""
    names: dict[str, Any] = {}
    exec((ENGINES / file).read_text(), names)
    return names[name]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`safe_load_prompt_embeds` of vLLM, with functions of Python and torch for those that it imports."""
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
    return engine_function("vllm_embed_utils.txt", "safe_load_prompt_embeds")


def test_vllm_chat_example_sends_vectors_without_special_tokens(
    model_server: Server, stand_in: tuple[str, type[StandIn]], vllm: Any
) -> None:
    address, handler = stand_in
    done = run(model_server.address, "minilm", address, "Hello, world!", example="vllm_chat.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "yes\n", "")
    (request,) = handler.seen
    ((message),) = request["messages"]
    (part,) = message["content"]
    assert (message["role"], part["type"]) == ("user", "prompt_embeds")
    model = {
        "enable_prompt_embeds": True,
        "dtype": torch.bfloat16,
        "hf_text_config": None,
        "get_hidden_size": lambda: 384,
    }
    tensor = vllm(SimpleNamespace(**model), part["data"])
    with preblock.connect(model_server.address) as client:
        ids = client.text("Hello, world!", model="minilm", return_tokens=True).input_ids
        assert ids is not None
        expected = client.embed(ids[0][1:-1], model="minilm", output="token_embeddings").to_torch()
    assert torch.equal(tensor, expected[0].bfloat16())


@pytest.mark.parametrize("whole", [False, True])
def test_sglang_example_payload_is_one_prompt(
    tiny_server: Server, stand_in: tuple[str, type[StandIn]], whole: bool
) -> None:
    address, handler = stand_in
    done = run(tiny_server.address, "gpt", address, "3", "1", "4", example="sglang_input_embeds.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "'yes'\n", "")
    (request,) = handler.seen
    given = request["input_embeds"][0] if whole else request["input_embeds"]
    parsed = SimpleNamespace(text=None, input_ids=None, input_embeds=given)
    engine_function("sglang_io_struct.txt", "_determine_batch_size")(parsed)
    assert (parsed.is_single, parsed.batch_size) == (whole, 1)
    with preblock.connect(tiny_server.address) as client:
        expected = client.embed([3, 1, 4], model="gpt", output="token_embeddings").vectors
    assert np.array_equal(np.array(request["input_embeds"], np.float32), expected)


def test_engine_examples_print_server_error_in_one_line(
    tiny_server: Server, stand_in: tuple[str, type[StandIn]]
) -> None:
    address, _ = stand_in
    for example, arguments in (
        ("vllm_chat.py", ("gpt", address, "Hello")),
        ("sglang_input_embeds.py", ("nope", address, "1")),
        ("llama_cpp_rows.py", ("nope", "1")),
    ):
        done = run(tiny_server.address, *arguments, example=example)
        assert done.returncode == 1
        assert done.stderr.startswith("Preblock: ")
        assert done.stderr.count("\n") == 1


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
    done = run(tiny_server.address, "gpt", "3", "1", "4", example="llama_cpp_rows.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "prompt.f32: 3 rows of 4 values, token_embeddings\n", "")
    rows = np.fromfile(tmp_path / "prompt.f32", np.float32).reshape(3, 4)
    with preblock.connect(tiny_server.address) as client:
        expected = client.embed([3, 1, 4], model="gpt", output="token_embeddings").vectors
    assert np.array_equal(rows, expected[0])
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
    names_of_example: dict[str, Any] = {"__name__": "example"}
    exec((ROOT / "examples" / "llama_cpp_rows.py").read_text(), names_of_example)
    names_of_example["fill"](batch, rows)
    assert (batch.n_tokens, bool(batch.token)) == (3, False)
    assert np.array_equal(np.ctypeslib.as_array(batch.embd, (3, 4)), rows)
    assert [batch.pos[:3], batch.n_seq_id[:3], batch.logits[:3]] == [[0, 1, 2], [1, 1, 1], [0, 0, 1]]
    assert [batch.seq_id[token][0] for token in range(3)] == [0, 0, 0]


def test_llama_cpp_gets_the_scale_of_its_row(tmp_path: Path) -> None:
    copy_artifact("gemma", tmp_path / "models")
    with serve(tmp_path / "models") as server:
        done = run(server.address, "gemma", "1", example="llama_cpp_rows.py", folder=tmp_path)
        without = run(
            server.address, "gemma", "1", "--gguf", "prompt.f32", example="llama_cpp_rows.py", folder=tmp_path
        )
    assert done.stdout == "prompt.f32: 1 rows of 4 values, token_embeddings\n"
    assert without.stderr == "--gguf needs llama-cpp-python: pip install llama-cpp-python\n"
