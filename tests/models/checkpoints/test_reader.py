"""The reader of checkpoints, on files written by transformers, against the modules of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    MarianConfig,
    MarianModel,
    PreTrainedModel,
)

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend import FrontEnd
from tests.families.library_models import save
from tests.families.published_models import PUBLISHED
from tests.models.rejections import rejection

SIZES: dict[str, Any] = {"vocab_size": 30, "hidden_size": 8, "max_position_embeddings": 10, "type_vocab_size": 3}
BERT = BertConfig(**SIZES, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
GPT2 = GPT2Config(vocab_size=30, n_embd=8, n_positions=10, n_layer=1, n_head=2)
IDS = torch.tensor([[0, 29, 3, 3], [7, 8, 9, 28]])


def build(kind: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(1)
    model = kind(GPT2 if kind.__name__.startswith("GPT2") else BERT)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def entering_block_0(folder: Path, kind: type[PreTrainedModel]) -> Tensor:
    model = kind.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        entering: Tensor = model(IDS, output_hidden_states=True).hidden_states[0]
    return entering


def found(folder: Path) -> Tensor:
    with torch.inference_mode():
        vectors: Tensor = FrontEnd.from_data(read_frontend(folder)).eval()(IDS)
    return vectors


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """The folder of a tiny BERT."""
    build(BertModel).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        ("exaone", LlamaForCausalLM, "transformer.wte.weight"),
        ("sarvam_moe", Glm4MoeForCausalLM, "model.word_embeddings.weight"),
    ],
)
def test_published_name_of_table_is_read(name: str, kind: type[PreTrainedModel], key: str, tmp_path: Path) -> None:
    """The library saves a model with a head under the names of its first publication."""
    kind(CONFIG_MAPPING[name](**PUBLISHED[name].config)).save_pretrained(tmp_path)
    assert key in load_file(tmp_path / "model.safetensors")
    assert torch.equal(found(tmp_path), entering_block_0(tmp_path, kind))


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM, GPT2Model, GPT2LMHeadModel])
def test_saved_model_matches_transformers(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="1KB")
    assert len(list((tmp_path / "several").glob("model-*-of-*.safetensors"))) > 2
    expected = entering_block_0(tmp_path / "one", kind)
    assert torch.equal(found(tmp_path / "one"), expected)
    assert torch.equal(found(tmp_path / "several"), expected)


def test_reader_needs_only_embeddings_under_either_name(bert: Path) -> None:
    expected = found(bert)
    tensors = {key: tensor for key, tensor in tensors_of(bert).items() if "embeddings" in key}
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        tensors[f"embeddings.LayerNorm.{old}"] = tensors.pop(f"embeddings.LayerNorm.{new}")
    save_file(tensors, bert / "model.safetensors")
    assert torch.equal(found(bert), expected)


def change(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_missing_size_is_taken_from_tensors(bert: Path) -> None:
    expected = read_frontend(bert)
    change(bert, vocab_size=..., hidden_size=..., max_position_embeddings=...)
    assert read_frontend(bert).config == expected.config


def test_invalid_config_value_is_rejected(bert: Path) -> None:
    valid = (bert / "config.json").read_text()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "unknown"}, "the model_type 'unknown' is unknown; "),
        ({"position_embedding_type": "relative_key"}, "is 'relative_key', understood is 'absolute'"),
        *(
            ({key: value}, f"{key} is {value!r}, the tensors have")
            for key in ("hidden_size", "type_vocab_size")
            for value in (0, -1, 8.0, "8", True)
        ),
        *(({key: size + 1}, f"{key} is {size + 1}, the tensors have {size}") for key, size in SIZES.items()),
    ]
    for values, message in cases:
        (bert / "config.json").write_text(valid)
        change(bert, **values)
        refusal = rejection(CheckpointError, read_frontend, bert)
        assert message in refusal, values
        assert "\n" not in refusal


def test_missing_or_broken_file_is_rejected(bert: Path) -> None:
    weights = (bert / "model.safetensors").read_bytes()
    for kept in (0, 4, 200, 2000):
        (bert / "model.safetensors").write_bytes(weights[:kept])
        assert "model.safetensors: " in rejection(CheckpointError, read_frontend, bert), kept
    (bert / "model.safetensors").unlink()
    message = "neither model.safetensors nor model.safetensors.index.json"
    assert message in rejection(CheckpointError, read_frontend, bert)
    for text, message in (("{", "not valid JSON: Expecting property name"), ("[1]", "not a JSON object")):
        (bert / "config.json").write_text(text)
        assert re.search(rf"config\.json: .*{message}", rejection(CheckpointError, read_frontend, bert))
    (bert / "config.json").unlink()
    assert "bert: no config.json" in rejection(CheckpointError, read_frontend, bert)


def test_weights_of_other_format_are_named(bert: Path) -> None:
    before = bert / "model.safetensors"
    for name, advice in (
        ("pytorch_model.bin", "a pickle, which can run any code when it is read; convert it to safetensors"),
        ("consolidated.00.pth", "a pickle"),
        ("model-Q4_K_M.gguf", "a file for other engines, often quantised; export the model from which it was made"),
        ("tf_model.h5", "weights of TensorFlow or Flax; convert them"),
        ("flax_model.msgpack", "weights of TensorFlow or Flax; convert them"),
        ("consolidated.safetensors", "with the names of another library; export the files for transformers"),
        ("model.fp16.safetensors", "under another name; rename it to model.safetensors"),
        ("model-00001-of-00002.safetensors", "parts without their index; add model.safetensors.index.json"),
        ("openvino_model.bin", "weights of OpenVINO"),
        ("training_args.bin", "the state of a training, without weights"),
        ("random_states_0.pkl", "the state of a training"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "the state of a training"),
    ):
        before = before.rename(bert / name)
        message = f"model.safetensors.index.json, only {name}, {advice}"
        assert message in rejection(CheckpointError, read_frontend, bert)
    (bert / "weights.bin").touch()  # weights count before files of their training
    assert "index.json, only weights.bin, a pickle" in rejection(CheckpointError, read_frontend, bert)


def test_wrapper_in_name_of_token_table_is_named(bert: Path) -> None:
    tensors = tensors_of(bert)
    for wrapper in ("module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "net."):
        save_file({wrapper + name: tensor for name, tensor in tensors.items()}, bert / "model.safetensors")
        message = rf"the files hold {wrapper}.*word_embeddings\.weight; remove '{wrapper[:4]}"
        assert re.search(message, rejection(CheckpointError, read_frontend, bert))
    inside = {name.replace(".word", "._fsdp_wrapped_module.word"): tensor for name, tensor in tensors.items()}
    save_file(inside, bert / "model.safetensors")
    message = "; remove '_fsdp_wrapped_module.' from the names of all tensors"
    assert message in rejection(CheckpointError, read_frontend, bert)


def test_missing_or_wrong_tensor_is_rejected(bert: Path) -> None:
    change(bert, vocab_size=..., max_position_embeddings=...)
    tensors = tensors_of(bert)
    words, positions = "word_embeddings.weight", "position_embeddings.weight"
    cases: list[tuple[str, Tensor | None, str]] = [
        *((key, None, f"no tensor .*embeddings.{key}") for key in (words, positions, "LayerNorm.bias")),
        (words, torch.ones(()), r"has the shape \[\], expected \[rows, width\]$"),
        (words, torch.ones(30), r"has the shape \[30\], expected \[rows, width\]$"),
        (words, torch.ones(1, 30, 8), r"has the shape \[1, 30, 8\], expected \[rows, width\]$"),
        (positions, torch.ones(()), r"has the shape \[\], expected at least one dimension$"),
        *((key, torch.ones(0, 8), "rows: got 0, expected ") for key in (words, positions)),
        (words, torch.ones((30, 8), dtype=torch.int8), f"{words} is int8, expected float32"),
    ]
    for key, tensor, message in cases:
        changed = tensors | {f"embeddings.{key}": tensor}
        save_file({name: value for name, value in changed.items() if value is not None}, bert / "model.safetensors")
        assert re.search(message, rejection(CheckpointError, read_frontend, bert)), (key, message)


def test_marian_decoder_with_its_own_vocabulary_is_read(tmp_path: Path) -> None:
    sizes = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 77}
    model = MarianModel(MarianConfig(**PUBLISHED["marian/decoder"].config | sizes))
    model.save_pretrained(tmp_path)
    table = model.decoder.embed_tokens.weight.detach()
    assert np.array_equal(read_frontend(tmp_path, "decoder").tensors["tokens.weight"], table)
    change(tmp_path, decoder_vocab_size=78)
    assert "decoder_vocab_size is 78, the tensors have 77" in rejection(
        CheckpointError, read_frontend, tmp_path, "decoder"
    )


ALPHA = {"rope_type": "dynamic", "alpha": 2.0, "factor": 1.0, "rope_theta": 1e4}


def test_missing_or_mistyped_value_of_family_is_rejected(tmp_path: Path) -> None:
    for name, changes, message in (
        ("esm", {"pad_token_id": None}, "pad_token_id is missing; 'esm' needs it"),
        ("gemma", {"hidden_size": "32"}, "hidden_size: got '32', expected 1 to"),
        ("llama", {"max_position_embeddings": 0}, "max_len: got 0, expected 1 or more"),
        ("xlm", {"n_langs": "2"}, "n_langs is '2': '>' not supported"),
        ("biogpt", {"hidden_size": 10**400}, "hidden_size: got 1000"),
        ("bloom", {"n_head": 10**9}, "heads: got 1000000000, expected 1 to 65536"),
        ("xlnet", {"clamp_len": 2**63}, "clamp_len: got 9223372036854775808, expected at most"),
        ("qwen4_exp_text", {"eos_token_id": []}, "ngrams.reset_id: got [], expected a whole number"),
        ("gemma3n_text", {"altup_num_inputs": 0}, "streams: got 0, expected 1 or more"),
        ("gemma3n/text", {"text_config.vocab_size": 10**12}, "vocab_size is 1000000000000, the tensors have 99"),
        ("gpt_neox", {"rope_parameters.partial_rotary_factor": 1e308}, "config.json: cannot convert float infinity"),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"alpha": 1e308}}, "config.json: "),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA, "head_dim": 2}, "config.json: division by zero"),
    ):
        save(name, tmp_path)
        for key, value in changes.items():
            part, _, own = key.rpartition(".")
            whole = json.loads((tmp_path / "config.json").read_text())
            change(tmp_path, **({part: whole[part] | {own: value}} if part else {key: value}))
        assert message in rejection(CheckpointError, read_frontend, tmp_path, name.partition("/")[2] or None), name
