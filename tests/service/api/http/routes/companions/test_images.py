"""The vectors of images. The oracle is the PyTorch module."""

from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.service.api.http.routes.companions.calls import IDS, error_of, frontend_of, infer, tensor, zeros
from tests.support.late import torch
from tests.support.protocols import Clients


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 3, 12, 16), (3, 3, 4, 4)])
def test_image_response_equals_module(
    catalogue_http: httpx.Client, catalogue_clients: Clients, shape: tuple[int, ...]
) -> None:
    pixels = np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)
    with torch.inference_mode():
        expected = frontend_of("vit")(torch.from_numpy(pixels)).numpy()
    found = infer(catalogue_http, "vit", [tensor("pixel_values", pixels, "FP32")])["embeddings"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with tritonclient.http.InferenceServerClient(
        str(catalogue_http.base_url).removeprefix("http://").rstrip("/")
    ) as client:
        given = tritonclient.http.InferInput("pixel_values", list(shape), "FP32")
        given.set_data_from_numpy(pixels)
        assert client.infer("vit", [given]).as_numpy("embeddings").tobytes() == found.tobytes()
    given = tritonclient.grpc.InferInput("pixel_values", list(shape), "FP32")
    given.set_data_from_numpy(pixels)
    assert catalogue_clients.grpc.infer("vit", [given]).as_numpy("embeddings").tobytes() == found.tobytes()


def test_patch_embedding_metadata_describes_its_input(catalogue_http: httpx.Client) -> None:
    metadata = catalogue_http.get("/v2/models/vit").json()
    assert metadata["inputs"] == [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert metadata["outputs"] == [{"name": "embeddings", "datatype": "FP32", "shape": [-1, -1, 8]}]
    model = catalogue_http.get("/models/vit").json()
    assert (model["max_len"], model["manifest"]["kind"], model["manifest"]["patch_size"]) == (None, "stem", 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (zeros(1, 3, 8, 10), "pixel_values.shape: got [1, 3, 8, 10]"),
        (zeros(1, 2, 8, 8), "pixel_values.shape: got [1, 2, 8, 8]"),
        (zeros(3, 8, 8), "pixel_values.shape: got [3, 8, 8]"),
        (zeros(1, 3, 8, 8) | {"datatype": "INT64"}, "pixel_values.datatype: got INT64"),
        (tensor("input_ids", IDS), "inputs.name: got input_ids"),
        (
            {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 4, 4], "data": [0] * 47 + [1e39]},
            "pixel_values.data[47]: got 1e+39",
        ),
        (
            {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 4, 4], "data": [0] * 47 + [True]},
            "pixel_values.data[47]: got True",
        ),
    ],
)
def test_bad_image_is_rejected(catalogue_http: httpx.Client, given: dict[str, Any], message: str) -> None:
    status, error = error_of(catalogue_http.post("/v2/models/vit/infer", json={"inputs": [given]}))
    assert (status, error[: len(message)]) == (400, message)


def test_token_ids_for_stem_are_rejected_with_its_protocol(catalogue_http: httpx.Client) -> None:
    status, detail = error_of(catalogue_http.post("/models/vit/embed", json={"input_ids": [1]}))
    expected = "the model 'vit' takes pixel_values by the Open Inference Protocol, not token ids"
    assert (status, detail) == (422, expected)
