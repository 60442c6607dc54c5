"""Rows made of parts from the client. Oracles: torch.cat over answers to ids, and the raw tables."""

import base64
import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import FlakyProxy
from tests.support.artifacts import copy_artifact, read_tables
from tests.support.late import torch
from tests.support.servers import Server, serve

GIVEN = np.random.default_rng(3).standard_normal((4, 4), np.float32)
Vectors = NDArray[np.float32]


@pytest.fixture(scope="module")
def parts_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("parts")
    for name in ("gpt", "llama", "bert", "ngrams"):
        copy_artifact(name, root)
    with serve(root) as server:
        yield server


@pytest.fixture
def client(connect: Connect, parts_server: Server) -> Any:
    return connect(parts_server.address)


@pytest.fixture(scope="module")
def parts_tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = read_tables(copy_artifact("gpt", tmp_path_factory.mktemp("tables")))
    return {name: torch.from_numpy(table) for name, table in found.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, "torch", "bfloat16"])
def test_vectors_stand_between_ids(client: Any, parts_tables: dict[str, Any], dtype: Any) -> None:
    rounded: Any = GIVEN.astype(np.float16 if dtype == np.float16 else np.float32)
    vectors = torch.from_numpy(rounded) if dtype == "torch" else rounded
    if dtype == np.float64:
        vectors = rounded.astype(np.float64)
    if dtype == "bfloat16":
        vectors = torch.from_numpy(GIVEN).bfloat16()
        rounded = vectors.float().numpy()
    parts = [{"input_ids": np.array([1, 2])}, {"vectors": vectors[:2]}, {"input_ids": [3]}]
    answer = client.embed(parts=parts, model="gpt", offset=1)
    tokens = parts_tables["tokens"]
    given = torch.from_numpy(rounded[:2].astype(np.float32))
    expected = torch.cat([tokens[[1, 2]], given, tokens[[3]]]) + parts_tables["positions"][1:6]
    assert answer.vectors.tobytes() == expected.numpy().tobytes()
    assert (answer.vectors.shape, answer.next_offset.tolist()) == ((1, 5, 4), [6])


def test_rows_may_have_placeholders_and_text(client: Any) -> None:
    rows = [[{"input_ids": [1, 99]}], [{"input_ids": [99, 2]}, {"vectors": GIVEN[2:]}]]
    answer = client.embed(parts=rows, placeholder={"token_id": 99, "vectors": GIVEN[:2]}, model="llama")
    tokens = client.embed([1, 2], model="llama").vectors[0]
    expected = np.concatenate([tokens[:1], GIVEN[:2], tokens[1:], GIVEN[2:]])
    assert answer.vectors.tobytes() == expected.tobytes()
    assert answer.lengths.tolist() == [2, 4]
    text = client.embed(parts=[{"input_ids": [1]}, {"text": "hello"}], model="bert").vectors
    ids = client.text("hello", model="bert", special_tokens=False, return_tokens=True).input_ids[0]
    assert text.tobytes() == client.embed([1, *ids.tolist()], model="bert").vectors.tobytes()


def test_prompt_embeds_mix_ids_and_vectors(client: Any) -> None:
    (prompt,) = client.prompt_embeds(parts=[{"input_ids": [1]}, {"vectors": GIVEN}], model="gpt")
    tensor = torch.load(io.BytesIO(base64.b64decode(prompt)), weights_only=True)
    tokens = client.embed([1], model="gpt", output="token_embeddings").vectors[0]
    assert torch.equal(tensor, torch.from_numpy(np.concatenate([tokens, GIVEN])))


