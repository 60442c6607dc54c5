"""Rows of positions and nearest tokens. The oracle is numpy, on the tables as onnx reads them."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.service.api.conftest import Keyed
from tests.service.api.http.native_requests import BYTES, NPY, vectors_of
from tests.support.artifacts import read_tables


def positions_of(repository: Path, name: str) -> Any:
    return read_tables(repository / name / "1")["positions"]


def test_positions_equal_table_rows(catalogue_http: httpx.Client, catalogue_repository: Path) -> None:
    for name, skipped in (("gpt", 0), ("counts-ids", 2)):
        body = catalogue_http.get(f"/models/{name}/positions?first=1&count=3&encoding=float").json()
        vectors = np.array(body.pop("position_embeddings"), np.float32)
        assert np.array_equal(vectors, positions_of(catalogue_repository, name)[skipped:][1:4])
        told = {"model": name, "version": 1, "dtype": "float32", "encoding": "float", "shape": [3, vectors.shape[1]]}
        assert body == told | {"use_as": "vectors added to the token vectors"}


def test_positions_follow_first_and_count(catalogue_http: httpx.Client, catalogue_repository: Path) -> None:
    table = positions_of(catalogue_repository, "long")
    queries = ("first=4&count=5", 4, 5), ("", 0, 64), ("first=4990", 4990, 10), ("count=4096", 0, 4096)
    for query, first, count in queries:
        answer = catalogue_http.get(f"/models/long/versions/1/positions?{query}", headers={"Accept": BYTES})
        assert (answer.headers["content-type"], answer.content) == (BYTES, table[first : first + count].tobytes())


def test_sinusoidal_positions_are_computed(model_http: httpx.Client) -> None:
    answer = model_http.get("/models/transformer-base/positions?first=4000&count=96")
    rows = vectors_of(answer.json(), "position_embeddings")
    angles = np.arange(4000, 4096)[:, None] / 10000 ** (np.arange(256) / 256)
    assert np.allclose(rows[:, 0::2], np.sin(angles), atol=1e-6)
    assert np.allclose(rows[:, 1::2], np.cos(angles), atol=1e-6)


@pytest.mark.parametrize(("name", "id_"), [("long", 7), ("llama", 0), ("gpt", 6)])
def test_neighbours_have_the_highest_cosines(
    name: str, id_: int, catalogue_http: httpx.Client, catalogue_repository: Path
) -> None:
    rows = read_tables(catalogue_repository / name / "1")["tokens"].astype(np.float64)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit[id_]
    expected = [token for token in np.argsort(-cosines).tolist() if token != id_][:5]
    body = catalogue_http.get(f"/models/{name}/neighbours", params={"id": id_, "count": 5}).json()
    assert (body["model"], body["version"], body["id"]) == (name, 1, id_)
    assert [entry["id"] for entry in body["neighbours"]] == expected
    assert np.allclose([entry["cosine"] for entry in body["neighbours"]], cosines[expected], atol=1e-6)


def test_neighbours_of_large_table_have_highest_cosines(model_http: httpx.Client, model_repository: Path) -> None:
    rows = read_tables(model_repository / "minilm" / "1")["tokens"]
    norms = np.linalg.norm(rows, axis=1)
    cosines = rows @ rows[2000] / np.where(norms == 0, 1, norms * norms[2000])
    cosines[2000] = -1
    body = model_http.get("/models/minilm/neighbours?id=2000&count=100").json()
    found = [entry["cosine"] for entry in body["neighbours"]]
    assert np.allclose(found, np.sort(cosines)[::-1][:100], atol=1e-5)
    assert np.allclose(cosines[[entry["id"] for entry in body["neighbours"]]], found, atol=1e-5)


def test_neighbours_show_tokens_of_tokenizer(
    model_http: httpx.Client, catalogue_http: httpx.Client, model_repository: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_repository / "minilm" / "1" / "tokenizer.json"))
    body = model_http.get("/models/minilm/neighbours?id=7592").json()
    assert (body["token"], len(body["neighbours"])) == ("hello", 10)
    assert all(tokenizer.id_to_token(entry["id"]) == entry["token"] for entry in body["neighbours"])
    without = catalogue_http.get("/models/gpt/neighbours?id=1").json()
    assert {without["token"], *(entry["token"] for entry in without["neighbours"])} == {None}


BAD = [
    ("gpt/positions?first=6", 422, "first: got 6, expected 0 to 5"),
    ("gpt/positions?first=2&count=5", 422, "count: got 5, expected 1 to 4"),
    ("long/positions?count=4097", 422, "count: got 4097, expected 1 to 4096"),
    ("gpt/positions?count=two", 422, "count: got 'two', expected a 64-bit integer"),
    ("gpt/positions?count=1&count=2", 422, "the query has 2 values of count"),
    ("llama/positions", 422, "llama adds no position vectors"),
    ("vit/positions", 422, "pixel_values"),
    ("gpt/neighbours", 422, "id: got nothing, expected the id of a token"),
    ("gpt/neighbours?id=7", 422, "id: got 7, expected 0 to 6"),
    ("gpt/neighbours?id=1&count=7", 422, "count: got 7, expected 1 to 6"),
    ("long/neighbours?id=1&count=101", 422, "count: got 101, expected 1 to 100"),
    ("gpt/neighbours?id=1&first=2", 422, "unknown field first"),
    ("gpt/versions/2/neighbours?id=1", 404, "version"),
]


def test_bad_table_query_is_rejected(catalogue_http: httpx.Client) -> None:
    for path, status, detail in BAD:
        answer = catalogue_http.get(f"/models/{path}")
        assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), path
    for action, media in (("positions", "text/html"), ("neighbours?id=1", NPY)):
        assert catalogue_http.get(f"/models/gpt/{action}", headers={"Accept": media}).status_code == 406


def test_tables_require_key_for_their_model(keyed: Keyed) -> None:
    for action in ("positions", "neighbours?id=1"):
        for model, headers, status in (("gpt", {}, 401), ("gpt", keyed.headers, 200), ("bert", keyed.headers, 403)):
            answer = httpx.get(f"{keyed.address}/models/{model}/{action}", headers=headers)
            assert answer.status_code == status, (model, answer.text)
