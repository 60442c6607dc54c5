"""A front-end as data, beside its module: the same names, shapes and values."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from preblock.models.config import MAX_POSITIONS, check_size
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.models.modules.bias import AlibiConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.steps import Positions, Scale, Segments
from tests.models.front_ends import CONFIGS, NGRAMS, PER_LAYER
from tests.models.rejections import rejection
from tests.models.test_frontend_file import D, M, V

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


@pytest.mark.parametrize(
    ("positions", "width", "message"),
    [
        (Positions(table="exact"), 3, "d_model: got 3, expected an even width"),
        (Positions(table="hybrid", rows=2), 3, "d_model: got 3, expected an even width"),
        (Positions(table="exact", grid=(2, 3)), 6, "d_model: got 6, expected a multiple of 4"),
        (Positions(table="tensor2tensor", rows=6), 2, "d_model: got 2, expected 4 or more"),
        (Positions(table="pair_half"), 4, "rows: got 0, expected 1 or more for a table 'pair_half'"),
        (Positions(table="pair_half", rows=6, zero_row=6), 4, "zero_row: got 6, expected 0 to 5"),
    ],
)
def test_table_that_cannot_be_derived_is_rejected(positions: Positions, width: int, message: str) -> None:
    config = GPT2Embeddings(V, width, 2).config
    config = replace(config, steps=(config.tokens, positions))
    assert message in rejection(ValueError, FrontEndData(config, {}).check)
    assert message in rejection(ValueError, FrontEnd, config)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (AlibiConfig, {"heads": 2, "divisor": "1"}, "divisor: got '1', expected a number above 0"),
        (
            T5Config,
            {"heads": True, "buckets": 8, "max_distance": 9, "bidirectional": True},
            "heads: got True, expected",
        ),
        (T5Config, {"heads": 2, "buckets": 8, "max_distance": 9, "bidirectional": 1}, "bidirectional: got 1, expected"),
        (RotaryConfig, {"dim": 4, "theta": "5"}, "rotary.theta: got '5', expected a number"),
        (RotaryConfig, {"dim": 4, "scaling": {}}, "rotary.scaling: got {}, expected a text"),
        (RelativeSinusoidConfig, {"width": 3, "clamp_len": None, "bidirectional": True}, "width: got 3, expected an e"),
        (Segments, {"input": 3}, "segments.input: got 3, expected a text"),
        (Segments, {"by": math.nan}, "segments.by: got nan, expected a finite number"),
        (Scale, {"by": 10**400}, f"scale.by: got {10**400}, expected a finite number"),
        (Positions, {"grid": [2, 3]}, "positions.grid: got [2, 3], expected two numbers of 1 or more"),
        (Positions, {"counts": "words"}, "positions.counts: got 'words', expected slots, ids, mask"),
    ],
)
def test_value_against_rule_of_its_field_is_rejected(kind: type[Any], values: dict[str, Any], message: str) -> None:
    assert message in rejection(ValueError, kind, **values)


def test_sizes_beyond_their_limits_are_rejected() -> None:
    config = GPT2Embeddings(V, D, M).config
    with pytest.raises(ValueError, match=rf"^per_layer.rows: got {PER_LAYER.rows}, expected 1 to {V}$"):
        replace(config, per_layer=PER_LAYER)
    with pytest.raises(ValueError, match=rf"^max_len: got {MAX_POSITIONS + 1}, expected at most {MAX_POSITIONS}$"):
        check_size("max_len", MAX_POSITIONS + 1)
