"""The family table: how published models name and compose their front-end. Every Hugging Face name is here.

A family is a row, named by `model_type` in its `config.json`, and by its side where it has two. Its steps name the
tensors of a checkpoint as a base model's file has them. Read from transformers 5.23, and checked against it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from preblock.models.frontend import FrontEndConfig
from preblock.models.modules.stems import AudioConfig, PatchConfig, StemConfig
from preblock.models.steps import Mask, Norm, Positions, Project, Scale, Segments, Step, Tokens

ALL = -1
"""Of a lookup: every step."""


class Config:
    """`config.json`, with the defaults that the library fills in where an older file leaves a key out.

    `segments`: whether the caller chose segments where a family adds them only by choice.
    """

    def __init__(self, values: Mapping[str, Any], segments: bool = False) -> None:
        self._values, self.segments = values, segments

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where the key is absent or null."""
        value = self._values.get(key)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row.

    Args:
        steps: the steps, given the config; sizes come from the tensors, those of derived tables from the config.
        prefix: what a head model's file puts before the keys; default nothing.
        limit: key of the config that holds max_len where no table of positions does, and its default in the library;
            None for no limit.
        padding: the padding id where the config leaves it out; None for none.
        only: keys that change the front-end -> the values that this row understands.
        refused: ids whose vectors depend on other tokens, given the config.
        lookup: how many steps are the model's own lookup, given the config; ALL of them, or, by default, the first.
        consumer_scales: whether the model itself scales `inputs_embeds` that it is handed; default False.
        segments: its segments are rows of the token table, which the library adds only when it is given segments; they
            are steps by the caller's choice. Default False: it has a table of segments, or none.
        sections: where a config describes more models than this one, keys of the part about it: the first that is
            there counts; default none, for the whole.

    """

    steps: Callable[[Config], list[Step]]
    prefix: str = ""
    limit: tuple[str, int] | None = None
    padding: int | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refused: Callable[[Config], list[int]] = lambda _: []
    lookup: Callable[[Config], int] = lambda _: 1
    consumer_scales: bool = False
    segments: bool = False
    sections: tuple[str, ...] = ()


def _keys(*names: str, suffix: str = ".weight") -> tuple[str, ...]:
    return tuple(name + suffix for name in names)


def _norm(name: str, eps: float, *, bias: bool = True, spellings: tuple[str, ...] = ()) -> Norm:
    """A LayerNorm; old files call its weight gamma and its bias beta."""
    names = (name, *spellings)
    weight = (*_keys(*names), *_keys(*names, suffix=".gamma"))
    return Norm(
        eps=eps, weight=weight, bias=(*_keys(*names, suffix=".bias"), *_keys(*names, suffix=".beta")) if bias else None
    )


def _project(name: str, *, bias: bool = True) -> Project:
    return Project(weight=_keys(name), bias=_keys(name, suffix=".bias") if bias else None)


def _tokens(*names: str) -> Tokens:
    return Tokens(weight=_keys(*names))


def _segments(name: str) -> Segments:
    return Segments(weight=_keys(name))


def _chosen_segments(c: Config, by: float = 1.0) -> list[Step]:
    """Segments that are rows of the token table, where the caller chose them."""
    return [Segments(table="tokens", by=by, needed=True)] if c.segments else []


def _learned(*names: str, first: int = 0) -> Positions:
    return Positions(weight=_keys(*names), first=first)


def _skipping(name: str, padding: int) -> Positions:
    """Learned positions that count the ids that are no padding; the first real token takes row padding + 1."""
    return Positions(weight=_keys(name), counts="ids", first=padding + 1)


def _scale(condition: Any, by: float) -> list[Step]:
    return [Scale(by=by)] if condition else []


WORDS, TYPES, PLACES, LAYER_NORM = (
    f"embeddings.{name}" for name in ("word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm")
)
ABSOLUTE = {"position_embedding_type": ("absolute",)}


def _bert(c: Config, eps: float = 1e-12) -> list[Step]:
    return [_tokens(WORDS), _segments(TYPES), _learned(PLACES), _norm(LAYER_NORM, c("layer_norm_eps", eps))]


def _roberta(c: Config) -> list[Step]:
    positions = _skipping(PLACES, c("pad_token_id", 1))
    return [_tokens(WORDS), _segments(TYPES), positions, _norm(LAYER_NORM, c("layer_norm_eps", 1e-12))]


def _electra(c: Config) -> list[Step]:
    projected = c("embedding_size", 128) != c("hidden_size", 256)
    return [*_bert(c), *([_project("embeddings_project")] if projected else [])]


def _big_bird(c: Config) -> list[Step]:
    tokens, *others = _bert(c)
    return [tokens, *_scale(c("rescale_embeddings", False), math.sqrt(c("hidden_size"))), *others]


def _deberta(c: Config) -> list[Step]:
    steps: list[Step] = [_tokens(WORDS)]
    if c("position_biased_input", True):
        steps.append(_learned(PLACES))
    if c("type_vocab_size", 0):
        steps.append(_segments(TYPES))
    if c("embedding_size", c("hidden_size")) != c("hidden_size"):
        steps.append(_project("embeddings.embed_proj", bias=False))
    return [*steps, _norm(LAYER_NORM, c("layer_norm_eps", 1e-7)), Mask()]


def _esm(c: Config) -> list[Step]:
    steps: list[Step] = [_tokens(WORDS)]
    if c("token_dropout", False):
        # 1 - 0.15 * 0.8: the share of tokens that training left in place; in float64, as the library multiplies.
        steps.append(Scale(by=1 - 0.15 * 0.8))
    if c("position_embedding_type", "absolute") == "absolute":
        steps.append(_skipping(PLACES, c("pad_token_id")))
    if c("emb_layer_norm_before", False):
        steps.append(_norm("embeddings.layer_norm", c("layer_norm_eps", 1e-12)))
    return [*steps, Mask()]


def _roformer(c: Config) -> list[Step]:
    projected = c("embedding_size", c("hidden_size")) != c("hidden_size")
    norm = _norm(LAYER_NORM, c("layer_norm_eps", 1e-12))
    return [_tokens(WORDS), _segments(TYPES), norm, *([_project("embeddings_project")] if projected else [])]


def _opt(c: Config) -> list[Step]:
    projected = c("word_embed_proj_dim", c("hidden_size")) != c("hidden_size")
    positions = Positions(weight=_keys("decoder.embed_positions"), counts="mask", first=2)
    return [
        _tokens("decoder.embed_tokens"),
        *([_project("decoder.project_in", bias=False)] if projected else []),
        positions,
    ]


def _sinusoids(c: Config, table: str, limit: str, default: int, **values: Any) -> Positions:
    """Positions whose table is derived; its first row is that of position 0 unless `values` say otherwise."""
    return Positions(rows=c(limit, default) + values.get("first", 0), table=table, **values)


def _scaled(c: Config, default: bool = False) -> list[Step]:
    """The scale that most encoder-decoders have."""
    return _scale(c("scale_embedding", default), math.sqrt(c("d_model")))


def _shared(side: str) -> Tokens:
    """One table for both sides, or one for each where a checkpoint does not share it."""
    return _tokens(f"{side}.embed_tokens", "shared")


def _bart(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _shared(side),
        *_scaled(c),
        _learned(f"{side}.embed_positions", first=2),
        _norm(f"{side}.layernorm_embedding", 1e-5),
    ]


def _blenderbot(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_shared(side), *_scaled(c), _learned(f"{side}.embed_positions")]


def _marian(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _shared(side),
        *_scaled(c),
        _sinusoids(c, "pair_half", "max_position_embeddings", 1024, weight=_keys(f"{side}.embed_positions")),
    ]


def _counted_sinusoids(c: Config, limit: str) -> Positions:
    padding = c("pad_token_id", 1)
    return _sinusoids(c, "tensor2tensor", limit, 1024, counts="ids", first=padding + 1, zero_row=padding)


def _m2m_100(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_shared(side), *_scaled(c, True), _counted_sinusoids(c, "max_position_embeddings")]


def _lookup_with_scale(default: bool) -> Callable[[Config], int]:
    """The model's table scales its vectors itself, so that whoever hands vectors over must have scaled them."""
    return lambda c: 2 if c("scale_embedding", default) else 1


