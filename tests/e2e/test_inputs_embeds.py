"""The outputs of GPT-2 in a model of transformers: only `token_embeddings` are its `inputs_embeds`."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from preblock.export.exporter import export
from tests.support.servers import serve

IDS = [[15, 11, 9, 3]]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, **sizes, initializer_range=0.5))
    return model.eval()


@pytest.fixture(scope="module")
def address(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    source, root = tmp_path_factory.mktemp("gpt2"), tmp_path_factory.mktemp("served")
    gpt2.save_pretrained(source)
    export(str(source), "gpt2", root)
    with serve(root) as server:
        yield f"{server.address}/models/gpt2"


def logits_from(gpt2: Any, address: str, output: str) -> torch.Tensor:
    """Return the logits of the model with a served output as `inputs_embeds`."""
    answer = httpx.post(f"{address}/embed", json={"input_ids": IDS, "output": output}).json()
    vectors = np.frombuffer(base64.b64decode(answer[output]), "<f4").reshape(answer["shape"])
    with torch.inference_mode():
        logits: torch.Tensor = gpt2(inputs_embeds=torch.from_numpy(vectors.copy())).logits
    return logits


def test_only_token_embeddings_reproduce_logits_of_ids(gpt2: Any, address: str) -> None:
    with torch.inference_mode():
        expected = gpt2(torch.tensor(IDS)).logits
    assert torch.equal(logits_from(gpt2, address, "token_embeddings"), expected)
    assert (logits_from(gpt2, address, "embeddings") - expected).abs().max() > 1


def test_model_description_states_use_of_each_output(address: str) -> None:
    outputs = httpx.get(address).json()["outputs"]
    assert outputs["token_embeddings"]["use_as"] == "inputs_embeds or prompt_embeds of a model"
    assert outputs["embeddings"]["use_as"] == "input of block 0"
    assert "Do not pass them as inputs_embeds" in outputs["embeddings"]["description"]


@pytest.mark.parametrize("output", ["token_embeddings", "embeddings"])
def test_parts_are_torch_cat(gpt2: Any, address: str, output: str) -> None:
    given = torch.randn((1, 3, 32), generator=torch.Generator().manual_seed(1))
    first, last = IDS[0][:2], IDS[0][2:]
    block_inputs = []
    hook = gpt2.transformer.h[0].register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    with torch.inference_mode():
        tokens = gpt2.transformer.wte
        whole = torch.cat([tokens(torch.tensor([first])), given, tokens(torch.tensor([last]))], 1)
        gpt2(inputs_embeds=whole)
    hook.remove()
    vectors = base64.b64encode(given.numpy().tobytes()).decode()
    parts = [{"input_ids": first}, {"vectors": vectors}, {"input_ids": last}]
    answer = httpx.post(f"{address}/embed", json={"parts": parts, "output": output}).json()
    found = np.frombuffer(base64.b64decode(answer[output]), "<f4").reshape(answer["shape"])
    expected = whole if output == "token_embeddings" else block_inputs[0]
    assert torch.equal(torch.from_numpy(found.copy()), expected)
    assert answer["next_offset"] == [7]


def test_parts_make_a_mixed_prompt_for_vllm(gpt2: Any, address: str) -> None:
    given = np.random.default_rng(0).standard_normal((2, 32), np.float32)
    parts = [{"input_ids": IDS[0]}, {"vectors": base64.b64encode(given.tobytes()).decode()}]
    answer = httpx.post(f"{address}/embed", json={"parts": parts, "encoding": "prompt_embeds"}).json()
    found = torch.load(io.BytesIO(base64.b64decode(answer["token_embeddings"])), weights_only=True)
    expected = torch.cat([gpt2.transformer.wte(torch.tensor(IDS[0])).detach(), torch.from_numpy(given)])
    assert torch.equal(found, expected)
