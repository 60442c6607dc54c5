"""The reader of checkpoints, on files written by transformers, against the modules of transformers."""

import json
import re
from pathlib import Path
from typing import Any

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
    PreTrainedModel,
)

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.families.library_models import save
from tests.families.published_models import PUBLISHED

BERT = BertConfig(
    vocab_size=30,
    hidden_size=8,
    max_position_embeddings=10,
    type_vocab_size=3,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
)
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
        vectors: Tensor = read_frontend(folder).eval()(IDS)
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


KINDS = pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM, GPT2Model, GPT2LMHeadModel])


@KINDS
def test_saved_model_matches_transformers(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    assert torch.equal(found(tmp_path), entering_block_0(tmp_path, kind))


@KINDS
def test_sharded_model_matches_transformers(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(found(tmp_path), entering_block_0(tmp_path, kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float16_and_bfloat16_weights_match_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(BertModel)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["embeddings.word_embeddings.weight"].dtype == dtype
    assert torch.equal(found(tmp_path), entering_block_0(tmp_path, BertModel))


def test_legacy_norm_names_are_read(bert: Path) -> None:
    expected = found(bert)
    tensors = load_file(bert / "model.safetensors")
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        tensors[f"embeddings.LayerNorm.{old}"] = tensors.pop(f"embeddings.LayerNorm.{new}")
    save_file(tensors, bert / "model.safetensors")
    assert torch.equal(found(bert), expected)


def test_reader_needs_only_embedding_tensors(bert: Path) -> None:
    expected = found(bert)
    tensors = load_file(bert / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if "embeddings" in key}, bert / "model.safetensors")
    assert torch.equal(found(bert), expected)


def test_minilm_checkpoint_has_published_shapes(checkpoint: Path) -> None:
    frontend = read_frontend(checkpoint)
    shapes = {name: tuple(tensor.shape) for name, tensor in frontend.state_dict().items()}
    assert shapes == {
        "tokens.weight": (30522, 384),
        "segments.weight": (2, 384),
        "positions.weight": (512, 384),
        "norm.weight": (384,),
        "norm.bias": (384,),
    }
    assert frontend.config.padding_idx == 0
    assert frontend.norm.eps == 1e-12


def test_missing_config_keys_have_transformers_defaults(bert: Path) -> None:
    change(bert, layer_norm_eps=..., hidden_dropout_prob=..., pad_token_id=...)
    frontend, defaults = read_frontend(bert), BertConfig()
    assert frontend.norm.eps == defaults.layer_norm_eps
    assert frontend.config.padding_idx == defaults.pad_token_id


def change(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def test_folder_without_config_is_rejected(bert: Path) -> None:
    (bert / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"bert: no config\.json"):
        read_frontend(bert)


@pytest.mark.parametrize(("text", "message"), [("{", "Expecting property name"), ("[1]", "not a JSON object")])
def test_broken_config_is_rejected(bert: Path, text: str, message: str) -> None:
    (bert / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read_frontend(bert)


def test_unknown_model_type_is_rejected(bert: Path) -> None:
    change(bert, model_type="unknown")
    with pytest.raises(CheckpointError, match="the model_type 'unknown' is unknown; "):
        read_frontend(bert)


def test_relative_position_embedding_type_is_rejected(bert: Path) -> None:
    change(bert, position_embedding_type="relative_key")
    with pytest.raises(CheckpointError, match="position_embedding_type is 'relative_key', understood is 'absolute'"):
        read_frontend(bert)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_missing_size_is_taken_from_tensors(bert: Path, key: str) -> None:
    expected = read_frontend(bert)
    change(bert, **{key: ...})
    assert read_frontend(bert).config == expected.config


@pytest.mark.parametrize("value", [0, -1, 8.0, "8", True])
@pytest.mark.parametrize("key", ["hidden_size", "type_vocab_size"])
def test_invalid_size_is_rejected(bert: Path, key: str, value: object) -> None:
    change(bert, **{key: value})
    with pytest.raises(CheckpointError, match=f"{key} is {value!r}, the tensors have"):
        read_frontend(bert)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vocab_size", 31, "vocab_size is 31, the tensors have 30"),
        ("hidden_size", 9, "hidden_size is 9, the tensors have 8"),
        ("max_position_embeddings", 11, "max_position_embeddings is 11, the tensors have 10"),
        ("type_vocab_size", 2, "type_vocab_size is 2, the tensors have 3"),
    ],
)
def test_size_different_from_tensors_is_rejected(bert: Path, key: str, value: object, named: str) -> None:
    change(bert, **{key: value})
    with pytest.raises(CheckpointError, match=f"config.json disagree: .*{named}"):
        read_frontend(bert)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pytorch_model.bin", "a pickle, which can run any code when it is read; convert it to safetensors"),
        ("consolidated.00.pth", "a pickle"),
        ("model-Q4_K_M.gguf", "a file for other engines, often quantised; export the model from which it was made"),
        ("tf_model.h5", "weights of TensorFlow or Flax; convert them"),
        ("flax_model.msgpack", "weights of TensorFlow or Flax; convert them"),
        ("consolidated.safetensors", "with the names of another library; export the files for transformers"),
        ("model.fp16.safetensors", "under another name; rename it to model.safetensors"),
        ("model-00001-of-00002.safetensors", "parts without their index; add model.safetensors.index.json"),
    ],
)
def test_weights_of_other_format_are_named(bert: Path, name: str, advice: str) -> None:
    (bert / "model.safetensors").rename(bert / name)
    with pytest.raises(CheckpointError, match=re.escape(f"model.safetensors.index.json, only {name}, {advice}")):
        read_frontend(bert)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "module._orig_mod.", "net."]
)
def test_prefix_of_token_table_is_named(bert: Path, prefix: str) -> None:
    tensors = load_file(bert / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, bert / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"the files hold {prefix}.*word_embeddings\.weight; remove '{prefix[:4]}"
    ):
        read_frontend(bert)