def _rotary(
    tokens: str, prefix: str, limit: int, key: str = "max_position_embeddings", segments: bool = False
) -> Family:
    """A decoder whose positions live in attention: its front-end is the token table."""
    return Family(
        steps=lambda c: [_tokens(tokens), *_chosen_segments(c)], prefix=prefix, limit=(key, limit), segments=segments
    )


def _gpt(tokens: str, positions: str) -> Family:
    """A decoder with learned positions, whose segments are tokens."""
    return Family(
        steps=lambda c: [_tokens(tokens), _learned(positions), *_chosen_segments(c)],
        prefix="transformer.",
        segments=True,
    )


def _gemma(c: Config) -> list[Step]:
    return [_tokens("embed_tokens"), Scale(by=math.sqrt(c("hidden_size")), cast=True)]


def _gemma_family(limit: int) -> Family:
    return Family(steps=_gemma, prefix="model.", limit=("max_position_embeddings", limit), lookup=lambda _: 2)


XLM_ROBERTA = Family(steps=_roberta, prefix="roberta.", padding=1, only=ABSOLUTE)
CLIP_TEXT = Family(
    steps=lambda _: [_tokens("embeddings.token_embedding"), _learned("embeddings.position_embedding")],
    prefix="text_model.",
)

FAMILIES: dict[str, Family] = {
    # Encoders.
    "bert": Family(steps=_bert, prefix="bert.", padding=0, only=ABSOLUTE),
    "roberta": XLM_ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": XLM_ROBERTA,
    "xlm-roberta-xl": Family(
        steps=lambda c: [_tokens(WORDS), _segments(TYPES), _skipping(PLACES, c("pad_token_id", 1))],
        prefix="roberta.",
        padding=1,
        only=ABSOLUTE,
    ),
    # Its padding id is 1, whatever the config says.
    "mpnet": Family(
        steps=lambda c: [
            _tokens(WORDS),
            _skipping(PLACES, 1),
            _norm(LAYER_NORM, c("layer_norm_eps", 1e-12)),
        ],
        prefix="mpnet.",
        padding=1,
        only={"pad_token_id": (1,)},
    ),
    "distilbert": Family(
        steps=lambda _: [_tokens(WORDS), _learned(PLACES), _norm(LAYER_NORM, 1e-12)], prefix="distilbert."
    ),
    "electra": Family(steps=_electra, prefix="electra.", only=ABSOLUTE),
    "albert": Family(
        steps=lambda c: [*_bert(c), _project("encoder.embedding_hidden_mapping_in")], prefix="albert.", only=ABSOLUTE
    ),
    "rembert": Family(steps=lambda c: [*_bert(c), _project("encoder.embedding_hidden_mapping_in")], prefix="rembert."),
    "big_bird": Family(steps=_big_bird, prefix="bert.", consumer_scales=True),
    "megatron-bert": Family(steps=lambda c: _bert(c)[:-1], prefix="bert.", only=ABSOLUTE),
    "fnet": Family(steps=lambda c: [*_bert(c), _project("embeddings.projection")], prefix="fnet."),
    "deberta-v2": Family(steps=_deberta, prefix="deberta.", limit=("max_position_embeddings", 512)),
    "esm": Family(
        steps=_esm,
        prefix="esm.",
        limit=("max_position_embeddings", 1026),
        only={"position_embedding_type": ("absolute", "rotary")},
        refused=lambda c: [c("mask_token_id")] if c("token_dropout", False) else [],
        # The library hands `inputs_embeds` to the first block as they are.
        lookup=lambda _: ALL,
    ),
    "roformer": Family(steps=_roformer, prefix="roformer.", limit=("max_position_embeddings", 1536)),
    "nomic_bert": Family(
        steps=lambda c: [
            _tokens(WORDS),
            _segments(TYPES),
            _norm("emb_ln", c("layer_norm_eps", 1e-12), spellings=(LAYER_NORM,)),
        ],
        limit=("max_position_embeddings", 2048),
    ),
    "modernbert": Family(
        steps=lambda c: [
            _tokens("embeddings.tok_embeddings"),
            _norm("embeddings.norm", c("norm_eps", 1e-5), bias=c("norm_bias", False)),
        ],
        prefix="model.",
        limit=("max_position_embeddings", 8192),
    ),
    "funnel": Family(
        steps=lambda c: [_tokens(WORDS), _norm("embeddings.layer_norm", c("layer_norm_eps", 1e-9))],
        prefix="funnel.",
    ),
    # Where it has a table of languages, they are an input always. Left out, all are language 0; the library adds none.
    "xlm": Family(
        steps=lambda c: [
            _tokens("embeddings"),
            _learned("position_embeddings"),
            *(
                [Segments(input="langs", needed=True, weight=_keys("lang_embeddings"))]
                if c("n_langs", 1) > 1 and c("use_lang_emb", True)
                else []
            ),
            *_chosen_segments(c),
            _norm("layer_norm_emb", c("layer_norm_eps", 1e-12)),
            Mask(),
        ],
        prefix="transformer.",
        segments=True,
    ),
    "xlnet": Family(steps=lambda _: [_tokens("word_embedding")], prefix="transformer."),
    "clip_text_model": CLIP_TEXT,
    # In old files the second part wins where it is there.
    "clip/text": replace(CLIP_TEXT, sections=("text_config_dict", "text_config")),
    # Decoders.
    "gpt2": _gpt("wte", "wpe"),
    "gpt_neo": _gpt("wte", "wpe"),
    "openai-gpt": _gpt("tokens_embed", "positions_embed"),
    "gptj": _rotary("wte", "transformer.", 2048, "n_positions", segments=True),
    "codegen": _rotary("wte", "transformer.", 2048, "n_positions", segments=True),
    "ctrl": Family(
        steps=lambda c: [
            _tokens("w"),
            Scale(by=math.sqrt(c("n_embd", 1280))),
            _sinusoids(c, "pair_half_float32", "n_positions", 256),
            *_chosen_segments(c, by=math.sqrt(c("n_embd", 1280))),
        ],
        prefix="transformer.",
        consumer_scales=True,
        segments=True,
    ),
    "opt": Family(steps=_opt, prefix="model."),
    "biogpt": Family(
        steps=lambda c: [
            _tokens("embed_tokens"),
            *_scale(c("scale_embedding", True), math.sqrt(c("hidden_size"))),
            _learned("embed_positions", first=2),
        ],
        prefix="biogpt.",
        lookup=_lookup_with_scale(True),
    ),
    "xglm": Family(
        steps=lambda c: [
            _tokens("embed_tokens"),
            *_scale(c("scale_embedding", True), math.sqrt(c("d_model", 1024))),
            _sinusoids(c, "tensor2tensor", "max_position_embeddings", 2048, first=2, zero_row=c("pad_token_id", 1)),
        ],
        prefix="model.",
        lookup=_lookup_with_scale(True),
    ),
    "bloom": Family(
        steps=lambda c: [
            _tokens("word_embeddings"),
            _norm("word_embeddings_layernorm", c("layer_norm_epsilon", 1e-5)),
        ],
        prefix="transformer.",
    ),
    "mpt": _rotary("wte", "transformer.", 2048, "max_seq_len"),
    "falcon": _rotary("word_embeddings", "transformer.", 2048),
    "llama": _rotary("embed_tokens", "model.", 2048),
    "mistral": _rotary("embed_tokens", "model.", 131072),
    "qwen2": _rotary("embed_tokens", "model.", 32768),
    "qwen3": _rotary("embed_tokens", "model.", 32768),
    "phi": _rotary("embed_tokens", "model.", 2048),
    "phi3": _rotary("embed_tokens", "model.", 4096),
    "gpt_neox": _rotary("embed_in", "gpt_neox.", 2048),
    "granite": Family(
        steps=lambda c: [_tokens("embed_tokens"), Scale(by=c("embedding_multiplier", 1.0))],
        prefix="model.",
        limit=("max_position_embeddings", 2048),
        consumer_scales=True,
    ),
    "gemma": _gemma_family(8192),
    "gemma2": _gemma_family(8192),
    "gemma3_text": _gemma_family(131072),
    # Encoder-decoders.
    **{
        f"{name}/{side}": Family(steps=_bart(side), prefix="model.", lookup=_lookup_with_scale(False))
        for name in ("bart", "mbart")
        for side in ("encoder", "decoder")
    },
    **{
        f"blenderbot/{side}": Family(steps=_blenderbot(side), prefix="model.", lookup=_lookup_with_scale(False))
        for side in ("encoder", "decoder")
    },
    "blenderbot-small/encoder": Family(
        steps=lambda c: [
            _shared("encoder"),
            *_scaled(c),
            _learned("encoder.embed_positions"),
            _norm("encoder.layernorm_embedding", 1e-5),
        ],
        prefix="model.",
        lookup=_lookup_with_scale(False),
    ),
    # It normalises the tokens, does not scale them, whatever the config says, and adds positions last.
    "blenderbot-small/decoder": Family(
        steps=lambda _: [
            _shared("decoder"),
            _norm("decoder.layernorm_embedding", 1e-5),
            _learned("decoder.embed_positions"),
        ],
        prefix="model.",
    ),
    **{
        f"{name}/{side}": Family(
            steps=_marian(side),
            prefix="model.",
            lookup=_lookup_with_scale(False) if side == "encoder" else lambda _: 1,
            consumer_scales=side == "decoder",
        )
        for name in ("marian", "pegasus")
        for side in ("encoder", "decoder")
    },
    **{
        f"m2m_100/{side}": Family(steps=_m2m_100(side), prefix="model.", padding=1, lookup=_lookup_with_scale(True))
        for side in ("encoder", "decoder")
    },
    "speech_to_text/decoder": Family(
        steps=lambda c: [
            _tokens("decoder.embed_tokens"),
            *_scale(c("scale_embedding", True), math.sqrt(c("d_model", 256))),
            _counted_sinusoids(c, "max_target_positions"),
        ],
        prefix="model.",
        padding=1,
    ),
    # `scale_embedding` is read by the library, and never used.
    "whisper/decoder": Family(
        steps=lambda _: [_tokens("decoder.embed_tokens"), _learned("decoder.embed_positions")], prefix="model."
    ),
    **{f"t5/{side}": Family(steps=lambda _: [_tokens("shared")]) for side in ("encoder", "decoder")},
}


