"""The native API on a real server. Oracles: transformers, torch, numpy's own .npy files, the raw tables."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.api.http.native_requests import BYTES, JSON, post_json
from tests.support.late import presets, torch, transformers
from tests.support.protocols import Clients, native_bytes, native_json


def embed(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = post_json(client, model, **fields).raise_for_status().json()
    return document


@pytest.fixture(scope="module")
def gpt2(tiny_tables: dict[str, NDArray[np.float32]]) -> Any:
    """transformers' GPT-2 with the tables of the tiny `gpt`."""
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=4, n_positions=6, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    model: Any = transformers.GPT2Model(config)
    model.eval()
    model.wte.weight.data.copy_(torch.from_numpy(tiny_tables["tokens"]))
    model.wpe.weight.data.copy_(torch.from_numpy(tiny_tables["positions"]))
    return model


@pytest.fixture(scope="module")
def bert(minilm_checkpoint: Path) -> Any:
    """transformers' BERT with the real checkpoint."""
    model: Any = transformers.BertModel.from_pretrained(minilm_checkpoint, add_pooling_layer=False)
    model.eval()
    return model


def entering_block_0(gpt2: Any, input_ids: Any, position_ids: Any) -> NDArray[np.float32]:
    with torch.inference_mode():
        states = gpt2(torch.tensor(input_ids), position_ids=position_ids, output_hidden_states=True).hidden_states
    vectors: NDArray[np.float32] = states[0].numpy()
    return vectors


def positions_of_generate(attention_mask: Any) -> Any:
    """Return positions as transformers' `generate()` counts them."""
    mask = torch.tensor(attention_mask)
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def test_flat_list_is_one_row(tiny_http: httpx.Client) -> None:
    flat, rows = embed(tiny_http, "gpt", input_ids=[1, 2, 3]), embed(tiny_http, "gpt", input_ids=[[1, 2, 3]])
    assert flat["shape"] == [1, 3, 4]
    assert flat == rows


def test_unequal_rows_have_shape_T_D_and_lengths(tiny_http: httpx.Client) -> None:
    answer = embed(tiny_http, "gpt", input_ids=[[1, 2, 3], [4], [5, 6]], encoding="float")
    assert answer["shape"] == [6, 4]
    assert answer["lengths"] == [3, 1, 2]
    assert np.array(answer["embeddings"]).shape == (6, 4)
    assert answer["next_offset"] == [3, 1, 2]


def test_response_names_model_version_dtype_and_encoding(tiny_http: httpx.Client) -> None:
    answer = embed(tiny_http, "bert", input_ids=[1], dtype="float16", encoding="float")
    assert list(answer) == ["model", "version", "dtype", "encoding", "use_as", "shape", "embeddings", "next_offset"]
    assert (answer["model"], answer["version"], answer["dtype"], answer["encoding"]) == ("bert", 2, "float16", "float")


