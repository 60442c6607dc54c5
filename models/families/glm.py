"""Rows of GLM: texts, and texts with images."""

from dataclasses import replace

from preblock.models.families.decoders import decoder, text_side
from preblock.models.families.family import UNTIED, Family
from preblock.models.families.rotary import Rotary, part_of_head

_GLM = Rotary(heads=32, head_dim=128, share=part_of_head(0.5), layout="interleaved")
_V = Rotary(heads=32, share=part_of_head(1.0), layout="interleaved", sections=(8, 12, 12))
_V_MOE = replace(_V, heads=96, share=part_of_head(0.5), layout="half")
_OCR = replace(_V, heads=16)
_TEXT, _MOE_TEXT = text_side(32768, UNTIED, _V), text_side(65536, UNTIED, _V_MOE)
_TYPES = ("glm4v_text", "glm4v_moe_text")
_GLM46V = replace(_TEXT, only={"model_type": _TYPES}, parts={_TYPES[1]: _MOE_TEXT})

GLM: dict[str, Family] = {
    "glm": decoder(131072, UNTIED, _GLM),
    "glm4": decoder(131072, UNTIED, _GLM),
    "glm4_moe": decoder(131072, UNTIED, Rotary(heads=96, share=part_of_head(0.5))),
    "glm4v_text": decoder(32768, None, _V),
    "glm4v_moe_text": decoder(65536, None, _V_MOE),
    "glm_ocr_text": decoder(131072, None, _OCR),
    "glm4v/text": _TEXT,
    "glm4v_moe/text": _MOE_TEXT,
    "glm46v/text": _GLM46V,
    "glmga/text": _GLM46V,
    "glm_ocr/text": text_side(131072, UNTIED, _OCR),
}
