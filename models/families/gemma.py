"""Rows of Gemma: a scaled token table, and inputs of each layer."""

from dataclasses import replace

from preblock.models.families.decoders import decoder
from preblock.models.families.family import TIED, Family
from preblock.models.families.layer_kinds import FULL, SLIDING, alternating_kinds, head_widths
from preblock.models.families.named_steps import root_scale, token_step, weight_keys
from preblock.models.families.published_config import Config
from preblock.models.families.readings import GENAI, SGLANG_SCALES, SGLANG_TAKES_SCALED, TRANSFORMERS, Reading
from preblock.models.families.rotary import TYPES, Rotary, thetas_by_layer
from preblock.models.modules.per_layer_config import PerLayerConfig

_OPENVINO = Reading(
    engine="openvino-genai",
    versions="da1db86",
    scale="applied",
    source="src/cpp/src/visual_language/embedding_model.cpp: multiplies by scale_emb of config.json",
)


def _consumers(llama_cpp: Reading) -> tuple[Reading, ...]:
    """Gemma and Gemma 2: transformers and vLLM scaled given vectors in earlier versions."""
    return (
        Reading(engine=TRANSFORMERS, versions=">=5.4", scale="applied", source="5.4.0 and 5.24.0"),
        Reading(engine=TRANSFORMERS, versions="<5.4", scale="none", source="4.57.1 and 5.3.0"),
        Reading(engine="vllm", versions=">=0.18", scale="applied", source="0.18.0 and 0.33.0; pull request 36787"),
        Reading(engine="vllm", versions="<0.18", scale="none", source="0.17.1"),
        SGLANG_SCALES,
        llama_cpp,
        GENAI,
    )


_GEMMA3_CONSUMERS = (
    Reading(engine=TRANSFORMERS, versions=">=4.57", scale="applied", source="4.57.1, 5.4.0 and 5.24.0"),
    Reading(engine="vllm", versions=">=0.17", scale="applied", source="0.17.1, 0.18.0 and 0.33.0"),
    SGLANG_TAKES_SCALED,
    Reading(engine="llama.cpp", versions="569a009", scale="applied", source="src/models/gemma3.cpp"),
    GENAI,
    _OPENVINO,
)
_GEMMA3N_CONSUMERS = (_GEMMA3_CONSUMERS[0], _OPENVINO)


def _per_layer(c: Config, layers: int, part: str) -> PerLayerConfig:
    names = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    tokens, project, norm = (weight_keys(f"{part}{name}") for name in names)
    return PerLayerConfig(
        layers=c("num_hidden_layers", layers),
        width=c("hidden_size_per_layer_input", 256),
        rows=c("vocab_size_per_layer_input", 262144),
        eps=c("rms_norm_eps", 1e-6),
        weights=(tokens, project, norm),
    )


def _gemma4_layers(c: Config, part: str) -> PerLayerConfig | None:
    if c("hidden_size_per_layer_input", 256) == 0:
        return None
    config = _per_layer(c, 30, part)
    tokens = c("vocab_size", 262144)
    if config.rows != tokens:  # the library reads beyond a smaller table
        raise ValueError(f"vocab_size_per_layer_input: got {config.rows}, expected {tokens}, as vocab_size says")
    return config


def _ids_of_other_inputs(c: Config) -> list[int]:
    """Return the ids replaced by Gemma 4 and Gemma 4 Unified before their text part."""
    defaults = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
    found = (c.nullable(key, default) for key, default in defaults.items())
    return sorted({token for token in found if type(token) is int and 0 <= token < _vocabulary(c)})


def _ids_of_other_tables(c: Config) -> list[int]:
    """Return the ids of Gemma 3n with rows in the tables of its image and audio parts."""
    parts = {"vision_config": 262144, "audio_config": 262272}
    first = min(_part(c, key)("vocab_offset", default) for key, default in parts.items())
    return list(range(max(first, 0), _vocabulary(c)))


def _vocabulary(c: Config) -> int:
    size: int = _part(c, "text_config")("vocab_size", 262144)
    return size


def _part(c: Config, key: str) -> Config:
    values = c(key, {})
    if not isinstance(values, dict):
        raise ValueError(f"{key}: got {values!r}, expected an object")
    return Config(values)


_KINDS3N = alternating_kinds(35, None, 5)
_KINDS4 = alternating_kinds(30, None, 6, last_full=True)
_ROTARY3 = Rotary(
    heads=8,
    head_dim=256,
    thetas=thetas_by_layer(full=("rope_theta", 1_000_000.0), sliding=("rope_local_base_freq", 10000.0)),
    scaled=(FULL,),
    layers=alternating_kinds(26, "sliding_window_pattern", 6),
)
_ROTARY4 = Rotary(
    widths=head_widths(_KINDS4, width=256, full_width=512),
    thetas=thetas_by_layer(full=("rope_theta", 1_000_000.0), sliding=("rope_theta", 10000.0)),
    layers=_KINDS4,
    types=(*TYPES, "proportional"),
    default={
        FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
)


def _gemma(limit: int, rotary: Rotary, consumers: tuple[Reading, ...] | None, part: str = "") -> Family:
    return replace(
        decoder(limit, TIED, rotary),
        steps=lambda c: [token_step(f"{part}embed_tokens"), root_scale(c, cast=True)],
        consumers=consumers,
        lookup=lambda _: 2,
    )


def _gemma3n(part: str = "") -> Family:
    return replace(
        _gemma(32768, replace(_ROTARY3, layers=_KINDS3N), _GEMMA3N_CONSUMERS, part),
        per_layer=lambda c: _per_layer(c, 35, part),
        streams=lambda c: c("altup_num_inputs", 4),
    )


def _gemma4(part: str = "") -> Family:
    return replace(_gemma(131072, _ROTARY4, None, part), per_layer=lambda c: _gemma4_layers(c, part))


GEMMA: dict[str, Family] = {
    "gemma": _gemma(
        8192,
        Rotary(heads=16, head_dim=256),
        _consumers(Reading(engine="llama.cpp", versions="860ee92", scale="applied", source="src/models/gemma.cpp")),
    ),
    "gemma2": _gemma(
        8192,
        Rotary(heads=8, head_dim=256, strict=True),
        _consumers(Reading(engine="llama.cpp", versions="82234e0", scale="none", source="src/models/gemma2.cpp")),
    ),
    "gemma3_text": _gemma(131072, _ROTARY3, _GEMMA3_CONSUMERS),
    "gemma3n_text": _gemma3n(),
    "gemma3n/text": replace(_gemma3n("language_model."), sections=("text_config",), refused=_ids_of_other_tables),
    "gemma4_text": _gemma4(),
    "gemma4_unified_text": _gemma(262144, _ROTARY4, None),
    "gemma4_unified/text": replace(
        _gemma(262144, _ROTARY4, None, "language_model."), sections=("text_config",), refused=_ids_of_other_inputs
    ),
    "gemma4/text": replace(_gemma4("language_model."), sections=("text_config",), refused=_ids_of_other_inputs),
}
