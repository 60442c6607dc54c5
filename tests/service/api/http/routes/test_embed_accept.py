"""Content types of responses by the header `Accept`."""

import httpx
import pytest

from tests.service.api.http.routes.embed_calls import BYTES, JSON, NPY, SAFETENSORS, ask_for


def test_npy_with_bfloat16_is_not_acceptable(tiny_http: httpx.Client) -> None:
    response = ask_for(tiny_http, NPY, input_ids=[1], dtype="bfloat16")
    assert response.status_code == 406
    assert response.json()["detail"] == f"Accept: got {NPY}, expected {JSON} or {BYTES} or {SAFETENSORS} for bfloat16"


@pytest.mark.parametrize(
    ("accept", "answer"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        (JSON, JSON),
        (BYTES, BYTES),
        (NPY, NPY),
        ("APPLICATION/X-NPY", NPY),
        (f"text/html, {BYTES}", BYTES),
        (f"{JSON};q=0.5, {NPY}", NPY),
        (f"{JSON};q=0.5, {NPY};q=0.4, {BYTES};q=0.6", BYTES),
        (f"{JSON};q=0, */*", BYTES),
        (f"{JSON};q=0, {BYTES};q=0, */*;q=0.001", NPY),
        (f"*/*;q=0.9, {NPY}", NPY),
        (f"application/*;q=0.1, {NPY};q=0.2", NPY),
        (f"{JSON}; charset=utf-8", JSON),
        (f"{BYTES} ; q=1.0 , {NPY}\t;\tq=0.9", BYTES),
        ("*/*, text/html", JSON),
        (SAFETENSORS, SAFETENSORS),
        (f"{JSON};q=0.5, {SAFETENSORS}", SAFETENSORS),
        (f"{JSON};q=0, {BYTES};q=0, {NPY};q=0, */*", SAFETENSORS),
    ],
)
def test_response_format_follows_accept(tiny_http: httpx.Client, accept: str, answer: str) -> None:
    assert ask_for(tiny_http, accept, input_ids=[1]).headers["Content-Type"] == answer


def test_multiple_accept_headers_are_one_list(tiny_http: httpx.Client) -> None:
    headers = [("Accept", "text/html"), ("Accept", NPY)]
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": [1]}, headers=headers)
    assert response.headers["Content-Type"] == NPY


@pytest.mark.parametrize(
    "accept",
    ["text/html", f"{JSON};q=0", "*/*;q=0", "image/*", f"{JSON};q=x", f"{JSON};q=nan", f"{JSON};q=2", f"{JSON};q=-1"],
)
def test_unsupported_accept_is_406(tiny_http: httpx.Client, accept: str) -> None:
    response = ask_for(tiny_http, accept, input_ids=[1])
    assert response.status_code == 406
    assert response.json()["title"] == "NotAcceptable"
    assert response.json()["got"] == accept
