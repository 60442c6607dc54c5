"""Results of the clients, on a real server. Oracles: the JSON of the native API, the module, the stored table."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

import preblock
from preblock.client import Embeddings
from preblock.client.payloads import input_embeds
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from tests.client.conftest import Connect
from tests.support.artifacts import read_tables
from tests.support.late import make_artifacts, torch
from tests.support.servers import Server

ROWS = [[1, 2, 3], [4, 5, 6]]
RAGGED = [[1, 2, 3], [4], [5, 6]]


def native(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    """Return the JSON answer of the native API, with its vectors as bytes."""
    answer: dict[str, Any] = (
        httpx.post(f"{server.address}/models/{model}/embed", json=fields, timeout=60).raise_for_status().json()
    )
    return answer | {"data": base64.b64decode(answer[fields.get("output", "embeddings")])}


def assert_equal(result: Embeddings, answer: dict[str, Any]) -> None:
    """Compare all fields of two results, the vectors bit for bit."""
    assert (result.model, result.version, result.use_as) == (answer["model"], answer["version"], answer["use_as"])
    assert (result.vectors.dtype.name, list(result.vectors.shape)) == (answer["dtype"], answer["shape"])
    assert result.vectors.tobytes() == answer["data"]
    assert result.lengths.tolist() == answer.get("lengths", [answer["shape"][1]] * answer["shape"][0])
    assert result.next_offset.tolist() == answer["next_offset"]


def load_prompt(prompt: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(prompt)), weights_only=True)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_returns_one_vector_per_row(tiny_client: Any, tiny_server: Server, pooling: str) -> None:
    for rows, given in ((ROWS, np.array(ROWS)), (RAGGED, RAGGED)):
        result = tiny_client.embed(given, model="gpt", pooling=pooling)
        answer = native(tiny_server, "gpt", input_ids=rows, pooling=pooling)
        assert list(result.vectors.shape) == answer["shape"] == [len(rows), 4]
        assert result.vectors.tobytes() == answer["data"]
        assert [vector.shape for vector in result.rows()] == [(4,)] * len(rows)
        assert result.next_offset.tolist() == answer["next_offset"] == list(map(len, rows))


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        (ROWS, ROWS),
        (RAGGED, RAGGED),
        ([np.array(row) for row in RAGGED], RAGGED),
        ([np.int32(1), np.int64(2)], [[1, 2]]),
        (np.array([1, 2, 3]), [[1, 2, 3]]),
        (np.array(ROWS, ">i4"), ROWS),
        (np.array(ROWS).repeat(2, 1)[:, ::2], ROWS),
        (np.array(RAGGED, object), RAGGED),
        (lambda: torch.tensor(ROWS), ROWS),
        (lambda: torch.tensor(ROWS, dtype=torch.int32).T.contiguous().T, ROWS),
        (lambda: [torch.tensor(row) for row in RAGGED], RAGGED),
    ],
)
def test_embed_accepts_ids_of_every_container_and_dtype(
    tiny_client: Any, tiny_server: Server, ids: Any, rows: list[list[int]]
) -> None:
    given = ids() if callable(ids) else ids  # torch is imported when it is used
    assert_equal(tiny_client.embed(given, model="gpt"), native(tiny_server, "gpt", input_ids=rows))


@pytest.mark.parametrize(
    "options",
    [
        {"offset": 2},
        {"offset": "per row"},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"output": "token_embeddings"},
        {"position_ids": "like ids"},
        {"attention_mask": "like ids"},
        {"token_type_ids": "like ids"},
    ],
    ids=str,
)
def test_embed_options_match_native_api(tiny_client: Any, tiny_server: Server, options: dict[str, Any]) -> None:
    for ids in (ROWS, RAGGED):
        values = {
            "per row": list(range(len(ids))),
            "like ids": [[index % 2 for index in range(len(row))] for row in ids],
        }
        fields = {name: values.get(value, value) for name, value in options.items()}
        expected = native(tiny_server, "bert", input_ids=ids, **fields)
        assert_equal(tiny_client.embed(ids, model="bert", **fields), expected)
        if ids is ROWS:
            arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in fields.items()}
            assert_equal(tiny_client.embed(np.array(ids), model="bert", **arrays), expected)


def test_rows_are_views_and_match_separate_requests(tiny_client: Any) -> None:
    for ids in (ROWS, RAGGED):
        result = tiny_client.embed(ids, model="gpt")
        assert len(result.rows()) == len(ids)
        for row, vectors in zip(ids, result.rows(), strict=True):
            assert np.shares_memory(vectors, result.vectors)
            assert np.array_equal(vectors, tiny_client.embed(row, model="gpt").vectors[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_become_tensors_and_numbers_of_python(tiny_client: Any, dtype: str) -> None:
    result = tiny_client.embed(RAGGED, model="gpt", dtype=dtype)
    tensor = result.to_torch()
    assert tensor.dtype == getattr(torch, dtype)
    wide = tiny_client.embed(RAGGED, model="gpt").to_torch()
    assert torch.equal(tensor, wide.to(tensor.dtype))
    numbers = input_embeds(result)
    assert [vector for row in numbers for vector in row] == tensor.float().tolist()
    assert [len(row) for row in numbers] == [3, 1, 2]
    assert {type(number) for row in numbers for vector in row for number in vector} == {float}
    tensor.zero_()  # in the same memory
    assert not result.vectors.any()


def test_text_vectors_match_its_ids(tiny_client: Any, tiny_server: Server) -> None:
    result = tiny_client.text(["a b", "c"], model="bert", return_tokens=True, offset=1)
    expected = native(tiny_server, "bert", text=["a b", "c"], offset=1, return_tokens=True)
    assert_equal(result, expected)
    assert [row.tolist() for row in result.input_ids] == [[1, 4, 5, 2], [1, 6, 2]] == expected["input_ids"]
    assert [row.tolist() for row in result.spans] == expected["spans"]
    again = tiny_client.embed(result.input_ids, model="bert", offset=1)
    assert again.vectors.tobytes() == result.vectors.tobytes()
    plain = tiny_client.text("a b", model="bert", version=1, dtype="bfloat16", output="token_embeddings")
    assert (plain.version, plain.vectors.dtype, plain.input_ids) == (1, ml_dtypes.bfloat16, None)
    pooled = tiny_client.text(["a b", "a"], model="bert", pooling="mean")
    answer = native(tiny_server, "bert", text=["a b", "a"], pooling="mean")
    assert np.concatenate(pooled.rows()).tobytes() == answer["data"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_loads_prompt_embeds(tiny_client: Any, dtype: str) -> None:
    for ids in (ROWS, RAGGED, np.array(ROWS), np.array([1, 2])):
        prompts = tiny_client.prompt_embeds(ids, model="bert", dtype=dtype)
        expected = tiny_client.embed(ids, model="bert", dtype=dtype, output="token_embeddings")
        for prompt, vectors in zip(prompts, expected.rows(), strict=True):
            tensor = load_prompt(prompt)
            assert tensor.dtype == getattr(torch, dtype)
            assert np.array_equal(tensor.float().numpy(), vectors.astype(np.float32))


@pytest.mark.parametrize(("side", "kept"), [("left", [1, 2, 3, 4, 5, 6]), ("right", [0, 1, 2, 3, 4, 5])])
def test_truncation_is_reported(tiny_client: Any, side: str, kept: list[int]) -> None:
    ids = [[0, 1, 2, 3, 4, 5, 6], [1]]
    result = tiny_client.embed(ids, model="gpt", truncate=side)
    assert result.truncated.tolist() == [1, 0]
    assert result.lengths.tolist() == [6, 1]
    assert np.array_equal(result.rows()[0], tiny_client.embed(kept, model="gpt").vectors[0])


def test_model_attributes_match_manifest(kinds_client: Any, kinds_repository: Path) -> None:
    """Oracle: the manifest, read by the service."""
    for name in ("bert", "gpt"):
        model, manifest = kinds_client.model(name), read_manifest(kinds_repository / name / "1")
        assert isinstance(manifest, Manifest)
        assert (model.kind, model.family, model.width) == ("tokens", manifest.family, manifest.width)
        assert (model.vocab_size, model.dtype, model.outputs) == (manifest.vocab_size, "float32", manifest.widths)
        assert (model.indices, model.needed) == (manifest.indices, manifest.needed)
        assert (model.padding_id, model.consumers) == (manifest.padding_id, [])
        assert model.has_tokenizer == (name == "bert")
        for output, width in model.outputs.items():
            assert kinds_client.embed([1], model=name, output=output).vectors.shape == (1, 1, width)
    stem, manifest = kinds_client.model("vit"), read_manifest(kinds_repository / "vit" / "1")
    assert (stem.kind, stem.width, stem.outputs) == ("stem", manifest.width, {})
    assert (stem.vocab_size, stem.indices, stem.needed, stem.consumers) == (None, {}, (), [])
    assert not stem.has_tokenizer
    assert set(kinds_client.model("alibi").outputs) == {"embeddings", "token_embeddings"}


def test_every_call_works_with_both_clients(connect: Connect, tiny_server: Server, kinds_server: Server) -> None:
    """Oracle: the module, for the bias and the further inputs."""
    tiny, client = connect(tiny_server.address), connect(kinds_server.address)
    bert, gpt = sorted(tiny.models(), key=lambda model: str(model.name))
    assert (bert.name, bert.version, bert.versions, bert.max_len) == ("bert", 2, [1, 2], 8)
    assert (gpt.provider, gpt.manifest["family"]) == ("CPUExecutionProvider", "gpt2")
    assert tiny.model("gpt") == gpt
    assert tiny.model("bert", 1).version == 1
    first, second = (tiny.embed(ROWS, model="bert", version=version) for version in (1, None))
    assert_equal(first, native(tiny_server, "bert/versions/1", input_ids=ROWS))
    assert (first.version, second.version) == (1, 2)
    assert first.vectors.tobytes() != second.vectors.tobytes()
    ids = tiny.text("a b", model="bert", return_tokens=True).input_ids
    assert tiny.prompt_embeds(text="a b", model="bert") == tiny.prompt_embeds(ids, model="bert")
    module = make_artifacts.build_frontend("alibi-levels")
    expected = module.bias(2, 3, 5).detach().numpy()
    assert np.array_equal(client.bias(3, 5, model="alibi", query_offset=2), expected)
    half = client.bias(3, 5, model="alibi", version=1, query_offset=2, dtype="float16")
    assert np.array_equal(half, expected.astype(np.float16))
    levels = {"sentence": [[0, 1, 2], [2, 1, 0]], "word": [[1, 1, 1], [2, 2, 0]]}
    vectors = module(torch.tensor(ROWS), indices={name: torch.tensor(value) for name, value in levels.items()})
    assert np.array_equal(client.embed(ROWS, model="alibi", indices=levels).vectors, vectors.detach().numpy())


def test_client_is_shared_between_threads(tiny_server: Server) -> None:
    rows = [[index % 7, index % 5, index % 3] for index in range(200)]
    with preblock.connect(tiny_server.address) as client, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda row: client.embed(row, model="gpt").vectors, rows))
        assert np.array_equal(np.concatenate(found), client.embed(rows, model="gpt").vectors)


def test_consumers_name_the_output_to_request(kinds_client: Any, kinds_repository: Path) -> None:
    ids = [[3, 0, 10]]
    rows = read_tables(kinds_repository / "gemma" / "1")["tokens"][ids]
    used = {(row["engine"], row["versions"]): row["output"] for row in kinds_client.model("gemma").consumers}
    for versions, expected in ((">=0.18", rows * np.float32(2.5)), ("<0.18", rows)):
        (prompt,) = kinds_client.prompt_embeds(ids, model="gemma", output=used["vllm", versions])
        assert torch.equal(load_prompt(prompt), torch.from_numpy(expected[0]))