SIZES: tuple[tuple[tuple[str, ...], Callable[[FrontEndConfig], set[int]]], ...] = (
    (("vocab_size", "n_words"), lambda frontend: {frontend.tokens.rows}),
    (("embedding_size", "input_embedding_size", "word_embed_proj_dim"), lambda frontend: {frontend.tokens.width}),
    (("hidden_size", "n_embd", "d_model", "dim", "emb_dim"), lambda frontend: {frontend.widths[-1]}),
    (("type_vocab_size",), lambda frontend: _indices(frontend, "token_type_ids")),
    (("n_langs",), lambda frontend: _indices(frontend, "langs")),
    (("max_position_embeddings", "n_positions", "max_target_positions"), lambda frontend: _rows(frontend)),
)
"""Keys that state a size -> the values that agree with the tensors; none where the tensors do not tell."""


def _indices(frontend: FrontEndConfig, name: str) -> set[int]:
    return {frontend.indices[name]} if name in frontend.indices else set()


def _rows(frontend: FrontEndConfig) -> set[int]:
    """Some families count the rows before the first position in, some do not."""
    positions = frontend.positions
    return {positions.rows, positions.rows - positions.first} if positions and positions.table == "learned" else set()


def sides_of(model_type: str) -> list[str]:
    """Return the sides of a model that are known, such as encoder and decoder, or nothing for a model without."""
    return [name.partition("/")[2] for name in (*STEMS, *FAMILIES) if name.startswith(f"{model_type}/")]