def test_stream_takes_ids_and_parts_in_turns(client: Any, parts_tables: dict[str, Any]) -> None:
    tokens, positions = parts_tables["tokens"], parts_tables["positions"]
    with client.decode("gpt", rows=2, companions=["token_embeddings"]) as stream:
        first = stream.step(parts=[[{"vectors": GIVEN[:2]}, {"input_ids": [1]}], [{"input_ids": [2]}]])
        bare = torch.cat([torch.from_numpy(GIVEN[:2]), tokens[[1, 2]]])
        assert stream.companions["token_embeddings"].tobytes() == bare.numpy().tobytes()
        assert first.tobytes() == (bare + positions[[0, 1, 2, 0]]).numpy().tobytes()
        assert (first.shape, stream.offset) == ((4, 4), [3, 1])
        first[0, 0] = 0  # writable, as from a frame
        second = stream.step([[3], [4]])
        assert second.tobytes() == (tokens[[3, 4]] + positions[[3, 1]]).numpy().tobytes()
        stream.rewind([3, 1])
        step = [[{"input_ids": [99]}], []]
        third = stream.step(parts=step, placeholder={"token_id": 99, "vectors": GIVEN[3:]})
        assert third.tobytes() == (torch.from_numpy(GIVEN[3:]) + positions[3]).numpy().tobytes()
        assert stream.offset == [4, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_stream_of_one_output_has_the_bits_of_one_call(client: Any, dtype: str) -> None:
    parts = [{"input_ids": [1]}, {"vectors": GIVEN}]
    with client.decode("llama", dtype=dtype) as stream:
        found = stream.step(parts=parts)
    whole = client.embed(parts=parts, model="llama", dtype=dtype).vectors
    assert (found.dtype, found.shape, found.tobytes()) == (whole.dtype, whole.shape, whole.tobytes())


def test_stream_keeps_the_context_of_parts(client: Any) -> None:
    with client.decode("ngrams", output="ngram_embeddings") as stream:
        stream.step(parts=[{"input_ids": [5, 6]}])
        assert stream.context == [[5, 6]]
        second = stream.step(parts=[{"input_ids": [7]}])
    whole = client.embed([5, 6, 7], model="ngrams", output="ngram_embeddings").vectors
    assert second.tobytes() == whole[:, 2:].tobytes()


def test_placeholder_without_vectors_is_accepted(client: Any) -> None:
    answer = client.embed(parts=[{"input_ids": [1]}], placeholder={"token_id": 99, "vectors": GIVEN[:0]}, model="llama")
    assert np.array_equal(answer.vectors, client.embed([1], model="llama").vectors)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"parts": [{"vectors": GIVEN[0]}]}, r"parts\[0\].vectors: got float32 of shape \(4,\), expected floats of shape"),
    (
        {"parts": [{"vectors": np.ones((1, 4), int)}]},
        r"parts\[0\].vectors: got int64 of shape \(1, 4\), expected floats",
    ),
    ({"parts": [[{"vectors": GIVEN[:0]}]]}, r"parts\[0\]\[0\].vectors: got float32 of shape \(0, 4\), expected floats"),
    ({"parts": [{"input_ids": [1.5]}]}, r"parts\[0\].input_ids: got float64 of shape \(1,\), expected 64-bit integers"),
    ({"parts": [{"vectors": GIVEN * math.inf}]}, r"parts\[0\].vectors: got (-?inf|nan), expected finite values"),
    ({"parts": [{"vectors": GIVEN[:2, :3]}]}, r"parts\[0\].vectors: got 6 values, expected a multiple of 4"),
    ({"parts": [{"ids": [1]}]}, r"parts\[0\]: got ids, expected input_ids, text, vectors, soft_prompt"),
    ({"parts": "text"}, r"parts\[0\]: got 't', expected a list of at least one part"),
    ({"parts": [{"soft_prompt": "polite"}]}, r"parts\[0\].soft_prompt: got polite, expected none"),
    ({"placeholder": {"token_id": 9, "vectors": GIVEN}}, "placeholder needs parts: its vectors stand for a token"),
    ({"ids": [1], "parts": [{"input_ids": [1]}]}, "input_ids cannot be used with parts; allowed are parts"),
    ({"parts": [{"input_ids": [1]}], "attention_mask": [1]}, "attention_mask cannot be used with parts"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_bad_parts_are_rejected(client: Any, fields: dict[str, Any], message: str) -> None:
    ids, rest = fields.get("ids"), {name: value for name, value in fields.items() if name != "ids"}
    with raises_kind("Invalid", message):
        client.embed(ids, model="llama", **rest)
    with client.decode("llama") as stream:
        with raises_kind("Invalid", message):
            stream.step(ids, **rest)
        assert stream.step([1]).shape == (1, 1, 4)


def test_step_without_ids_and_parts_is_rejected(client: Any) -> None:
    with client.decode("llama") as stream, raises_kind("Invalid", "input_ids: got nothing, expected rows of token ids"):
        stream.step()
    with raises_kind("Invalid", "input_ids, text or parts is required"):
        client.embed(model="llama")


def test_step_of_parts_resumes_on_a_new_connection(connect: Connect, parts_server: Server) -> None:
    with FlakyProxy(parts_server.address) as proxy:
        client = connect(proxy.address)
        with client.decode("gpt", resume=True) as stream:
            stream.step([1, 2])
            proxy.break_all()
            found = stream.step(parts=[{"vectors": GIVEN[:1]}])
            assert stream.offset == [3]
        whole = client.embed(parts=[{"input_ids": [1, 2]}, {"vectors": GIVEN[:1]}], model="gpt").vectors
        assert found.tobytes() == whole[:, 2:].tobytes()