@pytest.mark.parametrize("version", [1, 2])
def test_embed_uses_requested_version(tiny_http: httpx.Client, version: int) -> None:
    named = tiny_http.post(f"/models/bert/versions/{version}/embed", json={"input_ids": [1, 2]}).json()
    newest = embed(tiny_http, "bert", input_ids=[1, 2])
    assert named["version"] == version
    assert newest["version"] == 2
    assert (named["embeddings"] == newest["embeddings"]) == (version == 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_dtypes_are_rounded_like_torch(model_clients: Clients, dtype: str) -> None:
    fields = {"input_ids": [[1, 2, 50256], [7, 8, 9]], "offset": 5}
    exact = native_bytes(model_clients, "gpt2-small", fields)
    response = post_json(model_clients.http, "gpt2-small", BYTES, dtype=dtype, **fields)
    oracle = torch.tensor(exact).to(getattr(torch, dtype))
    assert response.content == oracle.view(torch.uint8).numpy().tobytes()
    assert response.headers["Preblock-Dtype"] == dtype


@pytest.mark.parametrize(("input_ids", "shape"), [([[1, 2, 3], [4, 5, 6]], "2,3,4"), ([[1], [2, 3]], "3,4")])
def test_binary_response_headers_hold_shape_dtype_and_model(
    tiny_http: httpx.Client, input_ids: list[list[int]], shape: str
) -> None:
    response = post_json(tiny_http, "gpt", BYTES, input_ids=input_ids, dtype="float16")
    assert response.headers["Content-Type"] == BYTES
    assert response.headers["Preblock-Shape"] == shape
    assert response.headers["Preblock-Dtype"] == "float16"
    assert (response.headers["Preblock-Model"], response.headers["Preblock-Version"]) == ("gpt", "1")


@pytest.mark.parametrize("offset", [0, 3, [3], [0, 3]])
def test_offset_shifts_positions(
    tiny_clients: Clients, tiny_tables: dict[str, NDArray[np.float32]], offset: int | list[int]
) -> None:
    vectors = native_bytes(tiny_clients, "gpt", {"input_ids": [[1, 2, 3], [4, 5, 6]], "offset": offset})
    start = np.broadcast_to(offset, 2)
    positions = np.concatenate([np.arange(3) + start[0], np.arange(3) + start[1]])
    assert vectors.tobytes() == (tiny_tables["tokens"][1:7] + tiny_tables["positions"][positions]).tobytes()


@pytest.mark.parametrize("positions", [[5, 0, 5], [2, 1, 0], [0, 1, 2]])
def test_position_ids_may_be_non_consecutive(tiny_clients: Clients, gpt2: Any, positions: list[int]) -> None:
    vectors = native_bytes(tiny_clients, "gpt", {"input_ids": [[4, 5, 6]], "position_ids": [positions]})
    oracle = entering_block_0(gpt2, [[4, 5, 6]], torch.tensor([positions]))  # oracle: transformers
    assert vectors.tobytes() == oracle.tobytes()


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], id="left"),
        pytest.param([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], id="right"),
        pytest.param([[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]], id="holes"),
        pytest.param([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], id="all-and-none"),
    ],
)
def test_masked_gpt2_positions_equal_transformers_generate(
    tiny_clients: Clients, gpt2: Any, mask: list[list[int]]
) -> None:
    ids = [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]
    vectors = native_bytes(tiny_clients, "gpt", {"input_ids": ids, "attention_mask": mask})
    assert vectors.tobytes() == entering_block_0(gpt2, ids, positions_of_generate(mask)).tobytes()  # transformers


def test_mask_counts_real_tokens_from_offset(tiny_clients: Clients, gpt2: Any) -> None:
    fields = {"input_ids": [[1, 2, 3, 4]], "attention_mask": [[0, 1, 0, 1]], "offset": 3}
    oracle = entering_block_0(gpt2, fields["input_ids"], torch.tensor([[0, 3, 0, 4]]))  # oracle: transformers
    assert native_bytes(tiny_clients, "gpt", fields).tobytes() == oracle.tobytes()


def test_padding_does_not_count_toward_max_len(tiny_http: httpx.Client) -> None:
    answer = embed(tiny_http, "gpt", input_ids=[[0] * 20 + [1, 2]], attention_mask=[[0] * 20 + [1, 1]], offset=4)
    assert answer["shape"] == [1, 22, 4]
    assert answer["next_offset"] == [6]


@pytest.mark.parametrize(
    ("fields", "next_offset"),
    [
        ({"input_ids": [1, 2]}, [2]),
        ({"input_ids": [[1, 2], [3, 4]], "offset": 1}, [3, 3]),
        ({"input_ids": [[1, 2], [3, 4]], "offset": [1, 4]}, [3, 6]),
        ({"input_ids": [[1, 2], [3]], "offset": [1, 4]}, [3, 5]),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[0, 1], [1, 0]], "offset": 2}, [3, 3]),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[0, 0], [1, 1]], "offset": [4, 0]}, [4, 2]),
        ({"input_ids": [[1, 2], [3]], "attention_mask": [[0, 1], [1]]}, [1, 1]),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[5, 0, 2]]}, [6]),
        ({"input_ids": [[1, 2], [3]], "position_ids": [[0, 3], [2]]}, [4, 3]),
        ({"input_ids": [[1, 2]], "position_ids": [[5, 1]], "attention_mask": [[0, 1]]}, [2]),
        ({"input_ids": [[1, 2]], "position_ids": [[5, 1]], "attention_mask": [[0, 0]]}, [0]),
    ],
)
def test_next_offset_continues_each_row(
    tiny_http: httpx.Client, fields: dict[str, Any], next_offset: list[int]
) -> None:
    assert embed(tiny_http, "gpt", **fields)["next_offset"] == next_offset