def known() -> list[str]:
    """Return every model type that is known."""
    return sorted({name.partition("/")[0] for name in (*FAMILIES, *STEMS)})


@dataclass(frozen=True, kw_only=True)
class StemFamily:
    """One row: an encoder whose input is an image or a spectrogram.

    Args:
        config: what the stem is made of, given its name and the config.
        keys: name in `state_dict()` of the stem -> key in a base model's file.
        prefixes: what other models' files put before the keys.
        sections: where a config describes more models than this one, keys of the part about it: the first that is
            there counts; default none, for the whole.

    """

    config: Callable[[str, Config], StemConfig]
    keys: Mapping[str, str]
    prefixes: tuple[str, ...]
    sections: tuple[str, ...] = ()


def _square(key: str, value: Any) -> Any:
    """Return the side of a square that is given by one number, or by height and width."""
    if not isinstance(value, list):
        return value
    if len(value) != 2 or value[0] != value[1]:
        raise ValueError(f"{key}: got {value}, allowed one number, or height and width that are equal")
    return value[0]


def _patches(patch_size: int, **values: Any) -> Callable[[str, Config], StemConfig]:
    """A stem of images, given the library's default; `values` may depend on the config."""
    return lambda name, c: PatchConfig(
        family=name,
        width=c("hidden_size", 768),
        channels=c("num_channels", 3),
        image_size=_square("image_size", c("image_size", 224)),
        patch_size=_square("patch_size", c("patch_size", patch_size)),
        **{key: value(c) if callable(value) else value for key, value in values.items()},
    )


