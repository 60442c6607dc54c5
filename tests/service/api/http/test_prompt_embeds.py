"""Responses as prompt_embeds of vLLM. Oracle: the lookup of transformers."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.api.http.native_requests import BYTES, JSON, SAFETENSORS, TYPES, ask, prompt_of, refusal
from tests.support.late import torch, transformers


@pytest.fixture(scope="module")
def bert(minilm_checkpoint: Path) -> Any:
    """transformers' BERT with the real checkpoint."""
    model: Any = transformers.BertModel.from_pretrained(minilm_checkpoint, add_pooling_layer=False)
    return model.eval()


@pytest.mark.parametrize("dtype", TYPES)
def test_prompt_embeds_equal_transformers_lookup(
    model_http: httpx.Client, bert: Any, minilm_checkpoint: Path, dtype: str
) -> None:
    answer = ask(model_http, "minilm", text="Hello, world!", encoding="prompt_embeds", dtype=dtype).json()
    assert (answer["encoding"], answer["dtype"]) == ("prompt_embeds", dtype)
    ids = transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)("Hello, world!", return_tensors="pt")[
        "input_ids"
    ]
    with torch.inference_mode():
        expected = bert.get_input_embeddings()(ids)[0].to(getattr(torch, dtype))
    found = prompt_of(answer["token_embeddings"])
    assert (found.dtype, list(found.shape)) == (getattr(torch, dtype), answer["shape"][1:])
    assert torch.equal(found, expected)


def test_multiple_prompts_are_a_list(model_http: httpx.Client, bert: Any) -> None:
    rows = [[101, 7592, 102], [101, 102], [7592]]
    answer = ask(model_http, "minilm", input_ids=rows, encoding="prompt_embeds", output="token_embeddings").json()
    assert answer["lengths"] == [3, 2, 1]
    table = bert.get_input_embeddings().weight
    for text, row in zip(answer["token_embeddings"], rows, strict=True):
        assert torch.equal(prompt_of(text), table[row])


@pytest.mark.parametrize(
    ("model", "fields", "accept", "status", "detail"),
    [
        ("transformer-base", {}, JSON, 422, "encoding: got prompt_embeds"),
        ("minilm", {"output": "embeddings"}, JSON, 422, "output: got ['embeddings']"),
        ("minilm", {"output": ["token_embeddings", "embeddings"]}, JSON, 422, "output: got ['token_embeddings', 'embe"),
        ("minilm", {"attention_mask": [[1]]}, JSON, 422, "attention_mask: got a value"),
        ("minilm", {}, BYTES, 406, f"Accept: got {BYTES}"),
        ("minilm", {}, SAFETENSORS, 406, f"Accept: got {SAFETENSORS}"),
    ],
)
def test_unsafe_prompt_embeds_request_is_rejected(
    model_http: httpx.Client, model: str, fields: dict[str, Any], accept: str, status: int, detail: str
) -> None:
    fields = {"input_ids": [[101]], "encoding": "prompt_embeds", **fields}
    response = model_http.post(f"/models/{model}/embed", json=fields, headers={"Accept": accept})
    found = refusal(response)
    assert (found[0], found[1][: len(detail)]) == (status, detail)