@pytest.mark.parametrize("model", ["minilm", "transformer-base"])
def test_steps_from_next_offset_equal_one_pass_bit_for_bit(model_clients: Clients, model: str) -> None:
    rows = np.random.default_rng(1).integers(0, 30000, (3, 40)).tolist()
    parts, offset = [], [0, 0, 0]
    for start, end in ((0, 1), (1, 8), (8, 39), (39, 40)):
        fields = {"input_ids": [row[start:end] for row in rows], "offset": offset}
        parts.append(native_bytes(model_clients, model, fields).reshape(3, end - start, -1))
        offset = embed(model_clients.http, model, **fields)["next_offset"]
    assert np.concatenate(parts, axis=1).tobytes() == native_bytes(model_clients, model, {"input_ids": rows}).tobytes()


def test_token_type_ids_default_to_zero(tiny_http: httpx.Client) -> None:
    plain = embed(tiny_http, "bert", input_ids=[[1, 2]])
    assert embed(tiny_http, "bert", input_ids=[[1, 2]], token_type_ids=[[0, 0]]) == plain
    assert embed(tiny_http, "bert", input_ids=[[1, 2]], token_type_ids=[[0, 1]])["embeddings"] != plain["embeddings"]


def test_minilm_equals_transformers_on_real_checkpoint(model_clients: Clients, bert: Any) -> None:
    random = np.random.default_rng(2)
    ids, segments = random.integers(0, 30522, (4, 128)), random.integers(0, 2, (4, 128))
    fields = {"input_ids": ids.tolist(), "token_type_ids": segments.tolist()}
    with torch.inference_mode():
        oracle = bert.embeddings(torch.from_numpy(ids), torch.from_numpy(segments)).numpy()
    assert np.abs(native_json(model_clients, "minilm", fields) - oracle.reshape(-1, 384)).max() <= 2e-6


def test_gpt2_small_equals_torch_bit_for_bit(model_clients: Clients) -> None:
    tables = {name: torch.from_numpy(table) for name, table in presets.preset_data("gpt2-small").tensors.items()}
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 50257, (2, 24)))
    with torch.inference_mode():
        tokens = torch.nn.functional.embedding(ids, tables["tokens.weight"])
        oracle = (tokens + tables["positions.weight"][1000:]).numpy()
    fields = {"input_ids": ids.tolist(), "offset": 1000}
    for vectors in (
        native_json(model_clients, "gpt2-small", fields),
        native_bytes(model_clients, "gpt2-small", fields),
    ):
        assert vectors.tobytes() == oracle.tobytes()


@pytest.mark.parametrize("kind", [JSON, "application/json; charset=utf-8", "Application/JSON", None])
def test_json_with_parameters_or_no_content_type_is_read(tiny_http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    assert tiny_http.post("/models/gpt/embed", content=b'{"input_ids": [1]}', headers=headers).status_code == 200


def test_problem_names_field_value_and_expected(tiny_http: httpx.Client) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": [[0], [1, 7]]}, headers={"X-Request-Id": "mine"})
    assert answer.json() == {
        "type": "urn:preblock:error:Invalid",
        "title": "Invalid",
        "status": 422,
        "detail": "input_ids[1][1]: got 7, expected 0 to 6",
        "field": "input_ids[1][1]",
        "got": "7",
        "expected": "0 to 6",
        "bad_indices": [1],
        "bad_count": 1,
        "request_id": "mine",
    }


def test_error_in_flat_list_has_one_index(tiny_http: httpx.Client) -> None:
    assert tiny_http.post("/models/gpt/embed", json={"input_ids": [0, 7]}).json()["field"] == "input_ids[1]"