def _clip_vision(*sections: str) -> StemFamily:
    return StemFamily(
        config=_patches(32, bias=False, norm_eps=lambda c: c("layer_norm_eps", 1e-5)),
        keys={
            "class_token": "embeddings.class_embedding",
            "patches.weight": "embeddings.patch_embedding.weight",
            "positions": "embeddings.position_embedding.weight",
            # The library's spelling.
            "norm.weight": "pre_layrnorm.weight",
            "norm.bias": "pre_layrnorm.bias",
        },
        prefixes=("vision_model.",),
        sections=sections,
    )


STEMS: dict[str, StemFamily] = {
    "vit": StemFamily(
        config=_patches(16),
        keys={
            "class_token": "embeddings.cls_token",
            "patches.weight": "embeddings.patch_embeddings.projection.weight",
            "patches.bias": "embeddings.patch_embeddings.projection.bias",
            "positions": "embeddings.position_embeddings",
        },
        prefixes=("vit.",),
    ),
    "clip_vision_model": _clip_vision(),
    # In old files the second part wins where it is there.
    "clip/vision": _clip_vision("vision_config_dict", "vision_config"),
    "whisper/encoder": StemFamily(
        config=lambda name, c: AudioConfig(
            family=name,
            width=c("d_model", 384),
            channels=c("num_mel_bins", 80),
            positions=c("max_source_positions", 1500),
        ),
        keys={
            "conv1.weight": "conv1.weight",
            "conv1.bias": "conv1.bias",
            "conv2.weight": "conv2.weight",
            "conv2.bias": "conv2.bias",
            "positions": "embed_positions.weight",
        },
        prefixes=("encoder.", "model.encoder."),
    ),
}
