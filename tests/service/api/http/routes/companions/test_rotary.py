"""Rotary angles beside the vectors. The oracle is the PyTorch module."""

import base64

import httpx
import numpy as np
import pytest

from tests.service.api.http.routes.companions.calls import IDS, error_of, frontend_of, infer, tensor
from tests.support.late import torch


@pytest.mark.parametrize("offset", [0, 13, [5, 9]])
def test_rotary_angles_are_returned_on_request(catalogue_http: httpx.Client, offset: int | list[int]) -> None:
    names = ["embeddings", "rotary_cos", "rotary_sin", "rotary_cos_near", "rotary_sin_near"]
    fields = {"input_ids": IDS, "offset": offset, "output": names}
    found = catalogue_http.post("/models/rotary/embed", json=fields).json()["outputs"]
    expected = frontend_of("rotary").rotary_outputs(torch.tensor(IDS), torch.tensor(offset).reshape(-1))
    assert list(found) == names
    for name, angles in expected.items():
        values = np.frombuffer(base64.b64decode(found[name]["data"]), "<f4").reshape(found[name]["shape"])
        np.testing.assert_allclose(values, angles.expand(2, 3, -1).numpy(), rtol=0, atol=2.0**-23)
    tensors = [tensor("input_ids", IDS), tensor("offset", offset if isinstance(offset, list) else [offset])]
    for name, values in infer(catalogue_http, "rotary", tensors, *names).items():
        assert values.tobytes() == base64.b64decode(found[name]["data"])


def test_rotary_angles_of_unequal_rows_equal_single_rows(catalogue_http: httpx.Client) -> None:
    def ask(rows: list[list[int]], offset: list[int]) -> bytes:
        fields = {"input_ids": rows, "offset": offset, "output": "rotary_cos"}
        return catalogue_http.post(
            "/models/rotary/embed", json=fields, headers={"Accept": "application/octet-stream"}
        ).content

    assert ask([[1, 2, 3], [4]], [30, 2]) == ask([[1, 2, 3]], [30]) + ask([[4]], [2])


def test_rotary_output_has_its_own_max_len(catalogue_http: httpx.Client) -> None:
    fields = {"input_ids": IDS, "offset": 14}
    assert catalogue_http.post("/models/rotary/embed", json=fields).status_code == 200
    answer = catalogue_http.post("/models/rotary/embed", json=fields | {"output": "rotary_cos_near"})
    status, detail = error_of(answer)
    assert (status, detail[:57]) == (422, "offset[0] + tokens: got 14 + 3 = 17, expected at most 16,")
