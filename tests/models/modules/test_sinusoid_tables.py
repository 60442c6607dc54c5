"""Tables of sinusoids, bit for bit those of the libraries."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.distilbert import modeling_distilbert
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextSinusoidalPositionalEmbedding
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding
from transformers.models.xlm import modeling_xlm

from preblock.models.sinusoid_tables import RECIPES, library_table
from tests.models.modules.precise_sinusoids import bits
from tests.models.rejections import rejection


def interleaved_by(library: Any) -> Callable[[int, int], Tensor]:
    def create(rows: int, d_model: int) -> Tensor:
        table = torch.empty(rows, d_model)
        library.create_sinusoidal_embeddings(rows, d_model, table)
        return table

    return create


def half_by(library: Any) -> Callable[[int, int], Tensor]:
    return lambda rows, d_model: library(rows, d_model).create_weight()


def all_float32_by(library: Any) -> Callable[[int, int], Tensor]:
    return lambda rows, d_model: library(rows, d_model, torch.float32)


LIBRARY: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "marian": ("pair_half", half_by(MarianSinusoidalPositionalEmbedding)),
    "pegasus": ("pair_half", half_by(PegasusSinusoidalPositionalEmbedding)),
    "xlm": ("pair_interleaved", interleaved_by(modeling_xlm)),
    "distilbert": ("pair_interleaved", interleaved_by(modeling_distilbert)),
    "ctrl": ("pair_half_float32", all_float32_by(positional_encoding)),
    "m2m_100": ("tensor2tensor", M2M100SinusoidalPositionalEmbedding.get_embedding),
    "xglm": ("tensor2tensor", XGLMSinusoidalPositionalEmbedding.get_embedding),
    "speech_to_text": ("tensor2tensor", Speech2TextSinusoidalPositionalEmbedding.get_embedding),
    "whisper": ("tensor2tensor", sinusoids),
}
"""Of a family of transformers: the recipe of its table, and what builds it there."""

SHAPES = [(1, 4), (2, 6), (50, 256), (514, 768)]
ODD_SHAPES = [(3, 5), (300, 63)]


@pytest.mark.parametrize("family", LIBRARY)
def test_table_equals_library_bit_for_bit(family: str) -> None:
    recipe, library = LIBRARY[family]
    for rows, d_model in [*SHAPES, *([] if family == "whisper" else ODD_SHAPES)]:
        found = library_table(recipe, rows, d_model)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.int32), bits(library(rows, d_model))), (rows, d_model)


@pytest.mark.parametrize("family", ["m2m_100", "xglm", "speech_to_text"])
def test_padding_row_is_zero_as_in_library(family: str) -> None:
    recipe, library = LIBRARY[family]
    for zero_row in (0, 1, 39):
        found = library_table(recipe, 40, 24, zero_row)
        assert np.array_equal(found.view(np.int32), bits(library(40, 24, zero_row))), zero_row


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_padding_row_is_zeroed(recipe: str) -> None:
    expected = library_table(recipe, 9, 8)
    with torch.device("meta"):
        assert np.array_equal(library_table(recipe, 9, 8), expected)
    expected[5] = 0
    assert np.array_equal(library_table(recipe, 9, 8, 5), expected)
    for zero_row in (-1, 9):
        message = f"zero_row: got {zero_row}, expected 0 to 8"
        assert rejection(ValueError, library_table, recipe, 9, 8, zero_row) == message


def test_tensor2tensor_width_dividing_by_zero_is_rejected() -> None:
    for d_model in (2, 3):
        message = f"d_model: got {d_model}, expected 4 or more"
        assert rejection(ValueError, library_table, "tensor2tensor", 4, d_model) == message
