"""Rows made of parts from the client. Oracles: torch.cat over answers to ids, and the raw tables."""

import base64
import io
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import FlakyProxy
from tests.support.late import torch
from tests.support.servers import Server

GIVEN = np.random.default_rng(3).standard_normal((4, 4), np.float32)
Vectors = NDArray[np.float32]


def test_vectors_stand_between_ids(kinds_client: Any, tiny_tables: dict[str, Vectors]) -> None:
    half, tensor = GIVEN[:2].astype(np.float16), torch.from_numpy(GIVEN[:2])
    tokens, positions = tiny_tables["tokens"], tiny_tables["positions"][1:6]
    for given, middle in (
        (GIVEN[:2].astype(np.float64), GIVEN[:2]),
        (half, half.astype(np.float32)),
        (tensor, GIVEN[:2]),
        (tensor.bfloat16(), tensor.bfloat16().float().numpy()),
    ):
        parts = [{"input_ids": np.array([1, 2])}, {"vectors": given}, {"input_ids": [3]}]
        answer = kinds_client.embed(parts=parts, model="gpt", offset=1)
        expected = np.concatenate([tokens[[1, 2]], middle, tokens[[3]]]) + positions
        assert answer.vectors.tobytes() == expected.tobytes()
        assert (answer.vectors.shape, answer.next_offset.tolist()) == ((1, 5, 4), [6])


def test_rows_may_have_placeholders_and_text(kinds_client: Any) -> None:
    rows = [[{"input_ids": [1, 99]}], [{"input_ids": [99, 2]}, {"vectors": GIVEN[2:]}]]
    placeholder: dict[str, Any] = {"token_id": np.int64(99), "vectors": GIVEN[:2]}
    answer = kinds_client.embed(parts=rows, placeholder=placeholder, model="llama")
    tokens = kinds_client.embed([1, 2], model="llama").vectors[0]
    expected = np.concatenate([tokens[:1], GIVEN[:2], tokens[1:], GIVEN[2:]])
    assert answer.vectors.tobytes() == expected.tobytes()
    assert answer.lengths.tolist() == [2, 4]
    text = kinds_client.embed(parts=[{"input_ids": [1]}, {"text": "hello"}], model="bert").vectors
    ids = kinds_client.text("hello", model="bert", special_tokens=False, return_tokens=True).input_ids[0]
    assert text.tobytes() == kinds_client.embed([1, *ids.tolist()], model="bert").vectors.tobytes()
    unused = {"token_id": 99, "vectors": GIVEN[:0]}
    answer = kinds_client.embed(parts=[{"input_ids": [1]}], placeholder=unused, model="llama")
    assert np.array_equal(answer.vectors[0], tokens[:1])


def test_prompt_embeds_mix_ids_and_vectors(kinds_client: Any) -> None:
    (prompt,) = kinds_client.prompt_embeds(parts=[{"input_ids": [1]}, {"vectors": GIVEN}], model="gpt")
    tensor = torch.load(io.BytesIO(base64.b64decode(prompt)), weights_only=True)
    tokens = kinds_client.embed([1], model="gpt", output="token_embeddings").vectors[0]
    assert torch.equal(tensor, torch.from_numpy(np.concatenate([tokens, GIVEN])))


def test_stream_takes_ids_and_parts_in_turns(kinds_client: Any, tiny_tables: dict[str, Vectors]) -> None:
    tokens, positions = tiny_tables["tokens"], tiny_tables["positions"]
    with kinds_client.decode("gpt", rows=2, companions=["token_embeddings"]) as stream:
        first = stream.step(parts=[[{"vectors": GIVEN[:2]}, {"input_ids": [1]}], [{"input_ids": [2]}]])
        bare = np.concatenate([GIVEN[:2], tokens[[1, 2]]])
        assert stream.companions["token_embeddings"].tobytes() == bare.tobytes()
        assert first.tobytes() == (bare + positions[[0, 1, 2, 0]]).tobytes()
        assert (first.shape, stream.offset) == ((4, 4), [3, 1])
        first[0, 0] = 0  # writable, as from a frame
        second = stream.step([[3], [4]])
        assert second.tobytes() == (tokens[[3, 4]] + positions[[3, 1]]).tobytes()
        stream.rewind([3, 1])
        placeholder = {"token_id": np.int64(99), "vectors": GIVEN[3:]}
        third = stream.step(parts=[[{"input_ids": [99]}], []], placeholder=placeholder)
        assert third.tobytes() == (GIVEN[3:] + positions[3]).tobytes()
        assert stream.offset == [4, 1]


def test_stream_keeps_the_context_of_parts(kinds_client: Any) -> None:
    with kinds_client.decode("ngrams", output="ngram_embeddings") as stream:
        stream.step(parts=[{"input_ids": [5, 6]}])
        assert stream.context == [[5, 6]]
        second = stream.step(parts=[{"input_ids": [7]}])
    whole = kinds_client.embed([5, 6, 7], model="ngrams", output="ngram_embeddings").vectors
    assert second.tobytes() == whole[:, 2:].tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": [{"vectors": GIVEN[0]}]}, r"parts\[0\].vectors: got float32 of shape \(4,\)"),
        ({"parts": [{"vectors": np.ones((1, 4), int)}]}, r"parts\[0\].vectors: got int64 of shape \(1, 4\)"),
        ({"parts": [[{"vectors": GIVEN[:0]}]]}, r"parts\[0\]\[0\].vectors: got float32 of shape \(0, 4\)"),
        ({"parts": [{"vectors": np.ma.array(GIVEN, mask=GIVEN > 0)}]}, r"parts\[0\].vectors: got a masked array"),
        ({"parts": [{"vectors": GIVEN * math.inf}]}, r"parts\[0\].vectors: got (-?inf|nan), expected finite values"),
        ({"parts": [{"ids": [1]}]}, r"parts\[0\]: got ids, expected input_ids, text, vectors, soft_prompt"),
        ({"parts": "text"}, r"parts\[0\]: got 't', expected a list of at least one part"),
        ({"ids": [1], "parts": [{"input_ids": [1]}]}, "input_ids cannot be used with parts"),
        ({"parts": [{"input_ids": [1]}], "attention_mask": [1]}, "attention_mask cannot be used with parts"),
        ({}, r"input_ids: got nothing, expected rows of token ids|input_ids, text or parts is required"),
    ],
    ids=range(10),
)
def test_bad_parts_are_rejected(kinds_client: Any, fields: dict[str, Any], message: str) -> None:
    ids, rest = fields.get("ids"), {name: value for name, value in fields.items() if name != "ids"}
    with raises_kind("Invalid", message):
        kinds_client.embed(ids, model="llama", **rest)
    with kinds_client.decode("llama") as stream:
        with raises_kind("Invalid", message):
            stream.step(ids, **rest)
        assert stream.step([1]).shape == (1, 1, 4)


def test_step_of_parts_resumes_on_a_new_connection(connect: Connect, kinds_server: Server) -> None:
    with FlakyProxy(kinds_server.address) as proxy:
        client = connect(proxy.address)
        with client.decode("gpt", resume=True) as stream:
            stream.step([1, 2])
            proxy.break_all()
            found = stream.step(parts=[{"vectors": GIVEN[:1]}])
            assert stream.offset == [3]
        whole = client.embed(parts=[{"input_ids": [1, 2]}, {"vectors": GIVEN[:1]}], model="gpt").vectors
        assert found.tobytes() == whole[:, 2:].tobytes()
