"""Tables of quantised models and adapters, whose values depend on further tensors: each is rejected by name.

Measured with transformers 5.24 and compressed-tensors 0.20, for a float table with a `weight_scale` beside it: without
`quantization_config` the library ignores the scale, with one it rounds the table to the scale's grid.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from preblock.export.errors import ExportError
from preblock.export.options import resolve
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.frontend_data import FrontEndData
from tests.families import library_models, stems
from tests.families.tiny_models import save_whole
from tests.support.static_models import save_plain

PARTS = {
    "compressed-tensors": ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"],
    "gptq": ["qweight", "scales", "qzeros", "g_idx"],
    "bitsandbytes": ["weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "SCB"],
    "fp8": ["weight_scale_inv"],
    "aqlm": ["codes", "codebooks"],
    "hqq": ["W_q", "meta"],
    "torchao": ["weight:_data", "weight:scale"],
    "quanto": ["weight._data", "weight._scale"],
    "gemma": ["embedding_quantized", "embedding_scale"],
    "mlx": ["biases"],
    None: ["base_layer.weight", "lora_embedding_A", "parametrizations.weight.original", "new_in_2030"],
}
"""Method of quantisation -> names of its tensors inside a module; the last row is of adapters, and unknown."""
TABLE = "model.embed_tokens"


def divide(folder: Path, name: str, part: str, keep: bool, method: str | None = "gptq") -> None:
    """Store the tensor `part` beside the tensor `name`, or in place of it."""
    file = next(folder.rglob("model.safetensors"))
    tensors = load_file(file)
    table = tensors[name] if keep else tensors.pop(name)
    save_file(tensors | {part: table.clone()}, file, {"format": "pt"})
    config = folder / "config.json"
    if method and config.exists():
        document = json.loads(config.read_text())
        config.write_text(json.dumps(document | {"quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize("name", ["llama", "helium"])  # with a row, and discovered
@pytest.mark.parametrize("tied", [True, False])
def test_divided_token_table_is_rejected(name: str, tied: bool, tmp_path: Path) -> None:
    save_whole(name, tmp_path)
    tensors, document = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    plain = tensors | {"lm_head.weight": tensors[f"{TABLE}.weight"].clone()}
    for method, parts in PARTS.items():
        for part in parts if name == "llama" else parts[:1]:
            for keep in (True, False):
                save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
                (tmp_path / "config.json").write_text(json.dumps(document | {"tie_word_embeddings": tied}))
                divide(tmp_path, f"{TABLE}.weight", f"{TABLE}.{part}", keep, method)
                with pytest.raises(ExportError) as error:
                    load_source(resolve(str(tmp_path)))
                said = f"quant_method in config.json is '{method}'" if method else "config.json names no quant_method"
                assert f"{TABLE} has further tensors in the files, {TABLE}.{part}" in str(error.value)
                assert said in str(error.value)


@pytest.mark.parametrize("name", ["llama", "helium"])
def test_plain_table_beside_quantised_head_is_read(name: str, tmp_path: Path) -> None:
    save_whole(name, tmp_path)
    table = load_file(tmp_path / "model.safetensors")[f"{TABLE}.weight"]
    divide(tmp_path, f"{TABLE}.weight", "lm_head.qweight", keep=True)
    frontend = load_source(resolve(str(tmp_path))).frontend
    assert isinstance(frontend, FrontEndData)
    assert np.array_equal(frontend.tensors["tokens.weight"], table)


@pytest.mark.parametrize("keep", [True, False])
def test_tensor_of_deberta_training_counts_with_table_only(keep: bool, tmp_path: Path) -> None:
    """The published mDeBERTa-v3 has both; transformers reads `weight` alone."""
    library_models.save("deberta-v2", tmp_path)
    table = load_file(tmp_path / "model.safetensors")["embeddings.word_embeddings.weight"]
    divide(tmp_path, "embeddings.word_embeddings.weight", "embeddings.word_embeddings._weight", keep, None)
    if keep:
        assert np.array_equal(read_frontend(tmp_path).tensors["tokens.weight"], table)
    else:
        with pytest.raises(ExportError, match=r"in the files, embeddings\.word_embeddings\._weight"):
            load_source(resolve(str(tmp_path)))


SOURCES: list[tuple[Callable[[str, Path], object], str, str]] = [
    *(
        (library_models.save, *case)
        for case in (
            ("bert", "embeddings.LayerNorm.weight"),
            ("marian/encoder", "encoder.embed_positions.weight"),  # computed, if the file lacks it
            ("t5/encoder", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
            ("gemma3n_text", "embed_tokens_per_layer.weight"),
        )
    ),
    (save_whole, "longformer", "longformer.embeddings.position_embeddings.weight"),  # discovered
    (stems.save, "vit", "embeddings.patch_embeddings.projection.weight"),
    (lambda _, folder: save_plain(folder), "model2vec", "embeddings"),
]
"""How a model is saved, its name, and a further tensor of its front-end."""


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("save", "model", "name"), SOURCES)
def test_divided_tensor_of_any_source_is_rejected(
    save: Callable[[str, Path], object], model: str, name: str, keep: bool, tmp_path: Path
) -> None:
    save(model, tmp_path)
    divide(tmp_path, name, f"{name}_scale", keep)
    with pytest.raises(ExportError, match=f"has further tensors in the files, {name}_scale"):
        load_source(resolve(str(tmp_path), side=model.partition("/")[2] or None))


@pytest.mark.parametrize("model_type", ["t5", "mt5"])
@pytest.mark.parametrize(("table", "part"), [("shared.weight", "encoder.embed_tokens"), ("lm_head.weight", "shared")])
def test_divided_shared_table_is_rejected(model_type: str, table: str, part: str, tmp_path: Path) -> None:
    save_whole(model_type, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[table] = tensors.pop("shared.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    divide(tmp_path, table, f"{part}.weight_packed", keep=True)
    with pytest.raises(ExportError, match=rf"has further tensors in the files, {part}\.weight_packed"):
        load_source(resolve(str(tmp_path), side="encoder"))
