"""Extra inputs of each token: levels and segments. The oracle is the PyTorch module."""

from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.service.api.http.routes.companions.calls import IDS, decoded, error_of, frontend_of, infer, tensor
from tests.support.late import torch


def test_hierarchical_levels_are_named_inputs(catalogue_http: httpx.Client) -> None:
    sentence, word = [[0, 0, 1], [2, 3, 4]], [[0, 1, 0], [5, 4, 3]]
    indices = {"sentence": torch.tensor(sentence), "word": torch.tensor(word)}
    expected = frontend_of("levels")(torch.tensor(IDS), indices=indices).detach().numpy()
    answer = catalogue_http.post(
        "/models/levels/embed", json={"input_ids": IDS, "sentence": sentence, "word": word}
    ).json()
    assert decoded(answer, "embeddings").tobytes() == expected.tobytes()
    named = {"input_ids": np.array(IDS), "word": np.array(word), "sentence": np.array(sentence)}
    kind = {"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"}
    found = catalogue_http.post("/models/levels/embed", content=save(named), headers=kind)
    assert load(found.content)["embeddings"].tobytes() == expected.tobytes()
    tensors = [tensor("input_ids", IDS), tensor("word", word), tensor("sentence", sentence)]
    assert infer(catalogue_http, "levels", tensors)["embeddings"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"word": [[0, 1, 6], [0, 0, 0]]}, "word[0][2]: got 6"),
        ({"word": [[0, 1], [0, 0, 0]]}, "word[0]: got 2 values"),
        ({"token_type_ids": IDS}, "token_type_ids is not an input: this model has no segments"),
        ({"day": IDS}, "unknown field day"),
    ],
)
def test_bad_level_input_is_rejected(catalogue_http: httpx.Client, fields: dict[str, Any], message: str) -> None:
    status, detail = error_of(catalogue_http.post("/models/levels/embed", json={"input_ids": IDS} | fields))
    assert (status, detail[: len(message)]) == (422, message)


def test_missing_required_segments_are_rejected(catalogue_http: httpx.Client) -> None:
    expected = frontend_of("segments")(torch.tensor(IDS), token_type_ids=torch.tensor(IDS)).detach().numpy()
    answer = catalogue_http.post("/models/segments/embed", json={"input_ids": IDS, "token_type_ids": IDS}).json()
    assert decoded(answer, "embeddings").tobytes() == expected.tobytes()
    status, detail = error_of(catalogue_http.post("/models/segments/embed", json={"input_ids": IDS}))
    assert (status, detail) == (422, "token_type_ids is missing: this model needs a value for each token")
