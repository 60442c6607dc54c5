"""Files for vLLM's `prompt_embeds`. Oracle: `torch.load`, as in vLLM, and `torch.save`."""

import base64
import io
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Consumer, TokenEmbeddings
from preblock.service.codecs.chunks import Base64Chunks, LazyBytes, join
from preblock.service.codecs.prompt_embeds import check_prompt_embeds, torch_file, write_prompt_embeds
from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, TextRequest
from tests.support.late import torch
from tests.support.manifests import tiny_manifest

DTYPES = [np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16)]


def vectors(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def file_of(matrix: NDArray[Any]) -> LazyBytes:
    return torch_file(matrix.shape, matrix.dtype, iter([matrix]))


def loaded(text: bytes) -> Any:
    content = io.BytesIO(base64.b64decode(text, validate=True))
    tensor = torch.load(content, weights_only=True, map_location="cpu")
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_torch_loads_prompt_file_like_its_own(dtype: Any) -> None:
    for shape in ((1, 1), (3, 100_000)):
        matrix = vectors(shape, dtype)
        bits = torch.from_numpy(matrix.view(np.int16 if matrix.itemsize == 2 else np.int32))
        stream = io.BytesIO()
        torch.save(bits.view(getattr(torch, dtype.name)), stream)
        expected = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
        found = loaded(join([Base64Chunks((file_of(matrix),))]))
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert not found.requires_grad


def test_prompt_file_has_zip_entries_of_torch_without_a_copy() -> None:
    matrix = vectors((5, 7))
    one = file_of(matrix)
    other = torch_file(matrix.shape, matrix.dtype, iter([matrix[:2], matrix[2:3], matrix[3:]]))
    before, values, behind = one.buffers
    assert np.shares_memory(np.frombuffer(values, np.uint8), matrix)
    content = b"".join((before, values, behind))
    assert b"".join(other.buffers) == content
    assert len(one) == len(other) == len(content)
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert archive.testzip() is None
    assert archive.namelist() == [f"archive/{name}" for name in ("data.pkl", "version", "byteorder", "data/0")]
    assert archive.read("archive/data/0") == matrix.tobytes()


def test_prompt_file_size_is_known_before_values() -> None:
    zeros = np.zeros((2**17, 2), np.float32)  # 1 MiB
    for size in (0, 2**31 - 400, 2**31):
        values = [zeros[: (size - start) // 8] for start in range(0, size, zeros.nbytes)]
        file = torch_file((size // 8, 2), zeros.dtype, iter(values))
        assert sum(map(len, file.buffers)) == len(file), size


def test_each_row_is_one_file() -> None:
    def texts_of(tensor: Any) -> Any:
        return write_prompt_embeds(tensor, np.array([1, 3, 2]))

    tensor = vectors((6, 4))
    one = write_prompt_embeds(tensor.reshape(1, 6, 4), np.array([6]))
    assert isinstance(one, Base64Chunks)
    assert loaded(join([one])).numpy().tobytes() == tensor.tobytes()
    whole = [join([file]) for file in texts_of(tensor)]
    for text, row in zip(whole, np.split(tensor, [1, 4]), strict=True):
        assert np.array_equal(loaded(text).numpy(), row)
    for chunks in ([6], [2, 4], [1, 1, 1, 1, 1, 1]):
        ended: list[bool] = []

        def computed(chunks: list[int] = chunks, ended: list[bool] = ended) -> Iterator[NDArray[Any]]:
            yield from np.split(tensor, np.cumsum(chunks)[:-1])
            ended.append(True)

        assert [join([file]) for file in texts_of(ChunkedTensor(tensor.shape, "float32", computed()))] == whole
        assert ended


def check(output: str, embeddings: TokenEmbeddings | None) -> None:
    manifest = tiny_manifest().model_copy(update={"token_embeddings": embeddings})
    check_prompt_embeds(TextRequest(text=("a",), outputs=(output,)), manifest)


def lookup(scale: float, *consumers: Consumer, scaled: bool = False) -> TokenEmbeddings:
    given = {"output": "token_embeddings", "width": 4, "embedding_scale": scale}
    return TokenEmbeddings(**given, scaled=scaled, consumers=consumers)


def vllm(scale: Literal["applied", "none"], output: Any) -> Consumer:
    return Consumer(engine="vllm", versions="", scale=scale, output=output, source="")


def test_only_a_known_consumer_is_accepted() -> None:
    for embeddings, known in (
        (None, False),
        (lookup(2.0), False),
        (lookup(2.0, vllm("applied", None)), False),
        (lookup(1.0), True),
        (lookup(2.0, vllm("none", "token_embeddings")), True),
    ):
        with nullcontext() if known else pytest.raises(Invalid, match=r"^encoding: got prompt_embeds, .* unknown"):
            check("token_embeddings", embeddings)


def test_both_outputs_are_accepted_for_changed_consumer() -> None:
    both = vllm("applied", "token_embeddings"), vllm("none", "unscaled_token_embeddings")
    for output in ("token_embeddings", "unscaled_token_embeddings"):
        check(output, lookup(2.0, *both, scaled=True))
    with pytest.raises(Invalid, match="expected token_embeddings or unscaled_token_embeddings with the encoding"):
        check("embeddings", lookup(2.0, *both, scaled=True))
