"""Soft prompts: a folder saved by peft 0.21.2, exported, served and verified.

Oracle: the `inputs_embeds` of a model of this version of PEFT: the vectors of the prompt, then those of the tokens.
"""

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import preblock
from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.verification import verify
from preblock.service.artifacts.names import MANIFEST, SOFT_PROMPTS
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.repository import Repository
from tests.families import stems
from tests.support import commands
from tests.support.paths import ROOT
from tests.support.processes import status_bytes
from tests.support.servers import serve
from tests.support.shared import Shared

PEFT = ROOT / "tests" / "data" / "peft"
WIDTH = 32


@pytest.fixture(scope="module")
def prompt_checkpoint(shared: Shared) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, bos_token_id=1, eos_token_id=1, **sizes)
    )
    return shared.make("prompted checkpoint", model.save_pretrained)


@pytest.fixture(scope="module")
def prompt_repository(prompt_checkpoint: Path, shared: Shared) -> Path:
    prompts = "--soft-prompt", f"polite={PEFT}", "--soft-prompt", f"again={PEFT}"

    def fill(root: Path) -> None:
        commands.run(commands.preblock, "export", prompt_checkpoint, "--name", "gpt2", "--repository", root, *prompts)

    return shared.make("prompted", fill)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the folder of PEFT, to change."""
    return shutil.copytree(PEFT, tmp_path / "prompt")


def test_soft_prompts_equal_inputs_embeds_of_peft(prompt_checkpoint: Path, prompt_repository: Path) -> None:
    """Each answer feeds block 0: the vectors of PEFT, of tokens and of an image, with the positions of transformers."""
    prompt = load_file(PEFT / "adapter_model.safetensors")["prompt_embeddings"]
    gpt2: Any = transformers.GPT2LMHeadModel.from_pretrained(prompt_checkpoint).transformer
    image, ids = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)), torch.tensor([15, 11, 9])
    with torch.no_grad():
        tokens = torch.cat([prompt, gpt2.wte(ids[:2]), image, gpt2.wte(ids[2:])])
        expected = (tokens + gpt2.wpe(torch.arange(len(tokens)))).numpy()
    parts: Any = [{"soft_prompt": "polite"}, {"input_ids": [15, 11, 97, 97, 9]}]
    placeholder: Any = {"token_id": 97, "vectors": image}
    with serve(prompt_repository) as server, preblock.connect(server.address) as client:
        answer = client.embed(parts=parts, placeholder=placeholder, model="gpt2")
        assert answer.vectors.tobytes() == expected.tobytes()
        (encoded,) = client.prompt_embeds(parts=parts, placeholder=placeholder, model="gpt2")
        assert torch.equal(torch.load(io.BytesIO(base64.b64decode(encoded)), weights_only=True), tokens)
        with client.decode("gpt2") as stream:
            steps = [stream.step(parts=parts[:1]), stream.step([15, 11]), stream.step(parts=[{"vectors": image}])]
            steps.append(stream.step([9]))
            assert np.concatenate(steps, axis=1).tobytes() == expected.tobytes()
        for name, expected_error in (("rude", "polite, again"), (5, "the name of a soft prompt")):
            refused = httpx.post(f"{server.address}/models/gpt2/embed", json={"parts": [{"soft_prompt": name}]})
            detail = f"parts[0].soft_prompt: got {name}, expected {expected_error}"
            assert (refused.status_code, refused.json()["detail"]) == (422, detail)


def test_many_soft_prompts_are_rejected_in_little_memory(prompt_repository: Path) -> None:
    with serve(prompt_repository, "--max-request-tokens", "1000") as server:
        before = status_bytes(server.pid, "VmHWM")
        parts = [{"soft_prompt": "polite"}] * 200_000
        answer = httpx.post(f"{server.address}/models/gpt2/embed", json={"parts": parts}, timeout=60)
        detail = "parts: got more than 1000 tokens, expected at most 1000 tokens in a request"
        assert (answer.status_code, answer.json()["detail"]) == (413, detail)
        assert status_bytes(server.pid, "VmHWM") - before < 2**28


def test_soft_prompts_are_part_of_the_artifact(prompt_repository: Path) -> None:
    folder = prompt_repository / "gpt2" / "1"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["soft_prompts"] == {"polite": {"first": 0, "rows": 3}, "again": {"first": 3, "rows": 3}}
    assert manifest["files"][SOFT_PROMPTS]["bytes"] == 2 * 3 * WIDTH * 4
    verify(folder, provider="cpu")


def test_table_of_another_size_is_rejected(prompt_repository: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(prompt_repository / "gpt2" / "1", tmp_path / "gpt2" / "1")
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["soft_prompts"]["again"]["first"] = 4
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"soft_prompts: got 6 rows up to row 7, expected the rows of soft.prompts"):
        Repository(tmp_path)
    del manifest["files"][SOFT_PROMPTS]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"soft_prompts: got polite, again, expected token_embeddings and soft"):
        Repository(tmp_path)


def refusal(checkpoint: Path, root: Path, *prompts: str, **options: Any) -> str:
    steps: list[str] = []
    with pytest.raises(ExportError) as raised:
        export(str(checkpoint), "gpt2", root, steps.append, soft_prompts=prompts, **options)
    assert not [*root.glob("gpt2/*")]
    assert "tracing the module" not in steps  # the slow part comes later
    return str(raised.value)


def test_bad_option_is_rejected(prompt_checkpoint: Path, tmp_path: Path) -> None:
    for item in ("polite", "=x", "polite=", "a b=x"):
        message = f"--soft-prompt: got {item!r}, expected NAME=FOLDER, each NAME once"
        assert refusal(prompt_checkpoint, tmp_path, item) == message
    assert "each NAME once" in refusal(prompt_checkpoint, tmp_path, f"a={PEFT}", f"a={PEFT}")


def test_another_adapter_is_refused(prompt_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    file = folder / "adapter_config.json"
    right = json.loads(file.read_text())
    for fields, message in (
        ({"peft_type": "LORA"}, "adapter_config.json: peft_type is 'LORA', expected PROMPT_TUNING"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules is 2, expected 1, a prompt for one model"),
        ({"num_virtual_tokens": 4}, "prompt_embeddings has shape [3, 32], expected [4, 32]"),
    ):
        file.write_text(json.dumps(right | fields))
        found = refusal(prompt_checkpoint, tmp_path / "made", f"polite={folder}")
        assert found.startswith("--soft-prompt polite: ")
        assert found.endswith(message)


def test_bad_weights_are_refused(prompt_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    weights, root = folder / "adapter_model.safetensors", tmp_path / "made"
    save_file({"prompt_embeddings": torch.full((3, WIDTH), torch.nan)}, weights)
    assert refusal(prompt_checkpoint, root, f"polite={folder}").endswith(
        "prompt_embeddings holds infinite values or NaN"
    )
    save_file({"prompt_embeddings": torch.zeros(3, 8)}, weights)
    assert refusal(prompt_checkpoint, root, f"polite={folder}").endswith("has shape [3, 8], expected [3, 32]")
    save_file({"other": torch.zeros(3, WIDTH)}, weights)
    assert "prompt_embeddings" in refusal(prompt_checkpoint, root, f"polite={folder}")
    weights.rename(folder / "adapter_model.bin")
    assert "only adapter_model.bin, a pickle" in refusal(prompt_checkpoint, root, f"polite={folder}")
    assert refusal(prompt_checkpoint, root, f"polite={tmp_path / 'nowhere'}").endswith("no adapter_config.json")


def test_model_without_token_vectors_takes_no_soft_prompt(tmp_path: Path) -> None:
    stems.save("vit", tmp_path / "vit")
    with pytest.raises(ExportError, match="the token vectors of this model are unknown"):
        export(str(tmp_path / "vit"), "vit", tmp_path / "made", soft_prompts=[f"polite={PEFT}"])


def test_half_precision_is_widened(prompt_checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    prompt = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"].bfloat16()
    save_file({"prompt_embeddings": prompt}, folder / "adapter_model.safetensors")
    result = export(str(prompt_checkpoint), "gpt2", tmp_path / "made", soft_prompts=[f"polite={folder}"])
    assert (result.folder / SOFT_PROMPTS).read_bytes() == prompt.float().numpy().tobytes()
