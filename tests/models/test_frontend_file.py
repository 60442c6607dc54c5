"""A front-end as data and in files: the same configuration, names, shapes and weights."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from preblock.models import (
    BertEmbeddings,
    FrontEnd,
    GPT2Embeddings,
    GridEmbedding,
    HierarchicalEmbedding,
    HybridEmbedding,
    TransformerEmbedding,
)
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.config import FrontEndConfig, check_size
from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.models.modules.bias import AlibiConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.serialization import MAX_WHOLE
from preblock.models.steps import Norm, Positions, Scale, Segments, Tokens
from preblock.service.codecs.native_json import ARRAY_FIELDS, OPTIONS, TEXT_PARAMETERS
from tests.models.front_ends import CONFIGS, DESCRIBED, NGRAMS, PER_LAYER
from tests.models.rejections import rejection

V, D, M = 9, 4, 6
FRONT_ENDS = {
    "transformer": TransformerEmbedding(V, D, M),
    "transformer learned": TransformerEmbedding(V, D, M, "learned", padding_idx=2),
    "bert": BertEmbeddings(V, D, M),
    "bert without segments": BertEmbeddings(V, D, M, segments=0, padding_idx=None),
    "gpt2": GPT2Embeddings(V, D, M, dropout=0.0),
    "hybrid": HybridEmbedding(V, D, M, 20),
    "grid": GridEmbedding(V, D, (2, 3)),
    "grid factorised": GridEmbedding(V, D, (2, 3), "factorised"),
    "grid sinusoidal": GridEmbedding(V, D, (2, 3), "sinusoidal"),
    "hierarchical": HierarchicalEmbedding(V, D, {"sentence": 3, "word": 5}),
    **{name: FrontEnd(config) for name, config in DESCRIBED.items()},
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_saved_front_end_is_read_back(name: str, tmp_path: Path) -> None:
    frontend = FRONT_ENDS[name]
    frontend.save_frontend(tmp_path / "new" / "folder")
    found = FrontEnd.from_data(read_description(tmp_path / "new" / "folder"))
    assert found.config.to_document() == frontend.config.to_document()
    assert files_described(tmp_path / "new" / "folder") == ["model.safetensors"]
    expected = frontend.state_dict()
    assert list(found.state_dict()) == list(expected)
    for key, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


def test_numbers_of_numpy_become_those_of_python(tmp_path: Path) -> None:
    v, d, m, two = map(np.int64, (V, D, M, 2))
    factors = tuple(np.linspace(1.0, 2.0, D // 2))
    longrope: dict[str, Any] = {"dim": d, "scaling": "longrope", "short_factor": factors, "long_factor": factors}
    rotary = RotaryConfig(**longrope, factor=np.float32(2), original_len=two, length=m)  # type: ignore[arg-type]
    steps = Tokens(rows=v, width=d), Scale(by=np.sqrt(D)), Positions(rows=m)  # type: ignore[arg-type]
    outputs = (RotaryOutput(config=rotary, axes=tuple(np.array([0, 2]))),)
    config = FrontEndConfig(family="f", steps=steps, max_len=m, rotary=outputs)  # type: ignore[arg-type]
    FrontEnd(config).save_frontend(tmp_path)
    assert read_description(tmp_path).config.to_document() == json.loads(json.dumps(config.to_document()))


def test_narrow_weights_keep_their_values(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        frontend = BertEmbeddings(V, D, M).to(dtype)
        frontend.save_frontend(tmp_path)
        for key, tensor in read_description(tmp_path).tensors.items():
            assert np.array_equal(tensor, frontend.state_dict()[key].float())


def test_save_into_source_folder_replaces_the_file(tmp_path: Path) -> None:
    GPT2Embeddings(V, D, M).save_frontend(tmp_path)
    read = FrontEnd.from_data(read_description(tmp_path))
    before = read.tokens.weight.detach().clone()
    with torch.no_grad():
        read.get_parameter("positions.weight").zero_()
    read.save_frontend(tmp_path)
    again = FrontEnd.from_data(read_description(tmp_path))
    assert torch.equal(again.tokens.weight, before)
    assert not again.get_parameter("positions.weight").any()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["frontend.toml", "model.safetensors"]


def test_unsupported_front_end_is_not_saved(tmp_path: Path) -> None:
    with_bias = FrontEnd(replace(GPT2Embeddings(V, D, M).config, bias=AlibiConfig(heads=2)))
    for frontend, message in (
        (GPT2Embeddings(V, D, M).double(), "tokens.weight: got float64, expected float32"),
        (GPT2Embeddings(V, D, M).to("meta"), "tokens.weight: got a tensor on the device meta, expected one with"),
        (with_bias, "bias: got 'alibi', expected none: frontend.toml cannot describe it"),
    ):
        assert message in rejection(ValueError, frontend.save_frontend, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_save_over_another_checkpoint_is_rejected(tmp_path: Path) -> None:
    """The file of a whole model holds more than its front-end."""
    frontend, file = GPT2Embeddings(V, D, M), tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    message = "holds the model.safetensors.index.json of another checkpoint; choose another folder"
    assert message in rejection(ValueError, frontend.save_frontend, tmp_path)
    index.unlink()
    file.write_bytes(b"damaged")
    found = rejection(ValueError, frontend.save_frontend, tmp_path)
    assert re.search(r"model\.safetensors: .*; choose another folder", found)
    file.unlink()
    for described in (False, True):
        if described:
            frontend.save_frontend(tmp_path)
        save_file({**frontend.state_dict(), "h.0.attn.weight": torch.ones(2)}, file)
        before = file.read_bytes()
        found = rejection(ValueError, frontend.save_frontend, tmp_path)
        assert re.search(r"model\.safetensors: holds .*, which frontend.toml does not name; choose", found)
        assert file.read_bytes() == before
        file.unlink()


T5 = T5Config(heads=2, buckets=6, max_distance=9, bidirectional=True)


def test_shapes_are_those_of_modules() -> None:
    config = GPT2Embeddings(V, D, M).config
    further = replace(config, bias=T5), replace(config, ngrams=replace(NGRAMS, referenced=True)), *CONFIGS.values()
    for frontend in map(FrontEnd, further):
        shapes = {name: tuple(tensor.shape) for name, tensor in frontend.state_dict().items()}
        assert shapes_of(frontend.config) == shapes
        assert frontend.data().check().signature == frontend.signature


def test_data_shares_memory_with_module() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        frontend = BertEmbeddings(V, D, M).to(dtype)
        data = frontend.data()
        again = FrontEnd.from_data(data)
        assert again.config == frontend.config
        for name, tensor in frontend.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)
            assert again.state_dict()[name].data_ptr() == tensor.data_ptr()
            assert np.array_equal(data.tensors[name].astype(np.float32), tensor.float())
    fixed = data.tensors["tokens.weight"]
    fixed.flags.writeable = False
    with torch.no_grad():
        FrontEnd.from_data(data).tokens.weight.zero_()
    assert fixed.any()


def test_disagreeing_data_is_rejected() -> None:
    data = GPT2Embeddings(V, D, M).data()
    without = {"tokens.weight": data.tensors["tokens.weight"]}
    for tensors, message in (
        (without, "positions.weight: got none, expected a tensor"),
        ({**data.tensors, "norm.weight": np.zeros(D)}, "norm.weight: got a tensor, expected none"),
        (
            {**without, "positions.weight": np.zeros((2, D))},
            f"positions.weight: got the shape [2, {D}], expected [{M}, ",
        ),
    ):
        assert message in rejection(ValueError, FrontEndData(data.config, tensors).check)


def test_table_that_cannot_be_derived_is_rejected() -> None:
    for positions, width, message in (
        (Positions(table="exact"), 3, "d_model: got 3, expected an even width"),
        (Positions(table="hybrid", rows=2), 3, "d_model: got 3, expected an even width"),
        (Positions(table="exact", grid=(2, 3)), 6, "d_model: got 6, expected a multiple of 4"),
        (Positions(table="tensor2tensor", rows=6), 2, "d_model: got 2, expected 4 or more"),
        (Positions(table="pair_half"), 4, "rows: got 0, expected 1 or more for a table 'pair_half'"),
        (Positions(table="pair_half", rows=6, zero_row=6), 4, "zero_row: got 6, expected 0 to 5"),
    ):
        config = GPT2Embeddings(V, width, 2).config
        config = replace(config, steps=(config.tokens, positions))
        assert message in rejection(ValueError, FrontEndData(config, {}).check)
        assert message in rejection(ValueError, FrontEnd, config)


def test_value_against_rule_of_its_field_is_rejected() -> None:
    t5 = {"heads": 2, "buckets": 8, "max_distance": 9, "bidirectional": True}
    cases: list[tuple[type[Any], dict[str, Any], str]] = [
        (AlibiConfig, {"heads": 2, "divisor": "1"}, "divisor: got '1', expected a number above 0"),
        (T5Config, t5 | {"heads": True}, "heads: got True, expected"),
        (T5Config, t5 | {"bidirectional": 1}, "bidirectional: got 1, expected"),
        (RotaryConfig, {"dim": 4, "theta": "5"}, "rotary.theta: got '5', expected a number"),
        (RotaryConfig, {"dim": 4, "scaling": {}}, "rotary.scaling: got {}, expected a text"),
        (RelativeSinusoidConfig, {"width": 3, "clamp_len": None, "bidirectional": True}, "width: got 3, expected an e"),
        (Segments, {"input": 3}, "segments.input: got 3, expected a text"),
        (Segments, {"by": math.nan}, "segments.by: got nan, expected a finite number"),
        (Scale, {"by": 10**400}, f"scale.by: got {10**400}, expected a finite number"),
        (Positions, {"grid": [2, 3]}, "positions.grid: got [2, 3], expected two numbers of 1 or more"),
        (Positions, {"counts": "words"}, "positions.counts: got 'words', expected slots, ids, mask"),
    ]
    for kind, values, message in cases:
        assert message in rejection(ValueError, kind, **values)


def test_whole_number_in_field_of_float_becomes_float() -> None:
    assert type(Norm(eps=1).eps) is float  # ONNX refuses the attribute of another type


def test_fields_of_requests_are_no_names_of_indices() -> None:
    for name in {*OPTIONS, *ARRAY_FIELDS, *TEXT_PARAMETERS}:
        assert f"input: got '{name}', expected" in rejection(ValueError, HierarchicalEmbedding, V, D, {name: 2})


def test_sizes_beyond_their_limits_are_rejected() -> None:
    config = GPT2Embeddings(V, D, M).config
    with pytest.raises(ValueError, match=rf"^per_layer.rows: got {PER_LAYER.rows}, expected 1 to {V}$"):
        replace(config, per_layer=PER_LAYER)
    with pytest.raises(ValueError, match=rf"^max_len: got {MAX_WHOLE + 1}, expected at most {MAX_WHOLE}$"):
        check_size("max_len", MAX_WHOLE + 1)