def test_wrapper_inside_name_of_token_table_is_named(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    renamed = {name.replace(".word", "._fsdp_wrapped_module.word"): tensor for name, tensor in tensors.items()}
    save_file(renamed, bert / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"; remove '_fsdp_wrapped_module\.' from the names of all tensors"):
        read_frontend(bert)


def test_folder_without_weights_is_rejected(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_frontend(bert)


@pytest.mark.parametrize("key", ["word_embeddings.weight", "position_embeddings.weight", "LayerNorm.bias"])
def test_missing_tensor_is_rejected(bert: Path, key: str) -> None:
    tensors = load_file(bert / "model.safetensors")
    del tensors[f"embeddings.{key}"]
    save_file(tensors, bert / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no tensor .*embeddings.{key}"):
        read_frontend(bert)


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("word_embeddings", (), r"\[rows, width\]"),
        ("word_embeddings", (30,), r"\[rows, width\]"),
        ("word_embeddings", (1, 30, 8), r"\[rows, width\]"),
        ("position_embeddings", (), "at least one dimension"),
    ],
)
def test_table_of_other_shape_is_rejected(bert: Path, key: str, shape: tuple[int, ...], expected: str) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors[f"embeddings.{key}.weight"] = torch.ones(shape)
    save_file(tensors, bert / "model.safetensors")
    message = rf"tensor embeddings\.{key}\.weight has the shape {re.escape(str(list(shape)))}, expected {expected}$"
    with pytest.raises(CheckpointError, match=message):
        read_frontend(bert)


@pytest.mark.parametrize("key", ["word_embeddings", "position_embeddings"])
def test_table_without_rows_is_rejected(bert: Path, key: str) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors[f"embeddings.{key}.weight"] = torch.ones(0, 8)
    save_file(tensors, bert / "model.safetensors")
    change(bert, vocab_size=..., max_position_embeddings=...)
    with pytest.raises(CheckpointError, match=r"rows: got 0, expected "):
        read_frontend(bert)


def test_quantized_weights_are_rejected(bert: Path) -> None:
    tensors = load_file(bert / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"] = torch.ones((30, 8), dtype=torch.int8)
    save_file(tensors, bert / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight is torch.int8, expected torch.float32"):
        read_frontend(bert)


@pytest.mark.parametrize("kept", [0, 4, 200, 2000])
def test_truncated_weight_file_is_rejected(bert: Path, kept: int) -> None:
    weights = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(weights[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        read_frontend(bert)


def test_checkpoint_error_is_one_line(bert: Path) -> None:
    change(bert, vocab_size=31, max_position_embeddings=11)
    with pytest.raises(CheckpointError) as error:
        read_frontend(bert)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("esm", {"pad_token_id": None}, "pad_token_id is missing; 'esm' needs it"),
        ("gemma", {"hidden_size": "32"}, "a value has the wrong type: must be real number, not str"),
    ],
)
def test_missing_or_mistyped_config_value_is_rejected(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_frontend(tmp_path)
