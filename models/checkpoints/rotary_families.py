"""The rotary table: how published models turn queries and keys. Rows are named as in `families.py`.

Read from transformers 5.24, and checked against it. Imports no torch.
Letters: R rotary width, M maximum length.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from preblock.models.checkpoints.family import Config
from preblock.models.checkpoints.layer_kinds import FULL, SLIDING, alternating_kinds, head_widths

Theta = tuple[str | None, float]
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, kw_only=True)
class RotaryFamily:
    """One row: the rotary attention of a family.

    Args:
        heads: default number of heads of attention.
        head_dim: default width of a head; None for the hidden size over the heads.
        widths: ending of the names of the outputs -> width of a head, given the config, in place of `head_dim`;
            default none.
        dim: key of R and its default; None for R as a share of a head.
        repeated: key that must repeat R where a file has it; default none.
        share: key of this share, or None if the library reads none beside `rope_parameters`, and its default, perhaps
            given the config; None for all of a head, except for the type "proportional". Null in a file means all of
            a head too.
        thetas: ending of the names of the outputs -> the key of theta beside `rope_parameters`, or None, and its
            default. Several if layers differ: `rope_parameters` then has an object for each.
        scaled: endings, of several, for an old `rope_scaling`; none if the library reads it in place of
            `rope_parameters`.
        strict: True if the library fails for `rope_parameters` that mix objects for kinds of layers with numbers for
            all layers; False if it ignores the other form. Not read for rows without `types`, and for rows with several
            `thetas` and nothing `scaled`.
        layers: endings in use by the layers, given the config; default all.
        types: rope types known to the library; none if it reads no `rope_parameters`.
        aliases: other names of rope types.
        default: `rope_parameters` of a file without any, with an object for each ending if layers differ; default none.
        original_len: default length of pretraining; None for the longest input.
        layout: layout of the pairs of columns, as in `rotate`.
        interleaved: key that is false for the layout "half" in place of `layout`; default none.
        sections: default of `mrope_section`, pairs for each of the three axes of positions; default none, one axis.
        order: order of the axes among the pairs: "sections", each contiguous; "mixed", in turn; or "time_last", height
            and width in turn, and then time, with sections for height, width and time. Default "sections".
        mscales: the type "longrope" has factors on cos and sin of its own, and no long factors for frequencies.
        ntk_alpha: the type "dynamic" with `alpha` stretches theta by a fixed factor; default False.
        angles: type of angles in the library, as in `RotaryConfig`.
        tensors: keys of a tensor with the R/2 frequencies, or of a table (M, R) of sines and then cosines. If the
            file has it, it wins over the config.
        other_types: further types of the text part of a model; each has a row of its own. Default none.
        when: whether a model is rotary, given its config; default always.

    """

    heads: int = 0
    head_dim: int | None = None
    widths: Callable[[Config], Mapping[str, Any]] | None = None
    dim: tuple[str, int] | None = None
    repeated: str | None = None
    share: tuple[str | None, float | Callable[[Config], float]] | None = None
    thetas: Mapping[str, Theta] = field(default_factory=lambda: {"": ("rope_theta", 10000.0)})
    scaled: tuple[str, ...] = ()
    strict: bool
    layers: Callable[[Config], Container[str]] | None = None
    types: tuple[str, ...] = TYPES
    aliases: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    original_len: int | None = None
    layout: Literal["half", "interleaved"] = "half"
    interleaved: str | None = None
    sections: tuple[int, ...] = ()
    order: Literal["sections", "mixed", "time_last"] = "sections"
    mscales: bool = False
    ntk_alpha: bool = False
    angles: Literal["float32", "float64"] = "float32"
    tensors: tuple[str, ...] = ()
    other_types: tuple[str, ...] = ()
    when: Callable[[Config], bool] = lambda _: True


def _per_layer(full: Theta, sliding: Theta) -> dict[str, Theta]:
    return {FULL: full, SLIDING: sliding}


def _rotary_dim(c: Config) -> float:
    """Return the rotary share of MiniMax-M2, whose published files state the rotary width."""
    width = c("rotary_dim")
    if width is None:
        return 1.0
    head = c("head_dim", 128)
    if type(width) is not int or type(head) is not int or not 1 <= width <= head:
        raise ValueError(f"rotary_dim: got {width!r}, expected 1 to head_dim, {head!r}")
    return width / head


_HALF = ("partial_rotary_factor", 0.5)
_DEEPSEEK = RotaryFamily(dim=("qk_rope_head_dim", 64), layout="interleaved", strict=False)
_HUNYUAN = RotaryFamily(heads=32, ntk_alpha=True, strict=False)
_GPTJ = RotaryFamily(dim=("rotary_dim", 64), thetas={"": (None, 10000.0)}, types=(), layout="interleaved", strict=False)
_GEMMA3N = RotaryFamily(
    heads=8,
    head_dim=256,
    thetas=_per_layer(full=("rope_theta", 1_000_000.0), sliding=("rope_local_base_freq", 10000.0)),
    scaled=(FULL,),
    layers=alternating_kinds(35, None, 5, lambda distance: distance - 1),
    strict=False,
)
_GEMMA4_KINDS = alternating_kinds(30, None, 6, lambda distance: distance - 1, last_full=True)
_GEMMA4 = RotaryFamily(
    widths=head_widths(_GEMMA4_KINDS, width=256, full_width=512),
    thetas=_per_layer(full=("rope_theta", 1_000_000.0), sliding=("rope_theta", 10000.0)),
    layers=_GEMMA4_KINDS,
    types=(*TYPES, "proportional"),
    default={
        FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
    strict=False,
)
_QWEN2_VL = RotaryFamily(
    heads=64, thetas={"": ("rope_theta", 1_000_000.0)}, sections=(16, 24, 24), aliases={"mrope": "default"}, strict=True
)
_QWEN3_5 = RotaryFamily(
    heads=16, head_dim=256, share=("partial_rotary_factor", 0.25), sections=(11, 11, 10), order="mixed", strict=True
)
_QWEN4 = replace(_QWEN3_5, share=("partial_rotary_factor", 1.0), strict=False)
_GLM4V = RotaryFamily(
    heads=32, share=("partial_rotary_factor", 1.0), layout="interleaved", sections=(8, 12, 12), strict=False
)
_GLM4V_MOE = replace(_GLM4V, heads=96, share=_HALF, layout="half")
_GLM46V = replace(_GLM4V, other_types=("glm4v_moe_text",))
_GLM_OCR = replace(_GLM4V, heads=16)

ROTARY: dict[str, RotaryFamily] = {
    "llama": RotaryFamily(heads=32, strict=False),
    "mistral": RotaryFamily(heads=32, strict=False),
    "qwen2": RotaryFamily(heads=32, strict=True),
    "qwen3": RotaryFamily(heads=32, head_dim=128, strict=True),
    "phi": RotaryFamily(heads=32, share=("partial_rotary_factor", 0.5), strict=False),
    "phi3": RotaryFamily(
        heads=32,
        share=("partial_rotary_factor", 1.0),
        types=("default", "longrope"),
        aliases={"su": "longrope", "yarn": "longrope"},
        original_len=4096,
        strict=False,
    ),
    "gpt_neox": RotaryFamily(
        heads=64, share=("rotary_pct", 0.25), thetas={"": ("rotary_emb_base", 10000.0)}, strict=False
    ),
    "granite": RotaryFamily(heads=32, strict=False),
    "granitemoe": RotaryFamily(heads=32, strict=False),
    "granitemoeshared": RotaryFamily(heads=32, strict=False),
    "mixtral": RotaryFamily(heads=32, thetas={"": ("rope_theta", 1_000_000.0)}, strict=False),
    "qwen2_moe": RotaryFamily(heads=16, strict=True),
    "qwen3_moe": RotaryFamily(heads=32, strict=False),
    "olmo": RotaryFamily(heads=32, strict=False),
    "olmo2": RotaryFamily(heads=32, strict=False),
    "olmoe": RotaryFamily(heads=16, strict=False),
    "starcoder2": RotaryFamily(heads=24, strict=False),
    "stablelm": RotaryFamily(heads=32, share=("partial_rotary_factor", 0.25), strict=False),
    "smollm3": RotaryFamily(heads=16, thetas={"": ("rope_theta", 2_000_000.0)}, strict=True),
    "exaone": RotaryFamily(heads=32, thetas={"": ("rope_theta", 500_000.0)}, strict=False),
    "exaone4": RotaryFamily(heads=32, strict=True),
    "sarvam_mla": replace(_DEEPSEEK, interleaved="rope_interleave", aliases={"deepseek_yarn": "yarn"}),
    "sarvam_moe": RotaryFamily(
        heads=64,
        head_dim=64,
        share=("partial_rotary_factor", 1.0),
        thetas={"": ("rope_theta", 8_000_000.0)},
        strict=False,
    ),
    "seed_oss": RotaryFamily(heads=80, head_dim=128, strict=False),
    "falcon_h1": RotaryFamily(heads=32, strict=False),
    "cohere": RotaryFamily(heads=64, thetas={"": ("rope_theta", 500_000.0)}, layout="interleaved", strict=False),
    "cohere2": RotaryFamily(heads=64, layout="interleaved", strict=True),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, interleaved="rope_interleave", repeated="head_dim"),
    "deepseek_v32": _DEEPSEEK,
    "ernie4_5": RotaryFamily(
        heads=16, head_dim=128, thetas={"": ("rope_theta", 500_000.0)}, layout="interleaved", strict=False
    ),
    "ernie4_5_moe": RotaryFamily(heads=20, thetas={"": ("rope_theta", 500_000.0)}, layout="interleaved", strict=False),
    "glm": RotaryFamily(heads=32, head_dim=128, share=_HALF, layout="interleaved", strict=False),
    "glm4": RotaryFamily(heads=32, head_dim=128, share=_HALF, layout="interleaved", strict=False),
    "glm4_moe": RotaryFamily(heads=96, share=_HALF, strict=False),
    "gpt_oss": RotaryFamily(
        strict=True,
        heads=64,
        head_dim=64,
        thetas={"": ("rope_theta", 150_000.0)},
        default={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "llama4_text": RotaryFamily(
        heads=40, head_dim=128, thetas={"": ("rope_theta", 500_000.0)}, layout="interleaved", strict=True
    ),
    "minimax": RotaryFamily(heads=32, thetas={"": ("rope_theta", 1_000_000.0)}, strict=True),
    "minimax_m2": RotaryFamily(
        heads=48,
        head_dim=128,
        share=("partial_rotary_factor", _rotary_dim),
        thetas={"": ("rope_theta", 5_000_000.0)},
        strict=False,
    ),
    "nemotron": RotaryFamily(heads=48, share=_HALF, strict=False),
    "olmo3": RotaryFamily(
        heads=32,
        thetas=_per_layer(full=("rope_theta", 500_000.0), sliding=(None, 500_000.0)),
        scaled=(FULL,),
        layers=alternating_kinds(32, None, 4, lambda distance: distance - 1),
        strict=False,
    ),
    "qwen3_next": RotaryFamily(heads=16, head_dim=256, share=("partial_rotary_factor", 0.25), strict=True),
    "qwen2_vl/text": _QWEN2_VL,
    "qwen2_5_vl/text": _QWEN2_VL,
    "qwen3_vl/text": RotaryFamily(
        heads=32,
        head_dim=128,
        thetas={"": ("rope_theta", 500_000.0)},
        sections=(24, 20, 20),
        order="mixed",
        strict=False,
    ),
    "qwen3_vl_moe/text": RotaryFamily(
        heads=16, thetas={"": ("rope_theta", 500_000.0)}, sections=(24, 20, 20), order="mixed", strict=False
    ),
    "qwen3_5/text": _QWEN3_5,
    "qwen3_5_moe/text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp/text": _QWEN4,
    "glm4v/text": _GLM4V,
    "glm4v_text": _GLM4V,
    "glm4v_moe/text": _GLM4V_MOE,
    "glm4v_moe_text": _GLM4V_MOE,
    "glm46v/text": _GLM46V,
    "glmga/text": _GLM46V,
    "glm_ocr/text": _GLM_OCR,
    "glm_ocr_text": _GLM_OCR,
    "ernie4_5_vl_moe/text": RotaryFamily(
        heads=20,
        thetas={"": ("rope_theta", 500_000.0)},
        types=("default",),
        layout="interleaved",
        sections=(22, 22, 20),
        order="time_last",
        strict=False,
    ),
    "phimoe": RotaryFamily(
        heads=32, thetas={"": ("rope_theta", 1_000_000.0)}, types=("default", "longrope"), mscales=True, strict=False
    ),
    "bamba": RotaryFamily(heads=32, share=(None, 0.5), strict=False),
    "granitemoehybrid": RotaryFamily(
        heads=32, when=lambda c: c.nullable("position_embedding_type", None) == "rope", strict=False
    ),
    "gemma": RotaryFamily(heads=16, head_dim=256, strict=False),
    "gemma2": RotaryFamily(heads=8, head_dim=256, strict=True),
    "gemma3_text": RotaryFamily(
        heads=8,
        head_dim=256,
        thetas=_per_layer(full=("rope_theta", 1_000_000.0), sliding=("rope_local_base_freq", 10000.0)),
        scaled=(FULL,),
        layers=alternating_kinds(26, "sliding_window_pattern", 6, lambda distance: distance - 1),
        strict=False,
    ),
    "gemma3n_text": _GEMMA3N,
    "gemma3n/text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4/text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4_unified/text": _GEMMA4,
    "falcon": RotaryFamily(heads=71, when=lambda c: not c("alibi", False), strict=False),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "nomic_bert": RotaryFamily(heads=12, thetas={"": ("rope_theta", 1000.0)}, strict=False),
    "modernbert": RotaryFamily(
        strict=True,
        heads=12,
        thetas=_per_layer(full=("global_rope_theta", 160_000.0), sliding=("local_rope_theta", 10000.0)),
        scaled=(FULL, SLIDING),
        layers=alternating_kinds(22, "global_attn_every_n_layers", 3, lambda _: 0),
    ),
    "roformer": RotaryFamily(
        heads=12,
        thetas={"": (None, 10000.0)},
        types=(),
        layout="interleaved",
        angles="float64",
        tensors=("encoder.embed_positions.weight",),
        strict=False,
    ),
    # Published files hold frequencies rounded to float16 in training.
    "esm": RotaryFamily(
        heads=12,
        types=(),
        tensors=("rotary_embeddings.inv_freq", "encoder.layer.0.attention.self.rotary_embeddings.inv_freq"),
        when=lambda c: c.nullable("position_embedding_type", "absolute") == "rotary",
        strict=False,
    ),
}


def find_rotary(family: str, values: Mapping[str, Any]) -> RotaryFamily | None:
    """Return the row of a model of `family` with the config `values`; None if it is not rotary."""
    row = ROTARY.get(family)
    if row and (part := values.get("model_type")) in row.other_types:
        row = ROTARY[str(part)]
    return row if row and row.when(Config(values)) else None
