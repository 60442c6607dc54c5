"""Bodies that come compressed, and answers that go so, at every HTTP protocol. Oracle: Python's gzip and zlib."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.service.api.http.request import MAX_INPUT_BYTES, MAX_OUTPUT_BYTES, expand
from preblock.service.api.http.response import choose_encoding
from preblock.service.core.errors import Malformed, TooLarge
from tests.support.processes import status_bytes
from tests.support.servers import Server, serve

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
PATHS = ("/models/gpt/embed", "/models/gpt/bias", "/v1/embeddings", "/v2/models/gpt/infer")
ROWS = np.random.default_rng(2).integers(0, 30000, (4, 128)).tolist()


def test_accept_encoding_selects_content_encoding() -> None:
    for accept, text, numbers in (
        ("gzip", "gzip", "gzip"),
        ("gzip, deflate, br, zstd", "gzip", None),
        ("deflate;q=0.9, gzip;q=0.1", "deflate", None),
        ("gzip;q=0", None, None),
        ("identity", None, None),
        ("identity, gzip;q=0.5", None, None),
        ("*", None, None),
        ("gzip;q=x", None, None),
        ("", None, None),
    ):
        found = choose_encoding(accept, text=True), choose_encoding(accept, text=False)
        assert found == (text, numbers), accept


@pytest.mark.parametrize("coding", COMPRESS)
def test_malformed_compressed_body_is_rejected(coding: str) -> None:
    whole = COMPRESS[coding](b"{}" * 100)
    other = COMPRESS["gzip" if coding == "deflate" else "deflate"](b"{}")
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    for body in (b"", b"{}", whole[:-1], whole + b"x", whole + other, whole + whole[:-1], other, changed):
        with pytest.raises(Malformed, match=f"expected (valid|complete) {coding} data"):
            expand(body, coding, 10**6)
    if coding == "deflate":
        with pytest.raises(Malformed, match=f"got {len(whole)} bytes after the end of the data"):
            expand(whole + whole, coding, 10**6)


@pytest.mark.parametrize("size", [0, 1, MAX_INPUT_BYTES - 30, MAX_OUTPUT_BYTES, 5 * MAX_OUTPUT_BYTES])
def test_gzip_members_are_joined(size: int) -> None:
    parts = bytes(size), b"{}", b"", np.random.default_rng(size).bytes(size)
    packed, content = b"".join(map(gzip.compress, parts)), b"".join(parts)
    assert gzip.decompress(packed) == content
    assert expand(packed, "gzip", len(content)) == content


def test_repeated_encoding_headers_are_a_list(tiny_http: httpx.Client, model_server: Server) -> None:
    headers = [("Accept", "*/*"), ("Content-Encoding", "gzip"), ("Content-Encoding", "gzip")]
    for path in ("/models/gpt/embed", "/models/gpt/decode", "/v1/embeddings"):
        answer = tiny_http.post(path, content=gzip.compress(gzip.compress(b"{}")), headers=headers)
        assert (answer.status_code, "Content-Encoding: got gzip, gzip, expected identity" in answer.text) == (415, True)
    for coding in ("br", "zstd", "compress", "x"):
        answer = tiny_http.post("/models/gpt/embed", content=b"{}", headers={"Content-Encoding": coding})
        assert answer.json()["detail"] == f"Content-Encoding: got {coding}, expected identity, gzip, deflate"
    content = gzip.compress(b'{"input_ids": [1]}')
    for coding in ("x-gzip", "X-GZIP"):  # as docs/http.md says
        answer = tiny_http.post("/models/gpt/embed", content=content, headers={"Content-Encoding": coding})
        assert answer.status_code == 200
    body = json.dumps({"input_ids": ROWS, "encoding": "float"}).encode()
    accepted = [("Accept-Encoding", "br"), ("Accept-Encoding", "gzip")]
    answer = httpx.post(f"{model_server.address}/models/minilm/embed", content=body, headers=accepted)
    assert answer.headers["Content-Encoding"] == "gzip"


def test_decompression_bomb_is_rejected_without_expansion(tiny_repository: Path) -> None:
    bomb = zlib.compress(bytes(2**28), 1)  # a megabyte
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    with serve(tiny_repository) as server:
        for path in PATHS:
            small = httpx.post(server.address + path, content=zlib.compress(b"{}"), headers=headers)
            assert small.status_code in (400, 422)
        before = status_bytes(server.pid, "VmHWM")
        for path in PATHS:
            answer = httpx.post(server.address + path, content=bomb, headers=headers)
            assert answer.status_code == 413
            assert "body: got more than 16777216 bytes after decompression" in answer.text
        assert status_bytes(server.pid, "VmHWM") - before < 2**27


@pytest.mark.parametrize("coding", COMPRESS)
@pytest.mark.parametrize(
    "size", [0, 1, MAX_INPUT_BYTES, MAX_OUTPUT_BYTES - 1, MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES + 1, 5 * MAX_OUTPUT_BYTES]
)
def test_bodies_in_several_chunks_are_decompressed(coding: str, size: int) -> None:
    for content in (bytes(size), np.random.default_rng(size).bytes(size)):  # expands most, and not at all
        packed = COMPRESS[coding](content)
        assert expand(packed, coding, size) == content
        if size:
            with pytest.raises(TooLarge, match=f"^body: got more than {size - 1} bytes after decompression"):
                expand(packed, coding, size - 1)
        for wrong in (packed[:-1], packed + b"x", packed + packed[:-1]):
            with pytest.raises(Malformed):
                expand(wrong, coding, 2 * size)
