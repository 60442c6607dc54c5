"""What vLLM's `prompt_embeds` takes. Oracle: torch, which loads it as vLLM does and knows what it would save itself."""

import base64
import io
import zipfile
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from preblock.service.artifacts.records import TokenEmbeddings
from preblock.service.codecs.chunks import Base64Chunks, LazyBytes, joined
from preblock.service.codecs.prompt_embeds import check_prompt_embeds, torch_file, write_prompt_embeds
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.results import ChunkedTensor
from preblock.service.core.types import TextRequest
from tests.support.manifests import tiny_manifest

DTYPES = {
    "float32": (np.dtype(np.float32), torch.float32),
    "float16": (np.dtype(np.float16), torch.float16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), torch.bfloat16),
}

REQUEST = TextRequest(text=("a",), outputs=("token_embeddings",))


def vectors(shape: tuple[int, ...], dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(DTYPES[dtype][0])


def file_of(matrix: NDArray[Any]) -> LazyBytes:
    return torch_file(matrix.shape, matrix.dtype, iter([matrix]))


def loaded(text: bytes) -> torch.Tensor:
    content = io.BytesIO(base64.b64decode(text, validate=True))
    tensor = torch.load(content, weights_only=True, map_location="cpu")
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 100_000)])
def test_torch_loads_what_it_would_load_of_its_own_file(shape: tuple[int, int], dtype: str) -> None:
    matrix = vectors(shape, dtype)
    tensor = torch.from_numpy(matrix.view(np.int16 if matrix.itemsize == 2 else np.int32)).view(DTYPES[dtype][1])
    stream = io.BytesIO()
    torch.save(tensor, stream)
    expected = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    found = loaded(joined([Base64Chunks((file_of(matrix),))]))
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert not found.requires_grad


def test_file_is_a_whole_zip_archive_of_torch() -> None:
    matrix = vectors((5, 7))
    archive = zipfile.ZipFile(io.BytesIO(b"".join(file_of(matrix).buffers)))
    assert archive.testzip() is None
    assert archive.namelist() == [f"archive/{name}" for name in ("data.pkl", "version", "byteorder", "data/0")]
    assert archive.read("archive/data/0") == matrix.tobytes()


def test_the_same_vectors_are_the_same_bytes_and_are_not_copied() -> None:
    matrix = vectors((5, 7))
    one, parts = file_of(matrix), [matrix[:2], matrix[2:3], matrix[3:]]
    before, values, behind = one.buffers
    assert np.shares_memory(np.frombuffer(values, np.uint8), matrix)
    other = torch_file(matrix.shape, matrix.dtype, iter(parts))
    assert b"".join(other.buffers) == b"".join((before, values, behind))
    assert len(one) == len(other) == len(before) + len(values) + len(behind)


def test_row_over_the_limit_of_an_archive_is_refused() -> None:
    kind = np.dtype(np.float32)
    around = len(torch_file((0, 1), kind, iter(())))
    most = (2**32 - 1 - around) // 4
    assert len(torch_file((most, 1), kind, iter(()))) < 2**32
    with pytest.raises(TooLarge, match=rf"^encoding: got a row of {4 * most + 4} bytes, allowed at most "):
        torch_file((most + 1, 1), kind, iter(()))


@pytest.mark.parametrize("pieces", [[6], [2, 4], [1, 1, 1, 1, 1, 1], [5, 1]])
def test_rows_are_taken_from_pieces_as_they_come(pieces: list[int]) -> None:
    tensor, ended = vectors((6, 4)), []

    def computed() -> Iterator[NDArray[Any]]:
        yield from np.split(tensor, np.cumsum(pieces)[:-1])
        ended.append(True)

    files = write_prompt_embeds(ChunkedTensor(tensor.shape, "float32", computed()), np.array([1, 3, 2]))
    whole = write_prompt_embeds(tensor, np.array([1, 3, 2]))
    assert isinstance(files, list)
    assert isinstance(whole, list)
    assert [joined([file]) for file in files] == [joined([file]) for file in whole]
    assert ended


def test_one_row_is_one_file_and_several_are_a_list() -> None:
    tensor = vectors((6, 4))
    one = write_prompt_embeds(tensor.reshape(1, 6, 4), np.array([6]))
    assert isinstance(one, Base64Chunks)
    assert loaded(joined([one])).numpy().tobytes() == tensor.tobytes()
    several = write_prompt_embeds(tensor, np.array([1, 3, 2]))
    assert isinstance(several, list)
    rows = [loaded(joined([row])).numpy() for row in several]
    assert [row.shape for row in rows] == [(1, 4), (3, 4), (2, 4)]
    assert np.concatenate(rows).tobytes() == tensor.tobytes()


@pytest.mark.parametrize("told", [None, TokenEmbeddings(output="token_embeddings", width=4, consumer_scales=None)])
def test_a_consumer_that_is_not_known_is_refused_by_name(told: TokenEmbeddings | None) -> None:
    with pytest.raises(
        Invalid, match=r"^encoding: got prompt_embeds, allowed base64, float, since it is not known what a bert"
    ):
        check_prompt_embeds(REQUEST, tiny_manifest().model_copy(update={"token_embeddings": told}))


@pytest.mark.parametrize("scales", [True, False])
def test_a_consumer_that_is_known_is_not_refused(scales: bool) -> None:
    told = TokenEmbeddings(output="token_embeddings", width=4, consumer_scales=scales)
    check_prompt_embeds(REQUEST, tiny_manifest().model_copy(update={"token_embeddings": told}))
