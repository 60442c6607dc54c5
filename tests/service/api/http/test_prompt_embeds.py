"""Responses as prompt_embeds of vLLM. Oracle: the lookup of transformers."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.api.http.native_requests import post_json, prompt_of, refusal, told
from tests.support.late import torch, transformers


@pytest.fixture(scope="module")
def table(minilm_checkpoint: Path) -> Any:
    """The token table of the real checkpoint."""
    model: Any = transformers.BertModel.from_pretrained(minilm_checkpoint, add_pooling_layer=False)
    return model.get_input_embeddings().weight.detach()


def test_prompt_embeds_equal_transformers_lookup(model_http: httpx.Client, table: Any, minilm_checkpoint: Path) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(minilm_checkpoint)("Hello, world!")["input_ids"]
    for dtype in ("float32", "float16", "bfloat16"):
        answer = told(model_http, "minilm", text="Hello, world!", encoding="prompt_embeds", dtype=dtype)
        assert (answer["encoding"], answer["dtype"]) == ("prompt_embeds", dtype)
        found = prompt_of(answer["token_embeddings"])
        assert (found.dtype, list(found.shape)) == (getattr(torch, dtype), answer["shape"][1:])
        assert torch.equal(found, table[ids].to(found.dtype))
    rows = [[101, 7592, 102], [101, 102], [7592]]
    answer = told(model_http, "minilm", input_ids=rows, encoding="prompt_embeds", output="token_embeddings")
    assert answer["lengths"] == [3, 2, 1]
    for text, row in zip(answer["token_embeddings"], rows, strict=True):
        assert torch.equal(prompt_of(text), table[row])


def test_unsafe_prompt_embeds_request_is_rejected(model_http: httpx.Client) -> None:
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("transformer-base", {}, "encoding: got prompt_embeds"),
        ("minilm", {"output": "embeddings"}, "output: got ['embeddings']"),
        ("minilm", {"output": ["token_embeddings", "embeddings"]}, "output: got ['token_embeddings', 'embe"),
        ("minilm", {"attention_mask": [[1]]}, "attention_mask: got a value"),
    ]
    for model, fields, detail in requests:
        found = refusal(post_json(model_http, model, input_ids=[[101]], encoding="prompt_embeds", **fields))
        assert (found[0], found[1][: len(detail)]) == (422, detail)
